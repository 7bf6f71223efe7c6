"""World: a run as a simulation has it, its parts and what they cost; Outcome: what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol

from actors.config import ActorsConfig
from actors.kv_gate import KvCache, KvGate
from buffer.config import BufferConfig
from common.costs import TokenTime
from common.staleness import StalenessContract
from planning.lengths import LengthLaw

Bound = Literal["training", "generation", "staleness", "weights"]
StepSeconds = Callable[[Sequence[int]], float]
"""Tokens of each trained sample, prompt and completion -> seconds of the step, without scores of a reference."""


_BLOCK_TOKENS = 16
"""Of a simulated cache; samples of a prompt have nothing in common there."""
_FULL = 0.95
"""So much of its time at work, and it is what the others wait for."""


class PromptSource(Protocol):
    """Which prompt comes next, and how long its samples will be."""

    def next(self) -> int:
        """The next one of the data's order."""

    def lengths(self, prompt: int) -> list[float]:
        """Tokens of each sample of the group of a prompt that is leased now."""


@dataclass(frozen=True)
class EnginePool:
    """Engines of one kind."""

    name: str
    count: int
    law: TokenTime
    config: ActorsConfig
    """As it is for the pool."""
    kv_tokens: float = inf
    """Tokens that the cache of an engine holds."""
    price: float = 0.0
    """Of one engine, per hour."""

    def gate(self) -> KvGate[Any] | None:
        """Of one engine in which nothing runs; None where its cache holds whatever it runs."""
        if self.kv_tokens == inf:
            return None
        gate: KvGate[Any] = KvGate(self.config, KvCache(int(self.kv_tokens) // _BLOCK_TOKENS, _BLOCK_TOKENS, False))
        return gate if gate.needs_lengths else None


@dataclass(frozen=True)
class Costs:
    """Seconds of what is neither a token nor a step."""

    reward_s: float = 0.0
    """From a completion to its commit."""
    lease_s: float = 0.0
    """From a door that opens to the lease of an actor that waits at it, mean; it asks again and again."""
    publish_s: float = 0.0
    """From the end of an update until its version can be pulled."""
    fetch_s: float = 0.0
    """From then until an engine begins to apply it."""
    pause_s: float = 0.0
    """That the engine makes no token meanwhile."""
    between_steps_s: float = 0.0
    """From the end of a step to the draw of the next, where that is ready."""


@dataclass(frozen=True)
class Scores:
    """What the learner's own reference model costs; where scorers do it, or nobody, there are none."""

    token_s: float
    """Of a token in a step, for samples that were not scored before."""
    ahead_token_s: float
    """Of a token while the learner waits for a step."""
    round_tokens: int
    """Tokens of groups that are scored at a time, meanwhile; 0 where nothing is."""
    poll_s: float = 0.0
    """A learner that waits, and has nothing to score, looks so often whether there is something."""


@dataclass(frozen=True)
class World:
    """A run to simulate."""

    pools: tuple[EnginePool, ...]
    contract: StalenessContract
    buffer: BufferConfig
    lengths: LengthLaw
    step_s: StepSeconds
    num_prompts: int = 65_536
    prompt_tokens: int = 64
    costs: Costs = Costs()
    scores: Scores | None = None
    learner_price: float = 0.0
    """Of all its hosts, per hour."""
    prompts: Callable[[int], PromptSource] | None = None
    """The prompts under a seed; None: as the law of lengths makes them."""

    @property
    def group_size(self) -> int:
        """K."""
        return self.pools[0].config.group_size


@dataclass
class Outcome:
    """What a simulated run did after its first steps."""

    seconds: float = 0.0
    num_steps: int = 0
    num_trained: int = 0
    """Samples, as often as they were."""
    num_generated: int = 0
    num_tokens: float = 0.0
    """Completion tokens generated."""
    num_handed_on: int = 0
    """Samples that went on in another engine."""
    num_dropped: int = 0
    """Samples that were too old before any step used them."""
    busy_s: float = 0.0
    """Seconds of steps."""
    slots_used: float = 0.0
    """Share of all slots, over time."""
    slots_used_by_pool: dict[str, float] = field(default_factory=dict)
    closed: float = 0.0
    """Share of time in which an engine had room and admission was closed, mean over engines."""
    behind: float = 0.0
    """Share of time in which an engine started nothing because its weights were too old, mean over engines."""
    lags: Counter[int] = field(default_factory=Counter)
    """Lag of the oldest token of a trained group -> groups."""
    residence_s: float = 0.0
    """From the lease of a group to the end of its step, added up over trained groups."""
    kv_peak: float = 0.0
    """The most tokens of contexts in one engine."""
    price: float = 0.0
    """Per hour, of everything."""

    @property
    def samples_per_s(self) -> float:
        """Trained."""
        return self.num_trained / self.seconds if self.seconds else 0.0

    @property
    def learner_busy(self) -> float:
        """Share of time in which the learner trained."""
        return self.busy_s / self.seconds if self.seconds else 0.0

    @property
    def drop_share(self) -> float:
        """Of the samples that were generated."""
        return self.num_dropped / self.num_generated if self.num_generated else 0.0

    @property
    def lag_mean(self) -> float:
        """Of the oldest token of a trained group, versions."""
        return sum(lag * count for lag, count in self.lags.items()) / max(1, self.lags.total())

    @property
    def price_per_1000(self) -> float:
        """Of a thousand trained samples; infinite where there are none."""
        return self.price / 3.6 / self.samples_per_s if self.samples_per_s else inf

    @property
    def binds(self) -> Bound:
        """What the rate is limited by."""
        if self.learner_busy >= _FULL:
            return "training"
        if self.slots_used >= _FULL or self.closed + self.behind <= 1.0 - _FULL:
            return "generation"
        return "staleness" if self.closed >= self.behind else "weights"
