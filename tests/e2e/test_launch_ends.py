"""Real runs that end early, by a signal, the death of a stage or failing samples, and real runs that cannot learn."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.world.files import json_rows
from tests.world.live_run import (
    LIMIT_S,
    ROOT,
    LiveRun,
    assert_ended_in_order,
    command_of,
    descendants,
    start,
    wait_for_end,
    wait_for_steps,
)


def test_an_interrupt_during_the_start_ends_at_once_and_without_processes(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + LIMIT_S
    while not any("ray::" in command_of(each) for each in descendants(process)):
        assert time.monotonic() < deadline, "no role was started"
        time.sleep(0.2)
    family = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert wait_for_end(family) == []


@pytest.mark.full
def test_a_killed_stage_ends_a_run_without_restarts_with_its_name_and_log(tmp_path, constants):
    constants({"leeway.launch.processes.role_process.MAX_RESTARTS": 0})
    process = start(tmp_path, "--learner.num_steps", "100000")
    wait_for_steps(process, tmp_path, 1, timeout_s=LIMIT_S)
    family = descendants(process)
    next(each for each in family if "ray::StageRole" in command_of(each)).kill()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    assert "stage." in output
    assert ".log" in output
    assert wait_for_end(family) == []


@pytest.mark.full  # test_life_of_a_run.py tests an interrupt, which the launcher handles like SIGTERM
def test_sigterm_ends_with_a_checkpoint_and_without_processes(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000", "--learner.checkpoint_every", "100000")
    wait_for_steps(process, tmp_path, 2, timeout_s=LIMIT_S)
    family = descendants(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert wait_for_end(family) == []
    assert_ended_in_order(tmp_path / "run")


REWARD = """
import os

def judge(completions, answer, **_):
    if os.path.exists({broken!r}):
        raise KeyError("answer")
    return [float(one.strip() == right) for one, right in zip(completions, answer)]
"""


@pytest.mark.full  # tests/unit tests the parts separately: the count, the end of the run, and its message
def test_a_run_whose_samples_all_fail_ends_with_the_reason_and_can_be_resumed(tmp_path):
    broken = tmp_path / "broken"
    (tmp_path / "judge.py").write_text(REWARD.format(broken=str(broken)))
    rewards = ("--task.rewards", json.dumps([f"{tmp_path / 'judge.py'}:judge"]))
    run = LiveRun(tmp_path, *rewards, "--learner.num_steps", "100000", "--learner.checkpoint_every", "2")
    run.wait_for_steps(4)
    family = descendants(run.process)
    broken.touch()
    output, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 1, output
    assert wait_for_end(family) == []
    (error,) = [line for line in output.splitlines() if "failed in" in line][-1:]
    assert "reward judge failed in actor-" in error
    assert "samples in a row: KeyError: 'answer'; the last sample had the prompt '" in error
    broken.unlink()
    steps = run.steps()[-1]["step"] + 4
    command = [sys.executable, "-m", "leeway", "resume", str(run.folder), "--learner.num_steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["num_steps"] == steps
    assert summary["ledger_gap"] == 0
    assert summary["failed_by_reason"]["reward failed: judge: KeyError"] >= 200


@pytest.mark.full  # tests/unit/test_launch_learning.py tests each alert
def test_a_run_that_cannot_learn_reports_it_before_its_first_step(tmp_path):
    """Each answer is cut at its first token, and all rewards are 0, so that DPO finds no pair and has no gradient."""
    (tmp_path / "judge.py").write_text("def judge(completions, **_):\n    return [0.0 for _ in completions]\n")
    rewards = ("--task.rewards", json.dumps([f"{tmp_path / 'judge.py'}:judge"]))
    cut = ("--actors.max_new_tokens", "1", "--actors.eval_every", "0")
    process = start(tmp_path, *rewards, *cut, example="demo-dpo")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    alerts = {event["kind"]: event for event in json_rows(tmp_path / "run" / "events.jsonl") if "action" in event}
    assert set(alerts) == {"equal_rewards", "all_cut", "no_gradient"}
    assert output.index("training\n") > max(output.index(alerts[kind]["text"]) for kind in ("equal_rewards", "all_cut"))
    assert alerts["equal_rewards"]["text"].count("completion '") == 3
    assert "(with counts): 0.0 (128). Newest answers: " in alerts["equal_rewards"]["text"]
    assert output.splitlines()[-1].startswith("no improvement: greedy 0.00 -> 0.00 (+0.00 ± 0.02), sampled 0.00")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert set(status["alert_kinds"]) == set(alerts)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Not in order: the gradient is exactly 0" in page
    command = alerts["equal_rewards"]["text"].split("`")[1].split()
    checked = subprocess.run(
        [sys.executable, "-m", *command, "--num", "2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "PROBLEM  the reward is 0 for every completion" in checked.stdout, "the named command finds the cause"


UNSTABLE = """
import os

def judge(completions, answer, **_):
    if os.path.exists({broken!r}):
        return [None for _ in completions]
    return [float(one.strip() == right) for one, right in zip(completions, answer)]
"""


@pytest.mark.full
def test_a_run_that_unlearns_reports_it_and_ends_if_no_sample_has_a_reward(tmp_path):
    broken = tmp_path / "broken"
    (tmp_path / "judge.py").write_text(UNSTABLE.format(broken=str(broken)))
    run = LiveRun(
        tmp_path,
        *("--task.rewards", json.dumps([f"{tmp_path / 'judge.py'}:judge"]), "--task.num_heldout", "64"),
        *("--learner.num_steps", "100000", "--learner.learning_rate", "0.03", "--weight_sync.lag_control", "off"),
        *("--actors.eval_every", "10"),
    )
    run.wait_for("both alerts", lambda: run.events("fell") and run.events("collapsed"))
    broken.touch()
    output, _ = run.process.communicate(timeout=LIMIT_S)
    assert run.process.returncode == 1, output
    assert "reward judge failed in actor-" in output
    assert "samples in a row: None instead of a reward; the last sample had the prompt '" in output
    assert output.splitlines()[-1].startswith("worse: greedy 0.")
