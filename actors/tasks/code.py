"""The rule `code`: runs the Python of a completion against the tests of its row, in `leeway.actors.sandbox`."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import logging
import operator
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from leeway.actors import sandbox
from leeway.actors.tasks.config import CodeRule
from leeway.actors.tasks.task import Call, NoScore, Problem, TaskError

MAX_CONCURRENT = 4
"""Maximum completions of a call that are tested concurrently."""
_GRACE_S = 5.0
"""Seconds added to the rule's timeout, for the start and exit of the sandbox."""
_PROBE_S = 20.0
_FENCE = "```"
_OPENS = re.compile(r"(`{3,}+)[\s{.]*+([\w+#-]*+)[^`]*+")
"""Pattern of a code fence with an optional language."""
_PYTHON = frozenset({"python", "python3", "py"})
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from leeway.actors.sandbox import serve; serve(sys.argv[2])"

_log = logging.getLogger(__name__)


class _Isolation(NamedTuple):
    as_nobody: bool
    isolated: bool


def check_code(name: str, rule: CodeRule) -> str:
    """Return why the kernel does not isolate programs on this machine; '' if programs are isolated.

    Raises TaskError if programs cannot run, or if the kernel refuses a required isolation.
    """
    return _best_isolation(name, rule)[1]


def load_code(name: str, rule: CodeRule, look_up: Callable[[Problem], Any]) -> Call:
    """Return the rule as a reward function; log a warning if the kernel does not isolate programs."""
    isolation, refusal = _best_isolation(name, rule)
    if refusal:
        _log.warning("reward %s: %s. To isolate programs, %s", name, refusal, sandbox.HINT)
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def reward(problem: Problem, completion: str) -> float | NoScore | None:
        value = look_up(problem)
        if not value:
            return None
        tests = _tests(value, problem.columns)
        if isinstance(tests, NoScore):
            return tests
        async with slots:
            return await _reward(rule, isolation, source_of(completion), tests)

    async def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        return await asyncio.gather(*map(reward, problems, completions))

    return call


def source_of(completion: str) -> str:
    """Return the last fenced Python block, else the last block without a language; without a fence, the whole text."""
    found, block = dict[str, str](), list[str]()
    language, depth, width = None, 0, 0  # state of the open block
    for line in completion.split("\n"):
        fence, indent = line.strip(), len(line) - len(line.lstrip())
        ticks, named = opening.groups() if (opening := _OPENS.fullmatch(fence)) else ("", "")
        named = "python" if named.lower() in _PYTHON else named.lower()
        is_level = indent <= depth and len(ticks) >= width  # else the fence is text of the block, as in a docstring
        begins = named == "python" and (is_level or language != "python")  # the open block was never closed
        if ticks and (language is None or begins):
            language, block, depth, width = named, [], indent, len(ticks)
        elif language is not None and is_level and fence == ticks:
            found[language], language = _text_of(block), None
        elif language is not None:
            block.append(line)
    if language is not None:  # a truncated answer
        found[language] = _text_of(block)
    return found.get("python", found.get("", "")) if _FENCE in completion else completion


def _text_of(block: list[str]) -> str:
    return textwrap.dedent("\n".join(block))


async def _reward(rule: CodeRule, isolation: _Isolation, source: str, tests: list[_Test]) -> float | NoScore:
    if not source.strip():
        return 0.0
    programs = [{"source": source.encode("utf-8", "replace").decode(), **test} for test in tests]
    results = await _run(rule, isolation, programs)
    if isinstance(results, NoScore):
        return results
    unjudged = next((one for one in results if isinstance(one, NoScore)), None)
    if unjudged and (rule.partial or False not in results):
        return unjudged
    share = results.count(True) / len(tests)  # tests that were not run count as failed
    return share if rule.partial else float(share == 1.0)


# --- tests --------------------------------------------------------------------------------------------

_Test = dict[str, Any]
_UNKNOWN = "the row's tests have an unknown format"
_NAMES = ("fn_name", "func_name", "function_name", "entry_point")
_TEXTS = ("assert_case", "assertion", "test_list", "test_code", "test", "tests", "functional")
_OUTPUTS = ("output", "expected_output", "expected")
_DEFINED = re.compile(r"\bdef\s+(?!__)(\w+)")
_RUNS = re.compile(r"\b(unittest|pytest)\.main\(|^(sys\.)?exit\(0?\)$")
"""Pattern of a call that starts tests or exits. The call is removed, because the sandbox runs all tests anyway."""
_ASSERTS = re.compile(r"(^|\.)(assert\w*|raises|warns|fail)$")
_MAY_FAIL = re.compile(r"\braise\b|leeway_ran")
_PARSE_ERRORS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
"""Errors of `ast.parse` and of JSON for an invalid text."""


def check_tests(name: str, problems: Sequence[Problem], look_up: Callable[[Problem], Any]) -> None:
    """Raise TaskError if the rule can score none of these problems; the error has the reason for the first problem."""
    tests = (_tests(look_up(problem), problem.columns) for problem in problems)
    first = next(tests, None)
    if isinstance(first, NoScore) and all(isinstance(one, NoScore) for one in tests):
        why = f"Row {problems[0].index}: {first.why}: {first.detail}"
        raise TaskError(f"task.rewards: '{name}' can score no training row. {why}; see docs/tasks.md for known formats")


def _tests(value: Any, columns: Mapping[str, Any]) -> list[_Test] | NoScore:  # noqa: ANN401 -- any JSON
    """Return one task for the sandbox per test, without the source of a program."""
    tests = [_test(one, columns) for one in _listed(value)]
    wrong = next((one for one in tests if isinstance(one, NoScore)), None if tests else NoScore(_UNKNOWN, "no test"))
    return wrong or [one for one in tests if isinstance(one, dict)]


def _parsed(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Parse a text as JSON or as a Python literal; return any other value unchanged."""
    for parse in (json.loads, ast.literal_eval) if isinstance(value, str) else ():
        with contextlib.suppress(*_PARSE_ERRORS):
            return parse(value)
    return value


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 -- any JSON
    """Return single tests from a list, or from an object of lists; the value may also be JSON or Python text."""
    value = _parsed(value)
    if isinstance(value, list):
        singles = [_listed(one) if isinstance(one, dict) and "input" not in one else [one] for one in value]
        return [one for single in singles for one in single]
    if not isinstance(value, dict):
        return [value]
    if tests := next((value[key] for key in _TEXTS if value.get(key)), None):
        return _listed(tests)
    given, expected = (_parsed(value.get(f"{key}s", value.get(key))) for key in ("input", "output"))
    if not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
        return [value]
    is_wrapped = all(isinstance(one, list) and len(one) == 1 for one in expected)  # APPS uses this format
    pairs = zip(given, expected, strict=True)
    return [{**value, "input": one, "output": two, "is_wrapped": is_wrapped} for one, two in pairs]


def _test(one: Any, columns: Mapping[str, Any]) -> _Test | NoScore:  # noqa: ANN401 -- any JSON
    parsed = _parsed(one)
    own: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    name, key = _function(own, columns), next((key for key in _OUTPUTS if key in own), None)
    if isinstance(one, str) and not own:
        imports, setup = columns.get("test_imports") or [], columns.get("test_setup_code") or ""  # of MBPP
        test = _recorded("\n".join([*(imports if isinstance(imports, list) else [imports]), setup, one]))
        return test if isinstance(test, NoScore) else {**test, "name": name}
    given, kind = own.get("input"), str(own.get("testtype") or own.get("type"))
    given = "" if given is None else given
    is_text = not isinstance(given, list | dict) or all(isinstance(line, str) for line in given)
    is_script, call = "std" in kind or (name is None and is_text and "func" not in kind), None
    if key and is_script and own[key] is not None:
        return {"stdin": _joined(given), "stdout": _joined(own[key])}
    if key and not is_script and (name is None or name.isidentifier()):
        call = _call(given, own[key], is_wrapped=bool(own.get("is_wrapped")))
    return {**call, "name": name} if call else NoScore(_UNKNOWN, repr(one)[:200])


def _call(given: Any, expected: Any, *, is_wrapped: bool) -> _Test | None:  # noqa: ANN401 -- any JSON
    """Return a call with arguments from a list, an object, or lines of a text; None if a line is not a value."""
    if isinstance(given, str):
        lines = [line for line in given.splitlines() if line.strip()]
        given, expected = [_parsed(line) for line in lines], _parsed(expected)
        if any(map(operator.is_, lines, given)):
            return None
    given = given if isinstance(given, list | dict) else [given]
    results = [expected, *expected] if is_wrapped else [expected]
    with contextlib.suppress(TypeError):
        json.dumps(results)  # fails for a set, for example
        return {"call": f"{'**' if isinstance(given, dict) else '*'}{given!r}", "wanted": results}
    return None


def _function(own: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    """Return the name of the function to call, from the test or the columns of its row."""
    metadata = _parsed(columns.get("metadata"))
    places = (own, columns, metadata if isinstance(metadata, dict) else {})
    if name := next((place[key] for place in places for key in _NAMES if place.get(key)), None):
        return str(name).removeprefix("Solution().")
    starter = _DEFINED.search(str(columns.get("starter_code")))
    return starter and starter[1]


def _joined(value: Any) -> str:  # noqa: ANN401 -- any JSON
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


@lru_cache(64)
def _recorded(text: str) -> _Test | NoScore:
    """Rewrite the test so that it reports which of its assertions are executed."""
    recorder = _Recorder()
    try:
        with warnings.catch_warnings(action="ignore"):
            recorder.visit(tree := ast.parse(text))
            compile(recorded := ast.unparse(ast.fix_missing_locations(tree)), "test.py", "exec", dont_inherit=True)
        missing = [name for name in recorder.imports if find_spec(name.partition(".")[0]) is None]
    except _PARSE_ERRORS as error:
        return NoScore(_UNKNOWN, f"{error}: {text[:200]!r}")
    if missing:
        return NoScore("the row's tests import a module that is not installed here", missing[0])
    if not recorder.can_assert:
        return NoScore("the row's tests execute no assertion", repr(text[:200]))
    return {"test": recorded, "imports": sorted(recorder.imports), "names": sorted(recorder.names)}


class _Recorder(ast.NodeTransformer):
    """Inserts calls of functions that `sandbox._TEST` defines: at each assertion, and around compared values."""

    def __init__(self) -> None:
        self.imports, self.names, self.can_assert = set[str](), set[str](), False

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Import() | ast.ImportFrom():
                modules = {each.name for each in node.names} if isinstance(node, ast.Import) else {node.module or ""}
                self.imports |= modules - {"solution"}
                return ast.Pass() if modules == {"solution"} and node.names[0].name == "*" else node  # in scope already
            case ast.Expr(ast.Call()) if _RUNS.search(ast.unparse(node)):
                return ast.Pass()
            case ast.Name():
                self.names.add(node.id)
            case ast.FunctionDef():
                node.body[:0] = ast.parse(f"leeway_ran({node.name!r})").body
            case ast.Compare():
                node.left, *node.comparators = map(_compared, [node.left, *node.comparators])
            case ast.Call() if _ASSERTS.search(ast.unparse(node.func)):
                node.func, node.args = self._asserted(node.func), [*map(_compared, node.args)]
            case ast.Assert():
                node.test = self._asserted(node.test)
            case ast.If() if any(isinstance(one, ast.Raise) for one in (*node.body, *node.orelse)):
                node.test = self._asserted(node.test)
            case ast.Try() if _MAY_FAIL.search(ast.unparse(ast.Module([*node.body, *node.orelse], []))):
                for handler in node.handlers:  # an expected exception is an assertion
                    handler.body.insert(0, ast.Expr(self._asserted(ast.Constant(value=True))))
        return node

    def _asserted(self, value: ast.expr) -> ast.expr:
        self.can_assert = True
        return ast.BoolOp(ast.And(), [ast.Call(ast.Name("leeway_ran", ast.Load()), [], []), value])


def _compared(value: ast.expr) -> ast.expr:
    function = getattr(value, "func", value)
    is_free = getattr(function, "attr", getattr(function, "id", "")) in ("ANY", "approx")  # meant to equal many values
    is_free |= isinstance(value, ast.Constant | ast.Starred)
    return value if is_free else ast.Call(ast.Name("leeway_honest", ast.Load()), [value], [])


# --- the sandbox --------------------------------------------------------------------------------------


def _job(rule: CodeRule, isolation: _Isolation, programs: list[_Test]) -> bytes:
    job = {
        "as_nobody": isolation.as_nobody,
        "isolated": isolation.isolated,
        "timeout_s": rule.timeout_s,
        "memory_bytes": rule.memory_mib * 2**20,
        "stop_at_failure": not rule.partial,
        "programs": programs,
    }
    return json.dumps(job).encode()


def _command() -> list[str]:
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(sandbox.__file__).parents[2]), str(os.getpid())]


async def _run(rule: CodeRule, isolation: _Isolation, programs: list[_Test]) -> list[bool | NoScore] | NoScore:
    process = await asyncio.create_subprocess_exec(
        *_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(rule.timeout_s + _GRACE_S):
            out, error = await process.communicate(_job(rule, isolation, programs))
    except TimeoutError:
        return NoScore("the sandbox did not reply", f"within {rule.timeout_s + _GRACE_S:g} s")
    finally:
        if process.returncode is None:
            process.kill()  # the sandbox's programs are killed too
            await process.wait()
    if process.returncode:
        return NoScore("the sandbox failed", f"status {process.returncode}: {error.decode(errors='replace')[-500:]}")
    return [NoScore(*one) if isinstance(one, list) else one for one in json.loads(out)]


def _best_isolation(name: str, rule: CodeRule) -> tuple[_Isolation, str]:
    """Return the best isolation that the kernel allows, and the reason if programs are not isolated.

    Raises TaskError if programs cannot run at all, or if the kernel refuses a required isolation.
    """
    users = (True, False) if os.geteuid() == 0 else (False,)
    refusal = ""
    for isolation in [_Isolation(as_nobody, isolated) for isolated in (True, False) for as_nobody in users]:
        why = _try(rule, isolation)
        if not why:
            break
        if isolation == _Isolation(as_nobody=False, isolated=True):
            refusal = (
                f"the kernel does not isolate the programs ({why}): limits of time, memory and output hold, but they "
                "can use the network, and write files and signal processes as this user"
            )
            if rule.require_isolation:
                raise TaskError(f"task.reward_rules.{name}.require_isolation = true, but {refusal}: {sandbox.HINT}")
    else:
        raise TaskError(f"task.rewards: '{name}' cannot run a program here: {why}")
    return isolation, refusal


def _try(rule: CodeRule, isolation: _Isolation) -> str:
    """Run a trivial program; return the error, or ''."""
    patient = rule.model_copy(update={"timeout_s": _PROBE_S})
    job = _job(patient, isolation, [{"source": "print(input())", "stdin": "here", "stdout": "here"}])
    try:
        done = subprocess.run(_command(), input=job, capture_output=True, timeout=_PROBE_S + _GRACE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
    return "" if json.loads(done.stdout) == [True] else "Python does not start in the sandbox"
