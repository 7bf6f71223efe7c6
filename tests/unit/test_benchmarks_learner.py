"""benchmarks/learner.py: equal gradients of all compared loops, the theoretical bubble, and process failures."""

import pytest
import torch
import torch.distributed as dist
from benchmarks.learner_parts import computed, sides
from benchmarks.learner_parts.sleeping import bubble
from benchmarks.learner_parts.spot import run_measurement
from benchmarks.lib import learner as learner_step
from benchmarks.lib.processes import MeasurementFailed
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _ComputationType
from torch.testing._internal.distributed.fake_pg import FakeStore

from leeway.learner.attention import IMPLEMENTATION
from leeway.learner.mesh import Mesh, MeshPlace
from leeway.learner.model import DeviceBatch
from leeway.learner.pipeline import build_schedule

MICRO_BATCHES = 8
UNITS = {
    _ComputationType.FORWARD: ("F", 1),
    _ComputationType.BACKWARD_INPUT: ("B", 1),
    _ComputationType.BACKWARD_WEIGHT: ("W", 1),
    _ComputationType.FULL_BACKWARD: ("B", 2),
}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[2, 4])
def fake_mesh(request):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield Mesh.build(MeshPlace(0, num_stages=request.param))
    dist.destroy_process_group()


def test_the_learner_and_both_plain_loops_have_equal_gradient_norms(tmp_path, group):
    path = sides.small_llama(tmp_path / "model", hidden_size=64, num_layers=2, vocab_size=50)
    rows = sides.trajectories(sides.long_tailed(24, seed=1, median=20, longest=64), 50, seed=2)
    mesh = Mesh.build(MeshPlace(0))
    config = sides.configured(mesh, token_budget=128)
    learner = learner_step.Learner(path, mesh, config)
    batch = learner.batch(rows)
    norm = learner.step(batch)
    padded = sides.PlainLoop(path, learner_step.ALGORITHM, config)
    assert padded.step(sides.padded(rows, 16, learner_step.TEMPERATURE)) == pytest.approx(norm, rel=1e-5)
    packed = sides.PlainLoop(path, learner_step.ALGORITHM, config, attention=IMPLEMENTATION)
    batches = sides.packed(batch.packed, rows, DeviceBatch(batch.packed, torch.device("cpu")), learner_step.TEMPERATURE)
    assert packed.step(batches) == pytest.approx(norm, rel=1e-5)
    assert learner.step(batch, one_pass=False) == pytest.approx(norm, rel=1e-5)


def test_the_learner_and_the_plain_loop_agree_on_trajectory_balance(tmp_path, group):
    path = sides.small_llama(tmp_path / "model", hidden_size=64, num_layers=2, vocab_size=50)
    rows = sides.trajectories(sides.long_tailed(24, seed=1, median=20, longest=40), 50, seed=2)
    mesh = Mesh.build(MeshPlace(0))
    config = sides.configured(mesh, token_budget=320)
    learner = learner_step.Learner(path, mesh, config, algorithm=computed.UNWEIGHED, scores=True)
    batch = learner.batch(rows)
    assert batch.packed.num_micro_batches > 1
    norm = learner.step(batch)
    assert learner.step(batch, one_pass=False) == pytest.approx(norm, rel=1e-5)
    plain = sides.BalanceLoop(path, computed.UNWEIGHED, config)
    on_device = DeviceBatch(batch.packed, torch.device("cpu"))
    batches = sides.packed_for_balance(batch.packed, rows, on_device, learner_step.TEMPERATURE)
    for one_pass in (True, False):
        assert plain.step(batches, one_pass=one_pass) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2)])
def test_the_theoretical_bubble_equals_that_of_the_schedule_table(fake_mesh, schedule, num_chunks):
    num_stages = fake_mesh.place.num_stages
    total = num_stages * num_chunks
    stages = [empty_stage(index, total, fake_mesh) for index in range(0, total, num_stages)]
    built = build_schedule(schedule, stages, MICRO_BATCHES, lambda *_: torch.zeros(()))
    idle = 1 - 3 * num_chunks * MICRO_BATCHES / makespan(built.pipeline_order, total)
    assert bubble(schedule, num_stages, num_chunks, MICRO_BATCHES) == pytest.approx(idle)


def empty_stage(index, total, mesh):
    example = torch.zeros(1)
    cpu = torch.device("cpu")
    return PipelineStage(nn.Identity(), index, total, cpu, input_args=example, output_args=example, group=mesh.pipeline)


def makespan(order, num_stages):
    """Return the time units until the last action ends, if each action starts when its rank and inputs are ready."""
    queues = {rank: [action for action in actions if action is not None] for rank, actions in order.items()}
    clock = dict.fromkeys(queues, 0)
    ends = {}
    while any(queues.values()):
        for rank, queue in queues.items():
            while queue:
                letter, units = UNITS[queue[0].computation_type]
                stage, number = queue[0].stage_index, queue[0].microbatch_index
                if stage == 0 and queue[0].computation_type in (
                    _ComputationType.BACKWARD_INPUT,
                    _ComputationType.BACKWARD_WEIGHT,
                ):
                    # torch fuses both backward passes if no rank needs the input gradient
                    units = {"B": 0, "W": 2}[letter]
                needed = {"F": [("F", stage - 1)], "B": [("F", stage), ("B", stage + 1)], "W": [("B", stage)]}[letter]
                keys = [(kind, at, number) for kind, at in needed if 0 <= at < num_stages]
                if not all(key in ends for key in keys):
                    break
                clock[rank] = max([clock[rank], *(ends[key] for key in keys)]) + units
                ends[letter, stage, number] = clock[rank]
                queue.pop(0)
    return max(clock.values())


@pytest.mark.full
@pytest.mark.process
def test_a_failed_measurement_names_the_process():
    with pytest.raises(MeasurementFailed, match=r"process \d of measurements:packing ended with status 1"):
        run_measurement("measurements:packing", {"no_such_option": 1}, worlds=(1, 1))


@pytest.mark.process
def test_a_measurement_times_out():
    with pytest.raises(MeasurementFailed, match=r"measurements:packing took longer than 0\.1 s"):
        run_measurement("measurements:packing", {"quick": True}, limit_s=0.1)
