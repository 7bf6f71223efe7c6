"""The config of a run, loaded from TOML and overrides. Each section is defined by the package that reads it.

Paths of models, data and rewards in a TOML file are relative to that file. Paths on the command line and paths that a
run writes to are relative to the current directory.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from leeway.actors.config import ActorsConfig
from leeway.actors.tasks.config import HUB_DATA, TaskConfig
from leeway.algorithms.registry import AlgorithmConfig, expanded
from leeway.buffer.config import BufferConfig
from leeway.common.user_input import Knob, did_you_mean, is_reference
from leeway.launch.config_errors import dotted, explain, models_of, shortened
from leeway.launch.errors import ConfigError
from leeway.launch.host import current_folder
from leeway.learner.config import LearnerConfig
from leeway.weight_sync.config import WeightSyncConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunConfig(_Section):
    """`[run]`: name, seed and folder of a run."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # accepts --run.name 7

    name: str | None = Knob(None, "Name of the run folder; unset: config name and start time.", basic=True)
    dir: str = Knob("runs", "Parent of run folders.", basic=True)
    seed: int = Knob(0, "Seed of prompt order, sampling and initialisation.", basic=True, ge=0, lt=2**31)


class ModelConfig(_Section):
    """`[model]`: the checkpoint to start from."""

    path: str = Knob(
        ...,
        "Folder with config.json, safetensors and a tokenizer; or ORG/NAME[@REVISION] on the Hugging Face Hub. "
        "If a folder ORG exists, the value is a path.",
        basic=True,
    )
    reference_path: str | None = Knob(
        None, "Folder of the frozen reference model, or of the teacher in distillation; unset: the initial model."
    )
    teachers: dict[str, str] = Knob(
        {},
        "Frozen teacher models that replace the reference: folders by name. task.teacher_column selects each "
        "prompt's teacher.",
        max_length=256,
    )

    @model_validator(mode="after")
    def _check_one_reference(self) -> ModelConfig:
        if self.teachers and self.reference_path is not None:
            raise ValueError(
                "model.reference_path scores all prompts, but each teacher scores only its own: set one of the two keys"
            )
        return self

    @property
    def frozen(self) -> dict[str, Path]:
        """Return config key -> folder of each frozen model that scores samples; empty if the initial model does."""
        if self.reference_path is not None:
            return {"model.reference_path": Path(self.reference_path)}
        return {f"model.teachers.{name}": Path(folder) for name, folder in self.teachers.items()}

    @property
    def folder(self) -> Path | None:
        """Return the folder of the model; None for a Hub model, whose `path` stays relative in `load_config`."""
        return Path(self.path) if os.path.isabs(self.path) else None

    @property
    def on_hub(self) -> tuple[str, str]:
        """Return the name and the revision of a Hub model; valid only if `folder` is None."""
        name, _, revision = self.path.partition("@")
        return name, revision or "main"

    def pinned(self, snapshot: Path) -> ModelConfig:
        """Return the section with its revision pinned to the commit of a downloaded Hub snapshot."""
        is_commit = self.folder is None and re.fullmatch("[0-9a-f]{40}", snapshot.name)
        return self.model_copy(update={"path": f"{self.on_hub[0]}@{snapshot.name}"}) if is_commit else self


class PoolConfig(_Section):
    """`[pools.NAME]`: workers of one kind on hosts of one kind. Unset keys default to `[actors]` or `[learner]`."""

    role: Literal["actors", "learner"] = Knob(..., "Kind of workers: 'actors', or stages of the 'learner'.", basic=True)
    count: PositiveInt | None = Knob(None, "Number of workers; unset: 1 actor, or all unassigned stages.", basic=True)
    # these keys override those of [actors]; cpus and gpus apply to both roles
    cpus: NonNegativeFloat | None = None
    gpus: NonNegativeFloat | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_running_samples: PositiveInt | None = None
    kv_cache_gib: PositiveFloat | None = None
    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    tensor_parallel_size: PositiveInt | None = None
    engine_args: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_engine_keys(self) -> PoolConfig:
        engine = sorted(ENGINE_KEYS & self.model_fields_set)
        if self.role != "actors" and engine:
            raise ValueError(
                f"{engine[0]} applies only to actors, but this pool's role is '{self.role}'; use the keys of [learner]"
            )
        return self


ENGINE_KEYS = PoolConfig.model_fields.keys() - {"role", "count", "cpus", "gpus"}
POOL_OVERRIDES = ("cpus", "gpus", *sorted(ENGINE_KEYS))
"""Keys of `[actors]` that a pool can override; cpus and gpus also override the keys of `[learner]`."""


SET_BY_LEEWAY = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "set actors.cpus and learner.cpus instead"),
    "CUDA_VISIBLE_DEVICES": "Ray gives each worker the GPUs that it reserves; export the variable before leeway starts",
    "VLLM_RPC_BASE_PATH": "each engine uses its own folder for its sockets",
    "VLLM_WORKER_MULTIPROC_METHOD": "a forked worker would outlive its actor",
}
"""Environment variables that `launch.env` cannot set -> the reason."""

Action = Literal["warn", "quarantine", "stop"]
"""Action of an alert: only log the alert, also quarantine the actor, or stop the run."""


class LaunchConfig(_Section):
    """`[launch]`: Ray cluster, environment variables, autoscaling and alerts."""

    model_config = ConfigDict(coerce_numbers_to_str=True)  # accepts NCCL_IB_DISABLE = 1

    ray_address: str | None = Knob(
        None, "Address of a Ray cluster ('auto' finds it); unset: start a local Ray.", basic=True
    )
    colocate: bool = Knob(
        False, "Share one GPU between one actor and a one-stage learner; set gpus = 1 and gpu_memory_share for both."
    )
    host: str | None = Knob(None, "Bind address of services; unset: Unix sockets, or each host's address on a cluster.")
    env: dict[str, str] = Knob({}, "Environment variables of all roles on every host, such as NCCL_DEBUG.")
    autoscale: Literal["off", "advise", "on"] = Knob(
        "off",
        "Scale actor pools by sample lengths and costs: 'advise' reports the number of actors, 'on' applies it.",
    )
    on_mismatch: Action = Knob(
        "warn", "Action if engine and learner differ at lag 0: 'warn', 'quarantine' the actor, or 'stop' the run."
    )

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"'{name}' is not the name of an environment variable: use letters, digits and _")
            if name in SET_BY_LEEWAY or name.startswith("RAY_"):
                why = SET_BY_LEEWAY.get(name, "Ray reads it at startup: export it before leeway or cluster.sh up")
                raise ValueError(f"{name} cannot be set here: {why}")
        return env


class TrackingConfig(_Section):
    """`[tracking]`: destinations of metrics."""

    to: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = Knob(
        ("wandb",), "Trackers that receive metrics, evaluations and samples; []: none.", basic=True
    )
    prometheus_port: int | None = Knob(
        None, "Loopback port that serves all metrics to Prometheus; unset: none.", basic=True, ge=1, le=65535
    )

    @field_validator("to", mode="before")
    @classmethod
    def _accept_one_name(cls, to: object) -> object:
        return [to] if isinstance(to, str) else to


class Config(_Section):
    """The complete config of a run."""

    run: RunConfig = Knob(
        RunConfig(), fixed="the name and the folder identify the run, and the seed determines the order of its prompts"
    )
    model: ModelConfig = Knob(fixed="the checkpoint and the stored reference log-probabilities belong to that model")
    task: TaskConfig = Knob(fixed="the buffer stores prompt ids of that task and samples scored by those rewards")
    algorithm: AlgorithmConfig
    actors: ActorsConfig = ActorsConfig()
    buffer: BufferConfig = Knob(BufferConfig(), fixed="the stored groups and the recorded batches depend on it")
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    pools: dict[str, PoolConfig] = Field(default_factory=dict)
    launch: LaunchConfig = LaunchConfig()
    tracking: TrackingConfig = TrackingConfig()


MODEL_KEY = "model.path"
PATH_KEYS = (
    MODEL_KEY, "model.reference_path", "task.path", "task.heldout_path", "task.chat_template", "buffer.source",
)  # fmt: skip
WRITTEN_KEYS = ("weight_sync.folder",)  # folders that the run writes to
REWARDS_KEY = "task.rewards"  # a list of FILE.py:FUNCTION
# keys that accept FILE.py:NAME
NAMED_KEYS = ("algorithm.type", "algorithm.baseline", "buffer.sampler", "buffer.replay_sampler", "task.filter")
REWARD_MODELS_KEY = "task.reward_models"  # tables by name; the table of a classifier has a path
TEACHERS_KEY = "model.teachers"  # paths by name of the teacher, which may be any text
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@\S+)?")
Tree = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and apply overrides (`--key.sub value` or `--key.sub=value`); raise ConfigError if invalid."""
    tree = _read(path)
    _check_values(tree, f"{path}: ")
    _resolve_paths(tree, path.parent, f"{path}: ")
    for key, text in _pairs(overrides):
        patch = _value(key, text)
        if not isinstance(patch, str) and _is_text(key):
            patch = text  # keep the typed text, even if it looks like a number or a date
        for part in reversed(key.split(".")):
            patch = {part: patch}
        _check_values(patch, "--")
        _resolve_paths(patch, current_folder(), "--")
        _merge(tree, patch, origin=f"--{key}")
    if "algorithm" in tree:
        limit = _at(tree, "actors.max_new_tokens") or ActorsConfig.model_fields["max_new_tokens"].default
        tree["algorithm"] = expanded(tree["algorithm"], limit)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Config)}") from None


def knob_metadata(field: FieldInfo, name: Literal["basic", "fixed"]) -> Any:  # noqa: ANN401 -- as in `Knob`
    """Return the `basic` or `fixed` argument that `Knob` stored in a field; None if `Knob` got no such argument."""
    return field.json_schema_extra.get(name) if isinstance(field.json_schema_extra, dict) else None


def fixed_because(key: str) -> str:
    """Return why a resumed run must not change `section` or `section.key`; "" if the run may change it."""
    section, _, name = key.partition(".")
    info = Config.model_fields[section]
    owners = (base for model in models_of(info.annotation) for base in model.__mro__ if issubclass(base, BaseModel))
    fields = (owner.model_fields[name] for owner in owners if name in owner.model_fields)
    reasons = (knob_metadata(field, "fixed") for field in [*fields, info])
    return next((str(each) for each in reasons if each is not None), "")


def unknown_keys(path: Path) -> list[str]:
    """Return the dotted keys of a TOML file that this version lacks; raise ConfigError if the file is unreadable."""
    try:
        Config.model_validate(_read(path))
    except ValidationError as error:
        return [dotted(each["loc"], Config) for each in error.errors() if each["type"] == "extra_forbidden"]
    return []


def to_toml(config: Config) -> str:
    """Return the resolved config as TOML, without unset keys."""
    lines: list[str] = []
    tree = config.model_dump(mode="json")
    if any(pool.role == "actors" for pool in config.pools.values()):
        del tree["actors"]["num_actors"]  # the pools set this number
    for section, values in tree.items():
        tables = {f"pools.{name}": pool for name, pool in values.items()} if section == "pools" else {section: values}
        for name, table in tables.items():
            keys = [f"{key} = {literal(value)}" for key, value in table.items() if value is not None]
            lines += [f"[{name}]", *keys, ""]
    return "\n".join(lines)


def literal(value: Any) -> str:  # noqa: ANN401 -- any TOML value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(literal(entry) for entry in value) + "]"
    if isinstance(value, dict):
        entries = {key: entry for key, entry in value.items() if entry is not None}
        return "{" + ", ".join(f"{literal(key)} = {literal(entry)}" for key, entry in entries.items()) + "}"
    if isinstance(value, str):
        # JSON escapes are valid TOML, which also requires DEL to be escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # the file may start with a byte order mark
    except FileNotFoundError:
        others = (entry.name for entry in path.parent.glob("*.toml"))
        hint = did_you_mean(path.name, others, path.parent.joinpath)
        raise ConfigError(f"{path}: no such config file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:  # raised also for very long numbers and deep nesting
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(overrides)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ConfigError(f"'{word}' is not an override; write --section.key VALUE, as in --learner.num_steps 20")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{key} has no value; write --{key} VALUE, or --{key}=VALUE if it begins with --")
            value = rest.pop(0)
        yield key, value


def _value(key: str, text: str) -> Any:  # noqa: ANN401 -- any TOML value
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--{key} = {shortened(text)}: not a TOML value: {error}") from None


def _is_text(key: str) -> bool:
    section, name, *entry = key.split(".")[:3] if "." in key else (key, "")
    kind = Config.model_fields[section].annotation if section in Config.model_fields else None
    field = getattr(kind, "model_fields", {}).get(name)
    return field is not None and field.annotation in ([dict[str, str]] if entry else [str, str | None])


def _check_values(value: object, where: str) -> None:
    """Reject integers over 64 bits and text that is not Unicode or has a NUL, which would fail in other packages."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in inner:
        _check_values(entry, f"{where}{key}" if where.endswith((" ", "--")) else f"{where}.{key}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where}: the number has {len(str(abs(value)))} digits; use an integer of at most 64 bits")
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= char <= "\udfff" for char in value)):
        raise ConfigError(f"{where} = {shortened(value)}: contains bytes that are not UTF-8, or a NUL; remove them")


def _merge(tree: Tree, patch: Tree, origin: str) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value, origin)
        elif isinstance(value, dict) and key in tree:
            raise ConfigError(f"{origin}: '{key}' is a value, not a section; remove the part after it")
        else:
            tree[key] = value


def _resolve_paths(tree: Tree, base: Path, where: str) -> None:
    models = _at(tree, REWARD_MODELS_KEY)
    names = models if isinstance(models, dict) else ()
    paths = (*PATH_KEYS, *(f"{REWARD_MODELS_KEY}.{name}.path" for name in names))
    teachers = _at(tree, TEACHERS_KEY)
    keys = [dotted.rpartition(".")[::2] for dotted in (*paths, *WRITTEN_KEYS, REWARDS_KEY, *NAMED_KEYS)]
    keys += [(TEACHERS_KEY, name) for name in (teachers if isinstance(teachers, dict) else ())]
    for section, key in keys:
        table, dotted = _at(tree, section), f"{section}.{key}"
        value = table.get(key) if isinstance(table, dict) else None
        try:
            if dotted == REWARDS_KEY and isinstance(value, list | str):
                entries = [value] if isinstance(value, str) else value
                table[key] = [_resolve_reward(entry, base) for entry in entries]
            elif dotted in NAMED_KEYS:
                if is_reference(value):
                    table[key] = _resolve_reward(value, base)
            elif dotted != REWARDS_KEY and isinstance(value, str):
                found = _absolute(value, current_folder() if dotted in WRITTEN_KEYS else base)
                # if a folder ORG exists, ORG/NAME is a path, which may be misspelt
                is_of_hub = dotted == MODEL_KEY and HUB_NAME.fullmatch(value) and not os.path.exists(Path(found).parent)
                table[key] = value if is_of_hub or (section == "task" and value.startswith(HUB_DATA)) else found
        except (OSError, RuntimeError) as error:  # the name is too long, or ~USER does not exist
            raise ConfigError(f"{where}{dotted} = {shortened(value)}: invalid path: {error}") from None


def _at(tree: Tree, dotted: str) -> Any:  # noqa: ANN401 -- any TOML value
    found: Any = tree
    for part in dotted.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _resolve_reward(entry: object, base: Path) -> object:
    if not isinstance(entry, str) or ":" not in entry:
        return entry
    file, _, function = entry.rpartition(":")
    return f"{_absolute(file, base)}:{function}"


def _absolute(path: str, base: Path) -> str:
    """Return the absolute path without resolving links, which may have other targets on another host."""
    found = current_folder() / base / Path(path).expanduser()
    found.resolve()  # raises if the path is invalid
    return str(found)
