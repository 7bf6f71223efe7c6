"""The pipeline: what it leaves in memory between passes, and what it says of a pass that failed."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from algorithms.trajectory_balance import TrajectoryBalanceConfig
from learner import pipeline as pipeline_file
from learner.config import LearnerConfig
from learner.mesh import Mesh
from learner.model import DeviceBatch
from learner.networks import Networks
from learner.pipeline import OutOfMemory, Pipeline
from tests.world.learner import alone, build, make_models, make_networks, make_rows, run_ranks

SCHEDULES = {
    "one chunk": LearnerConfig(schedule="1f1b"),
    "two chunks": LearnerConfig(schedule="interleaved_1f1b", num_chunks=2),
    "zero bubble": LearnerConfig(schedule="zero_bubble", num_chunks=2),
}
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has 1.00 GiB free.")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    make_models(folder, num_layers=4)  # one for each of two chunks on two stages
    return folder


# --- memory ---------------------------------------------------------------------------------------


def one_rank(folder: Path, mesh: Mesh) -> None:
    """What each of the two stages runs."""
    for config in SCHEDULES.values():
        networks = make_networks(folder / "untied", config, TrajectoryBalanceConfig(), mesh)[0]
        on_device = networks.on_device(build(make_rows(0), min_micro_batches=2, multiple=2).packed)
        check_what_is_left(networks, on_device)
        check_that_large_buffers_are_given_up(networks, on_device)


def check_what_is_left(networks: Networks, on_device: DeviceBatch) -> None:
    with noted_stages() as stages:
        both_passes(networks, on_device)
        num_stages = len(stages)
        assert num_stages == 2 * len(networks.policy.modules)
        for stage in stages:
            assert not stage().fwd_cache, "a forward-only schedule keeps all that it was given until it runs again"
            assert not stage().output_chunks
        both_passes(networks, on_device)
        assert len(stages) == num_stages, "a schedule with small buffers is used again"


def check_that_large_buffers_are_given_up(networks: Networks, on_device: DeviceBatch) -> None:
    networks.policy.pipeline._schedules.clear()
    gc.collect()
    gc.disable()  # the memory has to be free before the next pipeline's pass, not some time later
    with noted_stages() as stages, mock.patch.object(pipeline_file, "KEPT_BYTES", 0):
        both_passes(networks, on_device)
        assert stages
        assert all(stage() is None for stage in stages), "a schedule with large buffers is gone with its pass"
        both_passes(networks, on_device)
    gc.enable()


@contextmanager
def noted_stages() -> Iterator[list[weakref.ref]]:
    """Those of torch that pipelines build meanwhile, as long as something holds them."""
    built: list[weakref.ref] = []
    make = Pipeline._stage

    def make_and_note(*args, **kwargs):
        stage = make(*args, **kwargs)
        built.append(weakref.ref(stage))
        return stage

    with mock.patch.object(Pipeline, "_stage", make_and_note):
        yield built


def both_passes(networks: Networks, on_device: DeviceBatch) -> None:
    forward = run(networks.policy.pipeline, on_device, train=False)
    trained = run(networks.policy.pipeline, on_device, train=True)
    if forward is not None:
        assert torch.equal(forward, trained), "what was handed over is not given up"
        assert float(forward.abs().sum()) > 0


@pytest.mark.process
def test_a_pass_leaves_no_outputs_behind_and_its_receive_buffers_only_while_they_are_small(models):
    run_ranks("tests.unit.test_learner_pipeline", models, [(1, 2)])


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def networks(models):
    with alone():
        yield make_networks(models / "untied", LearnerConfig(), TrajectoryBalanceConfig())[0]


@pytest.fixture
def on_device(networks):
    return networks.on_device(build(make_rows(0)).packed)


@pytest.mark.parametrize("train", [False, True], ids=["forward-only", "training"])
def test_a_pass_without_memory_says_what_to_lower_in_one_line(networks, on_device, monkeypatch, train):
    fail_in_heads(monkeypatch, NO_MEMORY, backward=False)
    with pytest.raises(OutOfMemory, match=r"lower learner\.token_budget") as caught:
        run(networks.policy.pipeline, on_device, train=train)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert "stage 0 has not the memory" in said
    assert f"{on_device.packed.num_micro_batches} micro-batches of {on_device.packed.width} tokens" in said
    assert ("learner.activation_checkpointing = true" in said) == train
    assert said.endswith("Reported: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")


def test_a_pass_that_checkpoints_activations_is_not_told_to(models, monkeypatch):
    fail_in_heads(monkeypatch, NO_MEMORY, backward=True)
    config = LearnerConfig(schedule="1f1b", activation_checkpointing=True)
    with alone():
        networks = make_networks(models / "untied", config, TrajectoryBalanceConfig())[0]
        with pytest.raises(OutOfMemory, match="training pass") as caught:
            run(networks.policy.pipeline, networks.on_device(build(make_rows(0)).packed), train=True)
    assert "activation_checkpointing" not in str(caught.value)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_error_in_a_chunk_comes_out_as_it_was_raised(networks, on_device, monkeypatch, backward):
    problem = ValueError("attention dropout would make the passes differ")
    fail_in_heads(monkeypatch, problem, backward=backward)
    with pytest.raises(ValueError, match="attention dropout") as caught:
        run(networks.policy.pipeline, on_device, train=True)
    assert caught.value is problem


def test_an_error_beside_the_chunks_comes_out_as_it_was_raised(networks, on_device):
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
    """Fake heads that fail, in the forward or in the backward pass."""

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
