"""Real runs of the other algorithms with their own features, from actor to export."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors import safe_open

from tests.world.files import json_rows
from tests.world.live_run import LIMIT_S, ROOT, start

pytestmark = pytest.mark.full  # unit tests cover the features of each loss


SIGNS = {"equal_rewards", "no_gradient", "all_cut", "fell", "collapsed"}
"""Alerts on runs that cannot learn."""


def finished(folder, *overrides, example, signs=frozenset()):
    """Train to the end with only these `SIGNS`; return the metrics of the steps and the summary of the run."""
    process = start(folder, *overrides, "--actors.eval_every", "0", example=example)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    rows = json_rows(folder / "run" / "metrics.jsonl")
    steps, summary = [row for row in rows if "loss" in row], json.loads((folder / "run" / "summary.json").read_text())
    assert SIGNS & {event["kind"] for event in json_rows(folder / "run" / "events.jsonl")} == signs
    assert all(row["policy/entropy"] > 0 for row in steps)
    assert output.splitlines()[-1] == summary["verdict"]
    return steps, summary


def test_ppo_takes_several_updates_per_batch_with_a_critic_within_the_bound(tmp_path):
    steps, summary = finished(
        tmp_path,
        *("--learner.num_steps", "8", "--learner.num_minibatches", "2", "--learner.num_epochs", "2"),
        *("--weight_sync.max_lag", "9", "--algorithm.baseline", "value_head", "--weight_sync.lag_control", "on"),
        *("--learner.learning_rate", "1e-3"),
        example="demo-ppo",
    )
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert {row["updates/taken"] for row in steps} == {4}
    assert {row["buffer/ledger_gap"] for row in steps} == {0}
    assert steps[0]["mismatch/lag0_abs"] < 1e-3, "pi_prox differs from the policy of fresh tokens"
    assert 4 < summary["lag_max"] <= summary["max_lag"] == 9, "a lag is a number of updates"
    assert any(row["off_policy/clip_frac_low"] + row["off_policy/clip_frac_high"] > 0 for row in steps)
    assert all(5 <= row["lag/allowed"] <= 9 for row in steps), "lag control stays within its bounds"
    assert all(row["ppo/value_loss"] > 0 and row["off_policy/token_tis_frac"] is not None for row in steps)
    with safe_open(next((tmp_path / "run" / "model").glob("*.safetensors")), "pt") as exported:
        assert not [name for name in exported.keys() if "value" in name and "head" in name]  # noqa: SIM118 -- no mapping


def test_dpo_pairs_answers_of_a_prompt_across_policy_versions(tmp_path):
    steps, summary = finished(
        tmp_path,
        *("--task.num_train", "16", "--algorithm.compare", "prompt"),
        *("--buffer.sampler", "examples/samplers.py:same_prompt", "--buffer.max_uses", "4"),
        *("--weight_sync.max_lag", "unbounded"),
        example="demo-dpo",
    )
    assert len(steps) == 12
    assert {row["buffer/ledger_gap"] for row in steps} == {0}
    assert any((row["dpo/cross_frac"] or 0) > 0 for row in steps)
    assert summary["lag_max"] > 0


def test_a_run_trains_with_a_baseline_and_a_sampler_from_files(tmp_path):
    steps, _ = finished(
        tmp_path,
        *("--algorithm.baseline", "examples/baseline.py:median", "--buffer.sampler", "examples/samplers.py:hard_ones"),
        *("--learner.num_steps", "4", "--learner.num_stages", "2"),
        example="demo-ppo",
    )
    assert [row["step"] for row in steps] == list(range(1, 5))
    assert any(row["ppo/advantage_abs"] > 0 for row in steps)


def test_the_documented_loss_trains_from_any_folder_and_after_a_resume(tmp_path, monkeypatch):
    """Train with the loss of docs/algorithms/README.md."""
    for name in ("own-loss.toml", "reinforce.py", "samplers.py", "file_reward.py", "file_rows.jsonl"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    steps, summary = finished(
        tmp_path,
        *("--model.path", str(ROOT / "examples" / "demo_model"), "--learner.num_stages", "2"),
        *("--task.num_train", "12", "--task.num_heldout", "3", "--learner.groups_per_step", "4"),
        *("--learner.num_steps", "4", "--learner.checkpoint_every", "2"),
        example=str(tmp_path / "own-loss"),
    )
    assert summary["lag_max"] == 0
    command = [sys.executable, "-m", "leeway", "resume", "run", "--learner.num_steps", "6"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["reinforce/advantage_abs"] >= 0 for row in steps)


TEACHERS = """
[model]
path = "{model}"
[model.teachers]
odd = "{model}"
even = "{model}"
[task]
type = "file"
path = "sums.jsonl"
template = "{{question:compact}}="
rewards = ["exact"]
teacher_column = "kind"
[algorithm]
type = "distillation"
[actors]
num_actors = 1
group_size = 8
max_prompt_tokens = 8
max_new_tokens = 8
[learner]
token_budget = 256
"""


def test_teachers_score_their_own_prompts_under_a_uniform_prompt_law(tmp_path):
    """All processes except actors look up the teacher of each prompt."""
    sums = [(a, b) for a in range(10, 18) for b in range(10, 18)]
    rows = [{"question": f"{a} + {b}", "answer": str(a + b), "kind": ("even", "odd")[(a + b) % 2]} for a, b in sums]
    for row in rows[::2]:
        row["answer"] = "never right"
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "teachers.toml").write_text(TEACHERS.format(model=ROOT / "examples" / "demo_model"))
    steps, summary = finished(
        tmp_path,
        *(
            "--buffer.prompt_law",
            "uniform",
            "--task.num_train",
            "40",
            "--task.num_heldout",
            "8",
        ),
        example=str(tmp_path / "teachers"),
        signs={"no_gradient"},  # student and teachers are the same model
    )
    assert len(steps) == 12
    assert {row["buffer/ledger_gap"] for row in steps} == {0}
    assert abs(steps[0]["policy/kl_reference"]) < 1e-3, "student and teachers are the same model"
    assert summary["trained_trajectories"] == 12 * 8 * 8
