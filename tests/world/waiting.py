"""Waits for conditions, with timeouts that suffice on a loaded machine."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.full import FULL

T = TypeVar("T")

LIMIT_S = 60.0
"""Timeout in seconds of a wait for a condition that takes a moment on an idle machine."""


def wait_until(
    condition: Callable[[], object], name: str = "it", limit_s: float = LIMIT_S, errors: Sequence[BaseException] = ()
) -> float:
    """Wait until `condition()` is true; return the seconds this took. Raise the first error added to `errors`."""
    began = time.monotonic()
    while not condition():
        if errors:
            raise errors[0]
        assert time.monotonic() - began < limit_s, f"waited {limit_s:g} s for {name}"
        time.sleep(0.005)
    return time.monotonic() - began


def wait_until_stable(read: Callable[[], T], name: str, for_s: float, limit_s: float = LIMIT_S) -> T:
    """Return the result of `read` once it has not changed for `for_s` seconds."""
    last, since_s, began = read(), time.monotonic(), time.monotonic()
    while time.monotonic() - since_s < for_s:
        assert time.monotonic() - began < limit_s, f"waited {limit_s:g} s for {name} to stop changing"
        time.sleep(0.01)
        if (value := read()) != last:
            last, since_s = value, time.monotonic()
    return last


def bound(seconds: float) -> float:
    """Return the limit of a measured time: `seconds` in the full run, which runs alone; `LIMIT_S` more otherwise."""
    return seconds if FULL else seconds + LIMIT_S
