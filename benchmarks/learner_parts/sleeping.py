"""Gain and bubble (idle time) of pipeline schedules on stages that sleep instead of computing.

The learner's Pipeline runs modules whose forward, backward for inputs and backward for weights each sleep. The
processes need no cores, so the measurement covers only schedule and communication.

References:
    GPipe, arXiv 1811.06965; interleaved 1F1B, arXiv 2104.04473, section 2.2; zero bubble, arXiv 2401.10241, table 1:
    the bubble of ZB-H1 is (P - 1) * (F + B - W).
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.learner_parts.spot import Figures, Spot
from torch import Tensor, nn

from leeway.learner.decoders import StageShare
from leeway.learner.mesh import Mesh
from leeway.learner.pipeline import Pipeline
from leeway.planning.costs import bubble_in_micro_batches

NUM_MICRO_BATCHES = 8
WIDTH, HIDDEN = 4, 8
UNIT_S = 0.05
"""Seconds that a stage sleeps in each of forward, backward for inputs, and backward for weights."""
CASES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2))
"""Pairs of a schedule and its number of chunks per stage."""


def bubble(schedule: str, num_stages: int, num_chunks: int, num_micro_batches: int) -> float:
    """Return a stage's idle fraction if forward, backward for inputs and backward for weights take equal time."""
    idle = bubble_in_micro_batches(schedule, num_stages, num_chunks)
    return idle / (num_micro_batches + idle)


class Sleep(torch.autograd.Function):
    """Identity function that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:  # noqa: ANN401 -- torch API
        """Sleep for `forward_s` and return the tensor."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 -- torch API
        """Sleep for `backward_s` and return the gradient."""
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """Replacement of a StageModule; the first stage also sleeps in its backward, because it has an embedding."""

    hidden_size = HIDDEN
    device = torch.device("cpu")
    dtype = states_dtype = torch.float32

    def __init__(self, index: int, num_stages: int, unit_s: float) -> None:
        super().__init__()
        self.share = StageShare(index, num_stages, index, index + 1)
        self.batch: object = None
        self.unit_s = unit_s
        self.embedding = nn.Parameter(torch.zeros(1, WIDTH, HIDDEN))
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def output_shape(self, width: int) -> tuple[int, ...]:
        """Return the shape of the last stage's output."""
        return (1, width)

    def forward(self, states: Tensor, micro_batch: Tensor) -> Tensor:
        """Map [1, L] tokens or [1, L, hidden] states to states, or to [1, L] on the last stage."""
        states = Sleep.apply(self.embedding * 1.0 if self.share.is_first else states, self.unit_s, self.unit_s)
        # sleep for the gradient of the weight, which a split backward computes in its second half
        states = states * Sleep.apply(self.weight, 0.0, self.unit_s)
        return states.sum(2) if self.share.is_last else states


class SleepingPipeline:
    """One rank of a pipeline that sleeps."""

    def __init__(self, mesh: Mesh, schedule: str, num_chunks: int, stage_s: float) -> None:
        """Build the pipeline; all ranks of the mesh must call this constructor together.

        Args:
            mesh: mesh of the stages.
            schedule: name of the schedule in the config.
            num_chunks: number of chunks per stage, which share the time of the stage.
            stage_s: seconds that all chunks of a stage sleep in each of the three parts of a micro-batch's work.
        """
        place = mesh.place
        total = place.num_stages * num_chunks
        modules: Any = [
            SleepingStage(index, total, stage_s / num_chunks) for index in range(place.stage, total, place.num_stages)
        ]
        self._pipeline = Pipeline(modules, mesh, schedule)  # type: ignore[arg-type]
        self._batch: Any = SimpleNamespace(
            packed=SimpleNamespace(num_micro_batches=NUM_MICRO_BATCHES, width=WIDTH),
            tokens_ML=torch.zeros(NUM_MICRO_BATCHES, WIDTH, dtype=torch.int64),
        )

    def run(self) -> None:
        """Run a training pass."""
        self._pipeline.train(self._batch, lambda _, outputs: torch.ones_like(outputs))


def measure(spot: Spot, *, quick: bool) -> Figures:
    """Measure every schedule on the stages of the first world. A second world has one stage with the work of all."""
    unit_s = UNIT_S / 3 if quick else UNIT_S
    num_rounds = 2 if quick else 3
    mesh, num_stages = spot.mesh(), spot.worlds[0]
    work_s = 3 * unit_s * NUM_MICRO_BATCHES
    bubbles: Figures = {}
    for schedule, num_chunks in CASES:
        split = SleepingPipeline(mesh, schedule, num_chunks, unit_s) if spot.world == 0 else None
        seconds = _median_s(spot, split, 0, num_rounds)
        bubbles[f"{schedule}_x{num_chunks}"] = {
            "measured": 1 - work_s / seconds,
            "theory": bubble(schedule, num_stages, num_chunks, NUM_MICRO_BATCHES),
            "seconds": seconds,
        }
        spot.log(f"sleeping, {num_stages} stages, {schedule} x {num_chunks}: {bubbles[f'{schedule}_x{num_chunks}']}")
    figures: Figures = {"bubble_fraction": {f"P={num_stages} {name}": each for name, each in bubbles.items()}}
    if len(spot.worlds) > 1:
        whole = SleepingPipeline(mesh, "1f1b", 1, num_stages * unit_s) if spot.world == 1 else None
        whole_s = _median_s(spot, whole, 1, num_rounds)
        figures["pp2_over_pp1"] = whole_s / bubbles["1f1b_x1"]["seconds"]
        figures["pp2_over_pp1_by_schedule"] = {name: whole_s / each["seconds"] for name, each in bubbles.items()}
    return figures


def _median_s(spot: Spot, pipeline: SleepingPipeline | None, world: int, num_rounds: int) -> float:
    """Return the median seconds of a pass of one world. The first pass, which builds the schedule, does not count."""

    def run() -> None:
        assert pipeline is not None
        pipeline.run()

    taken = [spot.seconds(run, worlds=[world]) for _ in range(num_rounds + 1)]
    return statistics.median(taken[1:])
