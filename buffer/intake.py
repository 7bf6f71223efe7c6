"""What becomes of pushed trajectories: each row is committed, or has one stated reason why not.

    fenced       its epoch was replaced
    duplicate    its (actor, epoch, seq) was settled before
    quarantined  it is not a valid trajectory; the sample it matches, if any, has failed
    late         its lease is no longer open, or its sample is settled
    committed    it is on disk once the transaction is

Good rows of a message pass whatever the others are.
"""

from __future__ import annotations

import pyarrow as pa

from buffer.config import RunFacts
from buffer.groups import Groups
from buffer.leases import Leases, is_name
from buffer.protocol import Push, RowResult
from buffer.schema import row_bytes
from buffer.store import Transaction
from buffer.tables import Actor, Group, State
from buffer.validation import KnownVersions, faults

MAX_QUARANTINED = 1024
"""How many quarantined rows and messages are kept to look at; the oldest go first."""
MAX_QUARANTINED_BYTES = 64 * 2**10
SEQ_WINDOW = 1_000_000
"""A sequence number so far above the low-water mark is not believed."""


def set_aside(tx: Transaction, reason: str, data: bytes, *, matches_lease: bool) -> None:
    """Count a quarantined row or message, and keep its first bytes."""
    state = tx.state
    state.ledger.quarantine(reason, matches_lease=matches_lease)
    tx.quarantine.put(reason.encode() + b"\n" + data[:MAX_QUARANTINED_BYTES], state.next_quarantine)
    tx.quarantine.delete(max(0, state.next_quarantine - MAX_QUARANTINED))
    state.next_quarantine += 1


def known_versions(state: State) -> KnownVersions:
    """Which versions actors can have sampled from.

    News of a publication may reach an actor before it reaches the service, so the current
    incarnation may be ahead of what the service was told by the steps that it has batches for.
    """
    newest = {number: 2**62 for number in range(state.incarnation)}
    published = state.newest[1] if state.newest[0] == state.incarnation else 0
    newest[state.incarnation] = max(published, state.version + len(state.pending_draws))
    return KnownVersions(newest)


class Intake:
    """Takes pushed trajectories in."""

    def __init__(self, facts: RunFacts, groups: Groups, leases: Leases) -> None:
        self._facts = facts
        self._groups = groups
        self._leases = leases

    def push(self, tx: Transaction, message: Push, batch: pa.RecordBatch) -> list[RowResult]:
        """Settle every row of a validated record batch.

        Raises:
            BufferRefused: the sender is unknown; nothing was changed.
        """
        seqs = batch.column(batch.schema.get_field_index("seq")).to_pylist()
        actor = tx.actors.get(message.actor) if is_name(message.actor) else None
        if actor is not None and message.epoch < actor.epoch:
            tx.state.ledger.fenced += len(seqs)
            return [RowResult(seq, "fenced", f"epoch {message.epoch} was replaced by {actor.epoch}") for seq in seqs]
        actor = self._leases.current(tx, message.actor, message.epoch)
        bad = faults(batch, self._facts, known_versions(tx.state))
        names = ("actor", "epoch", "lease_id", "attempt", "group_id", "sample_index", "reward")
        columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in names]
        results = []
        for row, (seq, name, epoch, *claim, reward) in enumerate(zip(seqs, *columns, strict=True)):
            reason = bad.get(row, "")
            if (name, epoch) != (actor.name, actor.epoch):
                reason = "row of another sender"
            elif not 0 <= seq < actor.low_water + SEQ_WINDOW:
                reason = "seq out of range"
            elif self._seen(tx, actor, seq):
                tx.state.ledger.duplicates += 1
                results.append(RowResult(seq, "duplicate"))
                continue
            else:
                self._mark_seen(tx, actor, seq)
            results.append(self._settle(tx, actor, batch, row, seq, claim, reward, reason))
        tx.actors.put(actor, actor.name)
        self._groups.evict(tx)
        return results

    def _settle(
        self,
        tx: Transaction,
        actor: Actor,
        batch: pa.RecordBatch,
        row: int,
        seq: int,
        claim: list[int],
        reward: float | None,
        reason: str,
    ) -> RowResult:
        index = claim[-1]
        group = self._claimed(tx, actor, claim)
        if reason:
            set_aside(tx, reason, row_bytes(batch, row), matches_lease=group is not None)
            if group is not None:
                group.fates[index] = "failed"
                group.failed += 1
                self._groups.settle(tx, group)
            return RowResult(seq, "quarantined", reason)
        if group is None:
            tx.state.ledger.late += 1
            return RowResult(seq, "late", f"lease {claim[0]} does not wait for sample {index}")
        self._commit(tx, group, index, batch, row, reward)
        return RowResult(seq, "committed")

    def _claimed(self, tx: Transaction, actor: Actor, claim: list[int]) -> Group | None:
        """The group that waits for exactly this sample of this attempt of this lease."""
        lease_id, attempt, group_id, index = claim
        group = tx.groups.get(group_id) if group_id > 0 else None
        if group is None or lease_id < 1 or group.lease_id != lease_id or group.attempt != attempt:
            return None
        if (group.actor, group.epoch) != (actor.name, actor.epoch) or index not in group.missing():
            return None
        return group

    def _commit(
        self, tx: Transaction, group: Group, index: int, batch: pa.RecordBatch, row: int, reward: float | None
    ) -> None:
        record = tx.state.next_record
        tx.state.next_record += 1
        tx.records.put(row_bytes(batch, row), record)
        fate = "filtered" if reward is None else "waiting"
        group.fates[index], group.records[index] = fate, record
        tx.state.ledger.commit(fate)
        if reward is None:
            tx.evictable.put(group.group_id, record)
        else:
            span = batch.column(batch.schema.get_field_index("spans"))[row].as_py()[0]
            oldest = (span["incarnation"], span["version"])
            group.oldest = oldest if group.oldest is None else min(group.oldest, oldest)
        self._groups.settle(tx, group)

    def _seen(self, tx: Transaction, actor: Actor, seq: int) -> bool:
        return seq < actor.low_water or tx.seen.has(actor.name, actor.epoch, seq)

    def _mark_seen(self, tx: Transaction, actor: Actor, seq: int) -> None:
        """Remember a sequence number; what lies below the low-water mark needs no row."""
        if seq != actor.low_water:
            tx.seen.put(b"", actor.name, actor.epoch, seq)
            return
        actor.low_water += 1
        while tx.seen.delete(actor.name, actor.epoch, actor.low_water):
            actor.low_water += 1
