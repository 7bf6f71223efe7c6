"""The life of a group: open -> ready -> drawn -> closed, and the ledger entries of each change.

    open    samples are missing: in flight under a lease, or waiting to be leased again
    ready   all samples are committed or given up, and enough have rewards
    drawn   recorded for a step that is not finished
    closed  trained, dropped, filtered or evicted; its row stays as long as its records

Every function changes the group's row, the indexes and the ledger in the given transaction.
"""

from __future__ import annotations

from buffer.config import BufferConfig
from buffer.store import Transaction
from buffer.tables import NO_RECORD, Group, ReturnedPrompt


class Groups:
    """The changes of state that leases, commits and draws share."""

    def __init__(self, config: BufferConfig, group_size: int) -> None:
        self.config = config
        self.num_needed = min(2, group_size)
        """Samples with rewards that a group must have: a comparison needs two."""

    def save(self, tx: Transaction, group: Group) -> None:
        """Write the row; or, once nothing of the group is stored, fold it into the retired counts."""
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

    def settle(self, tx: Transaction, group: Group) -> None:
        """After samples were committed or failed: is the group complete, and is it good for training?"""
        if group.missing():
            self.save(tx, group)
            return
        if group.lease_id:
            self.end_lease(tx, group)
        tx.open_groups.delete(group.group_id)
        if len(group.having("waiting")) < self.num_needed:
            self.close(tx, group, "filtered")
            self.return_prompt(tx, group, failures=group.failures + 1)
            return
        group.phase = "ready"
        tx.ready_groups.put(b"", group.oldest_effective(tx.state), group.group_id)
        self.save(tx, group)

    def close(self, tx: Transaction, group: Group, fate: str, *, evictable: bool = True) -> None:
        """Move the group's waiting or drawn samples to their last state."""
        for source in ("waiting", "drawn"):
            moved = group.having(source)
            for index in moved:
                group.fates[index] = fate
            tx.state.ledger.move(len(moved), source, fate)
        group.phase = "closed"
        if evictable:
            self.make_evictable(tx, group)
        self.save(tx, group)

    def make_evictable(self, tx: Transaction, group: Group) -> None:
        """Nothing will ask for the group's records again."""
        for record in group.records:
            if record != NO_RECORD:
                tx.evictable.put(group.group_id, record)

    def return_prompt(self, tx: Transaction, group: Group, *, failures: int) -> None:
        """Lease the prompt of a dropped or filtered group again, unless it never yields a group."""
        if failures >= self.config.max_attempts:
            tx.state.ledger.prompts_given_up += 1
            return
        tx.returned_prompts.put(ReturnedPrompt(group.prompt_id, failures), tx.state.next_returned)
        tx.state.next_returned += 1

    def drop_ready(self, tx: Transaction, group: Group, fate: str) -> None:
        """Take a ready group out, whole, and lease its prompt again."""
        tx.ready_groups.delete(group.oldest_effective(tx.state), group.group_id)
        self.close(tx, group, fate)
        self.return_prompt(tx, group, failures=group.failures)

    def evict(self, tx: Transaction) -> None:
        """Remove the oldest evictable records above the capacity."""
        excess = tx.records.count - self.config.capacity_trajectories
        if excess <= 0:
            return
        oldest = [
            (record, group_id)
            for ((record,), group_id), _ in zip(tx.evictable.all_items(), range(excess), strict=False)
        ]
        for record, group_id in oldest:
            tx.evictable.delete(record)
            tx.records.delete(record)
            tx.scores.delete(record)
            group = tx.groups.require(group_id)
            group.records = [NO_RECORD if each == record else each for each in group.records]
            self.save(tx, group)
