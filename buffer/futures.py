"""Completing futures that somebody else may have cancelled, and one future for several."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

R = TypeVar("R")


def settle(future: Future[R], outcome: R | BaseException) -> None:
    """Complete a future, unless its owner has cancelled it or it is complete."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def last_of(futures: Sequence[Future[R]], of_none: R) -> Future[R]:
    """A future with the result of the last of these to complete, or the error of the first to fail.

    Args:
        futures: each completed by whoever owns it.
        of_none: the result where there are none.
    """
    joined: Future[R] = Future()
    lock = threading.Lock()
    num_missing = len(futures)

    def count(completed: Future[R]) -> None:
        nonlocal num_missing
        with lock:
            num_missing -= 1
            is_last = num_missing == 0
        error = completed.exception()
        if error is not None:
            settle(joined, error)
        elif is_last:
            settle(joined, completed.result())

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        settle(joined, of_none)
    return joined
