"""A real run whose learner is two replicas of two stages of two chunks each: one engine, four stage processes."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.world.live_run import LIMIT_S, ROOT, start

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run and the folder of its model: the demo model with four layers of random weights."""
    folder = tmp_path_factory.mktemp("runs")
    model_path = folder / "model"
    shutil.copytree(ROOT / "examples" / "demo_model", model_path)
    config = AutoConfig.from_pretrained(model_path, num_hidden_layers=4)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(model_path)
    layout = ["--learner.num_replicas", "2", "--learner.num_stages", "2", "--learner.num_chunks", "2"]
    layout += ["--learner.schedule", "interleaved_1f1b", "--learner.token_budget", "256", "--learner.cpus", "0.25"]
    small = ["--learner.num_steps", "6", "--actors.num_actors", "1", "--actors.eval_every", "0"]
    small += ["--task.num_heldout", "16", "--learner.learning_rate", "1e-3"]
    process = start(folder, "--model.path", str(model_path), *layout, *small)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return folder / "run", model_path


def rows(run) -> list[dict]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def test_every_step_is_recorded_and_the_ledger_closes(finished):
    run, _ = finished
    assert [row["step"] for row in rows(run)] == list(range(1, 7))
    assert {row["buffer/ledger_gap"] for row in rows(run)} == {0}
    assert len(list((run / "logs").glob("stage.*.log"))) == 4


def test_the_actor_and_the_chunks_compute_the_same_logprobs(finished):
    run, _ = finished
    seen = [row["mismatch/lag0_abs"] for row in rows(run) if row["mismatch/lag0_tokens"]]
    assert seen, "step 1 trains only on version 0"
    assert max(seen) < 1e-3


def test_the_export_is_the_whole_trained_model(finished):
    run, model_path = finished
    before = AutoModelForCausalLM.from_pretrained(model_path).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert before.keys() == after.keys()
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert not unchanged
