"""Scorers: the workers of pools of role "scorer". The run neither waits for them nor ends with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from common.imports import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.pools import WorkerPool, scorer_pools
from launch.processes.placement import ON_GPU, PLACEMENT_S, PlacementGroup, spawn
from launch.processes.role_process import Notify, Restarts, Role, RoleProcess, done, outcome

if TYPE_CHECKING:
    from learner.config import LearnerSections


class ScorerRole(Role):
    """Hosts one scorer."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        with uncollected():
            import learner.reference  # noqa: F401 -- for `run`

    def run(self, context: RunContext[LearnerSections], number: int) -> None:
        """Load the reference, and score until it is killed."""
        from learner.reference import ReferenceScorer

        ReferenceScorer(context, number).run()


@dataclass
class ScorerProcess(RoleProcess):
    """One scorer.

    waiting for resources -> working -> died -> waiting ..., or lost: it died too often, or found no host
    """

    placement: PlacementGroup = field(kw_only=True)
    """Its place, which it keeps when it is started again."""
    lost: str = ""
    """Why it was given up, where it was."""

    @property
    def state(self) -> str:
        """For people; see the class."""
        if self.lost:
            return f"lost: {self.lost}"
        return "waiting for resources" if self.handle is None else super().state


class Scorers:
    """Starts scorers where there is room, and starts again what died, up to launch.max_restarts times in a row."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        self._plan = plan
        self._notify = notify
        self._context: RunContext[Config] | None = None
        self._pools = {pool.name: pool for pool in scorer_pools(plan.config)}
        self.processes: list[ScorerProcess] = []

    def start(self, context: RunContext[Config]) -> None:
        """Ask for a place for each, and start what has one; returns at once."""
        self._context = context
        for pool in self._pools.values():
            for _ in range(pool.count):
                self._enlist(pool)
        self.watch()

    def watch(self) -> None:
        """Start what has found a place, and again what died."""
        for scorer in self.processes:
            if scorer.lost:
                continue
            if scorer.handle is None:
                self._look_for_a_place(scorer)
            elif done(scorer.running):
                self._start_again(scorer, outcome(scorer.running) or "it ended")

    def stop(self) -> None:
        """End all; what they were at is scored by the step."""
        for scorer in self.processes:
            self._end(scorer)
        self.processes = []

    # --- one scorer -------------------------------------------------------------------------------

    def _enlist(self, pool: WorkerPool) -> None:
        number = len(self.processes)
        placement = PlacementGroup([pool.bundle], f"scorer.{number} of {replace(pool, count=1).describe()}")
        log, restarts = self._plan.folder.log("scorer", number), Restarts(self._plan.config.launch.max_restarts)
        self.processes.append(ScorerProcess("scorer", number, None, log, restarts, placement=placement, pool=pool.name))

    def _look_for_a_place(self, scorer: ScorerProcess) -> None:
        if scorer.placement.is_placed:
            self._spawn(scorer)
        elif scorer.placement.missing_s > PLACEMENT_S:
            self._lose(scorer, scorer.placement.shortage())

    def _spawn(self, scorer: ScorerProcess) -> None:
        assert self._context is not None, "start() comes first"
        config, pool = self._context.config, self._pools[scorer.pool]
        section = config.learner.alone(pool.bundle.get("GPU", 0.0))
        context: RunContext[LearnerSections] = replace(
            self._context, config=config.model_copy(update={"learner": section})
        )
        variables = {**(ON_GPU if pool.bundle.get("GPU") else {}), **self._plan.config.launch.env}
        on, threads = scorer.placement.reservation(0), config.learner.num_threads
        scorer.handle = spawn(ScorerRole, scorer.log, on=on, threads=threads, concurrency=4, variables=variables)
        scorer.started_s = time.monotonic()
        scorer.begin_work(scorer.handle.run.remote(context, scorer.number))

    def _start_again(self, scorer: ScorerProcess, why: str) -> None:
        ray.kill(scorer.handle, no_restart=True)  # it may have failed without dying
        if scorer.restarts.are_spent:
            self._lose(scorer, f"{why}; see {scorer.log}")
            return
        self._notify("restart", f"{scorer.name} died ({why}) and is started again; the learner scores meanwhile")
        scorer.forget()
        scorer.restarts.count()
        self._look_for_a_place(scorer)

    def _lose(self, scorer: ScorerProcess, why: str) -> None:
        self._end(scorer)
        scorer.lost = f"given up: {why}"
        self._notify("given_up", f"{scorer.name} is given up, and the learner scores in its place: {why}")

    def _end(self, scorer: ScorerProcess) -> None:
        if scorer.handle is not None:
            ray.kill(scorer.handle, no_restart=True)
        scorer.placement.release()
