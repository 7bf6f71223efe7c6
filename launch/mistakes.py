"""What is wrong with a config, in one sentence: where, why, and which key or type was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from common.user_input import did_you_mean

TRUNCATING_KEYS = frozenset(
    {"top_p", "top_k", "min_p", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty"}
    | {"repetition_penalty"}
)
IDLE: tuple[tuple[str, str, Callable[[Any], object]], ...] = (
    ("buffer.on_policy_share buffer.replay_sampler", "buffer.sampler", lambda c: c.buffer.sampler == "on_policy_share"),
    ("buffer.prompt_law buffer.dispatch", "buffer.source", lambda c: c.buffer.source is None),
    ("actors.gpu_memory_share", "actors.gpus", lambda c: c.actors.gpus or c.pools),
    ("learner.gpu_memory_share", "learner.gpus", lambda c: c.learner.gpus or c.pools),
    ("learner.lr_schedule", "learner.warmup_steps", lambda c: c.learner.warmup_steps < c.learner.num_steps),
    ("learner.reference_offload", "algorithm.type", lambda c: c.algorithm.needs.reference),
    ("model.reference_path", "algorithm.type", lambda c: c.algorithm.needs.reference),
    ("weight_sync.on_stale", "weight_sync.max_lag", lambda c: c.weight_sync.max_lag != "unbounded"),
    ("task.heldout_share", "task.heldout_path", lambda c: c.task.heldout_path is None),
    ("task.answer_tag", "task.rewards", lambda c: not c.task.rewards),
)
"""Keys, of one `type` of their section or of all, the key that decides whether they act, and whether they do."""
STEPS = "learner.warmup_steps learner.checkpoint_every algorithm.beta_steps actors.eval_every"
"""Keys that count steps, or updates; a run may end before they are over."""


def idle_keys(config: BaseModel) -> Iterator[str]:
    """Yield a sentence for each key that differs from its default and does not act beside the others."""
    for keys, other, acts in IDLE:
        for key, value in _set_keys(config, keys):
            if not acts(config):
                beside = f"{other} = {attrgetter(other)(config)!r}"
                yield f"{key} = {value!r} changes nothing beside {beside}: leave it out, or change the latter"
    steps, updates = attrgetter("learner.num_steps", "learner.updates_per_step")(config)
    for key, value in _set_keys(config, STEPS):
        if value > steps * (updates if key.startswith(("algorithm", "actors")) else 1):
            yield f"{key} = {value} is more than the run has, with learner.num_steps = {steps}: lower it"


def _set_keys(config: BaseModel, keys: str) -> Iterator[tuple[str, Any]]:
    """Yield those of the keys that the config has and that differ from their defaults, with their values."""
    for key in keys.split():
        section, _, name = key.partition(".")
        info = type(getattr(config, section)).model_fields.get(name)
        if info is not None and (value := attrgetter(key)(config)) != info.default:
            yield key, value


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """Return a sentence on the first mistake in a config of this model, with the number of other wrong keys."""
    mistakes = [(*_walk(each["loc"], root), each) for each in error.errors()]
    keys, models, first = mistakes[0]
    key, kind, context = ".".join(keys), first["type"], first.get("ctx", {})
    if kind == "extra_forbidden" and keys[-1] in TRUNCATING_KEYS:
        text = f"{key} is refused: training samples by temperature alone, so that log-probabilities stay exact"
    elif kind == "extra_forbidden":
        text = f"unknown key {key}{_suggest(keys, models, root)}"
    elif kind == "missing":
        text = f"{key} is missing"
    elif kind == "union_tag_not_found":
        text = f"{key}.type is missing, which is one of {', '.join(map(_tag, models))}"
    elif kind == "union_tag_invalid":
        hint = did_you_mean(str(context["tag"]), map(_tag, models))
        text = f"{key}.type is '{context['tag']}', and must be one of {context['expected_tags']}{hint}"
    elif kind == "value_error":
        text = f"[{key}] {context['error']}" if key else str(context["error"])
    else:  # several mistakes at one key are the branches of a union: it may be this or that
        messages = dict.fromkeys(each["msg"] for same, _, each in mistakes if same == keys)
        wanted = ", or ".join(message[0].lower() + message[1:] for message in messages)
        text = f"{key} = {shortened(first['input'])}: {wanted}"
    num_others = len({tuple(keys) for keys, _, _ in mistakes}) - 1
    return f"{text} (and {num_others} more)" if num_others else text


def dotted(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the key at an error's location, without the tags of unions."""
    return ".".join(_walk(location, root)[0])


def shortened(value: object, most: int = 100) -> str:
    """Return a value for a sentence."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _walk(location: Sequence[str | int], root: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys at an error's location, and the models that their table may have, its own first."""
    keys: list[str] = []
    models, is_name, is_value = [root], False, False
    for part in map(str, location):
        if is_name or part.isdigit():  # an entry of a table, or of a list
            keys.append(part)
            is_name = False
        elif tagged := [model for model in models if _tag(model) == part]:
            models = [*tagged, *(model for model in models if model not in tagged)]
        elif not is_value:  # else the branch of a union of plain values
            keys.append(part)
            info = models[0].model_fields.get(part)
            inner = [] if info is None else models_of(info.annotation)
            is_name = info is not None and get_origin(info.annotation) is dict
            is_value = info is not None and not inner
            models = inner or models
    return keys, models


def models_of(annotation: object) -> list[type[BaseModel]]:
    """Return the config models in a field's annotation: one, the members of a union, or of the entries of a table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return [model for entry in get_args(annotation) for model in models_of(entry)]
    return []


def _tag(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0]) if "type" in model.model_fields else ""


def _suggest(keys: Sequence[str], models: Sequence[type[BaseModel]], root: type[BaseModel]) -> str:
    """Return which key was probably meant: of another type, or of a similar name here or in any section."""
    own, key = ".".join(keys[:-1]), keys[-1]
    if owners := [f"'{_tag(other)}'" for other in models[1:] if key in other.model_fields]:
        return f"; {own}.type = '{_tag(models[0])}' has no such key, it is of type {' or '.join(owners)}"
    places = {name: f"{own}.{name}" if own else name for name in models[0].model_fields}
    for section, info in root.model_fields.items():
        for model in models_of(info.annotation) if section != "pools" else ():
            of_type = f", of {section}.type = '{_tag(model)}'" if _tag(model) else ""
            for name in model.model_fields:
                places.setdefault(name, f"{section}.{name}{of_type}")
    return did_you_mean(key, places, places.__getitem__) or f"; known keys are {', '.join(models[0].model_fields)}"
