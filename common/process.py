"""Process utilities: a shared wall clock, threads for calls that may block forever, faster imports, retention of freed
memory, and the CPU and memory limits of control groups.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_PROC = Path("/proc/self")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Options of mallopt(3): maximum free bytes kept at the heap's end; minimum size of a block with its own mapping."""


_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # CLOCK_BOOTTIME also advances during suspend
_EPOCH_S = float(os.environ.setdefault("LEEWAY_EPOCH_S", repr(time.time() - time.clock_gettime(_CLOCK))))


def wall_time() -> float:
    """Return seconds since the Unix epoch, from a monotonic clock that all child processes share."""
    return _EPOCH_S + time.clock_gettime(_CLOCK)


class ThreadsExhausted(RuntimeError):
    """The maximum number of threads is reached, because no call of these threads has returned."""


class DaemonThreads:
    """Pool that runs each call in its own daemon thread, which never blocks the exit of the process.

    `ThreadPoolExecutor`, in contrast, joins its threads at exit. An abandoned call keeps its thread until the call
    returns. Other calls can start before that, up to `max_threads` in total.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self.name = name
        self.max_threads = max_threads
        self._lock = threading.Lock()
        self._num_running = 0

    def submit(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a call in a thread; raise ThreadsExhausted if `max_threads` calls are still running."""
        future: Future[R] = Future()
        call = functools.partial(function, *args, **kwargs)
        thread = threading.Thread(target=self._run, args=(future, call), name=f"{self.name}-call", daemon=True)
        with self._lock:
            if self._num_running >= self.max_threads:
                raise ThreadsExhausted(f"{self.max_threads} calls of {self.name} are still running")
            thread.start()  # `start` may raise, so count the thread afterwards; `_end` waits for the lock
            self._num_running += 1
        return future

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def _run(self, future: Future[R], call: Callable[[], R]) -> None:
        if not future.set_running_or_notify_cancel():
            self._end()
            return
        try:
            result = call()
        except BaseException as error:  # the future passes the error to the caller
            self._end()
            # SystemExit must not stop the event loop, and an asyncio future rejects StopIteration
            is_carried = isinstance(error, Exception) and not isinstance(error, StopIteration)
            future.set_exception(error if is_carried else RuntimeError(f"raised {type(error).__name__}: {error}"))
        else:
            self._end()
            future.set_result(result)

    def _end(self) -> None:
        with self._lock:
            self._num_running -= 1


def address_of(host: str, limit_s: float = 10.0) -> str:
    """Return the numeric address of a host; OSError or UnicodeError if its name does not resolve within `limit_s`."""
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    return str(DaemonThreads("resolve", 1).submit(socket.getaddrinfo, host, None).result(limit_s)[0][4][0])


def threads_of(cpus: float) -> int:
    return max(1, int(cpus))


def cgroup_values(controller: str, *choices: tuple[str, ...]) -> Iterator[tuple[Path, list[int]]]:
    """Yield file values of this process's control group and all ancestors up to the mounted root.

    `choices` lists the file names for each version of control groups.
    """
    with contextlib.suppress(OSError, ValueError):  # a kernel without control groups
        groups = [line.split(":", 2)[1:] for line in (_PROC / "cgroup").read_text().splitlines()]
        mounts = [line.split() for line in (_PROC / "mountinfo").read_text().splitlines() if " - cgroup" in line]
        for (_, _, _, root, point, *_, kind, _, options), (names, path) in product(mounts, groups):
            is_version_2 = kind == "cgroup2" and not names
            if not is_version_2 and not {controller} <= {*names.split(",")} & {*options.split(",")}:
                continue
            # in a container, the group's path can be outside the mount: the mounted root is then the group
            is_inside = Path(path).is_relative_to(root) and ".." not in path
            own = Path(point, Path(path).relative_to(root) if is_inside else "")
            for folder, files in product([each for each in (own, *own.parents) if each.is_relative_to(point)], choices):
                with contextlib.suppress(OSError, ValueError):  # no such file in this version, or "max" (no limit)
                    yield folder, [int(word) for name in files for word in (folder / name).read_text().split()]


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use: the minimum over machine, affinity and control groups."""
    quotas = cgroup_values("cpu", ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    allowed = [-(-quota // period) for _, (quota, period) in quotas if quota > 0]
    return min(os.cpu_count() or 1, len(os.sched_getaffinity(0)), *allowed)


def memory_left() -> int:
    """Return the bytes of memory that this process's control groups still allow; 2**62 without a limit."""
    left = 2**62
    choices = [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]
    for folder, (limit, taken) in cgroup_values("memory", *choices):
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # page cache can be reclaimed
        cached = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in ("active_file", "inactive_file"))
        left = min(left, limit - taken + cached)
    return max(0, left)


UNUSED = ("scipy", "sklearn")
"""Libraries that Transformers imports if they are installed. Their import takes 0.8 s, and no model here uses them."""


@contextlib.contextmanager
def fast_imports(*hidden: str) -> Iterator[None]:
    """Let imports of `hidden` fail within the block, collect no garbage there, and never examine its objects later."""
    was_on, absent = gc.isenabled(), [name for name in hidden if name not in sys.modules]
    gc.disable()
    sys.modules.update(dict.fromkeys(absent, cast("Any", None)))  # None makes the import of a module fail
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        gc.freeze()  # modules stay until the process exits, so collections need not examine them
        atexit.register(gc.unfreeze)  # else libraries report at exit that their objects were not freed
        if was_on:
            gc.enable()


def keep_freed_memory(*, largest: int = 2**30, most: int = 2**31 - 1) -> None:
    """Keep freed memory for reuse instead of returning it to the system, if libc supports it (glibc, not musl).

    Freed blocks of up to `largest` bytes are kept, and up to `most` free bytes (a C int) at the end of the heap.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, largest)
        libc.mallopt(_M_TRIM_THRESHOLD, most)
