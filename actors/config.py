"""The `[actors]` section: number of actors, sampling, resources of their engines, and admission of samples.

An Admission, selected by `actors.admission`, decides when a sample starts in the engine:

slots  SlotAdmission: up to `actors.max_running_samples` at once
cache  `leeway.planning.kv_gate`: as many samples as the engine's cache is likely to hold until they finish
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from leeway.actors.tasks.config import TaskConfig
from leeway.buffer.config import MAX_GROUP_SIZE
from leeway.common.user_input import Knob
from leeway.weight_sync.config import WeightSyncConfig

AdmissionName = Literal["slots", "cache"]

READY_ENV = "VLLM_ENGINE_READY_TIMEOUT_S"
"""Timeout in seconds for the start of an engine's processes. vLLM reads the variable when it is imported."""
ADDED_ENV = "LEEWAY_ADDED_VARIABLES"
"""Comma-separated variables that Leeway added to this process's environment; reward processes start without them."""
ON_GPU_BYTES = 2 * 2**30
"""Estimated GPU memory of an engine besides weights, attention keys and values, and logits: the CUDA context, kernel
workspaces, activations of a step of 2,048 tokens, and CUDA graphs."""
_LOGIT_BYTES = 16
"""Bytes per sample and vocabulary entry: 32-bit logits, and their copies for sampling and log-probabilities."""
_TOKEN_BYTES = 8
"""Bytes per sample and token of the longest sample: token ids of the running samples, twice."""


class ActorsConfig(BaseModel):
    """Options of generation.

    Training samples use temperature only: the recorded log-probabilities then cover the full vocabulary,
    and corrections that use these log-probabilities are exact. Options such as top_p are rejected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_actors: NonNegativeInt = Knob(
        2, "Number of actors (vLLM engines). With buffer.source, actors only evaluate; 0: no evaluation.", basic=True
    )
    group_size: int = Knob(
        8,
        "K, samples per prompt.",
        basic=True,
        fixed="the buffer has leased groups of that size",
        ge=1,
        le=MAX_GROUP_SIZE,
    )
    temperature: float = Knob(
        1.0,
        "Sampling temperature of training samples.",
        basic=True,
        fixed="the stored samples were generated at that temperature",
        ge=0.01,
    )
    max_new_tokens: PositiveInt = Knob(64, "Maximum completion length in tokens.", basic=True)
    max_prompt_tokens: PositiveInt = Knob(64, "Maximum prompt length in tokens; longer prompts are errors.", basic=True)
    max_running_samples: PositiveInt = Knob(
        64, "Maximum concurrent samples per actor; the cache may hold fewer.", basic=True
    )
    admission: AdmissionName = Knob(
        "slots",
        "When a sample starts: 'slots' below max_running_samples; 'cache' if the engine's cache is likely to "
        "hold all running samples to completion.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Knob("float32", "Serving precision.", basic=True)
    kv_cache_gib: PositiveFloat | None = Knob(
        None, "GiB of KV cache; unset: 0.25 on CPU; on a GPU, gpu_memory_share minus weights and overhead."
    )
    gpu_memory_share: float = Knob(
        0.85,
        "Fraction of a GPU's memory; with launch.colocate, at most 0.95 in sum with the learner's fraction.",
        basic=True,
        gt=0,
        le=1,
    )
    tensor_parallel_size: PositiveInt = Knob(1, "GPUs per engine.")
    cpus: float = Knob(0.5, "Ray CPUs per actor, and compute threads of each of its processes.", ge=0)
    gpus: float = Knob(0.0, "GPUs per actor: 0 or tensor_parallel_size.", basic=True, ge=0)
    engine_args: dict[str, Any] = Knob({}, "Further vLLM AsyncEngineArgs; those that Leeway sets are rejected.")
    reward_timeout_s: PositiveFloat = Knob(60.0, "Timeout after which a reward call counts as failed.")
    reward_processes: PositiveInt = Knob(4, "Maximum processes (concurrent calls) of a reward function per actor.")
    eval_every: int = Knob(0, "Versions between evaluations; 0: only before and after training.", basic=True, ge=0)

    @property
    def max_model_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    def room(self, num_to_generate: int, num_open: int, num_ahead: float = 0.0, slots: int | None = None) -> int:
        """Return the number of groups to lease, rounded up, so that no slot stays empty.

        `num_to_generate` counts leased samples that the engine has not completed. `num_open` also counts samples that
        are being scored or pushed. `num_ahead` counts running samples that finish before their replacements arrive.
        `slots` is the number of samples that fit into the engine's cache.
        """
        slots = self.max_running_samples if slots is None else slots
        ahead = min(slots, round(num_ahead))
        free = min(slots + ahead - num_to_generate, 2 * slots + ahead - num_open)
        return max(0, -(-free // self.group_size))

    @property
    def kv_cache_bytes_on_cpu(self) -> int:
        """Return the bytes for attention keys and values of an engine on CPU."""
        return int((self.kv_cache_gib or 0.25) * 2**30)

    def batch_bytes(self, vocab_size: int) -> int:
        """Return the bytes of an engine's buffers for the samples that run at once."""
        return self.max_running_samples * (_LOGIT_BYTES * vocab_size + _TOKEN_BYTES * self.max_model_tokens)


class ActorSections(Protocol):
    """The config sections that an actor reads."""

    actors: ActorsConfig
    """Options of generation, with the overrides of the actor's pool."""
    task: TaskConfig
    weight_sync: WeightSyncConfig


# --- admission --------------------------------------------------------------------------------------


class KvCache(NamedTuple):
    """Capacity of an engine's cache of attention keys and values."""

    num_blocks: int
    block_tokens: int
    shares_prompts: bool
    """True if the samples of a group share the full blocks of their prompt."""


class KvSample(NamedTuple):
    group: int
    prompt_tokens: int
    limit: int
    """Maximum completion tokens; the sample leaves the engine at this length."""
    num_prefix_tokens: int = 0
    """Completion tokens that the sample resumes from."""
    usual_tokens: float = 0.0
    """Geometric mean of the predicted completion tokens of its prompt; 0 if unknown."""


class Admission(Protocol):
    """Decides when samples of one engine may start, in first-in, first-out order."""

    num_sure: int
    """Number of samples that fit into the cache at any length."""

    @property
    def needs_lengths(self) -> bool:
        """Return whether this admission needs the completion lengths that the buffer predicts."""

    def at_once(self) -> int:
        """Return the number of samples that may run concurrently at present."""

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        """Block until the sample may start."""

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Record that an admitted sample starts now, after it has waited for weights."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """Record the end of a sample. `num_tokens` is the completion length, or None if it is not representative."""


class SlotAdmission:
    """Admits up to `actors.max_running_samples` samples at once."""

    needs_lengths = False

    def __init__(self, config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> None:
        self.num_sure = config.max_running_samples
        self._free = asyncio.Semaphore(self.num_sure)

    def at_once(self) -> int:
        return self.num_sure

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        await self._free.acquire()

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Do nothing: slots do not depend on start times."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        self._free.release()


ADMISSIONS: Mapping[AdmissionName, str] = {
    "slots": "leeway.actors.config:SlotAdmission",
    "cache": "leeway.planning.kv_gate:cache_admission",
}


def admission_of(config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> Admission:
    """Return the admission of one engine.

    `cache` is None if unknown. `now` returns the engine's step count; each step adds a token to each running sample.
    """
    admission: Admission = resolve_name(ADMISSIONS[config.admission])(config, cache, now)
    return admission
