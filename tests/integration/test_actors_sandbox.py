"""Programs written by a model: their limits and their cleanup.

Processes and namespaces are real, because only the kernel enforces the limits.
"""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import time
from unittest.mock import MagicMock

import psutil
import pytest

from leeway.actors import sandbox
from leeway.actors.tasks import Problem, code
from leeway.actors.tasks.config import CodeRule
from tests.world.waiting import bound, wait_until


@pytest.fixture(params=[True, False], ids=["isolated", "limits only"])
def is_isolated(request, monkeypatch):
    """Run the test once with kernel isolation, and once as on a kernel without isolation."""
    try_way = code._try
    if not request.param:
        monkeypatch.setattr(code, "_try", lambda rule, way: "no" if way.isolated else try_way(rule, way))
    elif not code._best_isolation("code", CodeRule())[0].isolated:
        pytest.skip("this kernel offers no isolation")
    return request.param


def rewards(source, tests, columns=None, **keys):
    """Return the score of one program."""
    rule = CodeRule(**{"timeout_s": 20.0, **keys})
    call = code.load_code("code", rule, lambda problem: problem.columns["tests"])
    (value,) = asyncio.run(call([Problem("q", "q", {"tests": tests, **(columns or {})})], [source]))
    return value


ADD = "def add(a, b):\n    return a + b\n"
NODE = "from dataclasses import dataclass\n@dataclass\nclass Node:\n    v: int\n    next: 'Node' = None\n"


@pytest.mark.parametrize(
    ("source", "tests", "keys", "expected"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 4"], {}, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(2, 2) == 5"], {}, 0.0),
        (ADD, ["assert add(2, 2) == 5", "assert add(1, 2) == 3"], {"partial": True}, 0.5),
        ("def f(a):\n    return a, a", {"inputs": [[1], [2]], "outputs": [[1, 1], [2, 2]], "fn_name": "f"}, {}, 1.0),
        (NODE, ["assert Node(1).next is None"], {}, 1.0),
        (f"from __future__ import annotations\n{NODE}", ["assert Node(1).v == 1"], {}, 1.0),
        ("import mmap\nshared = mmap.mmap(-1, 12 * 2**30)", ["assert shared"], {"memory_mib": 64}, 0.0),
        ("print(int(input()) + 1)", [{"input": "1", "output": "2"}, {"input": "2", "output": "3 \n\n"}], {}, 1.0),
        ("import numpy\nprint(numpy.ones(3).sum())", [{"output": "3.0"}], {}, 1.0),
        # a program with one thread takes 60 to 80 MiB, depending on the CPU; a second thread takes about 35 MiB more
        ("import numpy\nprint(1)", [{"output": "1"}], {"memory_mib": 88}, 1.0),
        ("import os\nos._exit(0)", ["assert False"], {}, 0.0),
        ("print(1); raise SystemExit(3)", [{"output": "1"}], {}, 0.0),
        ("x = bytearray(2**30)", ["assert x"], {"memory_mib": 256}, 0.0),
        ("while True: print('x' * 1000)", [{"output": "x"}], {}, 0.0),
        ("open('big', 'wb').write(bytes(2**26))", ["assert True"], {}, 0.0),
        ("open('small', 'w').write('1')\nprint(open('small').read())", [{"output": "1"}], {}, 1.0),
        ("import os\nprint(sorted(set(os.environ) & {'SECRET'}))", [{"output": "[]"}], {}, 1.0),
    ],
)
def test_a_program_is_scored_by_the_tests_it_passes_within_its_limits(
    is_isolated, monkeypatch, source, tests, keys, expected
):
    monkeypatch.setenv("SECRET", "1")
    assert rewards(source, tests, **keys) == expected


UNITTEST = """
import unittest
from solution import add
class Case(unittest.TestCase):
    def setUp(self):
        self.two = 2
    {decorator}
    def test_sum(self):
        self.assertAlmostEqual(add(1, self.two), 3)
"""
NONE, PYTEST = "the row's tests execute no assertion", "the row's tests need pytest"


@pytest.mark.parametrize(
    ("tests", "columns", "why"),
    [
        ("def check(candidate):\n    assert candidate(1, 2) == 3", {"entry_point": "add"}, None),
        ("def check(candidate):\n    assert candidate(1, 2) == 3", {}, None),
        ("def check(f):\n    return f(1, 2) == 3 or raises", {}, NONE),
        ("def check(a, b):\n    assert a == b\ncheck(add(1, 2), 3)", {}, None),
        ("def same(a, b):\n    if a != b:\n        raise ValueError\ndef test():\n    same(add(1, 2), 3)", {}, None),
        ("from solution import *\nclass TestAdd:\n    def test_one(self):\n        assert add(1, 2) == 3", {}, None),
        ("def test_b(tmp_path):\n    assert tmp_path\ndef test_a():\n    assert add(1, 2) == 3", {}, PYTEST),
        ("try:\n    add(1, 2, 3)\n    assert False\nexcept TypeError:\n    assert add(1, 2) == 3", {}, None),
        ("import sys\nfor i in range(3):\n    assert add(i, 2) == i + 2\nsys.exit(0)", {}, None),
        ("class Pair:\n    sum = add(1, 2)\nassert globals()['add'](1, 2) == Pair.sum == 3", {}, None),
        ("if False:\n    assert add(1, 2) == 3", {}, NONE),
        ("def helper():\n    assert add(1, 2) == 3", {}, NONE),
        ("for i in []:\n    assert add(i, 2) == i", {}, NONE),
        (f"{UNITTEST.format(decorator='')}unittest.main()", {}, None),
        (f"{UNITTEST.format(decorator='')}\nif __name__ == '__main__':\n    unittest.main()", {}, None),
        (UNITTEST.format(decorator="@unittest.skip('later')"), {}, "tests of the row are skipped"),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], {"metadata": '{"func_name": "add"}'}, None),
        ([{"input": [1, 2], "output": 3}], {}, None),
        ([{"input": {"a": 1, "b": 2}, "output": 3}], {"fn_name": "add"}, None),
    ],
)
def test_each_test_format_separates_correct_from_wrong_programs_or_gives_no_score(tests, columns, why):
    found = [rewards(source, tests, columns) for source in (ADD, ADD.replace("+", "-"))]
    assert found == [1.0, 0.0] if why is None else [one.why for one in found] == [why, why]


def test_a_program_with_several_functions_needs_a_row_that_names_one():
    tests = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    found = rewards(f"def one():\n    return 1\n{ADD}", tests)
    assert found.why == "the row names no function to call"
    assert rewards("class Solution:\n    def add(self, a: int, b: Optional[int]):\n        return a + b", tests) == 1.0
    assert rewards("x = 1", tests) == 0.0


EQUAL = "class Equal:\n    def __eq__(self, other):\n        return True\n"


@pytest.mark.parametrize(
    "source",
    [
        f"{EQUAL}def add(a, b):\n    return Equal()",
        "from unittest.mock import ANY\ndef add(a, b):\n    return ANY",
        "def add(a, b):\n    raise SystemExit",
        "import unittest\nunittest.TestCase.assertAlmostEqual = lambda *a: None\ndef add(a, b):\n    return 0",
        "import unittest\nunittest.TestCase.run = lambda *a: None\ndef add(a, b):\n    return 0",
        "import math\nmath.isclose = lambda *a: True\ndef add(a, b):\n    return 0",
        "import builtins\nbuiltins.all = lambda x: True\nbuiltins.abs = lambda x: 0\ndef add(a, b):\n    return 0",
        "__builtins__['all'] = all = lambda x: True\ndef add(a, b):\n    return 0",
        "import json\njson.JSONEncoder.encode = lambda *a: '[1, null]'\ndef add(a, b):\n    return 0",
        "import os\nos.write(1, b'x')\ndef add(a, b):\n    return 0\ndef check(candidate):\n    pass",
        "print(3)\ndef add(a, b):\n    print(3)",
        "open('solution.py').read()",
    ],
)
def test_a_wrong_program_cannot_pass_by_patching_its_tests(source):
    functional = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    check = "import math\ndef check(candidate):\n    assert all([math.isclose(candidate(1, 2), 3)])"
    for tests in (
        "assert add(1, 2) == 3",
        "assert [add(1, 2)] == [3]",
        check,
        "import math\nassert math.isclose(add(1, 2), 3)",
        UNITTEST.format(decorator=""),
        functional,
    ):
        assert rewards(source, tests, {"entry_point": "add"}) == 0.0


def test_objects_of_program_classes_use_their_own_equality():
    source = "class V:\n    def __init__(self, x): self.x = x\n    def __eq__(self, other): return self.x == other.x\n"
    assert rewards(source, ["assert V(1) == V(1)", "assert [V(1), V(2)] != [V(1), V(1)]"]) == 1.0
    assert rewards(source, ["assert V(1) == V(2)"]) == 0.0


def test_a_program_function_may_shadow_a_builtin():
    assert rewards("def sum(a, b):\n    return a + b", ["import math\nassert math and sum(1, 2) == 3"]) == 1.0
    assert rewards("def max(xs):\n    return xs[0]", ["assert max([1, 2]) == 2"]) == 0.0
    two, tests = "def abs(x):\n    return 0\ndef max(xs):\n    return 7", ["assert abs(max([1, 2]) - 2) < 1e-9"]
    assert rewards(two, tests).why == "the row names no function to call"
    assert rewards(two, tests, {"entry_point": "max"}) == 0.0
    assert rewards("def abs(x):\n    return 0\nlowest = max", ["assert abs(lowest([1, 2]) - 1) < 1e-9"]) == 0.0


def test_an_endless_program_times_out_and_its_children_end(is_isolated):
    mark = str(9e6 + os.getpid() % 1000)
    started = f"import subprocess\nsubprocess.Popen(['sleep', {mark!r}])\n"
    assert rewards(started, ["assert True"]) == 1.0
    started_s = time.monotonic()
    assert rewards(f"{started}while True: pass", ["assert True"], timeout_s=0.5) == 0.0
    assert time.monotonic() - started_s < bound(10)
    wait_until(lambda: not any(mark in command for command in commands()), "its children to end")


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("as_nobody", [True, False])
def test_the_process_limit_applies_only_if_other_user_processes_do_not_count(monkeypatch, as_nobody, isolated):
    limits = {}
    monkeypatch.setattr(sandbox, "_libc", MagicMock())
    monkeypatch.setattr(sandbox.resource, "setrlimit", lambda kind, most: limits.update({kind: most}))
    sandbox._limit({"as_nobody": as_nobody, "isolated": isolated, "timeout_s": 1.0, "memory_bytes": 2**30})
    most, _ = limits.get(resource.RLIMIT_NPROC, (None, None))
    assert most == (64 if isolated else 1024 if as_nobody else None)


def commands():
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            yield " ".join(process.cmdline())


@pytest.mark.parametrize("as_nobody", [True, False])
def test_an_isolated_program_has_no_network_no_other_processes_and_no_other_files(tmp_path, monkeypatch, as_nobody):
    try_way = code._try
    monkeypatch.setattr(code, "_try", lambda rule, way: "no" if way.as_nobody > as_nobody else try_way(rule, way))
    if not code._best_isolation("code", CodeRule())[0].isolated:
        pytest.skip("this kernel offers no isolation")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attempts = {
            "network": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)",
            "files": f"open({str(tmp_path / 'written')!r}, 'w')",
            "kernel": "open('/proc/sys/kernel/core_pattern', 'r+')",
            "kill": f"import os\nos.kill({os.getpid()}, 0)",
            "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/', None, 0x1020, None) == 0",
        }
        if not os.statvfs("/proc/sys").f_flag & os.ST_RDONLY:  # /proc/sys is read-only in some containers
            attempts["namespace"] = "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0"
        passed = {name: rewards(f"{source}\nprint(1)", [{"output": "1"}]) for name, source in attempts.items()}
    assert passed == dict.fromkeys(attempts, 0.0)
    assert list(tmp_path.iterdir()) == []


def is_a_test(process):
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("solution.py") for word in process.cmdline())
    return False


def test_a_killed_sandbox_ends_its_program():
    if not code._best_isolation("code", CodeRule())[0].isolated:
        pytest.skip("this kernel offers no isolation")
    before = set(psutil.Process().children(recursive=True))

    def programs():
        return [each for each in set(psutil.Process().children(recursive=True)) - before if is_a_test(each)]

    async def cancel():
        call = code.load_code("code", CodeRule(timeout_s=100.0), lambda problem: problem.columns["tests"])
        tests = {"tests": ["assert True"]}
        task = asyncio.create_task(call([Problem("q", "q", tests)], ["import time\ntime.sleep(100)"]))
        await until(programs)
        found = programs()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not any(each.is_running() and each.status() != "zombie" for each in found))

    asyncio.run(cancel())


async def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_a_process_without_network_keeps_its_own_loopback():
    if why := sandbox.cut_network_error():
        pytest.skip(why)
    program = (
        "import socket, sys\nfrom leeway.actors.sandbox import cut_network\ncut_network()\n"
        "own = socket.create_server(('127.0.0.1', 0))\nsocket.create_connection(own.getsockname(), 5)\n"
        "try: socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5)\n"
        "except ConnectionRefusedError: print('cut')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", program, str(server.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "cut", done.stderr
