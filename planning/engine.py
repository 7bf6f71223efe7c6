"""TokenClock: the samples that share an engine, in time. Every running one makes a token in each step.

Between two events their number b is fixed and their contexts grow together, so that the tokens v that each has made
follow dv/dt = 1 / (g + h v) with h = per_kv_token * b. Its solution is closed, and no step is simulated.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, sqrt
from typing import Generic, TypeVar

from common.costs import TokenTime

K = TypeVar("K")


class TokenClock(Generic[K]):
    """An engine that follows a law of `TokenTime`; samples are known by keys."""

    __slots__ = (
        "_a", "_context", "_ends", "_f", "_k", "_s", "_seq", "_stall_s", "kv_peak", "made", "now_s", "num_running",
    )  # fmt: skip

    def __init__(self, law: TokenTime, now_s: float = 0.0) -> None:
        """Idle, with no time to lose."""
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
        self.kv_peak = 0.0
        """The most tokens of contexts that were there at once."""

    @property
    def kv_tokens(self) -> float:
        """Tokens of all contexts."""
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
        """No token is made for so long, from now on: weights are being replaced, say."""
        self._stall_s += seconds

    def start(self, key: K, num_prompt_tokens: int, length: float) -> None:
        """A sample of so many tokens begins now; its prompt is computed first, and the others wait for that."""
        part = num_prompt_tokens - self.made
        self._seq += 1
        heappush(self._ends, (self.made + length, self._seq, part, key))
        self._context += part
        self.num_running += 1
        self._stall_s += self._f * num_prompt_tokens

    def next_end_s(self) -> float:
        """When a sample ends, if nothing else happens; infinite without one."""
        if not self._ends:
            return inf
        left = max(0.0, self._ends[0][0] - self.made)
        return self.now_s + self._stall_s + left * (self._step_s() + 0.5 * self._k * self.num_running * left)

    def end(self) -> K:
        """Take out the sample that ends first, which it does now."""
        made, _, part, key = heappop(self._ends)
        self.made = max(self.made, made)  # what rounding left of its last token
        context = self._context + self.num_running * self.made
        if context > self.kv_peak:
            self.kv_peak = context
        self._context -= part
        self.num_running -= 1
        if not self.num_running:
            self._context = self.made = 0.0  # so that neither grows, and loses digits, without end
        return key

    def running(self) -> list[K]:
        """Of the samples that run."""
        return [entry[3] for entry in self._ends]

    def cancel(self, key: K) -> float:
        """Take out a sample before its end; the tokens of its context."""
        place = next(i for i, entry in enumerate(self._ends) if entry[3] == key)
        _, _, part, _ = self._ends.pop(place)
        self._ends.sort()
        self._context -= part
        self.num_running -= 1
        return self.made + part

    def _step_s(self) -> float:
        b = self.num_running
        return self._a + self._s * b + self._k * (self._context + b * self.made)
