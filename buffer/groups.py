"""The life of a group, and the ledger entries of each change.

    open ----> ready <---> drawn
      |          |           |
      +----------+-----------+---> closed

    open    samples are missing: in flight under a lease, or waiting to be leased again
    ready   all samples are committed or given up, enough have rewards, and a step may take it
    drawn   recorded for a step that is not finished
    closed  used up, dropped, filtered, set aside or evicted; its row stays as long as its records

A group that may be used again is ready again after its step. Methods change the row, the index and the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

import msgspec

from buffer import samplers
from buffer.config import BufferConfig
from buffer.index import ELIGIBLE, GroupIndex
from buffer.prompts import Prompts
from buffer.tables import NO_RECORD, Group
from buffer.transaction import Transaction

MAX_ATTEMPTS = 5
"""A group that was lost or filtered so often is given up and counted: its prompt may crash actors."""
_ROUNDING = 1e-9
"""1.1 * 10 is above 11 in floating point."""
MAX_RECOUNTED = 256
"""With more ready groups the gap trusts the count of waiting samples; `leeway buffer verify` never does."""


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
