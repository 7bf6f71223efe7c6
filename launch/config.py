"""The config of a run: ten sections, each owned by the package that reads it; read from TOML and overrides.

Paths of models, data and rewards in a TOML file are relative to that file; those given on the command
line, and those of what a run writes, are relative to the current directory.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from actors.config import ActorsConfig
from actors.tasks.config import TaskConfig
from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
from common.names import did_you_mean
from launch.errors import ConfigError
from learner.config import LearnerConfig
from weight_sync.config import WeightSyncConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RunConfig(_Section):
    """`[run]`: the name, the seed and the place of a run."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # --run.name 7 is a name

    name: str | None = Field(default=None, description="Name of the run's folder; unset: the config's name and time.")
    dir: str = Field(default="runs", description="Folder that holds the runs.")
    seed: int = Field(default=0, ge=0, description="Seeds prompt order, sampling and initialisation.")


class ModelConfig(_Section):
    """`[model]`: the checkpoint to start from. Give `path` or `hub`."""

    path: str | None = Field(default=None, description="Folder with config.json, safetensors and a tokenizer.")
    recipe: str | None = Field(
        default=None, description="Python script that makes `path` where it is missing; called with the folder."
    )
    hub: str | None = Field(
        default=None,
        description="Model of the Hugging Face Hub, ORGANISATION/NAME or ORGANISATION/NAME@REVISION; else of main.",
    )
    reference_path: str | None = Field(
        default=None, description="Folder of the frozen reference model; unset: the model itself as it starts."
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.hub is None):
            raise ValueError("give exactly one of model.path (a folder) and model.hub (ORGANISATION/NAME)")
        if self.recipe is not None and self.path is None:
            raise ValueError("recipe makes model.path, which is not given")
        return self

    @property
    def on_hub(self) -> tuple[str, str]:
        """Name and revision of `hub`."""
        name, _, revision = str(self.hub).partition("@")
        return name, revision or "main"


class PoolConfig(_Section):
    """`[pools.NAME]`: workers of one kind on hosts of one kind. What is unset is as in `[actors]` or `[learner]`."""

    role: Literal["actors", "learner"] = Field(
        description="What its workers are: vLLM engines, or stages of the learner."
    )
    count: PositiveInt | None = Field(
        default=None,
        description="Actors, which `leeway scale` changes, or stages. Unset: 1 actor, or all stages that are left.",
    )
    resource: str | None = Field(
        default=None,
        description="Ray resource that hosts of the pool carry; unset: pool_NAME, as in cluster.sh; '': any host.",
    )
    # as in [actors]; cpus and gpus also as in [learner]
    cpus: NonNegativeFloat | None = None
    gpus: NonNegativeFloat | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_running_samples: PositiveInt | None = None
    kv_cache_gib: PositiveFloat | None = None
    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel_size: PositiveInt | None = None
    num_threads: PositiveInt | None = None

    @model_validator(mode="after")
    def _engines_are_of_actors(self) -> PoolConfig:
        engine = sorted(ENGINE_KEYS & self.model_fields_set)
        if self.role == "learner" and engine:
            raise ValueError(f"{engine[0]} is of an actor's engine, and this pool's role is 'learner'; see [learner]")
        return self


ENGINE_KEYS = frozenset(
    {"dtype", "max_running_samples", "kv_cache_gib", "gpu_memory_share", "tensor_parallel_size", "num_threads"}
)
"""Of a pool of actors alone."""
POOL_OVERRIDES = ("cpus", "gpus", *sorted(ENGINE_KEYS))
"""Keys of `[actors]` that a pool may have of its own, the first two also of `[learner]`."""


Action = Literal["warn", "quarantine", "stop"]
"""What a tripwire does: say so, also take the actor out of the run, or stop the run."""


class LaunchConfig(_Section):
    """`[launch]`: processes, how long they may take, and the tripwires."""

    ray_address: str | None = Field(
        default=None, description="Address of a running Ray cluster ('auto' finds it); unset: Ray starts itself here."
    )
    encryption: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Lock the sockets of the buffer and the weight service with keys of this run (CURVE): 'auto' where "
        "they listen on anything but loopback. 'off' is refused there.",
    )
    startup_timeout_s: PositiveFloat = Field(
        default=300.0, description="Every role must be ready, and the model exported, within this time."
    )
    shutdown_timeout_s: PositiveFloat = Field(
        default=60.0, description="After Ctrl-C, how long the learner may take to finish its step; then the run fails."
    )
    max_restarts: NonNegativeInt = Field(
        default=3,
        description="How often in a row a service or an actor that died is started again, and the learner from its "
        "newest checkpoint when a stage dies or hangs. An hour of work, or for the learner a new checkpoint, counts "
        "anew.",
    )
    mismatch_limit: PositiveFloat | None = Field(
        default=None,
        description="Tripwire: mean absolute log-probability difference between engine and learner at lag 0. Unset: "
        "0.001 where engines and learner compute in float32, else 0.2.",
    )
    on_mismatch: Action = Field(
        default="warn", description="Above it: say so, also take the actor out of the run, or stop the run."
    )
    on_stuck: Action = Field(
        default="warn",
        description="Tripwire: what to do where a learner takes updates but publishes none, or an actor serves an old "
        "version, for 300 s.",
    )
    on_behind: Action = Field(
        default="warn",
        description="Tripwire: what to do where an actor is more than max_actor_lag behind the newest version for "
        "30 s.",
    )


class TrackingConfig(_Section):
    """`[tracking]`: where the figures go."""

    wandb: Literal["offline", "online", "disabled"] = Field(
        default="offline", description="Weights & Biases; offline writes into the run's folder."
    )
    project: str = Field(default="leeway", description="Weights & Biases project.")
    display: Literal["auto", "live", "plain", "off"] = Field(
        default="auto", description="Live view on a terminal, or a line every few seconds."
    )
    log_every: PositiveInt = Field(default=1, description="Write every n-th step to metrics.jsonl and W&B.")
    prometheus_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Serve all metrics to Prometheus at this port of loopback; unset: do not.",
    )


class Config(_Section):
    """Everything about a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig
    algorithm: AlgorithmConfig
    actors: ActorsConfig = ActorsConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    launch: LaunchConfig = LaunchConfig()
    tracking: TrackingConfig = TrackingConfig()


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
        patch = _value(text)
        for part in reversed(key.split(".")):
            patch = {part: patch}
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
            keys = [f"{key} = {_literal(value)}" for key, value in table.items() if value is not None]
            lines += [f"[{name}]", *keys, ""]
    return "\n".join(lines)


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


def _merge(tree: Tree, patch: Tree, origin: str) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, origin)
        elif isinstance(value, dict) and key in tree:
            raise ConfigError(f"{origin}: '{key}' is a value, not a section")
        else:
            tree[key] = value


def _resolve_paths(tree: Tree, base: Path) -> None:
    for dotted in (*PATH_KEYS, *WRITTEN_KEYS, REWARDS_KEY):
        section, key = dotted.split(".")
        table = tree.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if dotted == REWARDS_KEY and isinstance(value, list):
            tree[section][key] = [_resolve_reward(entry, base) for entry in value]
        elif dotted != REWARDS_KEY and isinstance(value, str):
            tree[section][key] = _absolute(value, Path.cwd() if dotted in WRITTEN_KEYS else base)


def _resolve_reward(entry: object, base: Path) -> object:
    if not isinstance(entry, str) or ":" not in entry:
        return entry
    file, _, function = entry.rpartition(":")
    return f"{_absolute(file, base)}:{function}"


def _absolute(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).resolve())


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
    models: list[type[BaseModel]] = [Config]
    keys: list[str] = []
    candidates: list[type[BaseModel]] = []
    at_leaf = False
    for part in location:
        if part.isdigit():  # an entry of a list
            keys.append(part)
        elif tagged := [candidate for candidate in candidates if _tag(candidate) == part]:
            models.append(tagged[0])
            candidates = []
        elif not at_leaf:  # else the branch of a union of plain values
            info = models[-1].model_fields.get(part)
            keys.append(part)
            candidates = models_of(info.annotation) if info is not None else []
            at_leaf = info is not None and not candidates
            if len(candidates) == 1:
                models.append(candidates.pop())
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
