"""What the store's tables hold, as msgpack structs."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from buffer.ledger import COMMITTED_STATES, Ledger
from buffer.lengths import Fidelity, LengthFidelity
from buffer.protocol import Lease
from common.staleness import PolicyVersion, effective_version

NO_RECORD = -1
MAX_TRAINED_AT = 8
"""Steps that a group remembers."""


class Identity(msgspec.Struct, frozen=True):
    """Which run and schema a store belongs to."""

    run_id: str
    schema_version: int
    facts: str


class Incarnation(msgspec.Struct, frozen=True):
    """One start of the learner."""

    session: str
    version: int
    step: int
    newest: int = 0
    """The newest version that it can have published; 0 for the present one."""


class Shape(msgspec.Struct):
    """What lengths of all prompts have in common, as sums that forget; `planning.lengths` keeps it.

    Noise and spread begin as four groups of 0.2: 16 in 20 samples are within a factor of 2 of the median.
    """

    num_groups: float = 0.0
    level: float = 0.0
    noise_sum: float = 0.8
    noise_weight: float = 4.0
    spread_sum: float = 0.8
    spread_weight: float = 4.0
    again_product: float = 0.0
    """Of what a visit showed and what the visit before had left; equals `again_square` while nothing fades."""
    again_square: float = 0.0
    again_versions: float = 0.0
    """Versions between the two, weighed as these."""
    num_foretold: float = 0.0
    """Groups with a prediction."""
    num_covered: float = 0.0
    """Those whose longest completion was no longer than predicted."""
    num_late: float = 0.0
    """Those that the slowest lane was predicted to be late with."""
    total_square: float = 0.0
    """Of the means of groups, from the level."""
    error_square: float = 0.0
    """Of the means of groups, from their predictions."""


class Visit(msgspec.Struct, frozen=True, array_like=True):
    """Lengths of a prompt after a group of it: at that version its own part is N(mean, variance)."""

    mean: float
    variance: float
    version: int


class Tries(msgspec.Struct, frozen=True, array_like=True):
    """Samples of a prompt by their success, as they counted at a version."""

    passed: float
    failed: float
    version: int

    @property
    def rate(self) -> float:
        """Mean of the posterior of the rate of success, with one success and one failure as prior."""
        return (1.0 + self.passed) / (2.0 + self.passed + self.failed)


class Waiting(NamedTuple):
    """A prompt that waits in the window of a prompt law."""

    order: int
    """Its place in the order of the law."""
    prompt_id: int
    longest: float
    """Predicted tokens of the longest of its samples."""


class StoreState(msgspec.Struct):
    """Everything of the service that is not a row of its own."""

    ledger: Ledger = msgspec.field(default_factory=Ledger)
    version: int = 0
    """Optimizer steps that the learner is known to have taken."""
    step: int = 0
    """The last finished step of the learner."""
    published: tuple[int, int] | None = None
    """(incarnation, version) of the newest weights that actors can pull."""
    incarnations: list[Incarnation] = []
    pending_draws: dict[int, int] = {}
    """Step drawn but not finished in this incarnation -> its number of groups."""
    num_set_aside: int = 0
    """Groups of equal rewards that were set aside since the last draw."""
    fidelity: Fidelity = msgspec.field(default_factory=Fidelity)
    lengths: Shape = msgspec.field(default_factory=Shape)
    cursor: int = 0
    """Prompts that the law has chosen so far."""
    next_lease: int = 1
    next_group: int = 1
    next_record: int = 1
    num_records: int = 0
    next_returned: int = 1
    draining: bool = False
    """No lease is granted until the next learner begins."""
    retired: dict[str, int] = {}
    """Ledger counts of groups whose row was removed."""

    @property
    def incarnation(self) -> int:
        return len(self.incarnations) - 1

    @property
    def resumed_at(self) -> dict[int, int]:
        """For every incarnation, the version that it started from."""
        return {number: start.version for number, start in enumerate(self.incarnations)}

    @property
    def newest(self) -> tuple[int, int]:
        return self.published or (0, 0)

    @property
    def length_fidelity(self) -> LengthFidelity:
        """How far lengths trained are from lengths generated, and these from what was foretold."""
        known = self.lengths
        if not known.num_foretold:
            return self.fidelity.now
        return replace(
            self.fidelity.now,
            covered=known.num_covered / known.num_foretold,
            foretold=1.0 - known.error_square / known.total_square if known.total_square else 0.0,
            late=known.num_late / known.num_foretold,
        )

    def newest_possible(self, updates_per_step: int) -> int:
        """Return the newest version that the present incarnation can have published.

        An actor may know of it before the service does.
        """
        published = self.newest[1] if self.newest[0] == self.incarnation else 0
        return max(published, self.version + len(self.pending_draws) * updates_per_step)

    def effective(self, version: tuple[int, int]) -> int:
        """The version that weights count with after learner restarts."""
        if version[0] >= self.incarnation:
            return version[1]
        return effective_version(PolicyVersion(*version), self.resumed_at)


class Use(NamedTuple):
    """A step that trained on a group."""

    step: int
    version: int
    """Optimizer steps taken when its last update trained."""
    incarnation: int


class Partial(NamedTuple):
    """What is stored of a sample that is not complete: its first tokens, in the table of that name."""

    oldest: tuple[int, int]
    num_tokens: int


class Group(msgspec.Struct):
    """K samples of one prompt. At most one lease of it is open."""

    group_id: int
    prompt_id: int
    sample_states: list[str]
    """Per sample: 'missing', 'failed', or one of `ledger.COMMITTED_STATES`."""
    records: list[int]
    rewards: list[float | None]
    """Per sample; None if it is not committed or has no reward."""
    lengths: list[int]
    """Per sample: all its tokens; 0: not committed."""
    completion_lengths: list[int]
    """Per sample: the tokens of its completion; 0: not committed."""
    cut: list[int] = []
    """The samples that were cut at their longest."""
    phase: Literal["open", "ready", "drawn", "closed"] = "open"
    failures: int = 0
    """How often in a row groups of this prompt were filtered."""
    foretold: int = 0
    """Predicted tokens of its longest completion; 0: not predicted."""
    attempt: int = 0
    lease_id: int = 0
    actor: str = ""
    epoch: int = 0
    min_version: int = 0
    """No sample in flight counts with a version below this one."""
    oldest: tuple[int, int] | None = None
    """(incarnation, version) of the oldest committed token."""
    partials: dict[int, Partial] = {}
    """Missing sample -> what is there of it."""
    resting: list[int] = []
    """Missing samples that the lease has handed on: they wait for its end."""
    losses: int = 0
    """Leases that expired or were fenced."""
    issued: int = 0
    failed: int = 0
    handed_on: int = 0
    uses: int = 0
    """Steps that used the group; one that is redone counts once."""
    pending: int = 0
    """Draws, not finished in this incarnation, that name it; while any does, its phase is 'drawn'."""
    trained_at: list[Use] = []
    """The last `MAX_TRAINED_AT` steps that trained on it, oldest first; a redone one is in it once."""
    held: int = 0
    """Recorded draws that name the group; while any does, its records stay."""

    @classmethod
    def new(cls, group_id: int, prompt_id: int, size: int, failures: int = 0, foretold: int = 0) -> Group:
        return cls(
            group_id,
            prompt_id,
            sample_states=["missing"] * size,
            records=[NO_RECORD] * size,
            rewards=[None] * size,
            lengths=[0] * size,
            completion_lengths=[0] * size,
            failures=failures,
            foretold=foretold,
        )

    @property
    def is_stored(self) -> bool:
        return any(record != NO_RECORD for record in self.records)

    def missing(self) -> list[int]:
        return [index for index, state in enumerate(self.sample_states) if state == "missing"]

    def in_flight(self) -> list[int]:
        """The samples that an actor makes now."""
        if not self.lease_id:
            return []
        resting = set(self.resting)
        return [index for index in self.missing() if index not in resting]

    def end_lease(self) -> None:
        self.lease_id, self.resting = 0, []

    def having(self, state: str) -> list[int]:
        return [index for index, each in enumerate(self.sample_states) if each == state]

    def usable(self) -> list[int]:
        """The samples that a step may use: stored, with a reward, and not filtered."""
        return [i for i, state in enumerate(self.sample_states) if state in ("waiting", "drawn", "trained")]

    @property
    def mean_reward(self) -> float | None:
        known = [reward for reward in self.rewards if reward is not None]
        return fmean(known) if known else None

    @property
    def reward_spread(self) -> float:
        """Standard deviation of the rewards; 0 for fewer than two."""
        known = [reward for reward in self.rewards if reward is not None]
        if len(known) < 2:
            return 0.0
        mean = fmean(known)
        return sqrt(fmean([(reward - mean) ** 2 for reward in known]))

    @property
    def is_uninformative(self) -> bool:
        """Have the samples that a step may use all the same reward? One alone has nothing to be compared with."""
        usable = self.usable()
        return len(usable) > 1 and len({self.rewards[index] for index in usable}) == 1

    def oldest_effective(self, state: StoreState) -> int:
        """The version that the group's age is counted from: that of its oldest token, in flight or committed."""
        bounds = [] if self.oldest is None else [state.effective(self.oldest)]
        if self.phase == "open":
            bounds += [self.min_version, *(state.effective(each.oldest) for each in self.partials.values())]
        return min(bounds, default=0)

    def tallies(self) -> Mapping[str, int]:
        """What `offline.inspect.recount` counts of this group, but for samples in flight."""
        counts = {state: self.sample_states.count(state) for state in COMMITTED_STATES}
        return {"issued": self.issued, "failed": self.failed, "handed_on": self.handed_on, **counts}


class DrawRecord(msgspec.Struct):
    """The groups that a step trains."""

    step: int
    version: int
    incarnation: int
    group_ids: list[int]
    record_ids: list[int]
    """In the order of `group_ids`, which may name a group several times."""
    finished_by: int = -1
    """The incarnation that finished the step; -1: none yet."""
    is_trained: bool = False
    """A finished step has trained on it, and was not skipped."""


class Actor(msgspec.Struct):
    """What the store keeps of a client, by its name."""

    name: str
    role: str
    session: str
    epoch: int = 1
    low_water: int = 0
    """Every sequence number of this epoch below it was seen."""
    forgotten_below: int = 0
    """Numbers below it that were not seen are forgotten: later ones have overtaken them by far."""
    num_seen_above: int = 0
    """Its rows in the table `seen`."""
    last_request: int = -1
    last_leases: list[Lease] = []
    replaced: list[str] = []


class ReturnedPrompt(msgspec.Struct, frozen=True):
    """A prompt whose group was dropped or filtered: it is leased again before new ones."""

    prompt_id: int
    failures: int
