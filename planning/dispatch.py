"""Dispatch policies: who gets which prompt, by how long its answers will be and how fast the actor is.

Prompts whose group was dropped go before the window, to a lane that will not be late with them again. Lanes are the
pools of actors; what tells them apart is the time of a token. No engine that asks is sent away.

    in_order       the first that waits; lengths are predicted, for the actors that ask for them
    longest_first  the longest
    by_deadline    a prompt is late for a lane that would not make its longest sample within what the lag budget leaves:
                   lanes that would take such prompts first, the longest first, and all lanes take all others in order.
                   What was not known to be late, and comes near it, goes on on a faster lane

They are plain objects, used by `planning.prompts` in the service and by the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from buffer.config import PolicyName
from buffer.tables import Waiting

HAND_ON_SHARE = 0.7
"""Share of the tokens that a lane makes in time; a sample with more is requeued for a faster lane."""
_ALIKE = 1.1
"""Lanes whose tokens take so little longer are of one speed."""


class Speeds(NamedTuple):
    """Speeds of the actor that asks and of the others."""

    token_s: float
    """Seconds for a token of each of its samples; 0: not known."""
    lanes: Sequence[float]
    """The same of all lanes of which it is known."""
    budget_s: float
    """From a lease to the step that must have its group; infinite where there is no bound."""


class InOrder:
    """Gives the first; its methods are the defaults of the other policies."""

    def needs_lengths(self, num_lanes: int) -> bool:
        """Return whether the choice depends on lengths with `num_lanes` lanes."""
        return False

    def is_in_order(self, speeds: Speeds) -> bool:
        """Return whether it takes the first of any window, so that none is opened."""
        return True

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """Return whether a returned prompt with answers of `longest` tokens may go here; the fastest takes any."""
        return True

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        """Return the prompt of a non-empty window that the actor gets."""
        return next(iter(window))

    def hands_on_at(self, speeds: Speeds) -> float:
        """Return the tokens at which a sample is requeued for another actor; infinite: never."""
        return inf


class LongestFirst(InOrder):
    """Gives the prompt with the longest expected answers."""

    def needs_lengths(self, num_lanes: int) -> bool:
        return True

    def is_in_order(self, speeds: Speeds) -> bool:
        return False

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        return max(window, key=_longest)


class ByDeadline(InOrder):
    """Gives what a slower lane would be late with to a lane that would not."""

    def needs_lengths(self, num_lanes: int) -> bool:
        return num_lanes > 1

    def is_in_order(self, speeds: Speeds) -> bool:
        """Return whether there is one speed, or no deadline."""
        return speeds.token_s <= 0.0 or speeds.budget_s == inf or max(speeds.lanes) <= _ALIKE * min(speeds.lanes)

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """Return whether this lane makes it in time: a prompt that returned late must not be late again."""
        return self.is_in_order(speeds) or longest <= self._in_time(speeds)

    def choose(self, window: Iterable[Waiting], speeds: Speeds) -> Waiting:
        """Return the longest that slower lanes would be late with, else the first that this one makes in time.

        A lane that would be late with all takes the shortest, for no engine idles. All but what is late goes in order,
        so that the steps of a window are as mixed as the data: were each lane to take the longest that it makes in
        time, the first steps would have the long answers and the last the short ones.
        """
        if self.is_in_order(speeds):
            return next(iter(window))
        in_time = self._in_time(speeds)
        made_in_time = [each for each in window if each.longest <= in_time]
        if not made_in_time:
            return min(window, key=_longest)
        longest = max(made_in_time, key=_longest)
        slower = [each for each in speeds.lanes if each > _ALIKE * speeds.token_s]
        is_late = bool(slower) and longest.longest > speeds.budget_s / min(slower)
        return longest if is_late else made_in_time[0]

    def hands_on_at(self, speeds: Speeds) -> float:
        """Return the length from which a sample, which is likely to take as long again, would be late here."""
        return inf if self.is_in_order(speeds) else HAND_ON_SHARE * self._in_time(speeds)

    def _in_time(self, speeds: Speeds) -> float:
        """Return the tokens that this lane makes in time; infinite for the fastest, which takes what none makes."""
        return inf if speeds.token_s <= _ALIKE * min(speeds.lanes) else speeds.budget_s / speeds.token_s


def _longest(waiting: Waiting) -> float:
    return waiting.longest


POLICIES: Mapping[PolicyName, type[InOrder]] = {
    "in_order": InOrder,
    "longest_first": LongestFirst,
    "by_deadline": ByDeadline,
}
