"""Waits of the tests: each for what it means, and no longer than a crowded machine needs."""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tests.full import FULL

T = TypeVar("T")

LIMIT_S = 60.0
"""Of a wait for what takes a moment on a machine that has nothing else to do."""


def wait_until(
    is_so: Callable[[], object], what: str = "it", limit_s: float = LIMIT_S, errors: Sequence[BaseException] = ()
) -> float:
    """Wait until it is so; seconds that it took. The first of `errors`, which others may fill meanwhile, is raised."""
    began = time.monotonic()
    while not is_so():
        if errors:
            raise errors[0]
        assert time.monotonic() - began < limit_s, f"waited {limit_s:g} s for {what}"
        time.sleep(0.005)
    return time.monotonic() - began


def hold_still(look: Callable[[], T], what: str, for_s: float, limit_s: float = LIMIT_S) -> T:
    """What `look` gives, once it has given the same for so long."""
    seen, since_s, began = look(), time.monotonic(), time.monotonic()
    while time.monotonic() - since_s < for_s:
        assert time.monotonic() - began < limit_s, f"waited {limit_s:g} s for {what} to hold still"
        time.sleep(0.01)
        if (now := look()) != seen:
            seen, since_s = now, time.monotonic()
    return seen


def bound(seconds: float) -> float:
    """What a measured time may be: this in the full run, which has the machine to itself; else anything that ends."""
    return seconds if FULL else seconds + LIMIT_S
