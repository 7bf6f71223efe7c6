"""A learner process of the simulation, from its start to its kill."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leeway.common.staleness import PolicyVersion
from tests.simulation.witness import Key

if TYPE_CHECKING:
    from tests.simulation.world import World

NUM_KEPT = 2
"""Number of checkpoints that are kept."""


class SimLearner:
    """Draws steps, applies updates, publishes weights between and after updates, and sometimes writes a checkpoint."""

    def __init__(self, world: World, process_number: int) -> None:
        self.world = world
        self.stopped = False
        self.dead = False
        self.step, self.version = world.checkpoints[-1]
        session = f"learner-{process_number}"
        self.incarnation = world.buffer.begin(session, self.version, self.step)
        if world.happens(world.faults.copies):
            assert world.buffer.begin(session, self.version, self.step) == self.incarnation
        world.witness.learner_started(self.incarnation, self.version, self.step, world.reached)
        self.batch: list[list[Key]] = []
        self.num_updates = 0
        self.is_waiting = self.was_refused = False
        self.lag_control = world.random.choice(("off", "tight", "any"))
        self.unconfirmed = 0
        """Number of reports without a reply; the next draw waits for the replies."""
        self.queue: list[PolicyVersion] = []
        """Versions that are being published."""
        self.has_skipped_publication = False
        self.publish()

    def act(self) -> None:
        """Take one random action."""
        if self.queue and self.world.random.random() < 0.5:
            self.commit()
        elif self.batch:
            self.update()
            while self.batch and self.world.random.random() < 0.6:
                self.update()
        elif self.has_skipped_publication and self.world.random.random() < 0.5:
            self.publish_skipped()
        elif self.step > self.world.checkpoints[-1][0] and self.world.random.random() < 0.2:
            self.checkpoint()
        elif not self.was_refused or self.world.random.random() < 0.4:
            self.request_batch()

    # --- steps ------------------------------------------------------------------------------------

    def request_batch(self) -> None:
        """Draw the next step, once all reports are confirmed."""
        if not (self.is_waiting or self.batch or self.unconfirmed):
            self.is_waiting = True
            self.world.send("draw", self, (self.step + 1, self.version, self.incarnation, self.allowed()))

    def allowed(self) -> int | None:
        """Return a lag that lag control could allow; any sequence of values is valid."""
        if self.lag_control == "any":
            return self.world.random.choice((None, self.world.random.randrange(self.world.knobs.max_lag + 2)))
        return 0 if self.lag_control == "tight" else None

    def on_draw(self, arguments: object, groups: list[list[Key]] | None) -> None:
        """Store the batch, or note that the batch has to be requested again."""
        self.is_waiting = False
        self.was_refused = groups is None
        if groups is not None:
            self.batch, self.num_updates, self.began_at = groups, 0, self.version

    def update(self) -> None:
        """Take one update of the step; the last update finishes the step."""
        world = self.world
        if not world.happens(world.faults.skips):
            keys = [key for group in self.batch for key in group]
            if world.learner is self:
                world.contract.check_trained(self.version, world.witness.lag(keys, self.version))
                world.witness.trains(self.step + 1, self.version, keys, len(self.batch))
            self.version += 1
            world.record_progress(self)
            if self.version % world.knobs.publish_every == 0:
                self.publish()
        self.num_updates += 1
        if self.num_updates == world.knobs.updates_per_step:
            self.step += 1
            self.batch = []
            world.record_progress(self)
            self.report("finish", (self.step, self.version, self.incarnation, self.version == self.began_at))

    def report(self, kind: str, arguments: tuple[object, ...]) -> None:
        """Report an event to the buffer."""
        self.unconfirmed += 1
        self.world.send(kind, self, arguments)

    def on_report(self, arguments: object, reply: object) -> None:
        """Count the reply to a report."""
        self.unconfirmed -= 1

    on_finish = on_published = on_durable = on_report

    def checkpoint(self) -> None:
        """Write a checkpoint; draws since the oldest kept checkpoint stay recorded."""
        if not (self.batch or self.unconfirmed or self.is_waiting):
            world = self.world
            world.checkpoints = [*world.checkpoints, (self.step, self.version)][-NUM_KEPT:]
            self.report("durable", (world.checkpoints[0][0], self.incarnation))

    # --- weights ----------------------------------------------------------------------------------

    def publish(self) -> None:
        """Queue the current version for publication, unless the disk is full."""
        self.has_skipped_publication = self.world.happens(self.world.faults.full_disk)
        if not self.has_skipped_publication:
            self.queue.append(PolicyVersion(self.incarnation, self.version))

    def publish_skipped(self) -> None:
        """Publish a skipped version, unless a step or a publication is in progress."""
        if self.world.publishes_skipped and not (self.batch or self.queue):
            self.publish()

    def commit(self) -> None:
        """Commit and report a version; exit if another learner has committed a newer version."""
        if not self.queue:
            return
        version = self.queue.pop(0)
        if self.world.shelf.commit(version):
            self.report("published", tuple(version))
        elif self.world.learner is not self:
            self.dead = True
