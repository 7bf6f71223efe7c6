"""A held-out evaluation in progress: one shard per actor, done again elsewhere where an actor dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.report import EvalCounts, EvalRequest, EvalResult
from common.staleness import PolicyVersion
from launch.observe.status import Accuracy
from launch.processes.actor_pools import ActorProcess
from launch.processes.actor_role import told_to_end
from launch.processes.role_process import Check, RunFailed, done, reason

EVALUATION_TIMEOUT_S = 6000.0
"""An evaluating actor makes no samples, and the learner (`learner.coordinator.BATCH_TIMEOUT_S`) must not time out
first."""


@dataclass(frozen=True)
class _Asked:
    """A shard and the actor that evaluates it."""

    request: EvalRequest
    actor: ActorProcess
    handle: Any
    """Of the process that was asked; the actor may have been restarted since."""
    call: Any


class Evaluation:
    """Spread over the actors that are ready; `poll` until it gives the results."""

    def __init__(
        self,
        actors: Sequence[ActorProcess],
        ready_actors: Callable[[], Sequence[ActorProcess]],
        num_problems: int,
        min_version: PolicyVersion | None,
        timeout_s: float,
        max_retries: int,
        check: Check = lambda: None,
    ) -> None:
        """Start it on these actors, at least one, at `min_version` or whichever each has.

        What one of them fails at is repeated by those that `ready_actors` gives, `max_retries` times, beside the shards
        of actors that are leaving or have left.
        """
        self._ready_actors = ready_actors
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._retries_left = max_retries
        self._check = check
        self._pending: list[_Asked] = []
        self._unsent: list[EvalRequest] = []
        """Shards that wait for a ready actor."""
        self._results: list[EvalResult] = []
        for shard, actor in enumerate(actors):
            asked = EvalRequest(num_problems=num_problems, shard=shard, num_shards=len(actors), min_version=min_version)
            self._send(asked, actor)

    def poll(self) -> list[EvalResult] | None:
        """Return the results of all shards; None if some are missing. RunFailed after too many failures, or the
        timeout.
        """
        self._check()
        pending, self._pending = self._pending, []
        for asked in pending:
            if not done(asked.call):
                self._pending.append(asked)
                continue
            try:
                self._results.append(ray.get(asked.call))
            except (RayActorError, RayTaskError) as error:
                self._again(asked, error)
        if self._unsent and (ready := self._ready_actors()):
            for request, actor in zip(self._unsent, cycle(ready), strict=False):
                self._send(request, actor)
            self._unsent = []
        if not self._pending and not self._unsent:
            return self._results
        if time.monotonic() > self._deadline:
            names = ", ".join(asked.actor.name for asked in self._pending) or "actors, of which none is ready,"
            raise RunFailed(
                f"{names} did not finish an evaluation within {self._timeout_s:g} s: evaluate fewer problems"
            )
        return None

    def _again(self, asked: _Asked, error: RayActorError | RayTaskError) -> None:
        """Retry on another actor, if allowed."""
        actor, was_told = asked.actor, told_to_end(error) is not None
        if not actor.is_going and not was_told:
            if self._retries_left == 0:
                raise RunFailed(f"{actor.name} failed to evaluate: {reason(error)}; {actor.see}") from None
            self._retries_left -= 1
        if (was_told or isinstance(error, RayActorError)) and actor.handle is asked.handle:
            actor.running = asked.call  # its work has ended: it is not ready, and will be started again
        self._unsent.append(asked.request)

    def _send(self, request: EvalRequest, actor: ActorProcess) -> None:
        actor.evaluating = actor.handle.evaluate.remote(request)
        self._pending.append(_Asked(request, actor, actor.handle, actor.evaluating))


def accuracy_of(results: Sequence[EvalResult]) -> Accuracy:
    greedy = sum((result.greedy for result in results), start=EvalCounts())
    sampled = sum((result.sampled for result in results), start=EvalCounts())
    versions = sorted({result.version for result in results})
    newest = max(versions, default=PolicyVersion(0, 0))
    return Accuracy(
        versions=", ".join(map(str, versions)),
        policy_version=newest.version,
        start=newest.incarnation,
        greedy=greedy.accuracy,
        sampled=sampled.accuracy,
        num_problems=sum(result.num_problems for result in results),
        num_failed=greedy.num_failed + sampled.num_failed,
    )
