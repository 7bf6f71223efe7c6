"""Calls in threads of their own: a place is taken by those that run alone."""

import threading

import pytest

from common.process import DaemonThreads, ThreadsExhausted


def test_a_thread_that_cannot_be_started_takes_no_place(monkeypatch):
    threads = DaemonThreads("calls", max_threads=1)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(int)
    entered, leave = threading.Event(), threading.Event()

    def wait():
        entered.set()
        return leave.wait(30)

    running = threads.submit(wait)
    assert entered.wait(30)
    with pytest.raises(ThreadsExhausted, match="1 calls of calls are still running"):
        threads.submit(int)
    leave.set()
    assert running.result(30) is True
