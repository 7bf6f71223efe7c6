"""The config of a run: ten sections, each owned by the package that reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from actors.config import ActorsConfig
from actors.tasks.config import TaskConfig
from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
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
