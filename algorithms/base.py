"""Building blocks of losses.

LossInputs, LossOutput   inputs and output of a loss
group_advantages         advantages from the rewards of a group: RLOO, GRPO, Dr. GRPO
Algorithm                a config section with its Needs, and the loss function
Correction, Interval     base classes for the entries of `corrections`
check_inputs             raises for a batch that no loss can use
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Literal, Self, SupportsFloat, get_type_hints, overload

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    create_model,
    model_validator,
)
from torch import Tensor

BASIC: dict[str, JsonValue] = {"basic": True}
"""`json_schema_extra` of keys that most users set."""
LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats before exp: exp(20) is finite in float32, and far beyond any trust region."""


Measured = dict[str, Tensor | float | None]
"""Metrics by name; tensors are not yet copied from the device."""


def clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def share_of(chosen: Tensor, number: int | Tensor) -> Tensor:
    """Return the number of True entries of `chosen` divided by `number`, as float64."""
    return chosen.sum().double() / number


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss for one batch: log-probabilities of completion tokens, flat over the batch.

    Shape suffixes: T completion tokens of the batch, B sequences. The sequences of a group share a prompt. The tokens
    of a sequence are in order. All log-probabilities are natural logarithms at the sampling temperature, over the full
    vocabulary. Reading undeclared log-probabilities (see `Needs`) raises UndeclaredInput.
    """

    logprobs_T: Tensor
    """log pi of each token under the learner: the leaf to differentiate."""
    proximal_logprobs_T: Tensor
    """log pi_prox: log-probability under the weights at the step's start."""
    behaviour_logprobs_T: Tensor
    """log mu: log-probability under the policy version that sampled the token."""
    reference_logprobs_T: Tensor
    """log pi_ref: log-probability under the frozen reference model."""
    sequence_T: Tensor
    """int64: sequence (0..B-1) of each token."""
    group_B: Tensor
    """int64: group (0..num_groups-1) of each sequence: samples of one lease, or of one prompt."""
    rewards_B: Tensor
    """Reward of each sequence, in the dtype of the log-probabilities."""
    finished_B: Tensor
    """bool: whether the sequence ended with an end-of-sequence token."""
    num_groups: int
    """Number of groups in the batch."""
    prompt_B: Tensor | None = None
    """int64: prompt of each sequence, equal across groups of a prompt; None if every group has its own prompt."""
    values_T: Tensor | None = None
    """Critic value of the state before each token, a second leaf; None without a critic."""
    old_values_T: Tensor | None = None
    """`values_T` at the start of this step."""
    num_prompts: int | None = None
    """Number of prompts if `prompt_B` is in 0..num_prompts-1; None if `prompt_B` has arbitrary values."""
    lag_T: Tensor | None = None
    """int64: updates between the version that sampled each token and the current version; None if unknown."""
    progress: float = 0.0
    """Fraction of the run's updates before this update, including skipped updates; for schedules, such as of beta."""

    @property
    def num_sequences(self) -> int:
        """B: the number of sequences in the batch."""
        return int(self.group_B.numel())

    def sum_per_sequence(self, values_T: Tensor) -> Tensor:
        """Sum a per-token value over each sequence: T -> B; 0 for an empty completion."""
        total_B = torch.zeros(self.num_sequences, dtype=values_T.dtype, device=values_T.device)
        return total_B.index_add(0, self.sequence_T, values_T)

    def mean_per_sequence(self, values_T: Tensor) -> Tensor:
        """Return the mean of a per-token value over each sequence: T -> B; 0 for an empty completion."""
        return self.sum_per_sequence(values_T) / self.length_B.clamp_min(1).to(values_T.dtype)

    @property
    def length_B(self) -> Tensor:
        """int64: number of completion tokens of each sequence."""
        # avoid bincount, which synchronizes with the device to find the maximum
        return self.sum_per_sequence(torch.ones_like(self.sequence_T))

    @property
    def group_size_B(self) -> Tensor:
        """Size of each sequence's group, in the dtype of the rewards."""
        ones_B = torch.ones_like(self.rewards_B)
        size_G = torch.zeros(self.num_groups, dtype=ones_B.dtype, device=ones_B.device)
        return size_G.index_add(0, self.group_B, ones_B)[self.group_B]

    def mean_per_group(self, values_B: Tensor) -> Tensor:
        """Return for each sequence the mean over its group: B -> B.

        Sums in float64, so the mean of equal float32 values is exactly that value.
        """
        total_G = torch.zeros(self.num_groups, dtype=torch.float64, device=values_B.device)
        total_B = total_G.index_add(0, self.group_B, values_B.double())[self.group_B]
        return (total_B / self.group_size_B).to(values_B.dtype)

    def without_truncated(self) -> LossInputs:
        """Return the batch with the tokens of truncated sequences as constants, so that their gradient is exactly 0."""
        kept_T = self.finished_B[self.sequence_T]
        logprobs_T = torch.where(kept_T, self.logprobs_T, self.logprobs_T.detach())
        if self.values_T is None:
            return replace(self, logprobs_T=logprobs_T)
        values_T = torch.where(kept_T, self.values_T, self.values_T.detach())
        return replace(self, logprobs_T=logprobs_T, values_T=values_T)

    def by_prompt(self) -> LossInputs:
        """Return the batch with all samples of a prompt in one group, across policy versions."""
        if self.prompt_B is None:
            return self
        if self.num_prompts is not None:
            return replace(self, group_B=self.prompt_B, num_groups=self.num_prompts)
        numbers, group_B = torch.unique(self.prompt_B, return_inverse=True)
        return replace(self, group_B=group_B, num_groups=int(numbers.numel()))


GroupBaseline = Literal["rloo", "grpo", "dr_grpo"]

STD_FLOOR = 1e-6
"""Added to the standard deviation of a group, so that equal rewards give advantage 0, not 0/0."""


def group_advantages(inputs: LossInputs, rewards_B: Tensor, baseline: GroupBaseline) -> Tensor:
    """Return the advantage of each sequence from the rewards of its group: B -> B; 0 for a group of one.

    rloo: r_j minus the mean of the other K-1 rewards (arXiv 2402.14740).
    grpo: r_j minus the mean of all K rewards, divided by their standard deviation, denominator K-1 (arXiv 2402.03300).
    dr_grpo: r_j minus the mean of all K rewards (arXiv 2503.20783).
    """
    centred_B = rewards_B - inputs.mean_per_group(rewards_B)
    size_B = inputs.group_size_B
    if baseline == "rloo":
        # r_j - mean of the other rewards = K / (K - 1) * (r_j - mean of all rewards)
        return centred_B * size_B / (size_B - 1).clamp_min(1)
    if baseline == "dr_grpo":
        return centred_B
    variance_B = inputs.mean_per_group(centred_B.square()) * size_B / (size_B - 1).clamp_min(1)
    return centred_B / (variance_B.sqrt() + STD_FLOOR)


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss, differentiable in `LossInputs.logprobs_T` (and `values_T`), and its metrics."""

    loss: Tensor
    """Scalar to minimize."""
    measured: Measured = field(default_factory=dict)
    """Metrics by name. One-element tensors are read only when needed, because reading one synchronizes with the GPU.
    NaN counts as None."""
    weights_T: Tensor | None = None
    """Weights applied by the loss: pi_prox / mu, or pi / mu if the gradient is weighted; None without weights."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics as numbers; None if not applicable to this batch. Raises TypeError for any other value."""
        return {name: _number(name, found) for name, found in self.measured.items()}


def _number(name: object, found: Any) -> float | None:  # noqa: ANN401 -- from a user's loss
    if found is None:
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        is_one = isinstance(name, str) and (not isinstance(found, Tensor) or found.numel() == 1)
        value = found.item() if is_one and hasattr(found, "item") else found  # PyTorch and NumPy scalars
        if is_one and isinstance(value, SupportsFloat):
            return None if math.isnan(number := float(value)) else number
    raise TypeError(f"the loss returned {described(found)} as metric {name!r}: return a real number or None")


def described(found: object) -> str:
    return f"a {type(found).__name__}, {getattr(found, 'shape', None) or reprlib.repr(found)},"


CriticKind = Literal["head", "model"]
Unit = Literal["sequence", "group", "prompt"]


@dataclass(frozen=True)
class Needs:
    """Requirements of a loss on a run, and properties that the run may rely on."""

    groups: bool = False
    """Groups of several samples; a config with K = 1 is rejected."""
    prompts: bool = False
    """All samples of a prompt in a step belong to the same update."""
    reference: bool = False
    behaviour: bool = False
    """Finite log-probabilities under the policy that sampled the tokens."""
    proximal: bool = False
    """Log-probabilities under the policy at the step's start; a step of several updates then needs a forward pass."""
    separable: Unit | None = None
    """Unit whose learner log-probabilities determine the gradient for a sequence, even if the learner's ones serve as
    proximal ones. Rewards, references and counts of the whole batch may enter too. None if the gradient depends on the
    learner's log-probabilities of the whole batch."""
    critic: CriticKind | None = None
    """Source of the critic values: a head on the policy, or a separate model."""


class Correction(BaseModel):
    """An entry of `corrections`, selected by `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Interval(Correction):
    """A closed range of values to keep."""

    type: str
    low: NonNegativeFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _must_not_be_empty(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"{self.type}: low = {self.low} must be less than high = {self.high}")
        return self


class AlgorithmSection(BaseModel):
    """The `[algorithm]` section of one type; subclasses narrow `type` to a literal and add keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: str = Field(json_schema_extra={"fixed": "the checkpoint was trained with this loss"})
    mask_truncated: bool = Field(
        default=False, description="Let answers at the length limit add no gradient; they stay in all statistics."
    )

    @property
    def needs(self) -> Needs:
        return Needs()


class GroupSection(AlgorithmSection):
    """Section of a loss that compares samples of the same prompt."""

    compare: Literal["group", "prompt"] = Field(
        default="group",
        description="Compare a sample with its 'group', or with all samples of its 'prompt' in the step.",
    )

    def compared(self, inputs: LossInputs) -> LossInputs:
        """Return the batch regrouped according to `compare`."""
        return inputs.by_prompt() if self.compare == "prompt" else inputs


@dataclass(frozen=True)
class Algorithm:
    """An algorithm; each algorithm file of this package defines one as `ALGORITHM`."""

    config_class: type[AlgorithmSection]
    loss: Callable[[Any, LossInputs], LossOutput]
    """A pure function of the config and the whole batch."""


@overload
def algorithm(loss: Callable[[Any, LossInputs], LossOutput], /) -> Algorithm: ...
@overload
def algorithm(**needs: Any) -> Callable[[Callable[[Any, LossInputs], LossOutput]], Algorithm]: ...  # noqa: ANN401
def algorithm(loss: Callable[[Any, LossInputs], LossOutput] | None = None, /, **needs: Any) -> Any:
    """Turn a function into the `Algorithm` that `algorithm.type = "FILE.py:NAME"` names.

    Args:
        loss: takes a config and a batch. The annotation of its first parameter is the config class: a dataclass or a
            pydantic model, whose fields become keys of `[algorithm]`.
        needs: fields of `Needs`, such as `reference=True`: the inputs that the loss reads.
    """
    if loss is None:
        return lambda function: _algorithm_of(function, Needs(**needs))
    return _algorithm_of(loss, Needs())


def _algorithm_of(loss: Callable[[Any, LossInputs], LossOutput], needed: Needs) -> Algorithm:
    config_class = get_type_hints(loss)[next(iter(signature(loss).parameters))]
    if issubclass(config_class, AlgorithmSection):
        return Algorithm(config_class, loss)

    class Section(AlgorithmSection):
        @property
        def needs(self) -> Needs:
            return needed

    model = create_model(config_class.__name__, __base__=Section, **_fields_of(config_class))
    names = [name for name in model.model_fields if name not in AlgorithmSection.model_fields]

    def with_own_config(section: AlgorithmSection, inputs: LossInputs) -> LossOutput:
        return loss(config_class(**{name: getattr(section, name) for name in names}), inputs)

    return Algorithm(model, with_own_config)


def _fields_of(config_class: type) -> dict[str, Any]:
    """Return the fields of a dataclass or a pydantic model in the form that `create_model` takes."""
    if issubclass(config_class, BaseModel):
        return {name: (found.annotation, found) for name, found in config_class.model_fields.items()}
    hints = get_type_hints(config_class)

    def default(found: dataclasses.Field[Any]) -> Any:  # noqa: ANN401 -- of any field
        if found.default_factory is not dataclasses.MISSING:
            return Field(default_factory=found.default_factory)
        return ... if found.default is dataclasses.MISSING else found.default

    return {each.name: (hints[each.name], default(each)) for each in dataclasses.fields(config_class)}  # type: ignore[arg-type]


class BadInputs(ValueError):
    """The batch contains a value that no loss can use."""

    def __init__(self, sequence: int, what: str) -> None:
        """`sequence` is an index in the batch; `what` describes the problem and the fix."""
        super().__init__(f"sequence {sequence}: {what}")
        self.sequence = sequence
        self.what = what


def check_inputs(inputs: LossInputs, needs: Needs) -> None:
    """Validate external data, once per step: rewards, and behaviour log-probabilities if the loss reads them.

    The learner's own log-probabilities are not checked, because an infinite or NaN value shows in the gradient. Raises
    BadInputs for the first invalid sequence.
    """
    reward = _first_not_finite(inputs.rewards_B)
    if reward is not None:
        raise BadInputs(
            reward,
            f"its reward is {float(inputs.rewards_B[reward])}, but must be finite: let the reward function return None "
            "if it cannot score a completion",
        )
    if not needs.behaviour:
        return
    token = _first_not_finite(inputs.behaviour_logprobs_T)
    if token is not None:
        raise BadInputs(
            int(inputs.sequence_T[token]),
            f"the behaviour log-probability of a token is {float(inputs.behaviour_logprobs_T[token])}, but this loss "
            "needs a finite value: sample with log-probabilities, or use a loss without them (trajectory_balance or "
            "online_dpo with corrections = [])",
        )


def _first_not_finite(values: Tensor) -> int | None:
    wrong = torch.nonzero(~torch.isfinite(values))
    return int(wrong[0]) if wrong.numel() else None
