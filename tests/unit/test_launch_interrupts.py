"""Ctrl-C, SIGTERM, a hangup and the signals of job managers: once ends in order, twice at once, and none is dropped."""

import contextlib
import itertools
import os
import signal
import sys

import pytest

from launch.cli import main
from launch.errors import END_SIGNALS, ExitStatus, Interrupts, Stopped
from launch.processes.ray_cluster import _reap


@pytest.fixture(autouse=True)
def nothing_is_ignored():
    """As a hangup is where the tests run under nohup."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in END_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def interrupt(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def seconds() -> Interrupts:
    """With a second between any two signals."""
    times = itertools.count()
    return Interrupts(clock=lambda: next(times))


@pytest.mark.parametrize("number", sorted(END_SIGNALS))
def test_while_training_the_first_is_counted_and_the_second_stops(number):
    with seconds() as interrupts:
        interrupts.training = True
        interrupt(number)
        interrupts.go_on()
        assert interrupts.count == 1
        with pytest.raises(Stopped):
            interrupt(number)


def test_two_at_once_as_timeout_and_systemd_send_them_are_one_request():
    with Interrupts(clock=lambda: 100.0) as interrupts:
        interrupts.training = True
        interrupt(signal.SIGTERM)
        interrupt(signal.SIGHUP)
        interrupts.go_on()
        assert interrupts.count == 1


def test_a_hangup_that_nohup_had_us_ignore_is_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        interrupt(signal.SIGHUP)
        assert interrupts.count == 0


def test_before_training_the_first_stops_also_where_a_library_catches_every_exception():
    def library() -> None:
        try:
            interrupt()
        except Exception:  # it goes on as if nothing were
            pytest.fail("it was caught")

    with Interrupts(), pytest.raises(Stopped):
        library()


def test_one_that_was_dropped_stops_the_run_before_the_next_phase():
    with Interrupts() as interrupts:
        with contextlib.suppress(Stopped):  # as Python does in a callback of C code
            interrupt()
        with pytest.raises(Stopped):
            interrupts.go_on()


def test_afterwards_the_handlers_are_those_of_before():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGTERM) == interrupts._on_signal
    assert signal.getsignal(signal.SIGTERM) == before


def test_while_the_processes_are_being_ended_signals_are_only_counted():
    with seconds() as interrupts:
        interrupts.end()
        interrupt()
        interrupt()
        assert interrupts.count == 2


def test_in_any_other_verb_it_is_a_sentence_and_no_traceback(monkeypatch, capsys):
    def interrupted(path, overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.doctor.run_checks", interrupted)
    assert main(["doctor"]) == ExitStatus.INTERRUPTED
    assert capsys.readouterr().err == "leeway: interrupted\n"


def test_the_process_that_ends_what_is_left_outlives_every_signal_that_ends_a_run(monkeypatch):
    ignored = set()
    monkeypatch.setattr(signal, "signal", lambda number, handler: ignored.add((number, handler)))
    monkeypatch.setattr(sys, "stdin", ["done"])
    _reap("done", 0.0)
    assert ignored == {(number, signal.SIG_IGN) for number in END_SIGNALS}
