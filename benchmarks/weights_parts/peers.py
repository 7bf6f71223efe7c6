"""Worker processes of a measurement, called over a pipe.

`python -m benchmarks.weights_parts.peers ROLE OPTIONS` runs one worker, which reads calls from standard input as one
JSON object per line. The worker exits when the pipe closes, and therefore also when its parent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import MeasurementFailed, environment

Figures = dict[str, Any]

ROLES = {
    "service": "handover:Service",
    "clients": "handover:Clients",
    "copying": "handover:Copying",
    "receiver": "handover:Receiver",
    "sender": "training:Sender",
    "samples": "training:Sampling",
    "delta": "training:DeltaLearner",
    "learner": "training:PublishingLearner",
    "engine": "engine:FollowingEngine",
}
"""Role of a worker -> module and class of its object."""
CALL_LIMIT_S = 120.0
END_WITHIN_S = 15.0


class Peer:
    """A subprocess that creates an object of its role's class from the options, and runs calls of its methods."""

    def __init__(self, role: str, **options: object) -> None:
        """Start the process, which initializes in the background; the first call waits for the initialization.

        Args:
            role: key of ROLES.
            options: arguments of the role's class, as JSON values and paths.
        """
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, role, json.dumps(options, default=str)],
            cwd=ROOT,
            env=environment(HF_HUB_OFFLINE="1", PYTHONFAULTHANDLER="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # with a buffer, closing a broken pipe would write to the pipe again
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        """Process id of the subprocess."""
        return self._process.pid

    def call(self, method: str, *, limit_s: float = CALL_LIMIT_S, **arguments: object) -> Any:  # noqa: ANN401 -- JSON
        """Call a method of the role, wait for its end, and return its result.

        Raises:
            MeasurementFailed: the method raised, took longer than `limit_s`, or the process exited.
        """
        self.begin(method, **arguments)
        return self.result(method, limit_s=limit_s)

    def begin(self, method: str, **arguments: object) -> None:
        """Start a call of a method; `result` waits for the end of the call."""
        assert self._process.stdin is not None
        call = json.dumps({"method": method, "arguments": arguments}, default=str)
        try:
            self._process.stdin.write(call.encode() + b"\n")
        except BrokenPipeError as error:
            raise MeasurementFailed(f"the process of the {self.role} exited before '{method}'") from error

    def result(self, what: str, *, limit_s: float = CALL_LIMIT_S) -> Any:  # noqa: ANN401 -- JSON
        """Wait for a call that `begin` started, and return its result; raises the errors of `call`."""
        answer = json.loads(self._line(what, limit_s))
        if "error" in answer:
            raise MeasurementFailed(f"{self.role}, '{what}': {answer['error']}")
        return answer["result"]

    def has_result(self) -> bool:
        """Return whether `result` would return immediately."""
        assert self._process.stdout is not None
        return b"\n" in self._rest or bool(select.select([self._process.stdout.fileno()], [], [], 0)[0])

    def disconnect(self) -> None:
        """Close the pipe to the process, like the exit of this process would do."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process if it is running; later calls have no effect."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Request the process to exit, and kill it after END_WITHIN_S; later calls have no effect."""
        process = self._process
        assert process.stdin is not None
        try:
            if not process.stdin.closed:
                self.begin("end")
            process.wait(END_WITHIN_S)
        except (MeasurementFailed, subprocess.TimeoutExpired):
            process.kill()
            process.wait(END_WITHIN_S)
        process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.kill()
        self.end()

    def _line(self, what: str, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MeasurementFailed(f"the {self.role} took longer than {limit_s:g} s for '{what}'")
            data = os.read(descriptor, 65536)
            if not data:
                status = self._process.wait(END_WITHIN_S)
                raise MeasurementFailed(
                    f"the process of the {self.role} exited during '{what}' with status {status}; see its output above"
                )
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def call_all(peers: Iterable[Peer], method: str, *, limit_s: float = CALL_LIMIT_S, **arguments: object) -> list[Any]:
    """Make the same call to several peers at the same time; return the result of each peer."""
    peers = list(peers)
    for peer in peers:
        peer.begin(method, **arguments)
    return [peer.result(method, limit_s=limit_s) for peer in peers]


def log(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


# --- the process of a peer -----------------------------------------------------------------------


def lines_of(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[bytes]:
    """Return a queue of the lines of standard input. At the end of the input, exit, because the parent has exited."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    def watch() -> None:
        rest = b""
        while data := os.read(0, 65536):  # a buffered reader would hold its lock at interpreter exit
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(queue.put_nowait, line)
        os._exit(1)

    threading.Thread(target=watch, name="calls", daemon=True).start()
    return queue


async def main() -> None:
    """Create the object of the role, then run calls in order and print their results."""
    name, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the results
    lines = lines_of(asyncio.get_running_loop())
    module, _, kind = ROLES[name].partition(":")
    role = getattr(importlib.import_module(f"benchmarks.weights_parts.{module}"), kind)(**json.loads(options))
    while True:
        call: dict[str, Any] = json.loads(await lines.get())
        if call["method"] == "end":
            break
        answer: dict[str, Any]
        try:
            found = getattr(role, call["method"])(**call["arguments"])
            answer = {"result": await found if inspect.isawaitable(found) else found}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers, flush=True)
    closing = role.close()
    if inspect.isawaitable(closing):
        await closing


if __name__ == "__main__":
    asyncio.run(main())
