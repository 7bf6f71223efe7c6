"""Prompts: which prompt is leased next, to whom, and how long its answers are likely to be.

Prompts that came back go first, then those of the window: the next few of the law, which the policy
takes apart as it likes, but empties before the next begins (both are of `buffer.dispatch`). Window and what was learned
of lengths and of success are rows, and are kept in memory too; who asks how fast, and how long steps take, is known of
the running service alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.config import BufferConfig
from buffer.dispatch import (
    MOST_LOOKED_AT,
    POLICIES,
    ByChance,
    EpochOrder,
    Pace,
    PromptLaw,
    Speeds,
    SuccessModel,
    Waiting,
    Window,
    likely_tokens,
    window_size,
)
from buffer.errors import BufferRefused, CorruptRecord
from buffer.length_model import LengthModel
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import Group, ReturnedPrompt
from buffer.transaction import Table, Transaction
from common.run import RunFacts
from common.staleness import StalenessContract

log = logging.getLogger(__name__)

_FURTHEST = 20.0
"""From the level, in logarithms; nobody believes more."""
LEAST_TAU = 256.0
"""Policy versions after which a sample of a prompt counts 1/e of a new one, or those of an epoch where it has more."""
MOST_LANES = 64
FORGOTTEN_S = 60.0
"""A lane of which nobody has asked or renewed for so long, or as long as a lease lasts, is gone."""


class NextPrompt(NamedTuple):
    """Of which a group is leased."""

    prompt_id: int
    failures: int = 0
    """How often groups of it were filtered, in a row."""
    longest: float = 0.0
    """Tokens of the longest of its samples, as foretold; 0: not foretold."""


class Prompts:
    """Chooses the prompt of the next group."""

    def __init__(
        self,
        facts: RunFacts,
        contract: StalenessContract,
        config: BufferConfig,
        clock: Callable[[], float],
    ) -> None:
        self._facts, self._contract, self._clock = facts, contract, clock
        self._policy = POLICIES[config.dispatch]()
        by_success = config.prompt_law == "posterior"
        # what is known of a prompt has not faded when it comes again
        tau = max(LEAST_TAU, facts.num_prompts / facts.groups_per_step * facts.updates_per_step)
        self.successes = SuccessModel(facts.num_prompts, tau) if by_success else None
        self._law: PromptLaw = EpochOrder(facts.num_prompts, facts.seed)
        if config.prompt_law != "epoch":
            self._law = ByChance(facts.num_prompts, facts.seed, self.successes)
        self.lengths = LengthModel(facts.num_prompts)
        self.pace = Pace(clock)
        self._window = Window()
        self._lanes: dict[str, tuple[float, float]] = {}
        """Lane -> seconds for a token, 0 where it is not known yet, and when it was heard of."""
        self._lane_of: dict[str, str] = {}
        """Actor -> its lane."""
        self._forgotten_s = max(FORGOTTEN_S, config.lease_timeout_s)
        self._is_loaded = False
        self._is_asked = False
        """An actor wants to know lengths."""

    def load(self, tx: Transaction) -> None:
        """Read what is stored, where that was not done. What was learned of a prompt is forgotten where it is damaged.

        Raises:
            CorruptRecord: a prompt of the window is damaged.
        """
        if not self._is_loaded:
            _forget_damaged(tx.lengths)
            _forget_damaged(tx.tries)
            for _, waiting in tx.window.all_items():
                self._window.put(waiting)
            for (prompt,), visit in tx.lengths.all_items():
                self.lengths.put(prompt, visit)
            if self.successes is not None:
                for (prompt,), tries in tx.tries.all_items():
                    self.successes.put(prompt, tries)
            self._is_loaded = True

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        """The prompt that the next group of this actor is of."""
        speeds = self._speeds(request)
        if (returned := self._returned(tx, speeds)) is not None:
            return returned
        if not self._window:
            if self._law.in_order and self._policy.is_in_order(speeds):
                return NextPrompt(int(self._ahead(tx, 1)[0]))
            self._open_window(tx)
        waiting = self._policy.choose(self._window, speeds)
        self._window.take(waiting)
        tx.undo.append(partial(self._window.put, waiting))
        tx.window.delete(waiting.order)
        return NextPrompt(waiting.prompt_id, longest=waiting.longest)

    def may_go_on(self, group: Group, request: LeaseRequest) -> bool:
        """May a group of which some tokens are there go to this actor?"""
        there = max((each.num_tokens for each in group.partials.values()), default=0)
        return not there or self._policy.takes(likely_tokens(there), self._speeds(request))

    def hand_on_at(self, request: LeaseRequest) -> int:
        """With how many tokens samples of this actor go on elsewhere; 0: with none."""
        at = self._policy.hands_on_at(self._speeds(request))
        return max(1, round(at)) if at < self._facts.max_tokens else 0

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """Geometric mean of the completion tokens of a prompt's samples, as foretold; 0 before any group was seen.

        Whoever asks has lengths learned from now on.
        """
        self._is_asked = True
        self.lengths.shape = tx.state.lengths
        return min(float(self._facts.max_tokens), self.lengths.usual(prompt_id, tx.state.version))

    def renewed(self, actor: str) -> None:
        """It goes on with what it has: its lane is not gone."""
        if (lane := self._lane_of.get(actor)) in self._lanes:
            self._lanes[lane] = self._lanes[lane][0], self._clock()

    def give_back(self, tx: Transaction, prompt_id: int, failures: int) -> None:
        """Its group was dropped or filtered: it is leased again before new ones."""
        tx.returned_prompts.put(ReturnedPrompt(prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def saw(self, tx: Transaction, group: Group) -> None:
        """The samples that a group has, of which no more come; what they tell is learned where it is of use."""
        self._saw_rewards(tx, group)
        there, lanes = [index for index, length in enumerate(group.completion_lengths) if length], self._living()
        if not there or not (self._is_asked or self._policy.needs_lengths(len(lanes))):
            return
        prompt, before = group.prompt_id, self.lengths.get(group.prompt_id)
        self.lengths.shape = tx.state.lengths
        lengths, cut = [group.completion_lengths[index] for index in there], [index in group.cut for index in there]
        is_late = group.foretold * max(lanes, default=0.0) > self.pace.budget_s(self._contract)
        visit = self.lengths.see(prompt, lengths, cut, tx.state.version, is_late=is_late)
        tx.undo.append(partial(self.lengths.put, prompt, before))
        tx.lengths.put(visit, prompt)

    def visits(self) -> tuple[VisitsReply, pa.RecordBatch]:
        """What is known of prompts, those of the last groups first where they are too many."""
        batch = pa.RecordBatch.from_arrays([pa.array(each) for each in self.lengths.recent()], schema=VISITS)
        return VisitsReply(self.lengths.num_seen, self.lengths.is_expecting), batch

    def expect(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Believe what is foretold of prompts that were not seen. It is not stored: whoever foretold it says it again.

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

    # --- parts ------------------------------------------------------------------------------------

    def _returned(self, tx: Transaction, speeds: Speeds) -> NextPrompt | None:
        """The first prompt that came back and that this actor may have."""
        first = list(islice(tx.returned_prompts.all_items(), 1 if self._policy.is_in_order(speeds) else MOST_LOOKED_AT))
        if not first:
            return None
        prompts = np.array([returned.prompt_id for _, returned in first])
        longest = self._longest_of(tx, prompts)
        for ((key,), returned), most in zip(first, longest.tolist(), strict=True):
            if self._policy.takes(most, speeds):
                tx.returned_prompts.delete(key)
                return NextPrompt(returned.prompt_id, returned.failures, most)
        return None

    def _open_window(self, tx: Transaction) -> None:
        first = tx.state.cursor
        prompts = self._ahead(tx, window_size(self._facts.groups_per_step))
        longest = self._longest_of(tx, prompts).tolist()
        for order, (prompt, most) in enumerate(zip(prompts.tolist(), longest, strict=True), first):
            waiting = Waiting(order, prompt, most)
            self._window.put(waiting)
            tx.undo.append(partial(self._window.take, waiting))
            tx.window.put(waiting, order)

    def _longest_of(self, tx: Transaction, prompts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Tokens of the longest sample of each, no more than a sample may have; 0 before any group was seen."""
        self.lengths.shape = tx.state.lengths
        if not self.lengths.shape.num_groups:
            return np.zeros(len(prompts))
        sizes = np.full(len(prompts), self._facts.group_size)
        longest = self.lengths.longest_of(prompts, sizes, tx.state.version)
        return np.minimum(self._facts.max_tokens, longest)

    def _ahead(self, tx: Transaction, many: int) -> npt.NDArray[np.int64]:
        """Up to so many of the prompts that the law has next, which are not ahead any more."""
        prompts = self._law.ahead(tx.state.cursor, many, tx.state.version)
        tx.state.cursor += len(prompts)
        return prompts

    def _saw_rewards(self, tx: Transaction, group: Group) -> None:
        """A sample whose reward says that it is correct is a success; one without a reward is no sample."""
        rewards = [reward for reward in group.rewards if reward is not None]
        if self.successes is None or not rewards:
            return
        prompt, before = group.prompt_id, self.successes.get(group.prompt_id)
        num_passed = sum(reward >= self._facts.correct_at for reward in rewards)
        tx.undo.append(partial(self.successes.put, prompt, before))
        tx.tries.put(self.successes.see(prompt, num_passed, len(rewards) - num_passed, tx.state.version), prompt)

    def _speeds(self, request: LeaseRequest) -> Speeds:
        self._lanes[request.lane] = request.token_s, self._clock()
        self._lane_of[request.actor] = request.lane
        if len(self._lanes) > MOST_LANES:  # which no config has
            del self._lanes[min(self._lanes, key=lambda lane: self._lanes[lane][1])]
        return Speeds(request.token_s, [each for each in self._living() if each], self.pace.budget_s(self._contract))

    def _living(self) -> list[float]:
        """Seconds for a token of each lane that is not gone."""
        since_s = self._clock() - self._forgotten_s
        return [token_s for token_s, heard_s in self._lanes.values() if heard_s > since_s]


def _forget_damaged(table: Table[Any]) -> None:
    """Delete the damaged rows of a table by prompt."""
    damaged = []
    for (prompt,) in table.all_keys():
        try:
            table.view(prompt)
        except CorruptRecord as error:
            log.error("what was learned of prompt %d is forgotten: %s", prompt, error)  # noqa: TRY400 - the text says all
            damaged.append(prompt)
    for prompt in damaged:
        table.delete(prompt)
