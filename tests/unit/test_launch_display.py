"""The display of the command: where it is no terminal, a line now and then, and never silence."""

import logging
import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

from launch.observe import view
from launch.observe.status import Accuracy, read_status
from launch.observe.view import QUIET_S, Display
from launch.text import share_of
from tests.unit.test_launch_top import RECORDED


@pytest.fixture
def display(capsys, tmp_path):
    """A plain display under a clock of its own; `says(snapshot, after_s)` is what it prints."""
    now_s = 0.0
    shown: list[Display] = []  # made in the test itself, for the standard output of now is another one

    def says(snapshot, after_s: float) -> str:
        nonlocal now_s
        if not shown:
            shown.append(Display(SimpleNamespace(root=tmp_path, name="x"), clock=lambda: now_s))
        now_s += after_s
        shown[0].update(snapshot)
        return capsys.readouterr().out

    return says


def snapshot(step: int, **fields):
    recorded = read_status(RECORDED / "training.json")
    learner = msgspec.structs.replace(recorded.learner, waits_for=fields.pop("learner", ""))
    return msgspec.structs.replace(recorded, step=step, learner=learner, **fields)


def test_a_line_comes_every_few_seconds_while_steps_come(display):
    assert "step 1/40" in display(snapshot(1), 5.0)
    assert display(snapshot(2), 2.0) == ""
    assert "step 3/40" in display(snapshot(3), 3.0)


def test_a_run_where_nothing_happens_says_why(display):
    display(snapshot(1), 5.0)
    waits = ["the learner waits for the batch of step 2: 3 groups of actor-0", "actor-0 waits for policy 0.9"]
    said = display(snapshot(1, learner="the batch", waits=waits), 5.0)
    assert all(sentence in said for sentence in waits)
    assert "; the learner computes" not in said


def test_a_run_where_nothing_happens_and_nobody_waits_says_who_computes(display):
    display(snapshot(1), 5.0)
    assert display(snapshot(1), QUIET_S - 1) == ""
    assert "the learner computes step 2" in display(snapshot(1), 1.0)


def test_a_phase_that_takes_long_says_what_it_is_and_who_is_not_ready(display):
    waits = ["actor.0 is starting, for 20 s; see actor.0.log"]
    said = display(snapshot(0, phase="starting Ray", waits=waits), QUIET_S)
    assert "starting Ray, for " in said
    assert waits[0] in said


def test_what_somebody_else_has_said_moves_no_cursor(display):
    said = display(snapshot(0, phase="starting", waits=["actor.0 says \x1b[2J"]), QUIET_S)
    assert "\x1b" not in said
    assert "actor.0 says \\x1b[2J" in said


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (30, 6)])
def test_on_a_terminal_it_is_the_view_of_top_and_no_screen_is_too_narrow(capsys, tmp_path, monkeypatch, columns, rows):
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
def test_the_last_words_of_a_run_say_which_share_of_its_samples_failed_and_why(capsys, tmp_path, reasons):
    accuracy = Accuracy(versions="0.0", greedy=0.5, sampled=0.4, num_problems=64)
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    display = Display(SimpleNamespace(root=tmp_path, name="x"))
    display.finish(None, accuracy, {**SUMMARY, "ledger": ledger, "failed_by_reason": reasons})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "held-out accuracy over 64 problems: greedy - -> 0.500, sampled - -> 0.400"
    assert [line for line in lines if "failed" in line] == [FAILED][: len(reasons)]


@pytest.mark.parametrize("reasons", [REASONS, {}])
def test_a_run_that_fails_says_it_too(capsys, tmp_path, reasons):
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    buffer = msgspec.structs.replace(snapshot(1).buffer, ledger=ledger, failed_by_reason=reasons)
    display = Display(SimpleNamespace(root=tmp_path, name="x"))
    display.update(snapshot(1, buffer=buffer))
    display.fail("no group is ready")
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if "failed" in line] == [FAILED][: len(reasons)]
    assert said.err == "leeway: no group is ready\n"


@pytest.mark.parametrize(
    ("failed", "issued", "said"),
    [(0, 9, "0.0%"), (1, 10**6, "under 0.1%"), (999_999, 10**6, "over 99.9%"), (9, 9, "100.0%")],
)
def test_a_share_is_never_rounded_to_none_or_all(failed, issued, said):
    assert share_of(failed, issued) == said


@pytest.mark.parametrize("wish", ["plain", "live"])
@pytest.mark.parametrize("opened", [os.pipe, os.openpty])
def test_a_screen_that_goes_away_ends_the_display_and_not_the_run(tmp_path, monkeypatch, caplog, opened, wish):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(view, "PLAIN_INTERVAL_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(view.log, "handlers", [logging.lastResort])  # writes where the live display writes
    reader, writer = opened()
    with open(writer, "w") as screen, open(os.dup(screen.fileno()), "w") as errors:
        screen.isatty = lambda: wish == "live"
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", errors)
        with Display(SimpleNamespace(root=tmp_path, name="x")) as display:
            os.close(reader)
            for step in range(1, 4):
                display.update(snapshot(step))
                display.say("a restart")
            display.last_line("report: x")
            display.fail("no actor is left")
        print("Python itself flushes what is left", flush=True)
    assert {record.message.split(" (")[0] for record in caplog.records} == {
        "the output of the command can no longer be written"
    }
