"""BufferCore: handles every request of the protocol within one transaction, without sockets.

The service passes received messages to BufferCore; tests drive it with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from leeway.buffer import protocol as p
from leeway.buffer import rows, schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BadBody, BufferRefused, CorruptRecord, InvalidRequest, StoreError
from leeway.buffer.groups import Groups, prompts_of
from leeway.buffer.ingest import MAX_PUSHED_ROWS, Ingest, Pushes, faults, known_versions, rows_of
from leeway.buffer.leases import Leases
from leeway.buffer.rows import RowBytes, num_tokens_in
from leeway.buffer.schema import REQUEUED
from leeway.buffer.steps import Steps
from leeway.buffer.tables import NO_RECORD, DrawRecord, Group, Partial
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts

Answer = tuple[p.Reply, bytes | memoryview]


def check_config(config: BufferConfig, facts: RunFacts) -> None:
    """Raise StoreError if the `[buffer]` section contradicts the facts of the run."""
    # on_stale = "wait" guarantees that no group is dropped, which requires drawing the oldest group first.
    if facts.staleness.on_stale == "wait" and (config.sampler != "fifo" or config.replays):
        raise StoreError(
            "on_stale = 'wait' drops no group, so each step must draw the oldest groups, but "
            f"[buffer] has sampler = '{config.sampler}', max_uses = {config.max_uses}: use sampler = 'fifo' "
            "and max_uses = 1, or on_stale = 'drop'"
        )
    try:
        config.check_capacity(facts.group_size, facts.contract.capacity() + facts.groups_per_step)
    except ValueError as error:
        raise StoreError(str(error)) from None


class Partials:
    """Storage of partial rollouts of unfinished samples, which become part of the next lease of their group.

    An actor that shuts down, or is too slow for a sample, requeues the sample. The sample's tokens, log-probabilities
    and versions are stored. The sample is issued again with these values, before any new prompt. A group has one lease
    at a time, so requeued samples wait until the actor has finished the other samples of the lease.
    """

    def __init__(self, facts: RunFacts, groups: Groups, leases: Leases) -> None:
        self._facts, self._groups, self._leases = facts, groups, leases

    def take(self, tx: Transaction, message: p.HandOn, batch: pa.RecordBatch) -> None:
        """Store partial rollouts of a lease, and requeue their samples. Idempotent.

        An invalid row is quarantined; its sample starts from an earlier stored partial rollout, or from the prompt.
        """
        self._leases.current(tx, message.actor, message.epoch)
        group = self._leases.held_by(tx, message)
        if group is None:
            return
        requested = set(message.sample_indices)
        unfinished = [index for index in group.in_flight() if index in requested]
        self._store(tx, group, message, unfinished, batch)
        if message.goes_on:
            self._groups.save(tx, group)
            return
        group.resting += unfinished
        group.requeued += len(unfinished)
        tx.state.ledger.requeue(len(unfinished))
        self._groups.advance(tx, group)

    def grant(self, tx: Transaction, grant: p.LeaseGrant) -> tuple[p.LeaseGrant, memoryview | bytes]:
        """Return a grant, and the stored partial rollouts of its leases as its body."""
        if not any(lease.prefixes for lease in grant.leases):
            return grant, b""
        leases: list[p.Lease] = []
        blocks: list[bytes] = []
        for lease in grant.leases:
            found = {index: self._read(tx, lease.group_id, index) for index in lease.prefixes}
            blocks += [block for block in found.values() if block is not None]
            leases.append(replace(lease, prefixes=[index for index, block in found.items() if block is not None]))
        body = schema.write_stream(schema.all_rows(blocks)) if blocks else b""
        return replace(grant, leases=leases), body

    def _read(self, tx: Transaction, group_id: int, index: int) -> bytes | None:
        """Return a sample's partial rollout; delete it and return None if it is damaged or longer than `max_tokens`."""
        with suppress(CorruptRecord):
            block = tx.partials.get(group_id, index)
            if block is None or num_tokens_in(block) <= self._facts.max_tokens:
                return block
        group = tx.groups.require(group_id)
        self._groups.forget_partial(tx, group, index)
        self._groups.save(tx, group)
        return None

    def _store(
        self, tx: Transaction, group: Group, message: p.HandOn, indices: Sequence[int], batch: pa.RecordBatch
    ) -> None:
        facts, state = self._facts, tx.state
        requested, unfinished = set(message.sample_indices), set(indices)
        known = known_versions(state, updates_per_step=facts.updates_per_step)
        bad, as_bytes = faults(batch, facts, known, ends=(REQUEUED,)), RowBytes(batch)
        for place, row in enumerate(rows_of(batch)):
            key = row.group_id, row.lease_id, row.attempt
            if key != (group.group_id, message.lease_id, message.attempt) or row.sample_index not in requested:
                bad.setdefault(place, "not of a requeued sample")
            if reason := bad.get(place):
                tx.state.ledger.quarantine(reason)
            elif row.sample_index in unfinished:  # skip samples that were committed or have failed since
                block = b"".join(as_bytes.block([place], [NO_RECORD]))
                tx.partials.put(block, group.group_id, row.sample_index)
                group.partials[row.sample_index] = Partial(row.oldest, row.num_completion_tokens)


class BufferCore:
    """The buffer's rules. State outside of the store, such as lease deadlines, may be lost at any time."""

    def __init__(self, config: BufferConfig, facts: RunFacts, clock: Callable[[], float]) -> None:
        check_config(config, facts)
        self.facts, contract = facts, facts.contract
        prompts = prompts_of(facts, config, clock)
        self.groups = Groups(config, facts.group_size, facts.groups_per_step, prompts, num_kept=contract.capacity())
        self.leases = Leases(config, facts, self.groups, clock)
        self.ingest = Ingest(facts, self.groups, self.leases)
        self.partials = Partials(facts, self.groups, self.leases)
        self.steps = Steps(facts, self.groups, self.leases)
        self._answers: dict[type, Callable[[Transaction, Any], p.Reply | None]] = {
            p.Hello: lambda tx, message: p.Welcome(self.leases.hello(tx, message).epoch),
            p.Renew: self.leases.renew,
            p.GiveUp: self.leases.give_up,
            p.BeginIncarnation: self.steps.begin,
            p.Published: self.steps.published,
            p.StepFinished: self.steps.finish,
            p.CheckpointDurable: self.steps.durable,
            p.StatusRequest: self._status,
            p.Drain: self._drain,
        }
        """Handlers by request type; if a handler returns None, the reply is Done."""

    def handle(self, tx: Transaction, message: p.Request, body: bytes | memoryview) -> Answer:
        """Answer any request except pushes and draws, which have their own methods; call `Leases.authorize` first.

        Raises:
            BufferRefused: the request cannot be served; nothing changed except the count of quarantined messages.
        """
        self.groups.prepare(tx)
        if isinstance(message, p.LeaseRequest):
            return self.partials.grant(tx, self.leases.grant(tx, message))
        if isinstance(message, p.HandOn):
            self.partials.take(tx, message, self._read(tx, body, schema.SCHEMA, max_rows=MAX_PUSHED_ROWS))
            return p.Done(), b""
        if isinstance(message, p.WriteScores):
            _write_scores(tx, self._read(tx, body, schema.SCORES))
            return p.Done(), b""
        if isinstance(message, p.PosteriorsRequest):
            reply, posteriors = self.groups.prompts.posteriors()
            return reply, schema.write_stream(posteriors)
        if isinstance(message, p.Expect):
            self.groups.prompts.set_prior(message, self._read(tx, body, schema.EXPECTED))
            return p.Done(), b""
        answer = self._answers.get(type(message))
        if answer is None:
            raise BufferRefused(f"the buffer does not answer requests of type {type(message).__name__}")
        return answer(tx, message) or p.Done(), b""

    def push(
        self, tx: Transaction, pushes: Pushes, refusals: Mapping[int, str] = MappingProxyType({})
    ) -> list[p.PushReply | p.Refused]:
        self.groups.prepare(tx)
        return self.ingest.push(tx, pushes, refusals)

    def try_draw(self, tx: Transaction, request: p.DrawRequest) -> Answer | None:
        self.groups.prepare(tx)
        draw = self.steps.draw(tx, request)
        if draw is None:
            return None
        ledger, fidelity = self.groups.checked_counts(tx), tx.state.length_fidelity
        reply = p.DrawReply(True, draw.step, draw.group_ids, draw.record_ids, ledger=ledger, fidelity=fidelity)
        return reply, self._body(tx, draw)

    def draw_timed_out(self, tx: Transaction, request: p.DrawRequest, pushes_wait_for: str = "") -> Answer:
        """Return the reply to a draw that timed out; `pushes_wait_for` is the reason if pushes are blocked."""
        because = f"pushes wait: {pushes_wait_for}; " if pushes_wait_for else ""
        return p.DrawReply(False, request.step, [], [], because + self.steps.waiting_for(tx, request)), b""

    def _read(
        self, tx: Transaction, body: bytes | memoryview, expected: pa.Schema, *, max_rows: int | None = None
    ) -> pa.RecordBatch:
        try:
            return schema.read_stream(body, expected, max_rows=max_rows)
        except BadBody as error:
            # A refusal does not roll the transaction back, so the count stays.
            tx.state.ledger.quarantine(error.category)
            raise InvalidRequest(f"the message was quarantined: {error}") from error

    def _body(self, tx: Transaction, draw: DrawRecord) -> memoryview:
        # Read scores first: damaged scores are deleted, and a write invalidates the views of blocks.
        scores = _read_scores(tx, draw.record_ids)
        try:
            blocks = tx.blocks_of(draw.record_ids)
        except CorruptRecord as error:
            raise BufferRefused(
                f"the recorded batch of step {draw.step} cannot be read: {error}. Restart the learner "
                "to get another batch for this step"
            ) from error
        try:
            return schema.write_stream(schema.join_rows(blocks, draw.record_ids, scores))
        except ValueError as error:
            self.steps.release_from(tx, draw.step)  # a restart with lower groups_per_step draws again
            text = f"step {draw.step} is too large for a message: {error}. Lower groups_per_step"
            raise BufferRefused(text) from error

    def _drain(self, tx: Transaction, _message: p.Drain) -> None:
        tx.state.draining = True

    def _status(self, tx: Transaction, _message: p.StatusRequest) -> p.Status:
        state = tx.state
        ledger = state.ledger
        return p.Status(
            ledger=self.groups.checked_counts(tx),
            quarantined_by_reason=ledger.quarantined_by_reason,
            failed_by_reason=ledger.failed_by_reason,
            num_ready_groups=len(self.groups.index.ready),
            num_drawn_groups=sum(state.pending_draws.values()),
            newest=state.newest,
            version=state.version,
            num_records=state.num_records,
            size_bytes=0,
            draining=state.draining,
            fidelity=state.length_fidelity,
            fidelity_alarm=state.fidelity.is_alarming,
        )


def _write_scores(tx: Transaction, batch: pa.RecordBatch) -> None:
    """Store scores, in a batch of `schema.SCORES`, with their records. Idempotent.

    Scores of records that are evicted or damaged are ignored.

    Raises:
        BufferRefused: a record never existed, or its scores are not finite or do not match its number of tokens.
    """
    values, bounds = rows.flat_values(batch.column(1))
    scores: dict[int, bytes] = {}
    lengths: dict[int, int] = {}
    for i, record in enumerate(batch.column(0).to_pylist()):
        if not 0 <= record < tx.state.next_record:
            raise BufferRefused(f"record {record} never existed in this buffer")
        if record not in lengths:
            try:
                (block,) = tx.blocks_of([record])
            except CorruptRecord:
                continue
            lengths |= rows.records_in(block)
        score = np.ascontiguousarray(values[bounds[i] : bounds[i + 1]], np.float32)
        if len(score) != lengths[record] or not np.isfinite(score).all():
            raise BufferRefused(
                f"record {record} needs {lengths[record]} finite reference log-probabilities, got {len(score)}"
            )
        scores[record] = score.tobytes()
    for record, payload in scores.items():
        tx.scores.put(payload, record)


def _read_scores(tx: Transaction, record_ids: list[int]) -> list[npt.NDArray[np.float32] | None]:
    """Return the scores of each record, or None if missing; damaged scores are deleted, so that they are recomputed."""
    if not tx.scores.count:
        return [None] * len(record_ids)
    return [_read_score(tx, record) for record in record_ids]


def _read_score(tx: Transaction, record: int) -> npt.NDArray[np.float32] | None:
    try:
        payload = tx.scores.get(record)
    except CorruptRecord:
        tx.scores.delete(record)
        return None
    return None if payload is None else np.frombuffer(payload, np.float32)
