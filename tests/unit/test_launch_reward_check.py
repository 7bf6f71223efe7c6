"""Problems of reward functions that `leeway check-reward` finds before a run."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from leeway.actors.rewards import Scorer
from leeway.launch import reward_check
from leeway.launch.cli import main
from leeway.launch.errors import ExitStatus
from tests.unit.fake_actor import Clock
from tests.world.chats import byte_tokenizer
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
    """Call rewards in this process; tests/integration covers functions that crash or block their process."""
    monkeypatch.setattr(reward_check, "Scorer", partial(Scorer, start=InThisProcess.load))


@pytest.fixture
def check(tmp_path, capsys):
    """Function that checks the rewards of a Python file and returns the exit status and the output as one line."""

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
    status, output = check(code, "exact")
    assert status == ExitStatus.OK, output
    assert "All reward checks passed on 2 problems." in output
    assert all(kind in output for kind in ("correct", "wrong", "empty", "garbage", "unicode", "very long"))


def test_a_constant_reward_carries_no_signal(check):
    status, output = check("def same(completions, **_):\n    return [1.0] * len(completions)\n", "same")
    assert status == ExitStatus.FAILED
    assert "PROBLEM the reward is 1 for every completion: it carries no signal" in output


def test_a_function_that_raises_is_shown_with_its_own_line(check):
    code = "def first(completions, **_):\n    return [float(c.split()[0] == '7') for c in completions]\n"
    status, output = check(code, "first")
    assert status == ExitStatus.FAILED
    assert "PROBLEM first failed on 2 of 12 completions (empty); a run counts them as failed" in output
    assert "IndexError: list index out of range" in output
    assert "first.py, line 2: return [float(c.split()[0] == '7') for c in completions])" in output


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("float('nan')", "not finite"),
        ("'good'", "did not return a number: 'good'"),
        ("[1]", "did not return a number: [1]"),
    ],
)
def test_a_value_that_a_run_would_refuse_is_a_problem(check, value, expected):
    status, output = check(
        f"def odd{hash(value) % 999}(completions, **_):\n    return [{value}]\n", f"odd{hash(value) % 999}"
    )
    assert status == ExitStatus.FAILED
    assert expected in output


def test_a_reward_that_prefers_wrong_answers_is_a_problem(check):
    code = "def turned(completions, answer, **_):\n    return [float(c != a) for c, a in zip(completions, answer)]\n"
    status, output = check(code, "turned")
    assert status == ExitStatus.FAILED
    assert "the mean reward is 0 for correct answers and 1 for wrong ones" in output
    assert "no correct answer reaches task.correct_at = 1" in output


def test_a_slow_function_is_a_problem_before_it_times_out(check, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(reward_check, "time", SimpleNamespace(perf_counter=clock, clock=clock))
    code = "from leeway.launch.reward_check import time\ndef slow(completions, answer, **_):\n"
    code += "    time.clock.now_s += 16 * (completions[0] == '')\n"
    code += "    return [float(completions[0] == answer[0])]\n"
    status, output = check(code, "slow")
    assert status == ExitStatus.FAILED
    assert "slow is slow: it took 16.0 s for a completion (empty), with" in output, (
        "a call is slow from a quarter of the timeout on"
    )


def test_a_function_that_hangs_is_stopped_after_one_timeout(check):
    code = "import time\ndef hangs(completions, **_):\n    time.sleep(30)\n"
    status, output = check(code, "hangs", options=("--actors.reward_timeout_s", "0.4"))
    assert status == ExitStatus.FAILED
    assert "hangs failed on 1 of 1 completions (correct)" in output
    assert "took longer than 0.4 s" in output
    assert "hangs was tested on only 1 completions: stopped because 1 completions ended the reward's process" in output


def test_a_function_that_always_returns_none_is_a_problem(check):
    code = "async def never(completions, **_):\n    return [None] * len(completions)\n"
    code += "def exact2(completions, answer, **_):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    status, output = check(code, "never", "exact2")
    assert status == ExitStatus.FAILED
    assert output.count("PROBLEM") == 1
    assert "never returned None for every completion" in output


def test_without_a_known_answer_a_completion_can_be_given(check):
    code = "def digits(completions, **_):\n    return [float(c == '42') for c in completions]\n"
    status, output = check(code, "digits", column="value")
    assert status == ExitStatus.FAILED
    assert "give a correct answer with --completion TEXT" in output
    status, output = check(code, "digits", column="value", options=("--completion", "42"))
    assert status == ExitStatus.OK, output
    assert "digits given: 42 2 0 1" in output


def test_an_invalid_task_is_wrong_input(check):
    status, output = check("def exact(completions):\n    return []\n", "exakt")
    assert status == ExitStatus.WRONG_INPUT
    assert "did you mean 'exact'?" in output


def test_the_demos_task_passes_with_its_own_scorer(capsys):
    demo = Path(__file__).parents[2] / "examples" / "demo.toml"
    small = ("--task.num_train", "16", "--task.num_heldout", "8")
    assert main(["check-reward", str(demo), "--num", "3", *small]) == ExitStatus.OK
    assert "chain_sum" in capsys.readouterr().out


def test_many_problems_are_summarized_with_an_example_of_each_failure(check):
    code = "def mixed(completions, answer, **_):\n    text = completions[0]\n"
    code += "    if text == '' or text.startswith('4'):\n        raise KeyError(text[:1])\n"
    code += "    return [float(text == answer[0])]\n"
    status, output = check(code, "mixed", options=("--num", "64"))
    assert status == ExitStatus.FAILED
    assert re.search(r"mixed failed on \d+ of \d+ completions \(.*empty.*\)", output), output
    assert output.count("FAILED mixed, ") == 2, "one line for KeyError('') and one for KeyError('4')"
    assert "FAILED mixed, empty: KeyError: ''" in output
    assert "prompt: '10+10'; completion: ''" in output
    assert len(output) < 3000


def test_a_slow_function_is_tested_within_the_time_budget(check, monkeypatch):
    monkeypatch.setattr(reward_check, "BUDGET_S", 0.3)
    code = "import time\ndef slowly(completions, answer, **_):\n    time.sleep(0.05)\n"
    code += "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    status, output = check(code, "slowly", num=None)
    assert status == ExitStatus.OK, output
    assert re.search(r"slowly was tested on only \d completions: stopped after 0.3 s; set the number", output), output


def test_a_reward_that_reads_tokens_is_checked_with_the_tokenizer_of_the_model(check, tmp_path):
    code = (
        "def exact(completions, answer, completion_ids, prompt_ids, finish_reasons, log_metric):\n"
        "    log_metric('num_ids', len(completion_ids[0]))\n"
        "    assert (bool(completion_ids[0]), finish_reasons) == (bool(completions[0]), ['stop']) and prompt_ids[0]\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    status, output = check(code, "exact")
    assert status == ExitStatus.FAILED
    assert "the function reads sampled tokens: set model.path to a folder with a tokenizer" in output
    byte_tokenizer(tmp_path / "model")
    status, output = check(code, "exact")
    assert status == ExitStatus.OK, output
