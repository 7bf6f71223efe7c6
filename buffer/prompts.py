"""Prompts: which prompt is leased next, and to whom.

Prompts that came back go first, then those of the window: the next few of the law (`buffer.dispatch`), which the
dispatcher takes apart as it likes, but empties before the next begins. Window and what was learned of lengths and of
success are rows, and are kept in memory too; how long steps take is known of the running service alone.

    Dispatcher  the seam of `buffer.dispatch`, and in itself `in_order`; others are loaded from `planning`
    Prompts     those of one store
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from buffer.config import BufferConfig
from buffer.dispatch import (
    MOST_LOOKED_AT,
    ByChance,
    EpochOrder,
    Floats,
    Ids,
    Pace,
    PolicyName,
    PromptLaw,
    SuccessModel,
    Waiting,
    Window,
    likely_tokens,
    window_size,
)
from buffer.errors import CorruptRecord
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import Group, ReturnedPrompt
from buffer.transaction import Table, Transaction
from common.run import RunFacts
from common.staleness import StalenessContract

log = logging.getLogger(__name__)

LEAST_TAU = 256.0
"""Policy versions after which a sample of a prompt counts 1/e of a new one, or those of an epoch where it has more."""
DISPATCHERS: Mapping[PolicyName, str] = {
    "in_order": "buffer.prompts:Dispatcher",
    "longest_first": "planning.dispatch:LongestFirstDispatcher",
    "by_deadline": "planning.dispatch:DeadlineDispatcher",
}
PREDICTING = "planning.dispatch:LengthDispatcher"
"""In order too; takes the place of one that predicts no lengths when an actor asks for them (`actors.admission`)."""


class NextPrompt(NamedTuple):
    """Of which a group is leased."""

    prompt_id: int
    failures: int = 0
    """How often groups of it were filtered, in a row."""
    longest: float = 0.0
    """Tokens of the longest of its samples, as foretold; 0: not foretold."""


class Dispatcher:
    """Chooses which of the next prompts goes to the actor that asks: the first.

    `choose` is the rule. A rule by lengths learns through the other methods; here they do nothing.
    """

    predicts: ClassVar[bool] = False
    """Whether it predicts lengths."""

    def __init__(
        self,
        facts: RunFacts,
        contract: StalenessContract,
        config: BufferConfig,
        pace: Pace,
        clock: Callable[[], float],
    ) -> None:
        """Dispatch for one store; `pace` and `clock` are those of its service."""

    def load(self, tx: Transaction) -> None:
        """Read what was stored."""

    def opens_window(self, request: LeaseRequest) -> bool:
        """Return whether the choice needs a window of prompts."""
        return False

    def choose(self, window: Window, request: LeaseRequest) -> Waiting:
        """Return the prompt of a window, which is not empty, that the actor gets."""
        return next(iter(window))

    def takes(self, longest: float, request: LeaseRequest) -> bool:
        """Return whether a returned prompt whose longest answer has `longest` tokens may go to this actor."""
        return True

    def hand_on_at(self, request: LeaseRequest) -> int:
        """Return the tokens at which samples of this actor are requeued for another one; 0: never."""
        return 0

    def longest_of(self, tx: Transaction, prompts: Ids) -> Floats:
        """Return the tokens of the longest sample of each prompt, as predicted; 0: not known."""
        return np.zeros(len(prompts))

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """Return the geometric mean of the completion tokens of a prompt's samples, as predicted; 0: not known."""
        return 0.0

    def renewed(self, actor: str) -> None:
        """Note that an actor renewed its leases."""

    def saw(self, tx: Transaction, group: Group) -> None:
        """Learn from the samples of a group that is complete."""

    def visits(self) -> tuple[VisitsReply, pa.RecordBatch]:
        """Return what is known of prompts, those of the newest groups first."""
        return VisitsReply(0, False), pa.RecordBatch.from_pylist([], schema=VISITS)

    def expect(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Store what the ranker predicts of new prompts."""


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
        by_success = config.prompt_law == "posterior"
        # what is known of a prompt has not faded when it comes again
        tau = max(LEAST_TAU, facts.num_prompts / facts.groups_per_step * facts.updates_per_step)
        self.successes = SuccessModel(facts.num_prompts, tau) if by_success else None
        self._law: PromptLaw = EpochOrder(facts.num_prompts, facts.seed)
        if config.prompt_law != "epoch":
            self._law = ByChance(facts.num_prompts, facts.seed, self.successes)
        self.pace = Pace(clock)
        self._config = config
        self.dispatcher = self._made(DISPATCHERS[config.dispatch])
        self._window = Window()
        self._is_loaded = False

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
            self.dispatcher.load(tx)
            if self.successes is not None:
                for (prompt,), tries in tx.tries.all_items():
                    self.successes.put(prompt, tries)
            self._is_loaded = True

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        """The prompt that the next group of this actor is of."""
        opens_window = self.dispatcher.opens_window(request)
        if (returned := self._returned(tx, request, MOST_LOOKED_AT if opens_window else 1)) is not None:
            return returned
        if not self._window:
            if self._law.in_order and not opens_window:
                return NextPrompt(int(self._ahead(tx, 1)[0]))
            self._open_window(tx)
        waiting = self.dispatcher.choose(self._window, request)
        self._window.take(waiting)
        tx.undo.append(partial(self._window.put, waiting))
        tx.window.delete(waiting.order)
        return NextPrompt(waiting.prompt_id, longest=waiting.longest)

    def may_go_on(self, group: Group, request: LeaseRequest) -> bool:
        """May a group of which some tokens are there go to this actor?"""
        there = max((each.num_tokens for each in group.partials.values()), default=0)
        return not there or self.dispatcher.takes(likely_tokens(there), request)

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """As `Dispatcher.usual_tokens`; if lengths are not predicted, load what does."""
        if not self.dispatcher.predicts:
            self.dispatcher = self._made(PREDICTING)
            self.dispatcher.load(tx)
        return self.dispatcher.usual_tokens(tx, prompt_id)

    def give_back(self, tx: Transaction, prompt_id: int, failures: int) -> None:
        """Its group was dropped or filtered: it is leased again before new ones."""
        tx.returned_prompts.put(ReturnedPrompt(prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def saw(self, tx: Transaction, group: Group) -> None:
        """The samples that a group has, of which no more come; what they tell is learned where it is of use."""
        self._saw_rewards(tx, group)
        self.dispatcher.saw(tx, group)

    # --- parts ------------------------------------------------------------------------------------

    def _made(self, name: str) -> Dispatcher:
        made: Dispatcher = resolve_name(name)(self._facts, self._contract, self._config, self.pace, self._clock)
        return made

    def _returned(self, tx: Transaction, request: LeaseRequest, most: int) -> NextPrompt | None:
        """Return the first of `most` returned prompts that this actor may have, or None."""
        first = list(islice(tx.returned_prompts.all_items(), most))
        if not first:
            return None
        longest = self.dispatcher.longest_of(tx, np.array([returned.prompt_id for _, returned in first]))
        for ((key,), returned), tokens in zip(first, longest.tolist(), strict=True):
            if self.dispatcher.takes(tokens, request):
                tx.returned_prompts.delete(key)
                return NextPrompt(returned.prompt_id, returned.failures, tokens)
        return None

    def _open_window(self, tx: Transaction) -> None:
        first = tx.state.cursor
        prompts = self._ahead(tx, window_size(self._facts.groups_per_step))
        longest = self.dispatcher.longest_of(tx, prompts).tolist()
        for order, (prompt, most) in enumerate(zip(prompts.tolist(), longest, strict=True), first):
            waiting = Waiting(order, prompt, most)
            self._window.put(waiting)
            tx.undo.append(partial(self._window.take, waiting))
            tx.window.put(waiting, order)

    def _ahead(self, tx: Transaction, many: int) -> Ids:
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
