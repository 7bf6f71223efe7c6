"""Real runs in which a role is killed with SIGKILL: they heal, or end with a sentence that names it."""

import json
import os
import signal
import subprocess
import time

import psutil

from tests.e2e.real_run import descendants, start, wait_for_end, wait_for_steps


def role(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process that hosts a role; Ray names it after the class."""
    return next(each for each in descendants(process) if f"ray::{name}" in " ".join(each.cmdline()))


def test_a_killed_actor_and_a_killed_buffer_are_started_again_and_nothing_is_lost(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "150", "--actors.eval_every", "0")
    wait_for_steps(process, tmp_path, 3, timeout_s=150)
    role(process, "BufferRole").kill()
    wait_for_steps(process, tmp_path, 20, timeout_s=60)
    role(process, "ActorRole").kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    run = tmp_path / "run"
    events = [json.loads(line)["text"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert any("buffer service ended" in text for text in events), events
    assert any("actor.0 died" in text or "actor.1 died" in text for text in events), events
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 151))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ledger_gap"] == 0
    assert summary["trained_trajectories"] == 150 * 8 * 8


def test_an_interrupt_while_starting_ends_at_once_and_without_processes(tmp_path):
    process = start(tmp_path)
    deadline = time.monotonic() + 60
    while not any("ray::" in " ".join(each.cmdline()) for each in descendants(process)):
        assert time.monotonic() < deadline, "no role was started"
        time.sleep(0.2)
    family = descendants(process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert wait_for_end(family, timeout_s=10) == []


def test_a_killed_stage_ends_the_run_with_its_name_and_log(tmp_path):
    process = start(tmp_path, "--learner.num_steps", "100000")
    wait_for_steps(process, tmp_path, 1, timeout_s=150)
    family = descendants(process)
    role(process, "StageRole").kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "stage." in output
    assert ".log" in output
    assert wait_for_end(family, timeout_s=10) == []
