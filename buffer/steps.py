"""The learner's side of a store: its steps, and the scores of the reference model.

Steps: what becomes of recorded draws when they are finished, redone, forgotten or durable. A restarted learner redoes
the steps after its checkpoint from the recorded draws, as far as the age bound holds: tokens of abandoned versions
count at most as the version it resumed from. Later steps are drawn anew. Uses become final, and the records evictable,
with a durable checkpoint at or past the step. A group is held by each recorded draw that is not finished.

Scores: log-probabilities of the reference model. A step scores the samples of its draw that have none, and a step that
takes them again reads them here.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from buffer import rows
from buffer.errors import BufferRefused, CorruptRecord
from buffer.groups import Groups
from buffer.lengths import ALARM
from buffer.protocol import BeginIncarnation, CheckpointDurable, IncarnationReply, Published, StepFinished
from buffer.tables import MAX_TRAINED_AT, DrawRecord, Group, Incarnation, StoreState, Use
from buffer.transaction import Transaction
from common.staleness import StalenessContract

log = logging.getLogger(__name__)

MAX_BEHIND = 1024
"""Steps by which the service's view of the learner may be late."""
WARN_EVERY_STEPS = 100
"""Steps between two warnings of length fidelity."""


class Steps:
    """Follows the learner."""

    def __init__(self, contract: StalenessContract, groups: Groups) -> None:
        self._contract = contract
        self._groups = groups

    def begin(self, tx: Transaction, message: BeginIncarnation) -> IncarnationReply:
        """Begin an incarnation, which ends draining. Idempotent per session; BufferRefused if a newer one began."""
        state = tx.state
        sessions = [start.session for start in state.incarnations]
        if message.session in sessions[:-1]:
            raise BufferRefused(f"this learner was replaced by incarnation {state.incarnation}; only one may train")
        if message.session not in sessions:
            state.draining = False  # that was for the run that ended
            tx.undo.append(self._groups.prompts.pace.undo())
            self._groups.prompts.pace.begun()
            self._abandon(tx, message)
            self._resume(tx, message)
        return IncarnationReply(state.incarnation, state.resumed_at)

    def published(self, tx: Transaction, message: Published) -> None:
        """Weights can be pulled; news from an abandoned incarnation changes nothing."""
        version = (message.incarnation, message.version)
        if message.incarnation == tx.state.incarnation >= 0:
            self._believe(tx.state, message.version)
            tx.state.published = version if tx.state.published is None else max(tx.state.published, version)

    def finish(self, tx: Transaction, message: StepFinished) -> None:
        """Step `step` is done: its samples are trained (or filtered, where it was skipped)."""
        state = tx.state
        self.check_incarnation(state, message.incarnation)
        draw = tx.draws.get(message.step) if message.step > 0 else None
        if draw is None:
            if message.step <= state.step:
                return
            raise BufferRefused(f"step {message.step} cannot be finished: it was never drawn")
        if message.step not in state.pending_draws:  # said before, or it is in the checkpoint
            return
        self._check_outcome(draw, message)
        self._finish(tx, draw, message.version)
        state.version, state.step = message.version, message.step
        self._finished(tx)
        self._watch_lengths(state)

    def durable(self, tx: Transaction, message: CheckpointDurable) -> None:
        self.check_incarnation(tx.state, message.incarnation)
        unfinished = [step for step in tx.state.pending_draws if step <= message.step]
        if unfinished:
            raise BufferRefused(f"a checkpoint at step {message.step} cannot be durable: {unfinished} are unfinished")
        for step in [step for (step,) in tx.draws.all_keys() if step <= message.step]:
            for group_id in set(tx.draws.require(step).group_ids):
                group = tx.groups.require(group_id)
                group.held -= 1
                self._groups.save(tx, group)
            tx.draws.delete(step)
        self._groups.evict(tx)

    def check_incarnation(self, state: StoreState, incarnation: int) -> None:
        """Raise BufferRefused unless it is the present learner."""
        if state.incarnation < 0:
            raise BufferRefused("no learner has begun: send BeginIncarnation first")
        if incarnation != state.incarnation:
            raise BufferRefused(f"incarnation {incarnation} was replaced by {state.incarnation}; only one may train")

    def record(self, tx: Transaction, draw: DrawRecord) -> None:
        for group_id in set(draw.group_ids):
            group = tx.groups.require(group_id)
            group.held += 1
            self._groups.hold(tx, group)
        tx.draws.put(draw, draw.step)
        tx.state.pending_draws[draw.step] = len(set(draw.group_ids))
        tx.state.num_set_aside = 0
        tx.undo.append(self._groups.prompts.pace.undo())
        self._groups.prompts.pace.drawn()

    def all_usable(self, tx: Transaction, draw: DrawRecord, version: int) -> bool:
        """Are all groups of a recorded draw within the age bound at this version?"""
        groups = [tx.groups.require(group_id) for group_id in draw.group_ids]
        ages = [(group.oldest_effective(tx.state), group) for group in groups]
        return len(self._contract.select(ages, version)) == len(groups)

    def release_from(self, tx: Transaction, step: int) -> None:
        """Forget the draw of this step, and all later ones that this incarnation has not drawn itself.

        Groups held for later ones would keep admission closed while this step waits for new groups.
        """
        for (later,) in list(tx.draws.all_keys(step)):
            draw = tx.draws.require(later)
            if later > step and draw.incarnation == tx.state.incarnation:
                continue
            is_pending = later in tx.state.pending_draws
            for group_id in set(draw.group_ids):
                group = tx.groups.require(group_id)
                group.held -= 1
                if is_pending:
                    self._groups.release(tx, group)
                else:
                    self._groups.save(tx, group)
            tx.draws.delete(later)
            tx.state.pending_draws.pop(later, None)

    # --- parts ------------------------------------------------------------------------------------

    def _believe(self, state: StoreState, version: int) -> None:
        """Refuse a version that is further ahead than any news can be late."""
        newest = self._contract.latest_version(state.version, len(state.pending_draws) + MAX_BEHIND)
        if version > newest:
            raise BufferRefused(f"the learner cannot be at version {version}: it was at {state.version} a moment ago")

    def _abandon(self, tx: Transaction, message: BeginIncarnation) -> None:
        """Open the incarnation. Tokens of abandoned versions now count as older than they were."""
        state = tx.state
        index = self._groups.index
        changed = [each.group_id for each in index.ready if each.oldest > message.version]
        if state.incarnations:
            newest = state.newest_possible(self._contract.updates_per_step)
            state.incarnations[-1] = replace(state.incarnations[-1], newest=newest)
        state.incarnations.append(Incarnation(message.session, message.version, message.step))
        for group_id in changed:
            index.update(tx, tx.groups.require(group_id))
        for group_id in index.open:  # which the index does not hold by age
            group = tx.groups.require(group_id)
            if group.min_version > message.version:
                group.min_version = message.version
                tx.groups.put(group, group_id)

    def _resume(self, tx: Transaction, message: BeginIncarnation) -> None:
        """Settle the recorded draws: those in the checkpoint are done, later ones are to be redone."""
        state = tx.state
        state.version, state.step = message.version, message.step
        for (step,) in list(tx.draws.all_keys()):
            draw = tx.draws.require(step)
            if step <= message.step:
                if step in state.pending_draws:
                    self._finish(tx, draw, self._version_after(draw, message))
            elif not self.all_usable(tx, draw, self._contract.latest_version(message.version, step - message.step - 1)):
                self.release_from(tx, step)
                return
            elif step not in state.pending_draws:
                for group_id in set(draw.group_ids):
                    self._groups.hold(tx, tx.groups.require(group_id))
                state.pending_draws[step] = len(set(draw.group_ids))

    def _version_after(self, draw: DrawRecord, message: BeginIncarnation) -> int:
        """Return where a step of the checkpoint led whose StepFinished never arrived.

        The checkpoint's version tells it of the last one; earlier ones count as not skipped.
        """
        if draw.step == message.step and draw.version == message.version:
            return draw.version
        return max(draw.version + 1, min(message.version, self._contract.latest_version(draw.version, 1)))

    def _check_outcome(self, draw: DrawRecord, message: StepFinished) -> None:
        """Refuse a version that the step cannot lead to: each of its updates made one, or was skipped."""
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
        """The step led to this version; without any update it was skipped."""
        state, skipped = tx.state, version == draw.version
        is_redone = draw.is_trained
        drawn = set(draw.record_ids)
        for group_id, times in Counter(draw.group_ids).items():
            group = tx.groups.require(group_id)
            used = [index for index, record in enumerate(group.records) if record in drawn]
            self._settle(tx, group, used, skipped=skipped)
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

    def _finished(self, tx: Transaction) -> None:
        tx.undo.append(self._groups.prompts.pace.undo())
        self._groups.prompts.pace.finished()

    def _settle(self, tx: Transaction, group: Group, used: list[int], *, skipped: bool) -> None:
        target = "filtered" if skipped else "trained"
        for source in ("drawn",) if skipped else ("drawn", "filtered"):
            settled = [index for index in used if group.sample_states[index] == source]
            for index in settled:
                group.sample_states[index] = target
            tx.state.ledger.move(len(settled), source, target)
            if not skipped and group.is_uninformative:
                tx.state.ledger.trained_uninformative += len(settled)

    def _watch_lengths(self, state: StoreState) -> None:
        """Warn where training leaves some lengths out."""
        fidelity = state.fidelity
        if not fidelity.is_alarming:
            return
        if fidelity.warned_at < 0 or not 0 <= state.step - fidelity.warned_at < WARN_EVERY_STEPS:
            fidelity.warned_at = state.step
            remedy = "Set sampler = 'length_balanced'"
            if state.ledger.uninformative:
                remedy += "; refill_uninformative leaves out the lengths of groups whose rewards are all equal"
            log.warning(
                "the lengths trained on differ from those generated: KS distance %.2f, above %.2f. Starved: %s. %s",
                fidelity.now.ks,
                ALARM,
                fidelity.starved(),
                remedy,
            )


def write_scores(tx: Transaction, batch: pa.RecordBatch) -> None:
    """Store scores, of `schema.SCORES`, beside their records. Idempotent.

    Those of a record that was evicted or damaged meanwhile are left out.

    Raises:
        BufferRefused: there was never such a record, or its scores are not finite or not as many as its tokens.
    """
    values, bounds = rows.flat_values(batch.column(1))
    scores: dict[int, bytes] = {}
    lengths: dict[int, int] = {}
    for i, record in enumerate(batch.column(0).to_pylist()):
        if not 0 <= record < tx.state.next_record:
            raise BufferRefused(f"record {record} is not in the buffer: there was never one")
        if record not in lengths:
            try:
                holder = tx.find_block(record)
            except CorruptRecord:
                continue
            if holder is None:
                continue
            lengths |= holder[1]
        score = np.ascontiguousarray(values[bounds[i] : bounds[i + 1]], np.float32)
        if len(score) != lengths[record] or not np.isfinite(score).all():
            raise BufferRefused(
                f"record {record} needs {lengths[record]} finite reference log-probabilities, got {len(score)}"
            )
        scores[record] = score.tobytes()
    for record, payload in scores.items():
        tx.scores.put(payload, record)


def read_scores(tx: Transaction, record_ids: list[int]) -> list[npt.NDArray[np.float32] | None]:
    """The scores of records, None where there are none yet; damaged ones are deleted, to be computed anew."""
    if not tx.scores.count:
        return [None] * len(record_ids)
    return [_read_one(tx, record) for record in record_ids]


def _read_one(tx: Transaction, record: int) -> npt.NDArray[np.float32] | None:
    try:
        payload = tx.scores.get(record)
    except CorruptRecord:
        tx.scores.delete(record)
        return None
    return None if payload is None else np.frombuffer(payload, np.float32)
