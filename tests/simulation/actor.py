"""An actor process of the simulation, from its start to its kill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from leeway.buffer import protocol as p
from leeway.common.staleness import PolicyVersion
from tests.simulation.shelf import FIRST
from tests.simulation.witness import Granted, Key

if TYPE_CHECKING:
    from tests.simulation.world import World

MAX_GROUPS = 4
"""Maximum number of groups that an actor holds."""


@dataclass(slots=True, eq=False)
class Sample:
    """A sample to push."""

    key: Key
    lease: p.Lease
    index: int
    oldest: PolicyVersion
    newest: PolicyVersion
    """Versions of the first (`oldest`) and of the last token (`newest`)."""


class Tokens(NamedTuple):
    """A partial sample: the versions of its first and last token."""

    oldest: PolicyVersion
    newest: PolicyVersion


Prefixes = dict[tuple[int, int], Tokens]
"""(lease, sample index) -> partial sample from earlier leases."""


class Leased(p.LeaseGrant, frozen=True):
    """Leases, and the partial samples that belong to these leases."""

    prefixes: Prefixes = msgspec.field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Held:
    """A lease and its remaining work."""

    lease: p.Lease
    granted: Granted
    todo: list[int]
    prefixes: dict[int, Tokens]


class SimActor:
    """An actor that leases, starts, finishes and pushes samples, and pulls weights."""

    def __init__(self, world: World, name: str, process_number: int) -> None:
        self.world = world
        self.name = name
        self.process_number = process_number
        self.stopped = False
        self.dead = False
        self.served = self.newest_seen = FIRST
        self.epoch = world.buffer.hello(name, f"{name}-{process_number}")
        self.request = 0
        self.is_waiting = False
        self.was_refused = False
        """True if the last reply had no lease; the actor then requests less often."""
        self.seq = 0
        self.held: dict[int, Held] = {}
        self.running: list[tuple[Held, int, PolicyVersion]] = []
        """Lease, sample index, and the version of the first token."""

    def act(self) -> None:
        """Take one random action: the first possible action in the list from a random position on."""
        moves = [*self._moves, SimActor.requeue] if self.world.faults.requeued else self._moves
        first = int(self.world.random.random() * len(moves))
        for turn in range(len(moves) - 1):
            if moves[(first + turn) % len(moves)](self):
                return

    # --- leases -----------------------------------------------------------------------------------

    def request_leases(self) -> bool:
        """Request leases, unless a reply is pending or the actor holds `MAX_GROUPS` groups."""
        num_groups = MAX_GROUPS - len(self.held)
        if self.is_waiting or num_groups <= 0 or (self.was_refused and self.world.random.random() < 0.7):
            return False
        self.is_waiting = True
        self.request += 1
        self.world.send("lease", self, (self.name, self.epoch, self.request, num_groups))
        return True

    def on_lease(self, arguments: tuple[str, int, int, int], grant: Leased) -> None:
        """Store the granted leases."""
        if not self.is_waiting or arguments[2] != self.request:
            return
        self.is_waiting = False
        self.was_refused = not grant.leases
        newest = PolicyVersion(*grant.newest)
        self.newest_seen = max(self.newest_seen, newest)
        for lease in grant.leases:
            granted = self.world.witness.grants[lease.lease_id]
            prefixes = {index: grant.prefixes[lease.lease_id, index] for index in lease.prefixes}
            self.held[lease.lease_id] = Held(lease, granted, list(lease.sample_indices), prefixes)

    def renew(self) -> bool:
        """Renew the leases."""
        if not self.held or self.world.random.random() < self.world.skip_renewal:
            return False
        self.world.send("renew", self, (self.name, self.epoch, list(self.held)))
        return True

    def on_renew(self, arguments: object, lost: list[int]) -> None:
        """Drop leases that are lost."""
        for lease_id in lost:
            self.held.pop(lease_id, None)
        self.running = [each for each in self.running if each[0].lease.lease_id in self.held]

    # --- samples ----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the samples of some leases, as far as the policy allows."""
        world = self.world
        may_start = world.knobs.actors_contract.may_start
        num_started = 0
        for held in self.held.values():
            if not held.todo or not may_start(self.served, self.newest_seen, held.lease.min_version):
                continue
            if not all(self.may_resume(each) for each in held.prefixes.values()):
                continue
            world.witness.started(held.granted, self.served, self.newest_seen)
            for index in held.todo:
                before = held.prefixes.get(index)
                if before is not None:
                    world.witness.resumed(before.newest, self.served)
                self.running.append((held, index, self.served if before is None else before.oldest))
            held.todo = []
            num_started += 1
            if world.random.random() < 0.3:
                break
        return num_started > 0

    def finish(self) -> bool:
        """Finish some samples."""
        random = self.world.random.random
        num = len(self.running)
        if num:
            for _ in range(1 + int(random() * num)):
                self.finish_sample(self.running.pop(int(random() * len(self.running))))
        return num > 0

    def finish_sample(self, request: tuple[Held, int, PolicyVersion]) -> None:
        """Push a finished sample, or report it as failed."""
        world = self.world
        held, index, oldest = request
        lease = held.lease
        if all(each[0] is not held for each in self.running):
            self.held.pop(lease.lease_id, None)
        if world.happens(world.faults.given_up):
            world.send("give_up", self, (self.name, self.epoch, lease, index))
            return
        key = Key(self.name, self.epoch, self.seq)
        self.seq += 1
        world.witness.oldest[key] = oldest
        world.send("push", self, (Sample(key, lease, index, oldest, self.served),))

    def may_resume(self, prefix: Tokens) -> bool:
        """Return whether no token of a partial sample is newer than the served version."""
        return self.served >= prefix.newest

    def requeue(self) -> bool:
        """Requeue some samples of a lease with their tokens, or only save the tokens and continue."""
        random, world = self.world.random.random, self.world
        if not self.held or not world.happens(world.faults.requeued):
            return False
        held = list(self.held.values())[int(random() * len(self.held))]
        lease = held.lease
        partials = {index: Tokens(oldest, self.served) for each, index, oldest in self.running if each is held}
        partials = {index: tokens for index, tokens in partials.items() if random() < 0.8}
        released = [index for index in [*held.todo, *partials] if random() < 0.7]
        goes_on = random() < 0.4
        if not goes_on:
            held.todo = [index for index in held.todo if index not in released]
            self.running = [each for each in self.running if each[0] is not held or each[1] not in released]
            if not held.todo and all(each[0] is not held for each in self.running):
                del self.held[lease.lease_id]
        released_partials = {index: tokens for index, tokens in partials.items() if index in released}
        world.send("requeue", self, (self.name, self.epoch, lease, tuple(released), released_partials, goes_on))
        return True

    # --- weights ----------------------------------------------------------------------------------

    def pull(self) -> bool:
        """Look for newer weights and apply them between two engine steps."""
        world = self.world
        newest = world.shelf.newest
        if newest is None:
            return False
        offered = newest
        if world.happens(world.faults.late_weights):
            if world.random.random() < 0.3:
                self.newest_seen = max(self.newest_seen, newest)  # the transfer of a seen version fails its checksum
                return True
            offered = world.shelf.any(world.random) or newest
        self.newest_seen = max(self.newest_seen, offered)
        if not world.is_newer(offered, self.served):
            return False
        world.witness.applied(self.served, offered)
        self.served = offered
        return True

    _moves = (finish, start, request_leases, pull, renew)
