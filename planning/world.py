"""World: a run as a simulation has it, its parts and what they cost; TokenClock: an engine of it; Outcome: what became
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf, sqrt
from typing import Any, Generic, Literal, TypeVar

from actors.config import ActorsConfig, KvCache
from buffer.config import BufferConfig
from common.staleness import StalenessContract
from planning.costs import TokenTime
from planning.kv_gate import KvGate
from planning.lengths import LengthLaw, PromptStream

K = TypeVar("K")
Bound = Literal["training", "generation", "staleness", "weights"]
StepSeconds = Callable[[Sequence[int]], float]
"""Tokens of each trained sample, prompt and completion -> seconds of the step, without scores of a reference."""


_BLOCK_TOKENS = 16
"""Of a simulated cache; samples of a prompt have nothing in common there."""
_FULL = 0.95
"""So much of its time at work, and it is what the others wait for."""


@dataclass(frozen=True)
class EnginePool:
    name: str
    count: int
    law: TokenTime
    config: ActorsConfig
    kv_tokens: float = inf
    """Tokens that the cache of an engine holds."""
    price: float = 0.0

    def gate(self) -> KvGate[Any] | None:
        """Return the gate of an idle engine, or of vLLM's own queue; None if its cache holds what it runs."""
        if self.kv_tokens == inf:
            return None
        gate: KvGate[Any] = KvGate(self.config, KvCache(int(self.kv_tokens) // _BLOCK_TOKENS, _BLOCK_TOKENS, False))
        return gate if gate.needs_lengths else None


class TokenClock(Generic[K]):
    """An engine that follows a law of `TokenTime`: samples that share it, in time; they are known by keys.

    Every running one makes a token in each step. Between two events their number b is fixed and their contexts grow
    together, so that the tokens v that each has made follow dv/dt = 1 / (g + h v) with h = per_kv_token * b. Its
    solution is closed, and no step is simulated.
    """

    __slots__ = (
        "_a", "_context", "_ends", "_f", "_k", "_s", "_seq", "_stall_s", "made", "now_s", "num_running",
    )  # fmt: skip

    def __init__(self, law: TokenTime, now_s: float = 0.0) -> None:
        self._a, self._s, self._k, self._f = law.base, law.per_sample, law.per_kv_token, law.per_prompt_token
        self.now_s = now_s
        self.made = 0.0
        """Tokens that a sample would have made which ran from the beginning."""
        self.num_running = 0
        self._context = 0.0
        """Tokens of all contexts, but for `made` of each."""
        self._stall_s = 0.0
        """Seconds still to pass in which no token is made."""
        self._ends: list[tuple[float, int, float, K]] = []
        """(value of `made` at which it ends, number, its part of `_context`, key), a heap."""
        self._seq = 0

    @property
    def kv_tokens(self) -> float:
        return self._context + self.num_running * self.made

    def advance(self, now_s: float) -> None:
        """Let time pass, to `next_end_s` at most."""
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
        """Make no token for this time from now on, as while weights are replaced."""
        self._stall_s += seconds

    def start(self, key: K, num_prompt_tokens: int, length: float) -> None:
        """Start a sample of this number of tokens; the others wait while its prompt is computed."""
        part = num_prompt_tokens - self.made
        self._seq += 1
        heappush(self._ends, (self.made + length, self._seq, part, key))
        self._context += part
        self.num_running += 1
        self._stall_s += self._f * num_prompt_tokens

    def next_end_s(self) -> float:
        """Return the time at which a sample ends, if nothing else happens; infinite without one."""
        if not self._ends:
            return inf
        left = max(0.0, self._ends[0][0] - self.made)
        return self.now_s + self._stall_s + left * (self._step_s() + 0.5 * self._k * self.num_running * left)

    def end(self) -> K:
        """Take out the sample that ends first, which it does now."""
        made, _, part, key = heappop(self._ends)
        self.made = max(self.made, made)  # what rounding left of its last token
        self._context -= part
        self.num_running -= 1
        if not self.num_running:
            self._context = self.made = 0.0  # so that neither grows, and loses digits, without end
        return key

    def running(self) -> list[K]:
        return [entry[3] for entry in self._ends]

    def cancel(self, key: K) -> float:
        """Take out a sample before its end; return the tokens of its context."""
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
    """Seconds of everything but tokens and steps."""

    reward_s: float = 0.0
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
class World:
    pools: tuple[EnginePool, ...]
    contract: StalenessContract
    buffer: BufferConfig
    lengths: LengthLaw
    step_s: StepSeconds
    num_prompts: int = 65_536
    prompt_tokens: int = 64
    costs: Costs = Costs()
    score_token_s: float = 0.0
    """Of scoring a token with the reference, in the step that uses its sample first; 0 without a reference."""
    learner_price: float = 0.0
    prompts: Callable[[int], PromptStream] | None = None
    """The prompts under a seed; None: as the law of lengths makes them."""

    @property
    def group_size(self) -> int:
        return self.pools[0].config.group_size


@dataclass
class Outcome:
    """Figures of a simulated run after its first steps."""

    seconds: float = 0.0
    num_steps: int = 0
    num_trained: int = 0
    num_generated: int = 0
    num_tokens: float = 0.0
    num_handed_on: int = 0
    """Samples that went on in another engine."""
    num_dropped: int = 0
    """Samples that were too old before any step used them."""
    busy_s: float = 0.0
    between_s: float = 0.0
    """Seconds after steps in which no other can begin."""
    slots_used: float = 0.0
    closed: float = 0.0
    """Share of time in which an engine had room and admission was closed, mean over engines."""
    behind: float = 0.0
    """Share of time in which an engine started nothing because its weights were too old, mean over engines."""
    lags: Counter[int] = field(default_factory=Counter)
    """Lag of the oldest token of a trained group -> groups."""
    residence_s: float = 0.0
    """From the lease of a group to the end of its step, added up over trained groups."""
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
        """Mean lag of the oldest token of a trained group, in versions."""
        return sum(lag * count for lag, count in self.lags.items()) / max(1, self.lags.total())

    @property
    def price_per_1000(self) -> float:
        """Price of a thousand trained samples; infinite if there are none."""
        return self.price / 3.6 / self.samples_per_s if self.samples_per_s else inf

    @property
    def binds(self) -> Bound:
        if self.busy_s + self.between_s >= _FULL * self.seconds:
            return "training"
        if self.slots_used >= _FULL or self.closed + self.behind <= 1.0 - _FULL:
            return "generation"
        return "staleness" if self.closed >= self.behind else "weights"
