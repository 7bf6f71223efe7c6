"""What the report shows of the buffer: distributions, and the samples worth looking at."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from buffer.errors import BufferError
from buffer.length_model import bounds_of
from common.staleness import PolicyVersion, effective_version
from launch.text import TextOf, printable

if TYPE_CHECKING:
    from buffer.offline.inspect import GroupView, Inspection, Sample

MAX_TEXT = 4000
"""Characters of a prompt or a completion on the page."""
NUM_GROUPS_READ = 240
"""Groups, evenly spread over the buffer, that the distribution of lags is made from."""
MAX_LAG_SHOWN = 64
KINDS = ("best reward", "worst reward", "longest", "most off-policy", "shortest")


class SampleKey(NamedTuple):
    """A sample within the buffer."""

    group_id: int
    sample: int


@dataclass(frozen=True)
class ShownSample:
    """One sample, for people."""

    kind: str
    group_id: int
    sample_index: int
    record_id: int
    row: Mapping[str, Any]
    """As it is stored, by the names of `buffer.schema`."""
    state: str
    lag: int | None
    """Versions between its oldest token and its last use; None if it was not trained."""
    step: int | None
    prompt: str | None
    """None if the run has no tokenizer."""
    completion: str | None

    @property
    def num_tokens(self) -> int:
        return len(self.row["logprobs"])

    @property
    def mean_logprob(self) -> float | None:
        return fmean(self.row["logprobs"]) if self.row["logprobs"] else None

    @property
    def versions(self) -> list[str]:
        return list(dict.fromkeys(str(PolicyVersion(s["incarnation"], s["version"])) for s in self.row["spans"]))


@dataclass
class BufferData:
    """What the buffer of a run holds."""

    num_groups: int = 0
    num_looked_at: int = 0
    """Groups that were read before the time was over."""
    ledger: dict[str, int] = field(default_factory=dict)
    generated: list[float] = field(default_factory=list)
    """Share of each bucket of `buffer.length_model` in the last few thousand completions."""
    trained: list[float] = field(default_factory=list)
    ks: float = 0.0
    """Kolmogorov-Smirnov distance of the two."""
    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens of each lag, in `num_lag_samples` samples."""
    num_lag_samples: int = 0
    trajectories: list[ShownSample] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_buffer(root: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> BufferData:
    """Read the buffer of a run for up to `limit_s`; the groups that are left then are not looked at.

    Raises:
        BufferError: there is none, or it cannot be read.
        OSError: likewise.
    """
    from buffer.offline.inspect import Inspection

    deadline = clock() + limit_s
    with Inspection.open(root) as inspection:
        totals, state = inspection.totals(), inspection.state()
        data = BufferData(
            num_groups=totals.num_groups,
            ledger=totals.ledger,
            generated=state.fidelity.generated.shares(),
            trained=state.fidelity.trained.shares(),
            ks=state.length_fidelity.ks,
        )
        best: dict[str, list[tuple[tuple[float, ...], SampleKey]]] = {kind: [] for kind in KINDS}
        trained_groups = []
        for group in inspection.groups():
            data.num_looked_at += 1
            if group.row.trained_at and "trained" in group.row.sample_states:
                trained_groups.append(group.row.group_id)
            for kind, value, key in _candidates(group):
                (heapq.heappush if len(best[kind]) < len(KINDS) else heapq.heappushpop)(best[kind], (value, key))
            if clock() > deadline:
                break
        for group_id in trained_groups[:: max(1, len(trained_groups) // NUM_GROUPS_READ)]:
            if clock() > deadline + limit_s / 2:
                break
            _count_lags(inspection, group_id, data)
        decode = TextOf(inspection.folder)
        for key, kind in _chosen(best).items():
            data.trajectories += _shown(inspection, key, kind, decode)
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
        key = SampleKey(row.group_id, index)
        if not length or row.records[index] < 0:
            continue
        if reward is not None:
            yield "best reward", (reward, lag or 0, row.group_id), key
            yield "worst reward", (-reward, lag or 0, row.group_id), key
        yield "longest", (length, row.group_id), key
        yield "shortest", (-length, row.group_id), key
        if lag is not None and row.sample_states[index] == "trained":
            yield "most off-policy", (lag, length, row.group_id), key


def _chosen(best: Mapping[str, Sequence[tuple[tuple[float, ...], SampleKey]]]) -> dict[SampleKey, str]:
    """Return one sample of each kind; no two are the same."""
    found: dict[SampleKey, str] = {}
    for kind, ordered in best.items():
        first = next((key for _, key in sorted(ordered, reverse=True) if key not in found), None)
        if first is not None:
            found[first] = kind
    return found


def _lag_of(group: GroupView) -> int | None:
    uses = group.row.trained_at
    return uses[-1].version - group.oldest_version if uses and group.oldest_version is not None else None


def _samples_of(inspection: Inspection, group_id: int) -> Iterator[tuple[GroupView, Sample, dict[str, Any]]]:
    """Yield the samples of a group with their rows; none if it was evicted since, or is damaged."""
    from buffer.offline.inspect import joined

    try:
        group = inspection.group(group_id)
    except BufferError as error:
        inspection.damaged.append(str(error))
        return
    if group is not None and group.samples:
        rows = joined(group.samples).to_pylist()
        for sample, row in zip(group.samples, rows, strict=True):
            yield group, sample, row


def _count_lags(inspection: Inspection, group_id: int, data: BufferData) -> None:
    for group, sample, row in _samples_of(inspection, group_id):
        uses = group.row.trained_at
        if not uses or group.row.sample_states[sample.sample_index] != "trained":
            continue
        resumed = inspection.state().resumed_at
        starts = {number: version for number, version in resumed.items() if number <= uses[-1].incarnation}
        data.num_lag_samples += 1
        for span in row["spans"]:
            sampled = effective_version(PolicyVersion(span["incarnation"], span["version"]), starts)
            data.lags[min(MAX_LAG_SHOWN, max(0, uses[-1].version - sampled))] += span["end"] - span["start"]


def _shown(inspection: Inspection, key: SampleKey, kind: str, decode: TextOf) -> Iterator[ShownSample]:
    for group, sample, row in _samples_of(inspection, key.group_id):
        if sample.sample_index != key.sample:
            continue
        state = group.row.sample_states[key.sample]
        is_trained = state == "trained" and bool(group.row.trained_at)
        yield ShownSample(
            kind=kind,
            group_id=key.group_id,
            sample_index=key.sample,
            record_id=sample.record_id,
            row=row,
            state=state,
            lag=_lag_of(group) if is_trained else None,
            step=group.row.trained_at[-1].step if is_trained else None,
            prompt=_text(decode.text(row["token_ids"][: row["prompt_length"]])),
            completion=_text(decode.text(row["token_ids"][row["prompt_length"] :])),
        )


def _text(text: str | None) -> str | None:
    """Return a text with its lines kept, and everything else that does not print escaped."""
    if text is None:
        return None
    shown = "\n".join(printable(line.replace("\t", "    ")) for line in text[:MAX_TEXT].split("\n"))
    return shown + (f"\n... and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")
