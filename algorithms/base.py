"""What a loss builds on.

LossInputs, LossOutput   what it reads and what it returns
group_advantages         advantages from the rewards of a group: RLOO, GRPO, Dr. GRPO
Algorithm                its config section, what that needs of a run, and the loss itself
Correction, Interval     entries of a section's `corrections`
check_inputs             refuses a batch that no loss can use
"""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, SupportsFloat

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

BASIC: dict[str, JsonValue] = {"basic": True}
"""Of the fields of knobs that most users set."""
LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 before exp: finite in float32, and far beyond any trust region."""


Measured = dict[str, Tensor | float | None]
"""Metrics by name, some of them yet to be read from the device."""


def clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def share_of(chosen: Tensor, number: int | Tensor) -> Tensor:
    """Return how many are chosen (bool), over a number, as float64."""
    return chosen.sum().double() / number


@dataclass(frozen=True)
class LossInputs:
    """One batch as the loss sees it: log-probabilities of completion tokens, flat over the batch.

    Shape suffixes: T completion tokens of the whole batch, B sequences, in groups that share a prompt. The tokens of a
    sequence stand in their order. All log-probabilities are natural, at the sampling temperature, over the full
    vocabulary. A loss that reads undeclared log-probabilities (see `Needs`) raises UndeclaredInput.
    """

    logprobs_T: Tensor
    """log pi of each token under the learner: the leaf that is differentiated."""
    proximal_logprobs_T: Tensor
    """log pi_prox: the weights at the start of this draw."""
    behaviour_logprobs_T: Tensor
    """log mu: the policy that sampled the token, whichever version that was."""
    reference_logprobs_T: Tensor
    """log pi_ref of the frozen reference model."""
    sequence_T: Tensor
    """int64: the sequence (0..B-1) of each token."""
    group_B: Tensor
    """int64: the group (0..num_groups-1) of each sequence: samples of one lease, or of one prompt."""
    rewards_B: Tensor
    finished_B: Tensor
    """bool: the sequence ended with an end-of-sequence token."""
    num_groups: int
    prompt_B: Tensor | None = None
    """int64: a number for the prompt of each sequence, the same in all its groups; None: every group has its own."""
    values_T: Tensor | None = None
    """The critic's value of the state before each token: a second leaf; None without a critic."""
    old_values_T: Tensor | None = None
    """The same at the start of this draw."""
    num_prompts: int | None = None
    """Of `prompt_B`, whose numbers are then 0..num_prompts-1; None: they may be any."""
    lag_T: Tensor | None = None
    """int64: updates between the version that sampled each token and the present one; None if not counted."""
    progress: float = 0.0
    """Share of the run's updates that came before this one, taken or not, as for a schedule of beta."""

    @property
    def num_sequences(self) -> int:
        return int(self.group_B.numel())

    def sum_per_sequence(self, values_T: Tensor) -> Tensor:
        """Sum a per-token value over each sequence: T -> B; 0 for an empty completion."""
        total_B = torch.zeros(self.num_sequences, dtype=values_T.dtype, device=values_T.device)
        return total_B.index_add(0, self.sequence_T, values_T)

    def mean_per_sequence(self, values_T: Tensor) -> Tensor:
        """Mean of a per-token value over each sequence: T -> B; 0 for an empty completion."""
        return self.sum_per_sequence(values_T) / self.length_B.clamp_min(1).to(values_T.dtype)

    @property
    def length_B(self) -> Tensor:
        # as bincount, which asks the device for the largest first
        none_B = torch.zeros(self.num_sequences, dtype=torch.int64, device=self.sequence_T.device)
        return none_B.index_add(0, self.sequence_T, torch.ones_like(self.sequence_T))

    @property
    def group_size_B(self) -> Tensor:
        """Sequences in the group of each sequence, in the dtype of the rewards."""
        ones_B = torch.ones_like(self.rewards_B)
        size_G = torch.zeros(self.num_groups, dtype=ones_B.dtype, device=ones_B.device)
        return size_G.index_add(0, self.group_B, ones_B)[self.group_B]

    def mean_per_group(self, values_B: Tensor) -> Tensor:
        """Mean over the sequences of each group, spread back over its sequences: B -> B.

        Summed in float64: equal float32 values have exactly that mean, so no rounding passes for a difference.
        """
        total_G = torch.zeros(self.num_groups, dtype=torch.float64, device=values_B.device)
        total_B = total_G.index_add(0, self.group_B, values_B.double())[self.group_B]
        return (total_B / self.group_size_B).to(values_B.dtype)

    def penalised_rewards_B(self, missing_eos_penalty: float) -> Tensor:
        """Rewards, less the penalty for a completion that ended by length: B."""
        return self.rewards_B - missing_eos_penalty * (~self.finished_B).to(self.rewards_B.dtype)

    def by_prompt(self) -> LossInputs:
        """Return the batch with all samples of a prompt in one group, whichever version wrote them."""
        if self.prompt_B is None:
            return self
        if self.num_prompts is not None:
            return replace(self, group_B=self.prompt_B, num_groups=self.num_prompts)
        numbers, group_B = torch.unique(self.prompt_B, return_inverse=True)
        return replace(self, group_B=group_B, num_groups=int(numbers.numel()))


GroupBaseline = Literal["rloo", "grpo", "dr_grpo"]

STD_FLOOR = 1e-6
"""Added to the group's standard deviation: with equal rewards the advantage is 0, not 0/0."""


def group_advantages(inputs: LossInputs, rewards_B: Tensor, baseline: GroupBaseline) -> Tensor:
    """Advantage of each sequence from the rewards of its group: B -> B. A group of one has advantage 0.

    rloo: r_j minus the mean of the other K-1 (arXiv 2402.14740).
    grpo: r_j minus the mean of all K, divided by their standard deviation, of K-1 (arXiv 2402.03300).
    dr_grpo: r_j minus the mean of all K (arXiv 2503.20783).
    """
    centred_B = rewards_B - inputs.mean_per_group(rewards_B)
    size_B = inputs.group_size_B
    if baseline == "rloo":
        # r_j - mean of the others = K / (K - 1) * (r_j - mean of all)
        return centred_B * size_B / (size_B - 1).clamp_min(1)
    if baseline == "dr_grpo":
        return centred_B
    variance_B = inputs.mean_per_group(centred_B.square()) * size_B / (size_B - 1).clamp_min(1)
    return centred_B / (variance_B.sqrt() + STD_FLOOR)


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss, differentiable in `LossInputs.logprobs_T` (and `values_T`), and what to log beside it."""

    loss: Tensor
    measured: Measured = field(default_factory=dict)
    """What is logged, by name. A tensor of one number costs nothing until it is read, which would wait for the GPU
    in every micro-batch. NaN counts as None."""
    weights_T: Tensor | None = None
    """The importance weights as the loss applied them: pi_prox / mu, or pi / mu of its gradient; None if it has
    none."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics as numbers; None if one does not apply to this batch. TypeError names one that is not one."""
        return {name: _number(name, found) for name, found in self.measured.items()}


def _number(name: object, found: Any) -> float | None:  # noqa: ANN401 -- of a user's loss
    if found is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        is_one = isinstance(name, str) and (not isinstance(found, Tensor) or found.numel() == 1)
        value = found.item() if is_one and hasattr(found, "item") else found  # of PyTorch and NumPy
        if is_one and isinstance(value, SupportsFloat):
            return None if math.isnan(number := float(value)) else number
    raise TypeError(f"the loss returned {described(found)} as metric {name!r}: give a real number or None")


def described(found: object) -> str:
    return f"a {type(found).__name__}, {getattr(found, 'shape', None) or reprlib.repr(found)},"


CriticKind = Literal["head", "model"]
Unit = Literal["sequence", "group", "prompt"]


@dataclass(frozen=True)
class Needs:
    """What a run must provide for a loss, and may rely on."""

    groups: bool = False
    """A config with K = 1, of which a group teaches nothing, is refused."""
    prompts: bool = False
    """All samples of a prompt in a step must be in one update."""
    reference: bool = False
    behaviour: bool = False
    """Finite log-probabilities of the policy that sampled."""
    proximal: bool = False
    """Log-probabilities of the policy at the start of the draw: one more forward pass, if it has several updates."""
    separable: Unit | None = None
    """The gradient with respect to a sequence's log-probabilities depends on those of that sequence, of its group or
    of its prompt alone, also if the proximal policy is the present one; rewards, references and counts of the whole
    batch may enter. None: it depends on all."""
    critic: CriticKind | None = None
    """Values, from a head on the policy or from a model of their own."""


class Correction(BaseModel):
    """An entry of `corrections`, by its `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Interval(Correction):
    """A range of values that are kept, with both ends."""

    type: str
    low: NonNegativeFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _must_not_be_empty(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"{self.type}: low = {self.low} is not below high = {self.high}")
        return self


class AlgorithmSection(BaseModel):
    """The `[algorithm]` section of one type; subclasses narrow `type` to their literal and add their knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: str = Field(json_schema_extra={"fixed": "the checkpoint has the state that this loss trains"})

    @property
    def needs(self) -> Needs:
        return Needs()


class GroupSection(AlgorithmSection):
    """The section of a loss that compares the samples of a prompt with each other."""

    compare: Literal["group", "prompt"] = Field(
        default="group",
        description="A sample is compared with its own group, or with all samples of its prompt in the step, also "
        "those of other policy versions (same_prompt of examples/samplers.py draws them together).",
    )

    def compared(self, inputs: LossInputs) -> LossInputs:
        """Return the batch in the groups that are compared."""
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
        """Name the sequence by its index in the batch, what is wrong with it and what to try."""
        super().__init__(f"sequence {sequence}: {what}")
        self.sequence = sequence
        self.what = what


def check_inputs(inputs: LossInputs, needs: Needs) -> None:
    """Check what came from outside, once for a draw: rewards, and behaviour log-probabilities that are read.

    The learner's own log-probabilities are not checked: if they are not finite, neither is the gradient. BadInputs
    names the first sequence at fault.
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
