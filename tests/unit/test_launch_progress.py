"""The numbers that the display, the metrics and the summary share."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from benchmarks.lib.runs import joined

from leeway.actors.report import ActorReport, EngineReport, WeightUpdate
from leeway.buffer.lengths import LengthFidelity
from leeway.common.staleness import PolicyVersion
from leeway.launch.config import Config
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.observer import Observer
from leeway.launch.observe.sinks import Tracker
from leeway.launch.observe.status import Accuracy, PollResult
from leeway.launch.observe.totals import ActorTotals, Rate
from leeway.launch.run_folder import RunFolder
from leeway.planning.costs import LeastSquares
from tests.unit.made_up_run import report as made_up_report
from tests.unit.made_up_run import status as made_up_status
from tests.unit.made_up_run import write_rows


def report(name: str, num_tokens: int, pause_s: list[float]) -> ActorReport:
    updates = [WeightUpdate(0.0, seconds, seconds / 2, (0, 1)) for seconds in pause_s]
    return made_up_report(name, num_tokens=num_tokens, updates=updates)


def test_the_step_time_of_an_engine_is_measured_over_the_last_seconds():
    totals, sums, reports = ActorTotals(), LeastSquares(4), [made_up_report("actor-0")]
    totals.update(0.0, reports, ["actor-0"])
    assert totals.engines("actors", reports).step_s is None
    for now_s, took_s in ((1.0, 0.5), (20.0, 0.125), (21.0, 0.375)):
        sums.add((1.0, 2.0, 3.0, 4.0), took_s)
        reports = [made_up_report("actor-0", engine=EngineReport(moments=tuple(sums.as_list())))]
        totals.update(now_s, reports, ["actor-0"])
    assert totals.engines("actors", reports).step_s == pytest.approx(0.25)


def step_row(step: int, num_tokens: int, lag: float) -> dict:
    row = {"step": step, "version": step, "started_s": 10.0 * step, "finished_s": 10.0 * step + 4}
    return row | {
        "skipped": False,
        "batch/completion_tokens": num_tokens,
        "lag/token_mean": lag,
        "lag/token_max": lag,
        "buffer/ledger_gap": 0,
    }


@pytest.fixture
def observer(config, tmp_path):
    return Observer(SimpleNamespace(config=config, folder=RunFolder(tmp_path), run_id="x"))


@pytest.fixture
def config(tmp_path):
    return Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
            "algorithm": {"type": "trajectory_balance"},
            "tracking": {"to": []},
        }
    )


def test_mean_lag_is_weighted_by_completion_tokens_not_by_steps(observer):
    observer.ingest(PollResult(steps=[step_row(1, 100, 0.0), step_row(2, 300, 4.0)]))
    observer.ingest(PollResult(steps=[{**step_row(3, 100, 9.0), "skipped": True}]))
    written = observer.polled()
    assert (written.lag_mean, written.lag_max) == (pytest.approx(3.0), 4)


def test_a_repeated_step_counts_once_with_its_last_values(observer, tmp_path):
    observer.ingest(PollResult(steps=[step_row(1, 100, 0.0), step_row(2, 300, 4.0), step_row(3, 600, 4.0)]))
    write_rows(RunFolder(tmp_path), step_row(1, 100, 0.0))
    observer.ingest(PollResult(resumed_at=1, resumed_version=1))
    written = observer.polled()
    assert (written.step, written.version, written.lag_mean) == (1, 1, 0.0)
    rows = observer.ingest(PollResult(steps=[step_row(2, 100, 2.0)]))
    assert [row["step"] for row in rows] == [2]
    written = observer.polled()
    assert written.lag_mean == pytest.approx(1.0)
    assert (written.learner.restarts, written.steps_redone, written.trained_tokens) == (1, 2, 200)


def test_the_summary_is_kept_if_a_restarted_learner_has_no_step_left(observer):
    observer.ingest(PollResult(steps=[step_row(step, 100, 0.0) for step in range(1, 8)]))
    observer.ingest(PollResult(resumed_at=10, resumed_version=20))  # resumes after the last step
    no_answers = Accuracy(versions="0", greedy=None, sampled=None, num_problems=0)
    status = SimpleNamespace(
        ledger={"gap": 0, "trained": 80},
        fidelity=LengthFidelity(),
        num_damaged=0,
        failed_by_reason={},
        quarantined_by_reason={},
    )
    summary = observer.summary(no_answers, None, status)
    assert (summary["num_steps"], summary["version"]) == (10, 20)
    assert (summary["learner_restarts"], summary["steps_redone"]) == (1, 0)
    assert summary["quarantined_actors"] == []


def test_acknowledged_samples_are_counted_over_all_processes_of_an_actor(observer):
    for committed, duplicate in ((5, 0), (7, 1), (2, 0)):
        outcomes = {"committed": committed, "duplicate": duplicate, "late": 9, "quarantined": 9}
        current = dataclasses.replace(report("actor-0", 0, []), num_outcomes=outcomes)
        observer.ingest(PollResult(actors=[current]))
    assert observer.actor_totals.total("acknowledged", "actor", "actor-0") == 10


def test_a_restarted_actor_keeps_its_count_of_generated_tokens(observer):
    for num_tokens in (50, 120, 30):
        observer.ingest(PollResult(actors=[report("actor-0", num_tokens, [])]))
    assert observer.actor_totals.total("tokens") == 150


def test_every_pause_is_in_exactly_one_row(observer):
    observer.ingest(PollResult(actors=[report("actor-0", 0, [0.2])]))
    observer.ingest(PollResult(actors=[report("actor-0", 0, [0.4])]))
    rows = observer.ingest(PollResult(steps=[step_row(1, 1, 0.0), step_row(2, 1, 0.0)]))
    assert [row["time/weight_pause"] for row in rows] == [pytest.approx(0.3), None]


def test_a_row_has_the_progress_of_the_weights(observer):
    status = SimpleNamespace(newest=(0, 7), ledger={"gap": 0})
    fresh = dataclasses.replace(report("actor-0", 0, []), version=(0, 7))
    stale = dataclasses.replace(report("actor-1", 0, []), version=(0, 4), refused="0.5: cut")
    working = frozenset({"actor-0", "actor-1"})
    polls = [
        PollResult(steps=[step_row(1, 1, 0.0)], actors=[fresh, stale], working=working, status=status),
        PollResult(steps=[step_row(2, 1, 0.0)], working=frozenset({"actor-0"}), quarantined=("actor-1",)),
        PollResult(steps=[step_row(3, 1, 0.0)], working=frozenset()),
    ]
    rows = [row for poll in polls for row in observer.ingest(poll)]
    names = ("weights/published", "weights/behind", "weights/refused")
    assert [tuple(row[name] for name in names) for row in rows] == [(7, 3, 1), (7, 0, 0), (7, None, 0)]
    summary = observer.summary(
        Accuracy(versions="0", greedy=None, sampled=None, num_problems=0), None, made_up_status()
    )
    assert summary["quarantined_actors"] == ["actor-1"]


@pytest.mark.parametrize("step_s", [2.0, 30.0])
def test_trained_tokens_per_second_are_those_of_the_newest_step_until_a_stall(config, tmp_path, step_s):
    now = [1000.0]
    plan = SimpleNamespace(config=config, folder=RunFolder(tmp_path), run_id="x")
    observer = Observer(plan, clock=lambda: now[0])
    assert observer.polled().learner.tokens_per_s == 0.0
    times = {"time/step": 0.75 * step_s, "time/wait_for_batch": 0.25 * step_s}
    observer.ingest(PollResult(steps=[step_row(1, 100, 0.0) | times | {"perf/trained_tokens_per_s": 100 / step_s}]))
    now[0] += step_s
    assert observer.polled().learner.tokens_per_s == 100 / step_s
    now[0] += 99 * step_s
    assert observer.polled().learner.tokens_per_s == pytest.approx(1 / step_s)


def test_a_rate_needs_two_points():
    rate = Rate(window_s=10.0)
    rate.update(0.0, {"tokens": 0.0})
    assert rate.value("tokens") == 0.0
    rate.update(2.0, {"tokens": 10.0})
    assert rate.value("tokens") == 5.0


def test_time_before_the_launch_does_not_count_as_a_wait_of_the_actors(config, tmp_path):
    now = [50_000.0]
    plan = SimpleNamespace(config=config, folder=RunFolder(tmp_path), run_id="x")
    observer = Observer(plan, started_s=now[0] - 36_000.0, clock=lambda: now[0])
    waiting = dataclasses.replace(report("actor-0", 0, []), waiting="waiting for policy 2.7")
    observer.ingest(PollResult(actors=[waiting]))
    now[0] += 0.5
    (row,) = observer.ingest(PollResult(actors=[waiting], steps=[step_row(1, 1, 0.0)]))
    assert row["time/wait_for_policy"] == pytest.approx(0.5)


class WorkingTracker:
    """Fake of an external tracker."""

    name = "wandb"

    def failure(self, deadline=None) -> str:
        return ""

    def kill(self) -> None: ...


def logged(folder: RunFolder) -> list[tuple[dict, int]]:
    """Return the rows and the steps that trackers received."""
    return [call[1:] for call in read(folder.calls) if isinstance(call, list)]


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_trackers_keep_the_first_row_of_a_repeated_step_and_files_keep_the_newest(config, tmp_path):
    folder = RunFolder(tmp_path)
    with Tracker(config, folder) as tracker:
        tracker._trackers = [WorkingTracker()]
        for step, restarts in ((2, 0), (4, 0), (6, 0), (4, 1), (6, 1), (8, 1)):
            tracker.step({"step": step, "restarts": restarts, "loss": 1.0, "actors/waiting": restarts})
        assert [step for _, step in logged(folder)] == [2, 4, 6, 6, 8]
    assert read(folder.actors)[-1] == {"step": 8, "actors/waiting": 1}, "the learner writes the other metrics"
    write_rows(folder, *({"step": step, "loss": 1.0} for step in (2, 4, 6, 8, 10)))
    assert [(row["step"], row.get("actors/waiting")) for row in joined(folder)] == [
        *((2, 0), (4, 1), (6, 1), (8, 1), (10, None)),
    ]
    with Tracker(config, folder, last_step=8) as tracker:
        tracker._trackers = [WorkingTracker()]
        for step in (7, 8):
            tracker.step({"step": step})
        assert [step for _, step in logged(folder)] == [8]


def test_rows_are_read_as_they_arrive_and_a_partial_line_is_left(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    assert [*rows.read()] == []
    path.write_text('{"step": 1}\n{"step"')
    assert [*rows.read()] == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert [*rows.read()] == [{"step": 2}]
    assert [*Rows(path, at_end=True).read()] == []
    path.write_text('{"step": 1}\n{"step"\n')
    with pytest.raises(ValueError, match=r"rows.jsonl has a line that is not JSON"):
        [*Rows(path).read()]


def accuracy(greedy: float, version: int = 0, start: int = 0) -> Accuracy:
    policy = str(PolicyVersion(start, version))
    return Accuracy(
        versions=policy, policy_version=version, start=start, greedy=greedy, sampled=None, num_problems=8, num_failed=1
    )


def test_an_evaluation_after_a_rollback_reaches_trackers_at_their_newest_step(config, tmp_path):
    with Tracker(config, RunFolder(tmp_path)) as tracker:
        tracker._trackers = [WorkingTracker()]
        for step in (2, 4, 2):
            tracker.step({"step": step, "loss": 1.0})
        tracker.evaluated(accuracy(0.5), 3, 1.0)
        tracker.evaluated(accuracy(0.6), 5, 2.0)
        rows = logged(RunFolder(tmp_path))
    assert [step for _, step in rows] == [2, 4, 4, 5]
    assert [row["eval/accuracy_greedy"] for row, _ in rows[2:]] == [0.5, 0.6]
    assert rows[2][0]["eval/policy_version"] == 0


def test_an_evaluation_is_a_row_of_numbers_in_its_own_file(config, tmp_path):
    folder = RunFolder(tmp_path)
    with Tracker(config, folder) as tracker:
        tracker.evaluated(accuracy(0.5), 0, 1.5)
        tracker.evaluated(accuracy(float("nan"), version=10, start=3), 7, 9.25)
    first, second = read(folder.evaluations)
    assert first.keys() == second.keys()
    assert all(value is None or type(value) in (int, float) for row in (first, second) for value in row.values())
    names = ("step", "wall_s", "policy_version", "start", "accuracy_greedy", "num_problems", "num_failed")
    assert [second[name] for name in names] == [7, 9.25, 10, 3, None, 8, 1]
    assert not folder.metrics.read_bytes()


def test_values_that_are_not_finite_are_null(config, tmp_path):
    folder = RunFolder(tmp_path)
    with Tracker(config, folder) as tracker:
        tracker.step({"step": 1, "overlap/frac": float("nan"), "actors/waiting": 2})
    assert read(folder.actors) == [{"step": 1, "overlap/frac": None, "actors/waiting": 2}]
