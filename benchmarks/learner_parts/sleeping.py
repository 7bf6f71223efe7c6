"""Schedules on stages that sleep: what a pipeline gains, and how much of it is bubble, with compute taken out.

The learner's own Pipeline runs modules whose forward, backward for inputs and backward for weights each sleep. So the
processes need no cores, and what is measured is order and communication.

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
from torch import Tensor, nn

from benchmarks.learner_parts.spot import Figures, Spot
from learner.decoders import StageShare
from learner.mesh import Mesh
from learner.pipeline import Pipeline
from planning.costs import bubble_in_micro_batches

NUM_MICRO_BATCHES = 8
WIDTH, HIDDEN = 4, 8
UNIT_S = 0.05
"""Sleep of a stage's forward, of its backward for inputs, and of its backward for weights, each."""
CASES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1), ("zero_bubble", 2))
"""Schedule and chunks per stage."""


def bubble(schedule: str, num_stages: int, num_chunks: int, num_micro_batches: int) -> float:
    """Idle share of a stage's time, 0..1, where forward, backward for inputs and for weights take as long each."""
    idle = bubble_in_micro_batches(schedule, num_stages, num_chunks)
    return idle / (num_micro_batches + idle)


class Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward_s: float, backward_s: float) -> Tensor:  # noqa: ANN401 -- torch's
        """Sleep on the way out."""
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401 -- torch's
        """Sleep on the way back."""
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """In place of a StageModule. Every stage takes as long, the first one too: it has an embedding to reach."""

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
        """Of the last stage's output."""
        return (1, width)

    def forward(self, states: Tensor, micro_batch: Tensor) -> Tensor:
        """[1, L] tokens or [1, L, hidden] states -> states, or [1, L] on the last stage."""
        states = Sleep.apply(self.embedding * 1.0 if self.share.is_first else states, self.unit_s, self.unit_s)
        # the weight's own way through autograd: a split backward sleeps here in its second half
        states = states * Sleep.apply(self.weight, 0.0, self.unit_s)
        return states.sum(2) if self.share.is_last else states


class SleepingPipeline:
    """This rank of a pipeline that sleeps."""

    def __init__(self, mesh: Mesh, schedule: str, num_chunks: int, stage_s: float) -> None:
        """Build it; all ranks of the mesh call it together.

        Args:
            mesh: the stages.
            schedule: by its name in the config.
            num_chunks: per stage; they share its time.
            stage_s: sleep of all chunks of a stage in each of the three parts of a micro-batch's work.
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
        """A training pass."""
        self._pipeline.train(self._batch, lambda _, outputs: torch.ones_like(outputs))


def measure(spot: Spot, *, quick: bool) -> Figures:
    """Every schedule on the stages of the first world. A second world is one stage that does the work of two."""
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
        spot.say(f"sleeping, {num_stages} stages, {schedule} x {num_chunks}: {bubbles[f'{schedule}_x{num_chunks}']}")
    figures: Figures = {"bubble_fraction": {f"P={num_stages} {name}": each for name, each in bubbles.items()}}
    if len(spot.worlds) > 1:
        whole = SleepingPipeline(mesh, "1f1b", 1, num_stages * unit_s) if spot.world == 1 else None
        whole_s = _median_s(spot, whole, 1, num_rounds)
        figures["pp2_over_pp1"] = whole_s / bubbles["1f1b_x1"]["seconds"]
        figures["pp2_over_pp1_by_schedule"] = {name: whole_s / each["seconds"] for name, each in bubbles.items()}
    return figures


def _median_s(spot: Spot, pipeline: SleepingPipeline | None, world: int, num_rounds: int) -> float:
    """Of passes by one world, the others have no pipeline. A first pass builds schedules and connects neighbours."""

    def run() -> None:
        assert pipeline is not None
        pipeline.run()

    taken = [spot.seconds(run, worlds=[world]) for _ in range(num_rounds + 1)]
    return statistics.median(taken[1:])
