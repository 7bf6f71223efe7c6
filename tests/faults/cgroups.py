"""A memory limit for a group of processes: a temporary cgroup (version 1)."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/memory")
_NEIGHBOUR = """
import sys
from pathlib import Path
Path(sys.argv[1]).write_text("0")
taken = []
while True:
    taken.append(b"x" * 2**20)
"""


def missing() -> str:
    """Return why memory cannot be limited on this machine, or ''."""
    if not (_ROOT / "memory.limit_in_bytes").exists():
        return "needs the memory controller of cgroup version 1"
    return "" if os.access(_ROOT, os.W_OK) else "needs root"


class MemoryLimit:
    """A memory limit for a group of processes and their page cache; the kernel kills a process of a larger group."""

    def __init__(self) -> None:
        """Create the group, without a limit and without processes."""
        self._folder = _ROOT / f"leeway-{os.getpid()}-{time.monotonic_ns()}"
        self._folder.mkdir()
        self.processes = self._folder / "cgroup.procs"
        """Writing a process id to this file limits that process from its next allocation on."""
        enter = f"echo 0 >{self.processes}; echo 1000 >/proc/self/oom_score_adj"
        self.prefix = ["sh", "-c", f'{enter}; exec "$0" "$@"']
        """Command prefix that runs a command under the limit, as the first process of the group to be killed.

        To protect the other processes from the kill would need a privilege.
        """

    def allow(self, room_bytes: int | None) -> None:
        """Allow `room_bytes` more than the unreclaimable memory in use; None removes the limit."""
        if room_bytes is None:
            self._write("memory.limit_in_bytes", -1)
            return
        limit = self.used_bytes + room_bytes
        for _ in range(256):
            try:
                self._write("memory.limit_in_bytes", limit)
            except OSError:
                limit += 2**20  # the kernel itself needs some memory
            else:
                return
        raise AssertionError(f"the kernel accepts no limit up to {limit} bytes")

    @contextlib.contextmanager
    def exhaust(self) -> Iterator[None]:
        """Let another process of the group use up the memory; the kernel then kills the process started with `prefix`.

        Without the other process, a process at its limit may run for long, while the kernel reclaims page cache.
        """
        neighbour = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(self.processes)])
        try:
            yield
        finally:
            neighbour.kill()  # the kernel may have killed the neighbour, as the last process of the group
            assert neighbour.wait() == -signal.SIGKILL, "the neighbour exited by itself: memory was not exhausted"

    def add(self, pid: int) -> None:
        """Add a process to the group; memory that the process already uses does not count."""
        self._write("cgroup.procs", pid)

    @property
    def used_bytes(self) -> int:
        """Return the memory in use, without the page cache, which the kernel reclaims before it kills."""
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("total_rss "))

    def close(self) -> None:
        """Remove the group; the processes of the group continue without a limit."""
        for pid in self.processes.read_text().split():
            with contextlib.suppress(OSError):
                (_ROOT / "cgroup.procs").write_text(pid)
        deadline = time.monotonic() + 10
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))
