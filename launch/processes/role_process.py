"""`Role` hosts a part of a run in its own process; `RoleProcess` is the supervisor's record of that process."""

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

from leeway.actors.tasks.task import TaskError
from leeway.common.hf_folder import ModelFolderError
from leeway.common.user_input import UserFileError
from leeway.launch.host import OWNER_ONLY, configure_logging
from leeway.launch.observe.status import ProcessStatus
from leeway.launch.text import shortened

MAX_RESTARTS = 3
"""Maximum number of restarts in a row; a process that fails again is not restarted, because its failure persists."""
RESTART_RESET_S = 3600.0
"""Seconds of work after which the count of restarts starts again at 0."""
SILENCE_S = 60.0
"""Seconds without a reply after which a role is reported as silent; normally, a role replies within milliseconds."""
_CHECK_INTERVAL_S = 1.0
LOG_BYTES = 64 * 2**20  # size at which the log of a role is rotated


_STARTED = "this process has started\n"
"""Separates the output of successive processes of a role in one log."""
_CAUSES = (
    r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] ([\w.]+(?:Error|Exception)\b.*)$",
    r"^(Fatal Python error: .*|terminate called .*)$",
    r'(?:^Process (?:EngineCore|Worker)|File "<string>", line 1, in <module>)(?s:.*?)^([\w.]+Error\b.*)$',
)
"""Patterns of the log lines that state why an engine process failed."""
_FOLLOWS = re.compile("root cause|EngineDead|Engine ?[Cc]ore|Executor failed|initialization failed")
"""Matches log lines of processes that failed because another process failed."""
_TAIL_BYTES, _QUOTED_CHARACTERS = 2**18, 300
_NO_REASON = "For further information visit"  # the last line of pydantic's errors, which states no reason


Notify = Callable[[str, str], None]
"""Callback that receives the kind and the text of an event."""
Check = Callable[[], None]
"""Callback before a start and during a wait; raises an error if the operation can no longer succeed."""


class RunFailed(RuntimeError):
    """The run cannot continue; the text names the role, the reason and the log."""


class WrongInput(RunFailed):
    """A role loaded an invalid input that the launcher could not check."""


class Restarts:
    """A restart budget: at most `limit` restarts in a row.

    The count returns to 0 after `reset_after_s` of work since the last restart. The learner's count returns to 0 only
    after a newer checkpoint.
    """

    def __init__(self, limit: int, reset_after_s: float = RESTART_RESET_S) -> None:
        self._limit = limit
        self._reset_after_s = reset_after_s
        self._in_a_row = 0
        self.total = 0
        self.working_since_s: float | None = None
        """Monotonic time at which the work started; None before that, and always None for the learner."""

    @property
    def in_a_row(self) -> int:
        since_s = self.working_since_s
        return 0 if since_s is not None and time.monotonic() - since_s >= self._reset_after_s else self._in_a_row

    @property
    def are_exhausted(self) -> bool:
        """Whether the next failure is final."""
        return self.in_a_row >= self._limit

    def reset(self) -> None:
        """Set the count to 0, because the last restart succeeded."""
        self._in_a_row = 0

    def count(self) -> None:
        self.total, self._in_a_row = self.total + 1, self.in_a_row + 1
        self.working_since_s = None


class Role:
    """Base class of the Ray actors that host the parts of a run, each in its own process with its own log.

    Ray places the process on a host, carries a few calls, and ends the process with the run. Data and weights never
    pass through Ray. A role imports the hosted code only in its own process.
    """

    def __init__(self, log: Path) -> None:
        """Redirect all output of this process, including C code, to `log`; only the owner can read its files."""
        os.umask(OWNER_ONLY)
        log.parent.mkdir(parents=True, exist_ok=True)  # the folder is missing on hosts that do not share the run folder
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        configure_logging()
        print(_STARTED, end="", flush=True)
        faulthandler.enable()
        threading.Thread(target=_rotate, args=(log,), name="log", daemon=True).start()

    def location(self) -> tuple[str, int]:
        """Return the address of this host in the Ray cluster, and the pid of this process."""
        return address_here(), os.getpid()


def _rotate(log: Path) -> None:
    """Limit the size of a log. A large log is copied to LOG.1 and truncated, because processes hold the file open."""
    while True:
        time.sleep(_CHECK_INTERVAL_S)
        with contextlib.suppress(OSError):  # the disk may be full: retry later
            if log.stat().st_size >= LOG_BYTES:
                shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                os.truncate(log, 0)


def address_here() -> str:
    """Return the address of this machine in the Ray cluster."""
    return str(ray.util.get_node_ip_address())


@dataclass
class RoleProcess:
    """One process of a role, as the supervisor tracks it."""

    role: str
    number: int
    handle: Any
    log: Path
    restarts: Restarts
    """Restart budget; all stages of the learner share one budget, because they restart together."""
    running: Any = None
    """The pending Ray call of the role's work; None before the work begins."""
    started_s: float = field(default_factory=time.monotonic)
    pool: str = ""
    _where: Any = None
    """Pending call of `location`, replaced by its result, the host and the pid."""
    _overdue: tuple[Any, float] | None = None
    """A call without a reply, and the time of the call or of the last report about its silence."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.number}"

    @property
    def log_hint(self) -> str:
        """Return a hint with the path of the log, and a quote of the log line that states why an engine failed."""
        try:
            with self.log.open("rb") as log:  # do not map the log into memory: it may be truncated while it is read
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                cause = cause_in(log.read().decode(errors="replace"))
        except OSError:  # the log is on another host
            cause = ""
        return f"cause in log: '{shortened(cause, _QUOTED_CHARACTERS)}'; see {self.log}" if cause else f"see {self.log}"

    @property
    def state(self) -> str:
        running = self.running  # read once, because another thread may set `running`
        if running is None:
            return "starting"
        return "finished" if done(running) else "working"

    def facts(self) -> ProcessStatus:
        """Return the current status of the process, without blocking."""
        host, pid = self._location()
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

    def kill(self) -> None:
        if self.handle is not None:  # None before the start, and while a restart is pending
            ray.kill(self.handle, no_restart=True)

    def forget(self) -> None:
        self.handle = self.running = self._where = self._overdue = None

    def _location(self) -> tuple[str, int]:
        found, handle = self._where, self.handle  # read each once, because another thread may set them
        where = found
        if where is None and handle is not None:
            where = handle.location.remote()
        if isinstance(where, ray.ObjectRef) and done(where):
            where = None if failure(where) else ray.get(where)
        if self._where is found:  # else another thread set `_where` or restarted the process
            self._where = where
        return where if isinstance(where, tuple) else ("", 0)

    def ask(self, method: str, timeout_s: float, notify: Notify) -> Any:  # noqa: ANN401 -- the result of the method
        """Call a method without arguments; return its result, or None if the call times out or fails.

        If an earlier call is pending, wait for its result instead of calling again. Report a silence of `SILENCE_S`.
        """
        now = time.monotonic()
        pending, asked_s = self._overdue or (getattr(self.handle, method).remote(), now)
        ready, _ = ray.wait([pending], timeout=timeout_s)
        if ready:
            self._overdue = None
            try:
                return ray.get(ready[0])
            except RayError:
                return None  # the next check of `running` reports the reason
        silence = time.monotonic() - asked_s
        if silence > SILENCE_S:
            notify("silent", f"{self.name} has not responded for {silence:.0f} s; see {self.log}")
            asked_s = time.monotonic()
        self._overdue = pending, asked_s
        return None


def results(
    calls: Sequence[tuple[RoleProcess, Any]], what: str, deadline: float, check: Check = lambda: None
) -> list[Any]:
    """Wait for concurrent calls to several processes, and return their results.

    Only the first failure is raised, because one failure often causes others. `what` completes the error text, such as
    'to be ready'. `deadline` is a monotonic time. Raise WrongInput if a call failed because of the task or the model,
    and RunFailed if a call failed for another reason or timed out.
    """
    started = time.monotonic()
    waiting = {call: process for process, call in calls}
    while waiting:
        left_s = max(0.1, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left_s, _CHECK_INTERVAL_S))
        check()
        if ready:
            process = waiting.pop(ready[0])
            error = failure(ready[0])
            if error is not None and isinstance(cause := _cause(error), TaskError | ModelFolderError | UserFileError):
                raise WrongInput(f"{process.name}: {cause}")
            if error is not None:
                raise RunFailed(f"{process.name} failed: {reason(error)}; {process.log_hint}")
        elif left_s <= _CHECK_INTERVAL_S:
            process = next(iter(waiting.values()))
            raise RunFailed(
                f"timed out after {time.monotonic() - started:.0f} s waiting for {process.name} {what}; "
                f"{process.log_hint}"
            )
    return [ray.get(call) for _, call in calls]


def done(pending: object) -> bool:
    ready, _ = ray.wait([pending], timeout=0)
    return bool(ready)


def failure(pending: object) -> Exception | None:
    """Return the error of a call; None if the call succeeded or is still pending.

    A RayTaskError means that the method raised an exception. Any other error means that the process or its host died.
    """
    if not done(pending):
        return None
    try:
        ray.get(pending)
    except RayError as error:
        return error
    return None


def outcome(pending: object) -> str:
    """Return why a completed call failed; '' if the call succeeded."""
    error = failure(pending)
    return "" if error is None else reason(error)


def _cause(error: Exception) -> Exception:
    """Return the exception that the role, or Ray's decoding of its arguments, raised; if there is none, the error."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    inner: object = getattr(cause, "client_exc", None)  # RaySystemError has this attribute
    return inner if isinstance(inner, Exception) else cause


def reason(error: Exception) -> str:
    """Return the message of the error that was raised in the role, extracted from Ray's report."""
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
    """Return the log line that states why the engine of the last process failed; '' if no line does."""
    own = log.rpartition(_STARTED)[2]
    found = ([line for line in re.findall(cause, own, re.M) if not _FOLLOWS.search(line)] for cause in _CAUSES)
    return next((lines[-1] for lines in found if lines), "")
