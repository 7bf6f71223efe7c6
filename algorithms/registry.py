"""The algorithms by name, the config union that `algorithm.type` selects from, and the loss of a config.

To add one: write a file of this package that ends in `ALGORITHM = Algorithm(Config, loss)`, and add its name to
`FILES`, which is also its `algorithm.type`. One of a user's stays in a file of theirs, and is named as
`FILE.py:ALGORITHM`. docs/algorithms/README.md goes through an example of both.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Union, cast

import torch
from pydantic import Field, SerializeAsAny, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from torch import Tensor

from algorithms.base import Algorithm, AlgorithmSection, LossInputs, LossOutput, Needs, described
from common.user_input import UserFileError, blamed, is_reference, load_object

FILES = (
    "trajectory_balance",
    "online_dpo",
    "off_policy_ppo",
    "oapl",
    "distillation",
)

Loss = Callable[[LossInputs], LossOutput]

ALGORITHMS: dict[str, Algorithm] = {name: import_module(f"algorithms.{name}").ALGORITHM for name in FILES}


def algorithm_of(name: str) -> Algorithm:
    """Return the algorithm of an `algorithm.type`, one of `FILES` or FILE.py:NAME of a user's; UserFileError if it has
    none.
    """
    if not is_reference(name):
        return ALGORITHMS[name]
    found = load_object(name)
    if not isinstance(found, Algorithm):
        raise UserFileError(f"type = '{name}' is no Algorithm: write NAME = Algorithm(YourConfig, your_loss) there")
    return found


def _from_user_file(given: Any, known: ValidatorFunctionWrapHandler) -> AlgorithmSection:  # noqa: ANN401 -- of TOML
    if isinstance(given, AlgorithmSection) and is_reference(given.type):
        return given
    if isinstance(given, dict) and is_reference(given.get("type")):
        return _section_of(given)
    return cast("AlgorithmSection", known(given))


def _section_of(values: dict[str, Any]) -> AlgorithmSection:
    """Make the section of a user's algorithm from plain values, or raise UserFileError."""
    reference, algorithm = values["type"], algorithm_of(values["type"])
    section_class = algorithm.config_class
    with blamed(f"type = '{reference}'"):
        try:
            section = section_class.model_validate(values)
            is_kept = section_class.model_validate(section.model_dump(mode="json")) == section
        except ValidationError as error:
            first = error.errors()[0]
            # an error of the whole section names no key, and pydantic says of every one that it is of a value
            key, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            what = f"{key}: {what[:1].lower()}{what[1:]}" if key else what
            keys = ", ".join(name for name in section_class.model_fields if name != "type")
            raise UserFileError(f"{what}; keys of {reference} are {keys}") from None
        if not (is_kept and callable(algorithm.loss) and isinstance(section.needs, Needs)):
            raise UserFileError(
                f"type = '{reference}' needs a function as its loss, Needs as `needs`, and fields that config.toml "
                "holds as they are: of plain types, without aliases, and without validators that change values"
            )
    copyreg.pickle(section_class, _as_values)
    return section


def _as_values(section: AlgorithmSection) -> tuple[Callable[..., AlgorithmSection], tuple[dict[str, Any]]]:
    """Have Ray send a section as plain values: another process knows its class only once it has imported the file."""
    return _section_of, (section.model_dump(mode="json"),)


if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmSection
else:
    AlgorithmConfig = Annotated[
        Union[tuple(algorithm.config_class for algorithm in ALGORITHMS.values())],  # noqa: UP007 -- built, not written
        Field(discriminator="type"),
        WrapValidator(_from_user_file),
        SerializeAsAny(),
    ]


def loss_for(config: AlgorithmConfig) -> Loss:
    """Return the loss of a config, as a function of a batch of which `algorithms.base.check_inputs` finds no fault.

    It raises UndeclaredInput if the loss reads what its `needs` do not declare, UserFileError if a user's fails.
    """
    loss = algorithm_of(config.type).loss
    needs = config.needs
    if not is_reference(config.type):
        return lambda inputs: loss(config, only_declared(inputs, needs))

    def checked(inputs: LossInputs) -> LossOutput:
        with blamed(setting := f"algorithm.type = '{config.type}'"):
            output = loss(config, only_declared(inputs, needs))
        found = getattr(output, "loss", output)
        if isinstance(output, LossOutput) and isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return output
        raise UserFileError(
            f"{setting} returned {described(found)} and not LossOutput(loss, metrics) whose loss is a tensor of one "
            "number, computed from inputs.logprobs_T with gradients"
        )

    return checked


class UndeclaredInput(UserFileError):
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


_STAND_INS: dict[str, type[_Undeclared]] = {
    need: type("_Undeclared", (_Undeclared,), {"field": f"{need}_logprobs_T", "need": need})
    for need in ("reference", "behaviour", "proximal")
}


def only_declared(inputs: LossInputs, needs: Needs) -> LossInputs:
    """Replace the inputs that a loss has not declared: left out they are NaN or 0, which would pass for a fault of the
    data.
    """
    undeclared: dict[str, Any] = {
        each.field: torch.empty(0).as_subclass(each) for need, each in _STAND_INS.items() if not getattr(needs, need)
    }
    return replace(inputs, **undeclared)
