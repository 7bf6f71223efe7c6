"""Settings of a fleet of sleeping engines and a sleeping learner, passed in an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from statistics import NormalDist

from leeway.planning.costs import TokenTime
from leeway.planning.lengths import LengthDistribution

VARIABLE = "LEEWAY_FLEET"


@dataclass(frozen=True)
class Stretch:
    """A linear change of completion lengths over versions of the policy."""

    start: int
    """Version at which the change starts."""
    over: int
    """Number of versions of the change, at least 1."""
    to: float
    """Factor on lengths after the change."""

    def at(self, version: int) -> float:
        """Return the factor on the length of a sample that starts at a version."""
        return 1.0 + (self.to - 1.0) * min(1.0, max(0.0, (version - self.start) / self.over))


@dataclass(frozen=True)
class EngineSetting:
    """Setting of the engines of a pool."""

    law: TokenTime
    lengths: LengthDistribution
    pause_s: float = 0.05
    """Pause of generation in seconds during a weight update."""
    stretch: Stretch | None = None


@dataclass(frozen=True)
class FleetSetting:
    """Setting of a whole fleet."""

    pools: Mapping[str, TokenTime]
    """Pool -> token-time model of its engines."""
    lengths: LengthDistribution
    step_s: float
    """Fixed seconds of a learner step."""
    step_token_s: float = 0.0
    """Additional seconds of a step per token used for training."""
    pause_s: float = 0.05
    stretch: Stretch | None = None

    def engine(self, pool: str) -> EngineSetting:
        """Return the setting of the engines of a pool."""
        return EngineSetting(self.pools[pool], self.lengths, self.pause_s, self.stretch)

    def as_text(self) -> str:
        """Encode the setting for the environment of every role."""
        laws = {
            name: [law.base, law.per_sample, law.per_kv_token, law.per_prompt_token] for name, law in self.pools.items()
        }
        lengths = [list(self.lengths.quantiles), self.lengths.explained]
        changing = [] if self.stretch is None else [list(astuple(self.stretch))]
        return json.dumps([laws, lengths, self.step_s, self.step_token_s, self.pause_s, *changing])

    @classmethod
    def here(cls) -> FleetSetting:
        """Decode the setting from the environment."""
        laws, (quantiles, explained), step_s, step_token_s, pause_s, *changing = json.loads(os.environ[VARIABLE])
        pools = {name: TokenTime(*terms) for name, terms in laws.items()}
        stretch = Stretch(*changing[0]) if changing else None
        return cls(pools, LengthDistribution(tuple(quantiles), explained), step_s, step_token_s, pause_s, stretch)


def score_of(*key: object) -> float:
    """Return a standard normal score that the key determines."""
    number = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")
    return NormalDist().inv_cdf((number + 0.5) / 2**64)
