"""One life of a learner: its process from start to kill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.staleness import PolicyVersion
from tests.simulation.witness import Key

if TYPE_CHECKING:
    from tests.simulation.world import World

NUM_KEPT = 2
"""Checkpoints that stay."""


class SimLearner:
    """Draws a step, takes its updates, publishes between and after them, now and then writes a checkpoint."""

    def __init__(self, world: World, life: int) -> None:
        self.world = world
        self.stopped = False
        self.dead = False
        self.step, self.version = world.checkpoints[-1]
        session = f"learner-{life}"
        self.incarnation = world.buffer.begin(session, self.version, self.step)
        if world.happens(world.faults.copies):
            assert world.buffer.begin(session, self.version, self.step) == self.incarnation
        world.witness.learner_began(self.incarnation, self.version, self.step, world.reached)
        self.batch: list[list[Key]] = []
        self.num_updates = 0
        self.asks = self.was_refused = False
        self.controls = world.random.choice(("off", "tight", "any"))
        self.unconfirmed = 0
        """Reports that the buffer has not answered; a draw comes after them."""
        self.queue: list[PolicyVersion] = []
        """Versions on their way to the shelf."""
        self.owes_publication = False
        self.publish()

    def act(self) -> None:
        """Do one thing, by chance."""
        if self.queue and self.world.random.random() < 0.5:
            self.commit()
        elif self.batch:
            self.update()
            while self.batch and self.world.random.random() < 0.6:
                self.update()
        elif self.owes_publication and self.world.random.random() < 0.5:
            self.make_up()
        elif self.step > self.world.checkpoints[-1][0] and self.world.random.random() < 0.2:
            self.checkpoint()
        elif not self.was_refused or self.world.random.random() < 0.4:
            self.ask()

    # --- steps ------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for the next step, once everything that was reported is confirmed."""
        if not (self.asks or self.batch or self.unconfirmed):
            self.asks = True
            self.world.send("draw", self, (self.step + 1, self.version, self.incarnation, self.allowed()))

    def allowed(self) -> int | None:
        """What a controller of lag may say, and less and more than that: any sequence."""
        if self.controls == "any":
            return self.world.random.choice((None, self.world.random.randrange(self.world.knobs.max_lag + 2)))
        return 0 if self.controls == "tight" else None

    def on_draw(self, arguments: object, groups: list[list[Key]] | None) -> None:
        """The batch, or that it must be asked for again."""
        self.asks = False
        self.was_refused = groups is None
        if groups is not None:
            self.batch, self.num_updates, self.began_at = groups, 0, self.version

    def update(self) -> None:
        """One update of the step; the last one ends it."""
        world = self.world
        if not world.happens(world.faults.skips):
            keys = [key for group in self.batch for key in group]
            if world.learner is self:
                world.contract.check_trained(self.version, world.witness.lag(keys, self.version))
                world.witness.trains(self.step + 1, self.version, keys, len(self.batch))
            self.version += 1
            world.has_reached(self)
            if self.version % world.knobs.publish_every == 0:
                self.publish()
        self.num_updates += 1
        if self.num_updates == world.knobs.updates_per_step:
            self.step += 1
            self.batch = []
            world.has_reached(self)
            self.report("finish", (self.step, self.version, self.incarnation, self.version == self.began_at))

    def report(self, kind: str, arguments: tuple[object, ...]) -> None:
        """Tell the buffer something."""
        self.unconfirmed += 1
        self.world.send(kind, self, arguments)

    def on_report(self, arguments: object, reply: object) -> None:
        """It was heard."""
        self.unconfirmed -= 1

    on_finish = on_published = on_durable = on_report

    def checkpoint(self) -> None:
        """Write a checkpoint; draws since the oldest that stays are kept."""
        if not (self.batch or self.unconfirmed or self.asks):
            world = self.world
            world.checkpoints = [*world.checkpoints, (self.step, self.version)][-NUM_KEPT:]
            self.report("durable", (world.checkpoints[0][0], self.incarnation))

    # --- weights ----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Hand the present version to the publisher, unless its disk is full."""
        self.owes_publication = self.world.happens(self.world.faults.full_disk)
        if not self.owes_publication:
            self.queue.append(PolicyVersion(self.incarnation, self.version))

    def make_up(self) -> None:
        """Publish what was skipped: while the learner waits for a step nobody else will."""
        if self.world.makes_up and not (self.batch or self.queue):
            self.publish()

    def commit(self) -> None:
        """A version is on the shelf, and the buffer is told. Another learner's newer one ends this one."""
        if not self.queue:
            return
        version = self.queue.pop(0)
        if self.world.shelf.commit(version):
            self.report("published", tuple(version))
        elif self.world.learner is not self:
            self.dead = True
