"""Dispatch: which of the prompts that wait goes to the engine that asks. Used by leases, and by their simulation.

Prompts wait in a window, a stretch of the data's order, and a new one begins where the old one is empty: whatever the
policy, every prompt leaves it, so it decides who generates what, and not what is trained. No engine that asks is sent
away. Prompts whose group was dropped go before the window, to a lane that will not be late with them again. Lanes are
the pools of actors; what tells them apart is the time of a token.

    in_order       the first that waits
    longest_first  the longest
    by_deadline    a prompt is late for a lane that would not make its longest sample within what the lag budget leaves:
                   lanes that would take such prompts first, the longest first, and all lanes take all others in order.
                   What was not known to be late, and comes near it, goes on on a faster lane
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Literal, NamedTuple

from common.staleness import StalenessContract

PolicyName = Literal["in_order", "longest_first", "by_deadline"]

WINDOW_STEPS = 4
"""A window has the prompts of so many steps: with more of them the fast lanes find more that is late, and the steps of
a window are less alike."""
MOST_LOOKED_AT = 32
"""Prompts that came back, for each lease."""
HAND_ON_SHARE = 0.7
"""Of the tokens that a lane makes in time: a sample that has so many goes on on a faster one."""
_ALIKE = 1.1
"""Lanes whose tokens take so little longer are of one speed."""
_NEWEST = 0.1
"""Weight of the newest in running means."""


def likely_tokens(there: float) -> float:
    """How long a sample becomes of which so many tokens are there: what ran long is likely to run as long again."""
    return 2.0 * there


class Pace:
    """How long a step takes; forgets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing is known."""
        self._clock = clock
        self._drawn_s = self._finished_s = -inf
        self.step_s = self.train_s = 0.0
        """From a step's end to the next one's; and of it from its draw. 0: not known yet."""

    def undo(self) -> Callable[[], None]:
        """What makes it know again what it knows now."""
        return partial(self.__dict__.update, dict(self.__dict__))

    def drawn(self) -> None:
        """A step begins."""
        self._drawn_s = self._clock()

    def finished(self) -> None:
        """It is over."""
        now_s = self._clock()
        if self._finished_s > -inf:
            step_s, train_s = now_s - self._finished_s, now_s - max(self._drawn_s, self._finished_s)
            weight = _NEWEST if self.step_s else 1.0
            self.step_s += weight * (step_s - self.step_s)
            self.train_s += weight * (train_s - self.train_s)
        self._finished_s = now_s

    def budget_s(self, contract: StalenessContract) -> float:
        """From a lease to the draw of the step that is to use its group; infinite where that is not known."""
        if contract.bound() is None or not self.step_s:
            return inf
        return contract.capacity() // contract.groups_per_step * self.step_s - self.train_s


class Waiting(NamedTuple):
    """A prompt of the window."""

    order: int
    """Its place in the data's order, all epochs counted."""
    prompt_id: int
    longest: float
    """Predicted tokens of the longest of its samples."""


class Window:
    """The prompts that wait, in the data's order and by their length."""

    def __init__(self) -> None:
        """Empty."""
        self._in_order: dict[int, Waiting] = {}
        self._by_length: list[tuple[float, int]] = []
        """With the places in the data's order negative: of several that are as long, the next comes last."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._in_order)

    def __iter__(self) -> Iterator[Waiting]:
        """In the data's order."""
        return iter(self._in_order.values())

    def put(self, waiting: Waiting) -> None:
        """One more waits; or waits again, where its lease was not committed."""
        is_back = bool(self._in_order) and waiting.order < next(reversed(self._in_order))
        self._in_order[waiting.order] = waiting
        if is_back:
            self._in_order = dict(sorted(self._in_order.items()))
        insort(self._by_length, (waiting.longest, -waiting.order))

    def take(self, waiting: Waiting) -> None:
        """It waits no longer."""
        del self._in_order[waiting.order]
        del self._by_length[bisect_left(self._by_length, (waiting.longest, -waiting.order))]

    def first(self, at_most: float = inf) -> Waiting | None:
        """The next of the data's order that is no longer than this."""
        return next((each for each in self._in_order.values() if each.longest <= at_most), None)

    def longest(self, at_most: float = inf) -> Waiting | None:
        """The longest that is no longer than this."""
        place = bisect_right(self._by_length, (at_most, 1))
        return self._in_order[-self._by_length[place - 1][1]] if place else None

    def shortest(self) -> Waiting:
        """Of all; the window is not empty."""
        shortest = self.longest(self._by_length[0][0])
        assert shortest is not None, "it is as long as itself"
        return shortest


class Speeds(NamedTuple):
    """How fast the actor is that asks, and how fast the others are."""

    token_s: float
    """Seconds for a token of each of its samples; 0: not known."""
    lanes: Sequence[float]
    """The same of all lanes of which it is known."""
    budget_s: float
    """From a lease to the step that must have its group; infinite where there is no bound."""


class InOrder:
    """Gives the first; what it says holds of every policy that does not say otherwise."""

    def needs_lengths(self, num_lanes: int) -> bool:
        """Does it depend on them where there are so many lanes?"""
        return False

    def is_in_order(self, speeds: Speeds) -> bool:
        """Would it take the first of any window? Then none is opened."""
        return True

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """May a prompt that came back, with answers of so many tokens, go to this actor? The fastest takes any."""
        return True

    def choose(self, window: Window, speeds: Speeds) -> Waiting:
        """What the actor gets of a window, which is not empty."""
        return next(iter(window))

    def hands_on_at(self, speeds: Speeds) -> float:
        """A sample that has so many tokens goes on elsewhere; infinite where none does."""
        return inf


class LongestFirst(InOrder):
    """Gives the longest."""

    def needs_lengths(self, num_lanes: int) -> bool:
        """It always does."""
        return True

    def is_in_order(self, speeds: Speeds) -> bool:
        """It never is."""
        return False

    def choose(self, window: Window, speeds: Speeds) -> Waiting:
        """The longest."""
        return window.longest() or window.shortest()


class ByDeadline(InOrder):
    """Gives what a slower lane would be late with to a lane that would not."""

    def needs_lengths(self, num_lanes: int) -> bool:
        """With one lane it does not."""
        return num_lanes > 1

    def is_in_order(self, speeds: Speeds) -> bool:
        """Where there is one speed, or no deadline."""
        return speeds.token_s <= 0.0 or speeds.budget_s == inf or max(speeds.lanes) <= _ALIKE * min(speeds.lanes)

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """One that came back because it was late must not be late again."""
        return self.is_in_order(speeds) or longest <= self._in_time(speeds)

    def choose(self, window: Window, speeds: Speeds) -> Waiting:
        """The longest that slower lanes would be late with, else the first that this one makes in time.

        A lane that would be late with all takes the shortest, for no engine idles. All but what is late goes in order,
        so that the steps of a window are as mixed as the data: were each lane to take the longest that it makes in
        time, the first steps would have the long answers and the last the short ones.
        """
        if self.is_in_order(speeds):
            return next(iter(window))
        in_time = self._in_time(speeds)
        slower = [each for each in speeds.lanes if each > _ALIKE * speeds.token_s]
        longest = window.longest(in_time)
        if longest is not None and slower and longest.longest > speeds.budget_s / min(slower):
            return longest
        return window.first(in_time) or window.shortest()

    def hands_on_at(self, speeds: Speeds) -> float:
        """What has run so long without an end is likely to run as long again, and would be late here."""
        return inf if self.is_in_order(speeds) else HAND_ON_SHARE * self._in_time(speeds)

    def _in_time(self, speeds: Speeds) -> float:
        """Tokens that this lane makes in time; the fastest takes what no lane does."""
        return inf if speeds.token_s <= _ALIKE * min(speeds.lanes) else speeds.budget_s / speeds.token_s


def window_size(groups_per_step: int) -> int:
    """Prompts of a window."""
    return WINDOW_STEPS * groups_per_step


POLICIES: Mapping[PolicyName, type[InOrder]] = {
    "in_order": InOrder,
    "longest_first": LongestFirst,
    "by_deadline": ByDeadline,
}
