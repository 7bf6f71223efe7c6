"""RayWatch: sees that Ray's own processes died, which Ray itself says late or never, and ends what stood on them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil

from launch.processes import guardian
from launch.processes.role_process import RunFailed

_NAMES = {"gcs_server": "Ray's control store", "raylet": "Ray's node manager"}
_CONNECT_S = 2.0
_LOOK_EVERY_S = 5.0
_GOODBYE_S = 5.0
_GONE_S = 45.0
"""A control store on another machine that takes no connection for so long is gone."""


class RayWatch:
    """Watches what a run of this machine stands on."""

    def __init__(self, address: str, logs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Ray is up.

        Args:
            address: of its control store, HOST:PORT.
            logs: where Ray's own processes write.
            clock: seconds, monotonic.
        """
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._logs = logs
        self._clock = clock
        self._family = _family()
        self._rays_own = [(name, child) for child in self._family if (name := _name(child)) is not None]
        self._reached_s = self._looked_s = clock()
        self.is_dead = False
        """Nothing can be asked of Ray any more: whatever waits for its answer waits for ever."""
        self._guardian = subprocess.Popen(
            [sys.executable, "-S", "-E", guardian.__file__], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._tell(self._names())

    def check(self) -> None:
        """Look; takes no time where all is well.

        Raises:
            RunFailed: a process of Ray's is gone.
        """
        for name, process in self._rays_own:
            if not _lives(process):
                self._fail(
                    f"{_NAMES[name]} ({name}, process {process.pid}) died, and the run cannot go on without it; see "
                    f"{self._logs}/{name}.out and {name}.err"
                )
        now = self._clock()
        if now - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now
            self._family = _family()
            self._tell(self._names())
            self._reach(now)

    def end_all(self) -> None:
        """Kill every process that Ray had started here; those elsewhere end because they miss it."""
        self._family = [*self._family, *_family()]
        for process in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._family, timeout=_GOODBYE_S)

    def close(self) -> None:
        """Ray was ended: nobody needs to be guarded. May be called twice."""
        if self._guardian.stdin is not None and not self._guardian.stdin.closed:
            self._tell(guardian.DONE)
            with contextlib.suppress(BrokenPipeError):  # closing writes once more what could not be written
                self._guardian.stdin.close()
            self._guardian.wait(_GOODBYE_S)

    def _names(self) -> str:
        return " ".join(f"{each.pid}:{guardian.started(each.pid)}" for each in self._family)

    def _tell(self, line: str) -> None:
        """The guardian, which ends the family where this process is killed."""
        assert self._guardian.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed itself; the run goes on without one
            self._guardian.stdin.write(line + "\n")
            self._guardian.stdin.flush()

    def _fail(self, why: str) -> NoReturn:
        self.is_dead = True
        raise RunFailed(f"{why}. `leeway resume` goes on from the newest checkpoint")

    def _reach(self, now: float) -> None:
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
            self._reached_s = now
        except OSError as error:
            host, port = self._address
            if now - self._reached_s > _GONE_S:
                self._fail(
                    f"Ray's control store at {host}:{port} takes no connection for {now - self._reached_s:.0f} s "
                    f"({error}); is its host up? See `launch/cluster.sh status`"
                )


def _name(process: psutil.Process) -> str | None:
    try:
        program = Path((process.cmdline() or [""])[0]).name
    except psutil.Error:
        return None
    return program if program in _NAMES else None


def _family() -> list[psutil.Process]:
    """Ray's own processes below this one, and all below them: the roles and their engines."""
    own = [child for child in psutil.Process().children() if is_of_ray(child)]
    return [*own, *(below for child in own for below in _below(child))]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_of_ray(process: psutil.Process) -> bool:
    """Is it one of Ray's own, or a worker of it?"""
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    if not command:
        return False
    return command[0].startswith("ray::") or any(map(_is_file_of_ray, command))


def _is_file_of_ray(argument: str) -> bool:
    """Does an argument name a program of Ray's, and not only hold its folder in a text of code?

    Ray puts a folder of its own into the search path, and multiprocessing hands that path to its server as code.
    """
    return argument.startswith("/") and "site-packages/ray/" in argument
