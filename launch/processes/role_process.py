"""A role, which hosts a part of a run in its own process; that process as the supervisor sees it; and calls to it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.tasks.task import TaskError
from common.hf_folder import ModelFolderError
from common.user_input import UserFileError
from launch.host import OWNER_ONLY, configure_logging
from launch.observe.status import ProcessStatus
from launch.text import shortened

MAX_RESTARTS = 3
"""In a row, after which something is given up; more would repeat what fails each time."""
LASTING_S = 3600.0
"""After so much work restarts count anew."""
SILENCE_S = 60.0
"""Seconds without an answer after which a role is reported. It answers within milliseconds, unless its host swaps."""
_CHECK_EVERY_S = 1.0
LOG_BYTES = 64 * 2**20  # size at which the log of a role is rotated


_STARTED = "this process has started\n"
"""Separates what several processes of a role wrote to one log."""
_CAUSES = (
    r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] ([\w.]+(?:Error|Exception)\b.*)$",
    r"^(Fatal Python error: .*|terminate called .*)$",
    r'(?:^Process (?:EngineCore|Worker)|File "<string>", line 1, in <module>)(?s:.*?)^([\w.]+Error\b.*)$',
)
"""Lines that state why a process of an engine failed."""
_FOLLOWS = re.compile("root cause|EngineDead|Engine ?[Cc]ore|Executor failed|initialization failed")
"""In lines of processes that failed because another did."""
_TAIL_BYTES, _QUOTED_CHARACTERS = 2**18, 300
_NO_REASON = "For further information visit"  # pydantic's last line


Notify = Callable[[str, str], None]
"""Called with (kind, text) whenever something worth an event happens."""
Check = Callable[[], None]
"""Called while something is awaited, or about to be started; raises if it can no longer succeed."""


class RunFailed(RuntimeError):
    """The run cannot go on; the text names the role, the reason and the log."""


class WrongInput(RunFailed):
    """What a role was to load is mistaken, and it alone could see that."""


class Restarts:
    """How often something is restarted before it is given up: at most `limit` times in a row.

    A row ends when the last restart has proved itself: by an hour of work, and that of the learner by a newer
    checkpoint alone.
    """

    def __init__(self, limit: int, lasting_s: float = LASTING_S) -> None:
        self._limit = limit
        self._lasting_s = lasting_s
        self._in_a_row = 0
        self.total = 0
        self.working_since_s: float | None = None
        """On the monotonic clock; None before its work begins, and of the learner."""

    @property
    def in_a_row(self) -> int:
        since_s = self.working_since_s
        return 0 if since_s is not None and time.monotonic() - since_s >= self._lasting_s else self._in_a_row

    @property
    def are_spent(self) -> bool:
        """Whether another end means that it is given up."""
        return self.in_a_row >= self._limit

    def prove(self) -> None:
        """Note that the last restart has led to something that lasts."""
        self._in_a_row = 0

    def count(self) -> None:
        self.total, self._in_a_row = self.total + 1, self.in_a_row + 1
        self.working_since_s = None


class Role:
    """What a process hosts: the thinnest possible shell, of which Ray makes an actor, with one log.

    Ray places the process, carries a few calls, and ends it with the run; data and weights never pass through it. Each
    role imports what it hosts in its own process only.
    """

    def __init__(self, log: Path) -> None:
        """Send everything this process prints, also from C, to its log; what it writes is its owner's alone."""
        os.umask(OWNER_ONLY)
        log.parent.mkdir(parents=True, exist_ok=True)  # another host need not see the run's folder
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        configure_logging()
        print(_STARTED, end="", flush=True)
        faulthandler.enable()
        threading.Thread(target=_rotate, args=(log,), name="log", daemon=True).start()

    def whereabouts(self) -> tuple[str, int]:
        """Return the address of its host in the Ray cluster, and its process id there."""
        return address_here(), os.getpid()


def _rotate(log: Path) -> None:
    """Bound a log: move what it has to LOG.1. The file stays, which other processes write."""
    while True:
        time.sleep(_CHECK_EVERY_S)
        with contextlib.suppress(OSError):  # on a full disk it is tried again
            if log.stat().st_size >= LOG_BYTES:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)


def address_here() -> str:
    """Of this machine in the Ray cluster."""
    return str(ray.util.get_node_ip_address())


@dataclass
class RoleProcess:
    """One process. `running` is a pending Ray call."""

    role: str
    number: int
    handle: Any
    log: Path
    restarts: Restarts
    """Those of a stage are the learner's, of which all stages are restarted together."""
    running: Any = None
    """Ends when the role's work does; None before the work begins."""
    started_s: float = field(default_factory=time.monotonic)
    pool: str = ""
    _where: Any = None
    """The pending call, then the answer: its host and pid."""
    _owed: tuple[Any, float] | None = None
    """A question that was not answered in time yet, and when silence began."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.number}"

    @property
    def see(self) -> str:
        """Return where its log is, and the line in it that states why an engine failed, if there is one."""
        try:
            with self.log.open("rb") as log:  # never mapped: a log is cut while it is in use
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                cause = cause_in(log.read().decode(errors="replace"))
        except OSError:  # it is on another host
            cause = ""
        return f"its log says '{shortened(cause, _QUOTED_CHARACTERS)}'; see {self.log}" if cause else f"see {self.log}"

    @property
    def state(self) -> str:
        running = self.running  # read once: the observer's thread looks as well as the one that polls
        if running is None:
            return "starting"
        return "finished" if done(running) else "working"

    def facts(self) -> ProcessStatus:
        """Return its status now; never blocks."""
        host, pid = self._whereabouts()
        return ProcessStatus(
            name=self.name,
            role=self.role,
            number=self.number,
            pool=self.pool,
            state=self.state,
            restarts=self.restarts.total,
            host=host,
            pid=pid,
            log=str(self.log),
        )

    def begin_work(self, call: Any) -> None:  # noqa: ANN401 -- a Ray call
        self.running = call
        self.restarts.working_since_s = time.monotonic()

    def forget(self) -> None:
        self.handle = self.running = self._where = self._owed = None

    def _whereabouts(self) -> tuple[str, int]:
        found, handle = self._where, self.handle  # read once, as above
        where = found
        if where is None and handle is not None:
            where = handle.whereabouts.remote()
        if isinstance(where, ray.ObjectRef) and done(where):
            where = None if failure(where) else ray.get(where)
        if self._where is found:  # else it was started again meanwhile, or the other thread was faster
            self._where = where
        return where if isinstance(where, tuple) else ("", 0)

    def ask(self, method: str, patience_s: float, notify: Notify) -> Any:  # noqa: ANN401 -- what the role answers
        """Call a method without arguments; None if it is not answered in time, or failed.

        The next question takes an answer that is owed. A silence of `SILENCE_S` is reported.
        """
        now = time.monotonic()
        pending, asked_s = self._owed or (getattr(self.handle, method).remote(), now)
        ready, _ = ray.wait([pending], timeout=patience_s)
        if ready:
            self._owed = None
            try:
                return ray.get(ready[0])
            except RayError:
                return None  # the next look at its work says why
        silence = time.monotonic() - asked_s
        if silence > SILENCE_S:
            notify("silent", f"{self.name} has not answered for {silence:.0f} s; see {self.log}")
            asked_s = time.monotonic()
        self._owed = pending, asked_s
        return None


def results(
    calls: Sequence[tuple[RoleProcess, Any]], what: str, deadline: float, check: Check = lambda: None
) -> list[Any]:
    """Wait for calls that several processes are in together, and return their results.

    The first failure is reported: the others often fail because of it. `what` is for the error, as 'to be ready'; the
    deadline is on the monotonic clock. WrongInput if a call failed because of the task or the model, RunFailed if it
    failed otherwise, or did not end in time.
    """
    started = time.monotonic()
    waiting = {call: process for process, call in calls}
    while waiting:
        left_s = max(0.1, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left_s, _CHECK_EVERY_S))
        check()
        if ready:
            process = waiting.pop(ready[0])
            error = failure(ready[0])
            if error is not None and isinstance(cause := _cause(error), TaskError | ModelFolderError | UserFileError):
                raise WrongInput(f"{process.name}: {cause}")
            if error is not None:
                raise RunFailed(f"{process.name} failed: {reason(error)}; {process.see}")
        elif left_s <= _CHECK_EVERY_S:
            process = next(iter(waiting.values()))
            raise RunFailed(
                f"waited {time.monotonic() - started:.0f} s for {process.name} {what} and gave up; {process.see}"
            )
    return [ray.get(call) for _, call in calls]


def done(pending: object) -> bool:
    ready, _ = ray.wait([pending], timeout=0)
    return bool(ready)


def failure(pending: object) -> Exception | None:
    """Return the error that a call has ended with; None if it ended well, or has not ended.

    A RayTaskError was raised in the process; any other is of the process itself: it died, or its machine did.
    """
    if not done(pending):
        return None
    try:
        ray.get(pending)
    except RayError as error:
        return error
    return None


def outcome(pending: object) -> str:
    """Return why a call that has ended did so badly; empty if it ended well."""
    error = failure(pending)
    return "" if error is None else reason(error)


def _cause(error: Exception) -> Exception:
    """Return what the role raised, also while Ray read the arguments of the call there; else the error itself."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    inner: object = getattr(cause, "client_exc", None)  # of a RaySystemError
    return inner if isinstance(inner, Exception) else cause


def reason(error: Exception) -> str:
    """Return the sentence of the error that was raised in the role, out of Ray's page about it."""
    cause = _cause(error)
    if isinstance(cause, UserFileError):
        return " ".join(str(cause).split())
    lines = [line.strip() for line in str(cause).splitlines() if line.strip() and _NO_REASON not in line]
    if not lines:
        return type(cause).__name__
    if isinstance(error, RayTaskError) or "creation task" in lines[0]:
        return lines[-1] if "creation task" in lines[0] else f"{type(cause).__name__}: {lines[-1]}"
    return lines[0]


def cause_in(log: str) -> str:
    """Return the line of a log that states why the engine of its last process failed; empty if there is none."""
    own = log.rpartition(_STARTED)[2]
    found = ([line for line in re.findall(cause, own, re.M) if not _FOLLOWS.search(line)] for cause in _CAUSES)
    return next((lines[-1] for lines in found if lines), "")
