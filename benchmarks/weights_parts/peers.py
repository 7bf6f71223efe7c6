"""Processes that do what they are told: the sides of a measurement, each with memory and threads of its own.

`python -m benchmarks.weights_parts.peers ROLE OPTIONS` is one of them: its calls come on standard input, one JSON to a
line. It ends when the pipe to it closes, so also with a parent that is killed.
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
"""Role -> module and class."""
CALL_LIMIT_S = 120.0
END_WITHIN_S = 15.0


class Peer:
    """A process of its own in one role: an object of the role's class, made of the options."""

    def __init__(self, role: str, **options: object) -> None:
        """Start it; the role is taken in the background, and the first call waits for that.

        Args:
            role: which.
            options: JSON values and paths, for the role.
        """
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, role, json.dumps(options, default=str)],
            cwd=ROOT,
            env=environment(HF_HUB_OFFLINE="1", PYTHONFAULTHANDLER="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # or a pipe that broke would be written to again when it is closed
        )
        self._rest = b""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def call(self, method: str, *, limit_s: float = CALL_LIMIT_S, **arguments: object) -> Any:  # noqa: ANN401 -- JSON
        """Call a method of the role and wait for what it returns.

        Raises:
            MeasurementFailed: it raised, took longer than `limit_s`, or the process is gone.
        """
        self.begin(method, **arguments)
        return self.result(method, limit_s=limit_s)

    def begin(self, method: str, **arguments: object) -> None:
        """Begin a call; `result` waits for its end."""
        assert self._process.stdin is not None
        call = json.dumps({"method": method, "arguments": arguments}, default=str)
        try:
            self._process.stdin.write(call.encode() + b"\n")
        except BrokenPipeError as error:
            raise MeasurementFailed(f"the process of the {self.role} is gone before '{method}'") from error

    def result(self, what: str, *, limit_s: float = CALL_LIMIT_S) -> Any:  # noqa: ANN401 -- JSON
        """What a call that was begun returns; as `call`."""
        answer = json.loads(self._line(what, limit_s))
        if "error" in answer:
            raise MeasurementFailed(f"{self.role}, '{what}': {answer['error']}")
        return answer["result"]

    def has_answered(self) -> bool:
        """Would `result` return at once?"""
        assert self._process.stdout is not None
        return b"\n" in self._rest or bool(select.select([self._process.stdout.fileno()], [], [], 0)[0])

    def hang_up(self) -> None:
        """Close the pipe to it, as the end of this process would."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """End it without asking, where it has not ended. May be called twice."""
        self._process.kill()
        self.end()

    def end(self) -> None:
        """Ask the process to end, and kill it where it does not. May be called twice."""
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
                    f"the process of the {self.role} ended during '{what}' with status {status}; it said why above"
                )
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def call_all(peers: Iterable[Peer], method: str, *, limit_s: float = CALL_LIMIT_S, **arguments: object) -> list[Any]:
    """The same call to several peers at once; what each returns."""
    peers = list(peers)
    for peer in peers:
        peer.begin(method, **arguments)
    return [peer.result(method, limit_s=limit_s) for peer in peers]


def say(text: str) -> None:
    """Progress, for whoever watches."""
    print(text, file=sys.stderr, flush=True)


# --- the process of a peer -----------------------------------------------------------------------


def lines_of(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[bytes]:
    """What comes on standard input. Its end is the end of this process: whoever gave orders is gone."""
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    def watch() -> None:
        rest = b""
        while data := os.read(0, 65536):  # no buffered reader: its lock would be held when the interpreter ends
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                loop.call_soon_threadsafe(queue.put_nowait, line)
        os._exit(1)

    threading.Thread(target=watch, name="orders", daemon=True).start()
    return queue


async def main() -> None:
    """Take the role, then answer every call in turn."""
    name, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
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
