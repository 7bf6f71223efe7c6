"""The lines that `leeway buffer` prints."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from buffer.offline.inspect import GroupView, Inspection, Quarantined, Sample, read_row
from buffer.schema import SCHEMA, join_rows
from buffer.trajectory import SCHEMA_VERSION
from launch.words import MAX_TEXT, printable

LEDGER_SHOWN = (
    *("issued", "in_flight", "committed", "failed", "waiting", "drawn", "trained"),
    *("dropped_stale", "filtered", "evicted_unused"),
)
GROUPS_HEAD = (
    f"{'group':>8} {'prompt':>8} {'phase':<6} {'reward':>8} {'version':>7} {'uses':>4}  {'tokens':<16} samples"
)
QUARANTINE_HEAD = f"{'number':>8} {'bytes':>6}  reason"
_WIDTH = 116
_FIRST_BYTES = 256
_MAX_QUARANTINED_VALUE = 2_000
"""Characters of one value of a quarantined row that are shown, whatever it is."""

Decode = Callable[[Sequence[int]], str | None]


def headline(inspection: Inspection) -> str:
    """One line for the whole buffer."""
    totals = inspection.totals()
    first = inspection.stores[0]
    shards = f" in {len(inspection.stores)} shards" if len(inspection.stores) > 1 else ""
    quarantined = sum(totals.quarantined_by_reason.values())
    return (
        f"run {first.facts.run_id}, schema version {SCHEMA_VERSION}, learner at version {totals.version}: "
        f"{totals.num_groups} groups, {totals.num_records} trajectories, {totals.size_bytes / 2**20:.1f} MiB{shards}, "
        f"{quarantined} quarantined"
    )


def group_line(group: GroupView) -> str:
    """One line of `ls`."""
    row = group.row
    version = "-" if group.oldest_version is None else str(group.oldest_version)
    return (
        f"{row.group_id:>8} {row.prompt_id:>8} {row.phase:<6} {_number(row.mean_reward):>8} {version:>7} "
        f"{row.uses:>4}  {_range(group.lengths):<16} {_states(Counter(row.sample_states))}"
    )


class Tally:
    """Adds up the groups that were listed."""

    def __init__(self) -> None:
        self._num_groups = 0
        self._states: Counter[str] = Counter()
        self._num_rewards = 0
        self._reward_total = 0.0
        self._num_tokens = 0

    def add(self, group: GroupView) -> None:
        """One more."""
        rewards = [reward for reward in group.row.rewards if reward is not None]
        self._num_groups += 1
        self._states.update(group.row.sample_states)
        self._num_rewards += len(rewards)
        self._reward_total += sum(rewards)
        self._num_tokens += sum(group.lengths)

    def line(self) -> str:
        """The last line of `ls`."""
        mean = self._reward_total / self._num_rewards if self._num_rewards else None
        samples = f"{self._states.total()} samples" + (f" ({_states(self._states)})" if self._states else "")
        return f"{self._num_groups} groups, {samples}, {self._num_tokens} tokens, mean reward {_number(mean)}"


def quarantine_line(entry: Quarantined) -> str:
    """One line of `ls --quarantine`."""
    name = str(entry.number) if not entry.shard else f"{entry.shard}:{entry.number}"
    return f"{name:>8} {len(entry.data):>6}  {printable(entry.reason, _WIDTH)}"


def group_in_full(group: GroupView, decode: Decode, *, only_record: int | None = None) -> Iterator[str]:
    """`show`: a group and its samples, or of one record every column."""
    row = group.row
    yield f"group {row.group_id}: prompt {row.prompt_id}, {row.phase}, {_states(Counter(row.sample_states))}"
    held_by = f"leased to {row.actor} (epoch {row.epoch})" if row.lease_id else "not leased"
    oldest = "nothing committed" if row.oldest is None else f"oldest token {row.oldest[0]}.{row.oldest[1]}"
    counted = "" if row.oldest is None else f", which counts as version {group.oldest_version}"
    yield f"  {oldest}{counted}; attempt {row.attempt}, {held_by}; issued {row.issued}, failed {row.failed}"
    for use in row.trained_at:
        yield f"  trained at step {use.step}, version {use.version}"
    samples = [sample for sample in group.samples if only_record in (None, sample.record_id)]
    if not samples:
        yield "  none of its samples is stored"
        return
    batch = _batch(samples)
    if only_record is None:
        yield from _indented(f"  columns of the first: {printable(batch.column('columns')[0].as_py())}")
    for i, sample in enumerate(samples):
        yield from _sample(group, sample, batch.slice(i, 1).to_pylist()[0], decode)
        if only_record is not None:
            yield from _all_columns(batch.slice(i, 1).to_pylist()[0])


def quarantined_in_full(entry: Quarantined) -> Iterator[str]:
    """`show --quarantined`: the reason, and the row where one can be read, else the first bytes."""
    yield f"quarantined {entry.number}: {printable(entry.reason, _WIDTH)}; {len(entry.data)} bytes are kept"
    row = read_row(entry.data)
    if row is not None:
        yield from _all_columns(row, _MAX_QUARANTINED_VALUE)
        return
    yield "  no row can be read from it; its first bytes:"
    for start in range(0, min(len(entry.data), _FIRST_BYTES), 16):
        part = entry.data[start : start + 16]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"  {start:>6}  {part.hex(' '):<47}  {seen}"


def _sample(group: GroupView, sample: Sample, row: dict[str, Any], decode: Decode) -> Iterator[str]:
    parts = ", ".join(f"{printable(part['name'])} {_number(part['value'])}" for part in row["reward_parts"])
    state = group.row.sample_states[sample.sample_index]
    reward = f"reward {_number(row['reward'])}" + (f" ({parts})" if parts else "")
    yield f"sample {sample.sample_index}: record {sample.record_id}, {state}, {reward}, {row['finish_reason']}"
    num_prompt = row["prompt_length"]
    spans = " ".join(f"{s['incarnation']}.{s['version']} [{s['start']}, {s['end']})" for s in row["spans"])
    yield f"  {num_prompt} prompt tokens, {len(row['logprobs'])} completion tokens; sampled by {spans}"
    yield f"  logprobs {_summary(row['logprobs'])}; reference {_summary(row['reference_logprobs'])}"
    prompt, completion = decode(row["token_ids"][:num_prompt]), decode(row["token_ids"][num_prompt:])
    if prompt is not None:
        yield from _indented(f"  {prompt}")
        yield from _indented(f"  -> {completion}")


def _all_columns(row: dict[str, Any], most: int | None = None) -> Iterator[str]:
    """One paragraph per column, with at most `most` characters of each value; None: of texts `MAX_TEXT`."""
    for name in SCHEMA.names:
        value = row[name]
        if name.endswith("_s"):
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value)) if 0 <= value < 2**40 else "no time"
            text = f"{value:.3f} ({moment})"
        elif name.endswith("logprobs") and value is not None:
            text = " ".join(f"{each:.4f}" for each in value)
        else:
            text = str(value)
        of_numbers = name in ("token_ids", "logprobs", "reference_logprobs", "spans")
        yield from _indented(f"  {name}: {printable(text, most or (len(text) if of_numbers else MAX_TEXT))}")


def _batch(samples: Sequence[Sample]) -> pa.RecordBatch:
    scores = [None if s.scores is None else np.frombuffer(s.scores, np.float32) for s in samples]
    return join_rows([sample.record for sample in samples], scores)


def _summary(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    return f"mean {np.mean(values):.3f}, min {min(values):.3f}, sum {np.sum(values):.3f}"


def _states(counts: Counter[str]) -> str:
    return " ".join(f"{count} {state}" for state, count in counts.most_common())


def _range(lengths: Sequence[int]) -> str:
    return f"{min(lengths)}..{max(lengths)} ({np.mean(lengths):.0f})" if lengths else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _indented(line: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent="      ", break_long_words=True, break_on_hyphens=False, drop_whitespace=False
    )
