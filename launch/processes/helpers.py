"""Helpers: processes that make a run better, which it neither waits for nor ends with.

Scorers  the workers of pools of role "scorer", which score ahead of the learner
ranker   what predicts how long answers to new prompts are, if that decides who gets them; loaded from `planning`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from common.process import uncollected
from common.run import RunContext
from launch.checks import Plan
from launch.config import Config
from launch.pools import WorkerPool, actor_pools, scorer_pools
from launch.processes.placement import ON_GPU, PLACEMENT_S, PlacedProcess, place_of, spawn
from launch.processes.role_process import Notify, Restarts, Role, done, outcome

if TYPE_CHECKING:
    from learner.config import LearnerSections

RANKER = "planning.ranker_service:RankerService"


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


class Helpers(ABC):
    """Starts helpers where there is room, and again what died, up to launch.max_restarts times in a row.

    A helper: waiting for resources -> working -> died -> waiting ..., or lost: it died too often, or found no host
    """

    def __init__(self, plan: Plan, notify: Notify, role: str, pools: Sequence[WorkerPool], without: str) -> None:
        """Start nothing yet. `without` says for people what is so while a helper is not there."""
        self._plan, self._notify = plan, notify
        self._role, self._without = role, without
        self._pools = {pool.name: pool for pool in pools}
        self._context: RunContext[Config] | None = None
        self.processes: list[PlacedProcess] = []

    def start(self, context: RunContext[Config]) -> None:
        """Ask for a place for each, and start what has one; returns at once."""
        self._context = context
        limit = self._plan.config.launch.max_restarts
        workers = [pool for pool in self._pools.values() for _ in range(pool.count)]
        for number, pool in enumerate(workers):
            log, place = self._plan.folder.log(self._role, number), place_of(self._role, number, pool)
            process = PlacedProcess(self._role, number, None, log, Restarts(limit), placement=place, pool=pool.name)
            self.processes.append(process)
        self.watch()

    def watch(self) -> None:
        """Start what has found a place, and again what died."""
        for helper in self.processes:
            if helper.lost:
                continue
            if helper.handle is None:
                self._look_for_a_place(helper)
            elif done(helper.running):
                self._start_again(helper, outcome(helper.running) or "it ended")

    def stop(self) -> None:
        """End all; others do what they were at."""
        for helper in self.processes:
            helper.end()
        self.processes = []

    @abstractmethod
    def _spawn(self, helper: PlacedProcess, context: RunContext[Config]) -> tuple[Any, Any]:
        """Start its process in its place: the handle of it, and the pending call that is its work."""

    def _look_for_a_place(self, helper: PlacedProcess) -> None:
        assert self._context is not None, "start() comes first"
        if helper.placement.is_placed:
            helper.handle, call = self._spawn(helper, self._context)
            helper.begin_work(call)
        elif helper.placement.missing_s > PLACEMENT_S:
            self._give_up(helper, helper.placement.shortage())

    def _start_again(self, helper: PlacedProcess, why: str) -> None:
        helper.kill()  # it may have failed without dying
        if helper.restarts.are_spent:
            self._give_up(helper, f"{why}; {helper.see}")
            return
        self._notify("restart", f"{helper.name} died ({why}) and is started again; {self._without} meanwhile")
        helper.forget()
        helper.restarts.count()
        self._look_for_a_place(helper)

    def _give_up(self, helper: PlacedProcess, why: str) -> None:
        helper.lose(f"given up: {why}")
        self._notify("given_up", f"{helper.name} is given up, and {self._without} from now on: {why}")


class Scorers(Helpers):
    """The scorers of all pools; each holds a whole reference model, whatever the learner is split into."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        super().__init__(plan, notify, "scorer", scorer_pools(plan.config), "the learner scores itself")

    def _spawn(self, helper: PlacedProcess, context: RunContext[Config]) -> tuple[Any, Any]:
        config, reserved = context.config, self._pools[helper.pool].bundle
        num_gpus = reserved.get("GPU", 0.0)
        learner = config.learner.alone(num_gpus, reserved.get("CPU", 0.0))
        variables = {**(ON_GPU if num_gpus else {}), **self._plan.config.launch.env}
        on = helper.placement.reservation(0)
        handle = spawn(ScorerRole, helper.log, on=on, concurrency=4, variables=variables)
        alone = replace(context, config=config.model_copy(update={"learner": learner}))
        return handle, handle.run.remote(alone, helper.number)


def ranker(plan: Plan, notify: Notify) -> list[Helpers]:
    """Return the ranker of a run that dispatches by lengths, if they may decide who gets a prompt."""
    dispatch = plan.config.buffer.dispatch
    if dispatch == "in_order" or (dispatch == "by_deadline" and len(actor_pools(plan.config)) == 1):
        return []
    return [resolve_name(RANKER)(plan, notify)]
