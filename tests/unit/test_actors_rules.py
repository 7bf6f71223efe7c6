"""Reward rules: scores, columns, and mistakes that are found before start."""

import asyncio
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest

from leeway.actors import sandbox
from leeway.actors.tasks import Problem, TaskError, check_task, code, load_reward, load_task, rules
from leeway.actors.tasks.code import source_of
from leeway.actors.tasks.config import CodeRule, ExactRule, ReasoningGymTask
from leeway.actors.tasks.rules import check_rule
from leeway.actors.tasks.task import NoScore


def gym(*rewards, **changes):
    values = {"type": "reasoning_gym", "name": "chain_sum", "num_train": 8, "num_heldout": 2, "rewards": rewards}
    return ReasoningGymTask(**{**values, **changes})


def reward(completion, rule="exact", answer="42", columns=None, **keys):
    """Return the score of the only rule of a task. Without `columns`, the only column is `answer`."""
    columns = {"answer": answer} if columns is None else columns
    tables = {"reward_rules": {"rule": {"type": rule, **keys}}} if keys else {}
    (function,) = load_task(gym("rule" if keys else rule, **tables)).rewards
    call = load_reward(replace(function, columns=list(columns)))
    (value,) = call([Problem("q", "q", columns)], [completion])
    return value


@pytest.mark.parametrize(
    ("rule", "completion", "answer", "keys", "expected"),
    [
        ("exact", " 42\n", "42", {}, 1.0),
        ("exact", "it is 42", "42", {}, 0.0),
        ("exact", "42", 42, {}, 1.0),
        ("exact", "Yes", "yes", {}, 0.0),
        ("exact", "Yes", "yes", {"ignore_case": True}, 1.0),
        ("exact", "b", ["a", "b"], {}, 1.0),
        ("exact", "c", ["a", "b"], {}, 0.0),
        ("exact", "<a>1</a> so <a> 42 </a>", "42", {"answer_tag": "a"}, 1.0),
        ("exact", "42", "42", {"answer_tag": "a"}, 0.0),
        ("exact", "42", None, {}, None),
        ("exact", "0.00005", 5e-05, {}, 1.0),
        ("exact", "5e-05", 5e-05, {}, 1.0),
        ("exact", "5", 5.0, {}, 1.0),
        ("exact", "10000000000000000", 1e16, {}, 1.0),
        ("exact", "5.5", 5.0, {}, 0.0),
        ("contains", "it is 15 or so", 5.0, {}, 0.0),
        ("exact", "anything at all, no tag", "", {"answer_tag": "a"}, NoScore("the row's answer is empty")),
        ("exact", "", " ", {}, NoScore("the row's answer is empty")),
        ("contains", "it is Forty-two.", "forty", {"ignore_case": True}, 1.0),
        ("contains", "it is Forty-two.", "forty", {}, 0.0),
        ("contains", "anything", "", {}, NoScore("the row's answer is empty")),
        ("regex", "<think>a</think> 42", None, {"pattern": r"</think>\s*\d+$"}, 1.0),
        ("regex", "42", None, {"pattern": "</think>"}, 0.0),
        ("regex", "#### 41\n#### 42 ", "42", {"pattern": "#### (.+)", "column": "answer"}, 1.0),
        ("regex", "#### 42\n#### 41", "42", {"pattern": "#### (.+)", "column": "answer"}, 0.0),
        ("regex", "none", "None", {"pattern": "(x)?", "column": "answer"}, 0.0),
    ],
)
def test_rules_score_completions(rule, completion, answer, keys, expected):
    assert reward(completion, rule, answer, **keys) == expected


def test_a_rule_reads_a_common_answer_column_or_the_configured_one():
    assert reward("7", columns={"question": "q", "ground_truth": 7}) == 1.0
    assert reward("7", columns={"answer": "7", "solution": "8"}) == 1.0
    nested = {"reward_model": {"style": "rule", "ground_truth": "7"}}
    assert reward("7", columns=nested, column="reward_model[ground_truth]") == 1.0
    assert reward("7", columns={"answers": [{"text": "6"}, {"text": "7"}]}, column="answers[1][text]") == 1.0
    assert reward("7", columns={"answers": [{"text": "7"}]}, column="answers[1][text]") is None
    assert reward("7", columns={"reward_model": {}}, column="reward_model[ground_truth]") is None
    assert reward("7", columns={"reward_model": None}, column="reward_model[ground_truth]") is None


def test_rules_are_scored_under_their_own_names():
    task = load_task(gym("exact", "form", reward_rules={"form": {"type": "regex", "pattern": "^4"}}))
    problem = Problem("q", "q", {"answer": "42"})
    assert {each.name: load_reward(each)([problem], ["40"]) for each in task.rewards} == {"exact": [0.0], "form": [1.0]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: gym("exat"), r"'exat' is not of the form FILE.py:FUNCTION.*did you mean 'exact'"),
        (lambda: gym("regex"), r"'regex' is not of the form FILE.py:FUNCTION"),
        (lambda: gym("code"), r"'code' needs a column tests or test_list, but the rows have question, answer"),
        (
            lambda: gym("a", reward_rules={"a": {"type": "exact", "column": "anwser"}}),
            r"task.reward_rules.a.column = 'anwser': no row has that column; known.*did you mean 'answer'",
        ),
        (
            lambda: gym("a", reward_rules={"a": {"type": "exact", "column": "metadata[expresion]"}}),
            r"no training row has the value that 'a' reads, '{metadata\[expresion\]}' at row 0: the item has no "
            r"'expresion'.*known: .*did you mean 'expression'",
        ),
        (lambda: gym("exact", "exact"), "twice"),
    ],
)
def test_an_unknown_name_or_column_is_found_before_start(config, message):
    with pytest.raises(TaskError, match=message):
        check_task(config())


def test_a_column_must_have_a_value_in_at_least_one_row():
    rows = [Problem("q", "q", {"answer": None}), Problem("q", "q", {})]
    with pytest.raises(TaskError, match=r"no training row has the value that 'exact' reads, '{answer}': it is null"):
        check_rule("exact", ExactRule(), ["answer"], rows, here=False)
    check_rule("exact", ExactRule(), ["answer"], [*rows, Problem("q", "q", {"answer": ""})], here=False)


@pytest.mark.parametrize(
    ("rewards", "tables", "message"),
    [
        (("a",), {"reward_rules": {"a": {"type": "regex", "pattern": "(x"}}}, "is not a regular expression: missing"),
        (("a",), {"reward_rules": {"a": {"type": "regex", "pattern": "x", "column": "answer"}}}, "has no group"),
        ((), {"reward_rules": {"a": {"type": "exact"}}}, "reward_rules.a has no effect: add 'a' to rewards"),
        (("a b",), {"reward_rules": {"a b": {"type": "exact"}}}, "is not a valid metric name"),
        (
            ("a",),
            {
                "reward_rules": {"a": {"type": "exact"}},
                "reward_models": {"a": {"type": "classifier", "path": "m"}},
            },
            "a is in both reward_models and reward_rules",
        ),
    ],
)
def test_invalid_tables_are_rejected(rewards, tables, message):
    with pytest.raises(ValueError, match=message):
        gym(*rewards, **tables)


# --- math ---------------------------------------------------------------------------------------------


def test_the_error_without_math_verify_has_the_install_command(monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    check_task(gym("math"))  # no error: actors on other hosts check for the library
    with pytest.raises(TaskError, match=r"needs math-verify, which .* pip install 'math-verify==0.9.0'"):
        check_task(gym("math"), import_limit_s=30.0)


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", "the answer is 0.5", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
        ("7", r"first $7$, then \boxed{8}", 0.0),
        ("Six and six is twelve.\n#### 1,012", "that makes 1012", 1.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
        ("", "7", NoScore("the row's answer is not mathematics", "''")),
        (5e-05, "5e-05", 1.0),
        (5e-05, r"\boxed{0.00005}", 1.0),
        (5e-05, r"\boxed{8.591409}", 0.0),
        (5.0, r"\boxed{5}", 1.0),
        ("1e3", "it is 1e3.", 1.0),
        ("1e3", r"\boxed{1000}", 1.0),
        ("1e3", r"\boxed{8.154845}", 0.0),
        ("-1000", "x = -1.0E+03", 1.0),
        ("7", "1e999999999", 0.0),
    ],
)
def test_mathematical_answers_are_compared_by_value(answer, completion, expected):
    pytest.importorskip("math_verify")
    assert reward(completion, "math", answer) == expected


def math(completion, answer, **keys):
    pytest.importorskip("math_verify")
    return reward(completion, "math", answer, **keys)


@pytest.mark.parametrize(
    "wrapped", ["<final>{}</final>", "**{}**", "`{}`", '"{}"', "({})", "[{}]", "{{{}}}", "<{}>", "__{}__"]
)
@pytest.mark.parametrize("end", ["", ".", "\n", " km", " m^2", "\u20ac"])
def test_the_last_number_is_the_answer_in_any_markup(wrapped, end):
    assert math(f"<think>3, or 8?</think>So 3 and then {wrapped.format('8')}{end}", "8") == 1.0
    assert math(f"<think>3, or 8?</think>So 8 and then {wrapped.format('3')}{end}", "8") == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("2/3", r"\frac23", "0.666667"),
        ("1/10^40", "1e-40", "1e-41"),
        (10**30, "10^30", str(10**30 + 1)),
        ("0.1", r"\boxed{\frac{1}{10}}", "0.10000000000000000001"),
        ("-12", "it is \u221212", "it is 12"),
        ("-12", r"\boxed{- 12}", r"\boxed{12}"),
        ("-12", "negative 12", "12"),
        ("-12", "a loss of -$12", "$12"),
        ("2,345,678", "2\u202f345\u202f678", "678"),
        ("2345", r"2{,}345", "345"),
        ("7/4", r"1\frac{3}{4}", r"\frac{3}{4}"),
        ("7/4", "1\u00be", "\u00be"),
        ("3e5", "3 \u00d7 10\u2075", "3 \u00d7 105"),
        ("3e5", r"$3\times 10^{5}$", "5"),
        ("3e-5", "3*10^-5", "3*10^5"),
        ("0.25", "25%", "0.25%"),
        ("25", "25%", "2500"),
        ("25%", "0.25", "0.0025"),
        ("25%", "25", "2500"),
        ("0.5", "50%", "0.5%"),
        ("-3", "\u2026-3", "\u20263"),
        ("1/3", r"It is \frac{1}{3}.", "{1}/{3} of 3"),
        ("9", r"\boxed{9}, which took 4 steps", r"\boxed{4}, which took 9 steps"),
        ("9", r"\boxed{4}. No: \boxed{9}", r"\boxed{9}. I mean that \boxed{4}"),
        ("9", r"$x = \sqrt{81}$", r"$\sqrt{9}$"),
        ("9", "an area of 9 cm^2", "an area of 3 cm^9"),
        ("64", "2**6", "6"),
        ("Twice 4 is 8.\n#### 8", "#### 8", "#### 4"),
        (8.0, "8", "8.0000000001"),
        (r"x = 10^{-8}", r"$x = 10^{-8}$", r"$x = 10^{-9}$"),
        (r"\{1, 0.00000001\}", r"$\{0.00000001, 1\}$", r"$\{0.00000002, 1\}$"),
        (r"\sqrt{16}", "<think>4</think><answer>4</answer>", "so 4? <answer>5</answer>"),
    ],
)
def test_numbers_are_compared_exactly_in_any_notation(answer, right, wrong):
    assert (math(right, answer), math(wrong, answer)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "completion",
    [
        "6 or 9", "9 or 6", r"\boxed{9} or \boxed{6}", r"\boxed{6 \text{ or } 9}", r"\boxed{x = 6, x = 9}",
        "$6$ or $9$", "x > 9", r"\boxed{x \le 9}", r"\boxed{\neq 9}", "not 9", "sqrt(9)", "\u221a9", "x^9", r"$9\pi$",
        "9x", "\u00b19", "9 million", r"\boxed{9 \text{ thousand}}", r"\boxed{9_{16}}", "9^0.5", "x + 9", "3:9", "9/0",
        "1 - 9", "9e99999999", r"\boxed{9^{99999999}}", r"\boxed{9.9\ldots}", r"\boxed{9 \text{ and 6 tenths}}", "x_9",
        "CO9", "<think>9</think> I see.",
    ],
)  # fmt: skip
def test_text_that_is_not_one_number_never_matches_a_number(completion):
    assert math(completion, "9") == 0.0


def test_a_number_is_read_only_inside_the_answer_tag():
    assert math("<final>4</final> of 9", "4", answer_tag="final") == 1.0
    assert math("<final>4</final> of 9", "9", answer_tag="final") == 0.0
    assert math(r"<final>\boxed{4}</final>", "4", answer_tag="final") == 1.0
    assert math("it is 4", "4", answer_tag="final") == 0.0


@pytest.mark.parametrize("answer", ["7", r"\sqrt{3}"])
@pytest.mark.parametrize(
    "piece", ["8", "{", r"\boxed{", "$", "8 ", "1+", "1/", "-", ",123", r"\frac{", "(", "<a", "2^", "\\", "^"]
)
def test_a_megabyte_of_any_text_is_parsed_quickly(piece, answer):
    assert math(piece * (2**20 // len(piece)) + " 6", answer) == 0.0
    assert math(r"\boxed{" + "{" * 2**18 + "6" + "}" * 2**18 + "}", answer) == 0.0


def test_math_verify_sets_no_alarm(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(signal, "alarm", lambda seconds: pytest.fail("the timeout of math-verify is enabled"))
    assert reward(r"\boxed{7}", "math", "7") == 1.0


# --- code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "source"),
    [
        ("First:\n```python\na = 1\n```\nbetter:\n```py\na = 2\n```\nDone.", "a = 2"),
        ("```\na = 1\n```", "a = 1"),
        ("```python\na = 1", "a = 1"),
        ("def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("```bash\nls\n```", ""),
        ('```python title="a.py"\na = 1\n```', "a = 1"),
        ("```Python 3\na = 1\n```", "a = 1"),
        ("```{.python}\na = 1\n```", "a = 1"),
        ("1. First\n   ```python\n   if a:\n       b\n   ```", "if a:\n    b"),
        ("I begin with\n```python\na = 1\nno, better:\n```python\na = 2\n```", "a = 2"),
        ('```python\nT = """\n```json\n{}\n"""\n```', 'T = """\n```json\n{}\n"""'),
        ('```python\na = "\\\n```x```\n"\n```', 'a = "\\\n```x```\n"'),
        ("```python\na = 1\n```\nOutput:\n```\n5\n```", "a = 1"),
        ("```\na = 1\n```\nOutput:\n```\n5", "5"),
        ("```python\na = 1\n```\nOutput:\n```\n5", "a = 1"),
        ("````python\nT = '''\n```python\n```\n'''\n````\n", "T = '''\n```python\n```\n'''"),
        ("````md\n```python\na = 1\n```\n````", "a = 1"),
        ("```python\na = 1\n````\nDone.", "a = 1"),
        ('```python\nT = """\n    ```\n    """\n```', 'T = """\n    ```\n    """'),
        ('```python\nT = """\n    ```python\n    """\n```', 'T = """\n    ```python\n    """'),
        ("  ```python\n  a = 1\n```\nDone.", "a = 1"),
        ("```bash\nls\n```\nthen\n```Python\na = 1\n```\nprints\n```text\n1\n```\n", "a = 1"),
    ],
)
def test_the_last_python_block_is_the_program(completion, source):
    assert source_of(completion) == source


CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
FUNCTIONAL = {"input": "1\n2", "output": "3", "testtype": "functional"}


@pytest.mark.parametrize(
    ("tests", "columns", "programs"),
    [
        ("assert f(1) == 2", {}, ["test"]),
        (["assert f(1) == 2", "assert f(2) == 3"], {}, ["test", "test"]),
        ("['assert f(1) == 2', 'assert f(2) == 3']", {}, ["test", "test"]),
        ([{"assert_case": ["assert f(1) == 2"]}, {"assertion": "assert f(2) == 3"}], {}, ["test", "test"]),
        (CHECK, {"entry_point": "add"}, ["test"]),
        ([{"input": "1\n", "output": 2}], {}, [{"stdin": "1\n", "stdout": "2"}]),
        ([{"input": 1, "expected_output": "2"}], {}, [{"stdin": "1", "stdout": "2"}]),
        ([{**FUNCTIONAL, "testtype": "stdin"}], {"entry_point": "f"}, [{"stdin": "1\n2", "stdout": "3"}]),
        (
            {"input": ["1", "2"], "output": ["2", "3"]},
            {},
            [{"stdin": "1", "stdout": "2"}, {"stdin": "2", "stdout": "3"}],
        ),
        (
            '{"inputs": ["1", "2"], "outputs": ["2", "3"]}',
            {},
            [{"stdin": "1", "stdout": "2"}, {"stdin": "2", "stdout": "3"}],
        ),
        ([FUNCTIONAL], {}, [{"call": "*[1, 2]", "name": None, "wanted": [3]}]),
        ([FUNCTIONAL], {"metadata": '{"func_name": "add"}'}, [{"call": "*[1, 2]", "name": "add", "wanted": [3]}]),
        (
            [{"input": '"a"\n(1, None)', "output": "[true]"}],
            {"starter_code": "class Solution:\n    def __init__(self): pass\n    def f(self, s):\n"},
            [{"call": "*['a', (1, None)]", "name": "f", "wanted": [[True]]}],
        ),
        (
            [{"input": {"a": 1}, "output": "3", "type": "function_call"}],
            {"entry_point": "Solution().f"},
            [{"call": "**{'a': 1}", "name": "f", "wanted": ["3"]}],
        ),
        (
            {"inputs": "[[1, 2], [3, 4]]", "outputs": "[[3], [7]]"},
            {"fn_name": "add"},
            [{"call": f"*{given}", "name": "add", "wanted": [[one], one]} for given, one in (([1, 2], 3), ([3, 4], 7))],
        ),
        (
            {"inputs": [[1], [2]], "outputs": [[1], []], "fn_name": "f"},  # the function returns lists
            {},
            [{"call": "*[1]", "name": "f", "wanted": [[1]]}, {"call": "*[2]", "name": "f", "wanted": [[]]}],
        ),
        ({"inputs": ["1", "2"], "outputs": ["2"]}, {}, None),
        ([{"input": [1], "output": 2, "fn_name": "f; exit()"}], {}, None),
        ([{"input": "one two", "output": "2", "testtype": "functional"}], {}, None),
        ([{"input": "1", "output": "{1, 2}", "testtype": "functional"}], {}, None),
        ([{"input": "1", "output": None}], {}, None),
        ([{"in": 1}], {}, None),
        ("The sum of 1 and 2 is 3.", {}, None),
        (["assert f(1) ==="], {}, None),
        ([1, [2]], {}, None),
        (7, {}, None),
        ("[]", {}, None),
    ],
)
def test_the_test_formats_of_datasets_are_parsed(monkeypatch, tests, columns, programs):
    seen = []

    async def run(rule, way, given):
        seen.extend(given)
        return [True] * len(given)

    monkeypatch.setattr(
        code, "_best_isolation", lambda name, rule: (code._Isolation(as_nobody=False, isolated=True), "")
    )
    monkeypatch.setattr(code, "_run", run)
    call = code.load_code("code", CodeRule(), lambda problem: problem.columns["tests"])
    (value,) = asyncio.run(call([Problem("q", "q", {"tests": tests, **columns})], ["a = 1"]))
    if programs is None:
        assert isinstance(value, NoScore)
        assert value.why == "the row's tests have an unknown format"
        assert seen == []
    else:
        assert value == 1.0
        assert all(each.pop("source") == "a = 1" for each in seen)
        assert ["test" if "test" in each else each for each in seen] == programs


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ("The sum of 1 and 2 is 3.", "the row's tests have an unknown format"),
        ("print(add(1, 2))", "the row's tests execute no assertion"),
        ("import unittest\nclass Case(unittest.TestCase):\n    pass", "the row's tests execute no assertion"),
        ("import nowhere_to_be_found\nassert add(1, 2) == 3", "not installed here: nowhere_to_be_found"),
    ],
)
def test_the_code_rule_needs_at_least_one_row_that_its_tests_can_score(tests, why):
    rows = [Problem("q", "q", {"tests": tests}, index) for index in (3, 5)]
    with pytest.raises(TaskError, match=rf"'code' can score no training row. Row 3: .*{why}"):
        check_rule("code", CodeRule(), ["tests"], rows, here=False)
    check_rule("code", CodeRule(), ["tests"], [*rows, Problem("q", "q", {"tests": CHECK})], here=False)


def test_an_unjudged_test_gives_no_score_unless_another_test_failed(monkeypatch):
    unjudged = NoScore("the row's tests execute no assertion")
    found = []

    async def run(rule, way, given):
        return found

    monkeypatch.setattr(
        code, "_best_isolation", lambda name, rule: (code._Isolation(as_nobody=False, isolated=True), "")
    )
    monkeypatch.setattr(code, "_run", run)
    rows = [Problem("q", "q", {"tests": ["assert f(1)", "assert f(2)"]})]
    for results, partial, expected in (
        ([True, unjudged], False, unjudged),
        ([unjudged, False], False, 0.0),
        ([unjudged, False], True, unjudged),
        ([True, False], True, 0.5),
        ([True], False, 0.0),  # one result for two tests: the second test timed out
    ):
        found[:] = results
        call = code.load_code("code", CodeRule(partial=partial), lambda problem: problem.columns["tests"])
        assert asyncio.run(call(rows, ["a = 1"])) == [expected]


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ([1, [2.0, "a"]], [1, [2, "a"]], True),
        (0.1 + 0.2, 0.3, True),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (2e-20, 1e-20, False),
        (0.0, 1e-20, False),
        (0.333333, 1 / 3, False),
        (1e17, 10**17 + 1, False),
        (float("nan"), float("nan"), True),
        (3, 3.0, True),
        ("3", 3, False),
        ([3], 3, False),
        ([1, 2], [1], False),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_results_are_compared_as_in_python_up_to_float_rounding(found, expected, is_same):
    assert sandbox._is_same(found, expected) is is_same


@pytest.mark.parametrize("require", [False, True])
def test_a_kernel_without_isolation_is_a_warning_or_an_error_if_required(monkeypatch, caplog, require):
    monkeypatch.setattr(code, "_try", lambda rule, way: "Operation not permitted" if way.isolated else "")
    rule = CodeRule(require_isolation=require)
    refused = pytest.raises(TaskError, match=r"code.require_isolation = true, but the kernel does not isolate")
    with refused if require else nullcontext():
        code.load_code("code", rule, lambda problem: None)
    if not require:
        assert "the kernel does not isolate the programs (Operation not permitted)" in caplog.text
        assert "they can use the network" in caplog.text


def test_the_error_has_the_reason_if_no_program_runs(monkeypatch):
    monkeypatch.setattr(code, "_try", lambda rule, way: "no memory")
    with pytest.raises(TaskError, match=r"'code' cannot run a program here: no memory"):
        code.check_code("code", CodeRule())
