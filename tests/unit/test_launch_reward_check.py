"""`leeway check-reward`: what is found wrong with reward functions before a run spends hours on them."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.rewards import Scorer
from launch import reward_check
from launch.cli import main
from launch.errors import ExitStatus
from tests.unit.fake_actor import Clock
from tests.world.command import leeway_here
from tests.world.reward_callers import InThisProcess

CONFIG = """
[model]
path = "model"
[task]
type = "file"
path = "questions.jsonl"
rewards = [{rewards}]
[algorithm]
type = "online_dpo"
[actors]
reward_timeout_s = 60
"""


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    """Functions are called in this process; tests/integration has those that would not leave it alone."""
    monkeypatch.setattr(reward_check, "Scorer", partial(Scorer, start=InThisProcess.load))


@pytest.fixture
def check(tmp_path, capsys):
    """Check the functions of a Python file; returns exit status and what was said, on one line."""

    def run(code: str, *rewards: str, column: str = "answer", options=(), num: int | None = 2) -> tuple[int, str]:
        questions = [{"question": f"{a}+{b}", column: str(a + b)} for a in range(10, 30) for b in range(10, 30)]
        (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
        (tmp_path / f"{rewards[0]}.py").write_text(code)
        path = tmp_path / "task.toml"
        path.write_text(CONFIG.format(rewards=", ".join(f'"{rewards[0]}.py:{name}"' for name in rewards)))
        number = () if num is None else ("--num", str(num))
        status, out, errors = leeway_here(capsys, "check-reward", path, *number, *options)
        return status, " ".join((out + errors).replace("│", " ").split())

    return run


def test_a_good_reward_passes(check):
    code = "def exact(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    status, said = check(code, "exact")
    assert status == ExitStatus.OK, said
    assert "The rewards of 2 problems are as they should be." in said
    assert all(kind in said for kind in ("right", "wrong", "empty", "garbage", "unicode", "very long"))


def test_a_reward_that_is_always_the_same_carries_no_signal(check):
    status, said = check("def same(completions, **_):\n    return [1.0] * len(completions)\n", "same")
    assert status == ExitStatus.FAILED
    assert "PROBLEM the reward is 1 whatever the completion: it carries no signal" in said


def test_a_function_that_raises_is_shown_with_its_own_line(check):
    code = "def first(completions, **_):\n    return [float(c.split()[0] == '7') for c in completions]\n"
    status, said = check(code, "first")
    assert status == ExitStatus.FAILED
    assert "PROBLEM first failed on 2 of 12 completions (empty), which a run counts as failed" in said
    assert "IndexError: list index out of range" in said
    assert "first.py, line 2: return [float(c.split()[0] == '7') for c in completions])" in said


@pytest.mark.parametrize(
    ("value", "expected"),
    [("float('nan')", "not finite"), ("'good'", "returned no number: 'good'"), ("[1]", "returned no number: [1]")],
)
def test_a_value_that_a_run_would_refuse_is_a_problem(check, value, expected):
    status, said = check(
        f"def odd{hash(value) % 999}(completions, **_):\n    return [{value}]\n", f"odd{hash(value) % 999}"
    )
    assert status == ExitStatus.FAILED
    assert expected in said


def test_a_reward_that_prefers_wrong_answers_is_a_problem(check):
    code = "def turned(completions, answer, **_):\n    return [float(c != a) for c, a in zip(completions, answer)]\n"
    status, said = check(code, "turned")
    assert status == ExitStatus.FAILED
    assert "right answers are rewarded 0 on average and wrong ones 1" in said
    assert "no right answer reaches task.correct_at = 1" in said


def test_a_slow_function_is_a_problem_before_it_times_out(check, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(reward_check, "time", SimpleNamespace(perf_counter=clock, clock=clock))
    code = "from launch.reward_check import time\ndef slow(completions, answer, **_):\n"
    code += "    time.clock.now_s += 16 * (completions[0] == '')\n"
    code += "    return [float(completions[0] == answer[0])]\n"
    status, said = check(code, "slow")
    assert status == ExitStatus.FAILED
    assert "slow is slow: 16.0 s for a completion (empty) of the 60 s" in said, "a quarter of the limit is too much"


def test_a_function_that_hangs_costs_one_limit_of_time(check):
    code = "import time\ndef hangs(completions, **_):\n    time.sleep(30)\n"
    status, said = check(code, "hangs", options=("--actors.reward_timeout_s", "0.4"))
    assert status == ExitStatus.FAILED
    assert "hangs failed on 1 of 1 completions (right)" in said
    assert "took longer than 0.4 s" in said
    assert "hangs was tried on 1 completions alone, because 1 of them cost its process" in said


def test_a_function_that_never_applies_is_a_problem_and_one_that_does_beside_it_is_none(check):
    code = "async def never(completions, **_):\n    return [None] * len(completions)\n"
    code += "def exact2(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    status, said = check(code, "never", "exact2")
    assert status == ExitStatus.FAILED
    assert said.count("PROBLEM") == 1
    assert "never answered None to everything" in said


def test_without_a_known_answer_one_can_be_given(check):
    code = "def digits(completions, **_):\n    return [float(c == '42') for c in completions]\n"
    status, said = check(code, "digits", column="value")
    assert status == ExitStatus.FAILED
    assert "give a right one with --completion TEXT" in said
    status, said = check(code, "digits", column="value", options=("--completion", "42"))
    assert status == ExitStatus.OK, said
    assert "digits given: 42 2 0 1" in said


def test_a_task_that_is_wrong_is_wrong_input(check):
    status, said = check("def exact(completions):\n    return []\n", "exakt")
    assert status == ExitStatus.WRONG_INPUT
    assert "did you mean 'exact'?" in said


def test_the_demos_task_passes_with_its_own_scorer(capsys):
    demo = Path(__file__).parents[2] / "examples" / "demo.toml"
    small = ("--task.num_train", "16", "--task.num_heldout", "8")
    assert main(["check-reward", str(demo), "--num", "3", *small]) == ExitStatus.OK
    assert "chain_sum" in capsys.readouterr().out


def test_many_problems_fit_a_screen_with_an_example_of_each_kind_of_failure(check):
    code = "def mixed(completions, answer, **_):\n    text = completions[0]\n"
    code += "    if text == '' or text.startswith('4'):\n        raise KeyError(text[:1])\n"
    code += "    return [float(text == answer[0])]\n"
    status, said = check(code, "mixed", options=("--num", "64"))
    assert status == ExitStatus.FAILED
    assert re.search(r"mixed failed on \d+ of \d+ completions \(.*empty.*\)", said), said
    assert said.count("FAILED mixed, ") == 2, "one of KeyError('') and one of KeyError('4')"
    assert "FAILED mixed, empty: KeyError: ''" in said
    assert "prompt: '10+10'; completion: ''" in said
    assert len(said) < 3000


def test_a_slow_function_is_tried_for_as_long_as_is_allowed_and_says_so(check, monkeypatch):
    monkeypatch.setattr(reward_check, "BUDGET_S", 0.3)
    code = "import time\ndef slowly(completions, answer, **_):\n    time.sleep(0.05)\n"
    code += "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    status, said = check(code, "slowly", num=None)
    assert status == ExitStatus.OK, said
    assert re.search(r"slowly was tried on \d completions alone, in 0.3 s; --num N tries N problems", said), said
