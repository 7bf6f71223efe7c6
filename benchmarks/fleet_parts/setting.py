"""What a fleet of sleeping engines and a sleeping learner are told: laws of time, passed on in the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from statistics import NormalDist

from planning.costs import TokenTime
from planning.lengths import LengthLaw

VARIABLE = "LEEWAY_FLEET"


@dataclass(frozen=True)
class Stretch:
    """Lengths that change as training goes on, evenly over some versions."""

    start: int
    """Version up to which they are as the law says."""
    over: int
    """Versions from there until the change is whole, 1 or more."""
    to: float
    """Times the law's lengths in the end."""

    def at(self, version: int) -> float:
        """Times the law's lengths of a sample that begins with a version."""
        return 1.0 + (self.to - 1.0) * min(1.0, max(0.0, (version - self.start) / self.over))


@dataclass(frozen=True)
class EngineSetting:
    """Of the engines of a pool."""

    law: TokenTime
    lengths: LengthLaw
    pause_s: float = 0.05
    """That an update of the weights takes."""
    stretch: Stretch | None = None


@dataclass(frozen=True)
class FleetSetting:
    """Of all."""

    pools: Mapping[str, TokenTime]
    """Pool -> the law of its engines."""
    lengths: LengthLaw
    step_s: float
    """That a step takes besides its tokens."""
    step_token_s: float = 0.0
    """That each trained token takes."""
    pause_s: float = 0.05
    stretch: Stretch | None = None

    def engine(self, pool: str) -> EngineSetting:
        """What the engines of a pool are told."""
        return EngineSetting(self.pools[pool], self.lengths, self.pause_s, self.stretch)

    def as_text(self) -> str:
        """For the environment of every role."""
        laws = {
            name: [law.base, law.per_sample, law.per_kv_token, law.per_prompt_token] for name, law in self.pools.items()
        }
        lengths = [list(self.lengths.quantiles), self.lengths.explained]
        changing = [] if self.stretch is None else [list(astuple(self.stretch))]
        return json.dumps([laws, lengths, self.step_s, self.step_token_s, self.pause_s, *changing])

    @classmethod
    def here(cls) -> FleetSetting:
        """As it stands in the environment."""
        laws, (quantiles, explained), step_s, step_token_s, pause_s, *changing = json.loads(os.environ[VARIABLE])
        pools = {name: TokenTime(*terms) for name, terms in laws.items()}
        stretch = Stretch(*changing[0]) if changing else None
        return cls(pools, LengthLaw(tuple(quantiles), explained), step_s, step_token_s, pause_s, stretch)


def score_of(*key: object) -> float:
    """A standard normal score that is the same wherever the same key is asked for."""
    number = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    return NormalDist().inv_cdf((number + 0.5) / 2**64)
