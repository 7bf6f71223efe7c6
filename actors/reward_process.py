"""RewardProcess: a reward function in a process of its own, where it may hang, crash or eat memory alone.

The process loads the function itself, from the task's section of the config: only problems and completions travel, as
JSON, and numbers come back. It makes one call at a time, in its main thread, where alarms and signal handlers work;
what an `async def` returns is awaited there, in one event loop for all calls, so connections last. A call that does not
end is ended with its process, and everything that it has started, by the parent of its process.
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
from typing import Any, BinaryIO, cast

import msgspec
import psutil
from pydantic import TypeAdapter

from actors.config import OFFLINE_ENV
from actors.sandbox import HINT, adopt_orphans, cut_network, die_with_parent
from actors.tasks import Problem, RewardFunction, TaskError, load_reward
from actors.tasks.config import Classifier, Judge, TaskConfig
from actors.tasks.task import TOOK_TOO_LONG, Call, NoScore

MEMORY_BYTES = 16 * 2**30
"""Soft limit of a process's allocations, except a classifier's: a file that needs more raises it itself."""
_END_S = 5.0
"""Bound of the kernel's end of a killed process; one that holds much memory takes longest."""
_LOOK_S = 0.005
_FIRST_TO_GO = 1000
"""OOM score: the reward's process is killed before the actor."""
_MOST_CHARACTERS = 4000
"""Of a traceback, and of any other text of a user's function."""
_NOT_STARTED = "its process did not start"
_CLOSED, _CLOSED_STATUS = "the reward closed the descriptor by which its process answers", 121
_LENGTH = struct.Struct("!I")
_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
"""Folders whose code is between us and the user's function."""
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from actors.reward_process import serve; serve(*sys.argv[2:])"


class CallFailed(Exception):
    """A call of a reward function did not deliver."""

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
        """Failures are counted by it, so it names no sample."""
        self.where = where
        """The line of the user's function, if there is one."""
        self.trace = trace
        self.lost = lost
        """Has it cost the process?"""
        self.is_timeout = is_timeout


Value = float | CallFailed | None
"""Of a sample: a finite number, None if the function does not apply, or why this sample alone has none."""


class _Outcome(msgspec.Struct, omit_defaults=True):
    """Of a call, or of loading the function."""

    values: list[float | None] = []
    without: dict[int, tuple[str, str]] = {}
    """Samples without a value -> why, and in detail."""
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
    """Return the environment that the run was started with: a reward may need the Hub."""
    taken = os.environ.get(OFFLINE_ENV, "").split(",")
    return {name: value for name, value in os.environ.items() if name not in taken}


class RewardProcess:
    """One process as its actor sees it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._is_ended = False

    @classmethod
    async def start(cls, function: RewardFunction, timeout_s: float) -> RewardProcess:
        """Start a process, and have it load the function within this time. It ends with this one.

        CallFailed if the function cannot be loaded, or the process ended, or took too long.
        """
        ours, its = socket.socketpair()
        root, descriptor = str(Path(__file__).parents[1]), its.fileno()
        try:
            with its:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, root, str(descriptor)],
                    stdin=subprocess.DEVNULL,
                    env=_environment(),
                    pass_fds=[descriptor],
                    # no signal of the terminal; a session of its own would do that too, but be scheduled as one
                    # (CONFIG_SCHED_AUTOGROUP), and wait beside busy engines
                    process_group=0,
                )
        except OSError as error:
            ours.close()
            raise CallFailed(_NOT_STARTED, str(error)) from error
        started = cls(process, *await asyncio.open_connection(sock=ours))
        about = {
            "function": [function.name, list(function.columns), function.reference],
            "task": function.task.model_dump(mode="json"),
            "level": logging.getLogger().getEffectiveLevel(),
        }
        is_up = False
        try:
            async with asyncio.timeout(timeout_s):
                (await started._ask(about)).values_or_failure()
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

    async def call(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Value]:
        """Return each sample's value. A caller that gives up ends the process.

        CallFailed if the function failed, or the process ended.
        """
        return (await self._ask(_asked(problems, completions))).values_or_failure()

    async def end(self) -> None:
        """End it, and whatever it has started; waits for the kernel, with a bound. Idempotent."""
        self._is_ended = True
        self._writer.transport.abort()
        await self._status()

    async def _ask(self, message: object) -> _Outcome:
        data = json.dumps(message).encode()
        try:
            self._writer.write(_LENGTH.pack(len(data)) + data)
            await self._writer.drain()
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return msgspec.json.decode(await self._reader.readexactly(length), type=_Outcome)
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._status()
            why = _CLOSED if status == _CLOSED_STATUS else f"the reward's process ended with {_in_words(status)}"
            raise CallFailed(why, lost=True) from None
        except msgspec.DecodeError as error:
            raise CallFailed("the reward's process does not answer as it should", str(error), lost=True) from None

    async def _status(self) -> int | None:
        deadline = time.monotonic() + _END_S
        while (status := self._process.poll()) is None and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        self._process.kill()  # where it has ended this does nothing
        return status


def _asked(problems: Sequence[Problem], completions: Sequence[str]) -> dict[str, Any]:
    distinct = {id(problem): problem for problem in problems}  # a group's samples share their problem
    place = {key: number for number, key in enumerate(distinct)}
    return {
        "problems": [[each.question, each.text, each.columns, each.index] for each in distinct.values()],
        "which": [place[id(problem)] for problem in problems],
        "completions": list(completions),
    }


def _in_words(status: int | None) -> str:
    if status is None:
        return "no status"
    if status >= 0:
        return f"exit status {status}"
    hint = ", as where memory is short" if status == -signal.SIGKILL else ""
    return f"signal {signal.Signals(-status).name}{hint}"


# --- in the process -----------------------------------------------------------------------------------


def serve(descriptor: str) -> None:
    """Load a function and make its calls, until the other end is closed."""
    channel = io.FileIO(int(descriptor), "r+")
    os.set_inheritable(channel.fileno(), False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who started us may hold some back
    if sys.platform == "linux":
        _stay_behind(channel.fileno())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_FIRST_TO_GO))
    os.register_at_fork(after_in_child=channel.close)  # else it is open while anything lives that the user's file forks
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stream = cast("BinaryIO", io.BufferedRWPair(channel, channel))
    inode = os.fstat(channel.fileno()).st_ino

    def answer(outcome: _Outcome) -> None:
        data = msgspec.json.encode(outcome)
        with contextlib.suppress(OSError, ValueError):  # the user's code may have closed it, and used its number again
            if os.fstat(channel.fileno()).st_ino == inode:
                stream.write(_LENGTH.pack(len(data)) + data)
                return stream.flush()
        os._exit(_CLOSED_STATUS)

    about = _read(stream)
    if about is None:
        return
    logging.basicConfig(level=about["level"], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    name, columns, reference = about["function"]
    task: Any = TypeAdapter(TaskConfig).validate_python(about["task"])
    function = RewardFunction(name, task, columns, reference)
    if not isinstance(function.named, Classifier):  # which allocates what its weights take
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        if not (task.reward_network or isinstance(function.named, Judge)):
            cut_network()
        call = load_reward(function)
    except TaskError as error:
        answer(_Outcome(why=_clean(str(error))))
        return
    except OSError as error:  # of the kernel: what the user's file raises is a TaskError
        answer(_Outcome(why="task.reward_network = false, and the kernel refuses", detail=f"{error}; {HINT}"))
        return
    answer(_Outcome())
    with asyncio.Runner() as runner:
        while (asked := _read(stream)) is not None:
            answer(_outcome(call, asked, runner))


def _stay_behind(channel: int) -> None:
    """Return in a child. This process guards it: once either end of the channel is gone it ends all that there is."""
    this = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    if not (child := os.fork()):
        die_with_parent()
        os.setpgid(0, 0)  # what it sends to its group is not for the guardian
        if os.getppid() == this:
            return
        os._exit(0)
    line, watched = socket.socket(fileno=channel), select.poll()
    watched.register(line, 0)  # that the actor has closed it, or is gone, is always reported
    watched.register(os.pidfd_open(child))
    watched.poll()
    line.close()
    deadline, status = time.monotonic() + _END_S, 0
    with contextlib.suppress(ChildProcessError):  # there are none any more
        while time.monotonic() < deadline:
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == child else status
            time.sleep(_LOOK_S)
    if os.WIFSIGNALED(status):  # end as it did, without another dump of memory
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(this, os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _read(stream: BinaryIO) -> Any:  # noqa: ANN401 -- a message, or None where there are no more
    head = stream.read(_LENGTH.size)
    return json.loads(stream.read(_LENGTH.unpack(head)[0])) if len(head) == _LENGTH.size else None


def _outcome(call: Call, asked: dict[str, Any], runner: asyncio.Runner) -> _Outcome:
    problems = [Problem(*each) for each in asked["problems"]]
    completions: list[str] = asked["completions"]

    async def awaited(values: Any) -> Any:  # noqa: ANN401 -- the function is the user's
        return await values

    try:
        values: Any = call([problems[number] for number in asked["which"]], completions)
        if inspect.isawaitable(values):
            values = runner.run(awaited(values))
        return _checked(values, len(completions))  # calls methods of what the function returned
    except CallFailed as failure:
        return _Outcome(why=failure.why, detail=_clean(str(failure).removeprefix(f"{failure.why}: ")))
    except BaseException as error:  # the function is the user's: it may raise anything
        return _failed(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left would strike another sample


def _failed(error: BaseException) -> _Outcome:
    try:
        detail = str(error)
    except Exception as another:  # its text is made by the user's code too
        detail = f"and its text cannot be made: {type(another).__name__}"
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if isinstance(error, MemoryError) and soft != resource.RLIM_INFINITY:
        detail = f"{detail or 'out of memory'}; a reward's process may allocate {soft / 2**30:g} GiB"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NOT_THE_USERS)
    ]
    where = f"{frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    trace = "".join(traceback.format_list(frames))[-_MOST_CHARACTERS:]
    return _Outcome(why=type(error).__name__, detail=_clean(detail), where=_clean(where), trace=_clean(trace))


def _clean(text: str) -> str:
    """Bound a text's length, and replace what UTF-8 cannot encode."""
    return text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def _checked(values: Any, num_samples: int) -> _Outcome:  # noqa: ANN401 -- the function is the user's
    """Return exactly one finite number, None or NoScore per sample, or raise CallFailed."""
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise CallFailed("returned no list", f"but a {type(values).__name__}")
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
        raise CallFailed("returned no number", repr(value)) from error
    if not math.isfinite(number):
        raise CallFailed("returned a value that is not finite", repr(value))
    return number
