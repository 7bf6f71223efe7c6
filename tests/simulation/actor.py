"""One life of an actor: its process from start to kill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(slots=True, eq=False)
class Held:
    """A lease and what is to do for it."""

    lease: p.Lease
    granted: Granted
    todo: list[int]


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
        """Lease, sample, and the version that the request started on."""

    def act(self) -> None:
        """Do one thing, by chance: of those that can be done, from a random one on."""
        first = int(self.world.random.random() * 5)
        for turn in range(4):
            if self._moves[(first + turn) % 5](self):
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

    def on_lease(self, arguments: tuple[str, int, int, int], grant: p.LeaseGrant) -> None:
        """Take what was granted."""
        if not self.asks or arguments[2] != self.request:
            return
        self.asks = False
        self.was_refused = not grant.leases
        newest = PolicyVersion(*grant.newest)
        self.heard = max(self.heard, newest)
        for lease in grant.leases:
            granted = self.world.witness.grants[lease.lease_id]
            self.held[lease.lease_id] = Held(lease, granted, list(lease.sample_indices))

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
            world.witness.started(held.granted, self.served, self.heard)
            self.running += [(held, index, self.served) for index in held.todo]
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
