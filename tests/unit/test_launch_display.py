"""The display of the launcher: a live view on a terminal, otherwise a line at intervals."""

import logging
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

from leeway.launch.observe import view
from leeway.launch.observe.status import Accuracy, read_status
from leeway.launch.observe.view import QUIET_S, Display
from leeway.launch.text import share_of
from tests.unit.test_launch_top import RECORDED


@pytest.fixture
def display(capsys, tmp_path):
    """A plain display with a fake clock; `display(snapshot, after_s)` returns its output."""
    now_s = 0.0
    shown: list[Display] = []  # created in the test, when stdout is already captured

    def update(snapshot, after_s: float) -> str:
        nonlocal now_s
        if not shown:
            shown.append(Display(SimpleNamespace(root=tmp_path, name="x"), clock=lambda: now_s))
        now_s += after_s
        shown[0].update(snapshot)
        return capsys.readouterr().out

    return update


def snapshot(step: int, **fields):
    recorded = read_status(RECORDED / "training.json")
    learner = msgspec.structs.replace(recorded.learner, waits_for=fields.pop("learner", ""))
    return msgspec.structs.replace(recorded, step=step, learner=learner, **fields)


def test_a_line_is_printed_every_few_seconds_while_steps_arrive(display):
    assert "step 1/40" in display(snapshot(1), 5.0)
    assert display(snapshot(2), 2.0) == ""
    assert "step 3/40" in display(snapshot(3), 3.0)


def test_a_stalled_run_displays_its_waits(display):
    display(snapshot(1), 5.0)
    waits = ["the learner waits for the batch of step 2: 3 groups of actor-0", "actor-0 waits for policy 0.9"]
    output = display(snapshot(1, learner="the batch", waits=waits), 5.0)
    assert all(sentence in output for sentence in waits)
    assert "; the learner computes" not in output


def test_a_stalled_run_without_waits_displays_that_the_learner_computes(display):
    display(snapshot(1), 5.0)
    assert display(snapshot(1), QUIET_S - 1) == ""
    assert "the learner computes step 2" in display(snapshot(1), 1.0)


def test_a_long_phase_is_displayed_with_the_processes_not_ready(display):
    waits = ["actor.0 is starting, for 20 s; see actor.0.log"]
    output = display(snapshot(0, phase="starting Ray", waits=waits), QUIET_S)
    assert "starting Ray, for " in output
    assert waits[0] in output


def test_control_characters_in_reports_are_escaped(display):
    output = display(snapshot(0, phase="starting", waits=["actor.0 says \x1b[2J"]), QUIET_S)
    assert "\x1b" not in output
    assert "actor.0 says \\x1b[2J" in output


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (30, 6)])
def test_a_terminal_of_any_size_shows_the_view_of_top(capsys, tmp_path, monkeypatch, columns, rows):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Display(SimpleNamespace(root=tmp_path, name="x")) as display:
        display.update(snapshot(7))
    assert "step 7/40" in capsys.readouterr().out


SUMMARY = {
    "trained_trajectories": 40, "num_steps": 10, "lag_mean": 1.0, "lag_max": 2, "max_lag": 4, "overlap_frac": 0.5,
    "ledger_gap": 0, "wall_s": 60.0,
}  # fmt: skip
REASONS = {"lease expired": 2, "reward failed: exact: \x1b[2J": 30, "fenced": 1, "generation failed: X": 9, "other": 1}
FAILED = (
    "43 of 1,000 samples failed (4.3%): reward failed: exact: \\x1b[2J (30); generation failed: X (9); "
    "lease expired (2); 2 other reasons (2)"
)


@pytest.mark.parametrize("reasons", [REASONS, {}])
def test_the_final_lines_state_the_share_of_failed_samples_and_the_reasons(capsys, tmp_path, reasons):
    accuracy = Accuracy(versions="0.0", greedy=0.5, sampled=0.4, num_problems=64)
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    display = Display(SimpleNamespace(root=tmp_path, name="x"))
    display.finish(None, accuracy, {**SUMMARY, "ledger": ledger, "failed_by_reason": reasons})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "held-out accuracy over 64 problems: greedy - -> 0.500, sampled - -> 0.400"
    assert [line for line in lines if "failed" in line] == [FAILED][: len(reasons)]


@pytest.mark.parametrize("reasons", [REASONS, {}])
def test_a_failed_run_states_its_failed_samples(capsys, tmp_path, reasons):
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    buffer = msgspec.structs.replace(snapshot(1).buffer, ledger=ledger, failed_by_reason=reasons)
    display = Display(SimpleNamespace(root=tmp_path, name="x"))
    display.update(snapshot(1, buffer=buffer))
    display.fail("no group is ready")
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if "failed" in line] == [FAILED][: len(reasons)]
    assert captured.err == "leeway: no group is ready\n"


@pytest.mark.parametrize(
    ("failed", "issued", "expected"),
    [(0, 9, "0.0%"), (1, 10**6, "under 0.1%"), (999_999, 10**6, "over 99.9%"), (9, 9, "100.0%")],
)
def test_a_share_is_never_rounded_to_0_or_100_percent(failed, issued, expected):
    assert share_of(failed, issued) == expected


@pytest.mark.parametrize("mode", ["plain", "live"])
@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_closed_output_ends_the_display_but_not_the_run(tmp_path, monkeypatch, caplog, opened, mode):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(view, "PLAIN_INTERVAL_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(view.log, "handlers", [logging.lastResort])  # writes to the stream of the live display
    reader, writer = opened()
    with open(writer, "w") as screen, open(os.dup(screen.fileno()), "w") as errors:
        screen.isatty = lambda: mode == "live"
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", errors)
        with Display(SimpleNamespace(root=tmp_path, name="x")) as display:
            os.close(reader)
            for step in range(1, 4):
                display.update(snapshot(step))
                display.log("a restart")
            display.last_line("report: x")
            display.fail("no actor is left")
        print("Python flushes the rest", flush=True)
    assert {record.message.split(" (")[0] for record in caplog.records} == {
        "the output of the launcher can no longer be written"
    }
