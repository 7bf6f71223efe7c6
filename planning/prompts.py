"""Prompts by chance, by success and by length: what takes the place of `buffer.groups.Prompts`. Used by leases, and by
their simulation.

A law says which prompts are leased next.

    epoch      the data's order: each epoch of it has every prompt once
    uniform    by chance, every prompt alike
    posterior  by chance, in proportion to E[p (1 - p)], but for a share that is drawn all alike; p is how often the
               policy answers the prompt with success

p (1 - p) is half the chance that two samples of a prompt differ in their success; it is greatest at p = 1/2. The
posterior of p is a Beta distribution:

    p ~ Beta(a, b),   a = 1 + sum_i d_i s_i,   b = 1 + sum_i d_i (1 - s_i),   d_i = exp(-age_i / tau)
    E[p (1 - p)] = a b / ((a + b) (a + b + 1))

over all samples i of the prompt; s_i is 1 if it succeeded, else 0; its age is in policy versions. A prompt of which
nothing is known, or all is long ago, has the uniform distribution and the weight 1/6; the greatest is 1/4. The
expectation is what drawing p from its posterior and weighing by p (1 - p) comes to on average, without the noise.

The next prompts wait in a window if the law draws by chance or a policy of `planning.dispatch` chooses among them. A
new window begins once the old one is empty: every prompt leaves it, so dispatch decides who generates what, and not
what is trained. Window, lengths and successes are rows of the store, and are kept in memory too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import exp, inf
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from buffer.config import BufferConfig
from buffer.errors import BufferRefused, CorruptRecord
from buffer.groups import MOST_LOOKED_AT, NextPrompt, Pace, Prompts, order_of
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import Group, Tries, Waiting
from buffer.transaction import Table, Transaction
from common.run import RunFacts
from common.staleness import StalenessContract
from planning.dispatch import POLICIES, Speeds
from planning.lengths import LengthModel

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WINDOW_STEPS = 4
"""Steps whose prompts a window has: with more of them the fast lanes find more that is late, and the steps of a window
are less alike."""
LEAST_TAU = 256.0
"""Policy versions after which a sample of a prompt counts 1/e of a new one, or those of an epoch if it has more."""
FLOOR = 0.1
"""This share of the prompts is drawn all alike, so that each is seen now and then."""
MOST_LANES = 64
FORGOTTEN_S = 60.0
"""Seconds without a request or renewal after which a lane is gone; at least as long as a lease lasts."""
_FURTHEST = 20.0
"""Largest accepted distance of a prediction from the level, in logarithms."""
_AT_ONCE = 4
"""At most one prompt in 4 is drawn at once: were all of them drawn, none would be preferred."""
_BY_CHANCE = 3
"""Tells the chance of prompts from that of most draws, under one seed. NumPy pads seeds with zeros: draws of step 3
share it, and the order of epoch n shares that of step n by incarnation 0 there."""


def likely_tokens(there: float) -> float:
    """Return how long a sample with `there` tokens becomes: as long again."""
    return 2.0 * there


def lag_budget_s(pace: Pace, contract: StalenessContract) -> float:
    """Return the time from a lease to the draw of the step that is to use its group; infinite if it is not known."""
    if contract.bound() is None or not pace.step_s:
        return inf
    return contract.capacity() // contract.groups_per_step * pace.step_s - pace.train_s


class Window:
    """The prompts that wait, in the order of the law."""

    def __init__(self) -> None:
        self._in_order: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._in_order.values())

    def put(self, waiting: Waiting) -> None:
        """Add one; or add it again, if its lease was not committed."""
        is_back = bool(self._in_order) and waiting.order < next(reversed(self._in_order))
        self._in_order[waiting.order] = waiting
        if is_back:
            self._in_order = dict(sorted(self._in_order.items()))

    def take(self, waiting: Waiting) -> None:
        del self._in_order[waiting.order]


class SuccessModel:
    """How often each prompt of a store is answered with success, by their ids from 0."""

    def __init__(self, num_prompts: int, tau: float) -> None:
        """Start without samples; after `tau` versions a sample counts 1/e of a new one."""
        self._tau = tau
        self._passed, self._failed = np.zeros(num_prompts), np.zeros(num_prompts)
        self._versions = np.zeros(num_prompts, np.int64)
        self._is_known = np.zeros(num_prompts, np.bool_)

    def put(self, prompt: int, tries: Tries | None) -> None:
        """Set what is known of a prompt; None: nothing."""
        known = Tries(0.0, 0.0, 0) if tries is None else tries
        self._passed[prompt], self._failed[prompt], self._versions[prompt] = known.passed, known.failed, known.version
        self._is_known[prompt] = tries is not None

    def get(self, prompt: int) -> Tries | None:
        if not self._is_known[prompt]:
            return None
        return Tries(float(self._passed[prompt]), float(self._failed[prompt]), int(self._versions[prompt]))

    def see(self, prompt: int, num_passed: int, num_failed: int, version: int) -> Tries:
        """Add samples of a prompt that came with the learner at a version; return what is known of the prompt now."""
        before = self.get(prompt) or Tries(0.0, 0.0, version)
        left = exp(-max(0, version - before.version) / self._tau)
        tries = Tries(left * before.passed + num_passed, left * before.failed + num_failed, version)
        self.put(prompt, tries)
        return tries

    def weights(self, version: int) -> Floats:
        """Return E[p (1 - p)] of every prompt at a version; above 0."""
        left = np.exp(-np.maximum(0, version - self._versions) / self._tau)
        a, b = 1.0 + left * self._passed, 1.0 + left * self._failed
        weights: Floats = a * b / ((a + b) * (a + b + 1.0))
        return weights


class EpochOrder:
    """Draws prompts in the data's order, one by one as well as many at once."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self._num_prompts, self._seed = num_prompts, seed

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Return `many` prompts if `first` were taken before, of several epochs if one does not have them."""
        size, parts = self._num_prompts, []
        while many:
            epoch, place = divmod(first, size)
            parts.append(order_of(self._seed, epoch, size)[place : place + many])
            first, many = first + len(parts[-1]), many - len(parts[-1])
        return np.concatenate(parts)


class ByChance:
    """Draws prompts one after the other, by chance; none twice among those that are drawn at once."""

    def __init__(self, num_prompts: int, seed: int, successes: SuccessModel | None = None) -> None:
        """Draw alike, or by what is known of their success, but for the share `FLOOR`."""
        self._num_prompts, self._seed = num_prompts, seed
        self._successes = successes

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Return up to `many`, at least one, if `first` were taken before; the same whenever it is asked."""
        random = np.random.default_rng([self._seed & 0xFFFFFFFF, _BY_CHANCE, first])
        many = min(many, max(1, self._num_prompts // _AT_ONCE))
        drawn: Ids = random.choice(self._num_prompts, many, replace=False, p=self.chances(version))
        return drawn

    def chances(self, version: int) -> Floats | None:
        """Return the chance of each prompt to be the next; None: all alike."""
        if self._successes is None:
            return None
        weights = self._successes.weights(version)
        chances: Floats = (1.0 - FLOOR) * weights / weights.sum() + FLOOR / len(weights)
        return chances


class ChosenPrompts(Prompts):
    """Draws prompts by a law, dispatches them by a policy, and learns of success, lengths and the speeds of lanes."""

    def __init__(self, facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> None:
        """Start empty; `load` reads what is stored."""
        super().__init__(facts, config, clock)
        self._contract = facts.contract
        # what is known of a prompt has not faded when it comes again
        tau = max(LEAST_TAU, facts.num_prompts / facts.groups_per_step * facts.updates_per_step)
        self.successes = SuccessModel(facts.num_prompts, tau) if config.prompt_law == "posterior" else None
        self._is_epoch = config.prompt_law == "epoch"
        self._law: EpochOrder | ByChance = EpochOrder(facts.num_prompts, facts.seed)
        if not self._is_epoch:
            self._law = ByChance(facts.num_prompts, facts.seed, self.successes)
        self._policy = POLICIES[config.dispatch]()
        self.lengths = LengthModel(facts.num_prompts)
        self._lanes: dict[str, tuple[float, float]] = {}
        """Lane -> seconds for a token, 0 if it is not known yet, and when it was heard of."""
        self._lane_of: dict[str, str] = {}
        """Actor -> its lane."""
        self._is_asked = False
        """An actor wants to know lengths."""
        self._window = Window()
        self._is_loaded = False

    def load(self, tx: Transaction) -> None:
        """Read what is stored, but for damaged rows of what was learned; CorruptRecord if the window is damaged."""
        if self._is_loaded:
            return
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

    def predicting(self, tx: Transaction) -> Prompts:
        """As `Prompts`; lengths are learned from now on."""
        self._is_asked = True
        return self

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        speeds = self._speeds(request)
        is_in_order = self._policy.is_in_order(speeds)
        if (returned := self._returned(tx, speeds, 1 if is_in_order else MOST_LOOKED_AT)) is not None:
            return returned
        if not self._window:
            if self._is_epoch and is_in_order:
                return NextPrompt(int(self._ahead(tx, 1)[0]))
            self._open_window(tx)
        waiting = self._policy.choose(self._window, speeds)
        self._window.take(waiting)
        tx.undo.append(partial(self._window.put, waiting))
        tx.window.delete(waiting.order)
        return NextPrompt(waiting.prompt_id, longest=waiting.longest)

    def may_go_on(self, group: Group, request: LeaseRequest) -> bool:
        there = max((each.num_tokens for each in group.partials.values()), default=0)
        return not there or self._policy.takes(likely_tokens(there), self._speeds(request))

    def hand_on_at(self, request: LeaseRequest) -> int:
        at = self._policy.hands_on_at(self._speeds(request))
        return max(1, round(at)) if at < self.facts.max_tokens else 0

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        self.lengths.shape = tx.state.lengths
        return min(float(self.facts.max_tokens), self.lengths.usual(prompt_id, tx.state.version))

    def renewed(self, actor: str) -> None:
        if (lane := self._lane_of.get(actor)) in self._lanes:
            self._lanes[lane] = self._lanes[lane][0], self.clock()

    def saw(self, tx: Transaction, group: Group) -> None:
        """Learn what a group tells of success and lengths, if it is of use."""
        self._saw_rewards(tx, group)
        there, lanes = [index for index, length in enumerate(group.completion_lengths) if length], self._living()
        if not there or not (self._is_asked or self._policy.needs_lengths(len(lanes))):
            return
        prompt, before = group.prompt_id, self.lengths.get(group.prompt_id)
        self.lengths.shape = tx.state.lengths
        lengths, cut = [group.completion_lengths[index] for index in there], [index in group.cut for index in there]
        is_late = group.foretold * max(lanes, default=0.0) > lag_budget_s(self.pace, self._contract)
        visit = self.lengths.see(prompt, lengths, cut, tx.state.version, is_late=is_late)
        tx.undo.append(partial(self.lengths.put, prompt, before))
        tx.lengths.put(visit, prompt)

    def visits(self) -> tuple[VisitsReply, pa.RecordBatch]:
        batch = pa.RecordBatch.from_arrays([pa.array(each) for each in self.lengths.recent()], schema=VISITS)
        return VisitsReply(self.lengths.num_seen, self.lengths.is_expecting), batch

    def expect(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Accept predictions of new prompts; BufferRefused if they are of unknown prompts, or no numbers.

        They are not stored: the ranker sends them again.
        """
        means = batch.column(0).to_numpy()
        if message.first + len(means) > self.facts.num_prompts or not np.isfinite(means).all():
            last = message.first + len(means) - 1
            raise BufferRefused(
                f"a prediction for prompts {message.first} to {last} is not a finite number, or they are not "
                f"all prompts of this run, whose ids are 0 to {self.facts.num_prompts - 1}"
            )
        self.lengths.expect(message.first, np.clip(means, -_FURTHEST, _FURTHEST), message.variance)

    # --- parts ------------------------------------------------------------------------------------

    def _returned(self, tx: Transaction, speeds: Speeds, most: int) -> NextPrompt | None:
        """Take the first of `most` returned prompts that an actor may have; None: it may have none."""
        first = list(islice(tx.returned_prompts.all_items(), most))
        if not first:
            return None
        longest = self._longest_of(tx, np.array([returned.prompt_id for _, returned in first]))
        for ((key,), returned), tokens in zip(first, longest.tolist(), strict=True):
            if self._policy.takes(tokens, speeds):
                tx.returned_prompts.delete(key)
                return NextPrompt(returned.prompt_id, returned.failures, tokens)
        return None

    def _open_window(self, tx: Transaction) -> None:
        first = tx.state.cursor
        prompts = self._ahead(tx, WINDOW_STEPS * self.facts.groups_per_step)
        longest = self._longest_of(tx, prompts).tolist()
        for order, (prompt, most) in enumerate(zip(prompts.tolist(), longest, strict=True), first):
            waiting = Waiting(order, prompt, most)
            self._window.put(waiting)
            tx.undo.append(partial(self._window.take, waiting))
            tx.window.put(waiting, order)

    def _ahead(self, tx: Transaction, many: int) -> Ids:
        """Take up to `many` of the prompts that the law has next."""
        prompts = self._law.ahead(tx.state.cursor, many, tx.state.version)
        tx.state.cursor += len(prompts)
        return prompts

    def _longest_of(self, tx: Transaction, prompts: Ids) -> Floats:
        """Return the predicted tokens of the longest sample of each prompt; 0: not known."""
        self.lengths.shape = tx.state.lengths
        if not self.lengths.shape.num_groups:
            return np.zeros(len(prompts))
        longest = self.lengths.longest_of(prompts, self.facts.group_size, tx.state.version)
        return np.minimum(self.facts.max_tokens, longest)

    def _saw_rewards(self, tx: Transaction, group: Group) -> None:
        """Count samples by their success; one without a reward is no sample."""
        rewards = [reward for reward in group.rewards if reward is not None]
        if self.successes is None or not rewards:
            return
        prompt, before = group.prompt_id, self.successes.get(group.prompt_id)
        num_passed = sum(reward >= self.facts.correct_at for reward in rewards)
        tx.undo.append(partial(self.successes.put, prompt, before))
        tx.tries.put(self.successes.see(prompt, num_passed, len(rewards) - num_passed, tx.state.version), prompt)

    def _speeds(self, request: LeaseRequest) -> Speeds:
        self._lanes[request.lane] = request.token_s, self.clock()
        self._lane_of[request.actor] = request.lane
        if len(self._lanes) > MOST_LANES:  # which no config has
            del self._lanes[min(self._lanes, key=lambda lane: self._lanes[lane][1])]
        known = [token_s for token_s in self._living() if token_s]
        return Speeds(request.token_s, known, lag_budget_s(self.pace, self._contract))

    def _living(self) -> list[float]:
        """Return the seconds per token of each lane that is not gone."""
        since_s = self.clock() - FORGOTTEN_S
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
