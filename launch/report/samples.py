"""What the report shows of the buffer: distributions, and the samples worth looking at."""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from buffer.errors import BufferError
from buffer.length_model import LengthFidelity, bounds_of
from common.staleness import PolicyVersion, effective_version
from launch.text import TextOf, printable

if TYPE_CHECKING:
    from buffer.offline.inspect import GroupView, Inspection, Sample

MAX_TEXT = 4000
"""Characters of a prompt or a completion on the page."""
NUM_GROUPS_READ = 240
"""Evenly spread over the buffer, for the distribution of lags."""
MAX_LAG_SHOWN = 64
NUM_NEWEST = 4096
"""Samples among which a typical one is looked for."""

KINDS = ("best reward", "worst reward", "longest", "typical", "most off-policy", "shortest")


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
    """Versions between its oldest token and its last use; None where it was not trained."""
    step: int | None
    prompt: str | None
    """None where the run has no tokenizer."""
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
    """Of them, before the time was over."""
    ledger: dict[str, int] = field(default_factory=dict)
    generated: list[float] = field(default_factory=list)
    """Share of each bucket of `buffer.length_model`, as of the last few thousand completions."""
    trained: list[float] = field(default_factory=list)
    fidelity: LengthFidelity = field(default_factory=LengthFidelity)
    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens of each lag, in the groups that were read for it."""
    num_lag_samples: int = 0
    trajectories: list[ShownSample] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_buffer(root: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> BufferData:
    """Look into the buffer of a run; where there are more groups than can be looked at in time, the rest is left out.

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
            fidelity=state.length_fidelity,
        )
        chooser = _Chooser()
        for group in inspection.groups():
            data.num_looked_at += 1
            chooser.look_at(group)
            if clock() > deadline:
                break
        every = max(1, len(chooser.trained_groups) // NUM_GROUPS_READ)
        for group_id in chooser.trained_groups[::every]:
            if clock() > deadline + limit_s / 2:
                break
            _count_lags(inspection, group_id, data)
        decode = TextOf(inspection.folder)
        for place, kind in chooser.chosen().items():
            data.trajectories += _shown(inspection, place, kind, decode)
        data.damaged = list(dict.fromkeys(inspection.damaged))
        return data


def length_label(bucket: int) -> str:
    """The lengths of a bucket, in tokens."""
    low, high = bounds_of(bucket)
    return str(low) if high <= low else f"{low}-{high}"


class _Chooser:
    """Finds the samples that are worth looking at, one group after the other; memory is a number a group."""

    def __init__(self) -> None:
        self.trained_groups: list[int] = []
        self._best: dict[str, list[tuple[tuple[float, ...], SampleKey]]] = {}
        """The first few of each kind, the least of them first."""
        self._newest: deque[tuple[SampleKey, float, int]] = deque(maxlen=NUM_NEWEST)
        """With reward and length."""

    def look_at(self, group: GroupView) -> None:
        row = group.row
        if row.trained_at and "trained" in row.sample_states:
            self.trained_groups.append(row.group_id)
        lag = _lag_of(group)
        for index, (reward, length) in enumerate(zip(row.rewards, row.completion_lengths, strict=True)):
            place = SampleKey(row.group_id, index)
            if not length or row.records[index] < 0:
                continue
            if reward is not None:
                self._offer("best reward", (reward, lag or 0, row.group_id), place)
                self._offer("worst reward", (-reward, lag or 0, row.group_id), place)
                self._newest.append((place, reward, length))
            self._offer("longest", (length, row.group_id), place)
            self._offer("shortest", (-length, row.group_id), place)
            if lag is not None and row.sample_states[index] == "trained":
                self._offer("most off-policy", (lag, length, row.group_id), place)

    def _offer(self, kind: str, value: tuple[float, ...], place: SampleKey) -> None:
        best = self._best.setdefault(kind, [])
        if len(best) < len(KINDS):
            heapq.heappush(best, (value, place))
        else:
            heapq.heappushpop(best, (value, place))

    def chosen(self) -> dict[SampleKey, str]:
        """Each with why; no two of them are the same."""
        places: dict[SampleKey, str] = {}
        for kind in KINDS:
            ordered = self._typical() if kind == "typical" else sorted(self._best.get(kind, []), reverse=True)
            first = next((place for _, place in ordered if place not in places), None)
            if first is not None:
                places[first] = kind
        return places

    def _typical(self) -> list[tuple[tuple[float, ...], SampleKey]]:
        """Those nearest to the median of reward and length, the later ones first."""
        if not self._newest:
            return []
        _, rewards, lengths = zip(*self._newest, strict=True)
        reward, length = median_low(rewards), median_low(lengths)
        spread = max(max(rewards) - min(rewards), 1e-9)
        distances = (
            ((abs(its_reward - reward) / spread + abs(its_length - length) / max(length, 1), -place.group_id), place)
            for place, its_reward, its_length in self._newest
        )
        return heapq.nsmallest(len(KINDS), distances)


def _lag_of(group: GroupView) -> int | None:
    """Versions between its oldest token and its last use; None where it was not used."""
    uses = group.row.trained_at
    return uses[-1].version - group.oldest_version if uses and group.oldest_version is not None else None


def _samples_of(inspection: Inspection, group_id: int) -> Iterator[tuple[GroupView, Sample, dict[str, Any]]]:
    """Its samples with their rows, as `buffer.schema` names them; none where it was evicted since, or is damaged."""
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


def _shown(inspection: Inspection, place: SampleKey, kind: str, decode: TextOf) -> Iterator[ShownSample]:
    """The sample, where it is still there."""
    for group, sample, row in _samples_of(inspection, place.group_id):
        if sample.sample_index != place.sample:
            continue
        state = group.row.sample_states[place.sample]
        is_trained = state == "trained" and bool(group.row.trained_at)
        yield ShownSample(
            kind=kind,
            group_id=place.group_id,
            sample_index=place.sample,
            record_id=sample.record_id,
            row=row,
            state=state,
            lag=_lag_of(group) if is_trained else None,
            step=group.row.trained_at[-1].step if is_trained else None,
            prompt=_text(decode.text(row["token_ids"][: row["prompt_length"]])),
            completion=_text(decode.text(row["token_ids"][row["prompt_length"] :])),
        )


def _text(text: str | None) -> str | None:
    """With its lines kept, and whatever else would not show written out."""
    if text is None:
        return None
    cut = text[:MAX_TEXT]
    shown = "\n".join(printable(line.replace("\t", "    ")) for line in cut.split("\n"))
    return shown + (f"\n... and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")
