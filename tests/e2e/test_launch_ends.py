"""Real runs that end before they have lived: interrupted while they start, without a restart left."""

import os
import signal
import time

import pytest

from tests.world.live_run import assert_ended_in_order, command_of, descendants, start, wait_for_end, wait_for_steps


def test_an_interrupt_while_starting_ends_at_once_and_without_processes(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 240
    while not any("ray::" in command_of(each) for each in descendants(process)):
        assert time.monotonic() < deadline, "no role was started"
        time.sleep(0.2)
    family = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert wait_for_end(family) == []


@pytest.mark.full
def test_a_killed_stage_ends_a_run_that_allows_no_restart_with_its_name_and_log(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000", "--launch.max_restarts", "0")
    wait_for_steps(process, tmp_path, 1, timeout_s=240)
    family = descendants(process)
    next(each for each in family if "ray::StageRole" in command_of(each)).kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert "stage." in output
    assert ".log" in output
    assert wait_for_end(family) == []


@pytest.mark.full  # an interrupt is the same to the command, and ends the first life of test_life_of_a_run.py
def test_sigterm_ends_with_a_checkpoint_and_without_processes(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000", "--learner.checkpoint_every", "100000")
    wait_for_steps(process, tmp_path, 2, timeout_s=240)
    family = descendants(process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert wait_for_end(family) == []
    assert_ended_in_order(tmp_path / "run")
