"""The processes of a run: started together, watched, restarted, ended together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray

from actors.report import ActorReport, actor_name
from buffer.protocol import Status
from common.process import DaemonThreads
from common.run import STARTUP_S, RunContext
from common.staleness import PolicyVersion
from launch.checks import Plan
from launch.config import Config
from launch.observe.status import PollResult, ProcessStatus
from launch.pools import actor_pools
from launch.processes.actor_pools import EVALUATION_TIMEOUT_S, ActorPools, ActorProcess, Evaluation
from launch.processes.learner_group import LearnerGroup
from launch.processes.placement import PLACEMENT_S
from launch.processes.ray_cluster import RayWatch, abandon_ray, end_ray, start_ray
from launch.processes.role_process import MAX_RESTARTS, Notify, RoleProcess, RunFailed, done, results
from launch.processes.services import BufferHost, WeightsHost

GOODBYE_S = 15.0
"""Grace period of actors and services before they are killed."""
HURRIED_GOODBYE_S = 3.0
"""The same if the run was stopped: an actor whose engine is starting answers nothing."""
ENDING_S = 10.0
"""What their end takes beside the grace periods; then Ray is given up."""
LOCAL_PLACEMENT_S = 15.0
"""Timeout of a worker's wait for resources of this machine alone."""
PATIENCE_S = 0.2
"""Timeout of a poll's answer; a later one is taken at the next poll."""
RANKER = "planning.ranking:RankerService"


def ranker(plan: Plan, notify: Notify) -> Any:  # noqa: ANN401 -- it is loaded
    """Return the ranker of a run that dispatches by lengths, if they may decide which actor gets a prompt; else None.

    It predicts how long answers to new prompts are; the run neither waits for it nor ends with it.
    """
    dispatch = plan.config.buffer.dispatch
    if dispatch == "in_order" or (dispatch == "by_deadline" and len(actor_pools(plan.config)) == 1):
        return None
    return resolve_name(RANKER)(plan, notify)


class Supervisor:
    """Starts, watches and ends every process of a run.

    States of a process: started -> running -> finished, or running -> died -> started again
    (up to `MAX_RESTARTS` times in a row: services and actors singly, the learner as a whole), or given up.
    """

    def __init__(self, plan: Plan, context: RunContext[Config], notify: Notify) -> None:
        self._plan = plan
        self._config = plan.config
        self._context = context
        self._notify = notify
        self._ray: RayWatch | None = None
        self._buffer = BufferHost(plan, context.facts, notify, self._check_ray)
        self._weights = WeightsHost(plan, notify, self._check_ray)
        self.learner = LearnerGroup(plan, notify, self._watch_services)
        self.actors = ActorPools(plan, notify, self._check_ray)
        self._ranker = ranker(plan, notify)
        self._drained = False
        self.goodbye_s = GOODBYE_S
        """Grace period of `stop`."""
        self._told_of: set[str] = set()
        """Senders of invalid messages; the buffer tells a bounded number of them apart."""

    # --- start ------------------------------------------------------------------------------------

    def start(self, progress: Callable[[str], None]) -> None:
        """Start Ray and every role and wait until all are ready; RunFailed if one does not start in time."""
        config = self._config.launch
        progress("starting Ray (the whole start takes about half a minute)")
        self._ray = start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        progress("starting the services, while stages and actors load their libraries")
        self.learner.ask_for_places()
        self.actors.ask_for_places()
        others_come = config.ray_address is not None
        limit_s = PLACEMENT_S if others_come else LOCAL_PLACEMENT_S
        self.learner.placement.wait(limit_s, others_come=others_come)
        deadline = time.monotonic() + STARTUP_S
        # an actor first: to load vLLM is the longest part of a start
        self.actors.spawn(limit_s, others_come=others_come)
        self.learner.spawn()
        self._weights.start(deadline)
        self._buffer.start(deadline)
        buffer, weights = self._buffer.address, self._weights.address
        context = replace(self._context, buffer_address=buffer, weights_address=weights)
        calls = [*self.actors.start(context), *self.learner.start(context, deadline)]
        if self._ranker is not None:
            self._ranker.start(context)
        told = ""

        def look() -> None:
            nonlocal told
            self._check_ray()
            waiting = [process.name for process, call in calls if not done(call)]
            text = f"starting: {len(calls) - len(waiting)} of {len(calls)} are ready; not yet {', '.join(waiting)}"
            if waiting and text != told:
                progress(text)
                told = text

        results(calls, "to be ready", deadline, look)

    def begin(self) -> None:
        self.learner.begin()
        self.actors.begin()

    def _check_ray(self) -> None:
        if self._ray is not None:
            self._ray.check()

    def _watch_services(self) -> None:
        """Restart the services; also while nothing else is polled. RunFailed if one ended too often, or Ray died."""
        self._weights.watch()
        self._buffer.watch()

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, patience_s: float = PATIENCE_S) -> PollResult:
        """Ask every role for news and restart what died; RunFailed if a role that the run needs is gone."""
        self._watch_services()
        self.learner.watch()
        news = self.learner.poll(patience_s)
        if news.resumed_at is not None:
            self._drain_again()
        if self._ranker is not None:
            self._ranker.watch()
        working = self.actors.watch()
        news.working = frozenset(actor_name(actor.number) for actor in working)
        news.quarantined, news.wanted = tuple(self.actors.quarantined), dict(self.actors.wanted)
        news.processes = self.processes()
        news.actors = self._reports(working, patience_s)
        news.status = self.status()
        for sender, told in news.status.nonsense.items():
            if sender not in self._told_of:
                self._told_of.add(sender)
                self._notify("nonsense", f"the buffer refuses some of what {sender} sends, at first: {told.first}")
        return news

    def hear_actors(self) -> PollResult:
        """Return the reports of ready actors while they evaluate before or after training; restart nothing."""
        ready = self.actors.ready()
        names = frozenset(actor_name(actor.number) for actor in ready)
        return PollResult(actors=self._reports(ready, PATIENCE_S), working=names, processes=self.processes())

    def _reports(self, actors: Sequence[ActorProcess], patience_s: float) -> list[ActorReport]:
        reports = []
        for actor in actors:
            report = actor.ask("report", patience_s, self._notify)
            if report is not None:
                if report.task_fingerprint != self._plan.task.fingerprint:
                    raise RunFailed(
                        f"{actor.name} sees other prompts than this command does, so its groups would be mixed up: "
                        f"its files or its reasoning-gym differ from those here; see {actor.log}"
                    )
                reports.append(report)
        return reports

    def processes(self) -> tuple[ProcessStatus, ...]:
        """Return buffer, weights, ranker, stages, actors, as they are now; never blocks."""
        rankers: Sequence[RoleProcess] = () if self._ranker is None else self._ranker.processes
        return (
            *(each.facts() for each in (*self._buffer.processes, *self._weights.processes, *rankers)),
            *self.learner.facts(),
            *(each.facts() for each in self.actors.actors),
        )

    # --- evaluate, drain, end ---------------------------------------------------------------------

    def evaluate(self, num_problems: int, min_version: PolicyVersion | None) -> Evaluation:
        """Begin a held-out evaluation on the actors, of this version at the earliest.

        It waits for a ready actor, so in training it is called only while there is one.
        """
        return Evaluation(
            self.actors.wait_until_ready(),
            self.actors.ready,
            num_problems,
            min_version,
            EVALUATION_TIMEOUT_S,
            max_retries=MAX_RESTARTS,
            check=self._watch_services,
        )

    def request_stop(self) -> None:
        """End the learner after the step at hand, with a checkpoint, and close admission."""
        self.learner.request_stop()
        self.actors.are_ending = True
        self.drain()

    def drain(self) -> None:
        """Grant no further leases, whatever happens to the learner."""
        self._drained = True
        self._drain_again()

    def _drain_again(self) -> None:
        """Close admission again, which a restarted learner opens."""
        if self._drained:
            self._buffer.ask(lambda client: client.drain())

    def status(self) -> Status:
        return self._buffer.ask(lambda client: client.status())

    def export(self, folder: Path) -> None:
        self.learner.export(folder)
        self._drain_again()

    def stop(self) -> None:
        """End every process, in order if there is time. Idempotent."""
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
        # in a thread, for a Ray that is half dead, as where every process got a signal, answers nothing for minutes
        ending = DaemonThreads("ending", max_threads=1).submit(self._end_politely)
        try:
            ending.result(2 * self.goodbye_s + ENDING_S)
        except TimeoutError:
            if self._ray is None:
                raise
            abandon_ray(self._ray)

    def _end_politely(self) -> None:
        # the actors first: what they hand back goes to the services
        self.actors.stop(self.goodbye_s)
        if self._ranker is not None:
            self._ranker.stop()
        if goodbyes := self._buffer.ask_to_stop() + self._weights.ask_to_stop():
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=self.goodbye_s)
        self.learner.kill()
        self._buffer.kill()
        self._weights.kill()
        end_ray()
        if self._ray is not None:
            self._ray.close()
