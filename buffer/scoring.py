"""Log-probabilities of the reference model: who is to compute them, where they are stored, how they are read.

Whatever is not scored when its step begins is scored there, so nothing here has to happen in time. What waits for a
step is handed out before that, oldest first, and to nobody else for a while: the learner asks while it has no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer import rows, schema
from buffer.errors import BufferRefused, CorruptRecord
from buffer.groups import Groups
from buffer.tables import Group
from buffer.transaction import Transaction
from common.run import RunFacts

HELD_S = 30.0
"""For so long a group that was handed out is handed to nobody else; then whoever took it is taken for dead."""


class Taken(NamedTuple):
    """Samples to score."""

    record_ids: list[int]
    batch: pa.RecordBatch | None
    """They, in the same order, by the columns of `schema.SCHEMA`; None where there are none."""


class Scoring:
    """Scores of the records of one store."""

    def __init__(self, facts: RunFacts, groups: Groups, clock: Callable[[], float]) -> None:
        self._facts = facts
        self._groups = groups
        self._clock = clock
        self._held: dict[int, float] = {}
        """Group that was handed out -> until when. Lost with the process, which costs scoring it twice at most."""

    def take(self, tx: Transaction, max_tokens: int) -> Taken:
        """Samples of ready groups that lack scores, of so many tokens together at most, but of one group at least."""
        now_s = self._clock()
        tx.undo.append(partial(setattr, self, "_held", self._held))
        self._held = {group_id: until_s for group_id, until_s in self._held.items() if until_s > now_s}
        record_ids: list[int] = []
        damaged: list[Group] = []
        num_tokens = 0
        for _, group_id in self._groups.index.unscored:
            if group_id in self._held:
                continue
            group = tx.groups.require(group_id)
            lacking = [i for i in self._fitting(group) if not tx.scores.has(group.records[i])]
            try:
                tx.blocks_of([group.records[i] for i in lacking])
            except CorruptRecord:
                damaged.append(group)
                continue
            num_tokens += sum(group.lengths[i] for i in lacking)
            if record_ids and num_tokens > max_tokens:
                break
            # also one without such a sample, which would be looked at each time
            self._held[group_id] = now_s + HELD_S
            record_ids += [group.records[i] for i in lacking]
        for group in damaged:  # as the draw of it would
            self._groups.drop_ready(tx, group, "evicted_unused")
        if not record_ids:
            return Taken([], None)
        return Taken(record_ids, schema.join_rows(tx.blocks_of(record_ids), record_ids))

    def write(self, tx: Transaction, batch: pa.RecordBatch) -> None:
        """Store scores, of `schema.SCORES`, beside their records; writing them again changes nothing.

        Those of a record that was evicted or damaged since it was handed out are passed over: nobody will draw it.

        Raises:
            BufferRefused: there was never such a record, or its scores are not finite or not as many as its tokens.
        """
        values, bounds = rows.flat_values(batch.column(1))
        scores: dict[int, bytes] = {}
        lengths: dict[int, int] = {}
        group_ids: set[int] = set()
        for i, record in enumerate(batch.column(0).to_pylist()):
            if not 0 <= record < self._facts.global_id(tx.state.next_record):
                raise BufferRefused(f"record {record} is not in the buffer: there was never one")
            if record not in lengths:
                try:
                    holder = tx.find_block(record)
                except CorruptRecord:
                    continue
                if holder is None:
                    continue
                lengths |= holder[1]
                group_ids.add(rows.group_of(holder[0]))
            score = np.ascontiguousarray(values[bounds[i] : bounds[i + 1]], np.float32)
            if len(score) != lengths[record] or not np.isfinite(score).all():
                raise BufferRefused(
                    f"record {record} needs {lengths[record]} finite reference log-probabilities, got {len(score)}"
                )
            scores[record] = score.tobytes()
        for record, payload in scores.items():
            tx.scores.put(payload, record)
        for group_id in sorted(group_ids):
            self._settle(tx, group_id)

    def read(self, tx: Transaction, record_ids: list[int]) -> list[npt.NDArray[np.float32] | None]:
        """The scores of records, None where there are none yet; damaged ones are deleted, to be computed anew."""
        if not tx.scores.count:
            return [None] * len(record_ids)
        return [self._read_one(tx, record) for record in record_ids]

    # --- parts ------------------------------------------------------------------------------------

    def _fitting(self, group: Group) -> list[int]:
        """The samples that a step would take."""
        return [i for i in group.usable() if group.lengths[i] <= self._facts.longest_drawn]

    def _settle(self, tx: Transaction, group_id: int) -> None:
        """Write down that the samples of a group are scored, where all of them are."""
        group = tx.groups.get(group_id)
        if group is None or group.is_scored or not all(tx.scores.has(group.records[i]) for i in self._fitting(group)):
            return
        group.is_scored = True
        self._held.pop(group_id, None)
        self._groups.save(tx, group)

    def _read_one(self, tx: Transaction, record: int) -> npt.NDArray[np.float32] | None:
        try:
            payload = tx.scores.get(record)
        except CorruptRecord:
            tx.scores.delete(record)
            return None
        return None if payload is None else np.frombuffer(payload, np.float32)
