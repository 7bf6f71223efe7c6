"""Which samples an engine starts, so that its cache is likely to have room for them to their end.

KvGate          decides; of a real engine and of a simulated one
CacheAdmission  `actors.admission = "cache"`: the samples of an actor that wait for its decision, in order

An engine whose cache is full preempts: it throws away the keys and values of a running sample, and computes them anew
later. A number of slots that rules that out leaves most of the cache empty, for few samples are as long as they may be.
So what counts is what those that run, and the next one, are likely to hold t tokens from now:

    sum_i p_i(t) b_i(t)  +  MARGIN * deviation(t)  <=  blocks of the cache      for all t

b_i(t) are the blocks of a sample's context by then, and p_i(t) = P(L >= n_i + t | L > n_i) that it still runs, given
the n_i tokens that it has made. L is as long as the last samples of this engine were, each beside what was foretold of
its prompt (`planning.lengths`). What is not foretold is alike for samples of a prompt, as far as was seen, so that
they end together; and they have the whole blocks of their prompt in common.
(Past-Future, arXiv 2507.10150, admits by the lengths of such a history.)
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

from actors.config import ActorsConfig, KvCache, KvSample

K = TypeVar("K", bound=Hashable)
Floats = npt.NDArray[np.float64]

MARGIN = 2.5
"""Standard deviations kept free: rarely more is needed than there is, which shows as samples preempted."""
REMEMBERED = 512
_ASSUMED = 32
"""Samples as long as they may be, which are believed in until others were seen."""
_NUM_TIMES = 21
_LIKE_GROUPS = 4.0
"""What is assumed of the correlation of siblings weighs as much as so many groups of them, as alike as not."""
_KEPT = 0.99
"""Of what earlier groups say of it, after one more."""


@dataclass(slots=True)
class _Siblings:
    """Completions of a group while some of its samples run."""

    num_running: int = 0
    num_ended: int = 0
    total: float = 0.0
    """Of the logarithms of how long they were beside what was foretold."""
    squares: float = 0.0


class LengthHistory:
    """Lengths of the last completions of an engine relative to predictions, and their correlation within a prompt."""

    def __init__(self, longest: int) -> None:
        """Start without completions: all may have the maximum length."""
        self._longest = longest
        self._recent = deque([inf] * _ASSUMED, REMEMBERED)
        self._sorted: Floats | None = None
        self._num_seen = 0
        self._log_tokens = self._shown = 0.0
        """Means of their logarithms, of all tokens and beside what was foretold."""
        self._product, self._square = _LIKE_GROUPS / 2, _LIKE_GROUPS

    @property
    def usual_tokens(self) -> float:
        """Return the tokens of a completion without a prediction."""
        return exp(self._log_tokens) if self._num_seen else float(self._longest)

    def see(self, num_tokens: int, usual_tokens: float, is_cut: bool, siblings: _Siblings) -> None:
        """Add a completion that has ended; one that was cut is known only to be longer."""
        self._num_seen += 1
        weight = 1.0 / min(self._num_seen, REMEMBERED)
        tokens = max(1, num_tokens)
        self._log_tokens += weight * (log(tokens) - self._log_tokens)
        share = tokens / (usual_tokens or self.usual_tokens)
        self._recent.append(inf if is_cut else share)
        self._sorted = None
        self._shown += weight * (log(share) - self._shown)
        shown = log(share) - self._shown
        siblings.num_ended += 1
        siblings.total += shown
        siblings.squares += shown * shown

    def compare(self, siblings: _Siblings) -> None:
        """Update the correlation by a group of which no sample runs any more."""
        if siblings.num_ended > 1:
            pairs = (siblings.total**2 - siblings.squares) / (siblings.num_ended - 1)
            self._product = _KEPT * self._product + pairs
            self._square = _KEPT * self._square + siblings.squares

    @property
    def alike(self) -> float:
        """Correlation of the log lengths of two samples of a prompt, 0 to 1, relative to predictions."""
        return min(1.0, max(0.0, self._product / self._square))

    def goes_on(self, made: Floats, at: Floats, usual_tokens: Floats) -> Floats:
        """Return P(a completion has `at` tokens or more | it has more than `made`), 1 if `at` is no more.

        `usual_tokens` is what is foretold; 0: nothing is. Shapes are broadcast.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent, np.float64))
        shares, size = self._sorted, len(self._sorted)
        usual = np.where(usual_tokens > 0.0, usual_tokens, self.usual_tokens)
        left = 1.0 + size - np.searchsorted(shares, at / usual)
        return np.minimum(1.0, left / (1.0 + size - np.searchsorted(shares, made / usual, side="right")))


class KvGate(Generic[K]):
    """Admits samples to one engine, by keys; `now` counts the tokens of a sample that ran from the beginning."""

    def __init__(self, config: ActorsConfig, cache: KvCache | None) -> None:
        """Start without samples. Without a cache, or with one that is never full, slots alone decide."""
        self._slots, self._group_size = config.max_running_samples, config.group_size
        self._running: dict[K, tuple[KvSample, float]] = {}
        """With `now` as they began."""
        self._groups: dict[int, _Siblings] = {}
        self._worst = 0
        """Blocks, were all as long as they may be."""
        self._prompt_tokens = float(config.max_prompt_tokens)
        self._longest = config.max_new_tokens
        self.num_sure = self._slots
        """Samples that there is room for, however long they become."""
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
        """Return whether a sample may start. One always may if none runs: the engine holds the longest."""
        if len(self._running) >= self._slots:
            return False
        if self._cache is None or not self._running:
            return True
        if self._worst + self._worst_of(sample) <= self._cache.num_blocks:
            return True
        return self._ahead([*self._running.values(), (sample, now)], now).fits(self._cache)

    def slots(self, now: float) -> int:
        """Return the number of samples that run, and of new ones that there is room for."""
        if self._cache is None:
            return self._slots
        running, prompt = len(self._running), round(self._prompt_tokens)
        known = self._ahead(list(self._running.values()), now, self._longest)
        mean_T, variance_T = self._fresh(known.times_T, prompt)
        low, high = min(self._slots, max(1, running)), self._slots
        while low < high:
            middle = (low + high + 1) // 2
            more = middle - running
            if known.plus(more * mean_T, more * variance_T).fits(self._cache):
                low = middle
            else:
                high = middle - 1
        return low

    def start(self, key: K, sample: KvSample, now: float) -> None:
        """Count a sample as running; a second call replaces the first, from now on."""
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
        """Remove a sample, with the tokens of its completion, or None if these do not count for lengths."""
        sample, _ = self._running.pop(key)
        if self._cache is None:
            return
        self._worst -= self._worst_of(sample)
        siblings = self._groups[sample.group]
        if num_tokens is not None:
            self.history.see(num_tokens, sample.usual_tokens, is_cut, siblings)
        siblings.num_running -= 1
        if not siblings.num_running:
            self.history.compare(siblings)
            del self._groups[sample.group]

    # --- parts ------------------------------------------------------------------------------------

    def _worst_of(self, sample: KvSample) -> int:
        assert self._cache is not None, "without one nobody asks"
        return ceil((sample.prompt_tokens + sample.limit + 1) / self._cache.block_tokens)

    def _fresh(self, times_T: Floats, prompt_tokens: int) -> tuple[Floats, Floats]:
        """Return mean and variance of the blocks of a sample of a new group, with its share of the common prompt."""
        assert self._cache is not None, "without one nothing is looked ahead"
        size, (_, block, shares) = self._group_size, self._cache
        blocks_T = np.ceil((prompt_tokens + times_T + 1) / block)
        if shares:
            blocks_T -= (prompt_tokens // block) * (size - 1) / size
        stays_T = np.where(times_T < self._longest, self.history.goes_on(np.zeros(1), times_T, np.zeros(1)), 0.0)
        variance_T = stays_T * (1.0 - stays_T) * blocks_T**2
        return stays_T * blocks_T, (1.0 + (size - 1) * self.history.alike) * variance_T

    def _ahead(self, samples: Sequence[tuple[KvSample, float]], now: float, longest: float = 0.0) -> _Ahead:
        """Return the blocks that these samples hold from now on, until the last ends, at least `longest` tokens."""
        assert self._cache is not None, "without one nothing is looked ahead"
        _, block, shares = self._cache
        if not samples:
            times_T = _times(longest)
            return _Ahead(np.zeros(len(times_T)), np.zeros(len(times_T)), times_T)
        samples = sorted(samples, key=lambda each: each[0].group)
        group_N, prompt_N, limit_N, there_N, usual_N = np.array([each for each, _ in samples], np.float64).T[:, :, None]
        began_N = np.array([[began] for _, began in samples])
        made_N = np.minimum(limit_N - 1.0, there_N + np.floor(now - began_N))
        times_T = _times(max(longest, float((limit_N - made_N).max())))
        at_NT = made_N + times_T
        stays_NT = np.where(at_NT < limit_N, self.history.goes_on(made_N, at_NT, usual_N), 0.0)
        blocks_NT = np.ceil((prompt_N + at_NT + 1.0) / block)
        first_G = np.flatnonzero(np.diff(group_N[:, 0], prepend=-np.inf))
        mean_T = np.zeros(len(times_T))
        if shares:
            shared_N = prompt_N // block
            blocks_NT -= shared_N
            mean_T += (shared_N[first_G] * (1.0 - np.multiply.reduceat(1.0 - stays_NT, first_G))).sum(0)
        deviation_NT = np.sqrt(stays_NT * (1.0 - stays_NT)) * blocks_NT
        apart_T, alike_T = (deviation_NT**2).sum(0), (np.add.reduceat(deviation_NT, first_G) ** 2).sum(0)
        alike = self.history.alike
        return _Ahead(mean_T + (stays_NT * blocks_NT).sum(0), (1.0 - alike) * apart_T + alike * alike_T, times_T)


class _Ahead(NamedTuple):
    """Blocks in use, at times from now on in tokens of a sample."""

    mean_T: Floats
    variance_T: Floats
    times_T: Floats

    def plus(self, mean_T: Floats, variance_T: Floats) -> _Ahead:
        return _Ahead(self.mean_T + mean_T, self.variance_T + variance_T, self.times_T)

    def fits(self, cache: KvCache) -> bool:
        return bool((self.mean_T + MARGIN * np.sqrt(self.variance_T)).max() <= cache.num_blocks)


def _times(longest: float) -> Floats:
    """Return the times to look ahead to, up to the last token: closer at first, while little has ended."""
    return np.unique(np.rint(max(0.0, longest - 1.0) * np.linspace(0.0, 1.0, _NUM_TIMES) ** 2))


class CacheAdmission:
    """Samples that wait for the gate of one engine, FIFO: the first that does not fit yet holds back those behind."""

    def __init__(self, gate: KvGate[Any], now: Callable[[], float]) -> None:
        self._gate, self._now = gate, now
        self.num_sure = gate.num_sure
        self._waiting: deque[tuple[asyncio.Future[None], Hashable, KvSample]] = deque()

    @property
    def needs_lengths(self) -> bool:
        return self._gate.needs_lengths

    def at_once(self) -> int:
        """As `KvGate.slots`; if samples wait, there is no room for others."""
        is_full = self._gate.needs_lengths and self._waiting
        return max(1, len(self._gate)) if is_full else self._gate.slots(self._now())

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        turn = asyncio.get_running_loop().create_future()
        waits = turn, key, sample
        self._waiting.append(waits)
        if len(self._waiting) == 1:  # else the first of them has not fitted, and nothing has changed
            self._next()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn has come all the same
                self.end(key)
            elif waits in self._waiting:
                self._waiting.remove(waits)
                self._next()
            raise

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Restart the clock of an admitted sample that had to wait for something else."""
        self._gate.start(key, sample, self._now())

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """As `KvGate.end`; then admit the next that wait."""
        self._gate.end(key, num_tokens, is_cut=is_cut)
        self._next()

    def _next(self) -> None:
        now, waiting = self._now(), self._waiting
        while waiting and (waiting[0][0].cancelled() or self._gate.has_room(waiting[0][2], now)):
            turn, key, sample = waiting.popleft()
            if not turn.cancelled():
                self._gate.start(key, sample, now)
                turn.set_result(None)


def cache_admission(config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> CacheAdmission:
    """Return the admission of `actors.admission = "cache"`; arguments as `actors.config.admission_of`."""
    return CacheAdmission(KvGate(config, cache), now)
