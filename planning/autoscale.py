"""Autoscale: pools of actors that follow the lengths and costs of a run, or a sentence that says what would help.

off      nothing
advise   an event says what would make the run faster, or as fast with less
on       the number of actors is changed, as `leeway scale` does, within free hosts

How many actors a run should have now goes by two times:

    T_gen(n)  seconds in which n actors would generate the samples that a step uses up, all slots full
    T_train   seconds of a step and of what lies between two, where its batch is ready

A step uses up what it trains for the first time, what is set aside because its rewards are all equal and what is
dropped because it is too old: more than it trains where groups go so, less where samples are trained again. Both are
means that forget (over `MEMORY` steps), that of lengths with its trend, a few steps ahead: lengths grow for hours, and
whoever looks at a mean is always late. A pool grows where T_gen has been above T_train for a few steps, by what it
lacks, and shrinks where one actor less would still be enough for many and the learner hardly waits: where it waits for
each batch, as with weight_sync.max_lag = 0, any actor less makes a step longer. In between lies a band in which nothing
happens, so that noise moves nothing. After a change it looks away until the change shows. (StreamRL, arXiv 2504.15930,
adjusts its generation stage by the same two times.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from planning.costs import Moments, TokenTime

if TYPE_CHECKING:  # who only simulates it need not wait for torch
    from launch.config import Config
    from launch.observe.status import PoolStatus

MEMORY = 8
AHEAD = 4
"""Steps: about as long as it takes to be sure."""
ABOVE, BELOW = 0.04, 0.12
"""Shares of T_train by which T_gen may be above, and has to be below with an actor less, before anything is done."""
PATIENCE_TO_GROW, PATIENCE_TO_SHRINK = 3, 20
SETTLES = 6
"""Steps after a change, from the moment that the actors are there, that say nothing yet."""
USED = 0.85
"""Share of the slots below which more of them would stay empty too."""
WAITS = 0.1
"""Share of the time above which a learner that waits for batches has no actor too many."""
MOST_ADVISED = 4
"""Times the actors that there are; advice looks no further."""
FORGETS = 100
"""Looks without an advice after which it is news again; one that holds comes every 3 to 26."""

Row = Mapping[str, Any]
Room = Callable[[str], int]
"""How many more actors of a pool have a place now."""


# --- how many actors there should be ---------------------------------------------------------------


@dataclass(frozen=True)
class PoolState:
    """State of a pool of actors."""

    name: str
    count: int
    wanted: int
    slots: int
    law: TokenTime
    most: int

    def rate(self, tokens: float, prompt_tokens: float) -> float:
        """Return the samples per second of one of its actors with full slots, by the mean tokens of a sample."""
        step_s = self.law.seconds(self.slots, self.slots * (prompt_tokens + tokens / 2))
        return 1.0 / (tokens * step_s / self.slots + self.law.per_prompt_token * prompt_tokens)


@dataclass(frozen=True)
class StepFacts:
    tokens: float
    """Of the completions that ended since the step before, mean."""
    prompt_tokens: float
    train_s: float
    slots_used: float
    samples: float
    """That were used up since the step before."""
    waited: float
    """Share of the time since the step before in which the learner waited for this one's batch."""


@dataclass(frozen=True)
class Advice:
    """A change that would make the run faster, or as fast with fewer actors."""

    kind: Literal["grow", "shrink", "bound", "full"]
    """Of the last two: the staleness bound leaves slots empty, and every pool has as many actors as it may."""
    text: str
    pool: str = ""
    """That is to change; empty where no number of actors helps."""
    count: int = 0


class _Trend:
    """Trend of a noisy figure, by double exponential smoothing (R. G. Brown, 1963)."""

    def __init__(self) -> None:
        self._once = self._twice = 0.0

    def see(self, figure: float, share: float) -> float:
        """Add a value with its weight; return the figure predicted for `AHEAD` steps from now."""
        if share >= 1.0:
            self._once = self._twice = figure
            return figure
        self._once += share * (figure - self._once)
        self._twice += share * (self._once - self._twice)
        above = self._once - self._twice
        return max(self._once / 2, self._once + above * (1.0 + AHEAD * share / (1.0 - share)))


class Following:
    """Looks at every step of a run; advises where it has been sure for long enough."""

    def __init__(self) -> None:
        self._lengths = _Trend()
        self._samples = self._tokens = self._train_s = self._used = self._waited = 0.0
        self._num_seen = 0
        self._above = self._below = 0
        self._settling = 0

    def look(self, pools: Sequence[PoolState], facts: StepFacts) -> Advice | None:
        """Add a step that has ended; return the change to make, None for no change."""
        self._remember(facts)
        if any(pool.count != pool.wanted for pool in pools):
            self._settling = SETTLES
        if self._settling:
            self._settling -= 1
            self._above = self._below = 0
            return None
        if self._num_seen < PATIENCE_TO_GROW or not any(pool.count for pool in pools):
            return None
        gen_s = self._gen_s(pools, facts.prompt_tokens)
        self._above = self._above + 1 if gen_s > (1.0 + ABOVE) * self._train_s else 0
        less = self._with_one_less(pools, facts.prompt_tokens)
        is_enough = less is not None and less[0] < (1.0 - BELOW) * self._train_s and self._waited < WAITS
        self._below = self._below + 1 if is_enough else 0
        if self._above >= PATIENCE_TO_GROW:
            self._above = 0
            return self._grow(pools, facts.prompt_tokens, gen_s)
        if less is not None and self._below >= PATIENCE_TO_SHRINK:
            self._below = 0
            text = f"pool '{less[1].name}' is one more than training needs: one less would do"
            return self._changed("shrink", less[1], less[1].count - 1, text)
        return None

    def _remember(self, facts: StepFacts) -> None:
        self._num_seen += 1
        new = 2.0 / (1.0 + min(self._num_seen, MEMORY))
        self._tokens = self._lengths.see(facts.tokens, new)
        self._train_s += new * (facts.train_s - self._train_s)
        self._used += new * (facts.slots_used - self._used)
        self._samples += new * (facts.samples - self._samples)
        self._waited += new * (facts.waited - self._waited)

    def _gen_s(self, pools: Sequence[PoolState], prompt_tokens: float) -> float:
        rate = sum(pool.count * pool.rate(self._tokens, prompt_tokens) for pool in pools)
        return self._samples / rate if rate else float("inf")

    def _grow(self, pools: Sequence[PoolState], prompt_tokens: float, gen_s: float) -> Advice:
        if self._used < USED:
            return Advice(
                "bound",
                f"{1.0 - self._used:.0%} of the slots stay empty, for the staleness bound grants no more leases: a "
                "larger weight_sync.max_lag would raise the rate, more actors would hardly",
            )
        there = [pool for pool in pools if pool.count < pool.most]
        if not there:
            took = f"the samples of a step take {gen_s:.1f} s, its training {self._train_s:.1f} s"
            return Advice("full", f"{took}, and no pool may grow")
        pool = max(there, key=lambda each: each.rate(self._tokens, prompt_tokens))
        count = pool.count + 1
        while count < pool.most and self._gen_s(_with(pools, pool, count), prompt_tokens) > self._train_s:
            count += 1
        after_s = max(self._gen_s(_with(pools, pool, count), prompt_tokens), self._train_s)
        gain = gen_s / after_s - 1.0
        more = count - pool.count
        actors = "one more actor" if more == 1 else f"{more} more actors"
        return self._changed("grow", pool, count, f"{actors} in pool '{pool.name}' would raise the rate by {gain:.0%}")

    def _with_one_less(self, pools: Sequence[PoolState], prompt_tokens: float) -> tuple[float, PoolState] | None:
        """Return T_gen without one actor of the slowest pool that has two, and that pool."""
        of_two = [pool for pool in pools if pool.count > 1]
        if not of_two:
            return None
        pool = min(of_two, key=lambda each: each.rate(self._tokens, prompt_tokens))
        return self._gen_s(_with(pools, pool, pool.count - 1), prompt_tokens), pool

    def _changed(self, kind: Literal["grow", "shrink"], pool: PoolState, count: int, text: str) -> Advice:
        self._settling = SETTLES
        return Advice(kind, text, pool.name, count)


def _with(pools: Sequence[PoolState], pool: PoolState, count: int) -> list[PoolState]:
    return [replace(each, count=count) if each is pool else each for each in pools]


# --- of a run that lives ---------------------------------------------------------------------------


class Autoscale:
    """Looks at each step, and says what should change; acting is its caller's. Loaded by `launch.train`."""

    def __init__(self, config: Config) -> None:
        self.mode = config.launch.autoscale
        self._following = Following()
        self._before: Row | None = None
        self._num_looks = 0
        self._advised: dict[tuple[str, str, int], int] = {}
        """At which look what was advised last: kind, pool, count."""

    def look(self, row: Row, pools: Sequence[PoolStatus], room: Room) -> Advice | None:
        """Add a step that has ended; return the change to report or make, None for no change.

        `wanted` of `pools` counts the actors that are neither lost nor shutting down.
        """
        before, self._before = self._before, row
        if before is None or row["skipped"]:
            return None
        if (row["step"], row["restarts"]) != (before["step"] + 1, before["restarts"]):  # what lies between is no step
            return None
        pools = [pool for pool in pools if pool.wanted]
        states = [state for pool in pools if (state := self._state(pool, room)) is not None]
        facts = _facts(row, pools, before)
        if facts is None or len(states) < len(pools):
            return None
        advice = self._following.look(states, facts)
        self._num_looks += 1
        if advice is None:
            return None
        what = (advice.kind, advice.pool, advice.count)
        is_known = self._num_looks - self._advised.get(what, -FORGETS) <= FORGETS
        self._advised[what] = self._num_looks
        if is_known and not (advice.pool and self.mode == "on"):
            return None
        if advice.kind == "full":
            return replace(advice, text=f"{advice.text}: no host or GPU has room for one more actor")
        return advice

    def _state(self, pool: PoolStatus, room: Room) -> PoolState | None:
        """Return the state of a pool; None until its engines have measured the cost of a step."""
        engines = pool.engines
        fit = Moments.from_list(engines.moments).fit() if engines.moments else None
        if fit is None or not pool.working:
            return None
        law = TokenTime(*fit.coefficients)
        most = MOST_ADVISED * pool.wanted if self.mode == "advise" else pool.wanted + room(pool.name)
        return PoolState(pool.name, pool.working, pool.wanted, engines.slots // pool.working, law, most)


def _facts(row: Row, pools: Sequence[PoolStatus], before: Row) -> StepFacts | None:
    """Return the figures of a step; None if nothing was generated or used up lately."""
    slots = sum(pool.engines.slots for pool in pools)
    used = sum((pool.engines.slots_used or 0.0) * pool.engines.slots for pool in pools)
    lengths = [(each, pool.tokens_per_s) for pool in pools if (each := pool.engines.tokens_per_sample) is not None]
    used_up = sum(row[key] - before[key] for key in ("buffer/trained", "buffer/uninformative", "buffer/dropped_stale"))
    if not slots or used_up <= 0 or not (weight := sum(rate for _, rate in lengths)):
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
        samples=used_up,
        waited=wait_s / (train_s + wait_s) if wait_s else 0.0,
    )
