"""`DaemonThreads` limits the number of running threads; only running calls count."""

import threading

import pytest

from leeway.common.process import DaemonThreads, ThreadsExhausted


def test_a_thread_that_fails_to_start_frees_its_slot(monkeypatch):
    threads = DaemonThreads("calls", max_threads=1)

    def fail(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
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
