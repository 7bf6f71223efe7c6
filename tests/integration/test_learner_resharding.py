"""A checkpoint of two replicas of two stages, restored with other numbers of replicas, stages and chunks (float64)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from leeway.learner.checkpoint import Checkpoints, TrainingProgress
from leeway.learner.mesh import Mesh, MeshPlace
from tests.unit.test_learner_checkpoints import CONFIG, CRITIC_MODEL, make_model, take_step
from tests.world.learner import make_networks, run_ranks, single_rank, weights_of

SHAPES = [(2, 2), (1, 4), (1, 2)]
"""(replicas, stages) of the processes; the first shape writes the checkpoint, and the others restore it."""


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run on each process of the test."""
    place = mesh.place
    config = CONFIG
    if (place.num_replicas, place.num_stages) == (1, 2):
        config = CONFIG.model_copy(update={"num_chunks": 2, "schedule": "interleaved_1f1b"})
    elif place.num_stages == 4:  # the stages of the critic are in reverse order
        config = CONFIG.model_copy(update={"schedule": "fused"})
    networks, _ = make_networks(folder / "model", config, CRITIC_MODEL, mesh)
    checkpoints = Checkpoints(folder / "checkpoints", 2, mesh, 30)
    if checkpoints.restore(networks) is None:
        for step in (1, 2):
            take_step(networks, seed=step)
        checkpoints.save(networks, TrainingProgress(2, 2, 0))
        checkpoints.wait()
    take_step(networks, seed=3)
    checkpoints.close()
    tensors = {name.replace("lm_head", "model.embed_tokens"): tensor for name, tensor in weights_of(networks).items()}
    save_file(tensors, folder / f"{place.num_replicas}x{place.num_stages}-{place.rank}.safetensors")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resharded")
    make_model(folder / "model")
    run_ranks("tests.integration.test_learner_resharding", folder, SHAPES)
    with single_rank():
        one_rank(folder, Mesh.build(MeshPlace(0)))
    return folder


@pytest.mark.parametrize("shape", [(1, 1), *SHAPES[1:]])
def test_a_checkpoint_of_two_replicas_of_two_stages_restores_into_any_other_shape(resharded, shape):
    def weights(replicas, stages):
        files = resharded.glob(f"{replicas}x{stages}-*.safetensors")
        return [(name, tensor) for file in files for name, tensor in load_file(file).items()]

    expected, read = dict(weights(2, 2)), weights(*shape)
    assert {name for name, _ in read} == expected.keys()
    for name, tensor in read:
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-10)


def test_replicas_write_each_tensor_once_and_share_the_work(resharded):
    folder = resharded / "checkpoints" / "step-00000002"
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["num_replicas"], meta["num_stages"]) == (2, 2)
    sizes = [meta["files"][f"__{rank}_0.distcp"]["size_bytes"] for rank in range(4)]
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert not [name for name in entries if "lm_head" in name], "a tied head is saved as the embedding"
    tensors_bytes = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in entries.values())
    # the container adds about 2 KiB to each of these small tensors
    assert sum(sizes) < tensors_bytes + 2500 * len(entries)
    assert min(sizes) > 0.5 * max(sizes)
    assert {f"rng.{rank}" for rank in range(4)} <= entries.keys()
