"""Which groups train at which step: recorded, so that the same step asked again gets the same groups.

A restarted learner redoes the steps after its checkpoint from the recorded draws, as far as the
age bound holds: tokens of abandoned versions count at most as the version it resumed from, so with
publication on time the first max_lag + 1 steps are redone as they were and later ones are drawn
anew. Uses become final, and the records evictable, with a durable checkpoint at or past the step.
"""

from __future__ import annotations

from buffer.config import RunFacts
from buffer.errors import BufferRefused, CorruptRecord
from buffer.groups import Groups
from buffer.laws import ReadyGroup, SamplingLaw
from buffer.leases import Leases
from buffer.protocol import BeginIncarnation, CheckpointDurable, DrawRequest, IncarnationReply, Published, StepFinished
from buffer.store import Transaction
from buffer.tables import Draw, Group, Incarnation, State
from weight_sync.staleness import StalenessContract

MAX_NAMED = 4
"""How many groups or actors a message names before it says 'and others'."""


class Draws:
    """Records draws and follows the learner's steps."""

    def __init__(
        self, facts: RunFacts, contract: StalenessContract, groups: Groups, leases: Leases, law: SamplingLaw
    ) -> None:
        self._facts = facts
        self._contract = contract
        self._groups = groups
        self._leases = leases
        self._law = law

    # --- the learner's life -----------------------------------------------------------------------

    def begin(self, tx: Transaction, message: BeginIncarnation) -> IncarnationReply:
        """A learner starts; the same session said twice begins one incarnation only.

        Raises:
            BufferRefused: a newer learner has begun since.
        """
        if message.version < 0 or message.step < 0:
            raise BufferRefused(f"a learner cannot begin at version {message.version} and step {message.step}")
        state = tx.state
        sessions = [start.session for start in state.incarnations]
        if message.session in sessions[:-1]:
            raise BufferRefused(f"this learner was replaced by incarnation {state.incarnation}; only one may train")
        if message.session not in sessions:
            ready = [tx.groups.require(group_id) for _, group_id in tx.ready_groups.all_keys()]
            for group in ready:
                tx.ready_groups.delete(group.oldest_effective(state), group.group_id)
            state.incarnations.append(Incarnation(message.session, message.version, message.step))
            for group in ready:
                # Ages have changed: tokens of abandoned versions count as older than they were.
                tx.ready_groups.put(b"", group.oldest_effective(state), group.group_id)
            self._resume(tx, message)
        return IncarnationReply(state.incarnation, state.resumed_at)

    def published(self, tx: Transaction, message: Published) -> None:
        """Weights can be pulled; news from an abandoned incarnation changes nothing."""
        version = (message.incarnation, message.version)
        if message.incarnation == tx.state.incarnation:
            tx.state.published = version if tx.state.published is None else max(tx.state.published, version)

    def finish(self, tx: Transaction, message: StepFinished) -> None:
        """Step `step` is done: its samples are trained (or filtered, where it was skipped)."""
        state = tx.state
        self._check_incarnation(state, message.incarnation)
        draw = tx.draws.get(message.step) if message.step > 0 else None
        if draw is None:
            if message.step <= state.step:
                return
            raise BufferRefused(f"step {message.step} cannot be finished: it was never drawn")
        if draw.finished_by == state.incarnation:
            return
        expected = draw.version + (0 if message.skipped else 1)
        if message.version != expected:
            raise BufferRefused(
                f"step {message.step} was drawn for version {draw.version}, so {'skipping' if message.skipped else ''} "
                f"it leads to version {expected}, not {message.version}"
            )
        self._finish(tx, draw, skipped=message.skipped)
        state.version, state.step = message.version, message.step

    def durable(self, tx: Transaction, message: CheckpointDurable) -> None:
        """Uses up to and including `step` are final."""
        self._check_incarnation(tx.state, message.incarnation)
        unfinished = [step for step in tx.state.pending_draws if step <= message.step]
        if unfinished:
            raise BufferRefused(f"a checkpoint at step {message.step} cannot be durable: {unfinished} are unfinished")
        for step in [step for (step,) in tx.draws.all_keys() if step <= message.step]:
            draw = tx.draws.require(step)
            for group_id in draw.group_ids:
                self._groups.make_evictable(tx, tx.groups.require(group_id))
            tx.draws.delete(step)
        self._groups.evict(tx)

    # --- drawing ----------------------------------------------------------------------------------

    def draw(self, tx: Transaction, request: DrawRequest) -> Draw | None:
        """The groups of a step; None where the step must wait.

        Raises:
            BufferRefused: the learner was replaced, or the request contradicts what is known.
        """
        state = tx.state
        self._check_incarnation(state, request.incarnation)
        resumed = state.incarnations[-1].step
        if request.step <= resumed:
            raise BufferRefused(
                f"step {request.step} was done before this incarnation, which began after step {resumed}; "
                f"its first step is {resumed + 1} (steps are counted from 1)"
            )
        if request.num_groups != self._facts.groups_per_step:
            raise BufferRefused(
                f"step {request.step} asks for {request.num_groups} groups, but admission counts on "
                f"{self._facts.groups_per_step} per step: make [learner] groups_per_step agree with the run's facts"
            )
        draw = tx.draws.get(request.step)
        if draw is not None and draw.incarnation == state.incarnation:
            return draw
        if not state.version <= request.version <= state.version + len(state.pending_draws):
            raise BufferRefused(
                f"step {request.step} cannot train at version {request.version}: the learner finished steps up to "
                f"version {state.version} and {len(state.pending_draws)} more are drawn"
            )
        if draw is not None:
            if self._all_usable(tx, draw, request.version):
                draw.incarnation, draw.version = state.incarnation, request.version
                tx.draws.put(draw, draw.step)
                return draw
            self._release_from(tx, request.step)
        self._drop_stale(tx, request.version)
        chosen = self._law.choose((ReadyGroup(*key) for key in tx.ready_groups.all_keys()), request.num_groups)
        damaged = [group for key in chosen if (group := self._damaged(tx, key.group_id)) is not None]
        for group in damaged:
            self._groups.drop_ready(tx, group, "evicted_unused")
        if damaged or len(chosen) < request.num_groups or self._held_back_by(tx, chosen, request.version):
            return None
        return self._record(tx, request, chosen)

    def waiting_for(self, tx: Transaction, request: DrawRequest) -> str:
        """What the step still lacks, and who owes it."""
        ready = tx.ready_groups.count
        chosen = self._law.choose((ReadyGroup(*key) for key in tx.ready_groups.all_keys()), request.num_groups)
        text = f"step {request.step} has {min(ready, request.num_groups)} of {request.num_groups} groups"
        held = [] if len(chosen) < request.num_groups else self._held_back_by(tx, chosen, request.version)
        if held:
            text += (
                f" and waits for older ones (on_stale = 'wait'): {_some([f'group {group_id}' for group_id in held])}"
            )
        owed = []
        for (group_id,) in tx.open_groups.all_keys():
            group = tx.groups.require(group_id)
            owner = f"{group.actor} (lease {group.lease_id})" if group.lease_id else "nobody: it waits for an actor"
            owed.append(f"group {group_id}, samples {group.missing()} from {owner}")
        if owed:
            text += f"; owed: {_some(owed)}"
        closed = self._leases.closed_because(tx)
        return text + (f"; no new leases: {closed}" if closed else "; new leases wait for an actor to ask")

    # --- parts ------------------------------------------------------------------------------------

    def _check_incarnation(self, state: State, incarnation: int) -> None:
        if state.incarnation < 0:
            raise BufferRefused("no learner has begun: send BeginIncarnation first")
        if incarnation != state.incarnation:
            raise BufferRefused(f"incarnation {incarnation} was replaced by {state.incarnation}; only one may train")

    def _record(self, tx: Transaction, request: DrawRequest, chosen: list[ReadyGroup]) -> Draw:
        record_ids = []
        for oldest, group_id in chosen:
            group = tx.groups.require(group_id)
            tx.ready_groups.delete(oldest, group_id)
            waiting = group.having("waiting")
            for index in waiting:
                group.fates[index] = "drawn"
                record_ids.append(group.records[index])
            tx.state.ledger.move(len(waiting), "waiting", "drawn")
            group.phase = "drawn"
            self._groups.save(tx, group)
        group_ids = [group_id for _, group_id in chosen]
        draw = Draw(request.step, request.version, request.incarnation, group_ids, record_ids)
        tx.draws.put(draw, draw.step)
        tx.state.pending_draws[draw.step] = len(group_ids)
        return draw

    def _drop_stale(self, tx: Transaction, version: int) -> None:
        """Drop the ready groups that are past the bound at this version; the index has them first."""
        stale = []
        for oldest, group_id in tx.ready_groups.all_keys():
            if self._contract.usable(oldest, version):
                break
            stale.append(group_id)
        for group_id in stale:
            self._groups.drop_ready(tx, tx.groups.require(group_id), "dropped_stale")

    def _held_back_by(self, tx: Transaction, chosen: list[ReadyGroup], version: int) -> list[int]:
        """Open groups that this step must wait for (on_stale = "wait").

        After this step the others are used at best G per step, oldest first: the i-th of them at
        version + 1 + i // G. Where one of them would be past the bound there, an open group no
        younger than it must be in this very step instead of a younger one that was chosen.
        """
        drawn = set(chosen)
        ready = [key for pair in tx.ready_groups.all_keys() if (key := ReadyGroup(*pair)) not in drawn]
        still_open = [
            ReadyGroup(tx.groups.require(group_id).oldest_effective(tx.state), group_id)
            for (group_id,) in tx.open_groups.all_keys()
        ]
        latest_at_risk = -1
        for i, group in enumerate(sorted(ready + still_open)):
            if self._contract.holds(group.oldest, version + i // self._facts.groups_per_step):
                latest_at_risk = group.oldest
        youngest_chosen = max(group.oldest for group in chosen)
        return [g.group_id for g in still_open if g.oldest <= latest_at_risk and g.oldest < youngest_chosen]

    def _damaged(self, tx: Transaction, group_id: int) -> Group | None:
        """The group, where one of its records fails its checksum."""
        group = tx.groups.require(group_id)
        try:
            for index in group.having("waiting"):
                tx.records.require(group.records[index])
        except CorruptRecord:
            return group
        return None

    def _finish(self, tx: Transaction, draw: Draw, *, skipped: bool) -> None:
        ledger = tx.state.ledger
        drawn = set(draw.record_ids)
        for group_id in draw.group_ids:
            group = tx.groups.require(group_id)
            if group.phase == "drawn":
                self._groups.close(tx, group, "filtered" if skipped else "trained", evictable=False)
            elif not skipped:
                # Redone: trained before, or filtered because the step was skipped then.
                ledger.redone_uses += len(group.having("trained"))
                for index, record in enumerate(group.records):
                    if group.fates[index] == "filtered" and record in drawn:
                        group.fates[index] = "trained"
                        ledger.move(1, "filtered", "trained")
                self._groups.save(tx, group)
        if not skipped:
            ledger.uses += len(draw.record_ids)
        draw.finished_by = tx.state.incarnation
        tx.draws.put(draw, draw.step)
        tx.state.pending_draws.pop(draw.step, None)

    def _resume(self, tx: Transaction, message: BeginIncarnation) -> None:
        """Settle the recorded draws: those in the checkpoint are done, later ones are to be redone."""
        state = tx.state
        state.version, state.step = message.version, message.step
        state.pending_draws = {}
        for (step,) in list(tx.draws.all_keys()):
            draw = tx.draws.require(step)
            if step <= message.step:
                if draw.finished_by < 0:
                    # The checkpoint holds this step, but its StepFinished never arrived.
                    self._finish(tx, draw, skipped=False)
            elif self._all_usable(tx, draw, message.version + step - message.step - 1):
                state.pending_draws[step] = len(draw.group_ids)
            else:
                self._release_from(tx, step)
                return

    def _all_usable(self, tx: Transaction, draw: Draw, version: int) -> bool:
        groups = [tx.groups.require(group_id) for group_id in draw.group_ids]
        return all(self._contract.usable(group.oldest_effective(tx.state), version) for group in groups)

    def _release_from(self, tx: Transaction, step: int) -> None:
        """Forget the draws of this step and all later ones.

        All later ones, because groups held for them would keep admission closed while this step
        waits for new groups. What was trained on stays trained; what was not is ready again.
        """
        for later in [each for (each,) in tx.draws.all_keys() if each >= step]:
            for group_id in tx.draws.require(later).group_ids:
                group = tx.groups.require(group_id)
                if group.phase == "drawn":
                    self._make_ready_again(tx, group)
                else:
                    self._groups.make_evictable(tx, group)
            tx.draws.delete(later)
            tx.state.pending_draws.pop(later, None)

    def _make_ready_again(self, tx: Transaction, group: Group) -> None:
        drawn = group.having("drawn")
        for index in drawn:
            group.fates[index] = "waiting"
        tx.state.ledger.move(len(drawn), "drawn", "waiting")
        group.phase = "ready"
        tx.ready_groups.put(b"", group.oldest_effective(tx.state), group.group_id)
        self._groups.save(tx, group)


def _some(names: list[str]) -> str:
    named = "; ".join(names[:MAX_NAMED])
    return named if len(names) <= MAX_NAMED else f"{named}; and {len(names) - MAX_NAMED} others"
