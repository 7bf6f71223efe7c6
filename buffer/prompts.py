"""Which prompt is leased next: one that came back, else the next of the data's order.

`prompts_of` takes the place of these rules by those of `planning.prompts` if `buffer.prompt_law` or `buffer.dispatch`
asks for another choice, and `Prompts.predicting` when an actor asks for lengths (`actors.admission`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from math import inf
from pkgutil import resolve_name
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.config import BufferConfig
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import Group, ReturnedPrompt
from buffer.transaction import Transaction
from common.run import RunFacts

CHOSEN = "planning.prompts:ChosenPrompts"
"""Draws prompts by chance, dispatches by length and predicts lengths."""
MOST_LOOKED_AT = 32
"""Prompts that came back and groups without a lease that are considered for each lease."""
_NEWEST = 0.1
"""Weight of the newest in running means."""


class NextPrompt(NamedTuple):
    """The prompt of a new group."""

    prompt_id: int
    failures: int = 0
    """How often in a row its groups were filtered."""
    longest: float = 0.0
    """Predicted tokens of the longest of its samples; 0: not predicted."""


class Pace:
    """How long a step takes, as a mean that forgets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drawn_s = self._finished_s = -inf
        self.step_s = self.train_s = 0.0
        """From a step's end to the next one's; and of it from its draw. 0: not known yet."""

    def undo(self) -> Callable[[], None]:
        """Return what restores the present state."""
        return partial(self.__dict__.update, dict(self.__dict__))

    def begun(self) -> None:
        """Start anew with a learner: the time without one is no part of a step."""
        self._finished_s = -inf

    def drawn(self) -> None:
        self._drawn_s = self._clock()

    def finished(self) -> None:
        now_s = self._clock()
        if self._finished_s > -inf:
            step_s, train_s = now_s - self._finished_s, now_s - max(self._drawn_s, self._finished_s)
            weight = _NEWEST if self.step_s else 1.0
            self.step_s += weight * (step_s - self.step_s)
            self.train_s += weight * (train_s - self.train_s)
        self._finished_s = now_s


class Prompts:
    """Chooses the prompt of the next group. Methods that others override do nothing here."""

    def __init__(self, facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> None:
        self.facts, self.config, self.clock = facts, config, clock
        self.pace = Pace(clock)

    def load(self, tx: Transaction) -> None:
        """Read what is stored, once."""

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        """Take the prompt of the next group of this actor."""
        for (key,), returned in islice(tx.returned_prompts.all_items(), 1):
            tx.returned_prompts.delete(key)
            return NextPrompt(returned.prompt_id, returned.failures)
        for (order,), waiting in islice(tx.window.all_items(), 1):  # of a start with another law or dispatch
            tx.window.delete(order)
            return NextPrompt(waiting.prompt_id)
        epoch, place = divmod(tx.state.cursor, self.facts.num_prompts)
        tx.state.cursor += 1
        return NextPrompt(int(order_of(self.facts.seed, epoch, self.facts.num_prompts)[place]))

    def give_back(self, tx: Transaction, prompt_id: int, failures: int) -> None:
        """Lease a prompt whose group was dropped or filtered again, before new ones."""
        tx.returned_prompts.put(ReturnedPrompt(prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def predicting(self, tx: Transaction) -> Prompts:
        """Return these, or what takes their place, with predictions of lengths."""
        chosen: Prompts = resolve_name(CHOSEN)(self.facts, self.config, self.clock)
        chosen.pace = self.pace
        chosen.load(tx)
        return chosen.predicting(tx)

    def may_go_on(self, group: Group, request: LeaseRequest) -> bool:
        """Return whether this actor may continue a group with partial rollouts."""
        return True

    def hand_on_at(self, request: LeaseRequest) -> int:
        """Return the tokens at which samples of this actor are requeued for another one; 0: never."""
        return 0

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """Return the predicted geometric mean of the completion tokens of a prompt's samples; 0: not known."""
        return 0.0

    def renewed(self, actor: str) -> None:
        """Note that an actor renewed its leases."""

    def saw(self, tx: Transaction, group: Group) -> None:
        """Learn from a group of which no more samples come."""

    def visits(self) -> tuple[VisitsReply, pa.RecordBatch]:
        """Return what is known of the lengths of prompts, those of the newest groups first."""
        return VisitsReply(0, False), pa.RecordBatch.from_pylist([], schema=VISITS)

    def expect(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Take in what the ranker predicts of new prompts."""


def prompts_of(facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> Prompts:
    """Return the rules that the configuration asks for."""
    in_order = config.prompt_law == "epoch" and config.dispatch == "in_order"
    made: Prompts = (Prompts if in_order else resolve_name(CHOSEN))(facts, config, clock)
    return made


@lru_cache(maxsize=3)
def order_of(seed: int, epoch: int, num_prompts: int) -> npt.NDArray[np.int64]:
    """Return the order of prompts in one epoch of the data: the same after every restart."""
    return np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(num_prompts)
