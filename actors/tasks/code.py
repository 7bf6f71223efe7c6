"""The rule `code`: run the Python that a completion holds against the tests of its row, in `actors.sandbox`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from actors import sandbox
from actors.tasks.config import CodeRule
from actors.tasks.task import Call, NoScore, Problem, TaskError

AT_ONCE = 4
"""Completions of a call whose tests run at the same time."""
_GRACE_S = 5.0
"""Beyond the rule's own limit, for the sandbox to start and to end."""
_PROBE_S = 20.0
_FENCE = "```"
_OPENS = re.compile(r"(`{3,}+)[\s{.]*+([\w+#-]*+)[^`]*+")
"""A fence, and the language that it may name."""
_PYTHON = frozenset({"python", "python3", "py"})
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from actors.sandbox import serve; serve(sys.argv[2])"

_log = logging.getLogger(__name__)


class _Way(NamedTuple):
    """How programs are run."""

    as_nobody: bool
    isolated: bool


def check_code(name: str, rule: CodeRule) -> str:
    """What the kernel refuses to the programs here; '' where they are isolated.

    Raises:
        TaskError: they cannot be run, or not as the rule requires it.
    """
    return _way(name, rule)[1]


def load_code(name: str, rule: CodeRule, look_up: Callable[[Problem], Any]) -> Call:
    """The rule as a reward function; TaskError as `check_code`. What it may not have of the kernel is logged once."""
    way, refusal = _way(name, rule)
    if refusal:
        _log.warning("reward %s: %s. To isolate them, %s", name, refusal, sandbox.HINT)
    places = asyncio.Semaphore(AT_ONCE)

    async def reward(problem: Problem, completion: str) -> float | NoScore | None:
        value = look_up(problem)
        if not value:
            return None
        tests = _tests(value)
        if isinstance(tests, NoScore):
            return tests
        async with places:
            return await _reward(rule, way, source_of(completion), tests)

    async def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        return await asyncio.gather(*map(reward, problems, completions))

    return call


def source_of(completion: str) -> str:
    """The last fenced block of Python, else the last of no language; all of a completion that has no fence."""
    found, block = dict[str, str](), list[str]()
    language, depth, width = None, 0, 0  # of the block that is open
    for line in completion.split("\n"):
        fence, indent = line.strip(), len(line) - len(line.lstrip())
        ticks, named = told.groups() if (told := _OPENS.fullmatch(fence)) else ("", "")
        named = "python" if named.lower() in _PYTHON else named.lower()
        is_level = indent <= depth and len(ticks) >= width  # else the block shows it, as a docstring does
        begins = named == "python" and (is_level or language != "python")  # one before was never closed
        if ticks and (language is None or begins):
            language, block, depth, width = named, [], indent, len(ticks)
        elif language is not None and is_level and fence == ticks:
            found[language], language = _text_of(block), None
        elif language is not None:
            block.append(line)
    if language is not None:  # an answer that was cut
        found[language] = _text_of(block)
    return found.get("python", found.get("", "")) if _FENCE in completion else completion


def _text_of(block: list[str]) -> str:
    """Its lines, which may be indented as those of a list are."""
    return textwrap.dedent("\n".join(block))


async def _reward(rule: CodeRule, way: _Way, source: str, tests: list[dict[str, str]]) -> float | NoScore:
    if not source.strip():
        return 0.0
    programs = [{"source": source, **test} for test in tests]
    results = await _run(rule, way, programs)
    if isinstance(results, NoScore):
        return results
    share = sum(results) / len(tests)  # those that were not run have not passed
    return rule.weight * (share if rule.partial else float(share == 1.0))


# --- code: its tests ----------------------------------------------------------------------------------


def _tests(value: Any) -> list[dict[str, str]] | NoScore:  # noqa: ANN401 -- any JSON
    """What the sandbox is to do after the source, one entry per test."""
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return [{"test": value}]
        if not isinstance(parsed, list | dict):
            return [{"test": value}]
        value = parsed
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        name, inputs, outputs = value.get("fn_name"), value["inputs"], value["outputs"]
        if len(inputs) == len(outputs):
            pairs = zip(inputs, outputs, strict=True)
            value = [{"input": given, "output": wanted, "fn_name": name} for given, wanted in pairs]
    tests = [_test(one) for one in value] if isinstance(value, list) else []
    if not tests or None in tests:
        return NoScore(
            "the row's tests have no form that is known",
            f"neither asserts nor pairs of input and output: {str(value)[:200]!r}",
        )
    return [test for test in tests if test is not None]


def _test(one: Any) -> dict[str, str] | None:  # noqa: ANN401 -- any JSON
    if isinstance(one, str):
        return {"test": one}
    if not isinstance(one, dict) or "output" not in one:
        return None
    given, wanted, name = one.get("input", ""), one["output"], one.get("fn_name")
    if name is None:
        return {"stdin": _joined(given), "stdout": _joined(wanted)}
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(given, list):
        return None
    right = [wanted, *wanted] if isinstance(wanted, list) and len(wanted) == 1 else [wanted]  # APPS wraps what it wants
    function = f"(globals().get({name!r}) or getattr(Solution(), {name!r}))"  # LeetCode's programs are of such a class
    # a tuple is a list in JSON
    return {"test": f"import json\nassert json.loads(json.dumps({function}(*{given!r}))) in {right!r}"}


def _joined(value: Any) -> str:  # noqa: ANN401 -- any JSON
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


# --- code: the sandbox --------------------------------------------------------------------------------


def _job(rule: CodeRule, way: _Way, programs: list[dict[str, str]]) -> bytes:
    job = {
        "as_nobody": way.as_nobody,
        "isolated": way.isolated,
        "timeout_s": rule.timeout_s,
        "memory_bytes": rule.memory_mib * 2**20,
        "stop_at_failure": not rule.partial,
        "programs": programs,
    }
    return json.dumps(job).encode()


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(sandbox.__file__).parents[1]), str(os.getpid())]


async def _run(rule: CodeRule, way: _Way, programs: list[dict[str, str]]) -> list[bool] | NoScore:
    process = await asyncio.create_subprocess_exec(
        *_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(rule.timeout_s + _GRACE_S):
            out, error = await process.communicate(_job(rule, way, programs))
    except TimeoutError:
        return NoScore("the sandbox did not answer", f"within {rule.timeout_s + _GRACE_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()  # what it runs ends with it
            await process.wait()
    if process.returncode:
        return NoScore("the sandbox failed", f"status {process.returncode}: {error.decode(errors='replace')[-500:]}")
    return [bool(one) for one in json.loads(out)]


def _way(name: str, rule: CodeRule) -> tuple[_Way, str]:
    """The best way that the kernel allows, and what it refuses, where it isolates nothing.

    Raises:
        TaskError: programs cannot be run at all, or only without an isolation that the rule requires.
    """
    users = (True, False) if os.geteuid() == 0 else (False,)
    refusal = ""
    for way in [_Way(as_nobody, isolated) for isolated in (True, False) for as_nobody in users]:
        why = _try(rule, way)
        if not why:
            break
        if way == _Way(as_nobody=False, isolated=True):
            refusal = (
                f"the kernel does not isolate the programs ({why}): limits of time, memory and output hold, but they "
                "may use the network, and write and signal what this user may"
            )
            if rule.require_isolation:
                raise TaskError(f"task.reward_rules.{name}.require_isolation = true, but {refusal}: {sandbox.HINT}")
    else:
        raise TaskError(f"task.rewards: '{name}' cannot run a program here: {why}")
    return way, refusal


def _try(rule: CodeRule, way: _Way) -> str:
    """Run a program that does nothing; returns why that cannot be."""
    patient = rule.model_copy(update={"timeout_s": _PROBE_S})
    job = _job(patient, way, [{"source": "print(input())", "stdin": "here", "stdout": "here"}])
    try:
        done = subprocess.run(_command(), input=job, capture_output=True, timeout=_PROBE_S + _GRACE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
    return "" if json.loads(done.stdout) == [True] else "its Python does not start there"
