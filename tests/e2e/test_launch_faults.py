"""Real runs in which a role is killed or stopped: they heal, or end with a sentence that names it."""

import json
import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from tests.e2e.real_run import command_of, descendants, start, wait_for_end, wait_for_rows, wait_for_steps


def role(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process that hosts a role; Ray names it after the class, and vLLM its engine by itself."""
    names = (name, f"ray::{name}")
    return next(each for each in descendants(process) if any(n in command_of(each) for n in names))


def test_a_killed_buffer_is_started_again_and_nothing_is_lost(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "40", "--actors.eval_every", "0")
    wait_for_steps(process, tmp_path, 3, timeout_s=150)
    role(process, "BufferRole").kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    run = tmp_path / "run"
    events = [json.loads(line)["text"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("buffer service ended" in text for text in events), events
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger_gap"] == 0
    assert summary["trained_trajectories"] == 40 * 8 * 8


def test_an_interrupt_while_starting_ends_at_once_and_without_processes(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while not any("ray::" in command_of(each) for each in descendants(process)):
        assert time.monotonic() < deadline, "no role was started"
        time.sleep(0.2)
    family = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert wait_for_end(family, timeout_s=10) == []


def test_a_stage_that_dies_or_hangs_is_started_again_with_the_others_while_actors_and_buffer_carry_on(tmp_path):
    few = ["--learner.num_steps", "80", "--actors.num_actors", "1", "--actors.eval_every", "0"]
    process = start(tmp_path, *few, "--task.num_heldout", "16", "--learner.collective_timeout_s", "20")
    wait_for_steps(process, tmp_path, 8, timeout_s=150)
    others = [role(process, name) for name in ("BufferRole", "ActorRole", "EngineCore")]
    killed = role(process, "StageRole")
    killed.kill()
    wait_for_rows(process, tmp_path, lambda row: row.get("restarts") == 1, timeout_s=90)
    suspended = role(process, "StageRole")
    assert suspended.pid != killed.pid
    suspended.suspend()
    wait_for_rows(process, tmp_path, lambda row: row.get("restarts") == 2, timeout_s=120)
    assert all(other.is_running() for other in others), "nobody else was started again"
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert wait_for_end([killed, suspended], timeout_s=10) == [], "a process that was replaced is left behind"
    run = tmp_path / "run"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    restarts = [event["text"] for event in events if event["kind"] == "restart"]
    assert len(restarts) == 2, restarts
    assert re.match(r"stage\.[01] died .* all stages are started again from the checkpoint of step", restarts[0])
    assert re.match(r"stage\.[01] did not answer the others .*learner.collective_timeout_s = 20 s", restarts[1])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {row["step"]: row["restarts"] for row in rows if "loss" in row}
    summary = json.loads((run / "summary.json").read_text())
    assert (len(last) + summary["steps_without_report"], summary["learner_restarts"]) == (80, 2)
    counted = [last[step] for step in sorted(last)]
    assert counted == sorted(counted), "the last row of a step is that of the learner that counts"
    assert summary["ledger_gap"] == 0
    assert summary["trained_trajectories"] == 80 * 8 * 8
    assert (run / "model" / "config.json").exists()


@pytest.mark.full
def test_a_killed_stage_ends_a_run_that_allows_no_restart_with_its_name_and_log(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000", "--launch.max_restarts", "0")
    wait_for_steps(process, tmp_path, 1, timeout_s=150)
    family = descendants(process)
    role(process, "StageRole").kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "stage." in output
    assert ".log" in output
    assert wait_for_end(family, timeout_s=10) == []
