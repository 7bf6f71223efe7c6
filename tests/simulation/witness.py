"""What really happened, and whether it was allowed. Nothing here uses the policy's code.

The lag of a token is computed from what the simulator wrote down when the token was sampled: which
version the engine served, and from which version every later learner resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from buffer import protocol as p
from common.staleness import PolicyVersion
from tests.simulation.knobs import Knobs


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class Key(NamedTuple):
    """A sample, by who sent it."""

    actor: str
    epoch: int
    seq: int


def reward_of(key: Key) -> float:
    """Of a sample: 1 of one in three."""
    return float(crc32(repr(key).encode()) % 3 == 0)


class Granted(NamedTuple):
    """A lease, with what was published when it was granted."""

    lease_id: int
    min_version: int
    newest: PolicyVersion


class Witness:
    """Keeps the record of one run."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        spare = knobs.max_lag - knobs.max_actor_lag - (knobs.publish_every - 1) + 1
        self._room = spare // knobs.updates_per_step * knobs.groups_per_step
        """(S + 1) * G."""
        self.grants: dict[int, Granted] = {}
        """Every lease, as it was granted first: the same answer may be given again when the learner has gone back."""
        self.starts: list[tuple[int, int, int]] = []
        """(incarnation, version, step) that each learner started from."""
        self.oldest: dict[Key, PolicyVersion] = {}
        """The version that sampled the first token of each sample."""
        self.committed: set[Key] = set()
        self.steps: dict[Key, set[int]] = {}
        """Steps of the present line of training that used the sample."""
        self.drawn: dict[int, list[list[Key]]] = {}
        """The groups of each step, as it was drawn last."""
        self.num_set_aside = 0
        """Groups of equal rewards, when a step was drawn last."""
        self.greatest_lag = -1
        self.num_trained = self.num_dropped = 0
        self.went_back = False

    def learner_began(self, incarnation: int, version: int, step: int, reached: tuple[int, int]) -> None:
        """A learner resumed; those before it had reached this step and version.

        A step that is redone may advance where it was skipped before, so going back counts in steps too.
        """
        self.went_back |= step < reached[0] or version < reached[1]
        self.starts.append((incarnation, version, step))
        for steps in self.steps.values():
            steps.difference_update([each for each in steps if each > step])

    def granted(self, grant: p.LeaseGrant) -> None:
        """The buffer granted leases."""
        for lease in grant.leases:
            newest = PolicyVersion(*grant.newest)
            self.grants.setdefault(lease.lease_id, Granted(lease.lease_id, lease.min_version, newest))

    def started(self, lease: Granted, served: PolicyVersion, heard: PolicyVersion) -> None:
        """A request of a lease started on the weights `served`, by an actor that had heard of `heard`."""
        same = served.incarnation == lease.newest.incarnation
        if same and served.version < lease.min_version:
            raise Broken("min_version", f"{served} started a request of {lease}")
        if served.incarnation < heard.incarnation:
            raise Broken("abandoned", f"a request started on {served} though {heard} was heard of")
        if served.incarnation < lease.newest.incarnation:
            raise Broken("abandoned", f"a request of {lease} started on {served}")
        if self.effective(lease.newest) - self.effective(served) > self._knobs.max_actor_lag:
            raise Broken("actor_lag", f"{served} started a request of {lease}")
        if served.incarnation == heard.incarnation and heard.version - served.version > self._knobs.own_actor_lag:
            raise Broken("actor_lag", f"{served} started a request though {heard} was heard of")

    def went_on(self, newest: PolicyVersion, served: PolicyVersion) -> None:
        """A request went on from tokens of at most this version."""
        if served < newest:
            raise Broken("spans", f"{served} went on from a token of {newest}")

    def applied(self, served: PolicyVersion, version: PolicyVersion) -> None:
        """An engine went from one version to another."""
        if version <= served:
            raise Broken("engine", f"an engine went from {served} back to {version}")

    def settled(self, key: Key, outcome: str) -> None:
        """The buffer answered for a sample."""
        if outcome == "quarantined":
            raise Broken("lost", f"{key} was valid and is quarantined")
        if outcome == "committed":
            if key in self.committed:
                raise Broken("twice", f"{key} was committed twice")
            self.committed.add(key)

    def effective(self, sampled: PolicyVersion) -> int:
        """What version a token counts with: no later than where any learner after its own resumed."""
        return min([sampled.version, *(version for number, version, _ in self.starts if number > sampled.incarnation)])

    def lag(self, keys: Sequence[Key], version: int) -> int:
        """The greatest lag of these samples' tokens in an update at `version`."""
        return max(version - self.effective(self.oldest[key]) for key in keys)

    def trains(self, step: int, version: int, keys: Sequence[Key], num_groups: int) -> None:
        """An update at `version` trains these samples."""
        lag = self.lag(keys, version)
        self.greatest_lag = max(self.greatest_lag, lag)
        self.num_trained += 1
        if lag > self._knobs.max_lag:
            raise Broken("bound", f"step {step} trains a lag of {lag} at version {version}: {keys}")
        if num_groups != self._knobs.groups_per_step:
            raise Broken("size", f"step {step} has {num_groups} groups")
        for key in keys:
            used = self.steps.setdefault(key, set())
            used.add(step)
            if key not in self.committed:
                raise Broken("lost", f"step {step} trains {key}, which was never committed")
            if len(used) > 1:
                raise Broken("twice", f"{key} is trained in the steps {sorted(used)}")

    def drew(self, step: int, groups: list[list[Key]], num_set_aside: int) -> None:
        """A step was drawn, or is taken again; so many groups of equal rewards were set aside since the run began.

        As many groups as the bound allows must have been, before a step has one.
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
        """What the buffer's ledger says now, and how many groups are leased and not yet trained on."""
        self.num_dropped = dropped
        if gap:
            raise Broken("ledger", f"a gap of {gap} samples")
        if committed != len(self.committed):
            raise Broken("lost", f"{len(self.committed)} samples were committed, the ledger says {committed}")
        if outstanding > self._room and len(self.starts) == 1:  # a restart holds finished steps again
            raise Broken("room", f"{outstanding} groups are outstanding, the buffer was made for {self._room}")
        if dropped and self._knobs.on_stale == "wait" and not self.went_back:
            raise Broken("wait", f"{dropped} samples were dropped")
