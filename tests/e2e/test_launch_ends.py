"""Real runs that end early: by a signal, by the death of a stage, or because all samples fail."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

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
