"""Profile: measured costs of the parts of a run on one machine with one model, stored as profile.json."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from leeway.common.files import write_whole
from leeway.launch.errors import ConfigError
from leeway.planning.costs import LearnerTime, TokenTime
from leeway.planning.lengths import LengthDistribution
from leeway.planning.world import Costs

FORMAT = 4
LEAST_ERROR = 0.05
"""Relative error of predictions that no profile undercuts: the usual error for other configs, see docs/planning.md."""
LEASE_S = 0.025
"""Mean seconds until an actor retries a refused lease request, half of the maximum; see `leeway.actors.loop`."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    host: str = ""
    processor: str
    cores: int
    gpus: list[str] = []

    def __str__(self) -> str:
        gpus = f", {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ", no GPU"
        return f"{self.processor}, {self.cores} cores{gpus}"

    def is_like(self, other: MachineFacts) -> bool:
        """Return whether processor, cores and GPUs are equal, so costs should be the same on both machines."""
        return (self.processor, self.cores, self.gpus) == (other.processor, other.cores, other.gpus)


class EngineCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the engines of a pool."""

    terms: tuple[float, float, float, float]
    num_steps: int
    relative_error: float
    """Root mean square of the residuals, divided by the mean time of a step."""
    most_running: int
    """Maximum number of running samples in the measurement; beyond it the cost model extrapolates."""
    kv_tokens: int
    settings: dict[str, Any]
    """Values of the `[actors]` keys that determine these costs."""

    @property
    def law(self) -> TokenTime:
        return TokenTime(*self.terms)


class LearnerCosts(msgspec.Struct, frozen=True, kw_only=True):
    terms: tuple[float, float, float, float]
    """Coefficients of `leeway.planning.costs.LearnerTime` in seconds, without reference scores."""
    num_steps: int
    relative_error: float
    between_steps_s: float
    """Seconds from the end of a step to the start of the next step, assuming that its batch is ready."""
    score_token_s: float = 0.0
    """Seconds to score a token with the reference model on a single stage; 0 without a reference."""

    @property
    def law(self) -> LearnerTime:
        return LearnerTime(*self.terms)


class WeightCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Delays until a version of the learner is in use by the engines."""

    behind_s: float
    """Median seconds from the end of a step until an engine starts to apply its weights."""
    pause_s: float
    """Mean seconds per update during which an engine generates no token."""

    def as_costs(self, settled_s: float, between_steps_s: float) -> Costs:
        """Return simulation costs; assumes that a version can be pulled after half of `behind_s`."""
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
    """Quantiles of completion lengths; see `LengthDistribution`."""
    explained: float
    settled_s: float
    """Mean seconds from the last token of a sample to its commit, including reward and push."""

    @property
    def lengths(self) -> LengthDistribution:
        return LengthDistribution(self.quantiles, self.explained)


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run on one machine with one model."""

    format: int = FORMAT
    taken_s: float
    machine: MachineFacts
    model: str
    """`leeway.common.hf_folder.model_identity`, or the name on the Hub."""
    engines: dict[str, EngineCosts]
    learner: LearnerCosts
    weights: WeightCosts
    samples: SampleFacts
    settings: dict[str, Any]
    """Values of the config keys that determine the cost of a step or a sample."""
    error: float = LEAST_ERROR
    """Greatest relative error of the predicted samples per second of the profiled runs, at least LEAST_ERROR."""

    def write(self, path: Path) -> None:
        write_whole(path, [msgspec.json.format(msgspec.json.encode(self)), b"\n"])

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile written by `write`; raise ConfigError if the file is missing, invalid or of another format."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Profile)
        except (OSError, msgspec.DecodeError) as error:
            why = getattr(error, "strerror", error)
            raise ConfigError(f"{path} is not a profile ({why}): run `leeway profile CONFIG.toml`") from None
        if found.format != FORMAT:
            raise ConfigError(f"{path} has format {found.format}, expected {FORMAT}: run `leeway profile` again")
        return found

    def check_model(self, model: str, path: Path) -> None:
        """Raise ConfigError if the profile is of another model."""
        if model != self.model:
            raise ConfigError(
                f"{path} is a profile of model {self.model}, but the config has {model}, whose costs differ: "
                "run `leeway profile CONFIG.toml` for this config"
            )

    def describe(self) -> str:
        """Return a text with the measured costs and the goodness of fit."""
        taken = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.taken_s))
        lines = [f"measured {taken} on {self.machine}, model {self.model}"]
        for name, engine in self.engines.items():
            law = engine.law
            lines.append(
                f"engines of '{name}': step = {1e3 * law.base:.2f} ms + {1e6 * law.per_sample:.1f} us per sample "
                f"+ {1e9 * law.per_kv_token:.2f} ns per context token + {1e6 * law.per_prompt_token:.2f} us per prompt "
                f"token; {engine.num_steps} steps, RMS error {engine.relative_error:.0%}"
            )
        learner, step = self.learner, self.learner.law
        lines.append(
            f"learner: step = {1e3 * step.step:.0f} ms + {1e3 * step.micro_batch:.1f} ms per micro-batch "
            f"+ {1e6 * step.token:.2f} us per token + {1e9 * step.token_squared:.2f} ns per squared token; "
            f"{learner.num_steps} steps, RMS error {learner.relative_error:.0%}"
            + (f"; reference {1e6 * learner.score_token_s:.2f} us per token" if learner.score_token_s else "")
        )
        lines.append(
            f"weights: an engine starts to apply a version {self.weights.behind_s:.2f} s after its step, and pauses "
            f"for {1e3 * self.weights.pause_s:.0f} ms"
        )
        lengths = self.samples.lengths
        lines.append(
            f"completions: {lengths.mean:.0f} tokens on average, {lengths.longest:.0f} at most, "
            f"{lengths.explained:.0%} of the variance explained by the prompt; committed "
            f"{1e3 * self.samples.settled_s:.0f} ms after the last token"
        )
        lines.append(f"error of predicted samples/s: {self.error:.0%} or less in the profiled runs")
        return "\n".join(lines)
