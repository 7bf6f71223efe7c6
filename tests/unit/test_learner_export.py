"""Export of a checkpoint's policy to a Hugging Face folder, without the ranks that wrote the checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leeway.common.hf_folder import model_identity
from leeway.learner.checkpoint_files import DamagedCheckpoint, export_checkpoint
from tests.unit.test_learner_checkpoints import (
    BALANCE,
    CRITIC_HEAD,
    CRITIC_MODEL,
    DAMAGES,
    checkpoints_in,
    damage,
    make_model,
    networks_of,
    save,
    take_step,
)
from tests.world.learner import single_rank


@pytest.fixture(autouse=True)
def process_group():
    with single_rank():
        yield


def trained(tmp_path, algorithm=BALANCE, **changes):
    """Return (model folder, networks after two steps, folder of their checkpoint)."""
    model = make_model(tmp_path / "model", **changes)
    networks = networks_of(model, algorithm)
    checkpoints = checkpoints_in(tmp_path, model=model_identity(model))
    for step in (1, 2):
        take_step(networks, seed=step)
    save(checkpoints, networks, 2)
    return model, networks, tmp_path / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("algorithm", [BALANCE, CRITIC_HEAD, CRITIC_MODEL], ids=["none", "head", "model"])
def test_the_exported_folder_contains_only_the_trained_policy(tmp_path, algorithm, tied):
    model, networks, checkpoint = trained(tmp_path, algorithm, tie_word_embeddings=tied)
    progress, _ = export_checkpoint(checkpoint, model, tmp_path / "out")
    assert (progress.step, progress.version) == (2, 2)
    expected = networks.policy.exported_tensors()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.get_input_embeddings().weight, expected["model.embed_tokens.weight"].to(loaded.dtype))


def test_a_large_model_is_exported_as_several_shards(tmp_path, monkeypatch):
    model, networks, checkpoint = trained(tmp_path)
    monkeypatch.setattr("leeway.learner.checkpoint_files.SHARD_BYTES", 8192)
    export_checkpoint(checkpoint, model, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in networks.policy.exported_tensors().items())


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_rejected_and_no_partial_folder_remains(tmp_path, how):
    model, _, checkpoint = trained(tmp_path)
    damage(checkpoint / "__0_0.distcp", how)
    with pytest.raises(DamagedCheckpoint):
        export_checkpoint(checkpoint, model, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    _, _, checkpoint = trained(tmp_path)
    other = make_model(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ValueError, match="restore the model that the run started from"):
        export_checkpoint(checkpoint, other, tmp_path / "out")
