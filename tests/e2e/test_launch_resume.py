"""A real run that is killed as a whole, command and all, and gone on with; then exported and given more steps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.real_run import ROOT, descendants, start, wait_for_end, wait_for_rows

LIMIT_S = 280
CHECKPOINT = 20
KILLED_AT = 24
"""At the earliest: a row is seen some steps after it was taken."""
NUM_STEPS = 50
MORE_STEPS = 55


def leeway(*arguments: object) -> tuple[int, str]:
    """Run the command to its end; (exit status, all it said)."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", *map(str, arguments)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(run: Path) -> list[dict]:
    return [row for row in lines(run / "metrics.jsonl") if "loss" in row]


def acknowledged(run: Path, out: Path) -> dict[tuple, dict]:
    """Every stored trajectory by the key that it was acknowledged under."""
    status, said = leeway("buffer", "export", run, out)
    assert status == 0, said
    return {(row["actor"], row["epoch"], row["seq"]): row for row in pq.read_table(out).to_pylist()}


def same_sample(before: dict, after: dict) -> bool:
    """Is it the sample that was acknowledged? What became of it since may differ."""
    names = ("group_id", "sample_index", "prompt_id", "token_ids", "logprobs", "reward", "spans")
    return all(before[name] == after[name] for name in names)


def same_folder(ours: Path, theirs: Path) -> None:
    """The weights of two Hugging Face folders are equal, tensor by tensor."""
    found, expected = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run killed between two checkpoints; (its folder, what it had acknowledged, the steps it had reported)."""
    folder = tmp_path_factory.mktemp("runs")
    every = ("--learner.checkpoint_every", str(CHECKPOINT))
    process = start(folder, "--learner.num_steps", str(NUM_STEPS), "--actors.eval_every", "0", *every)
    checkpoint = folder / "run" / "checkpoints" / f"step-{CHECKPOINT:08}"
    wait_for_rows(process, folder, lambda row: row["step"] >= KILLED_AT and checkpoint.exists(), timeout_s=LIMIT_S)
    family = descendants(process)
    os.kill(process.pid, signal.SIGKILL)
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(timeout=30)
    process.stdout.close()
    assert wait_for_end(family, timeout_s=30) == []
    run = folder / "run"
    return run, acknowledged(run, folder / "before.parquet"), steps(run)


@pytest.fixture(scope="module")
def resumed(killed):
    """The same run after `leeway resume`, on one stage instead of two; (its folder, what the command said)."""
    run, _, _ = killed
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "l')  # as a power cut leaves it
    status, said = leeway("resume", run, "--tracking.display", "plain", "--learner.num_stages", 1)
    assert status == 0, said
    return run, said


@pytest.mark.timeout(900)
def test_every_step_has_a_final_row_and_those_after_the_checkpoint_were_taken_again(killed, resumed):
    run, said = resumed
    rows = steps(run)
    final = {row["step"]: row for row in rows}
    assert sorted(final) == list(range(1, NUM_STEPS + 1)), said
    assert {row["restarts"] for row in killed[2]} == {0}
    assert {step: row["restarts"] for step, row in final.items()} == {
        step: int(step > CHECKPOINT) for step in range(1, NUM_STEPS + 1)
    }
    assert {row["buffer/ledger_gap"] for row in rows} == {0}


@pytest.mark.timeout(900)
def test_nothing_acknowledged_was_lost_and_nothing_was_counted_twice(killed, resumed):
    _, before, _ = killed
    run, _ = resumed
    after = acknowledged(run, run.parent / "after.parquet")
    assert before, "the run was killed before anything was acknowledged"
    assert [key for key in before if key not in after or not same_sample(before[key], after[key])] == []
    status, said = leeway("buffer", "verify", run)
    assert status == 0, said


@pytest.mark.timeout(900)
def test_the_summary_is_of_the_whole_run(killed, resumed):
    run, _ = resumed
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_steps"] == NUM_STEPS
    assert summary["ledger_gap"] == 0
    # so many steps as the bound has room for are redone as they were; what others had trained on stays trained
    at_resume = next(row for row in steps(run) if row["restarts"] == 1)["buffer/trained"]
    anew = max(0, at_resume - (CHECKPOINT + summary["max_lag"] + 1) * 8 * 8)
    assert anew <= summary["trained_trajectories"] - NUM_STEPS * 8 * 8 <= at_resume - CHECKPOINT * 8 * 8
    assert summary["trained_trajectories"] == summary["ledger"]["uses"] - summary["ledger"]["redone_uses"]
    assert (summary["learner_restarts"], summary["steps_without_report"]) == (1, 0)
    assert summary["steps_redone"] == len(killed[2]) - CHECKPOINT >= KILLED_AT - CHECKPOINT
    assert summary["lag_max"] <= summary["max_lag"]
    evaluated = [event for event in lines(run / "events.jsonl") if event["kind"] == "evaluated"]
    assert [event["eval/version"] for event in evaluated] == ["0.0", f"1.{NUM_STEPS}"]
    assert summary["accuracy_before"] == evaluated[0]["eval/accuracy_greedy"]


@pytest.mark.timeout(900)
def test_what_went_on_is_told(resumed):
    run, said = resumed
    assert "15 bytes of a line that was cut off are removed from metrics.jsonl" in said
    assert f"the run goes on from the checkpoint of step {CHECKPOINT}" in said
    assert "changed: learner.num_stages = 1 (was 2)" in said
    identity = json.loads((run / "run.json").read_text())
    assert len(identity["started_s"]) == 2


@pytest.mark.timeout(900)
def test_a_finished_run_says_what_it_could_go_on_with_and_exports_as_it_did_itself(resumed, tmp_path):
    run, _ = resumed
    status, said = leeway("resume", run)
    assert status == 2, said
    assert f"Give it more to go on: --learner.num_steps {2 * NUM_STEPS}" in said
    status, said = leeway("export", run, tmp_path / "newest")
    assert status == 0, said
    assert f"of step {NUM_STEPS}, is in" in said
    same_folder(tmp_path / "newest", run / "model")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_finished_run_goes_on_with_more_steps(resumed):
    run, _ = resumed
    status, said = leeway("resume", run, "--learner.num_steps", MORE_STEPS)
    assert status == 0, said
    assert f"changed: learner.num_steps = {MORE_STEPS} (was {NUM_STEPS})" in said
    assert sorted({row["step"] for row in steps(run)}) == list(range(1, MORE_STEPS + 1))


@pytest.mark.timeout(900)
def test_a_damaged_checkpoint_is_passed_over_in_an_export_and_refused_where_it_is_meant(resumed, tmp_path):
    run, _ = resumed
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    file = newest / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    status, said = leeway("export", run, tmp_path / "out", "--step", int(newest.name[5:]))
    assert status == 2, said
    assert "does not have the checksum that it was written with; there are those of step" in said
    status, said = leeway("export", run, tmp_path / "out")
    assert status == 0, said
    assert "the checkpoint before it is used" in said
    assert (tmp_path / "out" / "config.json").exists()
