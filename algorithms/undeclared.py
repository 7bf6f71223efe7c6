"""Undeclared inputs: what a run need not provide for a loss is withheld from it, and says so when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from algorithms.inputs import LossInputs
from algorithms.section import Needs


class UndeclaredInput(RuntimeError):
    """A loss read an input that its section did not declare; the text names both."""


class _Undeclared(Tensor):
    """Stands for such an input. It can be handed on; whatever else is done with it raises."""

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
