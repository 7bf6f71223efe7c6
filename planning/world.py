"""World: parts and costs of a simulated run; TokenClock: a simulated engine; Outcome: metrics of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, sqrt
from typing import Any, Generic, Literal, TypeVar

from leeway.actors.config import ActorsConfig, KvCache
from leeway.buffer.config import BufferConfig
from leeway.common.staleness import StalenessContract
from leeway.planning.costs import TokenTime
from leeway.planning.kv_gate import KvGate
from leeway.planning.lengths import LengthDistribution, PromptStream

K = TypeVar("K")
Bound = Literal["training", "generation", "staleness", "weights"]
StepSeconds = Callable[[Sequence[int]], float]
"""Tokens of each sample of a step, prompt and completion -> seconds of the step, without reference scores."""


_BLOCK_TOKENS = 16
"""Tokens per block of a simulated cache, which shares no prompts among samples."""
_FULL = 0.95
"""Utilization from which on a component is the bottleneck."""


@dataclass(frozen=True)
class EnginePool:
    name: str
    count: int
    law: TokenTime
    config: ActorsConfig
    kv_tokens: float = inf
    """Capacity of the KV cache of an engine, in tokens."""
    price: float = 0.0

    def gate(self) -> KvGate[Any] | None:
        """Return the gate of an idle engine, which also models vLLM's own queue; None if the cache cannot fill up."""
        if self.kv_tokens == inf:
            return None
        gate: KvGate[Any] = KvGate(self.config, KvCache(int(self.kv_tokens) // _BLOCK_TOKENS, _BLOCK_TOKENS, False))
        return gate if gate.needs_lengths else None


class TokenClock(Generic[K]):
    """Engine that runs samples, identified by keys, at the speed of a `TokenTime` cost model.

    Every running sample gets one token per step. Between two events the number b of samples is constant and their
    contexts grow together, so the tokens v that each sample has generated follow dv/dt = 1 / (g + h v) with h =
    per_kv_token * b. The solution has a closed form, so single steps are not simulated.
    """

    __slots__ = (
        "_a", "_context", "_ends", "_f", "_k", "_s", "_seq", "_stall_s", "made", "now_s", "num_running",
    )  # fmt: skip

    def __init__(self, law: TokenTime, now_s: float = 0.0) -> None:
        self._a, self._s, self._k, self._f = law.base, law.per_sample, law.per_kv_token, law.per_prompt_token
        self.now_s = now_s
        self.made = 0.0
        """Tokens of a hypothetical sample that runs from the start."""
        self.num_running = 0
        self._context = 0.0
        """Tokens of all contexts, minus `made` for each running sample."""
        self._stall_s = 0.0
        """Remaining seconds during which no token is generated."""
        self._ends: list[tuple[float, int, float, K]] = []
        """Heap of (value of `made` at which the sample ends, sequence number, part of `_context`, key)."""
        self._seq = 0

    @property
    def kv_tokens(self) -> float:
        return self._context + self.num_running * self.made

    def advance(self, now_s: float) -> None:
        """Advance the clock to `now_s`, which is at most `next_end_s`."""
        passed = now_s - self.now_s
        self.now_s = now_s
        if self._stall_s > 0.0:
            stalled = min(passed, self._stall_s)
            self._stall_s -= stalled
            passed -= stalled
        if passed > 0.0 and self.num_running:
            step_s = self._step_s()
            grows = 2.0 * self._k * self.num_running * passed
            self.made += 2.0 * passed / (step_s + sqrt(step_s * step_s + grows))

    def stall(self, seconds: float) -> None:
        """Generate no token for this time from now on, as during a weight update."""
        self._stall_s += seconds

    def start(self, key: K, num_prompt_tokens: int, length: float) -> None:
        """Start a sample of `length` tokens; the other samples stall while its prompt is computed."""
        part = num_prompt_tokens - self.made
        self._seq += 1
        heappush(self._ends, (self.made + length, self._seq, part, key))
        self._context += part
        self.num_running += 1
        self._stall_s += self._f * num_prompt_tokens

    def next_end_s(self) -> float:
        """Return the time at which the next sample ends, assuming no event before; infinite without samples."""
        if not self._ends:
            return inf
        left = max(0.0, self._ends[0][0] - self.made)
        return self.now_s + self._stall_s + left * (self._step_s() + 0.5 * self._k * self.num_running * left)

    def end(self) -> K:
        """Remove and return the sample that ends now."""
        made, _, part, key = heappop(self._ends)
        self.made = max(self.made, made)  # corrects rounding errors
        self._context -= part
        self.num_running -= 1
        if not self.num_running:
            self._context = self.made = 0.0  # limits their growth, and therefore rounding errors
        return key

    def running(self) -> list[K]:
        return [entry[3] for entry in self._ends]

    def cancel(self, key: K) -> float:
        """Remove a sample before its end; return the tokens of its context."""
        place = next(i for i, entry in enumerate(self._ends) if entry[3] == key)
        _, _, part, _ = self._ends.pop(place)
        self._ends.sort()
        self._context -= part
        self.num_running -= 1
        return self.made + part

    def _step_s(self) -> float:
        b = self.num_running
        return self._a + self._s * b + self._k * (self._context + b * self.made)


@dataclass(frozen=True)
class Costs:
    """Seconds of everything except tokens and learner steps."""

    reward_s: float = 0.0
    lease_s: float = 0.0
    """Mean time from the moment that admission opens to the lease of a waiting actor, which polls."""
    publish_s: float = 0.0
    """Time from the end of an update until its version can be pulled."""
    fetch_s: float = 0.0
    """Time from the moment that a version can be pulled until an engine starts to apply it."""
    pause_s: float = 0.0
    """Time during which the engine generates no token while it applies a version."""
    between_steps_s: float = 0.0
    """Time from the end of a step to the draw of the next step, assuming that its batch is ready."""


@dataclass(frozen=True)
class World:
    pools: tuple[EnginePool, ...]
    contract: StalenessContract
    buffer: BufferConfig
    lengths: LengthDistribution
    step_s: StepSeconds
    num_prompts: int = 65_536
    prompt_tokens: int = 64
    costs: Costs = Costs()
    score_token_s: float = 0.0
    """Seconds to score a token with the reference, in the first step that uses its sample; 0 without a reference."""
    learner_price: float = 0.0
    prompts: Callable[[int], PromptStream] | None = None
    """Seed -> prompt stream; None to sample from `lengths`."""

    @property
    def group_size(self) -> int:
        return self.pools[0].config.group_size


@dataclass
class Outcome:
    """Metrics of a simulated run after the warm-up steps."""

    seconds: float = 0.0
    num_steps: int = 0
    num_trained: int = 0
    num_generated: int = 0
    num_tokens: float = 0.0
    num_requeued: int = 0
    """Samples requeued for another engine."""
    num_dropped: int = 0
    """Samples dropped as stale before any step used them."""
    busy_s: float = 0.0
    between_s: float = 0.0
    """Seconds between steps during which no step can start."""
    slots_used: float = 0.0
    closed: float = 0.0
    """Fraction of time in which an engine had free slots while admission was closed, mean over engines."""
    behind: float = 0.0
    """Fraction of time in which an engine started no sample because its weights were too old, mean over engines."""
    lags: Counter[int] = field(default_factory=Counter)
    """Lag of the oldest token of a group used for training -> number of groups."""
    residence_s: float = 0.0
    """Seconds from the lease of a group to the end of its step, summed over the groups of all steps."""
    price: float = 0.0

    @property
    def samples_per_s(self) -> float:
        return self.num_trained / self.seconds if self.seconds else 0.0

    @property
    def learner_busy(self) -> float:
        return self.busy_s / self.seconds if self.seconds else 0.0

    @property
    def drop_share(self) -> float:
        return self.num_dropped / self.num_generated if self.num_generated else 0.0

    @property
    def lag_mean(self) -> float:
        """Return the mean lag of the oldest token of the groups used for training, in versions."""
        return sum(lag * count for lag, count in self.lags.items()) / max(1, self.lags.total())

    @property
    def price_per_1000(self) -> float:
        """Return the price per thousand samples used for training; infinite if there are none."""
        return self.price / 3.6 / self.samples_per_s if self.samples_per_s else inf

    @property
    def binds(self) -> Bound:
        if self.busy_s + self.between_s >= _FULL * self.seconds:
            return "training"
        if self.slots_used >= _FULL or self.closed + self.behind <= 1.0 - _FULL:
            return "generation"
        return "staleness" if self.closed >= self.behind else "weights"
