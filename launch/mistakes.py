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
    ("buffer.reward_temperature", "buffer.sampler", lambda c: _law(c.buffer) == "reward_softmax"),
    ("buffer.prompt_law buffer.dispatch", "buffer.source", lambda c: c.buffer.source is None),
    ("actors.keep_every_s", "buffer.source", lambda c: c.buffer.source is None),
    ("actors.eval_problems", "actors.eval_every", lambda c: c.actors.eval_every),
    ("actors.gpu_memory_share", "actors.gpus", lambda c: c.actors.gpus or c.pools),
    ("learner.gpu_memory_share", "learner.gpus", lambda c: c.learner.gpus or c.pools),
    ("learner.collective_timeout_s", "learner.num_stages", lambda c: c.learner.num_stages * c.learner.num_replicas > 1),
    ("learner.lr_schedule", "learner.warmup_steps", lambda c: c.learner.warmup_steps < c.learner.num_steps),
    ("learner.reference_offload", "algorithm.type", lambda c: c.algorithm.needs.reference),
    ("learner.score_while_waiting", "algorithm.type", lambda c: c.algorithm.needs.reference),
    ("model.reference_path", "algorithm.type", lambda c: c.algorithm.needs.reference),
    ("weight_sync.host weight_sync.port", "weight_sync.transport", lambda c: c.weight_sync.transport != "folder"),
    ("weight_sync.staging_dir", "weight_sync.transport", lambda c: c.weight_sync.transport != "folder"),
    ("weight_sync.on_stale", "weight_sync.max_lag", lambda c: c.weight_sync.max_lag != "unbounded"),
    ("launch.autoscale_most", "launch.autoscale", lambda c: c.launch.autoscale != "off"),
    ("tracking.project", "tracking.wandb", lambda c: c.tracking.wandb != "disabled"),
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


def _law(buffer: Any) -> str:  # noqa: ANN401 -- `launch.config`, which has the type, imports this module
    return str(buffer.replay_sampler if buffer.sampler == "on_policy_share" else buffer.sampler)


def _set_keys(config: BaseModel, keys: str) -> Iterator[tuple[str, Any]]:
    """Yield those of the keys that the config has and that differ from their defaults, with their values."""
    for key in keys.split():
        section, _, name = key.partition(".")
        info = type(getattr(config, section)).model_fields.get(name)
        if info is not None and (value := attrgetter(key)(config)) != info.default:
            yield key, value


def explain(error: ValidationError, root: type[BaseModel]) -> str:
    """One sentence for the first mistake in a config of this model, and how many more there are."""
    mistakes = error.errors()
    first = mistakes[0]
    location = [str(part) for part in first["loc"]]
    models, keys, branches = _walk(location, root)
    dotted = ".".join(keys)
    kind = first["type"]
    if kind == "extra_forbidden" and keys[-1] in TRUNCATING_KEYS:
        text = f"{dotted} is refused: training samples by temperature alone, so that log-probabilities stay exact"
    elif kind == "extra_forbidden":
        text = f"unknown key {dotted}{_suggest(keys, models, first['input'])}"
    elif kind == "missing":
        text = f"{dotted} is missing"
    elif kind == "union_tag_not_found":
        text = f"{dotted}.type is missing{_suggest_type(first['input'], branches)}"
    elif kind == "union_tag_invalid":
        found, expected = str(first["ctx"]["tag"]), str(first["ctx"]["expected_tags"])
        hint = did_you_mean(found, expected.replace("'", "").split(", "))
        text = f"{dotted}.type is '{found}', and must be one of {expected}{hint}"
    elif kind == "value_error":
        text = str(first["ctx"]["error"])
        text = f"[{dotted}] {text}" if dotted else text
    else:  # several mistakes at one key are the branches of a union: it may be this or that
        messages = [each["msg"] for each in mistakes if _walk([str(part) for part in each["loc"]], root)[1] == keys]
        wanted = ", or ".join(message[0].lower() + message[1:] for message in dict.fromkeys(messages))
        text = f"{dotted} = {shortened(first['input'])}: {wanted}"
    wrong_keys = {tuple(_walk([str(part) for part in each["loc"]], root)[1]) for each in mistakes}
    more = f" (and {len(wrong_keys) - 1} more)" if len(wrong_keys) > 1 else ""
    return f"{text}{more}"


def dotted(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return the key at an error's location, without the tags of unions."""
    return ".".join(_walk([str(part) for part in location], root)[1])


def shortened(value: object, most: int = 100) -> str:
    """A value as TOML's reader gave it, for a sentence."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _walk(
    location: Sequence[str], root: type[BaseModel]
) -> tuple[list[type[BaseModel]], list[str], list[type[BaseModel]]]:
    """The models along an error's location, its keys without the tags of unions, and the members of a last union."""
    models: list[type[BaseModel]] = [root]
    keys: list[str] = []
    candidates: list[type[BaseModel]] = []
    at_leaf = in_table = False
    for part in location:
        if in_table or part.isdigit():  # the name of an entry of a table, or an entry of a list
            keys.append(part)
            in_table = False
        elif tagged := [candidate for candidate in candidates if _tag(candidate) == part]:
            models.append(tagged[0])
            candidates = []
        elif not at_leaf:  # else the branch of a union of plain values
            info = models[-1].model_fields.get(part)
            keys.append(part)
            candidates = models_of(info.annotation) if info is not None else []
            in_table = info is not None and get_origin(info.annotation) is dict
            at_leaf = info is not None and not candidates
            if len(candidates) == 1:
                models.append(candidates.pop())
    return models, keys, candidates


def models_of(annotation: object) -> list[type[BaseModel]]:
    """The config models in a field's annotation: one, the members of a union, or of the entries of a list or table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return [model for entry in get_args(annotation) for model in models_of(entry)]
    return []


def _tag(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0]) if "type" in model.model_fields else ""


def _suggest(keys: Sequence[str], models: Sequence[type[BaseModel]], given: object) -> str:
    model, key = models[-1], keys[-1]
    own = ".".join(keys[:-1])
    known = list(model.model_fields)
    of_union = [info for name, info in models[-2:][0].model_fields.items() if name in keys[:-1]] if _tag(model) else []
    outer = [member for info in of_union for member in models_of(info.annotation)]
    if owners := [f"'{_tag(other)}'" for other in outer if key in other.model_fields]:
        return f"; {own}.type = '{_tag(model)}' has no such key, it is of type {' or '.join(owners)}"
    for section, info in models[0].model_fields.items():  # the right key under the wrong section
        for owner in models_of(info.annotation):
            if key in owner.model_fields and section != "pools":
                of_type = f", of {section}.type = '{_tag(owner)}'" if _tag(owner) else ""
                return f"; did you mean {section}.{key}{of_type}?"
    beside = {name: ".".join([*keys[:-1], name]) for name in known}
    anywhere = _all_keys(models[0])
    # at the top a table is a section with another name, and a value a key that lost its section
    for names in (beside, anywhere) if len(keys) > 1 or isinstance(given, dict) else (anywhere, beside):
        if hint := did_you_mean(key, names, names.__getitem__):
            return hint
    return f"; known keys are {', '.join(known)}"


def _all_keys(root: type[BaseModel]) -> dict[str, str]:
    """Where each key is, by its last part."""
    sections = root.model_fields.items()
    return {
        key: f"{section}.{key}"
        for section, info in sections
        if section != "pools"
        for owner in models_of(info.annotation)
        for key in owner.model_fields
    }


def _suggest_type(given: object, members: Sequence[type[BaseModel]]) -> str:
    """What a table without its `type` may have meant."""
    types = [_tag(member) for member in members]
    said = given.items() if isinstance(given, dict) else ()
    hint = next((f"; did you mean type = '{value}' in place of {key}?" for key, value in said if value in types), "")
    return f", which is one of {', '.join(types)}{hint}"
