"""Supervisor: starts all processes of a run, monitors and restarts them, and shuts them down."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ray

from leeway.actors.report import ActorReport, actor_name
from leeway.buffer.protocol import Status
from leeway.common.process import DaemonThreads
from leeway.common.run import STARTUP_S, RunContext
from leeway.common.staleness import PolicyVersion
from leeway.launch.checks import Plan
from leeway.launch.config import Config
from leeway.launch.observe.status import PollResult, ProcessStatus
from leeway.launch.pools import actor_pools
from leeway.launch.processes.actor_pools import EVALUATION_TIMEOUT_S, ActorPools, ActorProcess, Evaluation
from leeway.launch.processes.learner_group import LearnerGroup
from leeway.launch.processes.placement import PLACEMENT_S
from leeway.launch.processes.ray_cluster import RayWatch, abandon_ray, end_ray, start_ray
from leeway.launch.processes.role_process import MAX_RESTARTS, Notify, RoleProcess, RunFailed, done, results
from leeway.launch.processes.services import BufferHost, WeightsHost

SHUTDOWN_GRACE_S = 15.0
"""Seconds that actors and services have to stop before they are killed."""
SHORT_GRACE_S = 3.0
"""Grace period in seconds after an interrupt; short, because an actor whose engine is starting cannot respond."""
ENDING_S = 10.0
"""Seconds for the rest of the shutdown, in addition to the grace periods; after a timeout, Ray is killed."""
LOCAL_PLACEMENT_S = 15.0
"""Timeout in seconds of a worker's wait for resources on a single machine."""
POLL_TIMEOUT_S = 0.2
"""Timeout of a poll in seconds; the next poll returns a late reply."""
RANKER = "leeway.planning.ranking:RankerService"


def ranker(plan: Plan, notify: Notify) -> Any:  # noqa: ANN401 -- imported by name
    """Return the ranker if predicted lengths can decide which actor gets a prompt; else None.

    The ranker predicts completion lengths of new prompts. A slow or failed ranker neither delays nor ends the run.
    """
    dispatch = plan.config.buffer.dispatch
    if dispatch == "in_order" or (dispatch == "by_deadline" and len(actor_pools(plan.config)) == 1):
        return None
    return resolve_name(RANKER)(plan, notify)


class Supervisor:
    """Starts, monitors, restarts and shuts down every process of a run.

    A process that dies is restarted up to `MAX_RESTARTS` times in a row, and then given up. Services and actors are
    restarted one by one, the processes of the learner as a group.
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
        self.shutdown_grace_s = SHUTDOWN_GRACE_S
        """Seconds that `stop` waits for actors and services before it kills them."""
        self._reported: set[str] = set()
        """Senders whose invalid messages were already reported; the buffer limits the number of senders."""

    # --- start ------------------------------------------------------------------------------------

    def start(self, progress: Callable[[str], None]) -> None:
        """Start Ray and all roles, and wait until all roles are ready; raise RunFailed if a role is late."""
        config = self._config.launch
        progress("starting Ray")
        self._ray = start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        self.learner.request_placement()
        self.actors.request_placement()
        hosts_may_join = config.ray_address is not None
        limit_s = PLACEMENT_S if hosts_may_join else LOCAL_PLACEMENT_S
        self.learner.placement.wait(limit_s, hosts_may_join=hosts_may_join)
        num_stages = self._config.learner.num_stages * self._config.learner.num_replicas
        reported = _loading(len(self.actors.actors), num_stages)
        progress(reported)
        deadline = time.monotonic() + STARTUP_S
        # start the actors first, because loading vLLM is the longest part of the startup
        self.actors.spawn(limit_s, hosts_may_join=hosts_may_join)
        self.learner.spawn()
        self._weights.start(deadline)
        self._buffer.start(deadline)
        buffer, weights = self._buffer.address, self._weights.address
        context = replace(self._context, buffer_address=buffer, weights_address=weights)
        calls = [*self.actors.start(context), *self.learner.start(context, deadline)]
        if self._ranker is not None:
            self._ranker.start(context)

        def report() -> None:
            nonlocal reported
            self._check_ray()
            waiting = [process.role for process, call in calls if not done(call)]
            text = _loading(waiting.count("actor"), waiting.count("stage"))
            if waiting and text != reported:
                progress(text)
                reported = text

        results(calls, "to be ready", deadline, report)

    def begin(self) -> None:
        self.learner.begin()
        self.actors.begin()

    def _check_ray(self) -> None:
        if self._ray is not None:
            self._ray.check()

    def _watch_services(self) -> None:
        """Restart exited services; raise RunFailed if a service exited too often, or if Ray died."""
        self._weights.watch()
        self._buffer.watch()

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = POLL_TIMEOUT_S) -> PollResult:
        """Collect the reports of all roles and restart dead roles; raise RunFailed if a required role is given up."""
        self._watch_services()
        self.learner.watch()
        result = self.learner.poll(timeout_s)
        if result.resumed_at is not None:
            self._drain_again()
        if self._ranker is not None:
            self._ranker.watch()
        working = self.actors.watch()
        result.working = frozenset(actor_name(actor.number) for actor in working)
        result.quarantined, result.desired = tuple(self.actors.quarantined), dict(self.actors.desired)
        result.processes = self.processes()
        result.actors = self._reports(working, timeout_s)
        result.status = self.status()
        for sender, invalid in result.status.invalid_messages.items():
            if sender not in self._reported:
                self._reported.add(sender)
                text = f"the buffer rejects messages from {sender}; the first: {invalid.first}"
                self._notify("invalid_messages", text)
        return result

    def poll_actors(self) -> PollResult:
        """Return the reports of ready actors, without restarts, for an evaluation before or after training."""
        ready = self.actors.ready()
        names = frozenset(actor_name(actor.number) for actor in ready)
        return PollResult(actors=self._reports(ready, POLL_TIMEOUT_S), working=names, processes=self.processes())

    def _reports(self, actors: Sequence[ActorProcess], timeout_s: float) -> list[ActorReport]:
        reports = []
        for actor in actors:
            report = actor.ask("report", timeout_s, self._notify)
            if report is not None:
                if report.task_fingerprint != self._plan.task.fingerprint:
                    raise RunFailed(
                        f"the prompts of {actor.name} differ from those of the launcher, so its samples would answer "
                        f"wrong prompts: install the same task files and reasoning-gym on its host; see {actor.log}"
                    )
                reports.append(report)
        return reports

    def processes(self) -> tuple[ProcessStatus, ...]:
        """Return the current status of all services, learner stages and actors, without blocking."""
        rankers: Sequence[RoleProcess] = () if self._ranker is None else self._ranker.processes
        return (
            *(each.facts() for each in (*self._buffer.processes, *self._weights.processes, *rankers)),
            *self.learner.facts(),
            *(each.facts() for each in self.actors.actors),
        )

    # --- evaluate, drain, end ---------------------------------------------------------------------

    def evaluate(self, num_problems: int, min_version: PolicyVersion | None) -> Evaluation:
        """Start a held-out evaluation of `min_version` or a later version on the ready actors.

        Blocks until an actor is ready. During training, call `evaluate` only while an actor is ready.
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
        """Let the learner write a checkpoint and stop after its current step; grant actors no further leases."""
        self.learner.request_stop()
        self.actors.stop_requested = True
        self.drain()

    def drain(self) -> None:
        """Let the buffer grant actors no further leases, even if the learner restarts."""
        self._drained = True
        self._drain_again()

    def _drain_again(self) -> None:
        """Let the buffer stop its leases again, because a restarted learner enables them."""
        if self._drained:
            self._buffer.ask(lambda client: client.drain())

    def status(self) -> Status:
        return self._buffer.ask(lambda client: client.status())

    def export(self, folder: Path) -> None:
        self.learner.export(folder)
        self._drain_again()

    def stop(self) -> None:
        """Stop every process; kill processes that do not stop within the grace periods. Idempotent."""
        try:
            self._buffer.close()
        finally:
            self._end_processes()

    def _end_processes(self) -> None:
        with contextlib.suppress(RunFailed):  # Ray may have died since the last check
            self._check_ray()
        if self._ray is not None and self._ray.is_dead:
            abandon_ray(self._ray)
            return
        if not ray.is_initialized():
            end_ray()  # the start of Ray may have been interrupted
            return
        # use a thread: if a signal to every process killed processes of Ray, calls to Ray block for minutes
        ending = DaemonThreads("ending", max_threads=1).submit(self._end_gracefully)
        try:
            ending.result(2 * self.shutdown_grace_s + ENDING_S)
        except TimeoutError:
            if self._ray is None:
                raise
            abandon_ray(self._ray)

    def _end_gracefully(self) -> None:
        # stop the actors first, because they requeue samples through the services
        self.actors.stop(self.shutdown_grace_s)
        if self._ranker is not None:
            self._ranker.stop()
        if calls := self._buffer.request_stop() + self._weights.request_stop():
            ray.wait(calls, num_returns=len(calls), timeout=self.shutdown_grace_s)
        self.learner.kill()
        self._buffer.kill()
        self._weights.kill()
        end_ray()
        if self._ray is not None:
            self._ray.close()


def _loading(num_actors: int, num_stages: int) -> str:
    counts = {"vLLM in {} actor": num_actors, "the model in {} learner stage": num_stages}
    return f"loading {' and '.join(text.format(count) + 's' * (count > 1) for text, count in counts.items() if count)}"
