"""Where every issued sample is.

    issued    = in_flight + committed + failed + handed_on
    committed = waiting + drawn + trained + dropped_stale + filtered + uninformative + evicted_unused

A sample that is handed on is issued again with its tokens. The states of the second line are disjoint. A sample is
trained from its first finished step on. Outside of both lines: duplicates, late commits, rows of fenced epochs, and
quarantined rows that match no open lease.

The counters change in the transaction of the event. `leeway buffer verify` derives them from the tables.
"""

from __future__ import annotations

import msgspec

REWARD_FAILED, GENERATION_FAILED, QUARANTINED = "reward failed", "generation failed", "quarantined"
"""How the reason of a failed sample begins, unless its lease was lost."""
FAILED_KINDS = {
    "failed_reward": REWARD_FAILED,
    "failed_generation": GENERATION_FAILED,
    "failed_quarantined": QUARANTINED,
}
"""Name of the count -> how its reasons begin. All others are `failed_lease`."""

COMMITTED_STATES = ("waiting", "drawn", "trained", "dropped_stale", "filtered", "uninformative", "evicted_unused")
COUNTS = ("issued", "in_flight", "committed", "failed", "handed_on", *COMMITTED_STATES)

_SHOWN_AS = {"duplicates": "duplicate", "gap": "ledger_gap"}
LEDGER_METRICS = {f"buffer/{_SHOWN_AS.get(name, name)}": name for name in (
    "issued", "in_flight", "committed", "failed", "handed_on", *FAILED_KINDS, "failed_lease", "waiting", "drawn",
    "trained", "trained_uninformative", "dropped_stale", "filtered", "filtered_too_long", "uninformative",
    "evicted_unused", "quarantined", "duplicates", "late", "gap",
)}  # fmt: skip
"""Metrics of a step: metric -> name of the count."""

MAX_REASONS = 64
MAX_REASON_LENGTH = 96


class Ledger(msgspec.Struct):
    """Counts of samples; every field is a number of samples unless it says otherwise."""

    issued: int = 0
    in_flight: int = 0
    committed: int = 0
    failed: int = 0
    handed_on: int = 0
    """Left unfinished by their actor, with what it had of them."""
    waiting: int = 0
    drawn: int = 0
    trained: int = 0
    dropped_stale: int = 0
    filtered: int = 0
    uninformative: int = 0
    """Set aside with their group, whose rewards were all equal."""
    evicted_unused: int = 0
    duplicates: int = 0
    late: int = 0
    fenced: int = 0
    quarantined_outside: int = 0
    """Rows or messages that match no open lease."""
    uses: int = 0
    """How often a sample entered a finished step."""
    redone_uses: int = 0
    """Uses of samples that an earlier incarnation had trained on."""
    trained_uninformative: int = 0
    """In a group whose rewards were all equal."""
    filtered_too_long: int = 0
    """Longer than the run now allows, or left alone in their group by it."""
    prompts_given_up: int = 0
    """Prompts that were filtered too often in this epoch of the data."""
    failed_by_reason: dict[str, int] = {}
    quarantined_by_reason: dict[str, int] = {}

    @property
    def gap(self) -> int:
        """By how many samples the identities are violated: 0, or a bug."""
        committed = sum(getattr(self, state) for state in COMMITTED_STATES)
        gap = abs(self.issued - self.in_flight - self.committed - self.failed - self.handed_on)
        gap += abs(self.committed - committed)
        negative = sum(-count for count in self.counts().values() if count < 0)
        return gap + abs(self.failed - sum(self.failed_by_reason.values())) + negative

    def counts(self) -> dict[str, int]:
        return {name: value for name in self.__struct_fields__ if isinstance(value := getattr(self, name), int)}

    def failed_by_kind(self) -> dict[str, int]:
        """What the failed add up from, few enough to be metrics: those of `FAILED_KINDS`, and the others."""
        kinds = {
            kind: sum(count for reason, count in self.failed_by_reason.items() if reason.startswith(begin))
            for kind, begin in FAILED_KINDS.items()
        }
        return {**kinds, "failed_lease": self.failed - sum(kinds.values())}

    def issue(self, count: int) -> None:
        self.issued += count
        self.in_flight += count

    def fail(self, count: int, reason: str) -> None:
        if count:
            self.in_flight -= count
            self.failed += count
            _count(self.failed_by_reason, reason, count)

    def hand_on(self, count: int) -> None:
        self.in_flight -= count
        self.handed_on += count

    def commit(self, count: int, state: str) -> None:
        self.in_flight -= count
        self.committed += count
        setattr(self, state, getattr(self, state) + count)

    def move(self, count: int, source: str, target: str) -> None:
        setattr(self, source, getattr(self, source) - count)
        setattr(self, target, getattr(self, target) + count)

    def quarantine(self, reason: str, count: int = 1, *, matches_lease: bool = False) -> None:
        """Count rows, or messages that no row can be read from, that failed validation and are not stored."""
        _count(self.quarantined_by_reason, reason, count)
        if matches_lease:
            self.fail(count, f"{QUARANTINED}: {reason}")
        else:
            self.quarantined_outside += count


def _count(reasons: dict[str, int], reason: str, count: int) -> None:
    """Reasons come from outside, so their number and length are bounded."""
    reason = reason[:MAX_REASON_LENGTH]
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = "other"
    reasons[reason] = reasons.get(reason, 0) + count
