"""Samples on their way from one actor to the next: what an actor leaves unfinished, and what the next one gets of it.

An actor that is to end, or that is too slow for a sample, hands it on: its tokens, their log-probabilities and the
versions that sampled them are stored, and the sample is issued again with them, before any new prompt. Versions are
part of every token, so nothing else has to be true of who goes on: what comes is one sample like any other. A whole
group has one lease at a time, so those that rest wait for those of their siblings that the actor still finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa
from msgspec.structs import replace

from buffer import schema
from buffer.errors import CorruptRecord
from buffer.groups import Groups
from buffer.ingest import faults, known_versions, rows_of
from buffer.leases import Leases, Share
from buffer.nonsense import Quarantine
from buffer.protocol import HandOn, Lease, LeaseGrant
from buffer.rows import RowBytes, num_tokens_in
from buffer.schema import HANDED_ON
from buffer.tables import NO_RECORD, Group, Partial
from buffer.transaction import Transaction


class Partials:
    """Those of one store."""

    def __init__(self, share: Share, groups: Groups, leases: Leases, quarantine: Quarantine) -> None:
        self._facts, self._may_be_behind = share.facts, share.may_be_behind
        self._groups, self._leases, self._quarantine = groups, leases, quarantine

    def take(self, tx: Transaction, message: HandOn, batch: pa.RecordBatch) -> None:
        """Store what there is of some samples of a lease, and let them go. Safe to say twice.

        A row that is not as it should be is quarantined; its sample is made from its beginning, or from what was
        stored of it before.
        """
        self._leases.current(tx, message.actor, message.epoch)
        group = self._leases.held_by(tx, message)
        if group is None:
            return
        asked = set(message.sample_indices)
        left = [index for index in group.in_flight() if index in asked]
        self._store(tx, group, message, left, batch)
        if message.goes_on:
            self._groups.save(tx, group)
            return
        group.resting += left
        group.handed_on += len(left)
        tx.state.ledger.hand_on(len(left))
        self._groups.settle(tx, group)

    def grant(self, tx: Transaction, grant: LeaseGrant) -> tuple[LeaseGrant, memoryview | bytes]:
        """A grant as it is answered, with what is there of the samples of its leases; both as they are now.

        The same request may be answered again later, when some of it is no longer of use to anybody.
        """
        if not any(lease.prefixes for lease in grant.leases):
            return grant, b""
        leases: list[Lease] = []
        blocks: list[bytes] = []
        for lease in grant.leases:
            found = {index: self._read(tx, lease.group_id, index) for index in lease.prefixes}
            blocks += [block for block in found.values() if block is not None]
            leases.append(replace(lease, prefixes=[index for index, block in found.items() if block is not None]))
        body = schema.write_stream(schema.all_rows(blocks)) if blocks else b""
        return replace(grant, leases=leases), body

    def _read(self, tx: Transaction, group_id: int, index: int) -> bytes | None:
        """What is stored of a sample. What is damaged, or longer than a sample may be by now, is made anew."""
        with suppress(CorruptRecord):
            block = tx.partials.get(group_id, index)
            if block is None or num_tokens_in(block) <= self._facts.max_tokens:
                return block
        group = tx.groups.require(group_id)
        self._groups.forget_partial(tx, group, index)
        self._groups.save(tx, group)
        return None

    def _store(
        self, tx: Transaction, group: Group, message: HandOn, left: Sequence[int], batch: pa.RecordBatch
    ) -> None:
        facts, state = self._facts, tx.state
        asked, still_left = set(message.sample_indices), set(left)
        known = known_versions(state, updates_per_step=facts.updates_per_step, may_be_behind=self._may_be_behind)
        bad, as_bytes = faults(batch, facts, known, ends=(HANDED_ON,)), RowBytes(batch)
        for place, row in enumerate(rows_of(batch)):
            of = row.group_id, row.lease_id, row.attempt
            if of != (group.group_id, message.lease_id, message.attempt) or row.sample_index not in asked:
                bad.setdefault(place, "not of a sample that is handed on")
            block = b"".join(as_bytes.block([place], [NO_RECORD]))
            if reason := bad.get(place):
                self._quarantine.set_aside(tx, reason, block, sender=message.actor)
            elif row.sample_index in still_left:  # else it was settled meanwhile
                tx.partials.put(block, group.group_id, row.sample_index)
                group.partials[row.sample_index] = Partial(row.oldest, row.num_completion_tokens)
