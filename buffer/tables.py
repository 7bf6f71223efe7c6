"""Rows of the store's tables, as msgpack structs."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from leeway.buffer.ledger import COMMITTED_STATES, Ledger
from leeway.buffer.lengths import Fidelity, LengthFidelity
from leeway.buffer.protocol import Lease
from leeway.common.staleness import PolicyVersion, effective_version

NO_RECORD = -1
MAX_TRAINED_AT = 8
"""Maximum number of steps recorded per group."""


class Identity(msgspec.Struct, frozen=True):
    """The run and schema that a store belongs to."""

    run_id: str
    schema_version: int
    facts: str


class Incarnation(msgspec.Struct, frozen=True):
    """One start of the learner."""

    session: str
    version: int
    step: int
    newest: int = 0
    """The newest version that this incarnation can have published; 0 until the incarnation ends."""


class LengthStats(msgspec.Struct):
    """Length statistics of all prompts, as exponentially decayed sums; `leeway.planning.lengths` maintains them.

    Noise and spread start as variances of 0.2 in the log of the length, with the weight of four groups.
    """

    num_groups: float = 0.0
    level: float = 0.0
    noise_sum: float = 0.8
    noise_weight: float = 4.0
    spread_sum: float = 0.8
    spread_weight: float = 4.0
    again_product: float = 0.0
    """Decayed sum of observed offset times previous posterior mean; equals `again_square` if offsets do not fade."""
    again_square: float = 0.0
    again_versions: float = 0.0
    """Decayed sum of the versions between successive groups of a prompt, weighted by the terms of `again_square`."""
    num_predicted: float = 0.0
    """Number of groups with a prediction."""
    num_covered: float = 0.0
    """Number of groups whose longest completion was no longer than predicted."""
    num_late: float = 0.0
    """Number of groups predicted to be late on the slowest lane."""
    total_square: float = 0.0
    """Decayed sum of squared deviations of group means from the level."""
    error_square: float = 0.0
    """Decayed sum of squared deviations of group means from their predictions."""


class PromptPosterior(msgspec.Struct, frozen=True, array_like=True):
    """Length posterior of a prompt after a group at `version`: its offset from the level is N(mean, variance)."""

    mean: float
    variance: float
    version: int


class Tries(msgspec.Struct, frozen=True, array_like=True):
    """Decayed counts of a prompt's successful and failed samples at a version."""

    passed: float
    failed: float
    version: int

    @property
    def rate(self) -> float:
        """Posterior mean of the success rate, with one success and one failure as the prior."""
        return (1.0 + self.passed) / (2.0 + self.passed + self.failed)


class Waiting(NamedTuple):
    """A prompt that waits for its first lease in the window of a prompt law."""

    order: int
    """Position of the prompt in the order of the prompt law."""
    prompt_id: int
    longest: float
    """Predicted tokens of the prompt's longest sample."""


class StoreState(msgspec.Struct):
    """State of the service that is not in other tables."""

    ledger: Ledger = msgspec.field(default_factory=Ledger)
    version: int = 0
    """Number of optimizer steps reported by the learner."""
    step: int = 0
    """The last finished step of the learner."""
    published: tuple[int, int] | None = None
    """(incarnation, version) of the newest weights that actors can pull."""
    incarnations: list[Incarnation] = []
    pending_draws: dict[int, int] = {}
    """Step drawn but not finished in this incarnation -> its number of groups."""
    num_set_aside: int = 0
    """Number of groups of equal rewards set aside since the last draw."""
    fidelity: Fidelity = msgspec.field(default_factory=Fidelity)
    lengths: LengthStats = msgspec.field(default_factory=LengthStats)
    cursor: int = 0
    """Number of prompts that the prompt law has chosen."""
    next_lease: int = 1
    next_group: int = 1
    next_record: int = 1
    num_records: int = 0
    next_returned: int = 1
    draining: bool = False
    """True if no lease is granted until the next learner begins."""
    retired: dict[str, int] = {}
    """Ledger counts of groups whose rows were deleted."""

    @property
    def incarnation(self) -> int:
        return len(self.incarnations) - 1

    @property
    def resumed_at(self) -> dict[int, int]:
        """Incarnation -> the version that it started from."""
        return {number: start.version for number, start in enumerate(self.incarnations)}

    @property
    def newest(self) -> tuple[int, int]:
        return self.published or (0, 0)

    @property
    def length_fidelity(self) -> LengthFidelity:
        """Differences between lengths used for training and all lengths, and between actual and predicted lengths."""
        stats = self.lengths
        if not stats.num_predicted:
            return self.fidelity.now
        return replace(
            self.fidelity.now,
            covered=stats.num_covered / stats.num_predicted,
            predicted=1.0 - stats.error_square / stats.total_square if stats.total_square else 0.0,
            late=stats.num_late / stats.num_predicted,
        )

    def newest_possible(self, updates_per_step: int) -> int:
        """Return the newest version that the current incarnation can have published.

        Actors may use this version before the service receives its publication.
        """
        published = self.newest[1] if self.newest[0] == self.incarnation else 0
        return max(published, self.version + len(self.pending_draws) * updates_per_step)

    def effective(self, version: tuple[int, int]) -> int:
        """Return the version as which these weights count after restarts of the learner."""
        if version[0] >= self.incarnation:
            return version[1]
        return effective_version(PolicyVersion(*version), self.resumed_at)


class Use(NamedTuple):
    """A step that trained on a group."""

    step: int
    version: int
    """Number of optimizer steps taken before the last update of this step."""
    incarnation: int


class Partial(NamedTuple):
    """Summary of a partial rollout, which is stored in the table `partials`."""

    oldest: tuple[int, int]
    num_tokens: int


class Group(msgspec.Struct):
    """K samples of one prompt, with at most one open lease."""

    group_id: int
    prompt_id: int
    sample_states: list[str]
    """State of each sample: 'missing', 'failed', or one of `ledger.COMMITTED_STATES`."""
    records: list[int]
    rewards: list[float | None]
    """Reward of each sample; None if the sample is not committed or has no reward."""
    lengths: list[int]
    """Number of tokens of each sample, prompt included; 0 if the sample is not committed."""
    completion_lengths: list[int]
    """Number of completion tokens of each sample; 0 if the sample is not committed."""
    cut: list[int] = []
    """Indices of samples that reached the token limit."""
    phase: Literal["open", "ready", "drawn", "closed"] = "open"
    failures: int = 0
    """Number of groups of this prompt that were filtered in a row."""
    predicted: int = 0
    """Predicted tokens of the group's longest completion; 0 if not predicted."""
    attempt: int = 0
    lease_id: int = 0
    actor: str = ""
    epoch: int = 0
    min_version: int = 0
    """Lower bound of the effective versions of samples in flight."""
    oldest: tuple[int, int] | None = None
    """(incarnation, version) of the oldest committed token."""
    partials: dict[int, Partial] = {}
    """Missing sample -> its partial rollout."""
    resting: list[int] = []
    """Missing samples that were requeued during the current lease; they wait until the lease ends."""
    losses: int = 0
    """Number of leases that expired or were fenced."""
    issued: int = 0
    failed: int = 0
    requeued: int = 0
    uses: int = 0
    """Number of steps that used the group; a redone step counts once."""
    pending: int = 0
    """Number of draws with this group that are not finished in this incarnation; if above 0, its phase is 'drawn'."""
    trained_at: list[Use] = []
    """The last `MAX_TRAINED_AT` steps that trained on the group, oldest first; a redone step is listed once."""
    held: int = 0
    """Number of recorded draws with this group; if above 0, the group's records are kept."""
    judged: dict[int, float | None] = {}
    """Sums of `task.informative_rewards` that differ from the reward, by sample."""

    @classmethod
    def new(cls, group_id: int, prompt_id: int, size: int, failures: int = 0, predicted: int = 0) -> Group:
        return cls(
            group_id,
            prompt_id,
            sample_states=["missing"] * size,
            records=[NO_RECORD] * size,
            rewards=[None] * size,
            lengths=[0] * size,
            completion_lengths=[0] * size,
            failures=failures,
            predicted=predicted,
        )

    @property
    def is_stored(self) -> bool:
        return any(record != NO_RECORD for record in self.records)

    def missing(self) -> list[int]:
        return self.having("missing")

    def in_flight(self) -> list[int]:
        """Return the samples that an actor is generating."""
        if not self.lease_id:
            return []
        resting = set(self.resting)
        return [index for index in self.missing() if index not in resting]

    def end_lease(self) -> None:
        self.lease_id, self.resting = 0, []

    def having(self, state: str) -> list[int]:
        return [index for index, each in enumerate(self.sample_states) if each == state]

    def usable(self) -> list[int]:
        """Return the samples that a step may use: stored, with a reward, and not filtered."""
        return [i for i, state in enumerate(self.sample_states) if state in ("waiting", "drawn", "trained")]

    @property
    def mean_reward(self) -> float | None:
        known = [reward for reward in self.rewards if reward is not None]
        return fmean(known) if known else None

    @property
    def reward_spread(self) -> float:
        """Standard deviation of the rewards; 0 for fewer than two rewards."""
        mean = self.mean_reward
        return 0.0 if mean is None else sqrt(fmean([(each - mean) ** 2 for each in self.rewards if each is not None]))

    @property
    def is_uninformative(self) -> bool:
        """True if all usable samples have the same judged reward; False for a single sample."""
        usable = self.usable()
        return len(usable) > 1 and len({self.judged.get(index, self.rewards[index]) for index in usable}) == 1

    def oldest_effective(self, state: StoreState) -> int:
        """Return the effective version of the oldest token, in flight or committed, which defines the group's age."""
        bounds = [] if self.oldest is None else [state.effective(self.oldest)]
        if self.phase == "open":
            bounds += [self.min_version, *(state.effective(each.oldest) for each in self.partials.values())]
        return min(bounds, default=0)

    def tallies(self) -> Mapping[str, int]:
        """Return the counts of this group for `offline.inspect.recount`, except samples in flight."""
        counts = {state: self.sample_states.count(state) for state in COMMITTED_STATES}
        return {"issued": self.issued, "failed": self.failed, "requeued": self.requeued, **counts}


class DrawRecord(msgspec.Struct):
    """The recorded draw of a step: the groups that it trains on."""

    step: int
    version: int
    incarnation: int
    group_ids: list[int]
    record_ids: list[int]
    """Records in the order of `group_ids`, which may contain a group several times."""
    finished_by: int = -1
    """The incarnation that finished the step; -1 if the step is not finished."""
    is_trained: bool = False
    """True if the step trained on the draw: it finished and was not skipped."""


class Actor(msgspec.Struct):
    """State of a client, by its name."""

    name: str
    role: str
    session: str
    epoch: int = 1
    low_water: int = 0
    """All sequence numbers of this epoch below this value were received or are too late."""
    forgotten_below: int = 0
    """Unreceived sequence numbers below this value count as late: they are more than `MAX_OVERTAKEN` behind."""
    num_seen_above: int = 0
    """Number of rows of the client in the table `seen`."""
    last_request: int = -1
    last_leases: list[Lease] = []
    replaced: list[str] = []


class ReturnedPrompt(msgspec.Struct, frozen=True):
    """A prompt whose group was dropped or filtered; the prompt is leased again before new prompts."""

    prompt_id: int
    failures: int
