"""Autoscale: size actor pools by the lengths and costs of a run, or report which change would help.

off      disabled
advise   log an event that names a change which makes the run faster, or keeps its throughput with fewer actors
on       change the number of actors, as `leeway scale` does, within free hosts

The decision compares two times:

    T_gen(n)  seconds that n actors need to generate the samples that a step consumes, with all slots full
    T_train   seconds of a step whose batch is ready, including the gap between two steps

A step consumes the samples that it uses for the first time, those set aside because all rewards of the group are equal,
and those dropped as stale. A step consumes more than its batch if groups are set aside or dropped, and less if samples
are reused. T_gen and T_train are exponential moving averages (over `MEMORY` steps). The mean length is extrapolated
`AHEAD` steps by its trend, because lengths grow for hours and a plain mean lags behind. A pool grows, by the missing
number of actors, after T_gen exceeds T_train for a few steps. A pool shrinks if one actor fewer would have sufficed for
many steps and the learner hardly waits: with weight_sync.max_lag = 0 every step waits for its batch. The band between
growing and shrinking absorbs noise. After a change, steps are ignored until the change takes effect.
(StreamRL, arXiv 2504.15930, adjusts its generation stage by the same two times.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from leeway.planning.costs import LeastSquares, TokenTime

if TYPE_CHECKING:  # these modules load torch, which a simulation must not load
    from leeway.launch.config import Config
    from leeway.launch.observe.status import PoolStatus

MEMORY = 8
AHEAD = 4
"""Number of steps by which the mean length is extrapolated: about as many as a decision takes."""
ABOVE, BELOW = 0.04, 0.12
"""A pool grows if T_gen > (1 + ABOVE) T_train, and shrinks if T_gen with one actor fewer < (1 - BELOW) T_train."""
PATIENCE_TO_GROW, PATIENCE_TO_SHRINK = 3, 20
SETTLE_STEPS = 6
"""Number of steps ignored after a change, counted from the moment that the actors are running."""
MIN_SLOTS_USED = 0.85
"""Fraction of the slots in use below which additional slots would stay empty too."""
MAX_WAIT_SHARE = 0.1
"""Maximum fraction of the time that the learner waits for batches; above it no pool shrinks."""
MOST_ADVISED = 4
"""Maximum number of actors that is advised, in multiples of the current number."""
REPEAT_AFTER = 100
"""Number of decisions without an advice before the advice is reported again; unchanged advice recurs every 3 to 26."""

Row = Mapping[str, Any]
Room = Callable[[str], int]
"""Name of a pool -> number of additional actors that fit now."""


# --- the policy ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolState:
    """State of an actor pool."""

    name: str
    count: int
    desired: int
    slots: int
    law: TokenTime
    most: int

    def rate(self, tokens: float, prompt_tokens: float) -> float:
        """Return the samples per second of one actor with all slots full, for this mean number of tokens."""
        step_s = self.law.seconds(self.slots, self.slots * (prompt_tokens + tokens / 2))
        return 1.0 / (tokens * step_s / self.slots + self.law.per_prompt_token * prompt_tokens)


@dataclass(frozen=True)
class StepFacts:
    tokens: float
    """Mean tokens of the completions that ended since the previous step."""
    prompt_tokens: float
    train_s: float
    slots_used: float
    samples: float
    """Number of samples consumed since the previous step."""
    waited: float
    """Fraction of the time since the previous step that the learner waited for the batch of this step."""


@dataclass(frozen=True)
class Advice:
    """A change that makes the run faster, or keeps its throughput with fewer actors."""

    kind: Literal["grow", "shrink", "bound", "full"]
    """`bound`: the staleness bound leaves slots empty; `full`: every pool has reached its maximum."""
    text: str
    pool: str = ""
    """Pool to change; empty if no number of actors helps."""
    count: int = 0


class _Trend:
    """Trend of a noisy value, by double exponential smoothing (R. G. Brown, 1963)."""

    def __init__(self) -> None:
        self._once = self._twice = 0.0

    def update(self, value: float, share: float) -> float:
        """Add a value with its weight; return the value predicted for `AHEAD` steps from now."""
        if share >= 1.0:
            self._once = self._twice = value
            return value
        self._once += share * (value - self._once)
        self._twice += share * (self._once - self._twice)
        above = self._once - self._twice
        return max(self._once / 2, self._once + above * (1.0 + AHEAD * share / (1.0 - share)))


class ScalingPolicy:
    """Policy that advises a change once its condition has held for enough steps."""

    def __init__(self) -> None:
        self._lengths = _Trend()
        self._samples = self._tokens = self._train_s = self._used = self._waited = 0.0
        self._num_seen = 0
        self._above = self._below = 0
        self._settling = 0

    def observe(self, pools: Sequence[PoolState], facts: StepFacts) -> Advice | None:
        """Add a finished step; return the change to make, or None for no change."""
        self._update_means(facts)
        if any(pool.count != pool.desired for pool in pools):
            self._settling = SETTLE_STEPS
        if self._settling:
            self._settling -= 1
            self._above = self._below = 0
            return None
        if self._num_seen < PATIENCE_TO_GROW or not any(pool.count for pool in pools):
            return None
        gen_s = self._gen_s(pools, facts.prompt_tokens)
        self._above = self._above + 1 if gen_s > (1.0 + ABOVE) * self._train_s else 0
        less = self._with_one_less(pools, facts.prompt_tokens)
        is_enough = less is not None and less[0] < (1.0 - BELOW) * self._train_s and self._waited < MAX_WAIT_SHARE
        self._below = self._below + 1 if is_enough else 0
        if self._above >= PATIENCE_TO_GROW:
            self._above = 0
            return self._grow(pools, facts.prompt_tokens, gen_s)
        if less is not None and self._below >= PATIENCE_TO_SHRINK:
            self._below = 0
            text = f"pool '{less[1].name}' has more actors than training needs: one fewer would suffice"
            return self._changed("shrink", less[1], less[1].count - 1, text)
        return None

    def _update_means(self, facts: StepFacts) -> None:
        self._num_seen += 1
        new = 2.0 / (1.0 + min(self._num_seen, MEMORY))
        self._tokens = self._lengths.update(facts.tokens, new)
        self._train_s += new * (facts.train_s - self._train_s)
        self._used += new * (facts.slots_used - self._used)
        self._samples += new * (facts.samples - self._samples)
        self._waited += new * (facts.waited - self._waited)

    def _gen_s(self, pools: Sequence[PoolState], prompt_tokens: float) -> float:
        rate = sum(pool.count * pool.rate(self._tokens, prompt_tokens) for pool in pools)
        return self._samples / rate if rate else float("inf")

    def _grow(self, pools: Sequence[PoolState], prompt_tokens: float, gen_s: float) -> Advice:
        if self._used < MIN_SLOTS_USED:
            return Advice(
                "bound",
                f"{1.0 - self._used:.0%} of the slots are empty because the staleness bound limits leases: increase "
                "weight_sync.max_lag; more actors would barely raise the rate",
            )
        growable = [pool for pool in pools if pool.count < pool.most]
        if not growable:
            times = f"generating the samples of a step takes {gen_s:.1f} s, training on them {self._train_s:.1f} s"
            return Advice("full", f"{times}, and no pool can grow")
        pool = max(growable, key=lambda each: each.rate(self._tokens, prompt_tokens))
        count = pool.count + 1
        while count < pool.most and self._gen_s(_with(pools, pool, count), prompt_tokens) > self._train_s:
            count += 1
        after_s = max(self._gen_s(_with(pools, pool, count), prompt_tokens), self._train_s)
        gain = gen_s / after_s - 1.0
        more = count - pool.count
        actors = "one more actor" if more == 1 else f"{more} more actors"
        return self._changed("grow", pool, count, f"{actors} in pool '{pool.name}' would raise the rate by {gain:.0%}")

    def _with_one_less(self, pools: Sequence[PoolState], prompt_tokens: float) -> tuple[float, PoolState] | None:
        """Return T_gen with one actor fewer in the slowest pool that has at least two, and that pool."""
        shrinkable = [pool for pool in pools if pool.count > 1]
        if not shrinkable:
            return None
        pool = min(shrinkable, key=lambda each: each.rate(self._tokens, prompt_tokens))
        return self._gen_s(_with(pools, pool, pool.count - 1), prompt_tokens), pool

    def _changed(self, kind: Literal["grow", "shrink"], pool: PoolState, count: int, text: str) -> Advice:
        self._settling = SETTLE_STEPS
        return Advice(kind, text, pool.name, count)


def _with(pools: Sequence[PoolState], pool: PoolState, count: int) -> list[PoolState]:
    return [replace(each, count=count) if each is pool else each for each in pools]


# --- in a running job -------------------------------------------------------------------------------


class Autoscale:
    """Autoscaling of a run: advice after each step, applied by the caller. Loaded by `leeway.launch.train`."""

    def __init__(self, config: Config) -> None:
        self.mode = config.launch.autoscale
        self._policy = ScalingPolicy()
        self._before: Row | None = None
        self._num_decisions = 0
        self._advised: dict[tuple[str, str, int], int] = {}
        """(kind, pool, count) -> number of the decision that last advised this change."""

    def observe(self, row: Row, pools: Sequence[PoolStatus], room: Room) -> Advice | None:
        """Add a finished step; return the change to report or make, or None for no change.

        `wanted` of `pools` counts the actors that are neither lost nor shutting down.
        """
        before, self._before = self._before, row
        if before is None or row["skipped"]:
            return None
        if (row["step"], row["restarts"]) != (before["step"] + 1, before["restarts"]):  # the steps are not consecutive
            return None
        pools = [pool for pool in pools if pool.wanted]
        states = [state for pool in pools if (state := self._state(pool, room)) is not None]
        facts = _facts(row, pools, before)
        if facts is None or len(states) < len(pools):
            return None
        advice = self._policy.observe(states, facts)
        self._num_decisions += 1
        if advice is None:
            return None
        change = (advice.kind, advice.pool, advice.count)
        is_known = self._num_decisions - self._advised.get(change, -REPEAT_AFTER) <= REPEAT_AFTER
        self._advised[change] = self._num_decisions
        if is_known and not (advice.pool and self.mode == "on"):
            return None
        if advice.kind == "full":
            return replace(advice, text=f"{advice.text}: no host or GPU has room for one more actor")
        return advice

    def _state(self, pool: PoolStatus, room: Room) -> PoolState | None:
        """Return the state of a pool, or None until its engines have measured the cost of a step."""
        engines = pool.engines
        fit = LeastSquares.from_list(engines.moments).fit() if engines.moments else None
        if fit is None or not pool.working:
            return None
        law = TokenTime(*fit.coefficients)
        most = MOST_ADVISED * pool.wanted if self.mode == "advise" else pool.wanted + room(pool.name)
        return PoolState(pool.name, pool.working, pool.wanted, engines.slots // pool.working, law, most)


def _facts(row: Row, pools: Sequence[PoolStatus], before: Row) -> StepFacts | None:
    """Return the facts of a step, or None if no sample was generated or consumed since the previous step."""
    slots = sum(pool.engines.slots for pool in pools)
    used = sum((pool.engines.slots_used or 0.0) * pool.engines.slots for pool in pools)
    lengths = [(each, pool.tokens_per_s) for pool in pools if (each := pool.engines.tokens_per_sample) is not None]
    consumed = sum(row[key] - before[key] for key in ("buffer/trained", "buffer/uninformative", "buffer/dropped_stale"))
    if not slots or consumed <= 0 or not (weight := sum(rate for _, rate in lengths)):
        return None
    num = row["batch/trajectories"]
    wait_s = row["time/wait_for_batch"]
    between_s = max(0.0, row["started_s"] - wait_s - before["finished_s"])
    train_s = row["time/step"] + between_s
    return StepFacts(
        tokens=sum(each * rate for each, rate in lengths) / weight,
        prompt_tokens=(row["batch/tokens"] - row["batch/completion_tokens"]) / num,
        train_s=train_s,
        slots_used=used / slots,
        samples=consumed,
        waited=wait_s / (train_s + wait_s) if wait_s else 0.0,
    )
