"""The rule `code` never passes a wrong program and never fails a correct one, in any format of the tests.

The oracle is known by construction: a function is written from an expression, the tests hold the value of that
expression for each input, and a wrong program differs from it on at least one input or never computes it.
"""

import asyncio
import json
import random
import subprocess
from pathlib import Path

from tests.full import pick

from leeway.actors.tasks import Problem, code
from leeway.actors.tasks.config import CodeRule
from leeway.actors.tasks.task import NoScore

# (argument names, correct expression, wrong expressions, generator of the arguments)
FUNCTIONS = [
    ("a, b", "a + b", ["a - b", "a + b + 1", "str(a + b)", "[a + b]", "None"], lambda r: (n(r), n(r))),
    ("s", "s[::-1]", ["s", "s[1:]", "list(s[::-1])", "s.upper()"], lambda r: (word(r),)),
    ("xs", "sorted(set(xs))", ["sorted(xs)", "xs", "set(xs)", "sorted(xs)[:1]"], lambda r: ([n(r), 3, 3, n(r)],)),
    (
        "xs",
        "sum(xs) / len(xs)",
        ["sum(xs) // len(xs)", "round(sum(xs) / len(xs), 3)"],
        lambda r: ([0.1, 0.2, r.random()],),
    ),
    ("x", "x * 1e-12 + 1e-9", ["0.0", "x * 1e-12 + 2e-9", "1e-9"], lambda r: (r.randint(2, 900),)),
    ("s", "{c: s.count(c) for c in s}", ["{c: 1 for c in s}", "{}", "sorted(s)"], lambda r: (word(r) + "oo",)),
    ("a, b", "[b, a, [a, b]]", ["[a, b, [a, b]]", "[b, a]", "[b, a, [b, a]]"], lambda r: (n(r), word(r))),
    ("x, xs", "xs.index(x) if x in xs else None", ["-1", "0 if x in xs else -1"], lambda r: (9, [n(r), n(r)])),
    ("n", "n > 1 and all(n % d for d in range(2, n))", ["n % 2 == 1", "n > 1"], lambda r: (r.choice([4, 8, 9]),)),
    ("n", "n ** 9 + 1", ["float(n ** 9 + 1) if n < 0 else float(n ** 9)", "n ** 9"], lambda r: (r.randint(100, 999),)),
]
NAMES = ["solve", "compute_it", "f", "max", "reversed", "check_values", "testing", "run"]
HACKS = [
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "raise SystemExit",
    "class Equal:\n    def __eq__(self, other): return True\n    def __lt__(self, other): return True\n"
    "    def __hash__(self): return 0\n    def __sub__(self, other): return self\n    def __abs__(self): return self\n"
    "def {name}(*args, **keys): return Equal()",
    "class Equal(int):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n"
    "def {name}(*args, **keys): return [Equal(0), Equal(1)]\n{name} = lambda *args, **keys: Equal(7)",
    "from unittest.mock import ANY\ndef {name}(*args, **keys): return ANY",
    "import unittest\ndef {name}(*args, **keys): raise unittest.SkipTest",
    "import unittest\nfor key in dir(unittest.TestCase):\n    if key.startswith('assert'):\n"
    "        setattr(unittest.TestCase, key, lambda *a, **k: None)\n"
    "unittest.TestCase.run = lambda self, result=None: result\ndef {name}(*args, **keys): return 1234.5",
    "import builtins, json, math\nbuiltins.abs = lambda x: 0\nbuiltins.all = builtins.any = lambda x: True\n"
    "json.loads = lambda x, **k: None\njson.dumps = lambda x, **k: 'null'\nmath.isclose = lambda *a, **k: True\n"
    "def {name}(*args, **keys): return 1234.5",
    "def check(candidate): pass\ndef all(x): return True\ndef abs(x): return 0\nclass AssertionError(Exception): pass\n"
    "def {name}(*args, **keys): return 1234.5",
    "def {name}(*args, **keys):\n    import sys\n    sys.exit(0)",
    "def {name}(*args, **keys):\n    import os\n    os._exit(0)",
    "print({expected!r})\ndef {name}(*args, **keys):\n    print({expected!r})\n    return 1234.5",
    "import sys, types\nfake = types.ModuleType('unittest')\nfake.TestCase = object\nfake.main = lambda: None\n"
    "sys.modules['unittest'] = fake\ndef {name}(*args, **keys): return 1234.5",
    "import atexit, os\natexit.register(os._exit, 0)\ndef {name}(*args, **keys): return 1234.5",
    "def {name}(*args, **keys):\n    raise KeyError('wrong')",
    "def {name}(:",
    "x = 1",
    "import json\njson.JSONEncoder.encode = lambda *a, **k: '[1, null]'\ndef {name}(*args, **keys): return 1234.5",
    "import builtins\nbuiltins.__dict__.update(abs=lambda x: 0, zip=lambda *a: [], sorted=list)\n"
    "__builtins__['isinstance'] = lambda *a: False\ndef {name}(*args, **keys): return 1234.5",
    "def {name}(*args, **keys): return 1234.5\ndef test_it():\n    assert True\nassert True",
]


def n(r):
    return r.randint(-40, 40)


def word(r):
    return "".join(r.choices("abcdefg", k=4)) + "z"


def call_of(name, args):
    return f"{name}({', '.join(map(repr, args))})"


def equal(name, args, expected):
    """Return a condition that holds only for the correct result."""
    if isinstance(expected, float):
        return f"abs({call_of(name, args)} - {expected!r}) < {abs(expected) * 1e-7!r}"
    return f"{call_of(name, args)} == {expected!r}"


def asserts(name, cases, indent=""):
    return [f"{indent}assert {equal(name, *case)}" for case in cases]


def text(*lines):
    return "\n".join(lines) + "\n"


def unittest_of(name, cases, end):
    lines = [
        f"    def test_{i}(self):\n        self.{'assertAlmostEqual' if isinstance(expected, float) else 'assertEqual'}"
        f"({call_of(name, args)}, {expected!r}{', places=15' if isinstance(expected, float) else ''})"
        for i, (args, expected) in enumerate(cases)
    ]
    return text("import unittest", "class TestIt(unittest.TestCase):", *lines, end)


def lines_of(args):
    return "\n".join(map(json.dumps, args))


HELPER = """
import math
def assertion(out, exp):
    if isinstance(exp, float):
        assert math.isclose(out, exp, rel_tol=1e-7)
    else:
        assert out == exp
"""
WRAPPED = "inputs and outputs as JSON"
"""Each output is wrapped in a list, as in APPS: a program may return either form."""
# name, cases -> tests and the other columns of the row
FORMS = {
    "list of asserts": lambda f, c: (asserts(f, c), {}),
    "text of asserts": lambda f, c: (text(*asserts(f, c)), {}),
    "MBPP with set-up": lambda f, c: (
        [f"assert offset == 1 and math and {equal(f, *one)}" for one in c],
        {"test_setup_code": "offset = 1", "test_imports": ["import math"]},
    ),
    "check with entry point": lambda f, c: (
        text("METADATA = {'author': 'x'}\n\n", "def check(candidate):", *asserts("candidate", c, "    ")),
        {"entry_point": f},
    ),
    "check that the text calls": lambda f, c: (
        text("def check(candidate):", *asserts("candidate", c, "    "), f"\ncheck({f})"),
        {},
    ),
    "check without entry point": lambda f, c: (text("def check(candidate):", *asserts("candidate", c, "    ")), {}),
    "check of a method": lambda f, c: (
        text("def check(candidate):", *asserts("candidate", c, "    ")),
        {"entry_point": f"Solution().{f}"},
    ),
    "loop with a helper": lambda f, c: (
        text(HELPER, f"inputs = {[list(a) for a, _ in c]!r}", f"results = {[w for _, w in c]!r}")
        + text("for inp, exp in zip(inputs, results):", f"    assertion({f}(*inp), exp)"),
        {},
    ),
    "check that loops": lambda f, c: (
        text(HELPER, "def check(candidate):", f"    for inp, exp in {[(list(a), w) for a, w in c]!r}:")
        + "        assertion(candidate(*inp), exp)\n",
        {"entry_point": f},
    ),
    "functions": lambda f, c: (
        text(f"from solution import {f}", *[f"def test_{i}():\n    {one}" for i, one in enumerate(asserts(f, c))]),
        {},
    ),
    "functions that are called": lambda f, c: (
        text("from solution import *", "def test_all():", *asserts(f, c, "    "), 'if __name__ == "__main__":')
        + "    test_all()\n",
        {},
    ),
    "class of functions": lambda f, c: (
        text("class TestIt:", "    def setup_method(self):\n        self.one = 1", "    def test_all(self):")
        + text("        assert self.one", *asserts(f, c, "        ")),
        {},
    ),
    "unittest": lambda f, c: (unittest_of(f, c, 'if __name__ == "__main__":\n    unittest.main()'), {}),
    "unittest that ends in main": lambda f, c: (unittest_of(f, c, "unittest.main()"), {}),
    "unittest without main": lambda f, c: (unittest_of(f, c, ""), {}),
    "unittest with subtests": lambda f, c: (
        text(HELPER, "from unittest import TestCase", "class Case(TestCase):", "    def setUp(self):")
        + text(f"        self.cases = {[(list(a), w) for a, w in c]!r}", "    def test_all(self):")
        + text("        for inp, exp in self.cases:", "            with self.subTest(inp=inp):")
        + f"                assertion({f}(*inp), exp)\n",
        {},
    ),
    "raise": lambda f, c: (text(*[f"if not ({equal(f, *one)}):\n    raise ValueError('x')" for one in c]), {}),
    "assert_case": lambda f, c: ([{"assert_case": asserts(f, c)}], {}),
    "assertions": lambda f, c: ([{"assertion": one} for one in asserts(f, c)], {}),
    "JSON of asserts": lambda f, c: (json.dumps(asserts(f, c)), {}),
    "inputs and outputs": lambda f, c: (
        {"inputs": [list(a) for a, _ in c], "outputs": [w for _, w in c], "fn_name": f},
        {},
    ),
    WRAPPED: lambda f, c: (
        json.dumps({"inputs": [list(a) for a, _ in c], "outputs": [[w] for _, w in c], "fn_name": f}),
        {},
    ),
    "inputs and outputs, name in a column": lambda f, c: (
        {"inputs": json.dumps([list(a) for a, _ in c]), "outputs": json.dumps([w for _, w in c])},
        {"fn_name": f},
    ),
    "input and output lists": lambda f, c: (
        {"input": [lines_of(a) for a, _ in c], "output": [json.dumps(w) for _, w in c]},
        {"entry_point": f},
    ),
    "functional": lambda f, c: (
        [{"input": lines_of(a), "output": json.dumps(w), "testtype": "functional"} for a, w in c],
        {"metadata": json.dumps({"func_name": f})},
    ),
    "functional, literals of Python": lambda f, c: (
        json.dumps([{"input": "\n".join(map(repr, a)), "output": repr(w), "testtype": "functional"} for a, w in c]),
        {"starter_code": f"class Solution:\n    def {f}(self):\n        "},
    ),
    "functional, name of the program": lambda f, c: (
        [{"input": lines_of(a), "output": json.dumps(w), "testtype": "functional"} for a, w in c],
        {},
    ),
    "function_call": lambda f, c: (
        [{"type": "function_call", "fn_name": f, "input": list(a), "expected_output": w} for a, w in c],
        {},
    ),
}


def program(r, name, args, expression):
    """Return the function in one of the forms that models write."""
    body = [f"return {expression}", f"result = {expression}\n        return result"]
    head = r.choice(["", "import math\nfrom collections import Counter\n", "# the solution\n"])
    tail = r.choice(["", f"\nif __name__ == '__main__':\n    print({name})\n    raise SystemExit(3)\n"])
    if r.random() < 0.3:
        return (
            f"{head}class Solution:\n    def {name}(self, {args}) -> Optional[List[int]]:\n        {r.choice(body)}\n"
        )
    shape = r.choice(["def", "lambda", "annotated"])
    if shape == "lambda":
        return f"{head}{name} = lambda {args}: {expression}\n{tail}"
    note = " -> 'Any'" if shape == "annotated" else ""
    return f"{head}def {name}({args}){note}:\n        {r.choice(body)}\n{tail}"


def cases_of(r, draw, args, right):
    arguments = [draw(r) for _ in range(r.randint(2, 4))]
    return [(one, eval(f"(lambda {args}: {right})(*one)", {"one": one})) for one in arguments]


def differs(args, expression, cases, *, is_wrapped):
    """Return whether the tests must notice the expression: Python's `==`, with a relative tolerance for floats."""
    for one, expected in cases:
        got = eval(f"(lambda {args}: {expression})(*one)", {"one": one})
        if isinstance(expected, float):
            if not isinstance(got, float | int) or abs(got - expected) > abs(expected) * 1e-6:
                return True
        elif got != expected and not (is_wrapped and got == [expected]):
            return True
    return False


def random_case(r):
    """Return one row, a completion, its kind and the test format."""
    form = r.choice(list(FORMS))
    args, right, wrongs, draw = r.choice(FUNCTIONS)
    name = r.choice(NAMES)
    cases = cases_of(r, draw, args, right)
    while (kind := r.choice(["right", "right", "wrong", "wrong", "hack"])) == "wrong":
        expression = r.choice(wrongs)
        if differs(args, expression, cases, is_wrapped=form == WRAPPED):
            break
    if kind == "hack":
        source = r.choice(HACKS).replace("{name}", name).replace("{expected!r}", repr(cases[0][1]))
    else:
        source = program(r, name, args, right if kind == "right" else expression)
    tested = f"Solution().{name}" if "class Solution" in source else name
    is_json = form.startswith(("inp", "fun")) and not form.startswith("functions")
    tests, columns = FORMS[form](
        name if is_json or "entry" in form or "method" in form or "loops" in form else tested, cases
    )
    if form == "functions" and tested != name:
        tests = tests.replace(f"from solution import {tested}", "from solution import Solution")
    return Problem("q", "q", {"tests": tests, **columns}), f"```python\n{source}\n```", kind, form


def seed_of_commit():
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return int(found.stdout[:8] or "0", 16)


def test_no_wrong_program_passes_and_no_correct_one_fails_in_any_format():
    seed = seed_of_commit()
    r = random.Random(seed)
    problems, completions, kinds, forms = zip(*[random_case(r) for _ in range(pick(60, 300))], strict=True)
    call = code.load_code("code", CodeRule(timeout_s=60.0), lambda problem: problem.columns["tests"])
    scores = asyncio.run(call(problems, completions))
    faults = [
        (form, kind, score, completion, problem.columns)
        for score, kind, form, completion, problem in zip(scores, kinds, forms, completions, problems, strict=True)
        if score != (1.0 if kind == "right" else 0.0) and not (kind == "hack" and isinstance(score, NoScore))
    ]
    assert not faults, f"seed {seed:08x}: {len(faults)} of {len(scores)}, the first {faults[0]}"
