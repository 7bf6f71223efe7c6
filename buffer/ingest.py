"""Validation of pushed trajectories. Each row is committed or rejected, and has exactly one outcome:

    fenced       a newer process replaced its epoch
    duplicate    its (actor, epoch, seq) already has an outcome
    quarantined  it is not a valid trajectory; the matching sample, if any, fails
    late         its lease is no longer open, or its sample is complete or failed
    committed    it is on disk once the transaction is committed

Invalid rows do not affect the valid rows of the same message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from leeway.buffer import schema
from leeway.buffer.config import MAX_GROUP_SIZE
from leeway.buffer.errors import BadBody, BufferRefused
from leeway.buffer.groups import Groups, StoredSample
from leeway.buffer.leases import Leases, is_name
from leeway.buffer.protocol import Push, PushReply, Refused, RowResult
from leeway.buffer.rows import RowBytes, flat_values, list_bounds, part_values
from leeway.buffer.schema import COMPLETE
from leeway.buffer.tables import Actor, Group, StoreState
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts

MAX_PUSHED_ROWS = 4096
"""Maximum rows of one message; bounds the duration of a turn."""
MAX_OVERTAKEN = 65_536
"""Maximum distance of a sequence number from its actor's newest number; rows with older numbers are late."""
SEQ_WINDOW = 2 * MAX_OVERTAKEN
"""Distance above the low-water mark from which sequence numbers are invalid."""
LOGPROB_TOLERANCE = 1e-4
"""Amount by which log-probabilities may exceed 0, because of rounding."""
MAX_REWARD = 1e100
"""Largest absolute reward; beyond it, mean and spread of a group's rewards would overflow."""

_json_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
"""`Raw` checks that values are well-formed without decoding them."""


def known_versions(state: StoreState, *, updates_per_step: int = 1) -> Mapping[int, int]:
    """Return, for each incarnation, the newest version that actors can have sampled from."""
    newest = {number: start.newest for number, start in enumerate(state.incarnations)}
    newest[state.incarnation] = state.newest_possible(updates_per_step)
    return newest


class Pushes:
    """The joined rows of several push messages; validating and encoding them together is faster."""

    def __init__(self, pushes: Sequence[tuple[Push, bytes | memoryview]]) -> None:
        self.opened: list[tuple[Push, int | BadBody]] = []
        """Each message with its number of rows, or with the error if its body is invalid."""
        batches = []
        for message, body in pushes:
            try:
                batches.append(schema.read_stream(body, max_rows=MAX_PUSHED_ROWS))
                self.opened.append((message, batches[-1].num_rows))
            except BadBody as error:
                self.opened.append((message, error))
        self.batch = pa.concat_batches(batches or [schema.to_batch([], "")])
        self.rows = list(rows_of(self.batch))
        self.as_bytes = RowBytes(self.batch)


class Ingest:
    """Validation and commit of pushed trajectories."""

    def __init__(self, facts: RunFacts, groups: Groups, leases: Leases) -> None:
        self._facts = facts
        self._groups = groups
        self._leases = leases

    def push(self, tx: Transaction, pushes: Pushes, refusals: Mapping[int, str]) -> list[PushReply | Refused]:
        """Decide the outcome of every row, in order. `refusals` maps positions of refused messages to the reasons."""
        known = known_versions(tx.state, updates_per_step=self._facts.updates_per_step)
        bad = faults(pushes.batch, self._facts, known)
        all_rows = enumerate(judged(pushes.rows, pushes.batch, self._facts.informative_rewards))
        replies: list[PushReply | Refused] = []
        for place, (message, opened) in enumerate(pushes.opened):
            rows = {} if isinstance(opened, BadBody) else dict(islice(all_rows, opened))
            if place in refusals:
                replies.append(Refused(refusals[place]))
                continue
            if isinstance(opened, BadBody):
                tx.state.ledger.quarantine(opened.category)
                replies.append(Refused(f"the message was quarantined: {opened}"))
                continue
            try:
                replies.append(self._push_one(tx, message, rows, bad, pushes.as_bytes))
            except BufferRefused as refusal:
                replies.append(Refused(str(refusal)))
        self._groups.evict(tx)
        return replies

    def _push_one(
        self, tx: Transaction, message: Push, rows: dict[int, PushedRow], bad: dict[int, str], as_bytes: RowBytes
    ) -> PushReply:
        """Decide the outcome of the rows of one message; `rows` and `bad` are keyed by position in the turn."""
        actor = tx.actors.get(message.actor) if is_name(message.actor) else None
        if actor is not None and message.epoch < actor.epoch:
            tx.state.ledger.fenced += len(rows)
            reason = f"epoch {message.epoch} was replaced by {actor.epoch}"
            return PushReply([], [RowResult(row.seq, "fenced", reason) for row in rows.values()])
        actor = self._leases.current(tx, message.actor, message.epoch)
        settled = self._find_settled(tx, actor, rows, bad)
        groups: dict[int, dict[int, PushedRow]] = {}
        for place, row in rows.items():
            if place not in settled:
                groups.setdefault(row.group_id, {})[place] = row
        for group_id, members in groups.items():
            settled |= self._push_group(tx, actor, group_id, members, bad, as_bytes)
        tx.actors.put(actor, actor.name)
        committed = [row.seq for place, row in rows.items() if place not in settled]
        return PushReply(runs_of(committed), [*settled.values()])

    def _find_settled(
        self, tx: Transaction, actor: Actor, rows: dict[int, PushedRow], bad: dict[int, str]
    ) -> dict[int, RowResult]:
        """Return the outcomes of duplicate and late rows; mark rows with a wrong sender or invalid seq as `bad`."""
        next_seqs = range(actor.low_water, actor.low_water + len(rows))
        if not actor.num_seen_above and all(
            row.seq == seq and row.actor == actor.name and row.epoch == actor.epoch
            for row, seq in zip(rows.values(), next_seqs, strict=True)
        ):  # in most messages, no row is settled
            actor.low_water += len(rows)
            return {}
        settled = {}
        for place, row in rows.items():
            if row.actor != actor.name or row.epoch != actor.epoch:
                bad[place] = "row of another sender"
            elif not 0 <= row.seq < actor.low_water + SEQ_WINDOW:
                bad[place] = "seq out of range"
            elif row.seq < actor.forgotten_below:
                tx.state.ledger.late += 1
                settled[place] = RowResult(row.seq, "late", f"more than {MAX_OVERTAKEN} sequence numbers behind")
            elif not self._is_first(tx, actor, row.seq):
                tx.state.ledger.duplicates += 1
                settled[place] = RowResult(row.seq, "duplicate")
        return settled

    def _push_group(
        self,
        tx: Transaction,
        actor: Actor,
        group_id: int,
        rows: dict[int, PushedRow],
        bad: dict[int, str],
        as_bytes: RowBytes,
    ) -> dict[int, RowResult]:
        """Commit the valid rows of one message for one group as one block; return the outcomes of the other rows.

        A row is committed, or fails its sample, only if its group, lease, attempt and sample index are in flight.
        """
        group = tx.groups.get(group_id) if group_id >= 1 else None
        if group is not None and (not group.lease_id or (group.actor, group.epoch) != (actor.name, actor.epoch)):
            group = None
        in_flight = set() if group is None else set(group.in_flight())
        size = MAX_GROUP_SIZE if group is None else len(group.sample_states)
        accepted: list[tuple[int, int]] = []
        settled = {}
        has_failed = False
        for place, row in rows.items():
            is_in_flight = (
                group is not None
                and row.sample_index in in_flight
                and row.lease_id == group.lease_id
                and row.attempt == group.attempt
            )
            if is_in_flight:
                in_flight.discard(row.sample_index)
            if row.sample_index >= size:
                bad.setdefault(place, "sample_index out of range")
            if reason := bad.get(place):
                tx.state.ledger.quarantine(reason, matches_lease=is_in_flight)
                settled[place] = RowResult(row.seq, "quarantined", reason)
                if is_in_flight and group is not None:
                    group.sample_states[row.sample_index] = "failed"
                    group.failed += 1
                    has_failed = True
            elif is_in_flight:
                accepted.append((row.sample_index, place))
            else:
                tx.state.ledger.late += 1
                why = f"sample {row.sample_index} is not in flight under lease {row.lease_id}"
                settled[place] = RowResult(row.seq, "late", why)
        if group is not None and (accepted or has_failed):
            self.commit(tx, group, [place for _, place in sorted(accepted)], rows, as_bytes)
        return settled

    def commit(
        self,
        tx: Transaction,
        group: Group,
        places: Sequence[int],
        rows: Mapping[int, PushedRow] | Sequence[PushedRow],
        as_bytes: RowBytes,
    ) -> None:
        """Store the rows of a group at these positions as one block, and advance the group."""
        if places:
            first = tx.state.next_record
            tx.state.next_record += len(places)
            records = [first + i for i in range(len(places))]
            tx.records.append(as_bytes.block(places, records), records[0])
            self._groups.commit(tx, group, [rows[place] for place in places], records)
        self._groups.advance(tx, group)

    def _is_first(self, tx: Transaction, actor: Actor, seq: int) -> bool:
        """Record a sequence number; return whether it is new. Numbers below the low-water mark need no row."""
        if seq < actor.low_water or (actor.num_seen_above and tx.seen.has(actor.name, actor.epoch, seq)):
            return False
        if seq != actor.low_water:
            tx.seen.put(b"", actor.name, actor.epoch, seq)
            actor.num_seen_above += 1
            self._raise_low_water(tx, actor, seq - MAX_OVERTAKEN)
            return True
        actor.low_water += 1
        self._raise_low_water(tx, actor, actor.low_water)
        return True

    def _raise_low_water(self, tx: Transaction, actor: Actor, least: int) -> None:
        """Raise the low-water mark to `least`, then past consecutive received numbers; delete their rows in `seen`."""
        while actor.num_seen_above:
            if tx.seen.delete(actor.name, actor.epoch, actor.low_water):
                actor.num_seen_above -= 1
            elif actor.low_water >= least:
                return
            else:
                actor.forgotten_below = actor.low_water + 1
            actor.low_water += 1


class PushedRow(StoredSample, frozen=True, gc=False):
    """The fields of a pushed trajectory that `Ingest` checks."""

    actor: str
    epoch: int
    seq: int
    lease_id: int
    attempt: int
    group_id: int


def rows_of(batch: pa.RecordBatch) -> Iterator[PushedRow]:
    """Yield the rows of a record batch, read column by column."""
    column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    plain = {name: column[name].to_pylist() for name in PushedRow.__struct_fields__ if name in column}
    lengths = [column[name].value_lengths().to_pylist() for name in ("token_ids", "logprobs")]
    spans, bounds = column["spans"].flatten(), list_bounds(column["spans"])[:-1]
    if len(spans):
        first = np.minimum(bounds, len(spans) - 1)  # a row without spans is rejected, so its version does not matter
        oldest = zip(*(spans.field(i).to_numpy()[first].tolist() for i in range(2)), strict=True)
    else:
        oldest = zip([0] * batch.num_rows, [0] * batch.num_rows, strict=True)
    is_cut = pc.equal(column["finish_reason"], "length").to_pylist()
    values = {
        **plain, "num_tokens": lengths[0], "num_completion_tokens": lengths[1], "is_cut": is_cut, "oldest": oldest,
        "judged": plain["reward"],
    }  # fmt: skip
    return map(PushedRow, *(values[name] for name in PushedRow.__struct_fields__))


def judged(rows: Sequence[PushedRow], batch: pa.RecordBatch, informative: Mapping[str, float]) -> Sequence[PushedRow]:
    """Return the rows of a batch, judged by the weighted sum of the rewards that `informative` names, if any."""
    if not informative:
        return rows
    parts = batch.column("reward_parts")
    sums = np.sum([weight * np.nan_to_num(part_values(parts, name)) for name, weight in informative.items()], axis=0)
    return [msgspec.structs.replace(row, judged=float(each)) for row, each in zip(rows, sums, strict=True)]


def faults(
    batch: pa.RecordBatch, facts: RunFacts, known: Mapping[int, int], ends: Sequence[str] = COMPLETE
) -> dict[int, str]:
    """Return the invalid rows, each with the first reason found; the reasons are fixed strings.

    `ends` are the allowed finish reasons. Each check is one pass over the flat values of a message.
    """
    column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
    found: dict[int, str] = {}

    def reject(rows: npt.NDArray[np.bool_] | list[bool], reason: str) -> None:
        for row in np.flatnonzero(rows):
            found.setdefault(int(row), reason)

    reject(_other_than(column["run_id"], (facts.run_id,)), "another run")
    reject(_other_than(column["finish_reason"], ends), "finish_reason")
    for name, low, high in (
        ("sample_index", 0, MAX_GROUP_SIZE),
        ("prompt_id", 0, facts.num_prompts),
        ("prompt_length", 1, facts.max_tokens),
        ("lease_id", 1, None),
        ("group_id", 1, None),
        ("attempt", 1, None),
    ):
        values = column[name].to_numpy()
        reject((values < low) | (values >= (np.iinfo(np.int64).max if high is None else high)), f"{name} out of range")

    tokens, token_bounds = flat_values(column["token_ids"])
    logprobs, logprob_bounds = flat_values(column["logprobs"])
    num_tokens = np.diff(token_bounds)
    num_completion = num_tokens - column["prompt_length"].to_numpy()
    reject(num_tokens > facts.max_tokens, "longer than max_tokens")
    reject(num_completion < 1, "empty completion")
    reject(np.diff(logprob_bounds) != num_completion, "logprobs and completion differ in length")
    # For most messages, minimum and maximum prove that all values are valid; finding a bad row takes several passes.
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < facts.vocab_size:
        reject(_rows_of((tokens < 0) | (tokens >= facts.vocab_size), token_bounds), "token outside the vocabulary")
    if len(logprobs) and not -np.inf < logprobs.min() <= logprobs.max() <= LOGPROB_TOLERANCE:
        reject(_rows_of(~np.isfinite(logprobs), logprob_bounds), "logprob not finite")
        reject(_rows_of(logprobs > LOGPROB_TOLERANCE, logprob_bounds), "logprob above 0")
    reject(_not_finite(column["reward"]), "reward not finite")
    reject(_too_large(column["reward"]), "reward out of range")
    parts, part_bounds = column["reward_parts"], list_bounds(column["reward_parts"])
    part_values = parts.flatten().field(1)
    reject(np.diff(part_bounds) > schema.MAX_REWARD_PARTS, "too many reward parts")
    reject(_rows_of(_not_finite(part_values), part_bounds), "reward part not finite")
    reject(_rows_of(_too_large(part_values), part_bounds), "reward part out of range")
    reject(~np.isfinite(column["started_s"].to_numpy()) | ~np.isfinite(column["finished_s"].to_numpy()), "wall time")
    reject(_wrong_reference(column["reference_logprobs"], num_completion), "reference_logprobs")
    reject(_not_json_objects(column["columns"]), "columns are not JSON")
    for rows, reason in _span_faults(column["spans"], num_completion, known):
        reject(rows, reason)
    return found


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first and last number of each run of consecutive numbers; the input need not be sorted."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _rows_of(bad_values: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    rows = np.zeros(len(bounds) - 1, np.bool_)
    if bad_values.any():
        rows[np.searchsorted(bounds, np.flatnonzero(bad_values), side="right") - 1] = True
    return rows


def _other_than(column: pa.Array, allowed: Sequence[str]) -> npt.NDArray[np.bool_]:
    return ~pc.is_in(column, pa.array(allowed)).to_numpy(zero_copy_only=False)


def _not_finite(column: pa.Array) -> npt.NDArray[np.bool_]:
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return present & ~np.isfinite(column.to_numpy(zero_copy_only=False))


def _too_large(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which values of a float column exceed `MAX_REWARD`; nulls and NaNs do not."""
    return np.abs(column.to_numpy(zero_copy_only=False)) > MAX_REWARD


def _wrong_reference(column: pa.Array, num_completion: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    if column.null_count == len(column):  # the usual case: the learner computes the scores
        return np.zeros(len(column), np.bool_)
    values, bounds = flat_values(column)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    return present & ((np.diff(bounds) != num_completion) | _rows_of(~np.isfinite(values), bounds))


def _not_json_objects(column: pa.Array) -> list[bool]:
    """Return which rows are not JSON objects; equal texts, such as those of one group, are parsed once."""
    texts = column.to_pylist()
    verdicts = {text: not _is_json_object(text) for text in set(texts)}
    return [verdicts[text] for text in texts]


def _is_json_object(text: str) -> bool:
    try:
        _json_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):  # RecursionError: nested too deeply
        return False
    return True


def _shifted(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([values[:1], values[:-1]])


def _span_faults(
    column: pa.Array, num_completion: npt.NDArray[np.int64], known: Mapping[int, int]
) -> list[tuple[npt.NDArray[np.bool_], str]]:
    """Check that spans cover the completion without gaps, and that their versions exist and never decrease."""
    bounds = list_bounds(column)
    spans = column.flatten()
    incarnation, version, start, end = (spans.field(i).to_numpy().astype(np.int64) for i in range(4))
    num_rows = len(bounds) - 1
    row_of = np.repeat(np.arange(num_rows), np.diff(bounds))
    first = np.zeros(len(start), np.bool_)
    first[bounds[:-1][np.diff(bounds) > 0]] = True
    expected_start = np.where(first, 0, _shifted(end))
    before = _shifted(incarnation)
    older = (before > incarnation) | ((before == incarnation) & (_shifted(version) > version))
    by_number = np.array([known.get(number, -1) for number in range(max(known, default=-1) + 1)] + [-1], np.int64)
    is_known = (incarnation >= 0) & (incarnation < len(by_number))
    newest = by_number[np.where(is_known, incarnation, -1)]
    last_end = np.zeros(num_rows, np.int64)
    last_end[row_of] = end  # later spans of a row overwrite earlier ones

    def rows(bad_spans: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        bad = np.zeros(num_rows, np.bool_)
        bad[row_of[bad_spans]] = True
        return bad

    gaps = rows((start != expected_start) | (end <= start)) | (last_end != num_completion)
    return [
        (gaps, "spans do not cover the completion"),
        (rows(~first & older), "versions fall within a completion"),
        (rows((version < 0) | (version > newest)), "version that was never published"),
    ]
