"""What a loss builds on: Algorithm, its config section and its Needs, and the check of the batch that it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from algorithms.inputs import LossInputs, LossOutput

CriticKind = Literal["head", "model"]


@dataclass(frozen=True)
class Needs:
    """What a run must provide for a loss, and may rely on. The rest it may leave out."""

    groups: bool = False
    """A group of one (K = 1) teaches nothing, so a config with it is refused."""
    prompts: bool = False
    """All samples of a prompt in a step must be in one update."""
    reference: bool = False
    """Log-probabilities of the reference model."""
    behaviour: bool = False
    """Finite log-probabilities of the policy that sampled."""
    separable: bool = False
    """The gradient with respect to a sequence's log-probabilities depends on those of that sequence alone, also where
    the proximal policy is the present one; rewards, references and counts of the whole batch may enter."""
    critic: CriticKind | None = None
    """Values: from a head on the policy, or from a model of their own."""


class AlgorithmSection(BaseModel):
    """The `[algorithm]` section of one type; subclasses narrow `type` to their literal and add their knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: str

    @property
    def needs(self) -> Needs:
        """What a run must provide."""
        return Needs()


class GroupSection(AlgorithmSection):
    """The section of a loss that compares the samples of a prompt with each other."""

    compare: Literal["group", "prompt"] = Field(
        default="group",
        description="A sample is compared with its own group, or with all samples of its prompt in the step, also "
        "those of other policy versions (buffer.groups_per_prompt draws them together).",
    )

    def compared(self, inputs: LossInputs) -> LossInputs:
        """The batch in the groups that are compared."""
        return inputs.by_prompt() if self.compare == "prompt" else inputs


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: what a file of this package registers as `ALGORITHM`."""

    config_class: type[AlgorithmSection]
    loss: Callable[[Any, LossInputs], LossOutput]
    """A pure function of the config and the whole batch."""


class BadInputs(ValueError):
    """A value in the batch that no loss can use."""

    def __init__(self, sequence: int, what: str) -> None:
        """Name the sequence by its index in the batch, and say what is wrong with it and what to try."""
        super().__init__(f"sequence {sequence}: {what}")
        self.sequence = sequence
        self.what = what


def check_inputs(inputs: LossInputs, needs: Needs) -> None:
    """Check what came from outside: rewards, and behaviour log-probabilities where they are read.

    The learner's own log-probabilities are not checked: where they are not finite, the gradient tells.

    Raises:
        BadInputs: names the first sequence at fault.
    """
    reward = _first_not_finite(inputs.rewards_B)
    if reward is not None:
        raise BadInputs(
            reward,
            f"its reward is {float(inputs.rewards_B[reward])}, and must be finite. Let the reward function return None "
            "for what it cannot judge",
        )
    if not needs.behaviour:
        return
    token = _first_not_finite(inputs.behaviour_logprobs_T)
    if token is not None:
        raise BadInputs(
            int(inputs.sequence_T[token]),
            f"the behaviour log-probability of a token is {float(inputs.behaviour_logprobs_T[token])}, and this loss "
            "reads it: sample with log-probabilities, or choose a loss without them (trajectory_balance or online_dpo "
            "with corrections = [])",
        )


def _first_not_finite(values: Tensor) -> int | None:
    wrong = torch.nonzero(~torch.isfinite(values))
    return int(wrong[0]) if wrong.numel() else None
