"""The processes of a run: started together, watched, restarted where that loses nothing, ended together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from actors.report import ActorReport, actor_name
from buffer.protocol import Status
from common.run import RunContext
from common.staleness import PolicyVersion
from launch.checks import Plan
from launch.config import Config
from launch.observe.status import PollResult, ProcessStatus
from launch.processes.actor_pools import ActorPools, ActorProcess
from launch.processes.evaluation import EVALUATION_SHARE, Evaluation
from launch.processes.learner_group import LearnerGroup
from launch.processes.placement import PLACEMENT_S
from launch.processes.ray_cluster import RayWatch, abandon_ray, end_ray, start_ray
from launch.processes.role_process import SILENCE_S, RunFailed, all_results
from launch.processes.services import BufferServices, WeightServices

SERVICE_GOODBYE_S = 5.0
"""How long the services may take to end by themselves before they are killed."""
LOCAL_PLACEMENT_S = 15.0
"""How long a worker waits for resources of this machine alone; what the machine does not have is not waited for."""


class Supervisor:
    """Starts, watches and ends every process of a run.

    States of a process: started -> running -> finished, or running -> died -> started again
    (up to launch.max_restarts times in a row: services and actors singly, the learner as a whole), or given up.
    """

    def __init__(self, plan: Plan, context: RunContext[Config], notify: Callable[[str, str], None]) -> None:
        """Nothing is started yet.

        Args:
            plan: the checked config and the run's folder.
            context: of the run, as `Plan.context` makes it.
            notify: called with (kind, text) whenever something worth an event happens.
        """
        self._plan = plan
        self._config = plan.config
        self._context = context
        self._notify = notify
        self._ray: RayWatch | None = None
        self._buffer = BufferServices(plan, context.facts, notify, self._check_ray)
        self._weights = WeightServices(plan, notify, self._check_ray)
        self._learner = LearnerGroup(plan, notify, self._watch_services)
        self._actors = ActorPools(plan, notify, self._check_ray)
        self._drained = False

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and every role; returns when all are ready.

        Raises:
            RunFailed: a role failed to start, or did not within launch.startup_timeout_s.
        """
        config = self._config.launch
        self._ray = start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        self._learner.ask_for_places()
        self._actors.ask_for_places()
        others_come = config.ray_address is not None
        limit_s = PLACEMENT_S if others_come else LOCAL_PLACEMENT_S
        self._learner.wait_for_places(limit_s, others_come=others_come)
        deadline = time.monotonic() + config.startup_timeout_s
        self._weights.start(deadline)
        self._buffer.start(deadline)
        context = replace(
            self._context,
            buffer_addresses=tuple(self._buffer.addresses),
            weights_address=self._weights.address,
        )
        stages = self._learner.start(context, deadline)
        calls = [*stages, *self._actors.start(context, limit_s, others_come=others_come)]
        all_results(calls, "to be ready", deadline, self._check_ray)

    def begin(self) -> None:
        """Begin to learn and to generate."""
        self._learner.begin()
        self._actors.begin()

    def _check_ray(self) -> None:
        """Ray lives.

        Raises:
            RunFailed: it does not; whatever waits for it waits in vain.
        """
        if self._ray is not None:
            self._ray.check()

    def _watch_services(self) -> None:
        """Buffer and weight service are there, or are started again; so it is also while nothing else is polled.

        Raises:
            RunFailed: one ended too often, or Ray died.
        """
        self._weights.watch()
        self._buffer.watch()

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, patience_s: float = 0.2) -> PollResult:
        """Ask every role for news and restart what died.

        Args:
            patience_s: how long to wait for one answer; a later one is taken at the next poll.

        Raises:
            RunFailed: a role that the run cannot go on without is gone.
        """
        self._watch_services()
        self._learner.watch()
        news = self._learner.poll(patience_s)
        if news.resumed_at is not None:
            self._drain_again()
        working = self._actors.watch()
        news.working = frozenset(actor_name(actor.number) for actor in working)
        news.quarantined, news.wanted = tuple(self._actors.quarantined), dict(self._actors.wanted)
        news.processes = self.processes()
        for actor in working:
            report = actor.ask("report", patience_s, self._notify)
            if report is not None:
                self._check_task(actor, report)
                news.actors.append(report)
        news.status = self.status()
        return news

    def processes(self) -> tuple[ProcessStatus, ...]:
        """Buffer, weights, stages, actors, as they are now; waits for none of them."""
        services = [*self._buffer.processes, *self._weights.processes]
        actors = self._actors.actors
        return (
            *(each.facts() for each in services),
            *self._learner.facts(),
            *(each.facts() for each in actors),
        )

    def _check_task(self, actor: ActorProcess, report: ActorReport) -> None:
        if report.task_fingerprint != self._plan.task.fingerprint:
            raise RunFailed(
                f"{actor.name} sees other prompts than this command does, so its groups would be mixed up: "
                f"its files or its reasoning-gym differ from those here; see {actor.log}"
            )

    def last_poll(self) -> list[PollResult]:
        """What is left to tell once the learner is over: the answer still owed, and all since."""
        return [self.poll(SILENCE_S), self.poll(SILENCE_S)]

    def quarantine(self, name: str, why: str) -> None:
        """Take an actor out of the run; see `ActorPools.quarantine`.

        Raises:
            RunFailed: no other actor is left.
        """
        self._actors.quarantine(name, why)

    def scale(self, pool: str, count: int) -> str:
        """Let a pool have another number of actors; see `ActorPools.scale`.

        Raises:
            ValueError: it cannot.
        """
        return self._actors.scale(pool, count)

    # --- evaluate, drain, end ---------------------------------------------------------------------

    def learning_is_over(self) -> bool:
        """True when every stage has returned from its last step."""
        return self._learner.are_finished

    def evaluate(self, num_problems: int, min_version: PolicyVersion | None) -> Evaluation:
        """Begin a held-out evaluation on the actors; training goes on where it can.

        Args:
            num_problems: how many held-out problems.
            min_version: the version to evaluate at the earliest; None: whichever each actor has.
        """
        return Evaluation(
            self._actors.ready,
            num_problems,
            min_version,
            EVALUATION_SHARE * self._config.learner.batch_timeout_s,
            max_retries=self._config.launch.max_restarts,
            check=self._watch_services,
        )

    def request_stop(self) -> None:
        """Ask the learner to end after the step at hand, with a checkpoint, and close admission."""
        self._learner.request_stop()
        self.drain()

    def drain(self) -> None:
        """Grant no further leases, whatever happens to the learner from now on."""
        self._drained = True
        self._drain_again()

    def _drain_again(self) -> None:
        """A learner that is started again opens admission, also where the run was over."""
        if self._drained:
            self._buffer.ask(lambda client: client.drain())

    def status(self) -> Status:
        """The ledger and what is in flight."""
        return self._buffer.ask(lambda client: client.status())

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; all stages take part."""
        self._learner.export(folder)
        self._drain_again()

    def stop(self) -> None:
        """End every process, politely where there is time. Safe to call at any moment, more than once."""
        try:
            self._buffer.close()
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        with contextlib.suppress(RunFailed):  # it may have died since the last look
            self._check_ray()
        if self._ray is not None and self._ray.is_dead:
            abandon_ray(self._ray)
            return
        if not ray.is_initialized():
            end_ray()  # it may have been stopped in the middle of its start
            return
        # the actors first: what they hand back goes to the services
        self._actors.stop()
        _wait_for(self._buffer.ask_to_stop() + self._weights.ask_to_stop(), SERVICE_GOODBYE_S)
        self._learner.kill()
        self._buffer.kill()
        self._weights.kill()
        end_ray()
        if self._ray is not None:
            self._ray.close()


def _wait_for(calls: list[Any], limit_s: float) -> None:
    """Until they have ended, well or badly, but no longer than this."""
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=limit_s)
