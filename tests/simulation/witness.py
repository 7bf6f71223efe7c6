"""A record of the events of a run, and checks that the events were allowed. No code of the policy is used.

The lag of a token is computed from two records of the simulation: the version that the engine served when it sampled
the token, and the version from which every later learner resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from leeway.buffer import protocol as p
from leeway.common.staleness import PolicyVersion
from tests.simulation.knobs import Knobs


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, description: str) -> None:
        super().__init__(f"{invariant}: {description}")
        self.invariant = invariant


class Key(NamedTuple):
    """Identifies a pushed sample."""

    actor: str
    epoch: int
    seq: int


def reward_of(key: Key) -> float:
    """Return the reward of a sample, which is 1 for one in three samples."""
    return float(crc32(repr(key).encode()) % 3 == 0)


class Granted(NamedTuple):
    """A lease, with the newest published version when it was granted."""

    lease_id: int
    min_version: int
    newest: PolicyVersion


class Witness:
    """The record of one run."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        spare = knobs.max_lag - knobs.max_actor_lag - (knobs.publish_every - 1) + 1
        self._capacity = spare // knobs.updates_per_step * knobs.groups_per_step
        """Maximum number of outstanding groups: (S + 1) * G in docs/staleness.md."""
        self.grants: dict[int, Granted] = {}
        """Every lease as it was first granted; the same reply may be repeated after a learner restart."""
        self.starts: list[tuple[int, int, int]] = []
        """(incarnation, version, step) from which each learner started."""
        self.oldest: dict[Key, PolicyVersion] = {}
        """Version that sampled the first token of each sample."""
        self.committed: set[Key] = set()
        self.steps: dict[Key, set[int]] = {}
        """Steps that used the sample, without the steps that a learner restart undid."""
        self.drawn: dict[int, list[list[Key]]] = {}
        """Groups of each step in its last draw."""
        self.num_set_aside = 0
        """Groups of equal rewards set aside up to the last draw of a step."""
        self.greatest_lag = -1
        self.num_trained = self.num_dropped = 0
        self.rolled_back = False

    def learner_started(self, incarnation: int, version: int, step: int, reached: tuple[int, int]) -> None:
        """Record a learner start; earlier learners had reached the step and version `reached`.

        A redone step may advance the version although it was skipped before, so steps are compared too.
        """
        self.rolled_back |= step < reached[0] or version < reached[1]
        self.starts.append((incarnation, version, step))
        for steps in self.steps.values():
            steps.difference_update([each for each in steps if each > step])

    def granted(self, grant: p.LeaseGrant) -> None:
        """Record granted leases."""
        for lease in grant.leases:
            newest = PolicyVersion(*grant.newest)
            self.grants.setdefault(lease.lease_id, Granted(lease.lease_id, lease.min_version, newest))

    def started(self, lease: Granted, served: PolicyVersion, seen: PolicyVersion) -> None:
        """Record the start of a sample on version `served`, by an actor that had seen version `seen`."""
        same = served.incarnation == lease.newest.incarnation
        if same and served.version < lease.min_version:
            raise Broken("min_version", f"a request of {lease} started on {served}")
        if served.incarnation < seen.incarnation:
            raise Broken("abandoned", f"a request started on {served} although {seen} was seen")
        if served.incarnation < lease.newest.incarnation:
            raise Broken("abandoned", f"a request of {lease} started on {served}")
        if self.effective(lease.newest) - self.effective(served) > self._knobs.max_actor_lag:
            raise Broken("actor_lag", f"a request of {lease} started on {served}")
        if served.incarnation == seen.incarnation and seen.version - served.version > self._knobs.own_actor_lag:
            raise Broken("actor_lag", f"a request started on {served} although {seen} was seen")

    def resumed(self, newest: PolicyVersion, served: PolicyVersion) -> None:
        """Record that a sample with tokens of version `newest` resumed on version `served`."""
        if served < newest:
            raise Broken("spans", f"a sample resumed on {served} after a token of {newest}")

    def applied(self, served: PolicyVersion, version: PolicyVersion) -> None:
        """Record an engine's change of version."""
        if version <= served:
            raise Broken("engine", f"an engine went from {served} back to {version}")

    def pushed(self, key: Key, outcome: str) -> None:
        """Record the outcome of a pushed sample."""
        if outcome == "quarantined":
            raise Broken("lost", f"{key} was valid and is quarantined")
        if outcome == "committed":
            if key in self.committed:
                raise Broken("twice", f"{key} was committed twice")
            self.committed.add(key)

    def effective(self, sampled: PolicyVersion) -> int:
        """Return the version that counts for lags: at most the lowest version from which a later learner resumed."""
        return min([sampled.version, *(version for number, version, _ in self.starts if number > sampled.incarnation)])

    def lag(self, keys: Sequence[Key], version: int) -> int:
        """Return the largest lag of the tokens of these samples in an update at `version`."""
        return max(version - self.effective(self.oldest[key]) for key in keys)

    def trains(self, step: int, version: int, keys: Sequence[Key], num_groups: int) -> None:
        """Record an update at `version` with these samples."""
        lag = self.lag(keys, version)
        self.greatest_lag = max(self.greatest_lag, lag)
        self.num_trained += 1
        if lag > self._knobs.max_lag:
            raise Broken("bound", f"step {step} trains on a lag of {lag} at version {version}: {keys}")
        if num_groups != self._knobs.groups_per_step:
            raise Broken("size", f"step {step} has {num_groups} groups")
        for key in keys:
            used = self.steps.setdefault(key, set())
            used.add(step)
            if key not in self.committed:
                raise Broken("lost", f"step {step} trains on {key}, which was never committed")
            if len(used) > 1:
                raise Broken("twice", f"{key} is used in the steps {sorted(used)}")

    def step_drawn(self, step: int, groups: list[list[Key]], num_set_aside: int) -> None:
        """Record a drawn or redone step, with the number of uninformative groups set aside since the run began.

        A step may contain an uninformative group only after the refill limit of the step is reached.
        """
        if self.drawn.get(step) == groups:
            return
        passed, self.num_set_aside = num_set_aside - self.num_set_aside, num_set_aside
        self.drawn[step] = groups
        if passed >= self._knobs.refill * self._knobs.groups_per_step:
            return
        for keys in groups:
            if len(keys) > 1 and len({reward_of(key) for key in keys}) == 1:
                raise Broken("informative", f"step {step} has {keys}, of equal rewards; {passed} were set aside for it")

    def counted(self, gap: int, committed: int, dropped: int, outstanding: int) -> None:
        """Check the ledger, and the number of groups that are leased and not yet used."""
        self.num_dropped = dropped
        if gap:
            raise Broken("ledger", f"a gap of {gap} samples")
        if committed != len(self.committed):
            raise Broken("lost", f"{len(self.committed)} samples were committed, but the ledger has {committed}")
        if outstanding > self._capacity and len(self.starts) == 1:  # after a restart, finished steps are held again
            raise Broken("room", f"{outstanding} groups are outstanding, the capacity is {self._capacity}")
        if dropped and self._knobs.on_stale == "wait" and not self.rolled_back:
            raise Broken("wait", f"{dropped} samples were dropped")
