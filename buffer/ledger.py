"""Where every issued sample is.

    issued    = in_flight + committed + failed
    committed = waiting + drawn + trained + dropped_stale + filtered + evicted_unused

The states of the second line are disjoint. A sample is trained from its first finished step on;
how often it was used is counted apart. Outside of both lines: duplicates, late commits, rows of
fenced epochs, and quarantined rows that match no open lease.

The counters live in the state record and change in the transaction of the event. `recount` derives
the same figures from the tables alone, so that a counter that drifts is noticed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from buffer.transaction import Transaction

COMMITTED_STATES = ("waiting", "drawn", "trained", "dropped_stale", "filtered", "evicted_unused")
"""What can become of a committed sample."""

LEDGER_METRICS = {
    "buffer/issued": "issued",
    "buffer/in_flight": "in_flight",
    "buffer/committed": "committed",
    "buffer/failed": "failed",
    "buffer/waiting": "waiting",
    "buffer/trained": "trained",
    "buffer/dropped_stale": "dropped_stale",
    "buffer/filtered": "filtered",
    "buffer/filtered_too_long": "filtered_too_long",
    "buffer/evicted_unused": "evicted_unused",
    "buffer/quarantined": "quarantined",
    "buffer/duplicate": "duplicates",
    "buffer/late": "late",
    "buffer/ledger_gap": "gap",
}
"""What a step reports of a ledger: metric -> name of the count."""

MAX_REASONS = 64
MAX_REASON_LENGTH = 96


class Ledger(msgspec.Struct):
    """Counts of samples; every field is a number of samples unless it says otherwise."""

    issued: int = 0
    in_flight: int = 0
    committed: int = 0
    failed: int = 0
    waiting: int = 0
    drawn: int = 0
    trained: int = 0
    dropped_stale: int = 0
    filtered: int = 0
    evicted_unused: int = 0
    duplicates: int = 0
    late: int = 0
    fenced: int = 0
    quarantined_outside: int = 0
    """Rows or whole messages that match no open lease."""
    uses: int = 0
    """How often a sample entered a finished step."""
    redone_uses: int = 0
    """Uses of samples that an earlier incarnation had trained on already; uses - redone_uses are effective."""
    filtered_too_long: int = 0
    """Of the filtered: longer than the longest sample that the run now allows, or left alone in their group by it."""
    prompts_given_up: int = 0
    """Prompts that were filtered so often that this epoch of the data goes on without them."""
    failed_by_reason: dict[str, int] = {}
    quarantined_by_reason: dict[str, int] = {}

    @property
    def gap(self) -> int:
        """By how many samples the identities are violated: 0, or a bug."""
        committed = sum(getattr(self, state) for state in COMMITTED_STATES)
        gap = abs(self.issued - self.in_flight - self.committed - self.failed) + abs(self.committed - committed)
        negative = sum(-count for count in self.counts().values() if count < 0)
        return gap + abs(self.failed - sum(self.failed_by_reason.values())) + negative

    def counts(self) -> dict[str, int]:
        """Every count by its name."""
        return {name: value for name in self.__struct_fields__ if isinstance(value := getattr(self, name), int)}

    def issue(self, count: int) -> None:
        """A lease issues samples."""
        self.issued += count
        self.in_flight += count

    def fail(self, count: int, reason: str) -> None:
        """Samples in flight will not come."""
        if count:
            self.in_flight -= count
            self.failed += count
            _count(self.failed_by_reason, reason, count)

    def commit(self, state: str) -> None:
        """A sample in flight is on disk."""
        self.in_flight -= 1
        self.committed += 1
        setattr(self, state, getattr(self, state) + 1)

    def move(self, count: int, source: str, target: str) -> None:
        """Committed samples change their state."""
        setattr(self, source, getattr(self, source) - count)
        setattr(self, target, getattr(self, target) + count)

    def quarantine(self, reason: str, *, matches_lease: bool) -> None:
        """A row, or a message that no row can be read from, is set aside."""
        _count(self.quarantined_by_reason, reason, 1)
        if matches_lease:
            self.fail(1, f"quarantined: {reason}")
        else:
            self.quarantined_outside += 1


MAX_RECOUNTED = 256
"""Above so many ready groups `live_gap` takes the count of waiting samples as it is; `recount` never does."""


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
        found.update(group.fates)
        if group.lease_id:
            found["in_flight"] += group.fates.count("missing")
    return sum(abs(found[name] - getattr(ledger, name)) for name in checked)


def checked_counts(tx: Transaction) -> dict[str, int]:
    """Every count by its name, how many rows are quarantined, and 'gap': 0, or a bug."""
    ledger = tx.state.ledger
    quarantined = sum(ledger.quarantined_by_reason.values())
    return {**ledger.counts(), "quarantined": quarantined, "gap": ledger.gap + live_gap(tx)}


def recount(tx: Transaction) -> dict[str, int]:
    """The two lines of the ledger, counted from the tables: every group, and what left them."""
    found: Counter[str] = Counter(tx.state.retired)
    for (group_id,) in tx.groups.all_keys():
        group = tx.groups.require(group_id)
        found["issued"] += group.issued
        found["failed"] += group.failed
        if group.lease_id:
            found["in_flight"] += group.fates.count("missing")
        found.update(fate for fate in group.fates if fate in COMMITTED_STATES)
    found["committed"] = sum(found[state] for state in COMMITTED_STATES)
    return {name: found[name] for name in ("issued", "in_flight", "committed", "failed", *COMMITTED_STATES)}


def _count(reasons: dict[str, int], reason: str, count: int) -> None:
    """Reasons come from outside, so their number and length are bounded."""
    reason = reason[:MAX_REASON_LENGTH]
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = "other"
    reasons[reason] = reasons.get(reason, 0) + count
