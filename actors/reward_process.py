"""RewardProcess: a reward function in its own process, which contains hangs, crashes and memory exhaustion.

The process loads the function from the `[task]` section of the config, receives problems and completions as JSON, and
returns numbers. The process runs one call at a time in its main thread, where alarms and signal handlers work. One
event loop awaits the results of all `async def` calls, so that connections persist. If a call does not return, the
parent of the process kills the process and all its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import io
import json
import logging
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, cast

import msgspec
import psutil
from pydantic import TypeAdapter

from leeway.actors.config import ADDED_ENV
from leeway.actors.sandbox import HINT, adopt_orphans, cut_network, die_with_parent
from leeway.actors.tasks import Problem, RewardFunction, TaskError, load_reward
from leeway.actors.tasks.config import Classifier, Judge, TaskConfig
from leeway.actors.tasks.task import SAMPLED, TOOK_TOO_LONG, Call, FileReward, NoScore, Sampled

MEMORY_BYTES = 16 * 2**30
"""Soft limit in bytes of a reward process's memory, except for classifiers. A reward file can raise the limit."""
_EXIT_S = 5.0
"""Timeout in seconds for the exit of a killed process; a process with much memory takes longest."""
_POLL_S = 0.005
_OOM_SCORE = 1000
"""OOM score adjustment: the kernel kills the reward process before the actor."""
_MAX_CHARACTERS = 4000
"""Maximum length of a traceback, and of any other text from a user's function."""
_NOT_STARTED = "its process did not start"
_CLOSED, _CLOSED_STATUS = "the reward closed the descriptor through which its process replies", 121
_LENGTH = struct.Struct("!I")
_INTERNAL_FOLDERS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
"""Folders of code that runs between this module and the user's function; tracebacks omit this code."""
_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); from leeway.actors.reward_process import serve; serve(*sys.argv[2:])"
)


class CallFailed(Exception):
    """A call of a reward function failed."""

    def __init__(
        self,
        why: str,
        detail: str = "",
        *,
        where: str = "",
        trace: str = "",
        lost: bool = False,
        is_timeout: bool = False,
    ) -> None:
        super().__init__(f"{why}: {detail}" if detail else why)
        self.why = why
        """Reason of the failure. Failures are counted by reason, so the text must not contain details of a sample."""
        self.where = where
        """The line of the user's function, if known."""
        self.trace = trace
        self.lost = lost
        """True if the process ended during the call, or must be ended."""
        self.is_timeout = is_timeout


Value = float | CallFailed | None
"""Value of a sample: a finite number, None if the function does not apply, or the error of this single sample."""


class _Outcome(msgspec.Struct, omit_defaults=True):
    """Outcome of a call, or of loading the function."""

    values: list[float | None] = []
    without: dict[int, tuple[str, str]] = {}
    """Maps the index of a sample without a value to a reason and details."""
    logged: dict[str, float] = {}
    """Mean of the values that the function logged by name."""
    reads: list[str] = []
    """After loading the function: the arguments of `SAMPLED` that it names."""
    why: str = ""
    detail: str = ""
    where: str = ""
    trace: str = ""

    def values_or_failure(self) -> list[Value]:
        if self.why:
            raise CallFailed(self.why, self.detail, where=self.where, trace=self.trace)
        values: list[Value] = list(self.values)
        for number, (why, detail) in self.without.items():
            values[number] = CallFailed(why, detail, is_timeout=why == TOOK_TOO_LONG)
        return values


def _environment() -> dict[str, str]:
    """Return the environment of the run's start: a reward may need the Hugging Face Hub, or compile a model."""
    added = os.environ.get(ADDED_ENV, "").split(",")
    return {name: value for name, value in os.environ.items() if name not in added}


class RewardProcess:
    """An actor's handle to a reward process."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._is_ended = False
        self._reads: Sequence[str] = ()
        self.logged: dict[str, float] = {}
        """Values that the last call logged."""

    @classmethod
    async def start(cls, function: RewardFunction, timeout_s: float) -> RewardProcess:
        """Start a process that loads the function within `timeout_s` and exits when the calling process exits.

        Raises CallFailed if the function cannot be loaded, or if the process exits or times out.
        """
        local, remote = socket.socketpair()
        root, descriptor = str(Path(__file__).parents[2]), remote.fileno()
        try:
            with remote:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, root, str(descriptor)],
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[descriptor],
                    # a separate process group gets no signals from the terminal; a separate session would be
                    # scheduled as one group (CONFIG_SCHED_AUTOGROUP) and get little CPU time beside busy engines
                    process_group=0,
                )
        except OSError as error:
            local.close()
            raise CallFailed(_NOT_STARTED, str(error)) from error
        started = cls(process, *await asyncio.open_connection(sock=local))
        setup = {
            "function": [function.name, list(function.columns), function.reference, function.has_messages],
            "task": function.task.model_dump(mode="json"),
            "level": logging.getLogger().getEffectiveLevel(),
        }
        is_up = False
        try:
            async with asyncio.timeout(timeout_s):
                loaded = await started._request(setup)
                loaded.values_or_failure()
            started._reads = loaded.reads
            is_up = True
        except TimeoutError:
            raise CallFailed(_NOT_STARTED, f"loading the function took longer than {timeout_s:g} s") from None
        except CallFailed as failure:
            file = function.reference.rpartition(":")[0]
            where = f"importing {file}: " if file and failure.lost else ""
            raise CallFailed(_NOT_STARTED, f"{where}{failure}") from None
        finally:
            if not is_up:
                await started.end()
        return started

    @property
    def is_alive(self) -> bool:
        return not self._is_ended and not self._reader.at_eof() and self._process.poll() is None

    async def call(
        self, problems: Sequence[Problem], completions: Sequence[str], sampled: Sequence[Sampled | None]
    ) -> list[Value]:
        """Return each sample's value. If the caller stops waiting, the caller must also `end` the process.

        Raises CallFailed if the function fails or the process exits.
        """
        outcome = await self._request(_call_message(problems, completions, sampled, self._reads))
        self.logged = outcome.logged
        return outcome.values_or_failure()

    async def end(self) -> None:
        """Kill the process and its descendants; wait up to `_EXIT_S` for the exit. Idempotent."""
        self._is_ended = True
        self._writer.transport.abort()
        await self._status()

    async def _request(self, message: object) -> _Outcome:
        data = json.dumps(message).encode()
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            await self._writer.drain()
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return msgspec.json.decode(await self._reader.readexactly(length), type=_Outcome)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._status()
            why = _CLOSED if status == _CLOSED_STATUS else f"the reward process ended with {_describe(status)}"
            raise CallFailed(why, lost=True) from None
        except msgspec.DecodeError as error:
            raise CallFailed("the reward process sent an invalid reply", str(error), lost=True) from None

    async def _status(self) -> int | None:
        deadline = time.monotonic() + _EXIT_S
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._process.kill()  # no effect if the process has exited
        return status


def _call_message(
    problems: Sequence[Problem], completions: Sequence[str], sampled: Sequence[Sampled | None], reads: Sequence[str]
) -> dict[str, Any]:
    if reads and None in sampled:
        raise CallFailed("the function reads sampled tokens", "set model.path to a folder with a tokenizer")
    distinct = {id(problem): problem for problem in problems}  # samples of a group share a problem
    place = {key: number for number, key in enumerate(distinct)}
    return {
        "problems": [[each.question, each.prompt, each.columns, each.index] for each in distinct.values()],
        "which": [place[id(problem)] for problem in problems],
        "completions": list(completions),
        "sampled": {name: [each(name) for each in sampled if each] for name in reads},
    }


def _describe(status: int | None) -> str:
    if status is None:
        return "no status"
    if status >= 0:
        return f"exit status {status}"
    hint = ", possibly out of memory" if status == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-status).name}{hint}"


# --- inside the reward process ------------------------------------------------------------------------


def serve(descriptor: str) -> None:
    """Load a function and run its calls until the actor closes the channel."""
    channel = io.FileIO(int(descriptor), "r+")
    os.set_inheritable(channel.fileno(), False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent may have blocked some signals
    if sys.platform == "linux":
        _fork_guarded(channel.fileno())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    os.register_at_fork(after_in_child=channel.close)  # forked processes must not keep the channel open
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stream = cast("BinaryIO", io.BufferedRWPair(channel, channel))
    inode = os.fstat(channel.fileno()).st_ino

    def reply(outcome: _Outcome) -> None:
        data = msgspec.json.encode(outcome)
        with contextlib.suppress(OSError, ValueError):  # user code may close the channel and reuse its number
            if os.fstat(channel.fileno()).st_ino == inode:
                stream.write(_LENGTH.pack(len(data)) + data)
                return stream.flush()
        os._exit(_CLOSED_STATUS)

    setup = _read(stream)
    if setup is None:
        return
    logging.basicConfig(level=setup["level"], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name, *rest = setup["function"]
    task: Any = TypeAdapter(TaskConfig).validate_python(setup["task"])
    function = RewardFunction(name, task, *rest)
    if not isinstance(function.named, Classifier):  # a classifier allocates as much as its weights need
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        if not (task.reward_network or isinstance(function.named, Judge)):
            cut_network()
        call = load_reward(function)
    except TaskError as error:
        reply(_Outcome(why=_clean(str(error))))
        return
    except OSError as error:  # raised by the kernel: errors of the user's file are raised as TaskError
        reply(_Outcome(why="task.reward_network = false, but the kernel refuses isolation", detail=f"{error}; {HINT}"))
        return
    reply(_Outcome(reads=[name for name in SAMPLED if isinstance(call, FileReward) and name in call.named]))
    with asyncio.Runner() as runner:
        while (request := _read(stream)) is not None:
            reply(_outcome(call, request, runner))


def _fork_guarded(channel: int) -> None:
    """Fork and return in the child. The parent kills all its descendants once the actor or the child has exited."""
    this = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    if not (child := os.fork()):
        die_with_parent()
        os.setpgid(0, 0)  # a signal to the child's process group must not reach the parent
        if os.getppid() == this:
            return
        os._exit(0)
    line, watched = socket.socket(fileno=channel), select.poll()
    watched.register(line, 0)  # POLLHUP is always reported: the actor exited or closed the channel
    watched.register(os.pidfd_open(child))
    watched.poll()
    line.close()
    deadline, status = time.monotonic() + _EXIT_S, 0
    with contextlib.suppress(ChildProcessError):  # no children are left
        while time.monotonic() < deadline:
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
            time.sleep(_POLL_S)
    if os.WIFSIGNALED(status):  # end by the signal that ended the child, without a second core dump
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(this, os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _read(stream: BinaryIO) -> Any:  # noqa: ANN401 -- a message, or None at the stream's end
    head = stream.read(_LENGTH.size)
    return json.loads(stream.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None


def _outcome(call: Call | FileReward, request: dict[str, Any], runner: asyncio.Runner) -> _Outcome:
    problems = [Problem(*each) for each in request["problems"]]
    problems = [problems[number] for number in request["which"]]
    completions: list[str] = request["completions"]
    logged: dict[str, list[float]] = {}

    def log_metric(name: str, value: float) -> None:
        if not re.fullmatch(r"\w[\w.-]{0,63}", str(name)) or name in ("mean", "std"):
            raise CallFailed("log_metric got an invalid name", f"{name!r}; use letters, digits and _, not mean or std")
        logged.setdefault(str(name), []).append(_finite(value))

    async def awaited(values: Any) -> Any:  # noqa: ANN401 -- the function is the user's
        return await values

    try:
        if isinstance(call, FileReward):
            values: Any = call.call(problems, completions, {**request["sampled"], "log_metric": log_metric})
        else:
            values = call(problems, completions)
        if inspect.isawaitable(values):
            values = runner.run(awaited(values))
        outcome = _checked(values, len(completions))  # inside `try`: the check calls methods of the user's values
        outcome.logged = {name: fmean(found) for name, found in logged.items()}
        return outcome  # noqa: TRY300 -- as above
    except CallFailed as failure:
        return _Outcome(why=failure.why, detail=_clean(str(failure).removeprefix(f"{failure.why}: ")))
    except BaseException as error:  # a user's function may raise any exception
        return _failed(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # a pending alarm would interrupt the next call


def _failed(error: BaseException) -> _Outcome:
    try:
        detail = str(error)
    except Exception as another:  # user code also formats the message
        detail = f"the error's message cannot be formatted: {type(another).__name__}"
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if isinstance(error, MemoryError) and soft != resource.RLIM_INFINITY:
        detail = f"{detail or 'out of memory'}; the limit of a reward process is {soft / 2**30:g} GiB"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_INTERNAL_FOLDERS)
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    trace = "".join(traceback.format_list(frames))[-_MAX_CHARACTERS:]
    return _Outcome(why=type(error).__name__, detail=_clean(detail), where=_clean(where), trace=_clean(trace))


def _clean(text: str) -> str:
    """Truncate a text, and replace characters that UTF-8 cannot encode."""
    return text[:_MAX_CHARACTERS].encode("utf-8", "replace").decode()


def _checked(values: Any, num_samples: int) -> _Outcome:  # noqa: ANN401 -- the function is the user's
    """Return exactly one finite number, None or NoScore per sample, or raise CallFailed."""
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise CallFailed("did not return a list", f"it returned a {type(values).__name__}")
    if len(values) != num_samples:
        raise CallFailed("wrong number of values", f"{len(values)} for {num_samples} samples")
    without = {
        number: (value.why, _clean(value.detail)) for number, value in enumerate(values) if isinstance(value, NoScore)
    }
    return _Outcome(
        [None if value is None or number in without else _finite(value) for number, value in enumerate(values)], without
    )


def _finite(value: Any) -> float:  # noqa: ANN401 -- the function is the user's
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise CallFailed("did not return a number", repr(value)) from error
    if not math.isfinite(number):
        raise CallFailed("returned a value that is not finite", repr(value))
    return number
