"""Autoscale: pools of actors that follow the lengths and costs of a run, or a sentence that says what would help.

off      nothing
advise   an event says what would make the run faster, or as fast with less
on       the number of actors is changed, as `leeway scale` does, within launch.autoscale_most and free hosts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.costs import Moments, TokenTime
from launch.config import Config
from launch.observe.status import PoolStatus
from planning.following import Advice, Following, PoolState, StepFacts

MOST_ADVISED = 4
"""Times the actors that there are; advice looks no further."""

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
        self._said = ""

    def look(self, row: Row, pools: Sequence[PoolStatus], room: Room) -> Advice | None:
        """A step has ended; None where nothing is to be said or done."""
        before, self._before = self._before, row
        if self.mode == "off" or before is None or row["skipped"]:
            return None
        states = [state for pool in pools if (state := self._state(pool, room)) is not None]
        facts = _facts(row, pools, before)
        if facts is None or len(states) < len(pools):
            return None
        advice = self._following.look(states, facts)
        if advice is None or (not advice.pool and advice.text == self._said):
            return None
        self._said = advice.text
        return advice

    def _state(self, pool: PoolStatus, room: Room) -> PoolState | None:
        """None until its engines have measured what a step costs."""
        engines = pool.engines
        fit = Moments.from_list(engines.moments).fit() if engines.moments else None
        if fit is None or not pool.working:
            return None
        base, per_sample, per_kv_token, per_prompt_token = fit.coefficients
        law = TokenTime(base, per_sample, per_kv_token, per_prompt_token)
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
