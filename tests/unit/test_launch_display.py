"""The display of the launcher: a redrawn progress line on a terminal, and a new line at intervals elsewhere."""

import logging
import os
import re
import sys
from types import SimpleNamespace

import msgspec
import pytest

from leeway.launch.observe import display as module
from leeway.launch.observe.display import PLAIN_INTERVAL_S, Display
from leeway.launch.observe.status import read_status
from leeway.launch.text import share_of
from tests.unit.test_launch_top import RECORDED


def folder_at(path):
    """Return a fake run folder with the fields that the display reads."""
    return SimpleNamespace(root=path, name="x", export=path / "model")


@pytest.fixture
def display(capsys, tmp_path):
    """A plain display with a fake clock; `display(snapshot, after_s)` returns its output."""
    now_s = 0.0
    # The first call creates the display, because pytest replaces stdout after it sets up the fixtures.
    shown: list[Display] = []

    def update(snapshot, after_s: float) -> str:
        nonlocal now_s
        if not shown:
            shown.append(Display(folder_at(tmp_path), clock=lambda: now_s))
        now_s += after_s
        shown[0].update(snapshot)
        return capsys.readouterr().out

    return update


def snapshot(step: int, **fields):
    recorded = read_status(RECORDED / "training.json")
    learner = msgspec.structs.replace(recorded.learner, waits_for=fields.pop("learner", ""))
    return msgspec.structs.replace(recorded, step=step, learner=learner, **fields)


def test_a_line_is_printed_every_10_s_while_steps_arrive(display):
    assert "step 1/40" in display(snapshot(1), 10.0)
    assert display(snapshot(2), 9.0) == ""
    assert "step 3/40" in display(snapshot(3), 1.0)


def test_a_line_has_the_time_left_at_the_mean_pace_of_this_launch(display):
    written_s = snapshot(0).written_s
    assert "left" not in display(snapshot(4, written_s=written_s), 10.0)  # the run resumed at step 4
    assert "step 10/40, 1:00 left  " in display(snapshot(10, written_s=written_s + 12), 10.0)
    assert "left" not in display(snapshot(40, written_s=written_s + 99, phase="exporting the model"), 10.0)


def test_a_stalled_run_displays_its_waits(display):
    display(snapshot(1), 10.0)
    waits = ["the learner waits for the batch of step 2: 3 groups of actor-0", "actor-0 waits for policy 0.9"]
    output = display(snapshot(1, learner="the batch", waits=waits), 10.0)
    assert all(sentence in output for sentence in waits)
    assert "; the learner computes" not in output


def test_a_stalled_run_without_waits_displays_that_the_learner_computes(display):
    display(snapshot(1), 10.0)
    assert display(snapshot(1), PLAIN_INTERVAL_S - 1) == ""
    assert "the learner computes step 2" in display(snapshot(1), 1.0)


def test_a_long_phase_is_displayed_with_the_processes_not_ready(display):
    waits = ["actor.0 is starting, for 20 s; see actor.0.log"]
    output = display(snapshot(0, phase="starting Ray", waits=waits), PLAIN_INTERVAL_S)
    assert "starting Ray, for " in output
    assert waits[0] in output


def test_control_characters_in_reports_are_escaped(display):
    output = display(snapshot(0, phase="starting", waits=["actor.0 says \x1b[2J"]), PLAIN_INTERVAL_S)
    assert "\x1b" not in output
    assert "actor.0 says \\x1b[2J" in output


def shown_at(columns: int, capsys, monkeypatch, tmp_path, *snapshots) -> str:
    """Return the progress line on a terminal of a width, without control sequences."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Display(folder_at(tmp_path)) as display:
        for each in snapshots:
            display.update(each)
    written = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    return [line for line in re.split(r"[\r\n]+", written) if line.strip()][-1]


@pytest.mark.parametrize(("columns", "last"), [(200, "the learner waits"), (80, "generated 410 tok/s"), (30, "left")])
def test_a_terminal_shows_one_line_with_the_phrases_that_fit(capsys, tmp_path, monkeypatch, columns, last):
    first = snapshot(1)
    fields = {"generated_tokens_per_s": 410.0, "lag_mean": 1.2, "max_lag": 4, "waits": ["the learner waits"]}
    later = snapshot(7, written_s=first.written_s + 12, started_s=first.written_s - 60, **fields)
    shown = shown_at(columns, capsys, monkeypatch, tmp_path, first, later)
    assert shown.startswith("1:12  step 7/40, 1:06 left")
    assert shown.rstrip().endswith(last)
    assert len(shown) <= columns


def test_the_progress_line_names_the_phase_of_a_start(capsys, tmp_path, monkeypatch):
    starting = snapshot(0, phase="loading vLLM in 2 actors", waits=["actor.0 has been starting for 12 s"])
    starting.phase_since_s = starting.written_s - 12
    shown = shown_at(120, capsys, monkeypatch, tmp_path, starting)
    assert shown.rstrip().endswith("loading vLLM in 2 actors, for 0:12")


def test_control_characters_do_not_reach_the_terminal(capsys, tmp_path, monkeypatch):
    assert "actor.0  [2J" in shown_at(200, capsys, monkeypatch, tmp_path, snapshot(1, waits=["actor.0 \x1b[2J waits"]))


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
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    display = Display(folder_at(tmp_path))
    display.finish({**SUMMARY, "ledger": ledger, "failed_by_reason": reasons})
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "failed" in line] == [FAILED][: len(reasons)]


@pytest.mark.parametrize("reasons", [REASONS, {}])
def test_a_failed_run_states_its_failed_samples(capsys, tmp_path, reasons):
    ledger = {"issued": 1000, "failed": sum(reasons.values())}
    buffer = msgspec.structs.replace(snapshot(1).buffer, ledger=ledger, failed_by_reason=reasons)
    display = Display(folder_at(tmp_path))
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
    monkeypatch.setattr(module, "PLAIN_INTERVAL_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    # This handler writes to stderr, which the test closes too.
    monkeypatch.setattr(module.log, "handlers", [logging.lastResort])
    reader, writer = opened()
    with open(writer, "w") as screen, open(os.dup(screen.fileno()), "w") as errors:
        screen.isatty = lambda: mode == "live"
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", errors)
        with Display(folder_at(tmp_path)) as display:
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
