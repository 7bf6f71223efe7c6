"""The buffer as a dictionary of groups, which contains only the staleness policy.

`Book` applies the rules of `leeway.buffer.leases`, `draws` and `steps` that concern lag and progress, for single use in
FIFO order, with the same `StalenessContract` as the real buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from leeway.buffer import protocol as p
from leeway.buffer.errors import BufferRefused
from leeway.buffer.leases import LEASE_TIMEOUT_S
from leeway.common.staleness import PolicyVersion, StalenessContract, effective_version
from tests.simulation.actor import Leased, Sample, Tokens
from tests.simulation.knobs import Knobs
from tests.simulation.witness import Key


@dataclass(slots=True, eq=False)
class Group:
    """A group of samples."""

    id: int
    missing: set[int]
    keys: list[Key] = field(default_factory=list)
    oldest: PolicyVersion | None = None
    is_open: bool = True
    is_closed: bool = False
    pending: int = 0
    uses: int = 0
    lease_id: int = 0
    attempt: int = 0
    owner: tuple[str, int] = ("", 0)
    min_version: int = 0
    due_at: float = 0.0
    requeued: set[int] = field(default_factory=set)
    partials: dict[int, Tokens] = field(default_factory=dict)

    @property
    def in_flight(self) -> set[int]:
        """Return the samples that an actor is generating."""
        return self.missing - self.requeued if self.lease_id else set()


@dataclass(slots=True, eq=False)
class Batch:
    """A recorded step."""

    version: int
    incarnation: int
    groups: list[Group]
    is_finished: bool = False


class Book:
    """The state and the rules of the buffer service, in memory."""

    def __init__(self, knobs: Knobs, contract: StalenessContract, clock: Callable[[], float]) -> None:
        self._knobs, self._contract, self._clock = knobs, contract, clock
        self._epochs: dict[str, tuple[str, int]] = {}
        self._answers: dict[tuple[str, int], tuple[int, Leased]] = {}
        self._outcomes: dict[Key, bool] = {}
        self._groups: dict[int, Group] = {}
        """Groups that are open, or complete but not closed."""
        self._leases: dict[int, Group] = {}
        self._draws: dict[int, Batch] = {}
        self._pending: set[int] = set()
        self._sessions: dict[str, int] = {}
        self._starts: dict[int, int] = {}
        self._start_step = 0
        self._version = self._step = 0
        self._published: PolicyVersion | None = None
        self._allowed: int | None = None
        self._next_group = self._next_lease = 1
        self._committed = self._dropped = 0

    # --- actors -----------------------------------------------------------------------------------

    def hello(self, name: str, session: str) -> int:
        """Open an epoch; expire leases of older epochs."""
        epoch = self._epochs.get(name, ("", 0))[1] + 1
        self._epochs[name] = session, epoch
        for group in list(self._leases.values()):
            if group.owner[0] == name:
                self._lose(group)
        return epoch

    def _check(self, name: str, epoch: int) -> None:
        if self._epochs[name][1] != epoch:
            raise BufferRefused(f"'{name}' (epoch {epoch}) was replaced")

    def lease(self, name: str, epoch: int, number: int, max_groups: int) -> Leased:
        """Grant leases while admission is open."""
        self._check(name, epoch)
        newest = self._published or (0, 0)
        nothing = Leased([], newest, False)
        last, answered = self._answers.get((name, epoch), (0, nothing))
        if number <= last:
            return Leased(answered.leases, newest, False, prefixes=answered.prefixes) if number == last else nothing
        leases, prefixes = [], {}
        while len(leases) < max_groups and (group := self._next()) is not None:
            leases.append(self._issue(group, name, epoch))
            prefixes |= {(group.lease_id, index): tokens for index, tokens in group.partials.items()}
        grant = Leased(leases, newest, False, prefixes=prefixes)
        self._answers[name, epoch] = number, grant
        return grant

    def _next(self) -> Group | None:
        if self._published is None:
            return None
        for group in list(self._groups.values()):
            if group.is_open and not group.lease_id:
                ages = [] if group.oldest is None else [(self._effective(group.oldest), group)]
                if not any(True for _ in self._contract.evict(ages, self._version)):
                    group.partials = {
                        index: tokens
                        for index, tokens in group.partials.items()
                        if self._contract.usable(self._effective(tokens.oldest), self._version)
                    }
                    return group
                self._drop(group)
        published = self._effective(self._published)
        if self._contract.admit(self._outstanding(), version=self._version, published=published, allowed=self._allowed):
            return None
        group = Group(self._next_group, set(range(self._knobs.group_size)))
        self._next_group += 1
        self._groups[group.id] = group
        return group

    def _issue(self, group: Group, name: str, epoch: int) -> p.Lease:
        assert self._published is not None
        group.lease_id, group.owner = self._next_lease, (name, epoch)
        group.attempt += 1
        group.min_version = self._contract.min_version(self._effective(self._published))
        group.due_at = self._clock() + LEASE_TIMEOUT_S
        self._leases[group.lease_id] = group
        self._next_lease += 1
        missing = sorted(group.missing)
        prefixes = sorted(group.partials)
        return p.Lease(
            group.lease_id, group.attempt, group.id, 0, missing, group.min_version, LEASE_TIMEOUT_S, prefixes
        )

    def push(self, sample: Sample) -> str:
        """Process a pushed sample; return its outcome."""
        key, lease = sample.key, sample.lease
        if self._epochs[key.actor][1] != key.epoch:
            return "fenced"
        if key in self._outcomes:
            return "duplicate"
        self._outcomes[key] = True
        group = self._leases.get(lease.lease_id)
        if group is None or group.attempt != lease.attempt or sample.index not in group.in_flight:
            return "late"
        group.missing.discard(sample.index)
        group.partials.pop(sample.index, None)
        group.keys.append(key)
        group.oldest = sample.oldest if group.oldest is None else min(group.oldest, sample.oldest)
        self._committed += 1
        self._close_lease(group)
        return "committed"

    def give_up(self, name: str, epoch: int, lease: p.Lease, index: int) -> None:
        """Mark a sample as failed."""
        group = self._leases.get(lease.lease_id)
        if group is not None and group.owner == (name, epoch) and index in group.in_flight:
            group.missing.discard(index)
            group.partials.pop(index, None)
            self._close_lease(group)

    def requeue(
        self, name: str, epoch: int, lease: p.Lease, indices: Sequence[int], partials: dict[int, Tokens], goes_on: bool
    ) -> None:
        """Requeue samples with their tokens, or only save the tokens if the actor continues."""
        self._check(name, epoch)
        group = self._leases.get(lease.lease_id)
        if group is None or group.owner != (name, epoch):
            return
        valid = group.in_flight.intersection(indices)
        group.partials |= {index: tokens for index, tokens in partials.items() if index in valid}
        if not goes_on:
            group.requeued |= valid
            self._close_lease(group)

    def renew(self, name: str, epoch: int, lease_ids: list[int]) -> list[int]:
        """Extend leases; return the lost leases."""
        lost = []
        for lease_id in lease_ids:
            group = self._leases.get(lease_id)
            if group is None or group.owner != (name, epoch):
                lost.append(lease_id)
            else:
                group.due_at = self._clock() + LEASE_TIMEOUT_S
        return lost

    def expire(self) -> None:
        """Expire leases whose timeout has passed."""
        for group in [group for group in self._leases.values() if group.due_at <= self._clock()]:
            self._lose(group)

    def restart(self) -> None:
        """Reset the deadlines and the lag allowed by the learner."""
        self._allowed = None
        for group in self._leases.values():
            group.due_at = self._clock() + LEASE_TIMEOUT_S

    # --- the learner ------------------------------------------------------------------------------

    def begin(self, session: str, version: int, step: int) -> int:
        """Start a learner; return its incarnation."""
        if session in self._sessions:
            return self._sessions[session]
        incarnation = self._sessions[session] = len(self._sessions)
        self._starts[incarnation] = version
        self._start_step = step
        for group in self._leases.values():
            group.min_version = min(group.min_version, version)
        self._version, self._step = version, step
        for each in sorted(self._draws):
            draw = self._draws[each]
            if each <= step:
                if each in self._pending:
                    self._finish(each, version > draw.version)
                continue
            if not self._all_usable(draw, self._contract.latest_version(version, each - step - 1)):
                self._release_from(each)
                break
            if each not in self._pending:
                self._pending.add(each)
                for group in draw.groups:
                    group.pending += 1
                    self._groups[group.id] = group
        return incarnation

    def published(self, incarnation: int, version: int) -> None:
        """Record a published version."""
        if incarnation == self._incarnation:
            new = PolicyVersion(incarnation, version)
            self._published = new if self._published is None else max(self._published, new)

    def draw(self, step: int, version: int, incarnation: int, allowed: int | None) -> list[list[Key]] | None:
        """Return the samples of each group of the step; None if the step has to wait."""
        self._check_incarnation(incarnation)
        self._allowed = allowed
        draw = self._draws.get(step)
        if draw is not None and draw.incarnation == incarnation and (draw.version == version or draw.is_finished):
            return [group.keys for group in draw.groups]
        if draw is None and step <= self._step:
            raise BufferRefused(f"step {step} is over")
        if draw is not None and self._all_usable(draw, version):
            draw.incarnation, draw.version, draw.is_finished = incarnation, version, False
            return [group.keys for group in draw.groups]
        self._release_from(step)
        for group in list(self._contract.evict(self._ready(), version)):
            self._drop(group)
        ready = self._ready()
        num = self._knobs.groups_per_step
        if len(ready) < num or self._held_back(ready[:num], ready[num:], version):
            return None
        draw = self._draws[step] = Batch(version, incarnation, [group for _, group in ready[:num]])
        self._pending.add(step)
        for group in draw.groups:
            group.pending += 1
        return [group.keys for group in draw.groups]

    def finish(self, step: int, version: int, incarnation: int, skipped: bool) -> None:
        """Finish a step."""
        self._check_incarnation(incarnation)
        if step not in self._draws and step > self._step:
            raise BufferRefused(f"step {step} was never drawn")
        if step in self._pending:
            self._finish(step, not skipped)
            self._version, self._step = version, step

    def durable(self, step: int, incarnation: int) -> None:
        """Make uses up to this step final."""
        self._check_incarnation(incarnation)
        for each in [each for each in self._draws if each <= step]:
            del self._draws[each]

    def counts(self) -> tuple[int, int, int, int]:
        """Return the ledger's gap, samples committed, samples dropped, and groups outstanding."""
        return 0, self._committed, self._dropped, self._outstanding()

    def _outstanding(self) -> int:
        num_pending = sum(len(self._draws[step].groups) for step in self._pending)
        return num_pending + sum(1 for group in self._groups.values() if not group.pending)

    def waiting_for(self) -> str:
        """Return the state of the buffer as text for a trace."""
        ages = {group.id: (self._age(group), group.is_open, group.pending) for group in self._groups.values()}
        return f"version {self._version}, published {self._published}, groups (age, open, pending) {ages}"

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def _incarnation(self) -> int:
        return len(self._starts) - 1

    def _check_incarnation(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            raise BufferRefused(f"incarnation {incarnation} was replaced by {self._incarnation}")

    def _effective(self, version: PolicyVersion) -> int:
        if version.incarnation >= self._incarnation:
            return version.version
        return effective_version(version, self._starts)

    def _age(self, group: Group) -> int:
        ages = [] if group.oldest is None else [self._effective(group.oldest)]
        partials = [self._effective(tokens.oldest) for tokens in group.partials.values()]
        return min([*ages, *partials, group.min_version] if group.is_open else ages)

    def _ready(self) -> list[tuple[int, Group]]:
        ready = [(self._age(g), g.id) for g in self._groups.values() if not (g.is_open or g.pending)]
        ready.sort()
        return [(age, self._groups[group_id]) for age, group_id in ready]

    def _held_back(self, chosen: list[tuple[int, Group]], left: list[tuple[int, Group]], version: int) -> bool:
        if self._knobs.on_stale != "wait":
            return False
        still_open = [(self._age(group), group) for group in self._groups.values() if group.is_open]
        due = [[self._contract.steps_left(age, version) or 0 for age, _ in part] for part in (chosen, left, still_open)]
        return bool(self._contract.held_back(*due))

    def _all_usable(self, draw: Batch, version: int) -> bool:
        ages = [(self._age(group), group) for group in draw.groups]
        return len(self._contract.select(ages, version)) == len(ages)

    def _close_lease(self, group: Group) -> None:
        """Close the lease if no sample is in flight, and the group if it is complete."""
        if group.in_flight:
            return
        self._leases.pop(group.lease_id, None)
        group.lease_id, group.requeued = 0, set()
        if group.missing:
            return
        group.is_open = False
        if len(group.keys) < min(2, self._knobs.group_size):
            self._close(group)

    def _lose(self, group: Group) -> None:
        del self._leases[group.lease_id]
        group.lease_id, group.requeued = 0, set()

    def _drop(self, group: Group) -> None:
        self._dropped += len(group.keys)
        self._close(group)

    def _close(self, group: Group) -> None:
        group.is_closed, group.is_open = True, False
        self._groups.pop(group.id, None)

    def _finish(self, step: int, is_trained: bool) -> None:
        draw = self._draws[step]
        for group in draw.groups:
            group.pending -= 1
            group.uses += not draw.is_finished
            if not group.pending:
                self._close(group)
        draw.is_finished = True
        self._pending.discard(step)

    def _release_from(self, step: int) -> None:
        for later in sorted(each for each in self._draws if each >= step):
            draw = self._draws[later]
            if later > step and draw.incarnation == self._incarnation:
                continue
            if later in self._pending:
                self._pending.discard(later)
                for group in draw.groups:
                    group.pending -= 1
                    if group.uses and not group.pending:
                        self._close(group)
            del self._draws[later]
