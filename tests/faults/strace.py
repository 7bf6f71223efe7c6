"""Faults at system calls, injected by strace into a running process."""

import re
import subprocess
from pathlib import Path

COMMIT_CALLS = "pwrite64,writev,lseek,fdatasync"
"""System calls of an LMDB commit, which writes pages by pwrite64 or by lseek and writev, calls fdatasync, and then
writes a meta page."""


class Strace:
    """strace attached to all threads of a process, until `close` or the exit of the process."""

    def __init__(self, pid: int, log: Path, *, trace: str, inject: str = "") -> None:
        """Attach to the process.

        Args:
            pid: process ID.
            log: file to which the calls are written.
            trace: names of the traced calls, separated by commas.
            inject: fault for these calls, in strace's syntax (`fdatasync:delay_enter=5000`).
        """
        self._log = log
        options = ["-e", f"trace={trace}", *(["-e", f"inject={inject}"] if inject else [])]
        command = ["strace", "-f", "-ttt", "-o", str(log), *options, "-p", str(pid)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = self._process.stderr.readline()
        assert "attached" in line, f"strace could not attach to {pid}: {line}"

    def close(self) -> None:
        """Detach; the process continues."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(60)
        self._process.stderr.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has exited."""
        self._process.wait(timeout_s)
        self.close()

    @property
    def injected_at_s(self) -> list[float]:
        """Return the wall-clock times of the calls in which strace injected the fault."""
        return [float(line.split()[1]) for line in self._log.read_text().splitlines() if "(INJECTED)" in line]

    @property
    def last_call(self) -> str:
        """Return the name of the call at which the process was killed."""
        calls = re.findall(r"^\d+ +[\d.]+ (\w+)\(", self._log.read_text(), re.MULTILINE)
        return calls[-1] if calls else "none"
