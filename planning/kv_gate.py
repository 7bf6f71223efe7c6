"""KV-cache admission control: start only samples that the cache of an engine is likely to hold to their end.

KvGate          the admission decision, for a real and for a simulated engine
CacheAdmission  `actors.admission = "cache"`: FIFO queue of the samples of an actor that wait for admission

An engine with a full cache preempts: it discards the keys and values of a running sample and recomputes them later. A
slot count that rules out preemption leaves most of the cache empty, because few samples reach the maximum length.
The gate admits a sample if all running samples and the new sample are likely to fit t tokens from now:

    sum_i p_i(t) b_i(t)  +  MARGIN * deviation(t)  <=  blocks of the cache      for all t

b_i(t) is the number of blocks of the context of sample i at t, and p_i(t) = P(L >= n_i + t | L > n_i) the probability
that the sample still runs, given its n_i tokens so far. L follows the last completions of this engine, each relative to
the prediction for its prompt (`leeway.planning.lengths`). Samples of a prompt deviate from the prediction together,
with a correlation estimated from past groups. Samples of a prompt also share the whole blocks of the prompt.
(Past-Future, arXiv 2507.10150, also uses a length history for admission.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from leeway.actors.config import ActorsConfig, KvCache, KvSample

K = TypeVar("K", bound=Hashable)
Floats = npt.NDArray[np.float64]

MARGIN = 2.5
"""Safety margin in standard deviations; if demand exceeds it, which is rare, the engine preempts samples."""
REMEMBERED = 512
_NUM_PRIOR = 32
"""Number of completions of maximum length with which the history starts."""
_NUM_TIMES = 21
_PRIOR_GROUPS = 4.0
"""Weight, in groups, of the prior correlation of 0.5 among samples of a prompt."""
_DECAY = 0.99
"""Factor by which each new group decays the weight of earlier groups in this correlation."""


@dataclass(slots=True)
class _Siblings:
    """Statistics of the finished completions of a group that has running samples."""

    num_running: int = 0
    num_ended: int = 0
    total: float = 0.0
    """Sum of the centered log ratios of actual to predicted length; `squares` sums their squares."""
    squares: float = 0.0


class LengthHistory:
    """Lengths of the last completions of an engine relative to predictions, and their correlation within a prompt."""

    def __init__(self, longest: int) -> None:
        """Start with a prior of completions of maximum length."""
        self._longest = longest
        self._recent = deque([inf] * _NUM_PRIOR, REMEMBERED)
        self._sorted: Floats | None = None
        self._num_seen = 0
        self._log_tokens = self._log_ratio = 0.0
        """Means of the logarithms of the lengths, and of the ratios of actual to predicted length."""
        self._product, self._square = _PRIOR_GROUPS / 2, _PRIOR_GROUPS

    @property
    def usual_tokens(self) -> float:
        """Return the geometric mean of the completion tokens, used for prompts without a prediction."""
        return exp(self._log_tokens) if self._num_seen else float(self._longest)

    def update(self, num_tokens: int, usual_tokens: float, is_cut: bool, siblings: _Siblings) -> None:
        """Add a finished completion; if it was cut, its length is only a lower bound."""
        self._num_seen += 1
        weight = 1.0 / min(self._num_seen, REMEMBERED)
        tokens = max(1, num_tokens)
        self._log_tokens += weight * (log(tokens) - self._log_tokens)
        ratio = tokens / (usual_tokens or self.usual_tokens)
        self._recent.append(inf if is_cut else ratio)
        self._sorted = None
        self._log_ratio += weight * (log(ratio) - self._log_ratio)
        centered = log(ratio) - self._log_ratio
        siblings.num_ended += 1
        siblings.total += centered
        siblings.squares += centered * centered

    def update_correlation(self, siblings: _Siblings) -> None:
        """Update the correlation with a group that has no running samples left."""
        if siblings.num_ended > 1:
            pairs = (siblings.total**2 - siblings.squares) / (siblings.num_ended - 1)
            self._product = _DECAY * self._product + pairs
            self._square = _DECAY * self._square + siblings.squares

    @property
    def correlation(self) -> float:
        """Correlation of the log lengths of two samples of a prompt, 0 to 1, relative to predictions."""
        return min(1.0, max(0.0, self._product / self._square))

    def survival(self, made: Floats, at: Floats, usual_tokens: Floats) -> Floats:
        """Return P(a completion has `at` tokens or more | it has more than `made`), 1 if `at` is at most `made`.

        `usual_tokens` are the predicted tokens, 0 without a prediction. Shapes are broadcast.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent, np.float64))
        ratios, size = self._sorted, len(self._sorted)
        usual = np.where(usual_tokens > 0.0, usual_tokens, self.usual_tokens)
        left = 1.0 + size - np.searchsorted(ratios, at / usual)
        return np.minimum(1.0, left / (1.0 + size - np.searchsorted(ratios, made / usual, side="right")))


class KvGate(Generic[K]):
    """Admission to one engine, by sample key; `now` is measured in tokens of a sample that runs from the start."""

    def __init__(self, config: ActorsConfig, cache: KvCache | None) -> None:
        """Start without samples. Without a cache, or if the cache is never full, only the slots limit admission."""
        self._slots, self._group_size = config.max_running_samples, config.group_size
        self._running: dict[K, tuple[KvSample, float]] = {}
        """Key -> sample and `now` at its start."""
        self._groups: dict[int, _Siblings] = {}
        self._worst = 0
        """Blocks of all running samples at their maximum length."""
        self._prompt_tokens = float(config.max_prompt_tokens)
        self._longest = config.max_new_tokens
        self.num_sure = self._slots
        """Number of samples that fit even at maximum length."""
        if cache is not None:
            sure = cache.num_blocks // ceil((config.max_model_tokens + 1) / cache.block_tokens)
            self.num_sure = max(1, min(self._slots, sure))
        self._cache = cache if self.num_sure < self._slots else None
        self.history = LengthHistory(self._longest)

    def __len__(self) -> int:
        return len(self._running)

    @property
    def needs_lengths(self) -> bool:
        return self._cache is not None

    def has_room(self, sample: KvSample, now: float) -> bool:
        """Return whether a sample may start; always True if no sample runs, as the cache holds at least one sample."""
        if len(self._running) >= self._slots:
            return False
        if self._cache is None or not self._running:
            return True
        if self._worst + self._worst_of(sample) <= self._cache.num_blocks:
            return True
        return self._forecast([*self._running.values(), (sample, now)], now).fits(self._cache)

    def slots(self, now: float) -> int:
        """Return the number of running samples plus the new samples that fit."""
        if self._cache is None:
            return self._slots
        running, prompt = len(self._running), round(self._prompt_tokens)
        current = self._forecast(list(self._running.values()), now, self._longest)
        mean_T, variance_T = self._new_sample(current.times_T, prompt)
        low, high = min(self._slots, max(1, running)), self._slots
        while low < high:
            middle = (low + high + 1) // 2
            more = middle - running
            if current.plus(more * mean_T, more * variance_T).fits(self._cache):
                low = middle
            else:
                high = middle - 1
        return low

    def start(self, key: K, sample: KvSample, now: float) -> None:
        """Count a sample as running from `now` on; a repeated call replaces the first."""
        before = self._running.get(key)
        self._running[key] = sample, now
        if self._cache is None:
            return
        self._worst += self._worst_of(sample)
        if before is not None:
            self._worst -= self._worst_of(before[0])
            return
        self._groups.setdefault(sample.group, _Siblings()).num_running += 1
        self._prompt_tokens += (sample.prompt_tokens - self._prompt_tokens) / 16

    def end(self, key: K, num_tokens: int | None, *, is_cut: bool = False) -> None:
        """Remove a sample, and add its completion to the length history unless `num_tokens` is None."""
        sample, _ = self._running.pop(key)
        if self._cache is None:
            return
        self._worst -= self._worst_of(sample)
        siblings = self._groups[sample.group]
        if num_tokens is not None:
            self.history.update(num_tokens, sample.usual_tokens, is_cut, siblings)
        siblings.num_running -= 1
        if not siblings.num_running:
            self.history.update_correlation(siblings)
            del self._groups[sample.group]

    # --- parts ------------------------------------------------------------------------------------

    def _worst_of(self, sample: KvSample) -> int:
        assert self._cache is not None, "without a cache only slots limit admission"
        return ceil((sample.prompt_tokens + sample.limit + 1) / self._cache.block_tokens)

    def _new_sample(self, times_T: Floats, prompt_tokens: int) -> tuple[Floats, Floats]:
        """Return mean and variance of the blocks of a sample of a new group, with its part of the shared prompt."""
        assert self._cache is not None, "without a cache only slots limit admission"
        size, (_, block, shares) = self._group_size, self._cache
        blocks_T = np.ceil((prompt_tokens + times_T + 1) / block)
        if shares:
            blocks_T -= (prompt_tokens // block) * (size - 1) / size
        runs_T = np.where(times_T < self._longest, self.history.survival(np.zeros(1), times_T, np.zeros(1)), 0.0)
        variance_T = runs_T * (1.0 - runs_T) * blocks_T**2
        return runs_T * blocks_T, (1.0 + (size - 1) * self.history.correlation) * variance_T

    def _forecast(self, samples: Sequence[tuple[KvSample, float]], now: float, longest: float = 0.0) -> _Forecast:
        """Return the blocks that these samples hold over time, up to the end of the last, at least `longest` tokens."""
        assert self._cache is not None, "without a cache only slots limit admission"
        _, block, shares = self._cache
        if not samples:
            times_T = _times(longest)
            return _Forecast(np.zeros(len(times_T)), np.zeros(len(times_T)), times_T)
        samples = sorted(samples, key=lambda each: each[0].group)
        group_N, prompt_N, limit_N, there_N, usual_N = np.array([each for each, _ in samples], np.float64).T[:, :, None]
        began_N = np.array([[began] for _, began in samples])
        made_N = np.minimum(limit_N - 1.0, there_N + np.floor(now - began_N))
        times_T = _times(max(longest, float((limit_N - made_N).max())))
        at_NT = made_N + times_T
        runs_NT = np.where(at_NT < limit_N, self.history.survival(made_N, at_NT, usual_N), 0.0)
        blocks_NT = np.ceil((prompt_N + at_NT + 1.0) / block)
        first_G = np.flatnonzero(np.diff(group_N[:, 0], prepend=-np.inf))
        mean_T = np.zeros(len(times_T))
        if shares:
            shared_N = prompt_N // block
            blocks_NT -= shared_N
            mean_T += (shared_N[first_G] * (1.0 - np.multiply.reduceat(1.0 - runs_NT, first_G))).sum(0)
        deviation_NT = np.sqrt(runs_NT * (1.0 - runs_NT)) * blocks_NT
        independent_T, shared_T = (deviation_NT**2).sum(0), (np.add.reduceat(deviation_NT, first_G) ** 2).sum(0)
        rho = self.history.correlation
        return _Forecast(mean_T + (runs_NT * blocks_NT).sum(0), (1.0 - rho) * independent_T + rho * shared_T, times_T)


class _Forecast(NamedTuple):
    """Forecast of the blocks in use; times are in tokens of a running sample from now on."""

    mean_T: Floats
    variance_T: Floats
    times_T: Floats

    def plus(self, mean_T: Floats, variance_T: Floats) -> _Forecast:
        return _Forecast(self.mean_T + mean_T, self.variance_T + variance_T, self.times_T)

    def fits(self, cache: KvCache) -> bool:
        return bool((self.mean_T + MARGIN * np.sqrt(self.variance_T)).max() <= cache.num_blocks)


def _times(longest: float) -> Floats:
    """Return the times of a forecast up to the last token, denser at the start, when few samples have ended."""
    return np.unique(np.rint(max(0.0, longest - 1.0) * np.linspace(0.0, 1.0, _NUM_TIMES) ** 2))


class CacheAdmission:
    """FIFO queue of samples that wait for the gate of one engine; the head blocks the queue."""

    def __init__(self, gate: KvGate[Any], now: Callable[[], float]) -> None:
        self._gate, self._now = gate, now
        self.num_sure = gate.num_sure
        self._waiting: deque[tuple[asyncio.Future[None], Hashable, KvSample]] = deque()

    @property
    def needs_lengths(self) -> bool:
        return self._gate.needs_lengths

    def at_once(self) -> int:
        """Return `KvGate.slots`; while samples wait, the number of running samples."""
        is_full = self._gate.needs_lengths and self._waiting
        return max(1, len(self._gate)) if is_full else self._gate.slots(self._now())

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        admitted = asyncio.get_running_loop().create_future()
        entry = admitted, key, sample
        self._waiting.append(entry)
        if len(self._waiting) == 1:  # the sample is the head of the queue
            self._admit_next()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # the gate has started the sample: free its slot
                self.end(key)
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._admit_next()
            raise

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Restart the clock of an admitted sample whose start was delayed, for example by new weights."""
        self._gate.start(key, sample, self._now())

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """Remove a sample as `KvGate.end` does, then admit waiting samples."""
        self._gate.end(key, num_tokens, is_cut=is_cut)
        self._admit_next()

    def _admit_next(self) -> None:
        now, waiting = self._now(), self._waiting
        while waiting and (waiting[0][0].cancelled() or self._gate.has_room(waiting[0][2], now)):
            admitted, key, sample = waiting.popleft()
            if not admitted.cancelled():
                self._gate.start(key, sample, now)
                admitted.set_result(None)


def cache_admission(config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> CacheAdmission:
    """Return the admission for `actors.admission = "cache"`; arguments as `leeway.actors.config.admission_of`."""
    return CacheAdmission(KvGate(config, cache), now)
