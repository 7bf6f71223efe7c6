"""Who generated while the learner stepped: arithmetic on time intervals."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]
"""Start and end, wall-clock seconds."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The time that is in both, as disjoint intervals in order."""
    a, b = merge(left), merge(right)
    common: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def total(intervals: Iterable[Interval]) -> float:
    """Seconds that the union covers."""
    return sum(end - start for start, end in merge(intervals))


class OverlapMeter:
    """Collects when each actor generated and when the learner stepped."""

    def __init__(self) -> None:
        self._steps: list[Interval] = []
        self._busy: dict[str, list[Interval]] = {}

    def add_step(self, start_s: float, end_s: float) -> None:
        """The learner stepped from `start_s` to `end_s`, waiting for a batch not included."""
        self._steps.append((start_s, end_s))

    def add_busy(self, actor: str, intervals: Iterable[Interval]) -> None:
        """The actor had at least one training request running in these intervals."""
        self._busy[actor] = merge([*self._busy.get(actor, []), *intervals])

    def fraction(self) -> float | None:
        """Share of step time in which at least one actor generated; None before the first step."""
        return self._share([interval for busy in self._busy.values() for interval in busy])

    def fraction_by_actor(self) -> dict[str, float | None]:
        """Share of step time in which each actor generated."""
        return {actor: self._share(busy) for actor, busy in sorted(self._busy.items())}

    def _share(self, busy: Iterable[Interval]) -> float | None:
        step_time = total(self._steps)
        return total(intersect(self._steps, busy)) / step_time if step_time > 0 else None
