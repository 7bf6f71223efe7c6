"""The `[actors]` section: how many, how they sample, what their engines may use, and which samples these start when.

The last is an Admission, by `actors.admission`:

slots  SlotAdmission: `actors.max_running_samples` at once
cache  `planning.kv_gate`: as many as the engine's cache is likely to hold to their end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from actors.tasks.config import TaskConfig
from buffer.config import MAX_GROUP_SIZE
from common.user_input import Knob
from weight_sync.config import WeightSyncConfig

AdmissionName = Literal["slots", "cache"]

READY_ENV = "VLLM_ENGINE_READY_TIMEOUT_S"
"""How long vLLM waits for an engine's processes; it reads it as it loads, so whoever starts an actor sets it."""
OFFLINE_ENV = "LEEWAY_TOOK_OFFLINE"
"""Variables, by commas, that keep this process from the Hub, and with which it was not started: rewards go without."""
ON_GPU_BYTES = 2 * 2**30
"""What an engine takes of a GPU beside weights, keys and logits, an estimate: the context, workspaces of kernels, the
activations of a step of 2,048 tokens, and CUDA graphs."""


class ActorsConfig(BaseModel):
    """Knobs of generation.

    Training samples by temperature alone, so that the recorded log-probability is that of the full
    vocabulary and every correction built on it is exact; truncating knobs are refused by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_actors: NonNegativeInt = Knob(
        2, "Actors, each with a vLLM engine. With buffer.source they evaluate only; 0 evaluates nothing.", basic=True
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
        fixed="the stored log-probabilities are of that temperature",
        ge=0.01,
    )
    max_new_tokens: PositiveInt = Knob(64, "Longest completion, in tokens.", basic=True)
    max_prompt_tokens: PositiveInt = Knob(64, "A longer prompt is refused at start-up.", basic=True)
    max_running_samples: PositiveInt = Knob(
        64, "Samples that one actor generates at once, if its engine has room.", basic=True
    )
    admission: AdmissionName = Knob(
        "slots",
        "When a sample starts: 'slots': as soon as fewer than max_running_samples run; 'cache': when the "
        "engine's cache is likely to hold all that run to their end, so that few are preempted.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Knob("float32", "Serving precision.", basic=True)
    kv_cache_gib: PositiveFloat | None = Knob(
        None, "Memory for attention keys and values. Unset: 0.25 on CPU; on a GPU what gpu_memory_share leaves."
    )
    gpu_memory_share: float = Knob(
        0.85,
        "Share of a GPU's memory for the engine; with launch.colocate at most 0.95 with the learner's.",
        basic=True,
        gt=0,
        le=1,
    )
    tensor_parallel_size: PositiveInt = Knob(1, "GPUs per engine.")
    cpus: float = Knob(0.5, "Ray CPUs reserved per actor, and threads that each of its processes computes with.", ge=0)
    gpus: float = Knob(0.0, "GPUs per actor: 0, or tensor_parallel_size.", basic=True, ge=0)
    engine_args: dict[str, Any] = Knob(
        {}, "More arguments of vLLM's AsyncEngineArgs, as enforce_eager; those that Leeway sets are refused."
    )
    reward_timeout_s: PositiveFloat = Knob(60.0, "A reward that takes longer counts as failed.")
    reward_processes: PositiveInt = Knob(
        4, "Processes, and calls at once, that a reward function has at most in one actor."
    )
    eval_every: int = Knob(0, "Versions between evaluations; 0: before and after only.", basic=True, ge=0)

    @property
    def max_model_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    def room(self, num_to_generate: int, num_open: int, num_ahead: float = 0.0, slots: int | None = None) -> int:
        """Return how many groups an actor leases so that no slot stays empty, rounded up.

        Of its leases `num_to_generate` samples are not completed by the engine, and `num_open` are those or being
        scored or pushed, which needs no slot but is bounded too. `num_ahead` end before what is leased for them is
        there. `slots`: what the engine's cache has room for.
        """
        slots = self.max_running_samples if slots is None else slots
        ahead = min(slots, round(num_ahead))
        free = min(slots + ahead - num_to_generate, 2 * slots + ahead - num_open)
        return max(0, -(-free // self.group_size))

    @property
    def kv_cache_bytes_on_cpu(self) -> int:
        """For attention keys and values of an engine that computes there."""
        return int((self.kv_cache_gib or 0.25) * 2**30)


class ActorSections(Protocol):
    """What an actor reads of the config of a run; how old weights may be, the contract of the run says."""

    actors: ActorsConfig
    """As it is for the actor's pool."""
    task: TaskConfig
    weight_sync: WeightSyncConfig


# --- admission --------------------------------------------------------------------------------------


class KvCache(NamedTuple):
    """The room of an engine for keys and values."""

    num_blocks: int
    block_tokens: int
    shares_prompts: bool
    """Samples of a group share the whole blocks of their prompt."""


class KvSample(NamedTuple):
    group: int
    prompt_tokens: int
    limit: int
    """Most completion tokens when it leaves the engine."""
    there: int = 0
    """Completion tokens that it continues from."""
    usual_tokens: float = 0.0
    """Geometric mean of the likely completion tokens of its prompt; 0: not known."""


class Admission(Protocol):
    """Decides which samples of one engine may start; FIFO."""

    num_sure: int
    """Samples that there is room for, however long they become."""

    @property
    def needs_lengths(self) -> bool:
        """Does it need the lengths that the buffer predicts of a prompt?"""

    def at_once(self) -> int:
        """Return how many samples run at once at present."""

    async def admit(self, key: Hashable, sample: KvSample) -> None:
        """Wait until the sample may start."""

    def begin(self, key: Hashable, sample: KvSample) -> None:
        """Note that a sample starts only now: it waited for weights after it was admitted."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        """Note that it ended, with `num_tokens` of completion, or None if that says nothing of lengths."""


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
        """Do nothing: no figure depends on when a sample starts."""

    def end(self, key: Hashable, num_tokens: int | None = None, *, is_cut: bool = False) -> None:
        self._free.release()


ADMISSIONS: Mapping[AdmissionName, str] = {
    "slots": "actors.config:SlotAdmission",
    "cache": "planning.kv_gate:cache_admission",
}


def admission_of(config: ActorsConfig, cache: KvCache | None, now: Callable[[], float]) -> Admission:
    """Return the admission of one engine.

    `cache` is the engine's, None if unknown; `now` counts its steps so far, each a token of every running sample.
    """
    made: Admission = resolve_name(ADMISSIONS[config.admission])(config, cache, now)
    return made
