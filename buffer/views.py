"""What an inspection of a store shows: groups, their samples, quarantine, totals; and which groups are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from buffer.catalogue import Index
from buffer.tables import Group


@dataclass(frozen=True)
class Selection:
    """Which groups are wanted; None sets no limit. All limits are inclusive."""

    prompt_id: int | None = None
    since_version: int | None = None
    """Effective version of the group's oldest token."""
    until_version: int | None = None
    min_reward: float | None = None
    """Mean over the group's samples that have a reward."""
    max_length: int | None = None
    """Tokens of the group's longest sample, prompt included."""
    phase: str | None = None

    def accepts(self, group: GroupView) -> bool:
        """Is the group wanted?"""
        return (
            (self.prompt_id is None or group.row.prompt_id == self.prompt_id)
            and (self.phase is None or group.row.phase == self.phase)
            and _within(group.oldest_version, self.since_version, self.until_version)
            and _within(group.row.mean_reward, self.min_reward, None)
            and _within(max(group.lengths, default=None), None, self.max_length)
        )

    def bounds(self, by: Index) -> tuple[float | None, float | None]:
        """What the selection says of an index: least and greatest value."""
        match by:
            case "prompt":
                return self.prompt_id, self.prompt_id
            case "version":
                return self.since_version, self.until_version
            case "reward":
                return self.min_reward, None
            case "length":
                return None, self.max_length  # no mean is above the greatest


class Sample(NamedTuple):
    """One stored sample of a group."""

    sample_index: int
    record_id: int
    record: bytes
    """As it is on disk; `buffer.schema.join_rows` reads it."""
    scores: bytes | None
    """float32 reference log-probabilities, where the learner wrote them back."""


@dataclass(frozen=True)
class GroupView:
    """A group as it was when it was read."""

    shard: int
    row: Group
    oldest_version: int | None
    """Effective version of its oldest committed token; None where nothing is committed."""
    samples: Sequence[Sample] = ()
    """Those stored and asked for."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of the committed samples."""
        return [length for length in self.row.lengths if length]

    def value(self, by: Index) -> float | None:
        """What the catalogue sorts the group by."""
        match by:
            case "prompt":
                return self.row.prompt_id
            case "version":
                return self.oldest_version
            case "reward":
                return self.row.mean_reward
            case "length":
                return self.row.mean_length


class Quarantined(NamedTuple):
    """What failed validation and was set aside."""

    shard: int
    number: int
    reason: str
    data: bytes
    """Its first bytes: of one row as a record, or of a message that no row could be read from."""


class Totals(NamedTuple):
    """Figures of the whole folder, all shards together."""

    version: int
    """Optimizer steps that the learner has taken."""
    num_groups: int
    num_records: int
    size_bytes: int
    ledger: dict[str, int]
    quarantined_by_reason: dict[str, int]


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if value is None:
        return low is None and high is None
    return (low is None or value >= low) and (high is None or value <= high)
