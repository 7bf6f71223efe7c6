"""Faults at system calls: strace, attached to a running process."""

import re
import subprocess
from pathlib import Path

COMMIT_CALLS = "pwrite64,writev,lseek,fdatasync"
"""The calls by which LMDB commits: pages by pwrite64 or lseek and writev, then fdatasync, then a meta page."""


class Strace:
    """strace on all threads of a process, until `close` or the end of the process."""

    def __init__(self, pid: int, log: Path, *, trace: str, inject: str = "") -> None:
        """Attach.

        Args:
            pid: of the process.
            log: where to write the calls.
            trace: which calls, separated by commas.
            inject: what to do to them, in strace's words (`fdatasync:delay_enter=5000`).
        """
        self._log = log
        options = ["-e", f"trace={trace}", *(["-e", f"inject={inject}"] if inject else [])]
        command = ["strace", "-f", "-ttt", "-o", str(log), *options, "-p", str(pid)]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        line = self._process.stderr.readline()
        assert "attached" in line, f"strace could not attach to {pid}: {line}"

    def close(self) -> None:
        """Detach; the process goes on."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait(60)
        self._process.stderr.close()

    def wait(self, timeout_s: float) -> None:
        """Wait until the process has ended."""
        self._process.wait(timeout_s)
        self.close()

    @property
    def injected_at_s(self) -> list[float]:
        """Wall times of the calls that were made to fail."""
        return [float(line.split()[1]) for line in self._log.read_text().splitlines() if "(INJECTED)" in line]

    @property
    def last_call(self) -> str:
        """The name of the call at which the process was killed."""
        calls = re.findall(r"^\d+ +[\d.]+ (\w+)\(", self._log.read_text(), re.MULTILINE)
        return calls[-1] if calls else "none"
