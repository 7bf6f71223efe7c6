"""Signals at any time, to any processes: the run ends soon, writes its report, and leaves no process behind."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
from tests.world.live_run import LiveRun, assert_ended_in_order, command_of, descendants, wait_for_end

from leeway.launch.errors import ExitStatus

pytestmark = pytest.mark.timeout(600)

BOUND_S = 25.0
"""Seconds from the signal to the exit of the last process; job managers kill after 30 s. About half of the time is
imports in processes that start or report, so the time differs between machines; the results page has all times."""
Send = Callable[[LiveRun, signal.Signals], None]


def to_command(run: LiveRun, number: signal.Signals) -> None:
    """Send the signal as `kill` does."""
    run.process.send_signal(number)


def to_group(run: LiveRun, number: signal.Signals) -> None:
    """Send the signal as `timeout` does: to the command and to its process group, which includes the command."""
    run.process.send_signal(number)
    os.killpg(run.process.pid, number)


def to_all_processes(run: LiveRun, number: signal.Signals) -> None:
    """Send the signal as systemd and Slurm do: to every process."""
    for process in [psutil.Process(run.process.pid), *descendants(run.process)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def phase_is(*phases: str) -> Callable[[LiveRun], bool]:
    """Return a predicate that is true while the run reports one of these phases."""

    def matches(run: LiveRun) -> bool:
        try:
            return json.loads((run.folder / "status.json").read_text())["phase"].startswith(phases)
        except (FileNotFoundError, ValueError):
            return False

    return matches


PHASES: dict[str, Callable[[LiveRun], bool]] = {
    "start": lambda run: any("ray::" in command_of(each) for each in descendants(run.process)),
    "evaluation": phase_is("evaluating"),
    "training": lambda run: len(run.steps()) >= 2,
    "export": phase_is("exporting", "evaluating version 2"),  # a small model is exported within a poll
}

WAYS: dict[signal.Signals, tuple[Send, ...]] = {
    signal.SIGINT: (to_command, to_group),
    signal.SIGTERM: (to_command, to_group, to_all_processes),
    signal.SIGHUP: (to_command, to_group),
    signal.SIGUSR1: (to_command, to_all_processes),
    signal.SIGUSR2: (to_group,),
}
"""Signal -> the ways to send it, each used in every phase."""


def seconds_to_end(run: LiveRun, send: Send, number: signal.Signals) -> float:
    """Send the signal; return the seconds until the run ends. Assert that the run wrote a report and no traceback."""
    family = descendants(run.process)
    sent_s = time.monotonic()
    send(run, number)
    output, _ = run.process.communicate(timeout=120)
    assert wait_for_end(family) == []
    ended_s = time.monotonic() - sent_s
    assert run.process.returncode == ExitStatus.INTERRUPTED, output
    assert "Traceback" not in output
    assert (run.folder / "report.html").exists(), output
    return ended_s


@pytest.fixture
def start_run(tmp_path):
    """Return `start_run(*overrides)`, which starts a run; runs are closed after the test."""
    runs = []

    def start(*overrides: str) -> LiveRun:
        runs.append(LiveRun(tmp_path, "--tracking.to", "wandb", *overrides))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.fault("S", "a signal", full=True)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("number", "send"), [(number, send) for number, ways in WAYS.items() for send in ways])
def test_a_signal_ends_a_run_soon_and_its_report_is_written(start_run, show, number, send, phase):
    num_steps = "2" if phase == "export" else "100000"
    # evaluation after an export takes seconds, so a signal during the export does not come too late
    num_heldout = "1024" if phase == "export" else "16"
    numbers = ("--learner.num_steps", num_steps, "--task.num_heldout", num_heldout)
    run = start_run(*numbers, "--learner.checkpoint_every", "100000")
    run.wait_for(phase, lambda: PHASES[phase](run), every_s=0.01)
    ended_s = seconds_to_end(run, send, number)
    if phase == "training":
        assert_ended_in_order(run.folder)
    assert ended_s < BOUND_S
    show(f"{number.name} {send.__name__.replace('_', ' ')} in {phase}: exited after {ended_s:.1f} s")
