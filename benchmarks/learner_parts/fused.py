"""Fused and sequential passes of policy and critic, on stages that sleep and with real compute."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.learner_parts.measurements import (
    REAL_BUDGET,
    REAL_MICRO_BATCHES,
    REAL_VOCABULARY,
    SAME_WITHIN,
    real_lengths,
)
from benchmarks.learner_parts.sides import configured, small_llama, trajectories
from benchmarks.learner_parts.sleeping import UNIT_S, WIDTH, SleepingStage
from benchmarks.learner_parts.spot import Figures, Spot
from benchmarks.lib.learner import Learner
from benchmarks.lib.rounds import median_ratio

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.learner.config import stage_of
from leeway.learner.mesh import Mesh
from leeway.learner.pipeline import Pipeline
from leeway.planning.fused import FusedPasses, StageCost, find_schedule

WORK = (StageCost(1.0, 2.0), StageCost(1.0, 2.0))


class SleepingPair:
    """One rank of two networks that sleep. In fused passes, their pipelines run in opposite directions."""

    def __init__(self, mesh: Mesh, num_micro_batches: int, unit_s: float) -> None:
        """Prepare stages that sleep `unit_s` seconds in forward, and twice as long in backward."""
        self._mesh = mesh
        self._unit_s = unit_s
        self._batch: Any = SimpleNamespace(
            packed=SimpleNamespace(num_micro_batches=num_micro_batches, width=WIDTH),
            tokens_ML=torch.zeros(num_micro_batches, WIDTH, dtype=torch.int64),
        )

    def serial(self, schedule: str, *, train: bool = True) -> Callable[[], None]:
        """Return a function that runs sequential passes of both networks with one chunk per stage."""
        pipelines = [Pipeline([self._stage(0)], self._mesh, schedule) for _ in WORK]  # type: ignore[arg-type]

        def run() -> None:
            for pipeline in pipelines:
                if train:
                    pipeline.train(self._batch, _ones)
                else:
                    pipeline.forward_only(self._batch)

        return run

    def fused(self, most_held: int, *, train: bool = True) -> Callable[[], None]:
        """Return a function that runs fused passes of both networks."""
        fused = FusedPasses(self._mesh, WORK, most_held)
        fused.modules = (self._stage(0), self._stage(1))

        def run() -> None:
            if train:
                fused.train(self._batch, [_ones, _ones])
            else:
                fused.forward_only(self._batch)

        return run

    def _stage(self, network: int) -> Any:  # noqa: ANN401 -- in place of a StageModule
        place = self._mesh.place
        return SleepingStage(stage_of(network, place.stage, place.num_stages), place.num_stages, self._unit_s)


def _ones(_: int, outputs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(outputs)


def sleeping(spot: Spot, *, num_micro_batches: int, helds: list[int], quick: bool) -> Figures:
    """Measure sequential passes with 1F1B and zero bubble, and fused passes with each bound on held micro-batches."""
    unit_s, num_rounds = (UNIT_S / 3, 1) if quick else (UNIT_S, 3)
    mesh, num_stages = spot.mesh(), spot.size
    pair = SleepingPair(mesh, num_micro_batches, unit_s)
    sides = {"1f1b": pair.serial("1f1b"), "forward": pair.serial("1f1b", train=False)}
    if num_micro_batches % num_stages == 0:
        sides["zero_bubble"] = pair.serial("zero_bubble")
    sides |= {f"held {held}": pair.fused(held) for held in helds}
    sides["fused forward"] = pair.fused(helds[-1], train=False)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(num_rounds + 1):  # the first round builds schedules and connects neighbours
        for name, run in sides.items():
            seconds = spot.seconds(run)
            if number:
                taken[name].append(seconds)
    spot.log(f"sleeping, {num_stages} stages, {num_micro_batches} micro-batches: {taken}")
    serial = 2 * (num_micro_batches + num_stages - 1) * sum(WORK[0])
    found: Figures = {
        "forward_pair": median_ratio(taken["forward"], taken["fused forward"]),
        "zero_bubble_s": statistics.median(taken["zero_bubble"]) if "zero_bubble" in taken else None,
        "1f1b_s": statistics.median(taken["1f1b"]),
        "by_held": {},
    }
    for held in helds:
        order = find_schedule(num_stages, num_micro_batches, WORK, held)
        found["by_held"][str(held)] = {
            "gain": median_ratio(taken["1f1b"], taken[f"held {held}"]),
            "bound": serial / order.makespan,
            "held": order.most_held,
            "seconds": statistics.median(taken[f"held {held}"]),
        }
    return found


def real(spot: Spot, *, quick: bool) -> Figures:
    """Measure fused and sequential steps of PPO with a critic model, on two stages with one core each."""
    spot.pin()
    mesh, path = spot.mesh(), spot.folder / "model"
    hidden, layers = (64, 4) if quick else (256, 8)
    if spot.number == 0:
        small_llama(path, hidden_size=hidden, num_layers=layers, vocab_size=REAL_VOCABULARY)
    spot.barrier()
    rows = trajectories(real_lengths(), REAL_VOCABULARY, seed=3)
    algorithm = OffPolicyPPOConfig(baseline="critic", proximal="behaviour")
    plain = configured(mesh, token_budget=REAL_BUDGET)
    learners = {
        schedule: Learner(path, mesh, plain.model_copy(update={"schedule": schedule}), algorithm=algorithm)
        for schedule in ("1f1b", "fused")
    }
    batches = {name: each.batch(rows, min_micro_batches=REAL_MICRO_BATCHES) for name, each in learners.items()}
    norms = {name: learner.step(batches[name]) for name, learner in learners.items()}
    if abs(norms["fused"] / norms["1f1b"] - 1) > SAME_WITHIN:
        raise RuntimeError(f"the sides do not compute the same loss: gradient norms {norms}")
    taken: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(1 if quick else 7):
        for name, learner in learners.items():
            taken[name].append(spot.seconds(partial(learner.step, batches[name])))
        spot.log(f"PPO with a critic model: {', '.join(f'{name} {each[-1]:.2f} s' for name, each in taken.items())}")
    return {
        "real_ppo": median_ratio(taken["1f1b"], taken["fused"]),
        "real_1f1b_s": statistics.median(taken["1f1b"]),
        "real_fused_s": statistics.median(taken["fused"]),
        "real_micro_batches": batches["fused"].packed.num_micro_batches,
    }
