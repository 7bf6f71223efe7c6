"""Ctrl-C, SIGTERM, SIGHUP and signals of job managers: the first signal ends a run in order, the second at once."""

import contextlib
import itertools
import os
import signal
import sys

import pytest

from leeway.launch.cli import main
from leeway.launch.errors import END_SIGNALS, ExitStatus, Interrupts, Stopped
from leeway.launch.processes.ray_cluster import _reap


@pytest.fixture(autouse=True)
def nothing_is_ignored():
    """Set the default handlers: tests that run under nohup inherit an ignored SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def ticking() -> Interrupts:
    """Return an `Interrupts` object whose clock advances by 1 s per signal."""
    times = itertools.count()
    return Interrupts(clock=lambda: next(times))


@pytest.mark.parametrize("number", sorted(END_SIGNALS))
def test_during_training_the_first_signal_is_counted_and_the_second_stops(number):
    with ticking() as interrupts:
        interrupts.training = True
        interrupt(number)
        interrupts.raise_if_stopped()
        assert interrupts.count == 1
        with pytest.raises(Stopped):
            interrupt(number)


def test_two_signals_at_once_are_one_request():
    with Interrupts(clock=lambda: 100.0) as interrupts:
        interrupts.training = True
        interrupt(signal.SIGTERM)
        interrupt(signal.SIGHUP)
        interrupts.raise_if_stopped()
        assert interrupts.count == 1


def test_a_hangup_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        interrupt(signal.SIGHUP)
        assert interrupts.count == 0


def test_before_training_a_signal_stops_code_that_catches_every_exception():
    def library() -> None:
        try:
            interrupt()
        except Exception:  # the library ignores every error
            pytest.fail("Stopped was caught")

    with Interrupts(), pytest.raises(Stopped):
        library()


def test_a_dropped_signal_stops_the_run_before_the_next_phase():
    with Interrupts() as interrupts:
        with contextlib.suppress(Stopped):  # Python discards an exception raised in a callback that C code calls
            interrupt()
        with pytest.raises(Stopped):
            interrupts.raise_if_stopped()


def test_the_previous_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) == interrupts._on_signal
    assert signal.getsignal(signal.SIGTERM) == before


def test_during_shutdown_signals_are_only_counted():
    with ticking() as interrupts:
        interrupts.end()
        interrupt()
        interrupt()
        assert interrupts.count == 2


def test_other_subcommands_report_an_interrupt_without_a_traceback(monkeypatch, capsys):
    def interrupted(path, overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr("leeway.launch.doctor.run_checks", interrupted)
    assert main(["doctor"]) == ExitStatus.INTERRUPTED
    assert capsys.readouterr().err == "leeway: interrupted\n"


def test_the_reaper_ignores_every_signal_that_ends_a_run(monkeypatch):
    ignored = set()
    monkeypatch.setattr(signal, "signal", lambda number, handler: ignored.add((number, handler)))
    monkeypatch.setattr(sys, "stdin", ["done"])
    _reap("done", 0.0)
    assert ignored == {(number, signal.SIG_IGN) for number in END_SIGNALS}
