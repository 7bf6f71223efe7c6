"""TOML and command-line overrides to a `Config`.

Paths of models, data and rewards in a TOML file are relative to that file; those given on the command
line, and those of what a run writes, are relative to the current directory.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from common.names import did_you_mean
from launch.config import Config
from launch.errors import ConfigError

PATH_KEYS = ("model.path", "model.recipe", "model.reference_path", "task.path", "task.heldout_path")
WRITTEN_KEYS = ("weight_sync.folder", "weight_sync.staging_dir")  # told to processes that may be elsewhere
REWARDS_KEY = "task.rewards"  # a list of FILE.py:FUNCTION
TRUNCATING_KEYS = frozenset(
    {"top_p", "top_k", "min_p", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty"}
    | {"repetition_penalty"}
)

Tree = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides of the form `--key.sub value` or `--key.sub=value`.

    Raises:
        ConfigError: the file or an override is wrong.
    """
    tree = _read(path)
    _resolve_paths(tree, path.parent)
    for key, text in _pairs(overrides):
        patch: Tree = {}
        _set(patch, key.split("."), _value(text))
        _resolve_paths(patch, Path.cwd())
        _merge(tree, patch, origin=f"--{key}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error, path)) from None


def to_toml(config: Config) -> str:
    """The resolved config as TOML; keys that are unset are left out."""
    lines: list[str] = []
    tree = config.model_dump(mode="json")
    if any(pool.role == "actors" for pool in config.pools.values()):
        del tree["actors"]["num_actors"]  # the pools say it
    for section, values in tree.items():
        tables = {f"pools.{name}": pool for name, pool in values.items()} if section == "pools" else {section: values}
        for name, table in tables.items():
            lines += [f"[{name}]", *_table(table), ""]
    return "\n".join(lines)


def _table(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if value is not None:
            yield f"{key} = {_literal(value)}"


def _literal(value: Any) -> str:  # noqa: ANN401 -- any TOML value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(entry) for entry in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_literal(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, str):
        # JSON's escapes are TOML's too, which wants one more character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = (entry.name for entry in path.parent.glob("*.toml"))
        hint = did_you_mean(path.name, others, path.parent.joinpath)
        raise ConfigError(f"{path}: no such config file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"'{word}' is not an override; write --section.key VALUE, as in --learner.num_steps 20")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} has no value; write --{key} VALUE")
            value = rest.pop(0)
        yield key, value


def _value(text: str) -> Any:  # noqa: ANN401 -- any TOML value
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(tree: Tree, keys: list[str], value: object) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _merge(tree: Tree, patch: Tree, origin: str) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, origin)
        elif isinstance(value, dict) and key in tree:
            raise ConfigError(f"{origin}: '{key}' is a value, not a section")
        else:
            tree[key] = value


def _resolve_paths(tree: Tree, base: Path) -> None:
    for dotted in (*PATH_KEYS, *WRITTEN_KEYS):
        section, key = dotted.split(".")
        table = tree.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            beside = Path.cwd() if dotted in WRITTEN_KEYS else base
            table[key] = str((beside / Path(table[key]).expanduser()).resolve())
    section, key = REWARDS_KEY.split(".")
    table = tree.get(section)
    if isinstance(table, dict) and isinstance(table.get(key), list):
        table[key] = [_resolve_reward(entry, base) for entry in table[key]]


def _resolve_reward(entry: object, base: Path) -> object:
    if not isinstance(entry, str) or ":" not in entry:
        return entry
    file, _, function = entry.rpartition(":")
    return f"{(base / Path(file).expanduser()).resolve()}:{function}"


def _explain(error: ValidationError, path: Path) -> str:
    """One sentence for the first mistake, and how many more there are."""
    mistakes = error.errors()
    first = mistakes[0]
    location = [str(part) for part in first["loc"]]
    models, keys = _walk(location)
    dotted = ".".join(keys)
    kind = first["type"]
    if kind == "extra_forbidden" and keys[-1] in TRUNCATING_KEYS:
        text = f"{dotted} is refused: training samples by temperature alone, so that log-probabilities stay exact"
    elif kind == "extra_forbidden":
        text = f"unknown key {dotted}{_suggest(keys, models[-1])}"
    elif kind == "missing":
        text = f"{dotted} is missing"
    elif kind == "union_tag_not_found":
        text = f"{dotted}.type is missing"
    elif kind == "union_tag_invalid":
        found, expected = str(first["ctx"]["tag"]), str(first["ctx"]["expected_tags"])
        hint = did_you_mean(found, expected.replace("'", "").split(", "))
        text = f"{dotted}.type is '{found}', and must be one of {expected}{hint}"
    elif kind == "value_error":
        text = str(first["ctx"]["error"])
        text = f"[{dotted}] {text}" if dotted else text
    else:  # several mistakes at one key are the branches of a union: it may be this or that
        messages = [each["msg"] for each in mistakes if _walk([str(part) for part in each["loc"]])[1] == keys]
        wanted = ", or ".join(message[0].lower() + message[1:] for message in dict.fromkeys(messages))
        text = f"{dotted} = {first['input']!r}: {wanted}"
    wrong_keys = {tuple(_walk([str(part) for part in each["loc"]])[1]) for each in mistakes}
    more = f" (and {len(wrong_keys) - 1} more)" if len(wrong_keys) > 1 else ""
    return f"{path}: {text}{more}"


def _walk(location: Sequence[str]) -> tuple[list[type[BaseModel]], list[str]]:
    """The models along an error's location, and its keys without the tags of unions."""
    model: type[BaseModel] = Config
    models, keys = [model], []
    candidates: list[type[BaseModel]] = []
    at_leaf = False
    for part in location:
        if part.isdigit():  # an entry of a list
            keys.append(part)
            continue
        if candidates and any(_tag(candidate) == part for candidate in candidates):
            model = next(candidate for candidate in candidates if _tag(candidate) == part)
            candidates = []
            models.append(model)
            continue
        info = model.model_fields.get(part)
        if at_leaf:
            continue  # the branch of a union of plain values
        keys.append(part)
        at_leaf = info is not None and not models_of(info.annotation)
        candidates = models_of(info.annotation) if info is not None else []
        if len(candidates) == 1:
            model = candidates[0]
            models.append(model)
            candidates = []
    return models, keys


def models_of(annotation: object) -> list[type[BaseModel]]:
    """The config models in a field's annotation: one, the members of a union, or of the entries of a list or table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, dict):
        return [model for entry in get_args(annotation) for model in models_of(entry)]
    return []


def _tag(model: type[BaseModel]) -> str:
    return str(get_args(model.model_fields["type"].annotation)[0]) if "type" in model.model_fields else ""


def _suggest(keys: Sequence[str], model: type[BaseModel]) -> str:
    known = list(model.model_fields)
    if hint := did_you_mean(keys[-1], known, lambda name: ".".join([*keys[:-1], name])):
        return hint
    for section, info in Config.model_fields.items():  # the right key under the wrong section
        for owner in models_of(info.annotation):
            if keys[-1] in owner.model_fields:
                return f"; did you mean {section}.{keys[-1]}?"
    return f"; known keys are {', '.join(known)}"
