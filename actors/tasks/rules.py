"""Rules: built-in rewards by name, which compare a completion with a column of its row.

Rules run in reward processes like any reward function. A rule that does not return is killed with its process: a
regular expression that backtracks forever, or an equation that sympy never simplifies, fails only one sample. The rule
`code` is in `leeway.actors.tasks.code`.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib.util import find_spec
from typing import Any
from unicodedata import normalize

import numpy as np

from leeway.actors.tasks.code import check_code, check_tests, load_code
from leeway.actors.tasks.config import CodeRule, ContainsRule, ExactRule, MathRule, RegexRule, RewardRule
from leeway.actors.tasks.prompts import Template, split_field, value_at
from leeway.actors.tasks.task import Call, NoScore, Problem, TaskError, after_thoughts, among_known

ANSWERS = ("answer", "solution", "ground_truth", "reward_model[ground_truth]")
TESTS = ("tests", "test_list")
"""Columns that a rule tries, in this order, if the config names no column for the rule."""
_Matches = Callable[[str, str], bool | NoScore]  # (answer, completion) -> whether the completion is correct


def check_rule(
    name: str, rule: RewardRule, columns: Collection[str], problems: Sequence[Problem], *, here: bool
) -> None:
    """Check a rule before a process starts; with `here`, also check that this machine supports the rule.

    Raises TaskError if no row has the rule's column, no problem has a value in that column, a library is missing, or
    the kernel refuses a required isolation.
    """
    path = _path(name, rule, columns)
    if path is not None and all(value_at(each.columns, path) is None for each in problems):
        column, _ = split_field(path)
        one = next((each for each in problems if each.columns.get(column) is not None), problems[0])
        why = f"task.rewards: no training row has the value that '{name}' reads,"
        Template(f"{{{path}}}", why).render(one.columns, f"row {one.index}")  # the error lists the existing keys
        raise TaskError(f"{why} '{{{path}}}': it is null")
    if here and isinstance(rule, MathRule):
        _check_math()
    if isinstance(rule, CodeRule):
        check_tests(name, problems, lambda problem: value_at(problem.columns, path or ""))
        if here:
            check_code(name, rule)


def load_rule(name: str, rule: RewardRule, columns: Collection[str]) -> Call:
    """Return the rule as a reward function; raise TaskError if no row has the rule's column or a library is missing."""
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
            return 1.0 if True in found else unknown[0]
        return float(True in found) if found else None

    def call(problems: Sequence[Problem], completions: Sequence[str]) -> list[float | NoScore | None]:
        return [value_of(problem, completion) for problem, completion in zip(problems, completions, strict=True)]

    return call


def _texts(answer: object, rule: RewardRule) -> list[str]:
    """Return the spellings of an answer, such as 5.0 and 5; `contains` uses only one spelling, since 15 contains 5."""
    texts = [str(answer)]
    if isinstance(answer, float) and math.isfinite(answer) and not isinstance(rule, ContainsRule | MathRule):
        texts.append(np.format_float_positional(answer, trim="-"))
    return texts


def _path(name: str, rule: RewardRule, columns: Collection[str]) -> str | None:
    """Return the field of a row that the rule reads; None if it reads none. Raise TaskError if no row has the field."""
    if isinstance(rule, RegexRule) and rule.column is None:
        return None
    defaults = TESTS if isinstance(rule, CodeRule) else ANSWERS
    path = rule.column or next((each for each in defaults if split_field(each)[0] in columns), None)
    if path is None:
        raise TaskError(
            f"task.rewards: '{name}' needs a column {' or '.join(defaults)}, but the rows have {', '.join(columns)}; "
            f'name the column in a table: [task.reward_rules.{name}] type = "{rule.type}", column = ...'
        )
    column, _ = split_field(path)
    if column not in columns:
        raise TaskError(
            f"task.reward_rules.{name}.column = '{path}': no row has that column; {among_known(column, columns)}"
        )
    return path


def _matches_of(rule: MathRule | ExactRule | ContainsRule | RegexRule) -> _Matches:
    if isinstance(rule, MathRule):
        return _load_math(rule.answer_tag)
    if isinstance(rule, RegexRule):
        pattern = re.compile(rule.pattern)
        if rule.column is None:
            return lambda answer, completion: pattern.search(completion) is not None

        def equals_last_group(answer: str, completion: str) -> bool:
            *_, last = [None, *pattern.finditer(completion)]
            return last is not None and last[1] is not None and last[1].strip() == answer.strip()

        return equals_last_group
    fold: Callable[[str], str] = str.casefold if rule.ignore_case else str

    def matches(answer: str, completion: str) -> bool | NoScore:
        if not (expected := fold(answer.strip())):
            return NoScore("the row's answer is empty")
        if isinstance(rule, ContainsRule):
            return expected in fold(completion)
        return fold(_between(completion, rule.answer_tag)) == expected

    return matches


def _between(completion: str, tag: str | None) -> str:
    """Return the text between the last pair of tags; empty if there is no pair."""
    if tag is None:
        return after_thoughts(completion)
    head, closed, _ = completion.rpartition(f"</{tag}>")
    _, opened, text = head.rpartition(f"<{tag}>")
    return text.strip() if opened and closed else ""


# --- exact numbers --------------------------------------------------------------------------------------

_Number = tuple[Fraction, int]  # the value as written; 100 if a percent sign follows, else 1
_LONGEST = 3000  # maximum characters of an answer, and digits of a computed power (1e999999999 is not computed)
_SIGNS = str.maketrans(
    "\u2212\u2013\u2012\u2010\u2011\u00d7\u2715\u22c5\u2219\u00f7\u2044", "-----····//", "\u200b\u2060\ufeff"
)
_PART = r"(?:\{\s*([-+]?[\d.]+(?:\^[-+]?\d+)?)\s*\}|(\d))"
_SPELLINGS = (  # normalizes to 1234567, 2·10^-5, 1/2, 3 1/2, -7, 7%
    (r"(?<=\d)(?<!\d{4})(?<!\b0)(?:,\\!|\{,\}|\\[,;: ]|[,'_\u2019 ])(?=\d{3}(?!\d|,\d\d?\b| ?/))", ""),
    (r"[ \t]*(?:·|\\(?:times|cdot)(?![A-Za-z]))[ \t]*|(?<=[\d.])[ \t]*[xX][ \t]*(?=\d)", "·"),
    (r"[ \t]*(?:/|\\div(?![A-Za-z]))[ \t]*", "/"),
    (r"[ \t]*\^[ \t]*(?:[({]\s*([-+]?\d+)\s*[)}])?|(?<=\d)(?:\*\*| \*\* )(?=[-+]?\d)|<sup>([-+]?\d+)</sup>", r"^\1\2"),
    (r"(?<=\d)\{,\}(?=\d)", "."),
    (r"<[|/]{0,2}[A-Za-z][^<>\n]*>|<(?=[^A-DF-Za-df-z<>\n]*>)", "   "),
    (r"\\(?:left|right|displaystyle|q?quad|approx|[bB]igg?[lr]?)(?![A-Za-z])|\\[,;:! ()\[\]]|[~&]", " "),
    (r"(?<=\d)\s*(?=\\[dtc]?frac)|\b(?:USD?|EUR|GBP|INR|Rs)\.? ?(?=[-+]?[\d.])", " "),
    (rf"(?<![/^}}])\\[dtc]?frac\s*{_PART}\s*{_PART}(?!\s*[\d^]|\.\d)", r"\1\2/\3\4"),
    (r"\\(?:text|math|[mf]box|underline)\w*\s*\{([^{}]*)\}|((?:[=:({\[$|]|\A)[ \t]*[-+])[ \t]+(?=[\d.])", r"\1\2"),
    (r"(?<![A-Za-z0-9)\]}%])-[*`\"'$€£¥₹]+(?=[\d.])|\b(?:minus|negative)[ \t]+(?=[\d.])", "-"),
    (r"[ \t]*(?:\\?%|\b(?:per ?cent|percentage|pct)\b)", "%"),
)
_NUMBER = r"(\d+(?:\.\d*)?|(?<![A-Za-z\d.])\.\d+)(?:[eE]([-+]?\d+))?(?:\^([-+]?\d+)(?!\.?\d))?"
_TERM = r"(?:\d+ (?=\d+/\d))?" + re.sub(r"\((?!\?)", "(?:", _NUMBER)
_TIMES = r"(?<!\.)(?: ?[/·] ?|\*| \* )[-+]?"
_STARTS = r"(?:(?<![A-Za-z0-9)}%^+-])(?<!\d[ .\]])[-+])?(?<![A-Za-z0-9^])(?<![^\W_]_)(?<!_\{)(?<!\^[-+])(?<!\d\.)"
_RUN = rf"{_STARTS}{_TERM}(?:{_TIMES}{_TERM})*"
_UNIT = r"(?!sqrt|sin|cos|tan|log|exp|and|mod|hundred|thousand|[mbtr]+illion)(?:[cmk]m|[km]g|ml|ft|hr|m/s|[A-Za-z]{3,})"
_ALONE = rf"[\s({{\[$€£¥₹]*({_RUN})[\s)\]}}$€£¥₹°.,*]*(%?)[\s)\]}}$°.,]*(?:{_UNIT}(?:[\sA-Za-z./)}}]|\^-?\d)*)?"
_PART_OF_MORE = re.compile(  # text before \1 or after \2, which enclose a number
    r"(?:[-+][ \t*`\"'$({\[]*|[\w)\]}%] *[/·^][({]*|[)\]}] *\* *|[√±^]\{?|(?<![A-Za-z])—|\d(?::|[.:]?\()|[\]}]\s*\{\s*"
    r"|\\[A-Za-z]+(?:_\w+)?[\s{(]*|(?:(?<![-=\n>])>|<|[<>!]=|[≤≥≠])[ \t]*|\b(?:sqrt|log|ln|exp|sin|cos|tan)\W{0,2}"
    r"|(?:\bnot|n't|than|instead of) |[\d)}$]\W{0,3}\bor\W{0,3})\x01|[.\d]\d\x02\.\.|\x02(?:[)\]}]*\^|_\d|[.,:]\d"
    r"|[xyzikKMB]\b|[eEbxo]\d| *(?:[π√∞±]|\\(?:pi|sqrt|pm|[lc]?dots|frac)|[-+*·/] *[({\\]|hundr|thous|[mbtr]+ill))"
)
_SEVERAL = re.compile(  # texts in which math-verify accepts one of several answers, or a part as the whole
    r"(?<!\\);|[±…]|(?<![\\{]),(?!\d{3})|\b(?:or|and)\b|\.{3}|\\(?:pm|n|[lc]?dots)|\\text\w*\{[^{}]*\d|illion|thousand|[\d)}]_"
)
_BOX = re.compile(r"\\boxed\s*(?:\{(" + r"(?>[^{}]|\{" * 5 + r"[^{}]*" + r"\})*+" * 5 + r")\}|([^{\n]+))")


def _spelled(text: str) -> str:
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻]+", r"^\g<0>", re.sub(r"(?<=\d)(?=[¼-¾⅐-⅞])", " ", text))
    text = normalize("NFKC", text).translate(_SIGNS)
    for pattern, new in _SPELLINGS:
        text = re.sub(pattern, new, text)
    return text


def _value(run: str) -> Fraction | None:
    value = Fraction(1)
    for times, whole, above, digits, exponent, power in re.findall(rf"({_TIMES}|[-+])?(?:(\d+) (\d+)/)?{_NUMBER}", run):
        size, is_zero = (len(digits) + abs(int(exponent or 0))) * abs(int(power or 1)), not Fraction(digits)
        if size > _LONGEST or (is_zero and (whole or power or "/" in times)):
            return None
        term = Fraction(digits) * Fraction(10) ** int(exponent or 0)
        term = int(whole) + int(above) / term if whole else term ** int(power or 1)
        value *= (1 / term if "/" in times else term) * (-1) ** times.count("-")
    return value if max(abs(value.numerator), value.denominator) < 10**_LONGEST else None


def _last_number(text: str) -> _Number | None:
    """Return the last number in prose; None if it is part of an expression, such as 5 or 7, x > 7, sqrt(7)."""
    end = max((each.end() for each in re.finditer(r"[\d¼-¾⅐-⅞]+", text)), default=0)
    text = "\n" + (text[: end + 80] if end <= _LONGEST else re.sub(r"^\S+", "", text[end - _LONGEST : end + 80]))
    text = re.sub(r"(?m)^[ \t]*[-+*•][ \t]+", "", text)  # bullets
    text = _spelled(re.sub(r"(?<![\d.,(\[{])(?![1-9]\d{0,2},\d{3}(?!\d))(\d+),(\d+)(?![\d.,]*\d)", r"\1.\2", text))
    *_, run = [None, *re.finditer(_RUN, text)]
    value = _value(run[0]) if run else None
    if not run or value is None or _PART_OF_MORE.search(f"{text[: run.start()]}\x01{run[0]}\x02{text[run.end() :]}"):
        return None
    return value, 100 if text[run.end() :].lstrip("*_`$)}]\"'").startswith("%") else 1


def _answer(text: str) -> tuple[_Number | None, str]:
    """Return the answer as a number, if possible, and as a formula; the last LaTeX box takes precedence."""
    text = text.replace("\\$", "£").replace("$$", "$")
    box = _BOX.match(text, max(text.rfind("\\boxed"), 0))
    start, formula = (box.start(), box[1] or box[2] or "") if box else (0, "")
    if not formula.strip():
        end = max(map(text.rfind, ("$", "\\)", "\\]")))
        start = max(text.rfind(opening, 0, max(end, 0)) for opening in ("$", "\\(", "\\["))
        is_last = start >= 0 and end > max(map(text.rfind, "0123456789"))
        formula = text[start + (1 if text[start] == "$" else 2) : end] if is_last else ""
    if re.search(r"[\d$)}]\W*\bor\W*$", text[:start][-20:]):
        formula += " or"
    left, _, right = formula.rpartition("=")
    is_one = len(right) < _LONGEST and not _SEVERAL.search(left.partition("=")[2]) and left[-1:] not in tuple("<>!")
    if is_one and (found := re.fullmatch(_ALONE, _spelled(right))) and (value := _value(found[1])) is not None:
        return (value, 100 if found[2] else 1), formula
    is_formula = box or re.search(r"\\[A-Za-z]|[\w)}][\^_]|[<>=|]", formula)
    return (None, formula) if is_formula else (_last_number(text), "")


# --- math-verify ----------------------------------------------------------------------------------------


def _check_math() -> None:
    if find_spec("math_verify") is None or find_spec("antlr4") is None:
        raise TaskError(
            "task.rewards: 'math' needs math-verify, which is not installed here: pip install 'math-verify==0.9.0'"
        )


def _load_math(tag: str | None) -> _Matches:
    """Load the rule without math-verify's own timeouts, which use alarms; a slow call is killed with this process."""
    _check_math()
    from math_verify import parse, verify
    from sympy import Basic, Float, Rational  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # math-verify warns that its timeouts are off

    def parsed(text: str) -> list[Any]:
        text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\w|\.\d)", r"{\1*10^{\2}}", text[-20_000:])
        is_endless = re.search(r"(?:[({\[][^(){}\[\]]*){40}|\^[\s{(]*[-+]?\d{5,}", text)  # parsing would take minutes
        found = [] if is_endless else parse(text, parsing_timeout=None)
        return [x.xreplace({y: Rational(str(y)) for y in x.atoms(Float)}) if isinstance(x, Basic) else x for x in found]

    @lru_cache(1024)  # the samples of a group share an answer
    def expected(answer: str) -> tuple[_Number | None, list[Any]]:
        text = answer.rpartition("####")[2].strip()  # GSM8K answers include the derivation
        number = None if "=" in text else _answer(f"\\boxed{{{text}}}")[0]
        exact = [Rational(number[0] / number[1])] if number else None
        return number, exact or parsed(text if re.search(r"\$|\\boxed|\\[(\[]", text) else f"\\boxed{{{text}}}")

    def matches(answer: str, completion: str) -> bool | NoScore:
        right, formulas = expected(answer)
        if not formulas:
            return NoScore("the row's answer is not mathematics", repr(answer[:200]))
        text = completion.strip() if tag is None else _between(completion, tag)
        text = after_thoughts(text) or text
        given, formula = _answer(text)
        if right and given:
            (share, per), (number, one) = (right, given) if right[1] > given[1] else (given, right)
            as_named = number if number.denominator == 1 < abs(number) else None  # 50% for 50, as in math-verify
            return share == number if per == one else share in (100 * number, as_named)
        if right:
            text = "" if _SEVERAL.search(formula) else f"\\boxed{{{formula}}}"
        found = [Rational(given[0] / given[1])] if given and not re.search(r"[$\\]", text) else parsed(text)
        return bool(verify(formulas, found, numeric_precision=100, timeout_seconds=None))

    return matches
