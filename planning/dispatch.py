"""Dispatch by length: who gets which prompt, by how long its answers will be and how fast the actor is.

Prompts whose group was dropped go before the window, to a lane that will not be late with them again. Lanes are the
pools of actors; what tells them apart is the time of a token. No engine that asks is sent away.

    in_order       the first that waits; lengths are predicted, for the actors that ask for them
    longest_first  the longest
    by_deadline    a prompt is late for a lane that would not make its longest sample within what the lag budget leaves:
                   lanes that would take such prompts first, the longest first, and all lanes take all others in order.
                   What was not known to be late, and comes near it, goes on on a faster lane

The policies are plain objects, used by leases and by their simulation; a dispatcher has one in the buffer's service.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from buffer.config import BufferConfig
from buffer.dispatch import Floats, Ids, Pace, PolicyName, Waiting, Window
from buffer.errors import BufferRefused
from buffer.prompts import Dispatcher
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import Group
from buffer.transaction import Transaction
from common.run import RunFacts
from common.staleness import StalenessContract
from planning.length_model import LengthModel

HAND_ON_SHARE = 0.7
"""Share of the tokens that a lane makes in time; a sample with more is requeued for a faster lane."""
_ALIKE = 1.1
"""Lanes whose tokens take so little longer are of one speed."""
_FURTHEST = 20.0
"""Largest accepted distance of a prediction from the level, in logarithms."""
MOST_LANES = 64
FORGOTTEN_S = 60.0
"""Seconds without a request or renewal after which a lane is gone; at least as long as a lease lasts."""


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
        """Return whether the choice depends on lengths with `num_lanes` lanes."""
        return False

    def is_in_order(self, speeds: Speeds) -> bool:
        """Would it take the first of any window? Then none is opened."""
        return True

    def takes(self, longest: float, speeds: Speeds) -> bool:
        """Return whether a returned prompt with answers of `longest` tokens may go here; the fastest takes any."""
        return True

    def choose(self, window: Window, speeds: Speeds) -> Waiting:
        """What the actor gets of a window, which is not empty."""
        return next(iter(window))

    def hands_on_at(self, speeds: Speeds) -> float:
        """Return the tokens at which a sample is requeued for another actor; infinite: never."""
        return inf


class LongestFirst(InOrder):
    """Gives the longest."""

    def needs_lengths(self, num_lanes: int) -> bool:
        return True

    def is_in_order(self, speeds: Speeds) -> bool:
        return False

    def choose(self, window: Window, speeds: Speeds) -> Waiting:
        return max(window, key=_longest)


class ByDeadline(InOrder):
    """Gives what a slower lane would be late with to a lane that would not."""

    def needs_lengths(self, num_lanes: int) -> bool:
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
        made_in_time = [each for each in window if each.longest <= in_time]
        if not made_in_time:
            return min(window, key=_longest)
        longest = max(made_in_time, key=_longest)
        slower = [each for each in speeds.lanes if each > _ALIKE * speeds.token_s]
        is_late = bool(slower) and longest.longest > speeds.budget_s / min(slower)
        return longest if is_late else made_in_time[0]

    def hands_on_at(self, speeds: Speeds) -> float:
        """A sample that reaches this length is likely to take as long again, and would be late here."""
        return inf if self.is_in_order(speeds) else HAND_ON_SHARE * self._in_time(speeds)

    def _in_time(self, speeds: Speeds) -> float:
        """Tokens that this lane makes in time; the fastest takes what no lane does."""
        return inf if speeds.token_s <= _ALIKE * min(speeds.lanes) else speeds.budget_s / speeds.token_s


def _longest(waiting: Waiting) -> float:
    return waiting.longest


POLICIES: Mapping[PolicyName, type[InOrder]] = {
    "in_order": InOrder,
    "longest_first": LongestFirst,
    "by_deadline": ByDeadline,
}


class LengthDispatcher(Dispatcher):
    """Dispatches by a policy, and learns how long answers are and how fast the lanes of a run."""

    policy_type: ClassVar[type[InOrder]] = InOrder
    predicts = True

    def __init__(
        self,
        facts: RunFacts,
        contract: StalenessContract,
        config: BufferConfig,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is known; `load` reads what is stored."""
        self._facts, self._contract, self._clock = facts, contract, clock
        self._pace, self._policy = pace, self.policy_type()
        self.lengths = LengthModel(facts.num_prompts)
        self._lanes: dict[str, tuple[float, float]] = {}
        """Lane -> seconds for a token, 0 where it is not known yet, and when it was heard of."""
        self._lane_of: dict[str, str] = {}
        """Actor -> its lane."""
        self._forgotten_s = max(FORGOTTEN_S, config.lease_timeout_s)
        self._is_asked = False
        """An actor wants to know lengths."""

    def load(self, tx: Transaction) -> None:
        """Read what is stored of each prompt."""
        for (prompt,), visit in tx.lengths.all_items():
            self.lengths.put(prompt, visit)

    def opens_window(self, request: LeaseRequest) -> bool:
        return not self._policy.is_in_order(self._speeds(request))

    def choose(self, window: Window, request: LeaseRequest) -> Waiting:
        return self._policy.choose(window, self._speeds(request))

    def takes(self, longest: float, request: LeaseRequest) -> bool:
        return self._policy.takes(longest, self._speeds(request))

    def hand_on_at(self, request: LeaseRequest) -> int:
        at = self._policy.hands_on_at(self._speeds(request))
        return max(1, round(at)) if at < self._facts.max_tokens else 0

    def longest_of(self, tx: Transaction, prompts: Ids) -> Floats:
        self.lengths.shape = tx.state.lengths
        if not self.lengths.shape.num_groups:
            return np.zeros(len(prompts))
        sizes = np.full(len(prompts), self._facts.group_size)
        longest = self.lengths.longest_of(prompts, sizes, tx.state.version)
        return np.minimum(self._facts.max_tokens, longest)

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """As `Dispatcher`; lengths are learned from now on."""
        self._is_asked = True
        self.lengths.shape = tx.state.lengths
        return min(float(self._facts.max_tokens), self.lengths.usual(prompt_id, tx.state.version))

    def renewed(self, actor: str) -> None:
        if (lane := self._lane_of.get(actor)) in self._lanes:
            self._lanes[lane] = self._lanes[lane][0], self._clock()

    def saw(self, tx: Transaction, group: Group) -> None:
        """What a group tells is learned where it is of use."""
        there, lanes = [index for index, length in enumerate(group.completion_lengths) if length], self._living()
        if not there or not (self._is_asked or self._policy.needs_lengths(len(lanes))):
            return
        prompt, before = group.prompt_id, self.lengths.get(group.prompt_id)
        self.lengths.shape = tx.state.lengths
        lengths, cut = [group.completion_lengths[index] for index in there], [index in group.cut for index in there]
        is_late = group.foretold * max(lanes, default=0.0) > self._pace.budget_s(self._contract)
        visit = self.lengths.see(prompt, lengths, cut, tx.state.version, is_late=is_late)
        tx.undo.append(partial(self.lengths.put, prompt, before))
        tx.lengths.put(visit, prompt)

    def visits(self) -> tuple[VisitsReply, pa.RecordBatch]:
        batch = pa.RecordBatch.from_arrays([pa.array(each) for each in self.lengths.recent()], schema=VISITS)
        return VisitsReply(self.lengths.num_seen, self.lengths.is_expecting), batch

    def expect(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Accept predictions of new prompts. They are not stored: the ranker sends them again.

        Raises:
            BufferRefused: it is of prompts that there are not, or no number.
        """
        means = batch.column(0).to_numpy()
        if message.first + len(means) > self._facts.num_prompts or not np.isfinite(means).all():
            last = message.first + len(means) - 1
            raise BufferRefused(
                f"what is expected of prompts {message.first} to {last} is no number for one of them, or they are not "
                f"all prompts of this run, whose ids are 0 to {self._facts.num_prompts - 1}"
            )
        self.lengths.expect(message.first, np.clip(means, -_FURTHEST, _FURTHEST), message.variance)

    def _speeds(self, request: LeaseRequest) -> Speeds:
        self._lanes[request.lane] = request.token_s, self._clock()
        self._lane_of[request.actor] = request.lane
        if len(self._lanes) > MOST_LANES:  # which no config has
            del self._lanes[min(self._lanes, key=lambda lane: self._lanes[lane][1])]
        return Speeds(request.token_s, [each for each in self._living() if each], self._pace.budget_s(self._contract))

    def _living(self) -> list[float]:
        """Seconds for a token of each lane that is not gone."""
        since_s = self._clock() - self._forgotten_s
        return [token_s for token_s, heard_s in self._lanes.values() if heard_s > since_s]


class LongestFirstDispatcher(LengthDispatcher):
    """`buffer.dispatch = "longest_first"`."""

    policy_type = LongestFirst


class DeadlineDispatcher(LengthDispatcher):
    """`buffer.dispatch = "by_deadline"`."""

    policy_type = ByDeadline
