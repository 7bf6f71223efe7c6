"""Function calls in subprocesses with timeouts: `python -m benchmarks.lib.processes CALL`.

CALL is a JSON object with the function as "module:function" and its arguments. The last line of standard output is the
result, also as JSON; logs go to standard error. A subprocess exits when its parent dies.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from benchmarks.lib.machine import ROOT

SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment of every measured process. Tensors are small, so more threads would only compete for the cores."""
POLL_S = 0.1
END_WITHIN_S = 10.0
_PR_SET_PDEATHSIG = 1


class MeasurementFailed(RuntimeError):
    """Raised if a measurement ends without figures; the message has the reason."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables of a measured process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths), **more}


def end_at_sigterm() -> None:
    """Handle SIGTERM like Ctrl-C: shut the measured processes down, and exit with status 143."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def command_of(function: str, arguments: Mapping[str, object], *, python: Path | None = None) -> list[str]:
    """Return the command line of a call.

    Args:
        function: function to call, as "module:function".
        arguments: keyword arguments, as JSON values.
        python: interpreter; default: the current one.
    """
    call = json.dumps({"function": function, "arguments": arguments}, default=str)
    return [str(python or sys.executable), "-m", "benchmarks.lib.processes", call]


def call_in_processes(
    what: str,
    function: str,
    calls: Sequence[Mapping[str, object]],
    *,
    limit_s: float,
    python: Path | None = None,
) -> list[Any]:
    """Run each call of a function in its own subprocess; return the results. A failed call terminates all processes.

    Args:
        what: name of the measurement, for errors.
        function: function to call, as "module:function".
        calls: keyword arguments of each call, as JSON values.
        limit_s: timeout of all calls together, in seconds.
        python: interpreter of the environment to run in; default: the current one.

    Raises:
        MeasurementFailed: a process failed, or the timeout expired.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-answers-") as folder:
        answers = [Path(folder) / str(number) for number in range(len(calls))]
        try:
            for arguments, answer in zip(calls, answers, strict=True):
                command = command_of(function, arguments, python=python)
                with answer.open("wb") as output:
                    processes.append(subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=output))
            deadline = time.monotonic() + limit_s
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                if time.monotonic() > deadline:
                    raise MeasurementFailed(f"{what} took longer than {limit_s:g} s")
                time.sleep(POLL_S)
            found = [_answer(answer) for answer in answers]
            for number, (process, reply) in enumerate(zip(processes, found, strict=True)):
                status = process.poll()  # None if this process still runs and another one failed
                if status or (status == 0 and "result" not in reply):
                    why = reply.get("error", "see its output above")
                    raise MeasurementFailed(f"process {number} of {what} ended with status {status}: {why}")
        finally:
            end_families(*processes)
    return [reply["result"] for reply in found]


def _answer(path: Path) -> dict[str, Any]:
    """Return the JSON of the last line, or {} if this line is not complete JSON. Libraries may print other lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {}
    return found


def end_families(*processes: subprocess.Popen[Any]) -> None:
    """Terminate processes and all of their descendants; kill every process that is alive after END_WITHIN_S."""
    family: list[psutil.Process] = []
    for process in processes:
        if process.poll() is None:
            try:
                parent = psutil.Process(process.pid)
                family += [parent, *parent.children(recursive=True)]  # first the parent: it must not miss a child
            except psutil.NoSuchProcess:
                continue
    for member in family:
        _signal(member, "terminate")
    _, alive = psutil.wait_procs(family, timeout=END_WITHIN_S)
    for member in alive:
        _signal(member, "kill")
    psutil.wait_procs(alive, timeout=END_WITHIN_S)
    for process in processes:
        process.wait(END_WITHIN_S)


def _signal(member: psutil.Process, verb: str) -> None:
    try:
        getattr(member, verb)()
    except psutil.NoSuchProcess:
        return  # the process has exited already


def end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when the parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """Run the call of the command line, and print its result or error as JSON."""
    end_with_parent()
    call = json.loads(sys.argv[1])
    module, _, name = call["function"].partition(":")
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(**call["arguments"])}
    except Exception as error:
        traceback.print_exc()
        print("\n" + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        sys.exit(1)
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
