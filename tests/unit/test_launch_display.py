"""The display of the command: where it is no terminal, a line now and then, and never silence."""

import os
import sys
from types import SimpleNamespace

import msgspec
import pytest

from launch.config import TrackingConfig
from launch.observe import display as display_module
from launch.observe.display import QUIET_S, Display
from launch.observe.status import read_status
from tests.unit.test_launch_top import RECORDED


@pytest.fixture
def display(capsys, tmp_path):
    """A plain display under a clock of its own; `says(snapshot, after_s)` is what it prints."""
    now_s = 0.0
    config = SimpleNamespace(tracking=TrackingConfig(display="plain"))
    shown: list[Display] = []  # made in the test itself, for the standard output of now is another one

    def says(snapshot, after_s: float) -> str:
        nonlocal now_s
        if not shown:
            shown.append(Display(config, SimpleNamespace(root=tmp_path, name="x"), clock=lambda: now_s))
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


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (30, 6)])
def test_on_a_terminal_it_is_the_view_of_top_and_no_screen_is_too_narrow(capsys, tmp_path, monkeypatch, columns, rows):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setenv("FORCE_COLOR", "1")
    config = SimpleNamespace(tracking=TrackingConfig(display="live"))
    with Display(config, SimpleNamespace(root=tmp_path, name="x")) as display:
        display.update(snapshot(7))
    assert "step 7/40" in capsys.readouterr().out


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def closed_terminal() -> int:
    master, slave = os.openpty()
    os.close(master)
    return slave


@pytest.mark.parametrize("wish", ["plain", "live"])
@pytest.mark.parametrize("lost", [closed_pipe, closed_terminal])
def test_a_screen_that_goes_away_ends_the_display_and_not_the_run(tmp_path, monkeypatch, caplog, lost, wish):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(display_module, "PLAIN_INTERVAL_S", 0.01)
    config = SimpleNamespace(tracking=TrackingConfig(display=wish))
    with open(lost(), "w") as screen, open(os.dup(screen.fileno()), "w") as errors:
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", errors)
        with Display(config, SimpleNamespace(root=tmp_path, name="x")) as display:
            for step in range(1, 4):
                display.update(snapshot(step))
                display.say("a restart")
            display.last_line("report: x")
            display.fail("no actor is left")
        print("Python itself flushes what is left", flush=True)
    assert {record.message.split(" (")[0] for record in caplog.records} == {
        "what the command shows is shown to nobody any more"
    }
