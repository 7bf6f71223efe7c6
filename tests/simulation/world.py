"""A simulated run: its processes, the messages between the processes, and the scheduler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from leeway.buffer import protocol as p
from leeway.buffer.errors import BufferRefused
from leeway.common.staleness import PolicyVersion
from tests.simulation.actor import Leased, Sample, SimActor, Tokens
from tests.simulation.book import Book
from tests.simulation.core import CoreBuffer, Environment
from tests.simulation.knobs import NO_FAULTS, Faults, Knobs
from tests.simulation.learner import SimLearner
from tests.simulation.shelf import Shelf
from tests.simulation.witness import Broken, Key, Witness

NUM_EVENTS = 100
NUM_FINAL_STEPS = 1
"""Steps that must be finished after all faults are disabled."""
FINAL_ROUNDS = 40
"""Maximum number of rounds of 5 s for the final steps, which suffices to lease an expired group again. The number is
multiplied by 1 + refill, because groups that are set aside take more rounds."""


class Buffer(Protocol):
    """The simulation's interface of a buffer, `Book` or `CoreBuffer`. Each call is one request."""

    def hello(self, name: str, session: str) -> int: ...
    def lease(self, name: str, epoch: int, number: int, room: int) -> Leased: ...
    def push(self, sample: Sample) -> str: ...
    def give_up(self, name: str, epoch: int, lease: p.Lease, index: int) -> None: ...
    def requeue(
        self, name: str, epoch: int, lease: p.Lease, indices: Sequence[int], partials: dict[int, Tokens], goes_on: bool
    ) -> None: ...
    def renew(self, name: str, epoch: int, lease_ids: list[int]) -> list[int]: ...
    def expire(self) -> None: ...
    def restart(self) -> None: ...
    def begin(self, session: str, version: int, step: int) -> int: ...
    def published(self, incarnation: int, version: int) -> None: ...
    def draw(self, step: int, version: int, incarnation: int, allowed: int | None) -> list[list[Key]] | None: ...
    def finish(self, step: int, version: int, incarnation: int, skipped: bool) -> None: ...
    def durable(self, step: int, incarnation: int) -> None: ...
    def counts(self) -> tuple[int, int, int, int]: ...
    def waiting_for(self) -> str: ...


class Message:
    """A request in flight. It stays on the wire until its reply is received."""

    __slots__ = ("arguments", "has_arrived", "is_answered", "kind", "owner")

    def __init__(self, kind: str, owner: SimActor | SimLearner, arguments: tuple[Any, ...]) -> None:
        self.kind, self.owner, self.arguments = kind, owner, arguments
        self.has_arrived = self.is_answered = False


class World:
    """A simulated run."""

    publishes_skipped = True
    """True if the learner publishes a skipped version as soon as the disk has space."""

    def __init__(self, seed: int, knobs: Knobs, faults: Faults, env: Environment | None, trace: list[str] | None):
        self.random = Random(seed)
        self.knobs, self.faults = knobs, faults
        self.contract = knobs.contract
        self.trace = trace
        self.now_s = 0.0
        self.wire: list[Message] = []
        self.immediate_delivery = self.random.choice((0.0, 0.6, 0.9))
        """Chance that a message arrives before any other event."""
        self.shelf = Shelf()
        self.witness = Witness(knobs)
        self.buffer: Buffer = (
            Book(knobs, self.contract, self.clock) if env is None else CoreBuffer(knobs, self.contract, self.clock, env)
        )
        self.skip_renewal = 0.9
        """Chance that an actor does not renew its leases when it could."""
        self.checkpoints = [(0, 0)]
        self.reached = (0, 0)
        """The last step and the newest version that any learner reached."""
        self.num_processes = 1
        self.learner = SimLearner(self, 0)
        self.actors = [self.new_actor(f"actor-{i}") for i in range(1 + int(self.random.random() * knobs.num_actors))]
        self.zombies: list[SimActor | SimLearner] = []

    def clock(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s

    def happens(self, chance: float) -> bool:
        """Return whether a fault with this probability happens now."""
        return chance > 0.0 and self.random.random() < chance

    @staticmethod
    def is_newer(offered: PolicyVersion, served: PolicyVersion) -> bool:
        """Return whether an engine may change from version `served` to version `offered`."""
        return offered > served

    def record_progress(self, learner: SimLearner) -> None:
        """Record a new version or a finished step; versions and steps of a replaced learner count as abandoned."""
        self.reached = max(self.reached[0], learner.step), max(self.reached[1], learner.version)
        self.witness.rolled_back |= learner is not self.learner

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{self.now_s:7.1f}  {text}")

    # --- messages ---------------------------------------------------------------------------------

    def send(self, kind: str, owner: SimActor | SimLearner, arguments: tuple[Any, ...]) -> None:
        """Send a request."""
        self.wire.append(Message(kind, owner, arguments))
        if self.random.random() < self.immediate_delivery:
            self.deliver(len(self.wire) - 1)

    def deliver(self, place: int) -> None:
        """Deliver a request. The request is delivered again if its reply is lost, and may be delivered twice."""
        message = self.wire[place]
        owner = message.owner
        if owner.stopped and message.has_arrived and not owner.dead:
            return  # the request is sent again after its sender continues
        message.has_arrived = True
        try:
            reply = getattr(self.buffer, message.kind)(*message.arguments)
        except BufferRefused as error:
            reply = error
        if self.trace is not None:
            self.note(f"{_name(owner)} {message.kind}{_brief(message.arguments)} -> {_brief(reply)}")
        if isinstance(reply, p.LeaseGrant):
            self.witness.granted(reply)
        elif message.kind == "push":
            self.witness.pushed(message.arguments[0].key, reply)
        elif isinstance(self.buffer, CoreBuffer) and message.kind == "draw" and isinstance(reply, list):
            self.witness.step_drawn(message.arguments[0], reply, self.buffer.num_set_aside())
        is_kept = self.happens(self.faults.copies)
        if not is_kept and (owner.dead or not owner.stopped):
            self.wire[place] = self.wire[-1]
            self.wire.pop()
        self.check()
        if message.is_answered or owner.dead or owner.stopped or (is_kept and self.random.random() < 0.5):
            return
        message.is_answered = True
        if isinstance(reply, BufferRefused):
            if owner is self.learner or owner in self.actors:
                raise Broken("refused", f"{_name(owner)} is running, but {message.kind}{message.arguments}: {reply}")
            owner.dead = True  # a zombie detects that it was replaced
        elif handler := getattr(owner, f"on_{message.kind}", None):
            handler(message.arguments, reply)

    # --- faults -----------------------------------------------------------------------------------

    def new_actor(self, name: str) -> SimActor:
        """Start an actor process under this name."""
        self.num_processes += 1
        return SimActor(self, name, self.num_processes)

    def disturb_actor(self) -> None:
        """Start, kill, stop or continue an actor."""
        random, faults = self.random, self.faults
        if len(self.actors) < self.knobs.num_actors and random.random() < 0.3:
            self.actors.append(self.new_actor(f"actor-{len(self.actors)}"))
            self.note(f"{self.actors[-1].name} joins")
            return
        place = int(random.random() * len(self.actors))
        actor = self.actors[place]
        if actor.stopped:
            if random.random() < 0.4:
                self.zombies.append(actor)
                self.actors[place] = self.new_actor(actor.name)
                self.note(f"{actor.name} is replaced")
            else:
                actor.stopped = False
                self.note(f"{actor.name} continues")
        elif random.random() < faults.deaths:
            actor.dead = True
            self.note(f"{actor.name} is killed")
            self.actors[place] = self.new_actor(actor.name)
        elif random.random() < faults.stalls:
            actor.stopped = True
            self.note(f"{actor.name} is stopped")

    def disturb_learner(self) -> None:
        """Kill, stop or continue the learner; a stopped learner may be replaced."""
        random, learner = self.random, self.learner
        if learner.stopped:
            if random.random() < 0.3:
                self.zombies.append(learner)
                self.start_learner()
            else:
                learner.stopped = False
                self.note("the learner continues")
        elif random.random() < self.faults.learner_deaths:
            learner.dead = True
            self.note("the learner is killed")
            self.start_learner()
        elif random.random() < self.faults.stalls:
            learner.stopped = True
            self.note("the learner is stopped")

    def start_learner(self) -> None:
        """Start a learner from the newest checkpoint, or from the previous checkpoint if the newest is damaged."""
        if len(self.checkpoints) > 1 and self.random.random() < 0.3:
            self.checkpoints.pop()
        self.num_processes += 1
        self.learner = SimLearner(self, self.num_processes)
        self.note(f"learner {self.learner.incarnation} starts from {self.checkpoints[-1]}")

    def disturb(self) -> None:
        """Inject a random fault."""
        chance = self.random.random()
        if chance < 0.5:
            self.disturb_actor()
        elif chance < 0.65:
            self.disturb_learner()
        elif chance < 0.75 and self.zombies:
            zombie = self.zombies[int(self.random.random() * len(self.zombies))]
            zombie.stopped = False
            for _ in range(3):
                if not (zombie.dead or zombie.stopped):
                    zombie.act()
        elif chance < 0.9:
            self.now_s += 30.0 * self.random.random()
            self.buffer.expire()
        elif self.happens(self.faults.restarts):
            self.buffer.restart()
            self.note("the buffer service restarts")

    # --- a run ------------------------------------------------------------------------------------

    def event(self) -> None:
        """Let one process act."""
        self.now_s += 1.0
        random = self.random.random
        if random() < 1.0 - 1.0 / (1.0 + 0.8 * len(self.wire)):
            self.deliver(int(random() * len(self.wire)))
            return
        chance = random()
        if chance < 0.55:
            actor = self.actors[int(random() * len(self.actors))]
            if not actor.stopped:
                actor.act()
        elif chance < 0.9:
            if not self.learner.stopped:
                self.learner.act()
        else:
            self.disturb()

    def check(self) -> None:
        """Check the invariants that hold after every request."""
        self.witness.counted(*self.buffer.counts())

    def run(self, num_events: int) -> int:
        """Run random events, then steps without faults; return the number of rounds of the steps without faults.

        Raises:
            Broken: an invariant does not hold.
        """
        for _ in range(num_events):
            self.event()
        self.faults, self.skip_renewal = NO_FAULTS, 0.0
        for zombie in self.zombies:
            zombie.dead = True
        self.learner.stopped = False
        for actor in self.actors:
            actor.stopped = False
        goal = self.learner.step + NUM_FINAL_STEPS
        for num_rounds in range(math.ceil(FINAL_ROUNDS * (1 + self.knobs.refill))):
            if self.learner.step >= goal:
                return num_rounds
            self.round()
        raise Broken("progress", f"step {self.learner.step + 1} was never finished: {self.buffer.waiting_for()}")

    def check_store(self) -> None:
        """Check the whole store.

        Raises:
            Broken: the store has faults.
        """
        if isinstance(self.buffer, CoreBuffer) and (found := self.buffer.faults()):
            raise Broken("store", "; ".join(found))

    def close(self) -> None:
        """Abort the transaction in the environment."""
        if isinstance(self.buffer, CoreBuffer):
            self.buffer.close()

    def round(self) -> None:
        """Let every process do all that it can."""
        self.now_s += 5.0
        self.buffer.expire()
        learner = self.learner
        learner.publish_skipped()
        while learner.queue:
            learner.commit()
        learner.request_batch()
        while learner.batch:
            learner.update()
        for actor in self.actors:
            actor.pull()
            actor.request_leases()
            while actor.start():
                pass
            while actor.finish():
                pass
            actor.renew()
        for _ in range(len(self.wire)):
            self.deliver(0)


def _name(owner: SimActor | SimLearner) -> str:
    return owner.name if isinstance(owner, SimActor) else f"learner {owner.incarnation}"


def _brief(value: object) -> str:
    if isinstance(value, p.LeaseGrant):
        return f"{[(lease.lease_id, lease.min_version) for lease in value.leases]} newest {value.newest}"
    if isinstance(value, tuple) and value and isinstance(value[0], Sample):
        return f"({value[0].key}, group {value[0].lease.group_id}, {value[0].oldest})"
    return str(value)
