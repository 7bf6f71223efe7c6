"""The life of a group, and the ledger entries of each change.

    open ----> ready <---> drawn
      |          |           |
      +----------+-----------+---> closed

    open    samples are missing: in flight under a lease, or waiting to be leased again
    ready   all samples are committed or given up, enough have rewards, and a step may take it
    drawn   recorded for a step that is not finished
    closed  used up, dropped, filtered or evicted; its row stays as long as its records

A group that may be used again is ready again after its step. Every function changes the group's row,
the indexes and the ledger in the given transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from buffer import catalogue
from buffer.catalogue import sortable_float
from buffer.config import BufferConfig
from buffer.eligible import EligibleIndex, clear
from buffer.tables import NO_RECORD, Group, ReturnedPrompt
from buffer.transaction import Transaction

CLOSED, ELIGIBLE = 0, 1
_NO_PLACE = -1
_VERSIONS = 2**40
"""More versions than an incarnation has."""
_BYTES_PER_TOKEN = 8
"""A token id and a log-probability."""
_BYTES_PER_RECORD = 512
"""Roughly what a record, its keys and its share of the group's row take beside the tokens."""
MAX_RECOUNTED = 256
"""With more ready groups `live_gap` takes the count of waiting samples as it is; `leeway buffer verify` never does."""


class Committed(NamedTuple):
    """A sample that is on disk, as far as its group must know it."""

    record: int
    reward: float | None
    """None: no reward function applied, so the sample is counted as filtered."""
    num_tokens: int
    """Prompt and completion."""
    num_completion_tokens: int
    oldest: tuple[int, int]
    """(incarnation, version) of its first token."""


class Groups:
    """The changes of state that leases, commits and draws share."""

    def __init__(self, config: BufferConfig, group_size: int, num_kept: int = 0) -> None:
        """Compose the indexes and the eviction, which leaves `num_kept` ready groups alone."""
        self.config = config
        self.num_needed = min(2, group_size)
        """Samples with rewards that a group must have: a comparison needs two."""
        self.max_uses = float("inf") if config.max_uses == "unlimited" else float(config.max_uses)
        self.index = EligibleIndex(config)
        self.order = EvictionOrder(config)
        self._eviction = Eviction(config, self.order, num_kept)

    def prepare(self, tx: Transaction) -> None:
        """Make the indexes fit the configuration; belongs before the first change of a transaction."""
        if tx.state.indexed_for != self.index.settings:
            if tx.state.indexed_for:
                self.rebuild(tx, BufferConfig.model_validate_json(tx.state.indexed_for))
            tx.state.indexed_for = self.index.settings

    def save(self, tx: Transaction, group: Group) -> None:
        """Write the row; or, once nothing of the group is stored, fold it into the retired counts."""
        self.order.place(tx, group)
        if group.phase != "closed" or any(record != NO_RECORD for record in group.records):
            tx.groups.put(group, group.group_id)
            return
        for name, count in group.tallies().items():
            if count:
                tx.state.retired[name] = tx.state.retired.get(name, 0) + count
        tx.groups.delete(group.group_id)

    def end_lease(self, tx: Transaction, group: Group) -> None:
        """Close the group's lease: its holder is late from now on."""
        tx.leases.delete(group.lease_id)
        group.lease_id = 0

    def fail(self, tx: Transaction, group: Group, indices: list[int], reason: str) -> None:
        """Give up samples in flight for good."""
        for index in indices:
            group.sample_states[index] = "failed"
        group.failed += len(indices)
        tx.state.ledger.fail(len(indices), reason)

    def lose_lease(self, tx: Transaction, group: Group, reason: str) -> None:
        """The lease expired or was fenced: its samples failed, and are issued again while attempts remain."""
        missing = group.missing()
        self.end_lease(tx, group)
        if group.attempt >= self.config.max_attempts:
            self.fail(tx, group, missing, reason)
        else:
            group.failed += len(missing)
            tx.state.ledger.fail(len(missing), reason)
            tx.unleased_groups.put(b"", group.group_id)
        self.settle(tx, group)

    def commit(self, tx: Transaction, group: Group, index: int, sample: Committed) -> None:
        """Enter a stored sample into its group's row; `settle` writes the row."""
        state = "filtered" if sample.reward is None else "waiting"
        group.sample_states[index], group.records[index] = state, sample.record
        group.rewards[index] = sample.reward
        group.lengths[index], group.completion_lengths[index] = sample.num_tokens, sample.num_completion_tokens
        tx.state.ledger.commit(state)
        tx.state.fidelity.generated.add(sample.num_completion_tokens)
        if sample.reward is not None:
            group.oldest = sample.oldest if group.oldest is None else min(group.oldest, sample.oldest)

    def settle(self, tx: Transaction, group: Group) -> None:
        """After samples were committed or failed: is the group complete, and is it good for training?"""
        if group.missing():
            self.save(tx, group)
            return
        if group.lease_id:
            self.end_lease(tx, group)
        self.complete(tx, group)
        if len(group.having("waiting")) < self.num_needed:
            self.close(tx, group, "filtered")
            self.return_prompt(tx, group, failures=group.failures + 1)
            return
        group.phase = "ready"
        self.index.add(tx, group)
        self.save(tx, group)

    def complete(self, tx: Transaction, group: Group) -> None:
        """No further sample of the group will come: it can be found, if anything of it is stored."""
        tx.open_groups.delete(group.group_id)
        if any(record != NO_RECORD for record in group.records):
            catalogue.add(tx, group)

    def close(self, tx: Transaction, group: Group, state: str) -> None:
        """Move the group's waiting or drawn samples to their last state; those trained on stay trained."""
        for source in ("waiting", "drawn"):
            self.move(tx, group, source, state)
        group.phase = "closed"
        self.save(tx, group)

    def move(self, tx: Transaction, group: Group, source: str, target: str) -> None:
        """Move the group's samples from one state to another."""
        moved = group.having(source)
        for index in moved:
            group.sample_states[index] = target
        tx.state.ledger.move(len(moved), source, target)

    def hold(self, tx: Transaction, group: Group) -> None:
        """One more step that is not finished names the group: no other may take it."""
        if group.phase == "ready":
            self.index.remove(tx, group)
        self.move(tx, group, "waiting", "drawn")
        group.phase = "drawn"
        group.pending += 1
        self.save(tx, group)

    def release(self, tx: Transaction, group: Group) -> None:
        """One such step is finished or forgotten. After the last the group may be used again, or is closed."""
        group.pending -= 1
        if group.pending == 0:
            self.move(tx, group, "drawn", "waiting")
            if group.usable() and group.uses < self.max_uses:
                group.phase = "ready"
                self.index.add(tx, group)
            else:
                group.phase = "closed"
        self.save(tx, group)

    def return_prompt(self, tx: Transaction, group: Group, *, failures: int) -> None:
        """Lease the prompt of a dropped or filtered group again, unless it never yields a group."""
        if failures >= self.config.max_attempts:
            tx.state.ledger.prompts_given_up += 1
            return
        tx.returned_prompts.put(ReturnedPrompt(group.prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def drop_ready(self, tx: Transaction, group: Group, state: str) -> None:
        """Take a ready group out, whole, and lease its prompt again where it was never used."""
        self.index.remove(tx, group)
        is_unused = bool(group.having("waiting"))
        self.close(tx, group, state)
        if is_unused:
            self.return_prompt(tx, group, failures=group.failures)

    def leave_out_long(self, tx: Transaction, group: Group, max_tokens: int) -> bool:
        """Filter the samples of a ready group that are longer than this; false where there is none.

        Too few that are left, or those of a group that was used before, leave with them.
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
        """Remove groups while the store is above its capacity."""
        self._eviction.run(tx, self._evict)

    def _evict(self, tx: Transaction, group: Group) -> None:
        if group.phase == "ready":
            self.index.remove(tx, group)
            self.move(tx, group, "waiting", "evicted_unused")
            group.phase = "closed"
        catalogue.remove(tx, group)
        for record in group.records:
            if record != NO_RECORD:
                tx.records.delete(record)
                tx.scores.delete(record)
        group.records = [NO_RECORD] * len(group.records)
        self.save(tx, group)

    def rebuild(self, tx: Transaction, last: BufferConfig) -> None:
        """Build the indexes of groups that the configuration has changed. Reads all rows, and writes few.

        Args:
            tx: the transaction.
            last: what the indexes were built for.
        """
        is_ranked_anew = last.eviction != self.config.eviction
        self.index.clear(tx)
        if is_ranked_anew:
            clear(tx.eviction_order)
        moved: list[int] = []
        for (group_id,), group in tx.groups.all_items():
            if group.phase == "ready":
                self.index.weigh(tx, group)
            if is_ranked_anew and group.rank_class >= 0:
                tx.eviction_order.put(b"", group.rank_class, self.order.rank(group), group_id)
            if self._is_used_up(group) or self.order.class_of(group) not in (group.rank_class, -1):
                moved.append(group_id)
        for group_id in moved:
            group = tx.groups.require(group_id)
            if self._is_used_up(group):
                self.index.remove(tx, group)
                group.phase = "closed"
            self.save(tx, group)

    def _is_used_up(self, group: Group) -> bool:
        return group.phase == "ready" and group.uses >= self.max_uses


class EvictionOrder:
    """Keeps the order in which groups would go.

    Only complete groups that no recorded draw needs have a place: closed ones first, and under replay then
    those that could be drawn again. Within either class the knob `eviction` ranks them.

    A group that is drawn keeps its place until eviction reaches it, so that a draw need not touch the
    order: most are back before that.
    """

    def __init__(self, config: BufferConfig) -> None:
        self._by_reward = config.eviction == "lowest_reward"
        self._replays = config.replays

    def place(self, tx: Transaction, group: Group) -> None:
        """Give the group the place that it now has; its row must be written after that."""
        wanted = self.class_of(group)
        if wanted == group.rank_class or (wanted == _NO_PLACE and _is_stored(group)):
            return
        self.remove(tx, group)
        if wanted != _NO_PLACE:
            tx.eviction_order.put(b"", wanted, self.rank(group), group.group_id)
        group.rank_class = wanted

    def remove(self, tx: Transaction, group: Group) -> None:
        """Take the group out of the order; its row must be written after that."""
        if group.rank_class != _NO_PLACE:
            tx.eviction_order.delete(group.rank_class, self.rank(group), group.group_id)
            group.rank_class = _NO_PLACE

    def class_of(self, group: Group) -> int:
        """CLOSED, ELIGIBLE, or -1 for a group that must stay, or has nothing stored."""
        if group.held or group.phase in ("open", "drawn") or not _is_stored(group):
            return _NO_PLACE
        if group.phase == "closed":
            return CLOSED
        return ELIGIBLE if self._replays else _NO_PLACE

    def rank(self, group: Group) -> int:
        """Its place within the class; fixed once the group is complete."""
        if self._by_reward:
            reward = group.mean_reward
            return 0 if reward is None else sortable_float(reward)
        incarnation, version = group.oldest or (0, 0)
        return incarnation * _VERSIONS + version


class Eviction:
    """Keeps the store within its capacity."""

    def __init__(self, config: BufferConfig, order: EvictionOrder, num_kept: int) -> None:
        self._max_records = config.capacity_trajectories
        self._max_bytes = config.capacity_gib * 2**30
        self._order = order
        self._num_kept = num_kept
        """Eligible groups that are never evicted, so that the learner does not run dry."""

    def run(self, tx: Transaction, evict: Callable[[Transaction, Group], None]) -> None:
        """Evict while the store is above a capacity and there is a group that may go."""
        excess = tx.records.count - self._max_records
        excess_bytes = tx.live_bytes - self._max_bytes if self._max_bytes else 0.0
        while excess > 0 or excess_bytes > 0:
            first = next(tx.eviction_order.all_keys(), None)
            if first is None or (first[0] == ELIGIBLE and tx.ready_groups.count <= self._num_kept):
                return
            group = tx.groups.require(first[2])
            if self._order.class_of(group) != first[0]:
                self._order.remove(tx, group)
                tx.groups.put(group, group.group_id)
                continue
            # Pages are given back one by one, so what a group frees is estimated; the next run corrects it.
            excess_bytes -= _BYTES_PER_TOKEN * sum(group.lengths)
            num = sum(record != NO_RECORD for record in group.records)
            excess, excess_bytes = excess - num, excess_bytes - _BYTES_PER_RECORD * num
            evict(tx, group)


def _is_stored(group: Group) -> bool:
    return any(record != NO_RECORD for record in group.records)


def live_gap(tx: Transaction) -> int:
    """By how many samples the counters differ from the groups that are not finished yet: 0, or a bug.

    Cheap enough for every status request: admission bounds the number of open groups, and ready ones, of
    which replay keeps any number, are looked at only while there are few. Drawn ones are those of the steps
    at hand; after a restart of the learner, of every step that is to be redone, which under unbounded lag
    are all since its checkpoint.
    """
    ledger = tx.state.ledger
    found: Counter[str] = Counter()
    checked = ["in_flight", "drawn"]
    group_ids = {group_id for (group_id,) in tx.open_groups.all_keys()}
    group_ids |= {g for step in tx.state.pending_draws for g in tx.draws.require(step).group_ids}
    if tx.ready_groups.count < MAX_RECOUNTED:
        checked.append("waiting")
        group_ids |= {group_id for _, group_id in tx.ready_groups.all_keys()}
    for group_id in group_ids:
        group = tx.groups.require(group_id)
        found.update(group.sample_states)
        if group.lease_id:
            found["in_flight"] += group.sample_states.count("missing")
    return sum(abs(found[name] - getattr(ledger, name)) for name in checked)


def checked_counts(tx: Transaction) -> dict[str, int]:
    """Every count by its name, how many rows are quarantined, and 'gap': 0, or a bug."""
    ledger = tx.state.ledger
    quarantined = sum(ledger.quarantined_by_reason.values())
    return {**ledger.counts(), "quarantined": quarantined, "gap": ledger.gap + live_gap(tx)}
