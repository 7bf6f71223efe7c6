"""Prompt sampling at random or by success rate, and dispatch by length; replaces `leeway.buffer.groups.Prompts`.

Leases and their simulation use this module. `buffer.prompt_law` selects the sampler of the next prompts:

    epoch      the data's order: every epoch has each prompt once
    uniform    uniformly at random
    posterior  at random, with probability proportional to E[p (1 - p)]; the fraction `FLOOR` is drawn uniformly. p is
               the success rate of the policy on the prompt

p (1 - p) is half the probability that two samples of a prompt differ in their success; its maximum is at p = 1/2. The
posterior of p is a Beta distribution:

    p ~ Beta(a, b),   a = 1 + sum_i d_i s_i,   b = 1 + sum_i d_i (1 - s_i),   d_i = exp(-age_i / tau)
    E[p (1 - p)] = a b / ((a + b) (a + b + 1))

over all samples i of the prompt; s_i is 1 if sample i succeeded, else 0; ages are in policy versions. A prompt without
samples, or with old samples only, has the uniform distribution and the weight 1/6; the maximum is 1/4. The expectation
is the mean weight over draws of p from its posterior, without the noise of a draw.

The next prompts wait in a window if the sampler is random or if a policy of `leeway.planning.dispatch` chooses among
them. A new window opens when the old one is empty. Every prompt leaves the window, so dispatch decides which actor
gets a prompt, and not which prompts are used. Window, lengths and successes are rows of the store, cached in memory.
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

from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, CorruptRecord
from leeway.buffer.groups import MAX_CANDIDATES, NextPrompt, Prompts, StepTimer, order_of
from leeway.buffer.protocol import Expect, LeaseRequest, PosteriorsReply
from leeway.buffer.schema import POSTERIORS
from leeway.buffer.tables import Group, Tries, Waiting
from leeway.buffer.transaction import Table, Transaction
from leeway.common.run import RunFacts
from leeway.common.staleness import StalenessContract
from leeway.planning.dispatch import POLICIES, Speeds
from leeway.planning.lengths import LengthModel

log = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

WINDOW_STEPS = 4
"""Number of steps whose prompts fill a window. A larger window gives fast lanes more prompts that slow lanes would
miss, but its steps are less alike."""
LEAST_TAU = 256.0
"""Number of versions after which a sample counts 1/e of a new sample; if an epoch has more versions, their number."""
FLOOR = 0.1
"""Fraction of the prompts drawn uniformly, so that each prompt is sampled from time to time."""
MOST_LANES = 64
FORGOTTEN_S = 60.0
"""Seconds without a request or renewal after which a lane is removed; at least the duration of a lease."""
_FURTHEST = 20.0
"""Maximum accepted distance of a prediction from the level, in logarithms."""
_AT_ONCE = 4
"""At most one prompt in 4 is drawn at once: a draw of all prompts would ignore their weights."""
_RANDOM_STREAM = 3
"""Separates the random stream of prompts, [seed, 3, first], from draws, [seed, step, incarnation], except step 3.
NumPy pads seeds with zeros, so the order of epoch n, [seed, n], shares its stream with step n of incarnation 0."""


def likely_tokens(there: float) -> float:
    """Return the expected final length of a sample that has `there` tokens so far: twice as many."""
    return 2.0 * there


def lag_budget_s(pace: StepTimer, contract: StalenessContract) -> float:
    """Return the seconds from a lease to the draw of the step that must use its group; infinite if unknown."""
    if contract.bound() is None or not pace.step_s:
        return inf
    return contract.capacity() // contract.groups_per_step * pace.step_s - pace.train_s


class Window:
    """Prompts that wait for a lease, in the order of the sampler."""

    def __init__(self) -> None:
        self._in_order: dict[int, Waiting] = {}

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._in_order.values())

    def put(self, waiting: Waiting) -> None:
        """Add a prompt, or restore it if its lease was not committed."""
        is_restored = bool(self._in_order) and waiting.order < next(reversed(self._in_order))
        self._in_order[waiting.order] = waiting
        if is_restored:
            self._in_order = dict(sorted(self._in_order.items()))

    def take(self, waiting: Waiting) -> None:
        del self._in_order[waiting.order]


class SuccessModel:
    """Success rate of the policy on each prompt of a store, by prompt id from 0."""

    def __init__(self, num_prompts: int, tau: float) -> None:
        """Start without samples; `tau` is the number of versions after which a sample counts 1/e of a new sample."""
        self._tau = tau
        self._passed, self._failed = np.zeros(num_prompts), np.zeros(num_prompts)
        self._versions = np.zeros(num_prompts, np.int64)
        self._is_known = np.zeros(num_prompts, np.bool_)

    def put(self, prompt: int, tries: Tries | None) -> None:
        """Set the counts of a prompt, None to clear them."""
        new = Tries(0.0, 0.0, 0) if tries is None else tries
        self._passed[prompt], self._failed[prompt], self._versions[prompt] = new.passed, new.failed, new.version
        self._is_known[prompt] = tries is not None

    def get(self, prompt: int) -> Tries | None:
        if not self._is_known[prompt]:
            return None
        return Tries(float(self._passed[prompt]), float(self._failed[prompt]), int(self._versions[prompt]))

    def update(self, prompt: int, num_passed: int, num_failed: int, version: int) -> Tries:
        """Add samples of a prompt, committed at a version of the learner; return the new counts of the prompt."""
        before = self.get(prompt) or Tries(0.0, 0.0, version)
        left = exp(-max(0, version - before.version) / self._tau)
        tries = Tries(left * before.passed + num_passed, left * before.failed + num_failed, version)
        self.put(prompt, tries)
        return tries

    def weights(self, version: int) -> Floats:
        """Return E[p (1 - p)] > 0 of every prompt at a version."""
        left = np.exp(-np.maximum(0, version - self._versions) / self._tau)
        a, b = 1.0 + left * self._passed, 1.0 + left * self._failed
        weights: Floats = a * b / ((a + b) * (a + b + 1.0))
        return weights


class EpochOrder:
    """Sampler of prompts in the data's order, independent of the number drawn per call."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self._num_prompts, self._seed = num_prompts, seed

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Return the next `many` prompts after skipping `first`, across epochs if necessary."""
        size, parts = self._num_prompts, []
        while many:
            epoch, place = divmod(first, size)
            parts.append(order_of(self._seed, epoch, size)[place : place + many])
            first, many = first + len(parts[-1]), many - len(parts[-1])
        return np.concatenate(parts)


class ByChance:
    """Random sampler of prompts, without replacement within one call."""

    def __init__(self, num_prompts: int, seed: int, successes: SuccessModel | None = None) -> None:
        """Draw uniformly or, if `successes` is given, by success rate except for the fraction `FLOOR`."""
        self._num_prompts, self._seed = num_prompts, seed
        self._successes = successes

    def ahead(self, first: int, many: int, version: int) -> Ids:
        """Return the next prompts, 1 to `many`, after skipping `first`; deterministic."""
        random = np.random.default_rng([self._seed & 0xFFFFFFFF, _RANDOM_STREAM, first])
        many = min(many, max(1, self._num_prompts // _AT_ONCE))
        drawn: Ids = random.choice(self._num_prompts, many, replace=False, p=self.probabilities(version))
        return drawn

    def probabilities(self, version: int) -> Floats | None:
        """Return the probability that each prompt is drawn next; None if uniform."""
        if self._successes is None:
            return None
        weights = self._successes.weights(version)
        probabilities: Floats = (1.0 - FLOOR) * weights / weights.sum() + FLOOR / len(weights)
        return probabilities


class ChosenPrompts(Prompts):
    """Prompts of a sampler, dispatched by a policy, with statistics of successes, lengths and lane speeds."""

    def __init__(self, facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> None:
        """Start empty; `load` reads the stored state."""
        super().__init__(facts, config, clock)
        self._contract = facts.contract
        # the counts of a prompt must not decay before its next group
        tau = max(LEAST_TAU, facts.num_prompts / facts.groups_per_step * facts.updates_per_step)
        self.successes = SuccessModel(facts.num_prompts, tau) if config.prompt_law == "posterior" else None
        self._is_epoch = config.prompt_law == "epoch"
        self._sampler: EpochOrder | ByChance = EpochOrder(facts.num_prompts, facts.seed)
        if not self._is_epoch:
            self._sampler = ByChance(facts.num_prompts, facts.seed, self.successes)
        self._policy = POLICIES[config.dispatch]()
        self.lengths = LengthModel(facts.num_prompts)
        self._lanes: dict[str, tuple[float, float]] = {}
        """Lane -> seconds per token, 0 if unknown, and the time of its last request or renewal."""
        self._lane_of: dict[str, str] = {}
        """Actor -> its lane."""
        self._predicts = False
        """Whether an actor requests length predictions."""
        self._window = Window()
        self._is_loaded = False

    def load(self, tx: Transaction) -> None:
        """Load the stored state and delete damaged statistics; raise CorruptRecord if the window is damaged."""
        if self._is_loaded:
            return
        _delete_damaged(tx.lengths)
        _delete_damaged(tx.tries)
        for _, waiting in tx.window.all_items():
            self._window.put(waiting)
        for (prompt,), posterior in tx.lengths.all_items():
            self.lengths.put(prompt, posterior)
        if self.successes is not None:
            for (prompt,), tries in tx.tries.all_items():
                self.successes.put(prompt, tries)
        self._is_loaded = True

    def predicting(self, tx: Transaction) -> Prompts:
        """Return this object, which learns lengths from now on."""
        self._predicts = True
        return self

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        speeds = self._speeds(request)
        is_in_order = self._policy.is_in_order(speeds)
        if (returned := self._take_returned(tx, speeds, 1 if is_in_order else MAX_CANDIDATES)) is not None:
            return returned
        if not self._window:
            if self._is_epoch and is_in_order:
                return NextPrompt(int(self._take_next(tx, 1)[0]))
            self._open_window(tx)
        waiting = self._policy.choose(self._window, speeds)
        self._window.take(waiting)
        tx.undo.append(partial(self._window.put, waiting))
        tx.window.delete(waiting.order)
        return NextPrompt(waiting.prompt_id, longest=waiting.longest)

    def may_resume(self, group: Group, request: LeaseRequest) -> bool:
        there = max((each.num_tokens for each in group.partials.values()), default=0)
        return not there or self._policy.takes(likely_tokens(there), self._speeds(request))

    def requeue_at(self, request: LeaseRequest) -> int:
        at = self._policy.requeue_at(self._speeds(request))
        return max(1, round(at)) if at < self.facts.max_tokens else 0

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        self.lengths.shape = tx.state.lengths
        return min(float(self.facts.max_tokens), self.lengths.predicted_length(prompt_id, tx.state.version))

    def renewed(self, actor: str) -> None:
        if (lane := self._lane_of.get(actor)) in self._lanes:
            self._lanes[lane] = self._lanes[lane][0], self.clock()

    def observe(self, tx: Transaction, group: Group) -> None:
        """Update success counts with a group, and lengths if the policy or an actor needs them."""
        self._observe_rewards(tx, group)
        there, lanes = [index for index, length in enumerate(group.completion_lengths) if length], self._active_lanes()
        if not there or not (self._predicts or self._policy.needs_lengths(len(lanes))):
            return
        prompt, before = group.prompt_id, self.lengths.get(group.prompt_id)
        self.lengths.shape = tx.state.lengths
        lengths, cut = [group.completion_lengths[index] for index in there], [index in group.cut for index in there]
        is_late = group.predicted * max(lanes, default=0.0) > lag_budget_s(self.pace, self._contract)
        posterior = self.lengths.update(prompt, lengths, cut, tx.state.version, is_late=is_late)
        tx.undo.append(partial(self.lengths.put, prompt, before))
        tx.lengths.put(posterior, prompt)

    def posteriors(self) -> tuple[PosteriorsReply, pa.RecordBatch]:
        batch = pa.RecordBatch.from_arrays([pa.array(each) for each in self.lengths.recent()], schema=POSTERIORS)
        return PosteriorsReply(self.lengths.num_seen, self.lengths.has_prior), batch

    def set_prior(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Accept predictions of new prompts; raise BufferRefused if a prompt is unknown or a value is not finite.

        Predictions are not stored: after a restart, the ranker sends the predictions again.
        """
        means = batch.column(0).to_numpy()
        if message.first + len(means) > self.facts.num_prompts or not np.isfinite(means).all():
            last = message.first + len(means) - 1
            raise BufferRefused(
                f"invalid predictions for prompts {message.first} to {last}: values must be finite, and prompt ids of "
                f"this run between 0 and {self.facts.num_prompts - 1}"
            )
        self.lengths.set_prior(message.first, np.clip(means, -_FURTHEST, _FURTHEST), message.variance)

    # --- parts ------------------------------------------------------------------------------------

    def _take_returned(self, tx: Transaction, speeds: Speeds, most: int) -> NextPrompt | None:
        """Take the first of up to `most` returned prompts that an actor may lease; return None if there is none."""
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
        prompts = self._take_next(tx, WINDOW_STEPS * self.facts.groups_per_step)
        longest = self._longest_of(tx, prompts).tolist()
        for order, (prompt, most) in enumerate(zip(prompts.tolist(), longest, strict=True), first):
            waiting = Waiting(order, prompt, most)
            self._window.put(waiting)
            tx.undo.append(partial(self._window.take, waiting))
            tx.window.put(waiting, order)

    def _take_next(self, tx: Transaction, many: int) -> Ids:
        """Take up to `many` of the sampler's next prompts."""
        prompts = self._sampler.ahead(tx.state.cursor, many, tx.state.version)
        tx.state.cursor += len(prompts)
        return prompts

    def _longest_of(self, tx: Transaction, prompts: Ids) -> Floats:
        """Return the predicted tokens of the longest sample of each prompt; 0 if unknown."""
        self.lengths.shape = tx.state.lengths
        if not self.lengths.shape.num_groups:
            return np.zeros(len(prompts))
        longest = self.lengths.longest_of(prompts, self.facts.group_size, tx.state.version)
        return np.minimum(self.facts.max_tokens, longest)

    def _observe_rewards(self, tx: Transaction, group: Group) -> None:
        """Count samples by success; samples without a reward do not count."""
        rewards = [reward for reward in group.rewards if reward is not None]
        if self.successes is None or not rewards:
            return
        prompt, before = group.prompt_id, self.successes.get(group.prompt_id)
        num_passed = sum(reward >= self.facts.correct_at for reward in rewards)
        tx.undo.append(partial(self.successes.put, prompt, before))
        tx.tries.put(self.successes.update(prompt, num_passed, len(rewards) - num_passed, tx.state.version), prompt)

    def _speeds(self, request: LeaseRequest) -> Speeds:
        self._lanes[request.lane] = request.token_s, self.clock()
        self._lane_of[request.actor] = request.lane
        if len(self._lanes) > MOST_LANES:  # bounds memory: a config has fewer pools
            del self._lanes[min(self._lanes, key=lambda lane: self._lanes[lane][1])]
        known = [token_s for token_s in self._active_lanes() if token_s]
        return Speeds(request.token_s, known, lag_budget_s(self.pace, self._contract))

    def _active_lanes(self) -> list[float]:
        """Return the seconds per token of each active lane."""
        since_s = self.clock() - FORGOTTEN_S
        return [token_s for token_s, seen_s in self._lanes.values() if seen_s > since_s]


def _delete_damaged(table: Table[Any]) -> None:
    """Delete the damaged rows of a table that is keyed by prompt."""
    damaged = []
    for (prompt,) in table.all_keys():
        try:
            table.view(prompt)
        except CorruptRecord as error:
            log.error("deleted the statistics of prompt %d: %s", prompt, error)  # noqa: TRY400 - no traceback
            damaged.append(prompt)
    for prompt in damaged:
        table.delete(prompt)
