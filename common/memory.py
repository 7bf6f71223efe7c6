"""Memory that was freed: glibc gives large blocks back at once, and each next use of them costs page faults."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of mallopt(3): free bytes above which memory is given back; size from which a block is mapped on its own."""


def keep_freed_memory(*, largest: int = 2**30, most: int = 2**31 - 1) -> None:
    """Keep what this process frees for its next use, where libc knows how (glibc, not musl).

    Args:
        largest: bytes of the largest block that is kept.
        most: bytes that may lie free at the end of the heap; below 2 GiB, as an int of C.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, largest)
        libc.mallopt(_M_TRIM_THRESHOLD, most)
