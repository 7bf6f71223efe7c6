"""The algorithms by name, the config classes that `algorithm.type` selects, and the loss of a config.

To add an algorithm, create a file in this package that ends with `ALGORITHM = Algorithm(Config, loss)`, and add its
name to `FILES`; the name is also its `algorithm.type`. A user's algorithm stays in the user's file and is selected as
`FILE.py:ALGORITHM`. docs/algorithms/README.md has an example of either kind.
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

from leeway.algorithms.base import Algorithm, AlgorithmSection, LossInputs, LossOutput, Needs, described
from leeway.common.user_input import UserFileError, is_reference, load_object, user_code_errors

FILES = ("trajectory_balance", "online_dpo", "off_policy_ppo", "oapl", "distillation")

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "off_policy_ppo", "baseline": "grpo", "mean_over": "sequences"},
    "dr_grpo": {"type": "off_policy_ppo", "baseline": "dr_grpo"},  # and mean_over = actors.max_new_tokens
    "rloo": {
        "type": "off_policy_ppo",
        "baseline": "rloo",
        "mean_over": "sequences",
        "corrections": ["sequence_tis", "sequence_clip"],
        "kl_beta": 0.05,
    },
    "dpo": {"type": "online_dpo", "variant": "sigmoid", "corrections": []},
}
"""Common names -> keys of `[algorithm]` that mean them; docs/algorithms/README.md has the formulas."""

Loss = Callable[[LossInputs], LossOutput]

ALGORITHMS: dict[str, Algorithm] = {name: import_module(f"leeway.algorithms.{name}").ALGORITHM for name in FILES}


def expanded(section: Any, max_new_tokens: object) -> Any:  # noqa: ANN401 -- from TOML
    """Return an `[algorithm]` table with the keys of the recipe that its type names; keys of the table win."""
    name = section.get("type") if isinstance(section, dict) else None
    if not isinstance(name, str) or name not in RECIPES:
        return section
    found = RECIPES[name] | {"mean_over": max_new_tokens} if name == "dr_grpo" else RECIPES[name]
    if name in ("grpo", "dr_grpo") and section.get("kl_beta"):  # without a KL, kl_in is an error
        found = found | {"kl_in": "loss_k3"}
    return {**found, **section, "type": found["type"]}


def algorithm_of(name: str) -> Algorithm:
    """Return the algorithm `name` of `FILES` or a user's file; raise UserFileError if the file does not define it."""
    if not is_reference(name):
        return ALGORITHMS[name]
    found = load_object(name)
    if not isinstance(found, Algorithm):
        raise UserFileError(f"type = '{name}' is not an Algorithm: write NAME = Algorithm(YourConfig, your_loss)")
    return found


def _from_user_file(given: Any, known: ValidatorFunctionWrapHandler) -> AlgorithmSection:  # noqa: ANN401 -- from TOML
    if isinstance(given, AlgorithmSection) and is_reference(given.type):
        return given
    if isinstance(given, dict) and is_reference(given.get("type")):
        return _section_of(given)
    return cast("AlgorithmSection", known(given))


def _section_of(values: dict[str, Any]) -> AlgorithmSection:
    """Return the section of a user's algorithm built from plain values; raise UserFileError if it is invalid."""
    reference, algorithm = values["type"], algorithm_of(values["type"])
    section_class = algorithm.config_class
    with user_code_errors(f"type = '{reference}'"):
        try:
            section = section_class.model_validate(values)
            is_kept = section_class.model_validate(section.model_dump(mode="json")) == section
        except ValidationError as error:
            first = error.errors()[0]
            # errors of the whole section have no key; pydantic prefixes their messages with "Value error, "
            key, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            what = f"{key}: {what[:1].lower()}{what[1:]}" if key else what
            keys = ", ".join(name for name in section_class.model_fields if name != "type")
            raise UserFileError(f"{what}; valid keys of {reference}: {keys}") from None
        if not (is_kept and callable(algorithm.loss) and isinstance(section.needs, Needs)):
            raise UserFileError(
                f"type = '{reference}' needs a function as its loss, Needs as `needs`, and fields that survive a round "
                "trip through config.toml: use plain types, no aliases, and no validators that change values"
            )
    copyreg.pickle(section_class, _as_values)
    return section


def _as_values(section: AlgorithmSection) -> tuple[Callable[..., AlgorithmSection], tuple[dict[str, Any]]]:
    """Reduce a section to plain values for Ray, since other processes must import the user's file before the class."""
    return _section_of, (section.model_dump(mode="json"),)


if TYPE_CHECKING:
    AlgorithmConfig = AlgorithmSection
else:
    AlgorithmConfig = Annotated[
        Union[tuple(algorithm.config_class for algorithm in ALGORITHMS.values())],  # noqa: UP007 -- dynamic
        Field(discriminator="type"),
        WrapValidator(_from_user_file),
        SerializeAsAny(),
    ]


def loss_for(config: AlgorithmConfig) -> Loss:
    """Return the loss of a config, a function of a batch that passes `leeway.algorithms.base.check_inputs`.

    The function raises UndeclaredInput if the loss reads an input that its `needs` do not declare, and UserFileError if
    a user's loss fails.
    """
    loss = algorithm_of(config.type).loss
    needs = config.needs

    def prepared(inputs: LossInputs) -> LossInputs:
        return only_declared(inputs.without_truncated() if config.mask_truncated else inputs, needs)

    if not is_reference(config.type):
        return lambda inputs: loss(config, prepared(inputs))

    def checked(inputs: LossInputs) -> LossOutput:
        with user_code_errors(setting := f"algorithm.type = '{config.type}'"):
            output = loss(config, prepared(inputs))
        found = getattr(output, "loss", output)
        if isinstance(output, LossOutput) and isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return output
        raise UserFileError(
            f"{setting} returned {described(found)} but must return LossOutput(loss, metrics) with the loss as a "
            "one-element tensor, computed from inputs.logprobs_T with gradients"
        )

    return checked


class UndeclaredInput(UserFileError):
    """A loss read an input that its section did not declare; the message names the input and the missing need."""


class _Undeclared(Tensor):
    """Placeholder for an undeclared input. Any use in a computation raises UndeclaredInput."""

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
            f"the loss reads inputs.{cls.field}, but the `needs` of its [algorithm] section do not declare it: "
            f"return Needs({cls.need}=True, ...) there, or do not read this input (some runs do not have it)"
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<{self.field}: not declared>"


_STAND_INS: dict[str, type[_Undeclared]] = {
    need: type("_Undeclared", (_Undeclared,), {"field": f"{need}_logprobs_T", "need": need})
    for need in ("reference", "behaviour", "proximal")
}


def only_declared(inputs: LossInputs, needs: Needs) -> LossInputs:
    """Replace undeclared inputs by placeholders that raise on use, because NaN or 0 would look like bad data."""
    undeclared: dict[str, Any] = {
        each.field: torch.empty(0).as_subclass(each) for need, each in _STAND_INS.items() if not getattr(needs, need)
    }
    return replace(inputs, **undeclared)
