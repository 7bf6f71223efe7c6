"""The process that a buffer service has to itself."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading

import pyarrow as pa

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3): free bytes above which memory is given back; size from which a block is mapped on its own."""


def keep_memory() -> None:
    """Spare a busy service what is sensible elsewhere: looking for cycles, and giving memory back after every turn.

    A turn makes some ten thousand small objects and some buffers of megabytes. All of them are gone
    after it, none in a cycle, and the next turn needs the same again.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    pa.set_memory_pool(pa.system_memory_pool())
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
        libc.mallopt(_M_TRIM_THRESHOLD, 256 * 2**20)


def end_with_parent(stop: threading.Event, expected: int | None) -> None:
    """Have the kernel send SIGTERM when the parent dies; elsewhere than on Linux, look for it.

    Args:
        stop: set where the parent is gone.
        expected: the parent's process id as it knew it; None: whoever is the parent now. Without it a parent
            that died while this process was starting goes unnoticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = os.getppid() if expected is None else expected
    if os.getppid() != parent:
        stop.set()
    if sys.platform == "linux":
        return

    def watch() -> None:
        while not stop.wait(1.0):
            if os.getppid() != parent:
                stop.set()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
