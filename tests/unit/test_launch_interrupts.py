"""Ctrl-C and SIGTERM: once ends in order, twice at once, and none is dropped."""

import contextlib
import os
import signal

import pytest

from launch.errors import Interrupts, Stopped


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_while_training_the_first_is_counted_and_the_second_stops():
    with Interrupts() as interrupts:
        interrupts.training = True
        interrupt()
        interrupts.go_on()
        assert interrupts.count == 1
        with pytest.raises(Stopped):
            interrupt()


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
    with Interrupts() as interrupts:
        interrupts.end()
        interrupt()
        interrupt()
        assert interrupts.count == 2
