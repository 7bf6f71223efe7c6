"""Steps: which groups each step trains on, and how their state changes afterwards.

Draws are recorded, so a repeated request for a step gets the same groups. The random generator is seeded by run, step
and incarnation. A restarted learner redoes the steps after its checkpoint with the recorded draws, up to the first draw
beyond the age bound; later steps are drawn again. A token of an abandoned version counts as no newer than the version
from which the learner resumed. A durable checkpoint at or after a step makes the step's uses of groups final and their
records evictable. Each unfinished recorded draw holds its groups, so no other step takes these groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec.structs import replace

from leeway.buffer import protocol as p
from leeway.buffer.errors import BufferRefused, CorruptRecord
from leeway.buffer.groups import Groups
from leeway.buffer.leases import Leases
from leeway.buffer.tables import MAX_TRAINED_AT, DrawRecord, Group, Incarnation, StoreState, Use
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts

MAX_BEHIND = 1024
"""Maximum number of steps by which the service's view of the learner may be behind."""
MAX_NAMED = 4
"""Maximum number of groups or actors that a message lists by name."""


class Steps:
    """Sampling and recording of each step's groups, and the learner's version and step."""

    def __init__(self, facts: RunFacts, groups: Groups, leases: Leases) -> None:
        self._facts, self._contract = facts, facts.contract
        self._groups = groups
        self._leases = leases
        self._waits = self._contract.config.on_stale == "wait"

    def draw(self, tx: Transaction, request: p.DrawRequest) -> DrawRecord | None:
        """Return the groups of a step, or None if the step must wait.

        Raises:
            BufferRefused: the learner was replaced, or the request contradicts the recorded state.
        """
        state = tx.state
        self._check(tx, request)
        self._leases.allowed_lag = request.allowed_lag
        draw = tx.draws.get(request.step)
        is_over = request.step not in state.pending_draws
        if draw is not None and draw.incarnation == state.incarnation and (is_over or draw.version == request.version):
            return draw
        self._check_version(state, request.step, request.version)
        if draw is not None and self._adopt(tx, draw, request):
            return draw
        if draw is None and request.step <= state.step:
            raise BufferRefused(f"step {request.step} is over: the learner has finished step {state.step}")
        self.release_from(tx, request.step)
        for group_id in list(self._contract.evict(self._groups.index.ready, request.version)):
            self._groups.drop_ready(tx, tx.groups.require(group_id), "dropped_stale")
        chosen = self._choose_sound(tx, request)
        self._refuse_if_exhausted(tx, request)
        if len(chosen) < request.num_groups or self._held_back_by(tx, chosen, request.version):
            return None
        return self._record(tx, request, chosen)

    def waiting_for(self, tx: Transaction, request: p.DrawRequest) -> str:
        """Return which groups the step is missing, and which actors hold their leases."""
        ready = len(self._groups.index.ready)
        text = f"step {request.step} has {min(ready, request.num_groups)} of {request.num_groups} groups"
        chosen = self._choose(tx, request) if self._waits else []
        held = [] if len(chosen) < request.num_groups else self._held_back_by(tx, chosen, request.version)
        if held:
            text += (
                f" and waits for older groups (on_stale = 'wait'): "
                f"{_some([f'group {group_id}' for group_id in held], len(held))}"
            )
        if tx.state.num_set_aside:
            text += f" ({tx.state.num_set_aside} groups of equal rewards were set aside for this step)"
        return f"{text}; {self._open_groups(tx)}"

    def begin(self, tx: Transaction, message: p.BeginIncarnation) -> p.IncarnationReply:
        """Begin an incarnation and end draining. Idempotent per session; a replaced session raises BufferRefused."""
        state = tx.state
        sessions = [start.session for start in state.incarnations]
        if message.session in sessions[:-1]:
            raise BufferRefused(f"this learner was replaced by incarnation {state.incarnation}; stop this learner")
        if message.session not in sessions:
            state.draining = False  # draining applied to the previous learner
            tx.undo.append(self._groups.prompts.pace.undo())
            self._groups.prompts.pace.begun()
            self._abandon(tx, message)
            self._resume(tx, message)
        return p.IncarnationReply(state.incarnation, state.resumed_at)

    def published(self, tx: Transaction, message: p.Published) -> None:
        """Record that actors can pull a version; ignore a version from an abandoned incarnation."""
        state, version = tx.state, message.version
        if not message.incarnation == state.incarnation >= 0:
            return
        newest = self._contract.latest_version(state.version, len(state.pending_draws) + MAX_BEHIND)
        if version > newest:
            raise BufferRefused(f"the learner cannot be at version {version}: its last version was {state.version}")
        state.published = max(state.newest, (message.incarnation, version))

    def finish(self, tx: Transaction, message: p.StepFinished) -> None:
        """Finish a step: its samples become `trained`, or `filtered` if the step was skipped. Idempotent."""
        state = tx.state
        self._check_incarnation(state, message.incarnation)
        draw = tx.draws.get(message.step) if message.step > 0 else None
        if draw is None:
            if message.step <= state.step:
                return
            raise BufferRefused(f"step {message.step} cannot be finished: the step was never drawn")
        if message.step not in state.pending_draws:  # a duplicate, or the step is in the checkpoint
            return
        self._check_outcome(draw, message)
        self._finish(tx, draw, message.version)
        state.version, state.step = message.version, message.step
        tx.undo.append(self._groups.prompts.pace.undo())
        self._groups.prompts.pace.finished()

    def durable(self, tx: Transaction, message: p.CheckpointDurable) -> None:
        self._check_incarnation(tx.state, message.incarnation)
        unfinished = [step for step in tx.state.pending_draws if step <= message.step]
        if unfinished:
            raise BufferRefused(f"a checkpoint at step {message.step} must wait for unfinished steps {unfinished}")
        for step in [step for (step,) in tx.draws.all_keys() if step <= message.step]:
            self._forget(tx, tx.draws.require(step))
        self._groups.evict(tx)

    def release_from(self, tx: Transaction, step: int) -> None:
        """Delete the draw of this step, and all later draws of earlier incarnations.

        Groups held for later steps would otherwise keep admission closed while this step waits for new groups.
        """
        for (later,) in list(tx.draws.all_keys(step)):
            draw = tx.draws.require(later)
            if later == step or draw.incarnation != tx.state.incarnation:
                self._forget(tx, draw)

    # --- parts ------------------------------------------------------------------------------------

    def _forget(self, tx: Transaction, draw: DrawRecord) -> None:
        """Delete a recorded draw, so that it keeps no records; if the step is unfinished, release its groups."""
        is_pending = tx.state.pending_draws.pop(draw.step, None) is not None
        for group_id in set(draw.group_ids):
            group = tx.groups.require(group_id)
            group.held -= 1
            if is_pending:
                self._groups.release(tx, group)
            else:
                self._groups.save(tx, group)
        tx.draws.delete(draw.step)

    def _check_incarnation(self, state: StoreState, incarnation: int) -> None:
        """Raise BufferRefused if `incarnation` is not the current incarnation."""
        if state.incarnation < 0:
            raise BufferRefused("no learner has begun: send BeginIncarnation first")
        if incarnation != state.incarnation:
            raise BufferRefused(f"incarnation {incarnation} was replaced by {state.incarnation}; stop this learner")

    def _all_usable(self, tx: Transaction, draw: DrawRecord, version: int) -> bool:
        """Return whether all groups of a recorded draw are within the age bound at this version."""
        groups = [tx.groups.require(group_id) for group_id in draw.group_ids]
        ages = [(group.oldest_effective(tx.state), group) for group in groups]
        return len(self._contract.select(ages, version)) == len(groups)

    def _refuse_if_exhausted(self, tx: Transaction, request: p.DrawRequest) -> None:
        """Refuse a draw that the recorded samples can never fill; groups of unfinished steps may still be reused."""
        num_ready = len(self._groups.index.ready)
        if self._groups.config.source is None or num_ready >= request.num_groups or tx.state.pending_draws:
            return
        ledger = tx.state.ledger
        raise BufferRefused(
            f"step {request.step} has {num_ready} of {request.num_groups} groups, and buffer.source is exhausted: "
            f"{ledger.filtered} samples are filtered (for example by skipped steps), {ledger.uninformative} set aside, "
            f"{ledger.evicted_unused} evicted unused (for example damaged). Resume with learner.num_steps = "
            f"{request.step - 1} to end the run here"
        )

    def _open_groups(self, tx: Transaction) -> str:
        """Return which actors hold leases of open groups, and whether more groups may be leased."""
        incomplete = []
        still_open = self._groups.index.open
        for group_id in still_open[:MAX_NAMED]:
            group = tx.groups.require(group_id)
            owner = f"{group.actor} (lease {group.lease_id})" if group.lease_id else "no actor yet"
            incomplete.append(f"group {group_id}, samples {group.missing()} from {owner}")
        text = f"missing: {_some(incomplete, len(still_open))}; " if incomplete else ""
        closed = self._leases.closed_because(tx)
        return text + (f"no new leases: {closed}" if closed else "new leases wait for a request from an actor")

    def _check(self, tx: Transaction, request: p.DrawRequest) -> None:
        self._check_incarnation(tx.state, request.incarnation)
        resumed = tx.state.incarnations[-1].step
        if request.step <= resumed:
            raise BufferRefused(
                f"step {request.step} was done before this incarnation, which began after step {resumed}; "
                f"its first step is {resumed + 1} (steps are counted from 1)"
            )
        if request.num_groups != self._facts.groups_per_step:
            raise BufferRefused(
                f"step {request.step} requests {request.num_groups} groups, but admission assumes "
                f"{self._facts.groups_per_step} per step: set [learner] groups_per_step to the value of the run"
            )

    def _check_version(self, state: StoreState, step: int, version: int) -> None:
        """Refuse a version that the learner cannot have reached at this step."""
        # A delayed request may still assume a version from a step that has been skipped since.
        ahead = min(len(state.pending_draws), max(0, step - 1 - state.step))
        if not state.version <= version <= self._contract.latest_version(state.version, ahead):
            raise BufferRefused(
                f"step {step} cannot train at version {version}: the learner finished steps up to version "
                f"{state.version}, and {len(state.pending_draws)} further steps are drawn"
            )

    def _adopt(self, tx: Transaction, draw: DrawRecord, request: p.DrawRequest) -> bool:
        """Assign a recorded draw to this incarnation and version; return whether the draw can still be trained on."""
        if not self._all_usable(tx, draw, request.version):
            return False
        if draw.incarnation != request.incarnation and self._is_unfit(tx, draw):
            return False
        draw.incarnation, draw.version = request.incarnation, request.version
        tx.draws.put(draw, draw.step)
        return True

    def _is_unfit(self, tx: Transaction, draw: DrawRecord) -> bool:
        drawn = set(draw.record_ids)
        groups = [tx.groups.require(group_id) for group_id in draw.group_ids]
        lengths = [
            length for group in groups for record, length in zip(group.records, group.lengths, strict=True)
            if record in drawn
        ]  # fmt: skip
        return max(lengths, default=0) > self._facts.longest_drawn or self._is_damaged(tx, draw.record_ids)

    def _choose_sound(self, tx: Transaction, request: p.DrawRequest) -> list[int]:
        """Return the sampler's choice; remove too long or damaged samples, and choose again until it has none.

        Groups of equal rewards are set aside before each choice, also if only the removal made their rewards equal.
        """
        while True:
            self._groups.set_aside_uninformative(tx)
            chosen = self._choose(tx, request)
            groups = [tx.groups.require(group_id) for group_id in sorted(set(chosen))]
            filtered = [self._groups.filter_too_long(tx, group, self._facts.longest_drawn) for group in groups]
            if any(filtered):
                continue
            damaged = [each for each in groups if self._is_damaged(tx, [each.records[i] for i in each.usable()])]
            if not damaged:
                return chosen
            for group in damaged:
                self._groups.drop_ready(tx, group, "evicted_unused")

    def _choose(self, tx: Transaction, request: p.DrawRequest) -> list[int]:
        """Return the sampler's choice for the step; fewer groups than requested if not enough are ready."""
        num = request.num_groups
        if len(self._groups.index.ready) < num:
            return []
        seeds = [self._facts.seed & 0xFFFFFFFF, request.step, request.incarnation]
        random = np.random.default_rng(seeds)
        return self._groups.sampler.choose(self._groups.index, num, random)

    def _record(self, tx: Transaction, request: p.DrawRequest, chosen: list[int]) -> DrawRecord:
        drawn = [tx.groups.require(group_id) for group_id in chosen]
        record_ids = [group.records[index] for group in drawn for index in group.usable()]
        draw = DrawRecord(request.step, request.version, request.incarnation, chosen, record_ids)
        for group in {group.group_id: group for group in drawn}.values():
            group.held += 1
            self._groups.hold(tx, group)
        tx.draws.put(draw, draw.step)
        tx.state.pending_draws[draw.step] = len(set(chosen))
        tx.state.num_set_aside = 0
        tx.undo.append(self._groups.prompts.pace.undo())
        self._groups.prompts.pace.drawn()
        return draw

    def _held_back_by(self, tx: Transaction, chosen: Sequence[int], version: int) -> list[int]:
        """Return the open groups that this step must wait for (on_stale = "wait")."""
        if not self._waits:
            return []

        def left(ages: Iterable[int]) -> list[int]:
            """Return for how many steps after this step groups of these ages stay usable; [] without an age bound."""
            steps_left = (self._contract.steps_left(oldest, version) for oldest in ages)
            return [num_steps for num_steps in steps_left if num_steps is not None]

        drawn, ready, still_open = set(chosen), self._groups.index.ready, self._groups.index.open
        held_back = self._contract.held_back(
            left(key.oldest for key in ready if key.group_id in drawn),
            left(key.oldest for key in ready if key.group_id not in drawn),
            left(tx.groups.require(group_id).oldest_effective(tx.state) for group_id in still_open),
        )
        return [still_open[i] for i in held_back]

    def _is_damaged(self, tx: Transaction, records: Sequence[int]) -> bool:
        try:
            tx.blocks_of(records)
        except CorruptRecord:
            return True
        return False

    def _abandon(self, tx: Transaction, message: p.BeginIncarnation) -> None:
        """Begin the incarnation; from now on tokens of abandoned versions count as older than before."""
        state = tx.state
        index = self._groups.index
        changed = [each.group_id for each in index.ready if each.oldest > message.version]
        if state.incarnations:
            newest = state.newest_possible(self._contract.updates_per_step)
            state.incarnations[-1] = replace(state.incarnations[-1], newest=newest)
        state.incarnations.append(Incarnation(message.session, message.version, message.step))
        for group_id in changed:
            index.update(tx, tx.groups.require(group_id))
        for group_id in index.open:  # the index needs no update: it does not order open groups by age
            group = tx.groups.require(group_id)
            if group.min_version > message.version:
                group.min_version = message.version
                tx.groups.put(group, group_id)

    def _resume(self, tx: Transaction, message: p.BeginIncarnation) -> None:
        """Finish the recorded draws of steps in the checkpoint, and hold later draws, whose steps are to be redone."""
        state = tx.state
        state.version, state.step = message.version, message.step
        for (step,) in list(tx.draws.all_keys()):
            draw = tx.draws.require(step)
            if step <= message.step:
                if step in state.pending_draws:
                    self._finish(tx, draw, self._version_after(draw, message))
            elif not self._all_usable(
                tx, draw, self._contract.latest_version(message.version, step - message.step - 1)
            ):
                self.release_from(tx, step)
                return
            elif step not in state.pending_draws:
                for group_id in set(draw.group_ids):
                    self._groups.hold(tx, tx.groups.require(group_id))
                state.pending_draws[step] = len(set(draw.group_ids))

    def _version_after(self, draw: DrawRecord, message: p.BeginIncarnation) -> int:
        """Return the version after a step of the checkpoint whose StepFinished never arrived.

        The checkpoint's version shows whether the last step was skipped; earlier steps count as not skipped.
        """
        if draw.step == message.step and draw.version == message.version:
            return draw.version
        return max(draw.version + 1, min(message.version, self._contract.latest_version(draw.version, 1)))

    def _check_outcome(self, draw: DrawRecord, message: p.StepFinished) -> None:
        """Refuse a version that the step cannot lead to; each of its updates adds one version or is skipped."""
        least, most = draw.version + 1, self._contract.latest_version(draw.version, 1)
        if message.skipped:
            least = most = draw.version
        if not least <= message.version <= most:
            versions = f"version {least}" if least == most else f"a version from {least} to {most}"
            raise BufferRefused(
                f"step {draw.step} was drawn for version {draw.version}, so {'skipping ' if message.skipped else ''}"
                f"it leads to {versions}, not {message.version}"
            )

    def _finish(self, tx: Transaction, draw: DrawRecord, version: int) -> None:
        """Finish a step that led to this version; if the version is unchanged, the step was skipped."""
        state, skipped = tx.state, version == draw.version
        is_redone = draw.is_trained
        drawn = set(draw.record_ids)
        for group_id, times in Counter(draw.group_ids).items():
            group = tx.groups.require(group_id)
            used = [index for index, record in enumerate(group.records) if record in drawn]
            self._move_used(tx, group, used, skipped=skipped)
            if not skipped and not is_redone:
                state.fidelity.trained.add([group.completion_lengths[index] for index in used for _ in range(times)])
            if draw.finished_by < 0:
                group.uses += times
            if not skipped:
                earlier = [use for use in group.trained_at if use.step != draw.step]
                group.trained_at = [*earlier, Use(draw.step, version - 1, state.incarnation)][-MAX_TRAINED_AT:]
            self._groups.release(tx, group)
        if not skipped:
            state.ledger.uses += len(draw.record_ids)
            state.ledger.redone_uses += len(draw.record_ids) if is_redone else 0
            draw.is_trained = True
        draw.finished_by = state.incarnation
        tx.draws.put(draw, draw.step)
        state.pending_draws.pop(draw.step, None)

    def _move_used(self, tx: Transaction, group: Group, used: list[int], *, skipped: bool) -> None:
        target = "filtered" if skipped else "trained"
        for source in ("drawn",) if skipped else ("drawn", "filtered"):
            moved = [index for index in used if group.sample_states[index] == source]
            for index in moved:
                group.sample_states[index] = target
            tx.state.ledger.move(len(moved), source, target)
            if not skipped and group.is_uninformative:
                tx.state.ledger.trained_uninformative += len(moved)


def _some(names: list[str], num: int) -> str:
    named = "; ".join(names[:MAX_NAMED])
    return named if num <= MAX_NAMED else f"{named}; and {num - MAX_NAMED} others"
