"""One-sentence errors for an invalid config: the place, the reason, and the key or type that was probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from leeway.algorithms.registry import RECIPES
from leeway.common.user_input import did_you_mean

TRUNCATING_KEYS = frozenset(
    {"top_p", "top_k", "min_p", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty"}
    | {"repetition_penalty"}
)


REMOVED_KEYS = {
    "tracking.wandb": "it became tracking.to = ['wandb'] (the default; [] for none), with the mode in WANDB_MODE"
}
"""Keys of earlier versions -> what replaced them."""


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Return a sentence on the first error in a config of class `root`, with the number of other invalid keys."""
    invalid = [(*_walk(each["loc"], root), each) for each in error.errors()]
    keys, models, first = invalid[0]
    key, kind, context = ".".join(keys), first["type"], first.get("ctx", {})
    if kind == "extra_forbidden" and keys[-1] in TRUNCATING_KEYS:
        text = f"{key} is not supported: training samples use temperature only, for exact log-probabilities; remove it"
    elif kind == "extra_forbidden" and key in REMOVED_KEYS:
        text = f"{key} was removed: {REMOVED_KEYS[key]}"
    elif kind == "extra_forbidden":
        text = f"unknown key {key}{_suggest(keys, models, root)}"
    elif kind == "missing":
        text = f"{key} is missing"
    elif kind == "union_tag_not_found":
        text = f"{key}.type is missing: set it to one of {', '.join(map(_tag, models))}"
    elif kind == "union_tag_invalid":
        names = RECIPES if key == "algorithm" else ()
        hint = did_you_mean(str(context["tag"]), [*map(_tag, models), *names])
        expected = ", ".join([context["expected_tags"], *map(repr, names)])
        text = f"{key}.type is '{context['tag']}', but must be one of {expected}{hint}"
    elif kind == "value_error":
        text = f"[{key}] {context['error']}" if key else str(context["error"])
    else:  # several errors at one key come from the branches of a union
        messages = dict.fromkeys(each["msg"] for same, _, each in invalid if same == keys)
        expected = ", or ".join(message[0].lower() + message[1:] for message in messages)
        text = f"{key} = {shortened(first['input'])}: {expected}"
    num_others = len({tuple(keys) for keys, _, _ in invalid}) - 1
    return f"{text} (and {num_others} more invalid key{'s' * (num_others > 1)})" if num_others else text


def dotted(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the dotted key at the location of a Pydantic error, without the tags of unions."""
    return ".".join(_walk(location, root)[0])


def shortened(value: object, most: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _walk(location: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys at an error's location and the possible models of their table, the matching model first."""
    keys: list[str] = []
    models, is_name, is_value = [root], False, False
    for part in map(str, location):
        if is_name or part.isdigit():  # the part names an entry of a table or a list
            keys.append(part)
            is_name = False
        elif tagged := [model for model in models if _tag(model) == part]:
            models = [*tagged, *(model for model in models if model not in tagged)]
        elif not is_value:  # a part after a value names a branch of a union of plain values
            keys.append(part)
            info = models[0].model_fields.get(part)
            inner = [] if info is None else models_of(info.annotation)
            is_name = info is not None and get_origin(info.annotation) is dict
            is_value = info is not None and not inner
            models = inner or models
    return keys, models


def models_of(annotation: object) -> list[type[BaseModel]]:
    """Return the config models in an annotation: a model, the members of a union, or the models of table entries."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return [model for entry in get_args(annotation) for model in models_of(entry)]
    return []


def _tag(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0]) if "type" in model.model_fields else ""


def _suggest(keys: Sequence[str], models: Sequence[type[BaseModel]], root: type[BaseModel]) -> str:
    """Suggest the intended key: a key of another type, or a key with a similar name in the same or another section."""
    own, key = ".".join(keys[:-1]), keys[-1]
    if owners := [f"'{_tag(other)}'" for other in models[1:] if key in other.model_fields]:
        return f"; {own}.type = '{_tag(models[0])}' has no such key; it belongs to type {' or '.join(owners)}"
    places = {name: f"{own}.{name}" if own else name for name in models[0].model_fields}
    for section, info in root.model_fields.items():
        for model in models_of(info.annotation) if section != "pools" else ():
            of_type = f", of {section}.type = '{_tag(model)}'" if _tag(model) else ""
            for name in model.model_fields:
                places.setdefault(name, f"{section}.{name}{of_type}")
    return did_you_mean(key, places, places.__getitem__) or f"; known keys are {', '.join(models[0].model_fields)}"
