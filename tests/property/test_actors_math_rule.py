"""The rule `math` on numbers in the notations that models write, against values known by construction.

A pair is built from a value: the row's answer is one notation of this value, and the completion holds a notation of the
same or of another value. The test never parses numbers, so arithmetic decides what the rule should return.
"""

import random
import shutil
import subprocess
from fractions import Fraction
from pathlib import Path

import pytest

from leeway.actors.tasks.config import MathRule
from leeway.actors.tasks.rules import load_rule
from leeway.actors.tasks.task import NoScore, Problem

NUM_PAIRS = 3000
RIGHT_AT_LEAST = 0.98
MINUS = ("-", "-", "\u2212", "\u2013")
SPACES = ("\u00a0", "\u2009", "\u202f")


def seed_of_commit():
    """Return the first eight hexadecimal digits of the commit, so that each commit is tested on different pairs."""
    if shutil.which("git"):
        args = ["git", "rev-parse", "HEAD"]
        ran = subprocess.run(args, cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=30)
        if ran.returncode == 0:
            return int(ran.stdout[:8], 16)
    return 0x5EED


# --- notations: value -> text, or None if the value has no such notation ------------------------------


def decimal(value):
    """Return the digits of a terminating decimal without a sign, or None."""
    denominator, places = value.denominator, 0
    while (10**places) % denominator:
        places += 1
        if places > 60:
            return None
    digits = str(abs(value.numerator) * 10**places // denominator).rjust(places + 1, "0")
    return digits[: len(digits) - places] + ("." + digits[len(digits) - places :] if places else "")


def grouped(value, separator):
    digits = decimal(value)
    if digits is None:
        return None
    whole, point, rest = digits.partition(".")
    groups = []
    while whole:
        groups.insert(0, whole[-3:])
        whole = whole[:-3]
    return separator.join(groups) + point + rest


def zeros(value, chance):
    digits = decimal(value)
    if digits is None:
        return None
    return digits + (("" if "." in digits else ".") + "0" * chance.randrange(1, 4))


def scientific(value, chance, form):
    digits = decimal(value)
    if digits is None or not value:
        return None
    whole, _, rest = digits.partition(".")
    together = (whole + rest).lstrip("0")
    exponent = len(whole) - 1 - (len(whole + rest) - len(together))
    together = together.rstrip("0") or "0"
    mantissa = together[0] + ("." + together[1:] if len(together) > 1 else "")
    return form.replace("M", mantissa).replace("X", str(exponent))


def fraction(value, form):
    return form.replace("A", str(abs(value.numerator))).replace("B", str(value.denominator))


def mixed(value, form):
    whole, rest = divmod(abs(value.numerator), value.denominator)
    if not whole or not rest:
        return None
    return form.replace("W", str(whole)).replace("A", str(rest)).replace("B", str(value.denominator))


def percent(value, form):
    digits = decimal(100 * abs(value))
    return None if digits is None else form.replace("P", digits)


def power_of_two(value, form):
    top, bottom = abs(value.numerator), value.denominator
    if top == 1 and bottom > 1 and bottom & (bottom - 1) == 0:
        return form.replace("E", str(bottom.bit_length() - 1))
    return None


PLAIN = (
    lambda value, chance: decimal(value),
    lambda value, chance: decimal(value),
    lambda value, chance: decimal(value) and "+" + decimal(value) if value > 0 else None,
    lambda value, chance: decimal(value) and "0" * chance.randrange(1, 3) + decimal(value),
    zeros,
    lambda value, chance: decimal(value) + "." if decimal(value) and value.denominator == 1 else None,
    lambda value, chance: decimal(value).lstrip("0") if decimal(value) and 0 < abs(value) < 1 else None,
    lambda value, chance: grouped(value, ","),
    lambda value, chance: grouped(value, chance.choice(SPACES)),
    lambda value, chance: grouped(value, " "),
    lambda value, chance: scientific(value, chance, chance.choice(("MeX", "MEX"))),
    lambda value, chance: scientific(
        value, chance, chance.choice(("M x 10^X", "M*10^X", "M \u00d7 10^X", "M\u00b710^X"))
    ),
    lambda value, chance: fraction(value, chance.choice(("A/B", "A / B"))) if value.denominator > 1 else None,
    lambda value, chance: mixed(value, "W A/B"),
    lambda value, chance: percent(value, chance.choice(("P%", "P %", "P percent"))) if abs(value) < 1 else None,
    lambda value, chance: power_of_two(value, chance.choice(("1/2^E", "1/2^{E}", "2^-E", "2^{-E}"))),
)
LATEX = (
    lambda value, chance: decimal(value),
    lambda value, chance: grouped(value, chance.choice(("{,}", "\\,", ",", ",\\!"))),
    lambda value, chance: fraction(value, "\\" + chance.choice(("frac", "dfrac", "tfrac")) + "{A}{B}"),
    lambda value, chance: mixed(value, "W\\frac{A}{B}"),
    lambda value, chance: scientific(
        value, chance, chance.choice((r"M\times 10^{X}", r"M \cdot 10^{X}", r"M\times10^{X}"))
    ),
    lambda value, chance: percent(value, r"P\%") if abs(value) < 1 else None,
    lambda value, chance: power_of_two(value, chance.choice((r"\frac{1}{2^{E}}", "1/2^{E}", "2^{-E}"))),
)


def notation_of(value, chance, forms):
    """Return one notation of the value, with its sign."""
    while True:
        text = chance.choice(forms)(value, chance)
        if text:
            return chance.choice(MINUS) + text if value < 0 else text


# --- wrappers and positions ---------------------------------------------------------------------------

PLAIN_WRAPPERS = (
    "N", "N", "N.", "**N**", "**N.**", "*N*", "__N__", "`N`", '"N"', "'N'", "\u201cN\u201d", "(N)", "[N]", "{N}",
    "<N>", "<answer>N</answer>", "<answer> N </answer>", "<b>N</b>", "= N", "x = N", "x=N", "#### N", '{"answer": N}',
    '{"answer": "N"}', "Answer: N", "\\boxed{N}", "```\nN\n```", "- N", "N!", "N\n", "[[N]]", "**Answer:** N",
    "**Answer: N**", "final_answer(N)", "\u2248 N", "\u7b54\u6848\u662fN\u3002", "=> N", "-> N", "Answer:N", "N;",
    "N:", "The answer is N, as wanted", "| total | N |", "> N", "<|answer|>N<|end|>",
)  # fmt: skip
AFTER_WHOLE = (
    " apples",
    " km",
    " m^2",
    " cm\u00b2",
    "\u20ac",
    " dollars",
    "kg",
    " m/s",
    "\u00b0",
    " units.",
    " people in all",
)
LATEX_WRAPPERS = (
    "$N$", "$N$.", "\\(N\\)", "\\[N\\]", "$$N$$", "\\boxed{N}", "$\\boxed{N}$", "\\boxed{x = N}", "$x = N$",
    "\\[\n\\boxed{N}\n\\]", "\\boxed{\\text{N}}", "$\\mathbf{N}$", "\\boxed{N\\text{ cm}}",
    "\\boxed{N \\text{ apples}}", "\\boxed{ N }", "\\boxed{(N)}", "**$N$**",
)  # fmt: skip
REMARKS = ("", "", "", "\n", " That is all.", " I hope this helps!", "\n\nLet me know if anything is unclear.")


def completion_of(value, decoy, chance):
    """Return a completion whose answer is `value`; other numbers precede it, or follow it after a box."""
    if chance.random() < 0.6:
        text, number = chance.choice(PLAIN_WRAPPERS), notation_of(value, chance, PLAIN)
        if text == "N" and "%" not in number and "percent" not in number and chance.random() < 0.5:
            text += chance.choice(AFTER_WHOLE)
        elif text == "N" and number[0].isdigit() and "/" not in number and "%" not in number and chance.random() < 0.3:
            text = chance.choice(("$N", "\u20acN", "USD N"))
        if number.endswith("%") and "boxed" in text:
            number = number[:-1] + r"\%"
    else:
        text, number = chance.choice(LATEX_WRAPPERS), notation_of(value, chance, LATEX)
    shown = text.replace("N", number)
    other = decimal(decoy) or fraction(decoy, "A/B")
    before = chance.choice((
        "", "", f"First {other}. ", f"I take {other} and 12, so\n", f"<think>so {other}</think>",
        f"Step 1: {other}\nStep 2: ", f"$a = {other}$ and then ", f"1. {other}\n2. ",
        f"<think>\n{other} = {other}\n</think>\n\nThe answer is ", f"3 + 4 = 7, {other}\n\n",
    ))  # fmt: skip
    after = chance.choice(REMARKS)
    if "boxed" in text and chance.random() < 0.3:
        after = f" It took {other} steps."
    if text in ("- N", "> N", "#### N") or text.startswith("```"):
        before = before and before.rstrip(" ") + "\n"
    return before + shown + after


def random_value(chance):
    sign = chance.choice((1, 1, -1))
    kind = chance.randrange(8)
    if kind <= 1:
        return Fraction(sign * chance.randrange(0, 1000))
    if kind == 2:
        return Fraction(sign * chance.randrange(1000, 10 ** chance.randrange(4, 13)))
    if kind == 3:
        return Fraction(sign * chance.randrange(1, 100_000), 10 ** chance.randrange(1, 7))
    if kind == 4:
        return Fraction(sign * chance.randrange(1, 60), chance.randrange(2, 40))
    if kind == 5:
        return Fraction(sign, 2 ** chance.randrange(5, 120))
    if kind == 6:
        return sign * Fraction(chance.randrange(1, 1000), 10 ** chance.randrange(6, 25))
    return Fraction(sign * (10 ** chance.randrange(12, 40) + chance.randrange(0, 3)))


def other_value(value, chance):
    """Return a different value, mostly close to `value` or a common mistake."""
    near = chance.choice((
        value + 1, value - 1, -value, 10 * value, value / 10, 2 * value, value / 2, value + Fraction(1, 10**20),
        value + Fraction(1, 10**7), value * (1 + Fraction(1, 10**9)), 1 / value if value else value + 3,
        value + chance.randrange(2, 50), random_value(chance),
    ))  # fmt: skip
    is_right = near in (value, 100 * value, value / 100)  # math-verify accepts 80 for 80%
    return value + 1 if is_right else near


def answer_of(value, chance):
    """Return the row's answer, in a notation found in real data."""
    choice = chance.randrange(8)
    if choice == 0 and value.denominator == 1:
        return int(value)
    if choice == 1 and value.denominator == 1 and abs(value) < 2**53:
        return float(value)
    if choice == 2:
        return "Some 3 and 4 make it.\n#### " + notation_of(value, chance, PLAIN[:2] + PLAIN[7:8] + PLAIN[12:13])
    if choice == 3:
        return f"${notation_of(value, chance, LATEX)}$"
    if choice == 4:
        return notation_of(value, chance, LATEX)
    return notation_of(value, chance, PLAIN)


def pairs(seed, count):
    chance = random.Random(seed)
    for place in range(count):
        value = random_value(chance)
        other = other_value(value, chance)
        is_right = place % 2 == 0
        given, decoy = (value, other) if is_right else (other, value)
        yield answer_of(value, chance), completion_of(given, decoy, chance), is_right


def test_correct_numbers_get_a_reward_and_wrong_ones_do_not_in_any_notation():
    pytest.importorskip("math_verify")
    seed = seed_of_commit()
    rule = load_rule("math", MathRule(), ["answer"])
    found = {True: [], False: []}
    for answer, completion, is_right in pairs(seed, NUM_PAIRS):
        (score,) = rule([Problem("q", "q", {"answer": answer})], [completion])
        found[is_right].append((score, answer, completion))
    missed = [each for each in found[True] if each[0] != 1.0]
    assert [each for each in found[False] if each[0] not in (0.0, None) and not isinstance(each[0], NoScore)] == [], (
        seed
    )
    assert len(missed) <= (1 - RIGHT_AT_LEAST) * len(found[True]), (seed, missed)
