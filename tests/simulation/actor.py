"""One life of an actor: its process from start to kill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from buffer import protocol as p
from common.staleness import PolicyVersion
from tests.simulation.shelf import FIRST
from tests.simulation.witness import Granted, Key

if TYPE_CHECKING:
    from tests.simulation.world import World

ROOM = 4
"""Groups that an actor holds at most."""


@dataclass(slots=True, eq=False)
class Sample:
    """One sample on its way."""

    key: Key
    lease: p.Lease
    index: int
    oldest: PolicyVersion
    newest: PolicyVersion
    """Versions of its first and its last token."""


class Tokens(NamedTuple):
    """What there is of a sample, by the versions of its first and its last token."""

    oldest: PolicyVersion
    newest: PolicyVersion


Prefixes = dict[tuple[int, int], Tokens]
"""(lease, sample index) -> what earlier leases made of it."""


class Leased(p.LeaseGrant, frozen=True):
    """Leases, and what there is of their samples."""

    prefixes: Prefixes = msgspec.field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Held:
    """A lease and what is to do for it."""

    lease: p.Lease
    granted: Granted
    todo: list[int]
    prefixes: dict[int, Tokens]


class SimActor:
    """Leases, starts, finishes and pushes samples; pulls weights."""

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world = world
        self.name = name
        self.life = life
        self.stopped = False
        self.dead = False
        self.served = self.heard = FIRST
        self.epoch = world.buffer.hello(name, f"{name}-{life}")
        self.request = 0
        self.asks = False
        self.was_refused = False
        """The last answer held no lease: ask less often."""
        self.seq = 0
        self.held: dict[int, Held] = {}
        self.running: list[tuple[Held, int, PolicyVersion]] = []
        """Lease, sample, and the version of its first token."""

    def act(self) -> None:
        """Do one thing, by chance: of those that can be done, from a random one on."""
        moves = [*self._moves, SimActor.leave] if self.world.faults.handed_on else self._moves
        first = int(self.world.random.random() * len(moves))
        for turn in range(len(moves) - 1):
            if moves[(first + turn) % len(moves)](self):
                return

    # --- leases -----------------------------------------------------------------------------------

    def ask(self) -> bool:
        """Ask for leases, unless an answer is due or there is no room."""
        room = ROOM - len(self.held)
        if self.asks or room <= 0 or (self.was_refused and self.world.random.random() < 0.7):
            return False
        self.asks = True
        self.request += 1
        self.world.send("lease", self, (self.name, self.epoch, self.request, room))
        return True

    def on_lease(self, arguments: tuple[str, int, int, int], grant: Leased) -> None:
        """Take what was granted."""
        if not self.asks or arguments[2] != self.request:
            return
        self.asks = False
        self.was_refused = not grant.leases
        newest = PolicyVersion(*grant.newest)
        self.heard = max(self.heard, newest)
        for lease in grant.leases:
            granted = self.world.witness.grants[lease.lease_id]
            prefixes = {index: grant.prefixes[lease.lease_id, index] for index in lease.prefixes}
            self.held[lease.lease_id] = Held(lease, granted, list(lease.sample_indices), prefixes)

    def renew(self) -> bool:
        """Say that the leases are worked on."""
        if not self.held or self.world.random.random() < self.world.forgetfulness:
            return False
        self.world.send("renew", self, (self.name, self.epoch, list(self.held)))
        return True

    def on_renew(self, arguments: object, lost: list[int]) -> None:
        """Stop working on leases that are lost."""
        for lease_id in lost:
            self.held.pop(lease_id, None)
        self.running = [each for each in self.running if each[0].lease.lease_id in self.held]

    # --- samples ----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Start the requests of some leases, as far as the policy lets them."""
        world = self.world
        may_start = world.knobs.actors_contract.may_start
        num_started = 0
        for held in self.held.values():
            if not held.todo or not may_start(self.served, self.heard, held.lease.min_version):
                continue
            if not all(self.may_go_on(each) for each in held.prefixes.values()):
                continue
            world.witness.started(held.granted, self.served, self.heard)
            for index in held.todo:
                before = held.prefixes.get(index)
                if before is not None:
                    world.witness.went_on(before.newest, self.served)
                self.running.append((held, index, self.served if before is None else before.oldest))
            held.todo = []
            num_started += 1
            if world.random.random() < 0.3:
                break
        return num_started > 0

    def finish(self) -> bool:
        """End some requests."""
        random = self.world.random.random
        num = len(self.running)
        if num:
            for _ in range(1 + int(random() * num)):
                self.end(self.running.pop(int(random() * len(self.running))))
        return num > 0

    def end(self, request: tuple[Held, int, PolicyVersion]) -> None:
        """Push the sample of a request, or give it up."""
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

    def may_go_on(self, prefix: Tokens) -> bool:
        """Is no token of it newer than the engine?"""
        return self.served >= prefix.newest

    def leave(self) -> bool:
        """Hand some samples of a lease on with what there is of them, or let the buffer keep that and go on."""
        random, world = self.world.random.random, self.world
        if not self.held or not world.happens(world.faults.handed_on):
            return False
        held = list(self.held.values())[int(random() * len(self.held))]
        lease = held.lease
        there = {index: Tokens(oldest, self.served) for each, index, oldest in self.running if each is held}
        there = {index: tokens for index, tokens in there.items() if random() < 0.8}  # of the others there is none yet
        left = [index for index in [*held.todo, *there] if random() < 0.7]
        goes_on = random() < 0.4
        if not goes_on:
            held.todo = [index for index in held.todo if index not in left]
            self.running = [each for each in self.running if each[0] is not held or each[1] not in left]
            if not held.todo and all(each[0] is not held for each in self.running):
                del self.held[lease.lease_id]
        sent = {index: tokens for index, tokens in there.items() if index in left}
        world.send("hand_on", self, (self.name, self.epoch, lease, tuple(left), sent, goes_on))
        return True

    # --- weights ----------------------------------------------------------------------------------

    def pull(self) -> bool:
        """Look for newer weights, and apply them between two engine steps."""
        world = self.world
        newest = world.shelf.newest
        if newest is None:
            return False
        offered = newest
        if world.happens(world.faults.late_weights):
            if world.random.random() < 0.3:
                self.heard = max(self.heard, newest)  # heard of, but what came fails its checksum
                return True
            offered = world.shelf.any(world.random) or newest
        self.heard = max(self.heard, offered)
        if not world.is_newer(offered, self.served):
            return False
        world.witness.applied(self.served, offered)
        self.served = offered
        return True

    _moves = (finish, start, ask, pull, renew)
