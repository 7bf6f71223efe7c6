"""The algorithms by name, the config union that `algorithm.type` selects from, and the loss of a config.

To add one: write a file of this package that ends in `ALGORITHM = Algorithm(Config, loss)`, and add its name to
`FILES`, which is also its `algorithm.type`. docs/algorithms/README.md goes through an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Union

import torch
from pydantic import Field
from torch import Tensor

from algorithms.base import Algorithm, AlgorithmSection, LossInputs, LossOutput, Needs, check_inputs

FILES = (
    "trajectory_balance",
    "online_dpo",
    "off_policy_ppo",
    "oapl",
)

Loss = Callable[[LossInputs], LossOutput]

ALGORITHMS: dict[str, Algorithm] = {name: import_module(f"algorithms.{name}").ALGORITHM for name in FILES}

if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmSection
else:
    AlgorithmConfig = Annotated[
        Union[tuple(algorithm.config_class for algorithm in ALGORITHMS.values())],  # noqa: UP007 -- built, not written
        Field(discriminator="type"),
    ]


def loss_for(config: AlgorithmConfig, *, checks: bool = True) -> Loss:
    """The loss of a config, as a function of a batch alone, which it checks first, unless that was done before.

    The function raises `algorithms.base.BadInputs`, a ValueError, for a batch that the loss cannot be right on, and
    `algorithms.registry.UndeclaredInput` where the loss reads what its `needs` do not declare.
    """
    loss = ALGORITHMS[config.type].loss
    needs = config.needs

    def checked(inputs: LossInputs) -> LossOutput:
        if checks:
            check_inputs(inputs, needs)
        return loss(config, only_declared(inputs, needs))

    return checked


class UndeclaredInput(RuntimeError):
    """A loss read an input that its section did not declare; the text names both."""


class _Undeclared(Tensor):
    """Stands for an input that a run may lack. It can be handed on; any other use of it raises."""

    field = ""
    need = ""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        raise UndeclaredInput(
            f"the loss reads inputs.{cls.field}, which the `needs` of its [algorithm] section do not declare, so a run "
            f"may have none. Return Needs({cls.need}=True, ...) there, or do not read it"
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<{self.field}: not declared>"


class _Reference(_Undeclared):
    field, need = "reference_logprobs_T", "reference"


class _Behaviour(_Undeclared):
    field, need = "behaviour_logprobs_T", "behaviour"


def only_declared(inputs: LossInputs, needs: Needs) -> LossInputs:
    """The inputs without those that a loss has not declared.

    Reading one of these raises UndeclaredInput: what a run left out is NaN or 0, which would pass for a fault of the
    data some steps later.
    """
    nothing = torch.empty(0)
    return replace(
        inputs,
        reference_logprobs_T=inputs.reference_logprobs_T if needs.reference else nothing.as_subclass(_Reference),
        behaviour_logprobs_T=inputs.behaviour_logprobs_T if needs.behaviour else nothing.as_subclass(_Behaviour),
    )
