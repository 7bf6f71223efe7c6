"""The `[actors]` section: how many, how they sample, and what their engines may use."""

from __future__ import annotations

from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from actors.tasks.config import TaskConfig
from buffer.config import BufferConfig
from weight_sync.config import WeightSyncConfig


class ActorsConfig(BaseModel):
    """Knobs of generation.

    Training samples by temperature alone, so that the recorded log-probability is that of the full
    vocabulary and every correction built on it is exact; truncating knobs are refused by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_actors: PositiveInt = Field(default=2, description="How many actors, each with its own vLLM engine.")
    group_size: PositiveInt = Field(default=8, description="K, samples per prompt.")
    temperature: PositiveFloat = Field(default=1.0, description="Sampling temperature of training samples.")
    max_new_tokens: PositiveInt = Field(default=64, description="Longest completion, in tokens.")
    max_prompt_tokens: PositiveInt = Field(default=64, description="A longer prompt is refused at start-up.")
    max_running_samples: PositiveInt = Field(default=64, description="Samples that one actor keeps in flight.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="Serving precision.")
    kv_cache_gib: PositiveFloat = Field(default=0.25, description="Memory for attention keys and values on CPU.")
    gpu_memory_share: float = Field(default=0.85, gt=0, le=1, description="Share of GPU memory for the engine.")
    tensor_parallel_size: PositiveInt = Field(default=1, description="GPUs per engine.")
    num_threads: PositiveInt = Field(default=1, description="Compute threads per engine on CPU.")
    cpus: float = Field(default=0.5, ge=0, description="Ray CPUs reserved per actor.")
    gpus: float = Field(default=0.0, ge=0, description="Ray GPUs reserved per actor.")
    reward_timeout_s: PositiveFloat = Field(default=60.0, description="A reward that takes longer counts as failed.")
    reward_processes: PositiveInt = Field(
        default=4, description="Processes, and calls at once, that a reward function has at most in one actor."
    )
    generate_timeout_s: PositiveFloat = Field(default=300.0, description="A sample that takes longer counts as failed.")
    eval_every: int = Field(default=0, ge=0, description="Versions between evaluations; 0: before and after only.")
    eval_problems: PositiveInt = Field(default=256, description="Held-out problems of an evaluation during the run.")

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt plus completion."""
        return self.max_prompt_tokens + self.max_new_tokens


class ActorSections(Protocol):
    """What an actor reads of the config of a run; how old weights may be, the contract of the run says."""

    actors: ActorsConfig
    """As it is for the actor's pool."""
    task: TaskConfig
    buffer: BufferConfig
    weight_sync: WeightSyncConfig
