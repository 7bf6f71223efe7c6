"""Profile: what the parts of a run cost on one machine with one model, as it was measured. profile.json holds it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from common.files import write_whole
from launch.errors import ConfigError
from planning.costs import LearnerShape, LearnerTime, TokenTime
from planning.lengths import LengthLaw
from planning.world import Costs

FORMAT = 3
LEASE_S = 0.025
"""An actor at a closed door asks again after at most twice as long; see `actors.loop`."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    host: str = ""
    processor: str
    cores: int
    gpus: list[str] = []

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ", no GPU"
        return f"{self.processor}, {self.cores} cores{gpus}"

    def is_like(self, other: MachineFacts) -> bool:
        """Return whether work costs as much on the other, as far as these facts decide it."""
        return (self.processor, self.cores, self.gpus) == (other.processor, other.cores, other.gpus)


class EngineCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the engines of a pool."""

    terms: tuple[float, float, float, float]
    num_steps: int
    relative_error: float
    """Root mean square of what the law leaves of a step, over the mean step."""
    most_running: int
    """Samples that it was measured with at most; beyond, the law is a guess."""
    kv_tokens: int
    settings: dict[str, Any]
    """What of `[actors]` decides these costs, as it was."""

    @property
    def law(self) -> TokenTime:
        return TokenTime(*self.terms)


class LearnerCosts(msgspec.Struct, frozen=True, kw_only=True):
    terms: tuple[float, float, float, float]
    """Of `planning.costs.LearnerTime`, seconds, without scores of a reference."""
    num_steps: int
    relative_error: float
    shape: LearnerShape
    between_steps_s: float
    """From the end of a step to the begin of the next where its batch was ready."""
    score_token_s: float = 0.0
    """Of scoring a token with the reference in a step, on one stage alone; 0 where the learner has none."""

    @property
    def law(self) -> LearnerTime:
        return LearnerTime(*self.terms)

    def score_token_s_of(self, shape: LearnerShape) -> float:
        """Return the seconds of scoring a token in a step of a learner of this shape."""
        return self.score_token_s / (shape.num_stages * shape.num_replicas)


class WeightCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Delays of a version from the learner to the engines."""

    behind_s: float
    """From the end of a step until an engine begins to apply its weights, median."""
    pause_s: float
    """That an engine makes no token meanwhile, mean."""

    def as_costs(self, settled_s: float, between_steps_s: float) -> Costs:
        """Return the costs of a simulation; a version can be pulled about half way to its use."""
        return Costs(
            reward_s=settled_s,
            lease_s=LEASE_S,
            publish_s=self.behind_s / 2,
            fetch_s=self.behind_s / 2,
            pause_s=self.pause_s,
            between_steps_s=between_steps_s,
        )


class SampleFacts(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: float
    quantiles: tuple[float, ...]
    """Of the lengths of completions; see `LengthLaw`."""
    explained: float
    settled_s: float
    """From the last token of a sample to its commit: reward, push and all, mean."""

    @property
    def lengths(self) -> LengthLaw:
        return LengthLaw(self.quantiles, self.explained)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run on one machine with one model."""

    format: int = FORMAT
    taken_s: float
    machine: MachineFacts
    model: str
    """`common.hf_folder.model_identity`, or its name on the Hub."""
    engines: dict[str, EngineCosts]
    learner: LearnerCosts
    weights: WeightCosts
    samples: SampleFacts
    settings: dict[str, Any]
    """Keys of the config that decide what a step or a sample costs, as they were."""

    def costs(self) -> Costs:
        return self.weights.as_costs(self.samples.settled_s, self.learner.between_steps_s)

    def write(self, path: Path) -> None:
        write_whole(path, [msgspec.json.format(msgspec.json.encode(self)), b"\n"])

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a file of `write`; ConfigError if it is not there, or nothing that this Leeway reads."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Profile)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); `leeway profile CONFIG.toml` makes one"
            ) from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is no profile: {error}; `leeway profile CONFIG.toml` makes one") from None
        if found.format != FORMAT:
            raise ConfigError(f"{path} has format {found.format}, and this Leeway reads {FORMAT}: take it anew")
        return found

    def check_model(self, model: str, path: Path) -> None:
        """Raise ConfigError if it is of another model."""
        if model != self.model:
            raise ConfigError(
                f"{path} is of another model ({self.model}, and the config names {model}): what a token costs there "
                "says nothing here. Take one with this config: `leeway profile CONFIG.toml`"
            )

    def describe(self) -> str:
        """Return a text of what was measured, and how well the laws fit."""
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.taken_s))
        lines = [f"taken {taken} on {self.machine}, of {self.model}"]
        for name, engine in self.engines.items():
            law = engine.law
            full_s = law.seconds(engine.most_running, engine.most_running * self.samples.prompt_tokens)
            lines.append(
                f"engines of '{name}': a step takes {1e3 * law.base:.2f} ms + {1e6 * law.per_sample:.1f} us a sample "
                f"+ {1e9 * law.per_kv_token:.2f} ns a token of context + {1e6 * law.per_prompt_token:.2f} us a prompt "
                f"token, {1e3 * full_s:.1f} ms with {engine.most_running} samples; {engine.num_steps} steps, within "
                f"{engine.relative_error:.0%}"
            )
        learner = self.learner
        law_of_steps = learner.law
        lines.append(
            f"learner: a step takes {1e3 * law_of_steps.step:.0f} ms + {1e3 * law_of_steps.micro_batch:.1f} ms a "
            f"micro-batch + {1e6 * law_of_steps.token:.2f} us a token + {1e9 * law_of_steps.token_squared:.2f} ns a "
            f"squared one; {learner.num_steps} steps, within {learner.relative_error:.0%}"
            + (f"; the reference {1e6 * learner.score_token_s:.2f} us a token" if learner.score_token_s else "")
        )
        lines.append(
            f"weights: an engine begins to apply a version {self.weights.behind_s:.2f} s after its step, and pauses "
            f"{1e3 * self.weights.pause_s:.0f} ms for it"
        )
        lengths = self.samples.lengths
        lines.append(
            f"completions: {lengths.mean:.0f} tokens on average, {lengths.longest:.0f} at most, "
            f"{lengths.explained:.0%} of the spread explained by the prompt; committed "
            f"{1e3 * self.samples.settled_s:.0f} ms after the last token"
        )
        return "\n".join(lines)
