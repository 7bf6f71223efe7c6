"""Autoscale: pools of actors that follow the lengths and costs of a run, or a sentence that says what would help.

off      nothing
advise   an event says what would make the run faster, or as fast with less
on       the number of actors is changed, as `leeway scale` does, within launch.autoscale_most and free hosts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from common.costs import Moments, TokenTime
from launch.config import Config
from launch.observe.status import PoolStatus
from planning.following import Advice, Following, PoolState, StepFacts

MOST_ADVISED = 4
"""Times the actors that there are; advice looks no further."""
FORGETS = 100
"""Looks without an advice after which it is news again; one that holds comes every 3 to 26."""

Row = Mapping[str, Any]
Room = Callable[[str], int]
"""How many more actors of a pool have a place now."""


class Autoscale:
    """Looks at each step, and says what should change; acting is its caller's."""

    def __init__(self, config: Config) -> None:
        """Of a run that has not taken a step."""
        self.mode = config.launch.autoscale
        self._most = config.launch.autoscale_most
        self._following = Following()
        self._before: Row | None = None
        self._num_looks = 0
        self._advised: dict[tuple[str, str, int], int] = {}
        """At which look what was advised last: kind, pool, count."""

    def look(self, row: Row, pools: Sequence[PoolStatus], room: Room) -> Advice | None:
        """A step has ended; None where nothing is to be said or done.

        Of `pools`, `wanted` counts the actors that are neither lost nor leaving: nobody waits for the others.
        """
        before, self._before = self._before, row
        if self.mode == "off" or before is None or row["skipped"]:
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
            is_most = self._most is not None and all(state.wanted >= self._most for state in states)
            why = f"launch.autoscale_most = {self._most}" if is_most else "no host or GPU has room for one more actor"
            return replace(advice, text=f"{advice.text}: {why}")
        return advice

    def _state(self, pool: PoolStatus, room: Room) -> PoolState | None:
        """None until its engines have measured what a step costs."""
        engines = pool.engines
        fit = Moments.from_list(engines.moments).fit() if engines.moments else None
        if fit is None or not pool.working:
            return None
        law = TokenTime(*fit.coefficients)
        most = MOST_ADVISED * pool.wanted if self.mode == "advise" else pool.wanted + room(pool.name)
        most = most if self._most is None else min(most, self._most)
        return PoolState(pool.name, pool.working, pool.wanted, engines.slots // pool.working, law, most)


def _facts(row: Row, pools: Sequence[PoolStatus], before: Row) -> StepFacts | None:
    """None where nothing was generated or used up lately."""
    slots = sum(pool.engines.slots for pool in pools)
    used = sum((pool.engines.slots_used or 0.0) * pool.engines.slots for pool in pools)
    lengths = [(each, pool.tokens_per_s) for pool in pools if (each := pool.engines.tokens_per_sample) is not None]
    used_up = sum(row[key] - before[key] for key in ("buffer/trained", "buffer/uninformative"))
    if not slots or used_up <= 0 or not (weight := sum(rate for _, rate in lengths)):
        return None
    num = row["batch/trajectories"]
    between_s = max(0.0, row["started_s"] - row["time/wait_for_batch"] - before["finished_s"])
    return StepFacts(
        tokens=sum(each * rate for each, rate in lengths) / weight,
        prompt_tokens=(row["batch/tokens"] - row["batch/completion_tokens"]) / num,
        train_s=row["time/step"] + between_s,
        slots_used=used / slots,
        samples=used_up,
    )
