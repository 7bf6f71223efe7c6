"""Start and stop single actors of the pools while other actors generate, and run evaluations on the actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import ceil
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from leeway.actors.config import READY_ENV, ActorSections
from leeway.actors.report import EvalCounts, EvalRequest, EvalResult, actor_name
from leeway.common.run import STARTUP_S, RunContext
from leeway.common.staleness import PolicyVersion
from leeway.launch.checks import Plan
from leeway.launch.config import Config
from leeway.launch.observe.status import Accuracy
from leeway.launch.pools import ActorPool, actor_pools
from leeway.launch.processes.actor_role import SHUTDOWN_GRACE_S, ActorRole, Terminated, terminated
from leeway.launch.processes.placement import PLACEMENT_S, PlacedProcess, place_of, spawn
from leeway.launch.processes.role_process import (
    MAX_RESTARTS,
    SILENCE_S,
    Check,
    Notify,
    Restarts,
    RoleProcess,
    RunFailed,
    done,
    failure,
    outcome,
    reason,
)

MAX_SIGTERMS = 10
"""Maximum number of restarts after SIGTERM in a row; after the next SIGTERM, the actor is not restarted."""
MAX_UNRESERVED = 1024
"""Maximum number of actors that can be added to a pool if they reserve no resources."""
SIGTERM_RESET_S = 600.0
"""Seconds of work after which the count of SIGTERMs starts again at 0."""
EVALUATION_TIMEOUT_S = 6000.0
"""Timeout of an evaluation; below the learner's `BATCH_TIMEOUT_S`, as an evaluating actor generates no samples."""


@dataclass
class ActorProcess(PlacedProcess):
    """One actor, with its state machine.

    waiting for resources -> starting -> ready, evaluating -> working -> finished
             ^---------- died, or exited on SIGTERM ---' '-> leaving -> removed (the pool was scaled down)
    lost is final: the actor died or received SIGTERM too often, found no host, or was quarantined
    """

    starting: Any = None
    """Pending call that returns when the actor is ready."""
    evaluating: Any = None
    leaving: Any = None
    """Pending call that stops the actor; set when its pool is scaled down."""
    after_sigterm: Restarts = field(default_factory=lambda: Restarts(MAX_SIGTERMS, SIGTERM_RESET_S))
    """Counts restarts after SIGTERM; `restarts` counts restarts after failures."""
    _disconnected_s: float | None = None
    """Monotonic time at which the connection to the actor was lost; None while connected."""

    @property
    def state(self) -> str:
        if self.leaving is not None and not self.lost:
            return "leaving"
        state, evaluating = super().state, self.evaluating  # read once: another thread may set `evaluating`
        if state not in ("starting", "finished"):  # an actor that works and evaluates counts as working
            return state
        if evaluating is not None and not done(evaluating):
            return "evaluating"
        return "ready" if state == "starting" and self.is_ready else state

    @property
    def is_going(self) -> bool:
        """Whether the actor is lost or leaving; failures of such an actor are ignored."""
        return bool(self.lost) or self.leaving is not None

    @property
    def is_ready(self) -> bool:
        """Whether the actor has started, its work has not failed, and the actor is neither lost nor leaving."""
        starting = self.starting  # read once: another thread may set it
        if self.is_going or self.handle is None or starting is None or not done(starting) or outcome(starting):
            return False
        return self.running is None or not done(self.running) or not outcome(self.running)

    def begin_work(self, call: Any) -> None:  # noqa: ANN401 -- as in RoleProcess
        super().begin_work(call)
        self.after_sigterm.working_since_s = self.restarts.working_since_s

    def forget(self) -> None:
        super().forget()
        self.starting = self.evaluating = self._disconnected_s = None

    def reconnect(self, timeout_s: float, notify: Notify) -> bool:
        """Call `run` again and return True if only the connection was lost; return False after `timeout_s` without one.

        If the process died, the new call fails with the cause. Ray declares a host dead that stays unreachable.
        """
        error = failure(self.running)
        if not isinstance(error, ActorUnavailableError):
            return False
        now_s = time.monotonic()
        if self._disconnected_s is None or now_s - self._disconnected_s > 2 * timeout_s:
            self._disconnected_s = now_s
            notify("unreachable", f"lost the connection to {self.name} ({reason(error)}); retrying")
        if now_s - self._disconnected_s > timeout_s:
            return False
        self.running = self.handle.run.remote()
        return True


class ActorPools:
    """Starts the actors of all pools, restarts dead actors a limited number of times, and scales the pools."""

    def __init__(self, plan: Plan, notify: Notify, check: Check = lambda: None) -> None:
        self._plan = plan
        self._context: RunContext[Config] | None = None
        self._notify = notify
        self._check = check
        self._config = plan.config
        self.pools = {pool.name: pool for pool in actor_pools(plan.config)}
        """Maps the name of a pool to the pool with its initial number of actors."""
        self.desired = {name: pool.count for name, pool in self.pools.items()}
        """Desired number of actors of each pool; a lost actor is not replaced until the pool is scaled."""
        self.actors: list[ActorProcess] = []
        """All actors that were not removed, including lost actors."""
        self._next_number = 0
        self.stop_requested = False
        """Whether the run is stopping; dead actors are then not restarted."""
        self.quarantined: list[str] = []
        """Names of the actors that were quarantined because of their weights."""

    # --- life -------------------------------------------------------------------------------------

    def request_placement(self) -> None:
        """Request resources for every actor, without blocking."""
        for pool in self.pools.values():
            for _ in range(pool.count):
                self._add_actor(pool)

    def spawn(self, timeout_s: float, *, hosts_may_join: bool) -> None:
        """Start the process of each actor as soon as the actor has its resources."""
        for actor in self.actors:
            actor.placement.wait(timeout_s, hosts_may_join=hosts_may_join)
            self._spawn(actor)

    def start(self, context: RunContext[Config]) -> list[tuple[RoleProcess, Any]]:
        """Send the context to all actors; return the calls that end when the actors are ready."""
        self._context = context
        for actor in self.actors:
            self._start(actor)
        return [(actor, actor.starting) for actor in self.actors]

    def begin(self) -> None:
        for actor in self.actors:
            if actor.running is None and actor.is_ready:  # `watch` begins the work of other actors when they are ready
                actor.begin_work(actor.handle.run.remote())

    def stop(self, shutdown_grace_s: float) -> None:
        alive = [actor for actor in self.actors if not actor.lost and actor.handle is not None]
        if calls := [actor.leaving or actor.handle.stop.remote() for actor in alive]:
            ray.wait(calls, num_returns=len(calls), timeout=shutdown_grace_s)
        for actor in self.actors:
            actor.end()
        self.actors = []

    # --- watch ------------------------------------------------------------------------------------

    def watch(self) -> list[ActorProcess]:
        """Restart dead actors and return the working actors; raise RunFailed if no actor is left."""
        self._check()
        working = [actor for actor in list(self.actors) if self._watch(actor)]
        if self.actors and all(actor.lost for actor in self.actors):  # a run on recorded samples may have no actors
            last = self.actors[-1]
            raise RunFailed(f"no actor is left: {last.name} was {last.lost}; {last.log_hint}")
        return working

    def ready(self) -> list[ActorProcess]:
        """Return the actors that can evaluate."""
        return [actor for actor in self.actors if actor.is_ready]

    def wait_until_ready(self) -> list[ActorProcess]:
        """Wait for a ready actor; return all ready actors. Restart dead actors. Raise RunFailed after `STARTUP_S`."""
        deadline = time.monotonic() + STARTUP_S
        while not (ready := self.ready()):
            self.watch()
            if time.monotonic() > deadline:
                last = self.actors[-1]
                raise RunFailed(f"no actor became ready within {STARTUP_S:g} s (last: {last.name}); {last.log_hint}")
            time.sleep(0.2)
        return ready

    def quarantine(self, name: str, why: str) -> None:
        """Remove an actor from the run; its leases expire and are issued again. Raise RunFailed if no actor is left."""
        for actor in self.actors:
            if actor_name(actor.number) == name and not actor.lost:
                actor.lose(f"quarantined: {why}")
                self.quarantined.append(name)
                self._notify("quarantined", f"{name} is quarantined, and its leases are issued again: {why}")
        if all(actor.lost for actor in self.actors):
            raise RunFailed(f"no actor is left: {name}, the last one, was quarantined: {why}")

    # --- scale ------------------------------------------------------------------------------------

    def scale(self, name: str, count: int) -> str:
        """Set the number of actors of a pool without blocking; return a sentence that describes the change.

        Raise ValueError if the pool is unknown, if no actor would be left, or if launch.colocate is set and count > 1.
        """
        if name not in self.pools:
            raise ValueError(f"unknown pool '{name}': use one of {', '.join(self.pools)}")
        others = sum(1 for actor in self.actors if actor.pool != name and not actor.is_going)
        if count < 0 or count + others < 1:
            raise ValueError(
                f"{count} actors in pool '{name}' leave {max(0, count + others)} actors in the run: keep at least 1"
            )
        if count > 1 and self._config.launch.colocate:
            raise ValueError("launch.colocate = true supports only one actor: start a run without this key")
        # first remove actors that are not ready, then the newest
        actors = sorted(self.staying(name), key=lambda actor: not actor.is_ready)
        for _ in range(count - len(actors)):
            self._add_actor(self.pools[name])
        for actor in actors[count:]:
            self._remove_actor(actor)
        self.desired[name] = count
        text = f"pool '{name}' scales from {len(actors)} to {count} actor{'s' * (count != 1)}"
        self._notify("scaled", text)
        return text

    def staying(self, name: str) -> list[ActorProcess]:
        """Return the actors of a pool that are neither lost nor leaving."""
        return [actor for actor in self.actors if actor.pool == name and not actor.is_going]

    def room(self, name: str) -> int:
        """Return the number of additional actors of a pool that fit on the hosts now."""
        if self._config.launch.colocate:
            return 0
        bundle = self.pools[name].bundle
        hosts = ray._private.state.available_resources_per_node().values()
        places = (min(host.get(kind, 0.0) / bundle[kind] for kind in bundle) for host in hosts) if bundle else ()
        # add 1e-6, because 0.3 / 0.1 is slightly less than 3 in floating point
        return sum(int(each + 1e-6) for each in places) if bundle else MAX_UNRESERVED

    def _add_actor(self, pool: ActorPool) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        log, restarts = self._plan.folder.log("actor", number), Restarts(MAX_RESTARTS)
        placement = place_of("actor", number, pool)
        self.actors.append(ActorProcess("actor", number, None, log, restarts, placement=placement, pool=pool.name))

    def _remove_actor(self, actor: ActorProcess) -> None:
        if actor.handle is None:
            actor.end()
            self.actors.remove(actor)
            return
        actor.leaving = actor.handle.stop.remote()
        actor.started_s = time.monotonic()

    # --- one actor --------------------------------------------------------------------------------

    def _spawn(self, actor: ActorProcess) -> None:
        config = self.pools[actor.pool].config
        variables = {READY_ENV: str(ceil(STARTUP_S)), **self._config.launch.env}
        actor.handle = spawn(
            ActorRole,
            actor.log,
            config,
            on=actor.placement.reservation(0),
            concurrency=16,
            variables=variables,
            takes_sigterm=True,
        )
        actor.running = None
        actor.started_s = time.monotonic()

    def _start(self, actor: ActorProcess) -> None:
        assert self._context is not None, "start() comes first"
        # an actor needs no algorithm, and its host may lack the algorithm's file
        config = self._context.config.model_copy(update={"actors": self.pools[actor.pool].config, "algorithm": None})
        context: RunContext[ActorSections] = replace(self._context, config=config)
        actor.starting = actor.handle.start.remote(context, actor.number, actor.pool)

    def _watch(self, actor: ActorProcess) -> bool:
        """Return whether the actor works and can report; restart a dead actor."""
        if actor.lost:
            return False
        if actor.leaving is not None:
            if done(actor.leaving) or time.monotonic() - actor.started_s > SHUTDOWN_GRACE_S:
                actor.end()
                self.actors.remove(actor)
                self._notify("left", f"{actor.name} was removed from pool '{actor.pool}'")
            return False
        if actor.handle is None:
            if not self.stop_requested:
                self._start_if_placed(actor)
            return False
        if (result := terminated(failure(actor.starting if actor.running is None else actor.running))) is not None:
            self._replace_terminated(actor, result)
            return False
        why = self._exit_reason(actor)
        if why is None:
            return actor.running is not None
        if not why:
            if actor.running is None:
                actor.begin_work(actor.handle.run.remote())
            return True  # while the run drains, finished actors can still report
        if not self.stop_requested:
            self._restart(actor, why)
        return False

    def _exit_reason(self, actor: ActorProcess) -> str | None:
        """Return why the actor's start or work failed; '' if the call succeeded, None if the call is in progress."""
        pending = actor.starting if actor.running is None else actor.running
        if done(pending):
            reconnected = actor.running is not None and actor.reconnect(SILENCE_S, self._notify)
            return None if reconnected else outcome(pending)
        if actor.running is None and time.monotonic() - actor.started_s > STARTUP_S:
            return f"it was not ready within {STARTUP_S:g} s"
        return None

    def _restart(self, actor: ActorProcess, why: str) -> None:
        actor.kill()  # the process may still live if only its work failed
        if actor.restarts.are_exhausted:
            actor.lose(f"given up: {why}")
            left = sum(1 for each in self.actors if not each.is_going)
            times = f"after {actor.restarts.in_a_row} restarts in a row"
            others = f"{left} other actor{'' if left == 1 else 's'}"
            self._notify("given_up", f"{actor.name} is given up {times}: {why}; {others} left; {actor.log_hint}")
            return
        self._notify(
            "restart", f"{actor.name} died ({why}) and is restarted; its leases are issued again; {actor.log_hint}"
        )
        actor.forget()
        actor.restarts.count()
        self._start_if_placed(actor)

    def _replace_terminated(self, actor: ActorProcess, result: Terminated) -> None:
        """Request a new placement for an actor that exited on SIGTERM, because its host may soon be preempted."""
        self._notify("left", f"{actor.name} {result}")
        if actor.after_sigterm.are_exhausted:
            why = f"received SIGTERM {actor.after_sigterm.in_a_row + 1} times in a row"
            actor.lose(f"given up: {why}")
            self._notify("given_up", f"{actor.name} is given up: {why}: find the sender of SIGTERM; see {actor.log}")
            return
        actor.kill()
        actor.forget()
        actor.after_sigterm.count()
        actor.placement.release()
        actor.placement = place_of(actor.role, actor.number, self.pools[actor.pool])

    def _start_if_placed(self, actor: ActorProcess) -> None:
        if actor.placement.is_placed:
            self._spawn(actor)
            self._start(actor)
        elif actor.placement.missing_s > PLACEMENT_S:
            why = actor.placement.shortage()
            actor.lose(f"given up: {why}")
            self._notify("given_up", f"{actor.name} is given up: {why}")


@dataclass(frozen=True)
class _ShardCall:
    """The evaluation of a shard by an actor. `handle` is the actor's Ray handle at the call; a restart replaces it."""

    request: EvalRequest
    actor: ActorProcess
    handle: Any
    call: Any


class Evaluation:
    """An evaluation sharded over the ready actors; call `poll` until it returns the results."""

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
        """Start an evaluation on one or more `actors`, at `min_version` or later; None uses the version of each actor.

        A failed shard is retried on `ready_actors()`, at most `max_retries` times for all shards. A retry does not
        count if the actor is leaving or exited on SIGTERM.
        """
        self._ready_actors = ready_actors
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._retries_left = max_retries
        self._check = check
        self._pending: list[_ShardCall] = []
        self._unsent: list[EvalRequest] = []
        """Shards to send to the next ready actors."""
        self._results: list[EvalResult] = []
        for shard, actor in enumerate(actors):
            part = EvalRequest(num_problems=num_problems, shard=shard, num_shards=len(actors), min_version=min_version)
            self._send(part, actor)

    def poll(self) -> list[EvalResult] | None:
        """Return all results, or None while shards are missing; raise RunFailed on too many failures or a timeout."""
        self._check()
        pending, self._pending = self._pending, []
        for shard in pending:
            if not done(shard.call):
                self._pending.append(shard)
                continue
            try:
                self._results.append(ray.get(shard.call))
            except (RayActorError, RayTaskError) as error:
                self._retry(shard, error)
        if self._unsent and (ready := self._ready_actors()):
            for request, actor in zip(self._unsent, cycle(ready), strict=False):
                self._send(request, actor)
            self._unsent = []
        if not self._pending and not self._unsent:
            return self._results
        if time.monotonic() > self._deadline:
            names = ", ".join(shard.actor.name for shard in self._pending) or "actors (none is ready)"
            raise RunFailed(
                f"{names} did not finish an evaluation within {self._timeout_s:g} s: evaluate fewer problems"
            )
        return None

    def _retry(self, shard: _ShardCall, error: RayActorError | RayTaskError) -> None:
        """Queue the shard for another actor; raise RunFailed if no retries are left."""
        actor, on_sigterm = shard.actor, terminated(error) is not None
        if not actor.is_going and not on_sigterm:
            if self._retries_left == 0:
                raise RunFailed(f"{actor.name} failed to evaluate: {reason(error)}; {actor.log_hint}") from None
            self._retries_left -= 1
        if (on_sigterm or isinstance(error, RayActorError)) and actor.handle is shard.handle:
            actor.running = shard.call  # mark the work of the actor as failed, so that `watch` restarts the actor
        self._unsent.append(shard.request)

    def _send(self, request: EvalRequest, actor: ActorProcess) -> None:
        actor.evaluating = actor.handle.evaluate.remote(request)
        self._pending.append(_ShardCall(request, actor, actor.handle, actor.evaluating))


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
