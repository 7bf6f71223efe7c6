"""The actors of all pools, which start and end one by one while the others generate; and their evaluations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from math import ceil
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from actors.config import READY_ENV, ActorSections
from actors.report import EvalCounts, EvalRequest, EvalResult, actor_name
from common.run import STARTUP_S, RunContext
from common.staleness import PolicyVersion
from launch.checks import Plan
from launch.config import Config
from launch.observe.status import Accuracy
from launch.pools import ActorPool, actor_pools
from launch.processes.actor_role import GOODBYE_S, ActorRole, ToldToEnd, told_to_end
from launch.processes.placement import PLACEMENT_S, PlacedProcess, place_of, spawn
from launch.processes.role_process import (
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
"""SIGTERMs in a row after which an actor is restarted."""
MOST_OF_NOTHING = 1024
"""Actors that have a place if each reserves nothing."""
CALM_S = 600.0
"""After so much work between two of them they count anew."""
EVALUATION_TIMEOUT_S = 6000.0
"""An evaluating actor makes no samples, and the learner (`BATCH_TIMEOUT_S`) must not time out first."""


@dataclass
class ActorProcess(PlacedProcess):
    """One actor.

    waiting for resources -> starting -> ready, evaluating -> working -> finished
             ^---------- died, or left by SIGTERM -----' '-> leaving -> gone (the pool was made smaller)
    lost, in the end: it died too often, was told to end too often, found no host, or was taken out
    """

    starting: Any = None
    """The pending call that ends when it is ready."""
    evaluating: Any = None
    leaving: Any = None
    """The pending call that ends it, if its pool was made smaller."""
    after_sigterm: Restarts = field(default_factory=lambda: Restarts(MAX_SIGTERMS, CALM_S))
    """Restarts after SIGTERM; `restarts` are those of failures."""
    _cut_since_s: float | None = None
    """When the connection to it was lost, on the monotonic clock."""

    @property
    def state(self) -> str:
        if self.leaving is not None and not self.lost:
            return "leaving"
        state, evaluating = super().state, self.evaluating  # read once, as there
        if state not in ("starting", "finished"):  # it is asked to evaluate beside its work too
            return state
        if evaluating is not None and not done(evaluating):
            return "evaluating"
        return "ready" if state == "starting" and self.is_ready else state

    @property
    def is_going(self) -> bool:
        """It is lost or leaving: it can fail no more."""
        return bool(self.lost) or self.leaving is not None

    @property
    def is_ready(self) -> bool:
        """It is up, its work has not failed, and it stays."""
        starting = self.starting  # read once, as above
        if self.is_going or self.handle is None or starting is None or not done(starting) or outcome(starting):
            return False
        return self.running is None or not done(self.running) or not outcome(self.running)

    def begin_work(self, call: Any) -> None:  # noqa: ANN401 -- as there
        super().begin_work(call)
        self.after_sigterm.working_since_s = self.restarts.working_since_s

    def forget(self) -> None:
        super().forget()
        self.starting = self.evaluating = self._cut_since_s = None

    def comes_back(self, patience_s: float, notify: Notify) -> bool:
        """Resume waiting for the same work if only the connection was cut, again and again for `patience_s`.

        A process that did die answers the next question so, and Ray declares a host dead that stays away.
        """
        error = failure(self.running)
        if not isinstance(error, ActorUnavailableError):
            return False
        now_s = time.monotonic()
        if self._cut_since_s is None or now_s - self._cut_since_s > 2 * patience_s:
            self._cut_since_s = now_s
            notify("unreachable", f"the way to {self.name} was cut ({reason(error)}); it is asked again")
        if now_s - self._cut_since_s > patience_s:
            return False
        self.running = self.handle.run.remote()
        return True


class ActorPools:
    """Starts actors in their pools, restarts what died, gives up what keeps dying, and changes their number."""

    def __init__(self, plan: Plan, notify: Notify, check: Check = lambda: None) -> None:
        self._plan = plan
        self._context: RunContext[Config] | None = None
        self._notify = notify
        self._check = check
        self._config = plan.config
        self.pools = {pool.name: pool for pool in actor_pools(plan.config)}
        """With the number of actors that each had at first."""
        self.wanted = {name: pool.count for name, pool in self.pools.items()}
        """Actors that each pool is to have now; a lost one is missing until the pool is scaled."""
        self.actors: list[ActorProcess] = []
        """All but those that left."""
        self._next_number = 0
        self.are_ending = False
        """The run was asked to end: what dies now is not restarted."""
        self.quarantined: list[str] = []
        """Names of the actors that were taken out because of their weights."""

    # --- life -------------------------------------------------------------------------------------

    def ask_for_places(self) -> None:
        """Reserve a place for every actor; returns at once."""
        for pool in self.pools.values():
            for _ in range(pool.count):
                self._enlist(pool)

    def spawn(self, timeout_s: float, *, others_come: bool) -> None:
        """Start the processes as `PlacementGroup.wait` finds places."""
        for actor in self.actors:
            actor.placement.wait(timeout_s, others_come=others_come)
            self._spawn(actor)

    def start(self, context: RunContext[Config]) -> list[tuple[RoleProcess, Any]]:
        """Send the context to all; the calls end when they are ready."""
        self._context = context
        for actor in self.actors:
            self._start(actor)
        return [(actor, actor.starting) for actor in self.actors]

    def begin(self) -> None:
        for actor in self.actors:
            if actor.running is None and actor.is_ready:  # whoever is started again, or waits, begins when it is up
                actor.begin_work(actor.handle.run.remote())

    def stop(self, goodbye_s: float) -> None:
        alive = [actor for actor in self.actors if not actor.lost and actor.handle is not None]
        if calls := [actor.leaving or actor.handle.stop.remote() for actor in alive]:
            ray.wait(calls, num_returns=len(calls), timeout=goodbye_s)
        for actor in self.actors:
            actor.end()
        self.actors = []

    # --- watch ------------------------------------------------------------------------------------

    def watch(self) -> list[ActorProcess]:
        """Restart what died and return those that work; RunFailed if no actor is left."""
        self._check()
        working = [actor for actor in list(self.actors) if self._watch(actor)]
        if self.actors and all(actor.lost for actor in self.actors):  # a run on recorded samples may have none
            last = self.actors[-1]
            raise RunFailed(f"no actor is left: {last.name} was {last.lost}; {last.see}")
        return working

    def ready(self) -> list[ActorProcess]:
        """Return the actors that can be asked to evaluate."""
        return [actor for actor in self.actors if actor.is_ready]

    def wait_until_ready(self) -> list[ActorProcess]:
        """Return at least one, restarting what died meanwhile; RunFailed after `STARTUP_S`."""
        deadline = time.monotonic() + STARTUP_S
        while not (ready := self.ready()):
            self.watch()
            if time.monotonic() > deadline:
                last = self.actors[-1]
                raise RunFailed(f"no actor became ready, the last is {last.name}; {last.see}")
            time.sleep(0.2)
        return ready

    def quarantine(self, name: str, why: str) -> None:
        """Take an actor out of the run; its leases expire and are issued anew. RunFailed if no other is left."""
        for actor in self.actors:
            if actor_name(actor.number) == name and not actor.lost:
                actor.lose(f"taken out of the run: {why}")
                self.quarantined.append(name)
                self._notify("quarantined", f"{name} is taken out of the run, and its leases are issued anew: {why}")
        if all(actor.lost for actor in self.actors):
            raise RunFailed(f"no actor is left: {name} was the last, and was taken out of the run: {why}")

    # --- scale ------------------------------------------------------------------------------------

    def scale(self, name: str, count: int) -> str:
        """Set the number of actors of a pool; return at once what was begun, as a sentence.

        ValueError if there is no such pool, no actor would be left, or the only one shares its GPU with the learner.
        """
        if name not in self.pools:
            raise ValueError(f"there is no pool '{name}'; the pools of actors are {', '.join(self.pools)}")
        others = sum(1 for actor in self.actors if actor.pool != name and not actor.is_going)
        if count < 0 or count + others < 1:
            raise ValueError(
                f"{count} actors in pool '{name}' would leave the run with {max(0, count + others)}; keep 1"
            )
        if count > 1 and self._config.launch.colocate:
            raise ValueError("launch.colocate = true is for one actor: start a run without it")
        there = self.staying(name)
        there.sort(key=lambda actor: not actor.is_ready)  # who does not work leaves first, then the youngest
        for _ in range(count - len(there)):
            self._enlist(self.pools[name])
        for actor in there[count:]:
            self._dismiss(actor)
        self.wanted[name] = count
        text = f"pool '{name}' had {len(there)} actor{'s' * (len(there) != 1)} and is to have {count}"
        self._notify("scaled", text)
        return text

    def staying(self, name: str) -> list[ActorProcess]:
        """Return the actors of a pool that are neither lost nor leaving."""
        return [actor for actor in self.actors if actor.pool == name and not actor.is_going]

    def room(self, name: str) -> int:
        """Return how many more actors of a pool have a place now."""
        if self._config.launch.colocate:
            return 0
        bundle = self.pools[name].bundle
        hosts = ray._private.state.available_resources_per_node().values()
        places = (min(host.get(kind, 0.0) / bundle[kind] for kind in bundle) for host in hosts) if bundle else ()
        # of what reserves nothing any number has a place; and 0.3 / 0.1 is a little less than 3
        return sum(int(each + 1e-6) for each in places) if bundle else MOST_OF_NOTHING

    def _enlist(self, pool: ActorPool) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        log, restarts = self._plan.folder.log("actor", number), Restarts(MAX_RESTARTS)
        place = place_of("actor", number, pool)
        self.actors.append(ActorProcess("actor", number, None, log, restarts, placement=place, pool=pool.name))

    def _dismiss(self, actor: ActorProcess) -> None:
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
        # an actor reads no algorithm, whose file its host need not have
        config = self._context.config.model_copy(update={"actors": self.pools[actor.pool].config, "algorithm": None})
        context: RunContext[ActorSections] = replace(self._context, config=config)
        actor.starting = actor.handle.start.remote(context, actor.number, actor.pool)

    def _watch(self, actor: ActorProcess) -> bool:
        """Return whether the actor works and can report; restart it if it died."""
        if actor.lost:
            return False
        if actor.leaving is not None:
            if done(actor.leaving) or time.monotonic() - actor.started_s > GOODBYE_S:
                actor.end()
                self.actors.remove(actor)
                self._notify("left", f"{actor.name} has left pool '{actor.pool}'")
            return False
        if actor.handle is None:
            if not self.are_ending:
                self._look_for_a_place(actor)
            return False
        if (told := told_to_end(failure(actor.starting if actor.running is None else actor.running))) is not None:
            self._let_go(actor, told)
            return False
        why = self._end_of(actor)
        if why is None:
            return actor.running is not None
        if not why:
            if actor.running is None:
                actor.begin_work(actor.handle.run.remote())
            return True  # else it finished, because the run drains
        if not self.are_ending:
            self._start_again(actor, why)
        return False

    def _end_of(self, actor: ActorProcess) -> str | None:
        """Return why its start or its work has ended; '' if it ended well, None if it goes on."""
        pending = actor.starting if actor.running is None else actor.running
        if done(pending):
            came_back = actor.running is not None and actor.comes_back(SILENCE_S, self._notify)
            return None if came_back else outcome(pending)
        if actor.running is None and time.monotonic() - actor.started_s > STARTUP_S:
            return f"it was not ready within {STARTUP_S:g} s"
        return None

    def _start_again(self, actor: ActorProcess, why: str) -> None:
        actor.kill()  # it may have failed without dying
        if actor.restarts.are_spent:
            actor.lose(f"given up: {why}")
            left = sum(1 for each in self.actors if not each.is_going)
            times = f"after {actor.restarts.in_a_row} restarts in a row"
            others = f"{left} other actor{'' if left == 1 else 's'}"
            self._notify("given_up", f"{actor.name} is given up {times}: {why}; {others} left; {actor.see}")
            return
        self._notify(
            "restart", f"{actor.name} died ({why}) and is started again, its leases are issued anew; {actor.see}"
        )
        actor.forget()
        actor.restarts.count()
        self._look_for_a_place(actor)

    def _let_go(self, actor: ActorProcess, told: ToldToEnd) -> None:
        """Give an actor that left by SIGTERM, as before its host goes, a new place at the next look."""
        self._notify("left", f"{actor.name} {told}")
        if actor.after_sigterm.are_spent:
            why = f"told to end by SIGTERM {actor.after_sigterm.in_a_row + 1} times in a row"
            actor.lose(f"given up: {why}")
            self._notify("given_up", f"{actor.name} is given up: {why}; who sends it? See {actor.log}")
            return
        actor.kill()
        actor.forget()
        actor.after_sigterm.count()
        actor.placement.release()
        actor.placement = place_of(actor.role, actor.number, self.pools[actor.pool])

    def _look_for_a_place(self, actor: ActorProcess) -> None:
        if actor.placement.is_placed:
            self._spawn(actor)
            self._start(actor)
        elif actor.placement.missing_s > PLACEMENT_S:
            why = actor.placement.shortage()
            actor.lose(f"given up: {why}")
            self._notify("given_up", f"{actor.name} is given up: {why}")


@dataclass(frozen=True)
class _Asked:
    """A shard and the actor that evaluates it, with the handle of its process: it may have been restarted since."""

    request: EvalRequest
    actor: ActorProcess
    handle: Any
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
        """Return the results of all shards; None if some are missing. RunFailed if too many fail, or too late."""
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
