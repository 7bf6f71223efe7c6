"""Recorded samples: read from a store or a file, group by group, and loaded into the buffer of another run.

    Recorded      one source, opened for reading: a store, an export, or JSON Lines with a `FileRow` per line. A file is
                  read as a whole, because the rows of a group may be anywhere in it
    survey        checks every sample, and counts the samples and the groups that can be trained on
    load_samples  adds all samples to a new store, as if each group had been leased and pushed there

Versions of recorded tokens belong to another run, so all of them count as `RECORDED_VERSION`, which is before the run's
own first version: their lag is at least 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from leeway.buffer.config import MAX_GROUP_SIZE, BufferConfig
from leeway.buffer.core import BufferCore
from leeway.buffer.errors import StoreError
from leeway.buffer.ingest import PushedRow, faults, judged, rows_of
from leeway.buffer.offline.inspect import Inspection, batches_of, joined
from leeway.buffer.rows import RowBytes, flat_values, list_array
from leeway.buffer.schema import SCHEMA, Trajectory, VersionSpan, to_batch
from leeway.buffer.store import Store, is_served
from leeway.buffer.tables import Group, Incarnation
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion, StalenessConfig
from leeway.common.user_input import did_you_mean

RECORDED_VERSION = -1
MAX_INCARNATIONS = 1024
MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPTS = 2**24
"""Upper bound of prompt ids; the buffer's rules allocate memory for every id below the largest."""
PART_ROWS = 4096
"""Minimum number of samples that a transaction loads from a file; the last group is always loaded as a whole."""


SUFFIXES = (".jsonl", ".parquet")
MAX_NAMED = 20
"""Maximum number of invalid rows listed in an error; further rows are only counted."""
FROM_FILE = "file"

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class RecordedGroups(NamedTuple):
    batch: pa.RecordBatch
    """Record batch of `schema.SCHEMA`, in the order of groups. Unknown log-probabilities are NaN."""
    rows: npt.NDArray[np.int64] | None
    """Line or row number of each sample in its file, from 1; None for a store."""

    def name_of(self, row: int) -> str:
        if self.rows is not None:
            return f"row {self.rows[row]}"
        group_id, index = (self.batch.column(name)[row].as_py() for name in ("group_id", "sample_index"))
        return f"sample {index} of group {group_id}"


@dataclass(frozen=True)
class Recorded:
    path: Path
    is_recorded: bool
    """True if a run of Leeway recorded the samples; its groups may lack samples that failed."""
    parts: Callable[[], Iterator[RecordedGroups]]
    """Yields all samples in parts of whole groups; the groups of a store are in the order of their ids."""
    damaged: list[str] = field(default_factory=list)
    """A message for each value that was skipped because it does not match its checksum."""

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Recorded]:
        """Open the buffer of a run folder or buffer folder, a .jsonl file, or an export.

        Raise StoreError if `path` is something else, cannot be read, or is being written.
        """
        if path.is_dir():
            with Inspection.open(path) as inspection:
                if is_served(inspection.folder):
                    raise StoreError(
                        f"the buffer in {inspection.folder} is being written by a live run: wait until it ends, or "
                        "train on a file that `leeway buffer export` writes"
                    )
                yield cls(path, True, partial(_parts_of_store, inspection), inspection.damaged)
            return
        if path.suffix not in SUFFIXES or not path.exists():
            raise StoreError(
                f"no recorded samples found at {path}: pass the folder of a run, or an existing file with a name that "
                f"ends in {' or '.join(SUFFIXES)}"
            )
        yield cls(path, path.suffix == ".parquet", partial(_parts_of_file, *read_samples(path)))


def _parts_of_store(inspection: Inspection) -> Iterator[RecordedGroups]:
    for groups in batches_of(inspection.groups(with_samples=True)):
        yield RecordedGroups(joined([sample for group in groups for sample in group.samples]), None)


def _parts_of_file(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> Iterator[RecordedGroups]:
    firsts, _ = _groups(batch)
    start = 0
    while start < batch.num_rows:
        later = firsts[firsts >= start + PART_ROWS]
        end = int(later[0]) if len(later) else batch.num_rows
        yield RecordedGroups(batch.slice(start, end - start), rows[start:end])
        start = end


class Survey(NamedTuple):
    num_samples: int
    num_rewarded: int
    num_groups: int
    num_usable: int
    """Number of groups with at least two rewards, or with one reward if no group has more than one sample."""
    num_uninformative: int
    """Number of usable groups of two or more samples whose rewards are all equal."""
    single: str
    """Name of a sample that is alone in its group; '' if there is none."""
    num_unknown: int
    """Number of samples without log-probabilities."""
    num_prompts: int
    group_size: int
    """Size of the largest group, by sample indices."""
    longest: int
    """Number of tokens of the longest sample, prompt included."""
    largest_token: int
    newest: Mapping[int, int]
    """Incarnation -> its newest version."""


def survey(recorded: Recorded, *, vocab_size: int = MAX_TOKEN_ID, max_tokens: int = MAX_TOKEN_ID) -> Survey:
    """Check every sample against the vocabulary and the maximum length.

    Raises:
        BadRows: some samples cannot be trained on.
        StoreError: there are no samples, or some are damaged.
    """
    bad: dict[str, str] = {}
    newest: dict[int, int] = {}
    rewarded: list[npt.NDArray[np.int64]] = []
    num_samples = num_equal = num_unknown = num_prompts = group_size = longest = largest = 0
    run_id, single = "", ""
    limits = {"token outside the vocabulary": f" of {vocab_size}", "longer than max_tokens": f" = {max_tokens}"}
    for part in recorded.parts():
        batch = part.batch
        run_id = run_id or batch.column("run_id")[0].as_py()
        facts, known, unknown = _limits(batch, run_id, vocab_size, max_tokens), _newest(batch), unknown_logprobs(batch)
        reasons = faults(_with_zeros(batch, unknown), facts, known) | _group_faults(batch)
        bad |= {part.name_of(row): f"{why}{limits.get(why, '')}" for row, why in sorted(reasons.items())}
        newest |= {number: max(version, newest.get(number, 0)) for number, version in known.items()}
        tokens, bounds = flat_values(batch.column("token_ids"))
        first, group_of = _groups(batch)
        alone = first[np.bincount(group_of) == 1]
        single = single or (part.name_of(int(alone[0])) if len(alone) else "")
        rewards = batch.column("reward").to_numpy(zero_copy_only=False)  # a missing reward is NaN
        rewarded.append(np.bincount(group_of, weights=~np.isnan(rewards)).astype(np.int64))
        is_equal = np.fmin.reduceat(rewards, first) == np.fmax.reduceat(rewards, first)
        num_equal += int((is_equal & (rewarded[-1] > 1)).sum())
        num_samples, num_unknown = num_samples + batch.num_rows, num_unknown + int(unknown.sum())
        num_prompts, group_size = max(num_prompts, facts.num_prompts), max(group_size, facts.group_size)
        longest, largest = max(longest, int(np.diff(bounds).max())), max(largest, int(tokens.max(initial=0)))
    if bad:
        raise BadRows(recorded.path, num_samples, bad)
    if recorded.damaged:
        raise StoreError(f"{recorded.path}: {recorded.damaged[0]}; export intact samples with `leeway buffer export`")
    if not num_samples:
        raise StoreError(f"{recorded.path} has no samples: choose another source")
    with_reward = np.concatenate(rewarded)
    return Survey(
        num_samples,
        int(with_reward.sum()),
        len(with_reward),
        int((with_reward >= min(2, group_size)).sum()),
        num_equal,
        single,
        num_unknown,
        num_prompts,
        group_size,
        longest,
        largest,
        newest,
    )


def load_samples(
    folder: Path, facts: RunFacts, config: BufferConfig, recorded: Recorded, newest: Mapping[int, int]
) -> int:
    """Store all samples in a new store; return their number. `newest` is from `survey`. Raise StoreError on failure."""
    core = BufferCore(config, facts, clock=lambda: 0.0)
    num_samples = 0
    store = Store(folder, facts, durability="os")  # close() syncs the store; no process uses the store earlier
    try:
        store.write(lambda tx: _begin(tx, newest))
        for part in recorded.parts():
            store.write(partial(_enter, core, part.batch))
            num_samples += part.batch.num_rows
    finally:
        store.close()
    return num_samples


def _begin(tx: Transaction, newest: Mapping[int, int]) -> None:
    """Record the incarnations of the samples as ended; the learners of this run abandon them all."""
    ended = [Incarnation("recorded", 0, 0, newest=newest.get(n, 0)) for n in range(max(newest) + 1)]
    tx.state.incarnations = [*ended, Incarnation("recorded", RECORDED_VERSION, 0)]


def _enter(core: BufferCore, batch: pa.RecordBatch, tx: Transaction) -> None:
    core.groups.prepare(tx)
    scores = SCHEMA.get_field_index("reference_logprobs")
    # Drop scores of the other run's reference model; this run computes its own scores.
    batch = batch.set_column(scores, SCHEMA.field(scores), pa.nulls(batch.num_rows, SCHEMA.field(scores).type))
    rows, as_bytes, state = judged([*rows_of(batch)], batch, core.facts.informative_rewards), RowBytes(batch), tx.state
    first, _ = _groups(batch)
    for start, end in pairwise([*first.tolist(), len(rows)]):
        group = _group_of(rows[start:end], batch.column("prompt_id")[start].as_py())
        state.next_group = max(state.next_group, group.group_id + 1)
        state.ledger.issue(end - start)
        core.ingest.commit(tx, group, range(start, end), rows, as_bytes)


def _group_of(rows: Sequence[PushedRow], prompt_id: int) -> Group:
    """Return the group with its original id, before the commit; absent samples are failed but not counted as issued."""
    present = {row.sample_index for row in rows}
    group = Group.new(rows[0].group_id, prompt_id, max(present) + 1)
    group.sample_states = [state if i in present else "failed" for i, state in enumerate(group.sample_states)]
    group.attempt, group.issued = 1, len(rows)
    return group


# --- files ----------------------------------------------------------------------------------------------


class FileRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sample of a JSON Lines file."""

    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    completion_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    reward: float | None = None
    logprobs: list[float] | None = None
    """log mu of each completion token under the policy that sampled it."""
    group: int | str | None = None
    """Rows with equal values form a group; rows without a value are grouped by prompt."""
    finished: bool = True
    """True if the completion ended with an end-of-sequence token instead of at the token limit."""
    columns: dict[str, Any] = {}
    """Further values to store with the sample."""


class BadRows(StoreError):
    """Rows of a file, or samples of a run, that cannot be trained on; the message lists them with their reasons."""

    def __init__(self, path: Path, num_rows: int, reasons: Mapping[str, str]) -> None:
        named = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:MAX_NAMED])
        others = f"; and {len(reasons) - MAX_NAMED} others" if len(reasons) > MAX_NAMED else ""
        super().__init__(
            f"{path}: {len(reasons)} of {num_rows} samples cannot be trained on, so none is loaded: {named}{others}"
        )


def read_samples(path: Path) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Return the samples of a file, in the order of groups, and the line or row number of each.

    Raise StoreError if the file cannot be read or lacks columns, BadRows if rows are not valid samples.
    """
    try:
        if path.suffix == ".jsonl":
            return _of_rows(path, _json_rows(path))
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} cannot be read as {path.suffix[1:]} ({error}): check the file") from error
    return _of_export(path, table)


def _json_rows(path: Path) -> Iterator[tuple[int, FileRow | str]]:
    decoder = msgspec.json.Decoder(FileRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, decoder.decode(line)
                except (msgspec.DecodeError, RecursionError) as error:
                    yield number, _reason(error)


def _reason(error: Exception) -> str:
    text = str(error)
    field = text.split("`")[1] if "unknown field" in text else ""
    return text + (did_you_mean(field, FileRow.__struct_fields__) if field else "")


def _of_rows(path: Path, rows: Iterator[tuple[int, FileRow | str]]) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Assign numbers to prompts and groups in order of appearance; sort the samples by group."""
    prompts: dict[tuple[int, ...], int] = {}
    groups: dict[object, tuple[int, int]] = {}
    sizes: dict[int, int] = {}
    found: list[tuple[int, Trajectory]] = []
    bad: dict[str, str] = {}
    written_s, num_rows = path.stat().st_mtime, 0
    for number, row in rows:
        num_rows += 1
        if isinstance(row, str):
            bad[f"row {number}"] = row
            continue
        if row.logprobs is not None and len(row.logprobs) != len(row.completion_ids):
            bad[f"row {number}"] = f"{len(row.logprobs)} logprobs for {len(row.completion_ids)} completion_ids"
            continue
        prompt_id = prompts.setdefault(tuple(row.prompt_ids), len(prompts))
        # The key of a group with a value never equals the key of a group by prompt.
        key = ("prompt", prompt_id) if row.group is None else (type(row.group), row.group)
        group_id, group_prompt = groups.setdefault(key, (len(groups) + 1, prompt_id))
        if group_prompt != prompt_id:
            bad[f"row {number}"] = f"group {row.group!r} has another prompt in an earlier row"
            continue
        sizes[group_id] = sizes.get(group_id, 0) + 1
        found.append((number, _trajectory(row, group_id, sizes[group_id] - 1, prompt_id, number, written_s)))
    if bad:
        raise BadRows(path, num_rows, bad)
    found.sort(key=lambda each: (each[1].group_id, each[1].sample_index))
    batch = to_batch([trajectory for _, trajectory in found], run_id=path.name)
    return batch, np.array([number for number, _ in found], np.int64)


def _trajectory(row: FileRow, group_id: int, index: int, prompt_id: int, number: int, written_s: float) -> Trajectory:
    """Return a row as a trajectory of an unknown version, which counts as older than all versions of the run."""
    num_tokens = len(row.completion_ids)
    unknown = np.full(num_tokens, np.nan, np.float32)
    return Trajectory(
        lease_id=group_id,
        attempt=1,
        group_id=group_id,
        sample_index=index,
        prompt_id=prompt_id,
        token_ids=np.array([*row.prompt_ids, *row.completion_ids], np.int32),
        prompt_length=len(row.prompt_ids),
        logprobs=unknown if row.logprobs is None else np.array(row.logprobs, np.float32),
        spans=(VersionSpan(PolicyVersion(0, 0), 0, num_tokens),),
        reward=row.reward,
        finish_reason="stop" if row.finished else "length",
        columns=row.columns,
        actor=FROM_FILE,
        seq=number,
        started_s=written_s,
        finished_s=written_s,
    )


def _of_export(path: Path, table: pa.Table) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Return the columns of the schema, without the export's columns of `inspect.STATE`."""
    if missing := sorted(set(SCHEMA.names) - set(table.column_names)):
        raise StoreError(
            f"{path} lacks the columns {', '.join(missing)} of an export: pass a file written by `leeway buffer "
            "export`, or a .jsonl file of your own samples"
        )
    nulls = {
        f"row {place + 1}": f"{field.name} is null"
        for field in SCHEMA
        if not field.nullable
        for place in np.flatnonzero(table[field.name].is_null().to_numpy())
    }
    if nulls:
        raise BadRows(path, table.num_rows, nulls)
    try:
        chosen = table.select(SCHEMA.names).cast(SCHEMA)
        order = np.lexsort((chosen["sample_index"].to_numpy(), chosen["group_id"].to_numpy()))
        batch = pa.concat_batches(chosen.take(order).to_batches()) if len(order) else to_batch([], "")
    except (pa.ArrowException, ValueError) as error:
        raise StoreError(
            f"{path} has other column types than an export has, or over 2**31 tokens ({error}): export the run again, "
            "or export a part of it"
        ) from error
    return batch, order.astype(np.int64) + 1


# --- columns --------------------------------------------------------------------------------------------


def unknown_logprobs(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Return which samples have no log-probabilities of the policy that sampled them."""
    values, bounds = flat_values(batch.column("logprobs"))
    num_nan = np.concatenate([[0], np.cumsum(np.isnan(values))])
    lengths = np.diff(bounds)
    return (np.diff(num_nan[bounds]) == lengths) & (lengths > 0)


def _with_zeros(batch: pa.RecordBatch, unknown: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """Replace unknown log-probabilities with zeros, which pass validation."""
    if not unknown.any():
        return batch
    place, (values, bounds) = SCHEMA.get_field_index("logprobs"), flat_values(batch.column("logprobs"))
    lengths = np.diff(bounds)
    zeros = np.where(np.repeat(unknown, lengths), np.float32(0.0), values)
    return batch.set_column(place, SCHEMA.field(place), list_array(lengths, pa.array(zeros, pa.float32())))


def _limits(batch: pa.RecordBatch, run_id: str, vocab_size: int, max_tokens: int) -> RunFacts:
    """Return facts of a run that could have produced these samples."""

    def end_of(name: str, most: int) -> int:
        return min(max(1, int(batch.column(name).to_numpy().max()) + 1), most)

    return RunFacts(
        run_id=run_id,
        seed=0,
        num_prompts=end_of("prompt_id", MAX_PROMPTS),
        group_size=end_of("sample_index", MAX_GROUP_SIZE),
        groups_per_step=1,
        vocab_size=vocab_size,
        max_tokens=max_tokens,
        staleness=StalenessConfig(max_lag="unbounded"),
    )


def _newest(batch: pa.RecordBatch) -> dict[int, int]:
    spans = batch.column("spans").flatten()
    incarnations, versions = (spans.field(i).to_numpy().astype(np.int64) for i in range(2))
    numbers = [number for number in np.unique(incarnations).tolist() if 0 <= number < MAX_INCARNATIONS]
    return {number: int(versions[incarnations == number].max()) for number in numbers}


def _groups(batch: pa.RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    group_ids = batch.column("group_id").to_numpy()
    is_first = np.concatenate([[True], np.diff(group_ids) != 0])
    return np.flatnonzero(is_first), np.cumsum(is_first) - 1


def _group_faults(batch: pa.RecordBatch) -> dict[int, str]:
    """Return rows with another prompt than the first row of their group, or with a duplicate sample index."""
    first, group_of = _groups(batch)
    prompts, indices = (batch.column(name).to_numpy() for name in ("prompt_id", "sample_index"))
    found = dict.fromkeys(np.flatnonzero(prompts != prompts[first][group_of]).tolist(), "its group has another prompt")
    order = np.lexsort((indices, group_of))
    is_same = (np.diff(group_of[order]) == 0) & (np.diff(indices[order]) == 0)
    return dict.fromkeys(order[1:][is_same].tolist(), "its group has this sample_index already") | found
