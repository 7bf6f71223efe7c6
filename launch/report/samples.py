"""What the report shows of the buffer: distributions, and the samples worth looking at."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from buffer.errors import BufferError
from buffer.lengths import bounds_of
from common.staleness import PolicyVersion
from launch.text import TextOf, printable

if TYPE_CHECKING:
    from buffer.offline.inspect import GroupView, Inspection

MAX_TEXT = 4000
"""Characters of a prompt or a completion on the page."""
KINDS = ("best reward", "worst reward", "longest", "most off-policy", "shortest")


class ShownSample(NamedTuple):
    """One sample, for people."""

    kind: str
    group_id: int
    sample_index: int
    record_id: int
    row: Mapping[str, Any]
    """As it is stored, by the names of `buffer.schema`."""
    state: str
    lag: int | None
    """Versions between its oldest token and its last use; None if it was not trained, as the step."""
    step: int | None
    prompt: str | None
    """None if the run has no tokenizer, as the completion."""
    completion: str | None
    versions: Sequence[str]
    """Policy versions that sampled it, in order."""

    @property
    def num_tokens(self) -> int:
        return len(self.row["logprobs"])


SampleKey = tuple[int, int]
"""Group and sample within the buffer."""


@dataclass
class BufferData:
    """What the buffer of a run holds."""

    num_groups: int
    ledger: dict[str, int]
    generated: list[float]
    """Share of each bucket of `buffer.lengths` in the last few thousand completions, and below in those trained."""
    trained: list[float]
    ks: float
    """Kolmogorov-Smirnov distance of the two."""
    num_looked_at: int = 0
    """Groups that were read before the time was over."""
    trajectories: list[ShownSample] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_buffer(root: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> BufferData:
    """Read the buffer of a run for up to `limit_s`; groups that are left then are not looked at.

    Raises:
        BufferError: there is none, or it cannot be read.
        OSError: likewise.
    """
    from buffer.offline.inspect import Inspection

    deadline = clock() + limit_s
    with Inspection.open(root) as inspection:
        totals, state = inspection.totals(), inspection.state()
        generated, trained = state.fidelity.generated.shares(), state.fidelity.trained.shares()
        data = BufferData(totals.num_groups, totals.ledger, generated, trained, state.length_fidelity.ks)
        best: dict[str, list[tuple[tuple[float, ...], SampleKey]]] = {kind: [] for kind in KINDS}
        for group in inspection.groups():
            data.num_looked_at += 1
            for kind, value, key in _candidates(group):
                (heapq.heappush if len(best[kind]) < len(KINDS) else heapq.heappushpop)(best[kind], (value, key))
            if clock() > deadline:
                break
        decode, chosen = TextOf(inspection.folder), set[SampleKey]()
        for kind, ordered in best.items():  # one of each kind; no two are the same
            first = next((key for _, key in sorted(ordered, reverse=True) if key not in chosen), None)
            if first is not None:
                chosen.add(first)
                data.trajectories += _shown(inspection, first, kind, decode)
        data.damaged = list(dict.fromkeys(inspection.damaged))
        return data


def length_label(bucket: int) -> str:
    """Return the lengths of a bucket, in tokens."""
    low, high = bounds_of(bucket)
    return str(low) if high <= low else f"{low}-{high}"


def _candidates(group: GroupView) -> Iterator[tuple[str, tuple[float, ...], SampleKey]]:
    """Yield for each sample the kinds that it may be the best of, with the value that it is compared by."""
    row, lag = group.row, _lag_of(group)
    for index, (reward, length) in enumerate(zip(row.rewards, row.completion_lengths, strict=True)):
        key = row.group_id, index
        if not length or row.records[index] < 0:
            continue
        if reward is not None:
            yield "best reward", (reward, lag or 0, row.group_id), key
            yield "worst reward", (-reward, lag or 0, row.group_id), key
        yield "longest", (length, row.group_id), key
        yield "shortest", (-length, row.group_id), key
        if lag is not None and row.sample_states[index] == "trained":
            yield "most off-policy", (lag, length, row.group_id), key


def _lag_of(group: GroupView) -> int | None:
    uses = group.row.trained_at
    return uses[-1].version - group.oldest_version if uses and group.oldest_version is not None else None


def _shown(inspection: Inspection, key: SampleKey, kind: str, decode: TextOf) -> Iterator[ShownSample]:
    """Yield the sample; nothing if its group was evicted since, or is damaged."""
    from buffer.offline.inspect import joined

    group_id, index = key
    try:
        group = inspection.group(group_id)
    except BufferError as error:
        inspection.damaged.append(str(error))
        return
    if group is None or not group.samples:
        return
    for sample, row in zip(group.samples, joined(group.samples).to_pylist(), strict=True):
        if sample.sample_index != index:
            continue
        state, tokens, prompt_length = group.row.sample_states[index], row["token_ids"], row["prompt_length"]
        is_trained = state == "trained" and bool(group.row.trained_at)
        versions = (str(PolicyVersion(each["incarnation"], each["version"])) for each in row["spans"])
        yield ShownSample(
            kind=kind,
            group_id=group_id,
            sample_index=index,
            record_id=sample.record_id,
            row=row,
            state=state,
            lag=_lag_of(group) if is_trained else None,
            step=group.row.trained_at[-1].step if is_trained else None,
            prompt=_text(decode(tokens[:prompt_length])),
            completion=_text(decode(tokens[prompt_length:])),
            versions=list(dict.fromkeys(versions)),
        )


def _text(text: str | None) -> str | None:
    """Return a text with its lines kept, and everything else that does not print escaped."""
    if text is None:
        return None
    shown = "\n".join(printable(line.replace("\t", "    ")) for line in text[:MAX_TEXT].split("\n"))
    return shown + (f"\n... and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")
