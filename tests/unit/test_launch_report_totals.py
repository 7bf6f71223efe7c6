"""The figures of a run that was gone on with, logged now and then, or of many pools: each counts once and in full."""

import json

import msgspec
import pytest

from launch.observe.status import PollResult
from launch.observe.trace import Event, Trace
from launch.report.charts import figures
from launch.report.data import Metrics, Series, collect
from launch.report.page import pool_rows, render, tiles
from launch.report.timeline import read_timeline
from tests.unit.report_run import START_S, make_run, report, row

NIGHT_S = 30_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "sums")


def command(path, clock, steps, *, is_killed: bool = False) -> None:
    """A command that takes steps of a second, in each of which the actor generates for half of it."""
    timeline = Trace(path, clock)
    timeline.phase("starting Ray")
    clock.now_s += 20
    timeline.phase("training")
    for number, step in enumerate(steps):
        at_s = clock.now_s
        clock.now_s += 1
        busy = [(at_s, at_s + 0.5)]
        actor = report("actor-0", num_tokens=100 * (number + 1), busy=busy)
        timeline.take_in(PollResult(actors=[actor]), [row(step, at_s)])
    if is_killed:
        for span in timeline._generating.values():
            timeline._write(span)
        timeline._file.close()
        return
    timeline.phase("exporting the model")
    clock.now_s += 5
    timeline.close()


def test_a_run_that_failed_and_was_gone_on_with_to_its_end_is_finished(run):
    told = [json.loads(line) for line in run.events.read_text().splitlines()]
    told[1:1] = [
        {"time_s": START_S + 1, "kind": "interrupt", "text": "finishing the step"},
        {"time_s": START_S + 2, "kind": "failed", "text": "stage.0 ran out of memory"},
        {"time_s": START_S + 3, "kind": "resumed", "text": "the run goes on from the checkpoint of step 20"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in told))
    data = collect(run)
    assert (data.ended, data.events.failed) == ("finished", "")
    assert "failed after" not in render(data)


def test_a_step_that_is_taken_again_counts_its_tokens_and_seconds_once():
    metrics = Metrics()
    for step in (1, 2, 3, 4, 3, 4, 5):
        metrics.take_in(row(step, START_S + step))
    assert metrics.total("batch/completion_tokens") == 5 * 1000
    assert metrics.seconds["wait_for_batch"] == pytest.approx(5 * 0.4)
    assert metrics.seconds["other"] == pytest.approx(5 * 0.1)
    assert metrics.mean("reward/mean") == pytest.approx(3 / 50)


def test_steps_that_have_no_row_count_too(run):
    rows = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(rows[9::10]))
    assert len(collect(run).metrics.of("loss")) == 4
    assert "40 steps, 40,000 completion tokens trained" in render(collect(run))
    run.metrics.write_text("")
    assert "40 steps, 40,000 completion tokens trained" in render(collect(run))


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_night_between_two_commands_is_no_training_time(tmp_path, is_killed):
    clock = Clock()
    command(tmp_path / "t", clock, range(1, 41), is_killed=is_killed)
    clock.now_s += NIGHT_S
    command(tmp_path / "t", clock, range(41, 81))
    lanes = read_timeline(tmp_path / "t")
    assert lanes.training_s == pytest.approx(80, abs=1)
    assert lanes.share("busy_s") == pytest.approx(0.5, abs=0.02)
    actor = lanes.actors["actor-0"]
    assert actor.num_tokens == 2 * 4000
    assert actor.tokens_in_training == pytest.approx(8000, rel=0.02)


def test_what_is_generated_outside_of_training_is_not_in_its_rate(run):
    before = collect(run)
    args = {"num_tokens": 10**6}
    ts = round(1e6 * (START_S + 5))
    event = Event(
        ph="X", name="generate", pid=1000, tid=4, ts=ts, dur=2_000_000, cat="generate", args=args, who="actor-0"
    )
    with run.timeline.open("ab") as file:
        file.write(msgspec.json.encode(event) + b",\n")
    after = collect(run)
    cells = [{row.name: row.cells for row in pool_rows(data)}["actor-0"] for data in (before, after)]
    assert int(cells[1][3].replace(",", "")) - int(cells[0][3].replace(",", "")) == 10**6
    assert cells[0][4:6] == cells[1][4:6]


def test_the_reward_of_a_long_run_is_the_mean_of_its_steps_and_not_of_its_spikes(run):
    rows = [
        row(step, START_S + step, **{"reward/mean": (0.2 if step <= 3000 else 0.6) + (step % 100 == 0)})
        for step in range(1, 6001)
    ]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    (reward,) = [tile for tile in tiles(collect(run)) if tile.name == "Reward"]
    assert reward.value == "0.210 → 0.610"


def test_the_mean_of_a_curve_is_right_after_a_step_back():
    series = Series()
    for x in range(16):
        series.add(x, float(x))
    series.go_back(12)
    assert len(series.points) == 12
    assert series.mean == pytest.approx(sum(range(12)) / 12)


def test_mismatches_of_pools_are_on_a_logarithmic_axis_and_pools_without_a_curve_are_named(run):
    rows = []
    for step in range(1, 20):
        pools = {f"pool/p{number}/mismatch_lag0_abs": 10.0**-number for number in range(8)}
        pools |= {f"pool/p{number}/lag_mean": 1.0 for number in range(8)}
        rows.append(row(step, START_S + step, **pools))
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = {figure.chart.title: figure for figure in figures(collect(run))}
    assert found["Mismatch by pool"].plot["log"]
    assert not found["Lag by pool"].plot["log"]
    assert [each.name for each in found["Lag by pool"].legend] == ["actors", "p0", "p1", "p2", "p3", "p4"]
    assert found["Lag by pool"].note == "Not drawn: p5, p6, p7."
