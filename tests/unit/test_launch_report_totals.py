"""Totals of resumed runs, of sparse rows and of many pools: each value counts once and in full."""

import json

import pytest

from leeway.launch.report.charts import DASH, figures
from leeway.launch.report.data import collect
from leeway.launch.report.page import POOL_COLUMNS, pool_rows, render
from tests.unit.report_run import START_S, make_run, row


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "sums")


def test_a_run_that_failed_and_was_resumed_to_its_end_is_finished(run):
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    events[1:1] = [
        {"time_s": START_S + 1, "kind": "interrupt", "text": "finishing the step"},
        {"time_s": START_S + 2, "kind": "failed", "text": "stage.0 ran out of memory"},
        {"time_s": START_S + 3, "kind": "resumed", "text": "the run resumes from the checkpoint of step 20"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    data = collect(run)
    assert (data.ended, data.failed) == ("finished", "")
    assert "failed after" not in render(data)


def test_steps_without_a_row_count(run):
    rows = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(rows[9::10]))
    assert len(collect(run).metrics.of("loss")) == 4
    assert "40 steps, trained on 40,000 completion tokens" in render(collect(run))
    run.metrics.write_text("")
    assert "40 steps, trained on 40,000 completion tokens" in render(collect(run))


def test_the_table_of_pools_has_means_and_the_last_value_of_counts(run):
    rows = [
        row(step, START_S, **{"pool/actors/tokens_per_s": 100.0 * step, "pool/actors/preempted": step})
        for step in range(1, 4)
    ]
    run.metrics.write_text("".join(json.dumps(each) + "\n" for each in rows))
    ((name, cells),) = pool_rows(collect(run))
    table = dict(zip(["actors", "precision", *POOL_COLUMNS], cells, strict=True))
    assert (name, table["precision"], table["tokens_per_s"], table["preempted"]) == ("actors", "float32", "200", "3")
    assert table["slots_used"] == DASH


def test_mismatches_of_pools_have_a_log_axis_and_undrawn_pools_are_named(run):
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
