"""The life of a group with the ledger entries of each change, and the choice of its prompt.

    open ----> ready <---> drawn
      |          |           |
      +----------+-----------+---> closed

    open    samples are missing: in flight under a lease, or waiting to be leased again
    ready   all samples are committed or given up, enough have rewards, and a step may take it
    drawn   recorded for a step that is not finished
    closed  used up, dropped, filtered, set aside or evicted; its row stays as long as its records

A group that may be used again is ready again after its step. Methods change the row, the index and the ledger.

The prompt of the next group is one that came back, else the next of the data's order. `prompts_of` replaces these rules
by those of `planning.prompts` if `buffer.prompt_law` or `buffer.dispatch` asks for another choice, and
`Prompts.predicting` when an actor asks for lengths (`actors.admission`).
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

from buffer import samplers
from buffer.config import BufferConfig
from buffer.index import ELIGIBLE, GroupIndex
from buffer.protocol import Expect, LeaseRequest, VisitsReply
from buffer.schema import VISITS
from buffer.tables import NO_RECORD, Group, ReturnedPrompt
from buffer.transaction import Transaction
from common.run import RunFacts

MAX_ATTEMPTS = 5
"""A group that was lost or filtered so often is given up and counted: its prompt may crash actors."""
_ROUNDING = 1e-9
"""1.1 * 10 is above 11 in floating point."""
MAX_RECOUNTED = 256
"""With more ready groups the gap trusts the count of waiting samples; `leeway buffer verify` never does."""
CHOSEN = "planning.prompts:ChosenPrompts"
"""Draws prompts by chance, dispatches by length and predicts lengths."""
MOST_LOOKED_AT = 32
"""Prompts that came back and groups without a lease that are considered for each lease."""
_NEWEST = 0.1
"""Weight of the newest in running means."""


class NextPrompt(NamedTuple):
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


class StoredSample(msgspec.Struct, frozen=True, gc=False):
    """What a group's row keeps of a sample that is stored."""

    sample_index: int
    reward: float | None
    num_tokens: int
    num_completion_tokens: int
    is_cut: bool
    oldest: tuple[int, int]
    """(incarnation, version) of the first token: versions only grow within a trajectory."""


class Groups:
    """The changes of state that leases, commits and draws share."""

    def __init__(
        self, config: BufferConfig, group_size: int, groups_per_step: int, prompts: Prompts, num_kept: int = 0
    ) -> None:
        """Start without an index; eviction leaves `num_kept` ready groups alone, so that the learner has some."""
        self.config = config
        self._most_set_aside = most_set_aside(config.refill_uninformative, groups_per_step)
        self.prompts = prompts
        self.sampler, weight = samplers.build(config)
        self.index = GroupIndex(config, weight)
        self.num_needed = min(2, group_size)
        """Samples with rewards that a group must have: a comparison needs two."""
        self._num_kept = num_kept

    def prepare(self, tx: Transaction) -> None:
        self.index.load(tx)
        self.prompts.load(tx)

    def save(self, tx: Transaction, group: Group) -> None:
        """Write the row; or, once nothing of the group is stored, fold it into the retired counts."""
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
        """A sample is complete, or is made from its beginning; `save` writes the row."""
        del group.partials[index]
        tx.partials.delete(group.group_id, index)

    def fail(self, tx: Transaction, group: Group, indices: list[int], reason: str) -> None:
        for index in indices:
            group.sample_states[index] = "failed"
        group.failed += len(indices)
        tx.state.ledger.fail(len(indices), reason)

    def lose_lease(self, tx: Transaction, group: Group, reason: str) -> None:
        """The lease expired or was fenced: its samples failed, and are issued again while attempts remain."""
        lost = group.in_flight()
        group.end_lease()
        group.losses += 1
        if group.losses >= MAX_ATTEMPTS:
            self.fail(tx, group, lost, reason)
        else:
            group.failed += len(lost)
            tx.state.ledger.fail(len(lost), reason)
        self.settle(tx, group)

    def commit(self, tx: Transaction, group: Group, samples: Sequence[StoredSample], records: Sequence[int]) -> None:
        """Enter samples that are stored under these records into their group's row; `settle` writes it.

        A sample without a reward counts as filtered.
        """
        for sample, record in zip(samples, records, strict=True):
            index = sample.sample_index
            group.sample_states[index] = "filtered" if sample.reward is None else "waiting"
            group.records[index], group.rewards[index] = record, sample.reward
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

    def settle(self, tx: Transaction, group: Group) -> None:
        """After samples were committed or failed: is the group complete, and is it good for training?"""
        if group.missing():
            if not group.in_flight():  # the others wait to be leased again
                group.end_lease()
            self.save(tx, group)
            return
        group.end_lease()
        self.prompts.saw(tx, group)
        if len(group.having("waiting")) < self.num_needed:
            self.close(tx, group, "filtered")
            self.return_prompt(tx, group, failures=group.failures + 1)
            return
        group.phase = "ready"
        self.save(tx, group)
        self.set_aside_uninformative(tx)

    def set_aside_uninformative(self, tx: Transaction) -> None:
        """Close ready groups of equal rewards, the oldest first, as many as may leave before the next draw.

        Their prompts are not returned: they count as generated.
        """
        while self.index.uninformative and tx.state.num_set_aside < self._most_set_aside:
            tx.state.num_set_aside += 1
            self.close(tx, tx.groups.require(self.index.uninformative[0].group_id), "uninformative")

    def close(self, tx: Transaction, group: Group, state: str) -> None:
        """Move the group's waiting or drawn samples to their last state; those trained on stay trained."""
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
        """One more step that is not finished names the group: no other may take it."""
        self.move(tx, group, "waiting", "drawn")
        group.phase = "drawn"
        group.pending += 1
        self.save(tx, group)

    def release(self, tx: Transaction, group: Group) -> None:
        """One such step is finished or forgotten. After the last the group may be used again, or is closed."""
        group.pending -= 1
        if group.pending == 0:
            self.move(tx, group, "drawn", "waiting")
            group.phase = "ready" if group.usable() and group.uses < self.index.max_uses else "closed"
        self.save(tx, group)

    def return_prompt(self, tx: Transaction, group: Group, *, failures: int) -> None:
        """Lease the prompt of a dropped or filtered group again, unless it never yields a group."""
        if failures >= MAX_ATTEMPTS:
            tx.state.ledger.prompts_given_up += 1
            return
        self.prompts.give_back(tx, group.prompt_id, failures)

    def drop_ready(self, tx: Transaction, group: Group, state: str) -> None:
        """Take a ready group out, whole, and lease its prompt again where it was never used."""
        is_unused = bool(group.having("waiting"))
        self.close(tx, group, state)
        if is_unused:
            self.return_prompt(tx, group, failures=group.failures)

    def leave_out_long(self, tx: Transaction, group: Group, max_tokens: int) -> bool:
        """Filter the samples of a ready group that are longer than this; False: there is none.

        If too few are left, or the group was used before, all leave.
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
        """Remove groups while the store is above its capacity and there is one that may go.

        Recorded samples (`buffer.source`) stay until they are used up.
        """
        excess = tx.state.num_records - self.config.capacity_trajectories
        while excess > 0:
            first = self.index.first_to_go
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
                tx.records.delete(record)  # where its block lies; of the others nothing lies there
                tx.scores.delete(record)
                tx.state.num_records -= 1
        group.records = [NO_RECORD] * len(group.records)
        self.save(tx, group)

    def checked_counts(self, tx: Transaction) -> dict[str, int]:
        """Return every count by its name, the failed by kind, the quarantined rows, and 'gap': 0, or a bug."""
        ledger = tx.state.ledger
        quarantined = sum(ledger.quarantined_by_reason.values())
        gap = ledger.gap + self._live_gap(tx)
        return {**ledger.counts(), **ledger.failed_by_kind(), "quarantined": quarantined, "gap": gap}

    def _live_gap(self, tx: Transaction) -> int:
        """Return by how many samples the counters differ from the groups that are not finished.

        It takes some 20 microseconds a group. Admission bounds open groups, and ready ones are looked at only while
        they are few. Drawn ones are those of the steps at hand, or to be redone.
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


def most_set_aside(refill: float, groups_per_step: int) -> int:
    """How many groups of equal rewards may be set aside for a step of so many: their multiple, rounded up."""
    return ceil(refill * groups_per_step - _ROUNDING)
