"""The life cycle of a group, with the ledger entries of each transition, and the choice of its prompt.

    open ----> ready <---> drawn
      |          |           |
      +----------+-----------+---> closed

    open    samples are missing: in flight under a lease, or waiting for the next lease
    ready   all samples are committed or failed, enough have rewards, and a step may take the group
    drawn   recorded for an unfinished step
    closed  used up, dropped, filtered, set aside or evicted; the row stays until the records are deleted

A group that may be used again returns to ready after its step. Methods change row, index and ledger of a group.

The prompt of the next group is a returned prompt if there is one, otherwise the next prompt in the data's order.
`leeway.planning.prompts` chooses the prompt instead if `buffer.prompt_law` or `buffer.dispatch` is not the default
(`prompts_of`), or if an actor requests length predictions (`Prompts.predicting`, `actors.admission`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import islice
from math import ceil, inf
from pkgutil import resolve_name
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from leeway.buffer import samplers
from leeway.buffer.config import BufferConfig
from leeway.buffer.index import ELIGIBLE, GroupIndex
from leeway.buffer.protocol import Expect, LeaseRequest, PosteriorsReply
from leeway.buffer.schema import POSTERIORS
from leeway.buffer.tables import NO_RECORD, Group, ReturnedPrompt
from leeway.buffer.transaction import Transaction
from leeway.common.run import RunFacts

MAX_ATTEMPTS = 5
"""Maximum number of lost leases per group, and of successive filtered groups per prompt: some prompts crash actors."""
_ROUNDING = 1e-9
"""Tolerance for rounding errors: in floating point, 1.1 * 10 is above 11."""
MAX_RECOUNTED = 256
"""Number of ready groups from which 'gap' skips the recount of waiting samples; `leeway buffer verify` never does."""
CHOSEN = "leeway.planning.prompts:ChosenPrompts"
"""Implementation of `Prompts` that draws prompts at random, dispatches by length and predicts lengths."""
MAX_CANDIDATES = 32
"""Maximum number of returned prompts, and of groups without a lease, that are considered per lease."""
_NEWEST = 0.1
"""Weight of the newest value in running means."""


class NextPrompt(NamedTuple):
    prompt_id: int
    failures: int = 0
    """Number of groups of this prompt that were filtered in a row."""
    longest: float = 0.0
    """Predicted tokens of the prompt's longest sample; 0 if not predicted."""


class StepTimer:
    """Exponential moving average of the duration of a step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._drawn_s = self._finished_s = -inf
        self.step_s = self.train_s = 0.0
        """Mean seconds from the end of one step to the end of the next, and from the draw to the end; 0 if unknown."""

    def undo(self) -> Callable[[], None]:
        """Return a function that restores the current state."""
        return partial(self.__dict__.update, dict(self.__dict__))

    def begun(self) -> None:
        """Discard the end of the last step when a learner starts; the time without a learner belongs to no step."""
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
    """Choice of the prompt of the next group, in the data's order. Hooks for subclasses do nothing in this class."""

    def __init__(self, facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> None:
        self.facts, self.config, self.clock = facts, config, clock
        self.pace = StepTimer(clock)

    def load(self, tx: Transaction) -> None:
        """Load the stored state once."""

    def next(self, tx: Transaction, request: LeaseRequest) -> NextPrompt:
        """Return the prompt of the next group for this actor."""
        for (key,), returned in islice(tx.returned_prompts.all_items(), 1):
            tx.returned_prompts.delete(key)
            return NextPrompt(returned.prompt_id, returned.failures)
        for (order,), waiting in islice(tx.window.all_items(), 1):  # stored under an earlier prompt_law or dispatch
            tx.window.delete(order)
            return NextPrompt(waiting.prompt_id)
        epoch, place = divmod(tx.state.cursor, self.facts.num_prompts)
        tx.state.cursor += 1
        return NextPrompt(int(order_of(self.facts.seed, epoch, self.facts.num_prompts)[place]))

    def give_back(self, tx: Transaction, prompt_id: int, failures: int) -> None:
        """Queue the prompt of a dropped or filtered group; the prompt is leased again before new prompts."""
        tx.returned_prompts.put(ReturnedPrompt(prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def predicting(self, tx: Transaction) -> Prompts:
        """Return a replacement for this object that predicts lengths."""
        chosen: Prompts = resolve_name(CHOSEN)(self.facts, self.config, self.clock)
        chosen.pace = self.pace
        chosen.load(tx)
        return chosen.predicting(tx)

    def may_resume(self, group: Group, request: LeaseRequest) -> bool:
        """Return whether this actor may resume a group with partial rollouts."""
        return True

    def requeue_at(self, request: LeaseRequest) -> int:
        """Return the number of tokens at which this actor requeues a sample for a faster actor; 0 if never."""
        return 0

    def usual_tokens(self, tx: Transaction, prompt_id: int) -> float:
        """Return the predicted geometric mean of a prompt's completion lengths, in tokens; 0 if unknown."""
        return 0.0

    def renewed(self, actor: str) -> None:
        """Record that an actor renewed its leases."""

    def observe(self, tx: Transaction, group: Group) -> None:
        """Update the predictions with a group whose samples are all complete or failed."""

    def posteriors(self) -> tuple[PosteriorsReply, pa.RecordBatch]:
        """Return the length posteriors of prompts, most recent groups first."""
        return PosteriorsReply(0, False), pa.RecordBatch.from_pylist([], schema=POSTERIORS)

    def set_prior(self, message: Expect, batch: pa.RecordBatch) -> None:
        """Accept the ranker's predictions of new prompts."""


def prompts_of(facts: RunFacts, config: BufferConfig, clock: Callable[[], float]) -> Prompts:
    """Return the implementation of `Prompts` that the configuration selects."""
    in_order = config.prompt_law == "epoch" and config.dispatch == "in_order"
    prompts: Prompts = (Prompts if in_order else resolve_name(CHOSEN))(facts, config, clock)
    return prompts


@lru_cache(maxsize=3)
def order_of(seed: int, epoch: int, num_prompts: int) -> npt.NDArray[np.int64]:
    """Return the order of prompts in one epoch of the data; deterministic, so equal after every restart."""
    return np.random.default_rng([seed & 0xFFFFFFFF, epoch]).permutation(num_prompts)


class StoredSample(msgspec.Struct, frozen=True, gc=False):
    """The fields of a stored sample that its group's row contains."""

    sample_index: int
    reward: float | None
    judged: float | None
    """Sum of the rewards that decide whether the rewards of a group are equal."""
    num_tokens: int
    num_completion_tokens: int
    is_cut: bool
    oldest: tuple[int, int]
    """(incarnation, version) of the first token; versions never decrease within a trajectory."""


class Groups:
    """State transitions of groups, shared by leases, commits and draws."""

    def __init__(
        self, config: BufferConfig, group_size: int, groups_per_step: int, prompts: Prompts, num_kept: int = 0
    ) -> None:
        """Start with an empty index. Eviction keeps at least `num_kept` ready groups for the learner."""
        self.config = config
        self._max_set_aside = max_set_aside(config.refill_uninformative, groups_per_step)
        self.prompts = prompts
        self.sampler, weight = samplers.build(config)
        self.index = GroupIndex(config, weight)
        self.num_needed = min(2, group_size)
        """Minimum number of samples with rewards in a ready group; a comparison needs two."""
        self._num_kept = num_kept

    def prepare(self, tx: Transaction) -> None:
        self.index.load(tx)
        self.prompts.load(tx)

    def save(self, tx: Transaction, group: Group) -> None:
        """Write the row. If the group is closed without records, add its counts to `retired` and delete the row."""
        for index in [index for index in group.partials if group.sample_states[index] != "missing"]:
            self.forget_partial(tx, group, index)
        self.index.update(tx, group)
        if group.phase != "closed" or group.is_stored:
            tx.groups.put(group, group.group_id)
            return
        for name, count in group.tallies().items():
            if count:
                tx.state.retired[name] = tx.state.retired.get(name, 0) + count
        tx.groups.delete(group.group_id)

    def forget_partial(self, tx: Transaction, group: Group, index: int) -> None:
        """Delete a partial rollout whose sample is complete or will start from the prompt; `save` writes the row."""
        del group.partials[index]
        tx.partials.delete(group.group_id, index)

    def fail(self, tx: Transaction, group: Group, indices: list[int], reason: str) -> None:
        for index in indices:
            group.sample_states[index] = "failed"
        group.failed += len(indices)
        tx.state.ledger.fail(len(indices), reason)

    def lose_lease(self, tx: Transaction, group: Group, reason: str) -> None:
        """End an expired or fenced lease: its samples count as failed, and are issued again while attempts remain."""
        lost = group.in_flight()
        group.end_lease()
        group.losses += 1
        if group.losses >= MAX_ATTEMPTS:
            self.fail(tx, group, lost, reason)
        else:
            group.failed += len(lost)
            tx.state.ledger.fail(len(lost), reason)
        self.advance(tx, group)

    def commit(self, tx: Transaction, group: Group, samples: Sequence[StoredSample], records: Sequence[int]) -> None:
        """Add samples, which are stored under these records, to their group's row; `advance` writes the row.

        A sample without a reward counts as filtered.
        """
        for sample, record in zip(samples, records, strict=True):
            index = sample.sample_index
            group.sample_states[index] = "filtered" if sample.reward is None else "waiting"
            group.records[index], group.rewards[index] = record, sample.reward
            if sample.judged != sample.reward:
                group.judged[index] = sample.judged
            group.lengths[index], group.completion_lengths[index] = sample.num_tokens, sample.num_completion_tokens
            if sample.is_cut:
                group.cut.append(index)
        rewarded = [sample.oldest for sample in samples if sample.reward is not None]
        tx.state.num_records += len(samples)
        tx.state.ledger.commit(len(rewarded), "waiting")
        tx.state.ledger.commit(len(samples) - len(rewarded), "filtered")
        tx.state.fidelity.generated.add([sample.num_completion_tokens for sample in samples])
        if rewarded:
            group.oldest = min(rewarded) if group.oldest is None else min(group.oldest, *rewarded)

    def advance(self, tx: Transaction, group: Group) -> None:
        """Save the group; if no sample is missing, make it ready, or filter it if too few samples have rewards."""
        if group.missing():
            if not group.in_flight():  # the missing samples wait for the next lease
                group.end_lease()
            self.save(tx, group)
            return
        group.end_lease()
        self.prompts.observe(tx, group)
        if len(group.having("waiting")) < self.num_needed:
            self.close(tx, group, "filtered")
            self.return_prompt(tx, group, failures=group.failures + 1)
            return
        group.phase = "ready"
        self.save(tx, group)
        self.set_aside_uninformative(tx)

    def set_aside_uninformative(self, tx: Transaction) -> None:
        """Close ready groups of equal rewards, oldest first, up to the limit per draw.

        The prompts of these groups are not returned, because the groups count as generated.
        """
        while self.index.uninformative and tx.state.num_set_aside < self._max_set_aside:
            tx.state.num_set_aside += 1
            self.close(tx, tx.groups.require(self.index.uninformative[0].group_id), "uninformative")

    def close(self, tx: Transaction, group: Group, state: str) -> None:
        """Move the group's waiting and drawn samples to their final state; trained samples stay trained."""
        for source in ("waiting", "drawn"):
            self.move(tx, group, source, state)
        group.phase = "closed"
        self.save(tx, group)

    def move(self, tx: Transaction, group: Group, source: str, target: str) -> None:
        moved = group.having(source)
        for index in moved:
            group.sample_states[index] = target
        tx.state.ledger.move(len(moved), source, target)

    def hold(self, tx: Transaction, group: Group) -> None:
        """Reserve the group for one more unfinished step; other draws cannot take it."""
        self.move(tx, group, "waiting", "drawn")
        group.phase = "drawn"
        group.pending += 1
        self.save(tx, group)

    def release(self, tx: Transaction, group: Group) -> None:
        """Release the group from a step. After its last step, make it ready for further use, or close it."""
        group.pending -= 1
        if group.pending == 0:
            self.move(tx, group, "drawn", "waiting")
            group.phase = "ready" if group.usable() and group.uses < self.index.max_uses else "closed"
        self.save(tx, group)

    def return_prompt(self, tx: Transaction, group: Group, *, failures: int) -> None:
        """Queue the prompt of a dropped or filtered group, or skip it for the epoch after `MAX_ATTEMPTS` failures."""
        if failures >= MAX_ATTEMPTS:
            tx.state.ledger.prompts_given_up += 1
            return
        self.prompts.give_back(tx, group.prompt_id, failures)

    def drop_ready(self, tx: Transaction, group: Group, state: str) -> None:
        """Close a ready group, and return its prompt if the group was never used."""
        is_unused = bool(group.having("waiting"))
        self.close(tx, group, state)
        if is_unused:
            self.return_prompt(tx, group, failures=group.failures)

    def filter_too_long(self, tx: Transaction, group: Group, max_tokens: int) -> bool:
        """Filter the samples of a ready group that are longer than `max_tokens`; return whether there are any.

        If too few samples remain, or the group was used before, drop the whole group.
        """
        too_long = [index for index in group.usable() if group.lengths[index] > max_tokens]
        if not too_long:
            return False
        num_waiting = len(group.having("waiting"))
        if group.uses or len(group.usable()) - len(too_long) < self.num_needed:
            self.drop_ready(tx, group, "filtered")
        else:
            num_waiting = len(too_long)
            for index in too_long:
                group.sample_states[index] = "filtered"
            tx.state.ledger.move(num_waiting, "waiting", "filtered")
            self.save(tx, group)
        tx.state.ledger.filtered_too_long += num_waiting
        return True

    def evict(self, tx: Transaction) -> None:
        """Evict groups while the store is above its capacity and a group is evictable.

        Recorded samples (`buffer.source`) stay until they are used up.
        """
        excess = tx.state.num_records - self.config.capacity_trajectories
        while excess > 0:
            first = self.index.next_evictable
            is_kept = self.config.source is not None or len(self.index.ready) <= self._num_kept
            if first is None or (first.kind == ELIGIBLE and is_kept):
                return
            group = tx.groups.require(first.group_id)
            excess -= sum(record != NO_RECORD for record in group.records)
            self._evict(tx, group)

    def _evict(self, tx: Transaction, group: Group) -> None:
        self.move(tx, group, "waiting", "evicted_unused")
        group.phase = "closed"
        for record in group.records:
            if record != NO_RECORD:
                tx.records.delete(record)  # has an effect only if the block is stored under this record
                tx.scores.delete(record)
                tx.state.num_records -= 1
        group.records = [NO_RECORD] * len(group.records)
        self.save(tx, group)

    def checked_counts(self, tx: Transaction) -> dict[str, int]:
        """Return all counts by name, the failed samples by kind, the quarantined rows, and 'gap' (a bug if above 0)."""
        ledger = tx.state.ledger
        quarantined = sum(ledger.quarantined_by_reason.values())
        gap = ledger.gap + self._live_gap(tx)
        return {**ledger.counts(), **ledger.failed_by_kind(), "quarantined": quarantined, "gap": gap}

    def _live_gap(self, tx: Transaction) -> int:
        """Return the difference between the counters and the samples of unfinished groups.

        Counting takes about 20 microseconds per group. The number of groups is bounded: admission limits open groups,
        ready groups count only below `MAX_RECOUNTED`, and drawn groups belong to current steps or steps to be redone.
        """
        ledger = tx.state.ledger
        found: Counter[str] = Counter()
        checked = ["in_flight", "drawn"]
        group_ids = {*self.index.open}
        group_ids |= {g for step in tx.state.pending_draws for g in tx.draws.require(step).group_ids}
        if len(self.index.ready) < MAX_RECOUNTED:
            checked.append("waiting")
            group_ids |= {group_id for _, group_id in self.index.ready}
        for group_id in group_ids:
            group = tx.groups.require(group_id)
            found.update(group.sample_states)
            found["in_flight"] += len(group.in_flight())
        return sum(abs(found[name] - getattr(ledger, name)) for name in checked)


def max_set_aside(refill: float, groups_per_step: int) -> int:
    """Return the number of groups of equal rewards that may be set aside per step: `refill` * G, rounded up."""
    return ceil(refill * groups_per_step - _ROUNDING)
