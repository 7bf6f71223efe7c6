"""Rules: rewards by name, which hold a completion against a column of its row.

They run where any reward function does, so one that does not end is ended with its process: a regular expression that
backtracks forever, or an equation that sympy never simplifies, costs its own sample. The rule `code` is in
`actors.tasks.code`.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from actors.tasks.code import check_code, load_code
from actors.tasks.config import CodeRule, ContainsRule, ExactRule, MathRule, RegexRule, RewardRule
from actors.tasks.prompts import Template, split_field, value_at
from actors.tasks.task import Call, NoScore, Problem, TaskError, among_known

ANSWERS = ("answer", "solution", "ground_truth")
TESTS = ("tests", "test_list")
"""Where a rule looks that is not told its column, in this order."""
_KEPT_ANSWERS = 1024
"""Parsed, for the samples of a group share theirs."""
_WITH_EXPONENT = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w|\.\d)")
"""A number in which math-verify takes the e for Euler's; written out, one of more digits would fill the memory."""
_Matches = Callable[[str, str], bool | NoScore]
"""Is a completion right by this answer?"""


def check_rule(
    name: str, rule: RewardRule, columns: Collection[str], problems: Sequence[Problem], *, here: bool
) -> None:
    """Find what is wrong with a rule before a process starts; with `here` also what this machine lacks for it.

    Raises:
        TaskError: no row has its column, none of these problems has a value there, a library is missing, or the kernel
            refuses an isolation that is required.
    """
    path = _path(name, rule, columns)
    if path is not None and all(value_at(each.columns, path) is None for each in problems):
        column, _ = split_field(path)
        one = next((each for each in problems if each.columns.get(column) is not None), problems[0])
        why = f"task.rewards: no training row has what '{name}' reads,"
        Template(f"{{{path}}}", why).render(one.columns, f"row {one.index}")  # says which keys there are
        raise TaskError(f"{why} '{{{path}}}': it is null")
    if here and isinstance(rule, MathRule):
        _check_math()
    if here and isinstance(rule, CodeRule):
        check_code(name, rule)


def load_rule(name: str, rule: RewardRule, columns: Collection[str]) -> Call:
    """The rule as a reward function; TaskError as `check_rule`."""
    path = _path(name, rule, columns)

    def look_up(problem: Problem) -> Any:  # noqa: ANN401 -- any JSON
        return "" if path is None else value_at(problem.columns, path)

    if isinstance(rule, CodeRule):
        return load_code(name, rule, look_up)
    matches = _matches_of(rule)

    def value_of(problem: Problem, completion: str) -> float | NoScore | None:
        answer = look_up(problem)
        answers = answer if isinstance(answer, list) else [answer]
        texts = dict.fromkeys(text for one in answers if one is not None for text in _texts(one, rule))
        found = [matches(text, completion) for text in texts]
        if unknown := [one for one in found if isinstance(one, NoScore)]:
            return rule.weight if True in found else unknown[0]
        return rule.weight * (True in found) if found else None

    def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        return [value_of(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    return call


def _texts(answer: object, rule: RewardRule) -> list[str]:
    """Each of which is the answer: 0.00005 is 5e-05 too, and 5.0 is 5; but not within a text, where 15 has a 5."""
    texts = [str(answer)]
    if isinstance(answer, float) and math.isfinite(answer) and not isinstance(rule, ContainsRule | MathRule):
        texts.append(np.format_float_positional(answer, trim="-"))
    return texts


def _path(name: str, rule: RewardRule, columns: Collection[str]) -> str | None:
    """Where a row has its value for the rule, as `value_at` has it; None where the rule needs none.

    Raises:
        TaskError: no row has such a column.
    """
    if isinstance(rule, RegexRule) and rule.column is None:
        return None
    usual = TESTS if isinstance(rule, CodeRule) else ANSWERS
    path = rule.column or next((each for each in usual if each in columns), None)
    if path is None:
        raise TaskError(
            f"task.rewards: '{name}' looks for a column {' or '.join(usual)}, and the rows have {', '.join(columns)}; "
            f'name theirs in a table: [task.reward_rules.{name}] type = "{rule.type}", column = ...'
        )
    column, _ = split_field(path)
    if column not in columns:
        raise TaskError(
            f"task.reward_rules.{name}.column = '{path}': no row has that column; {among_known(column, columns)}"
        )
    return path


def _matches_of(rule: MathRule | ExactRule | ContainsRule | RegexRule) -> _Matches:
    if isinstance(rule, MathRule):
        return _load_math()
    if isinstance(rule, RegexRule):
        pattern = re.compile(rule.pattern)
        if rule.column is None:
            return lambda answer, completion: pattern.search(completion) is not None
        return lambda answer, completion: _last_group(pattern, completion) == answer.strip()
    fold: Callable[[str], str] = str.casefold if rule.ignore_case else str

    def matches(answer: str, completion: str) -> bool | NoScore:
        if not (right := fold(answer.strip())):
            return NoScore("the row's answer is empty")
        if isinstance(rule, ContainsRule):
            return right in fold(completion)
        return fold(_between(completion, rule.answer_tag)) == right

    return matches


def _last_group(pattern: re.Pattern[str], completion: str) -> str | None:
    last = next(iter(deque(pattern.finditer(completion), maxlen=1)), None)
    return None if last is None or last[1] is None else str(last[1]).strip()


def _between(completion: str, tag: str | None) -> str:
    """What the last pair of tags holds; without such a pair nothing."""
    if tag is None:
        return completion.strip()
    head, closed, _ = completion.rpartition(f"</{tag}>")
    _, opened, text = head.rpartition(f"<{tag}>")
    return text.strip() if opened and closed else ""


# --- math-verify ----------------------------------------------------------------------------------------


def _check_math() -> None:
    if find_spec("math_verify") is None or find_spec("antlr4") is None:
        raise TaskError(
            "task.rewards: 'math' needs math-verify, which is not installed here: pip install 'math-verify==0.9.0'"
        )


def _load_math() -> _Matches:
    """Without math-verify's own limits of time, which are alarms: what takes too long is ended with this process."""
    _check_math()
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off

    def parsed(text: str) -> list[Any]:
        return list(parse(_WITH_EXPONENT.sub(lambda found: f"{Decimal(found[0]):f}", text), parsing_timeout=None))

    @lru_cache(_KEPT_ANSWERS)
    def right_one(answer: str) -> list[Any]:
        text = answer.rpartition("####")[2].strip()  # of GSM8K, whose answers show how they are found
        is_marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
        return parsed(text if is_marked else f"\\boxed{{{text}}}")

    def matches(answer: str, completion: str) -> bool | NoScore:
        right = right_one(answer)
        if not right:
            return NoScore("the row's answer is no mathematics", repr(answer[:200]))
        return bool(verify(right, parsed(completion), timeout_seconds=None))

    return matches
