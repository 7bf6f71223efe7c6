"""CPU seconds of the processes of a run, by role."""

from __future__ import annotations

import os
import re
import threading
import time
from bisect import bisect_left
from pathlib import Path
from types import TracebackType

import psutil

LOOK_EVERY_S = 0.25
_OTHER = "command and Ray"


class CpuTimes:
    """Samples the CPU seconds of all descendants of this process, as a context manager."""

    def __init__(self) -> None:
        self._roles: dict[int, str] = {}
        self._times_s: list[float] = []
        self._cpu_s: list[dict[int, float]] = []
        """CPU seconds of each process until the time of the same index. A process that has ended keeps its last."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_forever, daemon=True)

    def __enter__(self) -> CpuTimes:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, began_s: float, ended_s: float) -> dict[str, float]:
        """Return role -> CPU seconds between two Unix times."""
        first, last = self._at(began_s), self._at(ended_s)
        found: dict[str, float] = {}
        for pid, cpu_s in last.items():
            role = self._roles[pid]
            found[role] = found.get(role, 0.0) + cpu_s - first.get(pid, 0.0)
        return found

    def _at(self, time_s: float) -> dict[int, float]:
        return self._cpu_s[min(bisect_left(self._times_s, time_s), len(self._cpu_s) - 1)]

    def _sample_forever(self) -> None:
        while not self._ended.is_set():
            self._sample()
            self._ended.wait(LOOK_EVERY_S)
        self._sample()

    def _sample(self) -> None:
        found = dict(self._cpu_s[-1]) if self._cpu_s else {}
        now_s = time.time()
        for process in psutil.Process().children(recursive=True):
            try:
                times = process.cpu_times()
                if self._roles.get(process.pid, _OTHER) == _OTHER:  # a process opens its log after its start
                    self._roles[process.pid] = _role_of(process.pid)
            except (psutil.Error, OSError):  # the process has ended
                continue
            found[process.pid] = times.user + times.system
        self._times_s.append(now_s)
        self._cpu_s.append(found)


def _role_of(pid: int) -> str:
    """Return the role of a process of a run, from its command line and from the name of its log."""
    command = " ".join(psutil.Process(pid).cmdline())
    if "EngineCore" in command:
        return "engine"
    if "reward_process" in command:
        return "rewards"
    log = Path(os.readlink(f"/proc/{pid}/fd/1")).name
    found = re.fullmatch(r"([a-z_]+)\.\d+\.log", log)
    return found[1] if found else _OTHER
