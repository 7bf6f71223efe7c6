"""The pipeline: memory held between passes, and errors of failed passes."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner import pipeline as pipeline_file
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.model import DeviceBatch
from leeway.learner.networks import Networks
from leeway.learner.pipeline import OutOfMemory, Pipeline
from tests.world.learner import build, make_models, make_networks, make_rows, run_ranks, single_rank

SCHEDULES = {
    "one chunk": LearnerConfig(schedule="1f1b"),
    "two chunks": LearnerConfig(schedule="interleaved_1f1b", num_chunks=2),
    "zero bubble": LearnerConfig(schedule="zero_bubble", num_chunks=2),
}
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB free.")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    make_models(folder, num_layers=4)  # one layer for each of two chunks on each of two stages
    return folder


# --- memory ---------------------------------------------------------------------------------------


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run the checks on one of two stages."""
    for config in SCHEDULES.values():
        networks = make_networks(folder / "untied", config, TrajectoryBalanceConfig(), mesh)[0]
        on_device = networks.on_device(build(make_rows(0), min_micro_batches=2, multiple=2).packed)
        check_no_outputs_left(networks, on_device)
        check_large_buffers_are_freed(networks, on_device)


def check_no_outputs_left(networks: Networks, on_device: DeviceBatch) -> None:
    with recorded_stages() as stages:
        both_passes(networks, on_device)
        num_stages = len(stages)
        assert num_stages == 2 * len(networks.policy.modules)
        for stage in stages:
            assert not stage().fwd_cache, "a forward-only schedule frees its inputs"
            assert not stage().output_chunks
        both_passes(networks, on_device)
        assert len(stages) == num_stages, "a schedule with small buffers is reused"


def check_large_buffers_are_freed(networks: Networks, on_device: DeviceBatch) -> None:
    networks.policy.pipeline._schedules.clear()
    gc.collect()
    gc.disable()  # the memory must be freed at once, before the pass of the next pipeline
    with recorded_stages() as stages, mock.patch.object(pipeline_file, "KEPT_BYTES", 0):
        both_passes(networks, on_device)
        assert stages
        assert all(stage() is None for stage in stages), "a schedule with large buffers is freed after its pass"
        both_passes(networks, on_device)
    gc.enable()


@contextmanager
def recorded_stages() -> Iterator[list[weakref.ref]]:
    """Yield weak references to the torch stages that pipelines build in this context."""
    built: list[weakref.ref] = []
    make = Pipeline._stage

    def make_and_record(*args, **kwargs):
        stage = make(*args, **kwargs)
        built.append(weakref.ref(stage))
        return stage

    with mock.patch.object(Pipeline, "_stage", make_and_record):
        yield built


def both_passes(networks: Networks, on_device: DeviceBatch) -> None:
    forward = run(networks.policy.pipeline, on_device, train=False)
    trained = run(networks.policy.pipeline, on_device, train=True)
    if forward is not None:
        assert torch.equal(forward, trained), "the outputs of the forward pass stay valid"
        assert float(forward.abs().sum()) > 0


@pytest.mark.process
def test_a_pass_keeps_no_outputs_and_only_small_receive_buffers(models):
    run_ranks("tests.unit.test_learner_pipeline", models, [(1, 2)])


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def networks(models):
    with single_rank():
        yield make_networks(models / "untied", LearnerConfig(), TrajectoryBalanceConfig())[0]


@pytest.fixture
def on_device(networks):
    return networks.on_device(build(make_rows(0)).packed)


@pytest.mark.parametrize("train", [False, True], ids=["forward-only", "training"])
def test_an_out_of_memory_error_names_the_keys_to_lower_in_one_line(networks, on_device, monkeypatch, train):
    fail_in_heads(monkeypatch, NO_MEMORY, backward=False)
    with pytest.raises(OutOfMemory, match=r"lower learner\.token_budget") as caught:
        run(networks.policy.pipeline, on_device, train=train)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert "stage 0 ran out of memory" in message
    assert f"{on_device.packed.num_micro_batches} micro-batches of {on_device.packed.width} tokens" in message
    assert ("learner.activation_checkpointing = true" in message) == train
    assert message.endswith("Original error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


def test_an_out_of_memory_error_does_not_suggest_active_checkpointing(models, monkeypatch):
    fail_in_heads(monkeypatch, NO_MEMORY, backward=True)
    config = LearnerConfig(schedule="1f1b", activation_checkpointing=True)
    with single_rank():
        networks = make_networks(models / "untied", config, TrajectoryBalanceConfig())[0]
        with pytest.raises(OutOfMemory, match="training pass") as caught:
            run(networks.policy.pipeline, networks.on_device(build(make_rows(0)).packed), train=True)
    assert "activation_checkpointing" not in str(caught.value)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_error_in_a_chunk_is_raised_unchanged(networks, on_device, monkeypatch, backward):
    problem = ValueError("attention dropout would make the passes differ")
    fail_in_heads(monkeypatch, problem, backward=backward)
    with pytest.raises(ValueError, match="attention dropout") as caught:
        run(networks.policy.pipeline, on_device, train=True)
    assert caught.value is problem


def test_an_error_in_the_loss_is_raised_unchanged(networks, on_device):
    problem = RuntimeError("the loss failed to run")

    def coefficients(micro_batch, outputs):
        raise problem

    with pytest.raises(RuntimeError, match="the loss failed") as caught:
        networks.policy.pipeline.train(on_device, coefficients)
    assert caught.value is problem


def run(pipeline, on_device, *, train):
    if train:
        return pipeline.train(on_device, lambda micro_batch, outputs: torch.ones_like(outputs))
    return pipeline.forward_only(on_device)


def fail_in_heads(monkeypatch, problem, *, backward):
    """Make the heads fail in the forward or in the backward pass."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            if not backward:
                raise problem
            return values.clone()

        @staticmethod
        def backward(ctx, slopes):
            raise problem

    heads = pipeline_file.StageModule._output
    monkeypatch.setattr(pipeline_file.StageModule, "_output", lambda *args: Failing.apply(heads(*args)))
