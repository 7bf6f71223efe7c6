"""Ledger: counts of the issued samples in each state.

    issued    = in_flight + committed + failed + requeued
    committed = waiting + drawn + trained + dropped_stale + filtered + uninformative + evicted_unused

A requeued sample is issued again with its tokens. The summands of `committed` are disjoint. A sample is `trained`
from its first finished step on. Neither sum counts duplicates, late commits, rows of fenced epochs, or quarantined
rows that match no open lease.

The counters change in the transaction of their event. `leeway buffer verify` recounts all samples from the tables.
"""

from __future__ import annotations

import msgspec

REWARD_FAILED, GENERATION_FAILED, QUARANTINED = "reward failed", "generation failed", "quarantined"
"""Prefixes of the reasons of failed samples, except samples of a lost lease."""
FAILED_KINDS = {
    "failed_reward": REWARD_FAILED,
    "failed_generation": GENERATION_FAILED,
    "failed_quarantined": QUARANTINED,
}
"""Name of the count -> prefix of its reasons. All other reasons count as `failed_lease`."""

COMMITTED_STATES = ("waiting", "drawn", "trained", "dropped_stale", "filtered", "uninformative", "evicted_unused")
COUNTS = ("issued", "in_flight", "committed", "failed", "requeued", *COMMITTED_STATES)

_SHOWN_AS = {"duplicates": "duplicate", "gap": "ledger_gap"}
LEDGER_METRICS = {f"buffer/{_SHOWN_AS.get(name, name)}": name for name in (
    "issued", "in_flight", "committed", "failed", "requeued", *FAILED_KINDS, "failed_lease", "waiting", "drawn",
    "trained", "trained_uninformative", "dropped_stale", "filtered", "filtered_too_long", "uninformative",
    "evicted_unused", "quarantined", "duplicates", "late", "gap",
)}  # fmt: skip
"""Metrics reported per step: metric -> name of the count."""

MAX_REASONS = 64
MAX_REASON_LENGTH = 96


class Ledger(msgspec.Struct):
    """Sample counts. Every integer field counts samples unless its docstring names another unit."""

    issued: int = 0
    in_flight: int = 0
    committed: int = 0
    failed: int = 0
    requeued: int = 0
    """Samples that their actor returned unfinished, with their partial rollouts."""
    waiting: int = 0
    drawn: int = 0
    trained: int = 0
    dropped_stale: int = 0
    filtered: int = 0
    uninformative: int = 0
    """Samples set aside because all rewards of their group were equal."""
    evicted_unused: int = 0
    duplicates: int = 0
    late: int = 0
    fenced: int = 0
    quarantined_outside: int = 0
    """Rows or messages that match no open lease."""
    uses: int = 0
    """Uses of samples by finished steps."""
    redone_uses: int = 0
    """Uses of samples that an earlier incarnation had trained on."""
    trained_uninformative: int = 0
    """Samples used for training whose group had only equal rewards."""
    filtered_too_long: int = 0
    """Samples longer than the run now allows, or dropped because too few shorter samples remained in their group."""
    prompts_given_up: int = 0
    """Prompts skipped until the next epoch of the data, because too many of their groups in a row were filtered."""
    failed_by_reason: dict[str, int] = {}
    quarantined_by_reason: dict[str, int] = {}

    @property
    def gap(self) -> int:
        """Number of samples by which the identities are violated; nonzero indicates a bug."""
        committed = sum(getattr(self, state) for state in COMMITTED_STATES)
        gap = abs(self.issued - self.in_flight - self.committed - self.failed - self.requeued)
        gap += abs(self.committed - committed)
        negative = sum(-count for count in self.counts().values() if count < 0)
        return gap + abs(self.failed - sum(self.failed_by_reason.values())) + negative

    def counts(self) -> dict[str, int]:
        return {name: value for name in self.__struct_fields__ if isinstance(value := getattr(self, name), int)}

    def failed_by_kind(self) -> dict[str, int]:
        """Return the failed samples by kind, as metrics: `FAILED_KINDS`, and `failed_lease` for all other failures."""
        kinds = {
            kind: sum(count for reason, count in self.failed_by_reason.items() if reason.startswith(prefix))
            for kind, prefix in FAILED_KINDS.items()
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

    def requeue(self, count: int) -> None:
        self.in_flight -= count
        self.requeued += count

    def commit(self, count: int, state: str) -> None:
        self.in_flight -= count
        self.committed += count
        setattr(self, state, getattr(self, state) + count)

    def move(self, count: int, source: str, target: str) -> None:
        setattr(self, source, getattr(self, source) - count)
        setattr(self, target, getattr(self, target) + count)

    def quarantine(self, reason: str, count: int = 1, *, matches_lease: bool = False) -> None:
        """Count rows or unreadable messages that failed validation and are not stored."""
        _count(self.quarantined_by_reason, reason, count)
        if matches_lease:
            self.fail(count, f"{QUARANTINED}: {reason}")
        else:
            self.quarantined_outside += count


def _count(reasons: dict[str, int], reason: str, count: int) -> None:
    """Add to the count of a reason; the number and length of reasons are bounded, because clients choose them."""
    reason = reason[:MAX_REASON_LENGTH]
    if reason not in reasons and len(reasons) >= MAX_REASONS:
        reason = "other"
    reasons[reason] = reasons.get(reason, 0) + count
