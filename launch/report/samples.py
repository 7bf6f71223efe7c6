"""What the report shows of the buffer: distributions, and the samples worth looking at."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from buffer.errors import BufferError
from buffer.lengths import NUM_BUCKETS, bounds_of
from launch.text import TextOf, printable

if TYPE_CHECKING:
    from buffer.offline.inspect import GroupView, Inspection, Sample

MAX_TEXT = 4000
"""Characters of a prompt or a completion on the page."""
NUM_GROUPS_READ = 240
"""Evenly spread over the buffer, for the distribution of lags."""
MAX_LAG_SHOWN = 64

KINDS = ("best reward", "worst reward", "longest", "typical", "most off-policy", "shortest")


class SampleKey(NamedTuple):
    """A sample within the buffer."""

    group_id: int
    sample: int


@dataclass(frozen=True)
class ShownSample:
    """One sample, for people."""

    kind: str
    """Why it is shown."""
    group_id: int
    sample_index: int
    prompt_id: int
    record_id: int
    actor: str
    state: str
    reward: float | None
    parts: tuple[tuple[str, float | None], ...]
    versions: tuple[str, ...]
    """That sampled it, in order."""
    lag: int | None
    """Versions between its oldest token and its last use; None where it was not trained."""
    step: int | None
    """That used it last."""
    num_tokens: int
    """Of the completion."""
    finish_reason: str
    prompt: str | None
    """None where the run has no tokenizer."""
    completion: str | None
    mean_logprob: float | None


@dataclass
class BufferData:
    """What the buffer of a run holds."""

    num_groups: int = 0
    num_looked_at: int = 0
    """Of them, before the time was over."""
    ledger: dict[str, int] = field(default_factory=dict)
    generated: list[float] = field(default_factory=list)
    """Share of each bucket of `buffer.lengths`, as of the last few thousand completions."""
    trained: list[float] = field(default_factory=list)
    fidelity_ks: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    """Trained tokens of each lag, in the groups that were read for it."""
    num_lag_samples: int = 0
    """Trajectories behind `lags`."""
    trajectories: list[ShownSample] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def read_buffer(root: Path, limit_s: float, clock: Callable[[], float] = time.monotonic) -> BufferData:
    """Look into the buffer of a run.

    Args:
        root: the run's folder.
        limit_s: where more groups are there than can be looked at in this time, the rest is left out.
        clock: seconds, monotonic.

    Raises:
        BufferError: there is none, or it cannot be read.
        OSError: likewise.
    """
    from buffer.offline.inspect import Inspection, Selection

    deadline = clock() + limit_s
    with Inspection.open(root) as inspection:
        data = _totals(inspection)
        chooser = _Chooser()
        for group in inspection.groups(Selection()):
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
            shown = _trajectory(inspection, place, kind, decode)
            if shown is not None:
                data.trajectories.append(shown)
        data.damaged = list(dict.fromkeys(inspection.damaged))
        return data


def _totals(inspection: Inspection) -> BufferData:
    totals = inspection.totals()
    fidelity = [state.fidelity for state in inspection.states().values()]
    return BufferData(
        num_groups=totals.num_groups,
        ledger=totals.ledger,
        generated=_mean([each.generated.shares() for each in fidelity], [each.generated.total for each in fidelity]),
        trained=_mean([each.trained.shares() for each in fidelity], [each.trained.total for each in fidelity]),
        fidelity_ks=max((each.now.ks for each in fidelity), default=0.0),
    )


def _mean(shares: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Of several shards, each with its weight."""
    total = sum(weights)
    if total <= 0:
        return [0.0] * NUM_BUCKETS
    return [sum(w * s[i] for w, s in zip(weights, shares, strict=True)) / total for i in range(NUM_BUCKETS)]


def length_label(bucket: int) -> str:
    """The lengths of a bucket, in tokens."""
    low, high = bounds_of(bucket)
    return str(low) if high <= low else f"{low}-{high}"


class _Chooser:
    """Finds the samples that are worth looking at, one group after the other; memory is two numbers a group."""

    def __init__(self) -> None:
        self.trained_groups: list[int] = []
        self._best: dict[str, list[tuple[tuple[float, ...], SampleKey]]] = {}
        """The first few of each kind, the least of them first."""
        self._candidates: list[tuple[SampleKey, float, int]] = []
        self._num_seen = 0

    def look_at(self, group: GroupView) -> None:
        row = group.row
        uses = row.trained_at
        if uses and row.sample_states.count("trained"):
            self.trained_groups.append(row.group_id)
        lag = uses[-1].version - group.oldest_version if uses and group.oldest_version is not None else None
        for index, (reward, length) in enumerate(zip(row.rewards, row.completion_lengths, strict=True)):
            place = SampleKey(row.group_id, index)
            if not length or row.records[index] < 0:
                continue
            if reward is not None:
                self._offer("best reward", (reward, lag or 0, row.group_id), place)
                self._offer("worst reward", (-reward, lag or 0, row.group_id), place)
                self._remember(place, reward, length)
            self._offer("longest", (length, row.group_id), place)
            self._offer("shortest", (-length, row.group_id), place)
            if lag is not None and row.sample_states[index] == "trained":
                self._offer("most off-policy", (lag, length, row.group_id), place)

    def _offer(self, kind: str, value: tuple[float, ...], place: SampleKey) -> None:
        best = self._best.setdefault(kind, [])
        if len(best) < len(KINDS):
            heapq.heappush(best, (value, place))
        elif value > best[0][0]:
            heapq.heapreplace(best, (value, place))

    def _remember(self, place: SampleKey, reward: float, length: int) -> None:
        """A few thousand samples, later ones replacing earlier ones evenly, for the typical one."""
        self._num_seen += 1
        if len(self._candidates) < 4096:
            self._candidates.append((place, reward, length))
        elif self._num_seen % 61 == 0:
            self._candidates[(self._num_seen // 61) % 4096] = place, reward, length

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
        if not self._candidates:
            return []
        rewards = sorted(reward for _, reward, _ in self._candidates)
        lengths = sorted(length for _, _, length in self._candidates)
        reward, length = rewards[len(rewards) // 2], lengths[len(lengths) // 2]
        spread = max(rewards[-1] - rewards[0], 1e-9)

        def distance(place: SampleKey, its_reward: float, its_length: int) -> tuple[tuple[float, ...], SampleKey]:
            away = abs(its_reward - reward) / spread + abs(its_length - length) / max(length, 1)
            return (away, -place.group_id), place

        return heapq.nsmallest(len(KINDS), (distance(*each) for each in self._candidates))


def _count_lags(inspection: Inspection, group_id: int, data: BufferData) -> None:
    from common.staleness import PolicyVersion, effective_version

    read = _read_group(inspection, group_id)
    if read is None:
        return
    group, rows = read
    uses = group.row.trained_at
    if not uses:
        return
    resumed = inspection.states()[group.shard].resumed_at
    starts = {number: version for number, version in resumed.items() if number <= uses[-1].incarnation}
    for sample, row in rows:
        if group.row.sample_states[sample.sample_index] != "trained":
            continue
        data.num_lag_samples += 1
        for span in row["spans"]:
            sampled = effective_version(PolicyVersion(span["incarnation"], span["version"]), starts)
            data.lags[min(MAX_LAG_SHOWN, max(0, uses[-1].version - sampled))] += span["end"] - span["start"]


def _read_group(inspection: Inspection, group_id: int) -> tuple[GroupView, list[tuple[Sample, dict[str, Any]]]] | None:
    from buffer.schema import join_rows

    try:
        group = inspection.group(group_id)
    except BufferError as error:
        inspection.damaged.append(str(error))
        return None
    if group is None or not group.samples:  # evicted since
        return None
    rows = join_rows([sample.record for sample in group.samples], [None] * len(group.samples)).to_pylist()
    return group, list(zip(group.samples, rows, strict=True))


def _trajectory(inspection: Inspection, place: SampleKey, kind: str, decode: TextOf) -> ShownSample | None:
    read = _read_group(inspection, place.group_id)
    if read is None:
        return None
    group, rows = read
    found = [(sample, row) for sample, row in rows if sample.sample_index == place.sample]
    if not found:
        return None
    (sample, row), state = found[0], group.row.sample_states[place.sample]
    uses = group.row.trained_at if state == "trained" else []
    tokens, num_prompt = row["token_ids"], row["prompt_length"]
    versions = dict.fromkeys(f"{span['incarnation']}.{span['version']}" for span in row["spans"])
    logprobs = row["logprobs"]
    return ShownSample(
        kind=kind,
        group_id=place.group_id,
        sample_index=place.sample,
        prompt_id=row["prompt_id"],
        record_id=sample.record_id,
        actor=printable(row["actor"], 80),
        state=state,
        reward=row["reward"],
        parts=tuple((printable(part["name"], 80), part["value"]) for part in row["reward_parts"]),
        versions=tuple(versions),
        lag=uses[-1].version - group.oldest_version if uses and group.oldest_version is not None else None,
        step=uses[-1].step if uses else None,
        num_tokens=len(logprobs),
        finish_reason=printable(row["finish_reason"], 80),
        prompt=_text(decode.text(tokens[:num_prompt])),
        completion=_text(decode.text(tokens[num_prompt:])),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
    )


def _text(text: str | None) -> str | None:
    """With its lines kept, and whatever else would not show written out."""
    if text is None:
        return None
    cut = text[:MAX_TEXT]
    shown = "\n".join(printable(line.replace("\t", "    ")) for line in cut.split("\n"))
    return shown + (f"\n... and {len(text) - MAX_TEXT} more characters" if len(text) > MAX_TEXT else "")
