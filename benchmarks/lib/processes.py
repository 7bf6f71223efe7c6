"""Functions called in processes of their own, with an end to every wait: `python -m benchmarks.lib.processes CALL`.

CALL is JSON: the function as "module:function", and its arguments. Its result is the last line of standard output, as
JSON too; what it says while it works goes to standard error. A process ends with its parent.
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
"""Small tensors: more threads fight for the cores."""
POLL_S = 0.1
END_WITHIN_S = 10.0
_PR_SET_PDEATHSIG = 1


class MeasurementFailed(RuntimeError):
    """A measurement ended without figures; says why."""


def environment(**more: str) -> dict[str, str]:
    """Of every process that is measured."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(paths), **more}


def end_at_sigterm() -> None:
    """Let what is being measured end in order, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def command_of(function: str, arguments: Mapping[str, object], *, python: Path | None = None) -> list[str]:
    """The command line of a call.

    Args:
        function: "module:function".
        arguments: JSON values.
        python: interpreter; default: this one.
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
    """What a function returns in processes of its own, one for each call; all are over when one of them fails.

    Args:
        what: is measured; named in errors.
        function: "module:function".
        calls: the arguments of each, JSON values.
        limit_s: no call may take longer.
        python: interpreter of the environment to run in; default: this one.

    Raises:
        MeasurementFailed: a process failed, or time is up.
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
            for number, (process, said) in enumerate(zip(processes, found, strict=True)):
                status = process.poll()  # None: it still runs, and another one failed
                if status or (status == 0 and "result" not in said):
                    why = said.get("error", "it said why above")
                    raise MeasurementFailed(f"process {number} of {what} ended with status {status}: {why}")
        finally:
            end_families(*processes)
    return [said["result"] for said in found]


def _answer(path: Path) -> dict[str, Any]:
    """The last line, if there is one that is whole; libraries may print before it."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {}
    return found


def end_families(*processes: subprocess.Popen[Any]) -> None:
    """End processes and all of their descendants, by force where they do not go."""
    family: list[psutil.Process] = []
    for process in processes:
        if process.poll() is None:
            try:
                parent = psutil.Process(process.pid)
                family += [parent, *parent.children(recursive=True)]  # it first: it is not to miss its children
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
        return  # it went by itself


def end_with_parent() -> None:
    """Have this process ended by SIGTERM when its parent dies, of whatever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """The process of a call."""
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
