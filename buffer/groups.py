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

from typing import NamedTuple

from buffer import catalogue
from buffer.config import BufferConfig
from buffer.eligible import EligibleIndex, clear
from buffer.eviction import Eviction, EvictionOrder
from buffer.tables import NO_RECORD, Group, ReturnedPrompt
from buffer.transaction import Transaction


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
        """Args:
        config: of the buffer.
        group_size: K.
        num_kept: how many ready groups eviction leaves alone.
        """
        self.config = config
        self.num_needed = min(2, group_size)
        """Samples with rewards that a group must have: a comparison needs two."""
        self.max_uses = float("inf") if config.max_uses == "unlimited" else float(config.max_uses)
        self.index = EligibleIndex(config)
        self.order = EvictionOrder(config)
        self._eviction = Eviction(config, self.order, num_kept)

    def prepare(self, tx: Transaction) -> None:
        """Make the indexes fit the configuration; belongs before the first change of a transaction."""
        self.index.prepare(tx, self)

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
        """Close the group's lease; whoever holds it is late from now on."""
        tx.leases.delete(group.lease_id)
        group.lease_id = 0

    def fail(self, tx: Transaction, group: Group, indices: list[int], reason: str) -> None:
        """Give up samples in flight for good."""
        for index in indices:
            group.fates[index] = "failed"
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
        fate = "filtered" if sample.reward is None else "waiting"
        group.fates[index], group.records[index] = fate, sample.record
        group.rewards[index] = sample.reward
        group.lengths[index], group.completion_lengths[index] = sample.num_tokens, sample.num_completion_tokens
        tx.state.ledger.commit(fate)
        tx.state.fidelity.generated.add(sample.num_completion_tokens, self.config.fidelity_memory)
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

    def close(self, tx: Transaction, group: Group, fate: str) -> None:
        """Move the group's waiting or drawn samples to their last state; those trained on stay trained."""
        for source in ("waiting", "drawn"):
            self.move(tx, group, source, fate)
        group.phase = "closed"
        self.save(tx, group)

    def move(self, tx: Transaction, group: Group, source: str, target: str) -> None:
        """Move the group's samples from one fate to another."""
        moved = group.having(source)
        for index in moved:
            group.fates[index] = target
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

    def drop_ready(self, tx: Transaction, group: Group, fate: str) -> None:
        """Take a ready group out, whole, and lease its prompt again where it was never used."""
        self.index.remove(tx, group)
        is_unused = bool(group.having("waiting"))
        self.close(tx, group, fate)
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
                group.fates[index] = "filtered"
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
