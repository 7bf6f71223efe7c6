"""A limit on the memory of processes, by a cgroup (version 1) of their own."""

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
    """Why there can be none here; '' where there can."""
    if not (_ROOT / "memory.limit_in_bytes").exists():
        return "needs the memory controller of cgroup version 1"
    return "" if os.access(_ROOT, os.W_OK) else "needs root"


class MemoryLimit:
    """Processes that together may have so much memory, the cache of their files included; who needs more is killed."""

    def __init__(self) -> None:
        """Of none yet."""
        self._folder = _ROOT / f"leeway-{os.getpid()}-{time.monotonic_ns()}"
        self._folder.mkdir()
        self.processes = self._folder / "cgroup.procs"
        """Whoever writes its process id here is under the limit from its next allocation on."""
        enter = f"echo 0 >{self.processes}; echo 1000 >/proc/self/oom_score_adj"
        self.prefix = ["sh", "-c", f'{enter}; exec "$0" "$@"']
        """Put before a command to run it under the limit, and have it killed before any other of the group.

        To be spared instead would need a privilege.
        """

    def leave(self, room_bytes: int | None) -> None:
        """From now on so much more may be used than is used now, and cannot be taken back; None for no limit."""
        if room_bytes is None:
            self._write("memory.limit_in_bytes", -1)
            return
        limit = self.used_bytes + room_bytes
        for _ in range(256):
            try:
                self._write("memory.limit_in_bytes", limit)
            except OSError:
                limit += 2**20  # the kernel uses some for itself
            else:
                return
        raise AssertionError(f"the kernel accepts no limit up to {limit} bytes")

    @contextlib.contextmanager
    def crowd(self) -> Iterator[None]:
        """Meanwhile somebody else in the group takes all that is left; who came by `prefix` is killed for it, not he.

        Without him a process at its limit may live on for long, while the kernel takes its files' cache back and back.
        """
        neighbour = subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, str(self.processes)])
        try:
            yield
        finally:
            neighbour.kill()  # or the kernel has, once there was nobody else left to kill
            assert neighbour.wait() == -signal.SIGKILL, "the neighbour ended by itself: the group was not crowded"

    def add(self, pid: int) -> None:
        """From now on the process counts; what it has already stays where it was counted."""
        self._write("cgroup.procs", pid)

    @property
    def used_bytes(self) -> int:
        """Beside the cache of files, which the kernel takes back before it kills."""
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("total_rss "))

    def close(self) -> None:
        """Remove the group; what still runs in it goes on without a limit."""
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
