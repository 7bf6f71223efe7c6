"""Dispatch policies: assign prompts to actors by predicted completion length and actor speed.

A lane is a pool of actors; lanes differ in their time per token. Prompts of dropped groups are leased ahead of the
window, to a lane that is predicted to meet the deadline. Every lease request gets a prompt.

    in_order       the first prompt of the window; lengths are predicted only for actors that request predictions
    longest_first  the prompt with the longest predicted completion
    by_deadline    a prompt misses the deadline of a lane if the lane cannot generate its longest sample within the lag
                   budget. A faster lane takes prompts that slower lanes would miss, longest first; all other prompts
                   are leased in order. A sample that grows unexpectedly long is requeued for a faster lane

Policies are plain objects, shared by `leeway.planning.prompts` in the buffer service and by the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from leeway.buffer.config import PolicyName
from leeway.buffer.tables import Waiting

REQUEUE_SHARE = 0.7
"""Fraction of the tokens that a lane generates by the deadline; longer samples are requeued for a faster lane."""
_ALIKE = 1.1
"""Ratio of the times per token up to which two lanes count as equally fast."""


class Speeds(NamedTuple):
    """Speeds of the requesting lane and of all lanes, and the deadline."""

    token_s: float
    """Seconds per token of each sample on the requesting lane; 0 if unknown."""
    lanes: Sequence[float]
    """Seconds per token of every lane with a known speed."""
    budget_s: float
    """Seconds from a lease to the step that must use its group; infinite without a staleness bound."""


class InOrder:
    """First prompt of the window (FIFO); base class with the defaults of the other policies."""

    def needs_lengths(self, num_lanes: int) -> bool:
        """Return whether the choice depends on lengths with `num_lanes` lanes."""
        return False

    def is_in_order(self, speeds: Speeds) -> bool:
        """Return whether the policy takes the first prompt of any window, so no window is needed."""
        return True

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """Return whether this lane may take a returned prompt whose longest sample has `longest` tokens."""
        return True

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        """Return the prompt of a non-empty window to lease."""
        return next(iter(window))

    def requeue_at(self, speeds: Speeds) -> float:
        """Return the number of tokens at which a sample is requeued for another actor; infinite if it never is."""
        return inf


class LongestFirst(InOrder):
    """Policy that leases the prompt with the longest predicted completion first."""

    def needs_lengths(self, num_lanes: int) -> bool:
        return True

    def is_in_order(self, speeds: Speeds) -> bool:
        return False

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        return max(window, key=_longest)


class ByDeadline(InOrder):
    """Policy that assigns prompts to a faster lane if they would miss the deadline on slow lanes."""

    def needs_lengths(self, num_lanes: int) -> bool:
        return num_lanes > 1

    def is_in_order(self, speeds: Speeds) -> bool:
        """Return whether all lanes are equally fast, or there is no deadline."""
        return speeds.token_s <= 0.0 or speeds.budget_s == inf or max(speeds.lanes) <= _ALIKE * min(speeds.lanes)

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """Return whether this lane meets the deadline; otherwise a returned prompt would be dropped as stale again."""
        return self.is_in_order(speeds) or longest <= self._deadline_tokens(speeds)

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        """Return the longest prompt that slower lanes would miss, else the first prompt this lane finishes in time.

        A lane that would miss all deadlines takes the shortest prompt, so that no engine idles. All other prompts are
        leased in order, so that the steps of a window are as mixed as the data. If each lane took the longest prompt
        that it finishes in time, the first steps would get the long completions and the last steps the short ones.
        """
        if self.is_in_order(speeds):
            return next(iter(window))
        most = self._deadline_tokens(speeds)
        on_time = [each for each in window if each.longest <= most]
        if not on_time:
            return min(window, key=_longest)
        longest = max(on_time, key=_longest)
        slower = [each for each in speeds.lanes if each > _ALIKE * speeds.token_s]
        misses_deadline = bool(slower) and longest.longest > speeds.budget_s / min(slower)
        return longest if misses_deadline else on_time[0]

    def requeue_at(self, speeds: Speeds) -> float:
        """Return the number of tokens at which a sample, expected to become twice as long, would miss the deadline."""
        return inf if self.is_in_order(speeds) else REQUEUE_SHARE * self._deadline_tokens(speeds)

    def _deadline_tokens(self, speeds: Speeds) -> float:
        """Return the tokens that this lane generates by the deadline; infinite for the fastest lane."""
        return inf if speeds.token_s <= _ALIKE * min(speeds.lanes) else speeds.budget_s / speeds.token_s


def _longest(waiting: Waiting) -> float:
    return waiting.longest


POLICIES: Mapping[PolicyName, type[InOrder]] = {
    "in_order": InOrder,
    "longest_first": LongestFirst,
    "by_deadline": ByDeadline,
}
