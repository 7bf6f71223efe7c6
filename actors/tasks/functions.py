"""Reward functions from files: `FILE.py:FUNCTION` with TRL's signature, f(prompts, completions, **columns).

A function declares only the arguments that it needs: `prompts`, `completions`, any column of the
task, `**kwargs` for all of these, or an argument of `SAMPLED`. Each argument is a list with one entry per
sample. The function returns one number per sample, or None for a sample to which it does not apply.
`log_metric(name, value)` logs a number; the mean of the numbers of a step is the metric `reward/NAME`.

A file may import modules from its own folder. The folder is appended to `sys.path`, so that these
modules do not shadow libraries.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from leeway.actors.sandbox import HINT, cut_network_error
from leeway.actors.tasks.task import SAMPLED, FileReward, Problem, TaskError, among_known
from leeway.common.user_input import UserFileError, imported, split

_ALWAYS = ("prompts", "completions", "log_metric", *SAMPLED)


def parse_reference(reference: str) -> tuple[Path, str]:
    """Split `FILE.py:FUNCTION`; raise TaskError if the text has another form or the file does not exist."""
    file, _, function = reference.rpartition(":")
    if not file or not function.isidentifier():
        raise TaskError(f"task.rewards: '{reference}' is not of the form FILE.py:FUNCTION")
    try:
        return split(reference)
    except UserFileError as error:
        raise TaskError(f"task.rewards: {error}") from error


def check_functions(references: Sequence[str], columns: Collection[str], named: Collection[str]) -> None:
    """Check reward functions without running their files; each is a FILE.py:FUNCTION or a name in `named`.

    Raises TaskError if a file or function is missing, or a function needs an argument that no column provides.
    """
    names = [reference.rpartition(":")[2] for reference in references]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise TaskError(
            f"task.rewards names {sorted(twice)} twice, but parts of a reward need distinct names: rename one function"
        )
    for reference in references:
        if reference in named:
            continue
        if ":" not in reference:
            raise TaskError(
                f"task.rewards: '{reference}' is not of the form FILE.py:FUNCTION, and no rule or table has that name; "
                f"{among_known(reference, named)}"
            )
        _check_definition(_parsed(reference), reference, reference.rpartition(":")[2], columns)


def _parsed(reference: str) -> ast.Module:
    path, _ = parse_reference(reference)
    try:
        return ast.parse(importlib.util.decode_source(path.read_bytes()), filename=str(path))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # deep nesting raises the last two
        raise TaskError(f"task.rewards: {path} is not Python: {error or type(error).__name__}") from error
    except OSError as error:
        raise TaskError(f"task.rewards: {path} cannot be read: {error.strerror}") from error


def arguments_of(reference: str) -> frozenset[str] | None:
    """Return the argument names of a function, without running its file; None if the function may need all columns."""
    name, tree = reference.rpartition(":")[2], ast.walk(_parsed(reference))
    named = [node for node in tree if name in (getattr(node, each, None) for each in ("name", "asname", "id"))]
    node = named[0] if len(named) == 1 else None  # else the name is assigned, imported, defined twice, or used
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.args.kwarg or node.decorator_list:
        return None
    return frozenset(one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _check_definition(tree: ast.Module, reference: str, function: str, columns: Collection[str]) -> None:
    own: set[str] = set()
    others: set[str] = set()
    """Names that are assigned or imported, and thus may be functions."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
            if node.name == function:
                positional = [*node.args.posonlyargs, *node.args.args]
                required = positional[: len(positional) - len(node.args.defaults)]
                keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                required += [argument for argument, default in keyword if default is None]
                _check_arguments(reference, [argument.arg for argument in required], columns)
        for each in ast.walk(node):  # also below an `if` or a `try`; the import checks these names later
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                others.add(each.id)
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                others.add(each.name)
            elif isinstance(each, ast.Import | ast.ImportFrom):
                others.update(alias.asname or alias.name for alias in each.names)
    if function not in own | others and "*" not in others:
        raise TaskError(f"task.rewards: '{reference}': the file defines no '{function}'; {among_known(function, own)}")


def _check_arguments(reference: str, required: Sequence[str], columns: Collection[str]) -> None:
    known = {*_ALWAYS, *columns}
    for name in required:
        if name not in known:
            raise TaskError(
                f"task.rewards: '{reference}' needs an argument '{name}' that the task does not provide; "
                f"{among_known(name, known)}"
            )


_TRY = """
import json, sys
from leeway.actors.sandbox import cut_network
from leeway.actors.tasks.functions import load_function
from leeway.actors.tasks.task import TaskError
try:
    references, columns, has_network = json.loads(sys.argv[1])
    if not has_network:
        cut_network()
    for reference in references:
        load_function(reference, columns)
except TaskError as error:
    print("\\n" + json.dumps(str(error)), flush=True)
    sys.exit(1)
"""


def try_imports(
    references: Sequence[str], columns: Collection[str], limit_s: float, *, has_network: bool = True
) -> None:
    """Load the functions as an actor does, but in a separate process.

    Raises TaskError if `load_function` does, if the import ends the process or times out, or if this machine cannot
    block the network access of rewards as configured.
    """
    why = "" if has_network else cut_network_error()
    if why:
        raise TaskError(
            f"task.reward_network = false, but this kernel cannot block a process's network access ({why}): "
            f"{HINT}; or remove the key"
        )
    if not references:
        return
    command = [sys.executable, "-P", "-c", _TRY, json.dumps([list(references), list(columns), has_network])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    files = ", ".join(dict.fromkeys(reference.rpartition(":")[0] for reference in references))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise TaskError(
            f"task.rewards: importing {files} timed out after {limit_s:g} s; run slow code in the function's first call"
        ) from None
    if not done.returncode:
        return
    message = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 1 and message.startswith('"'):
        raise TaskError(json.loads(message))
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise TaskError(f"task.rewards: importing {files} ended the process with status {done.returncode}: {last}")


def load_function(reference: str, columns: Collection[str], *, has_messages: bool = False) -> FileReward:
    """Run the file of a function, and wrap the function; with `has_messages`, completions are messages too.

    Raises TaskError if the file or the function is missing, an argument has no column, or the import fails.
    """
    path, name = parse_reference(reference)
    try:
        module = imported(path)
    except UserFileError as error:
        raise TaskError(f"task.rewards: '{reference}': {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise TaskError(f"task.rewards: '{reference}': '{name}' is not a function but {function!r}")
    return _in_trl_shape(function, reference, columns, has_messages)


def _in_trl_shape(
    function: Callable[..., Any], reference: str, columns: Collection[str], has_messages: bool
) -> FileReward:
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty and one.kind not in variadic]
    _check_arguments(reference, required, columns)
    needed = [name for name in columns if takes_all or name in named]

    def call(problems: Sequence[Problem], completions: Sequence[str], added: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- the user's
        # copy the values: samples of a group share a problem, and a function may modify its arguments
        values: dict[str, Any] = {name: [copy.deepcopy(one.columns.get(name)) for one in problems] for name in needed}
        if takes_all or "prompts" in named:
            values["prompts"] = [copy.deepcopy(one.prompt) for one in problems]
        if takes_all or "completions" in named:
            chats = [[{"role": "assistant", "content": each}] for each in completions]
            values["completions"] = chats if has_messages else list(completions)
        return function(**values, **{name: value for name, value in added.items() if name in named})

    return FileReward(frozenset(named), call)
