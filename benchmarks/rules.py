"""Count correct and incorrect answers that the reward rule `math` accepts. Prints one JSON line last.

    python benchmarks/rules.py [--page [FILE]]

A pair is the answer of a row and a completion; each line of `TRIPLES` gives one correct and one incorrect pair. Three
judges are compared:

    math_verify   math-verify with its defaults, like a previous version of the rule without a number parser
    exact         only the rule's number parser; a pair that is not two numbers gets no reward
    rule          the current rule: numbers are compared exactly, and all other pairs are compared by math-verify
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import number, origin, parsed, table, write_page

from leeway.actors.tasks import Problem, rules
from leeway.actors.tasks.config import MathRule

JUDGES = ("math_verify", "exact", "rule")
THINKING = "<think>I start from {0}, and 2 more make it.</think>"
TRIPLES: Mapping[str, tuple[tuple[object, str, str], ...]] = {
    "tags, quotes, brackets": (
        ("5", "<think>so 7</think><answer>5</answer>", "<think>so 5</think><answer>7</answer>"),
        ("18", "First 3.\n<answer>18</answer>", "First 18.\n<answer>3</answer>"),
        ("-4", "4 it was, <b>-4</b>", "-4 it was, <b>4</b>"),
        ("12", 'There are 2. {"answer": 12}', 'There are 12. {"answer": 2}'),
        ("12", 'There are 2. {"answer": "12"}', 'There are 12. {"answer": "2"}'),
        ("60", "From 6 follows `60`", "From 60 follows `6`"),
        ("60", 'From 6 follows "60".', 'From 60 follows "6".'),
        ("9", "One, 1, then [9]", "One, 9, then [1]"),
        ("9", "One, 1, then (9)", "One, 9, then (1)"),
        ("9", "1 and so {9}", "9 and so {1}"),
        ("31", "**Answer:**31", "31? **Answer:**13"),
        ("31", "13 no, **31**", "31 no, **13**"),
        ("31", "13 no, __31__.", "31 no, __13__."),
        ("2.5", "\u7b54\u6848\u662f2.5\u3002", "2.5? \u7b54\u6848\u662f5.2\u3002"),
        ("8", "```\n8\n```", "8\n```\n4\n```"),
        ("8", "final_answer(8)", "8 final_answer(4)"),
    ),
    "signs": (
        ("-7", "it is \u22127", "it is 7"),
        ("-7", "it is \u20137.", "it is 7."),
        ("7", "it is +7", "it is \u22127"),
        ("-7", "minus 7", "7"),
        ("7", "7", "negative 7"),
        ("-30", "a loss of -$30", "a gain of $30"),
        ("-30", "-**30**", "**30**"),
        ("-30", r"\boxed{\u221230}".replace(r"\u2212", "\u2212"), r"\boxed{30}"),
        ("-1/2", r"$-\frac{1}{2}$", r"$\frac{1}{2}$"),
        ("6", "- 6", "-6"),
    ),
    "thousands": (
        ("1,234,567", "1234567", "567"),
        ("1234567", "1,234,567", "1,234,568"),
        ("1234567", "1\u202f234\u202f567", "567"),
        ("1234567", "1 234 567", "567"),
        ("1234567", "1'234'567", "567"),
        ("1234567", r"\boxed{1{,}234{,}567}", r"\boxed{567}"),
        ("1234567", r"$1\,234\,567$", r"$567$"),
        ("72", "Eight nines.\n#### 72", "#### 27"),
        ("Eight thousand\n#### 8,000", "8000 in all", "8 in all"),
        ("1500", "$1,500.00", "$1.50"),
    ),
    "fractions and mixed numbers": (
        ("1/3", r"\frac{1}{3}", "0.333333"),
        (r"\frac{1}{3}", "1/3", "0.333333"),
        ("1/3", r"$\dfrac13$", r"$\dfrac31$"),
        ("2/3", r"\boxed{\frac{2}{3}}", r"\boxed{0.6666667}"),
        ("7/2", "3 1/2", "1/2"),
        ("3.5", r"$3\frac{1}{2}$", r"$\frac{1}{2}$"),
        ("3.5", "3\u00bd", "\u00bd"),
        ("0.75", "\u00be of it", "\u00bd of it"),
        ("-7/2", r"\boxed{-3\frac{1}{2}}", r"\boxed{3\frac{1}{2}}"),
        ("22/7", "22/7", "3.142857"),
        ("6/4", "it is 3/2", "it is 2/3"),
        ("1.5", r"\boxed{1\frac12}", r"\boxed{3 \text{ or } 1.5}"),
    ),
    "powers of ten, and powers": (
        ("1e-7", "0.0000001", "0.0000002"),
        ("150000", "1.5 x 10^5", "1.5 x 10^4"),
        ("150000", r"$1.5 \times 10^{5}$", r"$1.5 \times 10^{4}$"),
        ("150000", "1.5\u00b710\u2075", "1.5\u00b710\u2074"),
        (1e-07, "1e-7", "1e-8"),
        (2.5e21, "2.5e+21", "2.5e+20"),
        ("1000", "10**3", "10 * 3"),
        ("1024", "2^10", "10"),
        ("1e300", "1e300", "1e301"),
        ("5", "5", "5 \u00d7 10^3"),
        ("-0.002", "-2E-3", "2E-3"),
        ("3e4", r"\boxed{3\cdot 10^4}", r"\boxed{3\cdot 10^{-4}}"),
    ),
    "very close, very small, very large": (
        ("1/2^{99}", r"\boxed{1/2^{99}}", r"\boxed{1/2^{98}}"),
        ("1/2^99", r"\boxed{\frac{1}{2^{99}}}", r"\boxed{\frac{1}{2^{98}}}"),
        ("0.1", "0.10", "0.10000000000000000001"),
        ("0.0000001", r"\boxed{0.0000001}", r"\boxed{0.0000003}"),
        (str(10**30), "10^30", str(10**30 + 1)),
        (10**30, r"\boxed{10^{30}}", rf"\boxed{{{10**30 + 1}}}"),
        ("0", "0.0", "0.00000000001"),
        ("1", "1.000", "0.9999999"),
        ("3.1415926535", "3.1415926535", "3.1415926536"),
        ("123456789.123456789", "123456789.123456789", "123456789.1234567"),
        (r"\{1, 0.0000001\}", r"$\{0.0000001, 1\}$", r"$\{0.0000004, 1\}$"),
    ),
    "percent, currency, units": (
        ("25", "25%", "2500"),
        ("0.25", "25%", "0.25%"),
        ("25%", r"\boxed{25\%}", r"\boxed{2.5\%}"),
        ("5", "$5", "$5 million"),
        ("5", "5\u20ac", "5 thousand \u20ac"),
        ("40", "40 km/h", "4 km/h"),
        ("25", "25 cm^2", "2 cm^25"),
        ("2", "2 cm\u00b2", "25 cm\u00b2"),
        ("25", r"\boxed{25 \text{ cm}^2}", r"\boxed{2 \text{ cm}^{25}}"),
        ("9.8", r"$9.8\,\mathrm{m/s^2}$", r"$8.9\,\mathrm{m/s^2}$"),
        ("12", "12 apples", "12x"),
        ("90", "90\u00b0", "9\u00b0"),
    ),
    "positions": (
        ("7", r"\boxed{7} (in 3 steps)", r"\boxed{3} (in 7 steps)"),
        ("7", r"First \boxed{3}. No, that is wrong: \boxed{7}", r"First \boxed{7}. No, that is wrong: \boxed{3}"),
        ("7", "1. 3\n2. 7", "1. 7\n2. 3"),
        ("7", "- 3\n- 7", "- 7\n- 3"),
        ("7", "3 + 4 = 7", "7 - 4 = 3"),
        ("7", "It is 7.", "It is 3, not 7."),
        ("7", "7, I hope.\n\nAsk me for more!", "3, I hope.\n\nAsk me for more!"),
        ("7", "<think>\\boxed{3}</think>\n7", "<think>\\boxed{7}</think>\n3"),
        ("7", "x = 7", "x > 7"),
        ("7", "7", "3 or 7"),
        ("7", "7", "7 or 3"),
        ("7", r"\boxed{7}", r"\boxed{3} or \boxed{7}"),
        ("7", r"\boxed{x = 7}", r"\boxed{x = 3 \text{ or } x = 7}"),
    ),
    "LaTeX, sets, equations (math-verify's)": (
        ("7", r"\boxed{\sqrt{49}}", r"\boxed{\sqrt{7}}"),
        (r"\sqrt{8}", r"$2\sqrt{2}$", r"$\sqrt{2}$"),
        (r"$\sqrt{4}$", "<think>3</think><answer>2</answer>", "so 2? <answer>3</answer>"),
        (r"\{1, 2\}", r"$\{2, 1\}$", r"$\{2, 3\}$"),
        ("(1, 2)", r"\boxed{(1, 2)}", r"\boxed{(2, 1)}"),
        ("x = 5", "$x = 5$", "$x = 6$"),
        ("5", "$x = 5$", "$5x$"),
        ("y = 2x + 1", "$y = 1 + 2x$", "$y = 2x$"),
        (r"\frac{\pi}{2}", r"\boxed{0.5\pi}", r"\boxed{1.5707963}"),
        ("x^2 - 1", r"\boxed{(x-1)(x+1)}", r"\boxed{(x-1)^2}"),
        (r"[0, 1)", r"\boxed{[0, 1)}", r"\boxed{[0, 1]}"),
        ("10", r"\boxed{\binom{5}{2}}", r"\boxed{\binom{5}{1}}"),
        ("14", r"$2 \cdot (3 + 4)$", r"$2 \cdot 3 + 4$"),
        ("10", r"\boxed{10}", r"\boxed{10_{2}}"),
    ),
}
LARGE = {"digits": "7" * 2**20, "nested braces": "\\boxed{" + "{" * 2**19 + "7" + "}" * 2**19 + "}"}


def main() -> None:
    """Judge every pair, print the result and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(quick=False)
    args = parsed(parser, RESULTS / "rules.md")
    before = describe_machine()
    judges = {"math_verify": math_verify_alone(), "exact": exact_alone(), "rule": rule_as_it_is()}
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, triples in TRIPLES.items():
        found[name] = {}
        for judge, is_right in judges.items():
            rewarded = [(is_right(answer, right), is_right(answer, wrong)) for answer, right, wrong in triples]
            found[name][judge] = (sum(right for right, _ in rewarded), sum(wrong for _, wrong in rewarded))
            missed = [triple for triple, (right, wrong) in zip(triples, rewarded, strict=True) if wrong or not right]
            print(f"{name}, {judge}: {missed}", file=sys.stderr, flush=True)
    seconds = {name: timed(judges["rule"], text) for name, text in LARGE.items()}
    num_pairs = 2 * sum(map(len, TRIPLES.values()))
    line = {"benchmark": "rules", "num_pairs": num_pairs, **totals(found)}
    if args.page:
        made = origin("python benchmarks/rules.py --page", before)
        write_page(args.page, page(found, line, seconds, made))
    print(json.dumps(line))


# --- judges -------------------------------------------------------------------------------------------

Judge = Callable[[object, str], bool]


def math_verify_alone() -> Judge:
    """Return the judge `math_verify`: defaults of math-verify, expanded exponents, and the answer marker of GSM8K."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    exponent = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?!\w|\.\d)")

    def read(text: str) -> list[object]:
        return list(parse(exponent.sub(lambda found: f"{Decimal(found[0]):f}", text), parsing_timeout=None))

    def is_right(answer: object, completion: str) -> bool:
        text = str(answer).rpartition("####")[2].strip()
        right = read(text if re.search(r"\$|\\boxed|\\[(\[]", text) else f"\\boxed{{{text}}}")
        return bool(verify(right, read(completion), timeout_seconds=None))

    return is_right


def rule_as_it_is() -> Judge:
    """Return the judge `rule`, which is the current rule as a run applies it."""
    rule = rules.load_rule("math", MathRule(), ["answer"])

    def is_right(answer: object, completion: str) -> bool:
        return list(rule([Problem("q", "q", {"answer": answer})], [completion])) == [1.0]  # type: ignore[arg-type]

    return is_right


def exact_alone() -> Judge:
    """Return the judge `exact`: the current rule for pairs of two numbers, and False for all other pairs."""
    rule = rule_as_it_is()

    def is_right(answer: object, completion: str) -> bool:
        is_number = rules._answer(f"\\boxed{{{str(answer).rpartition('####')[2]}}}")[0] is not None
        tail = completion.rpartition("</think>")[2].strip() or completion
        return is_number and rules._answer(tail)[0] is not None and rule(answer, completion)

    return is_right


def timed(judge: Judge, text: str) -> float:
    """Return the seconds of judging one completion."""
    began_s = time.perf_counter()
    judge("7", text)
    return time.perf_counter() - began_s


# --- the page ---------------------------------------------------------------------------------------


def totals(found: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """Return the rewarded fraction of correct answers, and the number of rewarded incorrect answers."""
    line: dict[str, float] = {}
    num_right = sum(map(len, TRIPLES.values()))
    for judge in JUDGES:
        line[f"right_rewarded_{judge}"] = round(sum(each[judge][0] for each in found.values()) / num_right, 3)
        line[f"wrong_rewarded_{judge}"] = sum(each[judge][1] for each in found.values())
    return line


def page(
    found: Mapping[str, Mapping[str, tuple[int, int]]],
    line: Mapping[str, object],
    seconds: Mapping[str, float],
    made: str,
) -> list[str]:
    """Return the paragraphs of the page."""
    head = ["class", "correct and incorrect pairs, each"]
    head += [f"{judge}: {kind}" for judge in ("math-verify", "exact", "rule") for kind in ("correct", "incorrect")]
    rows = [
        [name, str(len(TRIPLES[name])), *(str(count) for judge in JUDGES for count in each[judge])]
        for name, each in found.items()
    ]
    sums = [str(sum(each[judge][place] for each in found.values())) for judge in JUDGES for place in (0, 1)]
    rows.append(["**all**", str(sum(map(len, TRIPLES.values()))), *sums])
    took = ", ".join(f"{name} {number(value, '{:.2f} s')}" for name, value in seconds.items())
    return [
        "# Answers that the rule `math` rewards",
        f"{made} {line['num_pairs']} pairs of an answer and a completion, written by hand in `benchmarks/rules.py`; "
        "half of the pairs are correct. A column counts rewarded pairs. The ideal is all of `correct` and none of "
        "`incorrect`.",
        table(head, rows),
        "- `math-verify`: math-verify with its defaults, like a previous version of the rule without a number parser.\n"
        "- `exact`: only pairs whose sides both parse as numbers.\n"
        "- `rule`: the current rule. Two numbers are compared exactly. math-verify compares all other pairs; decimals "
        "are converted to fractions first, so that nothing is rounded.",
        f"Time of the rule for a completion of one megabyte: {took}.",
    ]


if __name__ == "__main__":
    main()
