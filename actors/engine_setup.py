"""Set-up of a vLLM engine: its arguments, the environment of its processes, and the folder of its sockets."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leeway.actors.config import ADDED_ENV, ON_GPU_BYTES, READY_ENV, ActorsConfig, KvCache
from leeway.common.hf_folder import check_model_folder, tensors_in
from leeway.common.process import UNUSED, DaemonThreads, fast_imports, threads_of
from leeway.common.user_input import did_you_mean
from leeway.weight_sync.host_folder import HostFolder
from leeway.weight_sync.manifest import ITEM_BYTES, TransferFailed
from leeway.weight_sync.vllm_engine import BACKEND, OWNER_ENV, WORKER_CALLS

if TYPE_CHECKING:
    import zmq
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

_READY_TIMEOUT_S = 300
_CPU_BLOCK_TOKENS = 128
_EXECUTOR_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_BATCH_TOKENS = 2048
"""Tokens of one step by vLLM's default; a step must hold one token of each running sample."""

_SET_ALREADY = {
    **{"dtype": "use actors.dtype", "seed": "use run.seed", "max_num_seqs": "use actors.max_running_samples"},
    "max_model_len": "the value is actors.max_prompt_tokens + actors.max_new_tokens",
    **{"tensor_parallel_size": "use actors.tensor_parallel_size", "model": "use model.path"},
    **dict.fromkeys(("gpu_memory_utilization", "num_gpu_blocks_override"), "use actors.gpu_memory_share"),
    "kv_cache_memory_bytes": "use actors.kv_cache_gib",
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "logprobs_mode", "watermark_config"),
        "training samples use temperature only, so that log-probabilities stay exact",
    ),
    **dict.fromkeys(
        ("weight_transfer_config", "worker_extension_cls", "worker_cls", "distributed_executor_backend"),
        "weight updates of a running engine need the value that Leeway sets",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "nnodes"),
        "an engine is one replica, split only by actors.tensor_parallel_size; for more replicas, use actors.num_actors",
    ),
    "scheduling_policy": "the scheduler gives priority to samples that another actor requeued",
    "skip_tokenizer_init": "engines take and return token ids, without a tokenizer",
}
"""Arguments that `engine_args` must not set, with the reason or the key to use instead."""
_SET_ON_CPU = {
    "enable_chunked_prefill": "a seeded request that is split over steps crashes an engine on CPU",
    "enforce_eager": "an engine on CPU runs without compilation",
}


def set_environment(config: ActorsConfig) -> None:
    """Set the variables that vLLM reads only from the environment; vLLM's processes inherit these variables."""
    os.environ[OWNER_ENV] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads_of(config.cpus))
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        READY_ENV: str(_READY_TIMEOUT_S),
        # a forked process would not load Leeway's plugin again, and would not exit when its owner exits
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # engines share the cores of a machine, so an engine must not pin its threads to cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # FlashInfer's sampler is for top-k and top-p, which Leeway never uses; its compilation can take minutes
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # an engine on CPU runs eagerly, but vLLM would compile one small function of its sampler, which takes seconds
        "TORCHDYNAMO_DISABLE": "0" if config.gpus else "1",
    }
    added = sorted(defaults.keys() - os.environ.keys())
    os.environ.update({name: defaults[name] for name in added})
    os.environ[ADDED_ENV] = ",".join([os.environ.get(ADDED_ENV, ""), *added])


def load_engine(config: ActorsConfig) -> None:
    """Import vLLM, which takes most of an engine's start-up time."""
    set_environment(config)
    hidden = ["torch._inductor.lowering"] * (os.environ["TORCHDYNAMO_DISABLE"] == "1")  # takes 0.5 s to import
    with fast_imports(*UNUSED, *hidden):
        import vllm.v1.engine.core_client  # noqa: F401


def engine_args(model_path: Path, config: ActorsConfig, seed: int) -> AsyncEngineArgs:
    """Return the arguments of one engine; raise ValueError if vLLM's build does not match the reserved GPUs."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if not on_cpu and not config.gpus:
        raise ValueError(
            "actors.gpus = 0, but the vLLM installed here needs a GPU: set actors.gpus = 1, or "
            "install the vLLM for CPU (LEEWAY_EXTRA=cpu make install)"
        )
    if on_cpu and config.gpus:
        raise ValueError(
            f"this actor reserved {config.gpus:g} GPUs, but the vLLM installed on this host runs on the CPU: run "
            "LEEWAY_EXTRA=gpu make install there, or set actors.gpus = 0"
        )
    if on_cpu:
        # Prompts are not split over steps. After each part of a prompt, vLLM would rewind the random generator of a
        # seeded request. A generator on CPU cannot be rewound, so the engine would crash.
        placement: dict[str, Any] = {
            "kv_cache_memory_bytes": config.kv_cache_bytes_on_cpu,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        }
        if config.tensor_parallel_size == 1:
            # by default, vLLM runs the model in a third process, which costs a round trip per step
            placement["distributed_executor_backend"] = _EXECUTOR_IN_PROCESS
        if config.max_prompt_tokens < _CPU_BLOCK_TOKENS:
            # all prompts are shorter than a cache block, so samples cannot share blocks: skip the hashing of blocks
            placement["enable_prefix_caching"] = False
    else:
        placement = _memory_on_gpu(model_path, config, current_platform.get_device_total_memory)
    if config.tensor_parallel_size > 1:
        # without "mp", vLLM starts each worker in its own Ray bundle, but an actor has one bundle with all its GPUs
        placement["distributed_executor_backend"] = "mp"
    if (num_tokens := config.max_running_samples) > _BATCH_TOKENS:
        placement["max_num_batched_tokens"] = max(num_tokens, config.max_model_tokens)
    overrides = dict(config.engine_args)
    if config.dtype != "float32":  # keep logits in float32, as the learner does: 16 bits shift them by hundredths
        overrides["hf_overrides"] = {"head_dtype": "float32", **overrides.get("hf_overrides", {})}
    fixed = {
        "model": str(model_path),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "seed": seed,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": config.max_running_samples,
        "scheduling_policy": "priority",
        "tensor_parallel_size": config.tensor_parallel_size,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": WORKER_CALLS,
        # ignore the sampling parameters in the model's generation_config.json
        "generation_config": "vllm",
    }
    return AsyncEngineArgs(**{"disable_log_stats": True, **placement, **overrides, **fixed})


def _memory_on_gpu(model_path: Path, config: ActorsConfig, total_bytes: Callable[[], int]) -> dict[str, Any]:
    """Return an engine's arguments for GPU memory; raise ValueError if the share is too small for model and cache.

    An engine with a whole GPU gets `gpu_memory_share`, and a trial run of vLLM sets the size of the KV cache. On a
    shared GPU, the trial would also measure other processes. An engine there gets the size of the KV cache in bytes,
    and the memory share that weights and cache need. vLLM requires this share to be free before loading the model.
    """
    if config.kv_cache_gib is None and config.gpus >= 1:
        return {"gpu_memory_utilization": config.gpu_memory_share}
    total = total_bytes()
    weights = sum(prod(tensor.shape) for tensor in tensors_in(model_path).values()) * ITEM_BYTES[config.dtype]
    batch = config.batch_bytes(check_model_folder(model_path).vocab_size)
    room = int(config.gpu_memory_share * total) - weights - batch - ON_GPU_BYTES
    kv_cache = room if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
    if config.gpus < 1 and (room <= 0 or kv_cache > room):
        amount = "memory" if config.kv_cache_gib is None else f"actors.kv_cache_gib = {config.kv_cache_gib:g}"
        raise ValueError(
            f"actors.gpu_memory_share = {config.gpu_memory_share:g} of a GPU of {total / 2**30:.0f} GiB does not leave "
            f"{amount} for attention keys and values besides {weights / 2**30:.1f} GiB of weights and about "
            f"{(ON_GPU_BYTES + batch) / 2**30:.1f} GiB of engine overhead: raise actors.gpu_memory_share, or lower "
            f"{'actors.max_running_samples' if config.kv_cache_gib is None else 'actors.kv_cache_gib'}"
        )
    needed = (weights // config.tensor_parallel_size + kv_cache) / total
    return {"kv_cache_memory_bytes": kv_cache, "gpu_memory_utilization": min(1.0, round(needed, 4))}


def cache_of(config: VllmConfig) -> KvCache | None:
    """Return the cache's capacity in blocks that span all layers; one of these may take several of vLLM's blocks."""
    cache, longest = config.cache_config, config.model_config.max_model_len
    if not cache.num_gpu_blocks or not cache.block_size or not cache.kv_cache_max_concurrency:
        return None
    num_blocks = int(cache.kv_cache_max_concurrency * ceil(longest / cache.block_size))
    # subtract the block that vLLM reserves
    return KvCache(max(1, num_blocks - 1), cache.block_size, bool(cache.enable_prefix_caching))


def check_engine_args(arguments: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Raise ValueError if vLLM does not have an argument, or if Leeway sets it; the error names an alternative."""
    set_already = {**_SET_ALREADY, **(_SET_ON_CPU if on_cpu else {})}
    for name, value in arguments.items():
        if name in set_already:
            raise ValueError(f"engine_args.{name} is set by Leeway: {set_already[name]}")
        known = known_engine_args()
        if known and name not in known:
            raise ValueError(f"engine_args.{name}: vLLM has no such argument{did_you_mean(name, known)}")
        if name == "hf_overrides" and not isinstance(value, dict):
            raise ValueError(f"engine_args.hf_overrides = {value!r} must be a table")


@cache
def known_engine_args() -> frozenset[str]:
    """Return the fields of AsyncEngineArgs from vLLM's source, since importing vLLM is slow; empty without vLLM."""
    found = find_spec("vllm")
    file = Path(found.origin).parent / "engine" / "arg_utils.py" if found is not None and found.origin else None
    if file is None or not file.is_file():
        return frozenset()
    classes = [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    return frozenset(
        node.target.id
        for each in classes
        if each.name in ("EngineArgs", "AsyncEngineArgs")
        for node in each.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")
    )


_SOCKETS_ENV = "VLLM_RPC_BASE_PATH"
_TERM_TIMEOUT_S = 10.0
_MAX_PATH_BYTES = 107
_NAME_BYTES = 37
_KIN = r"leeway-{user}-vllm-\d+-\d{{1,9}}"
"""Pattern of the names of socket folders; the names of folders with fetched weights do not match the pattern."""
_numbers = itertools.count()


class EngineSockets:
    """A folder for the sockets between one engine's processes, accessible only to this user.

    The folder is removed when the engine stops. If the engine was killed, the next engine removes the folder. Without
    the folder, vLLM's sockets would stay in the temporary folder forever.
    """

    def __init__(self) -> None:
        """Create the folder, or raise OSError, and set its path in the environment of the engine's processes."""
        name = f"leeway-{os.geteuid()}-vllm-{os.getpid()}-{next(_numbers)}"
        path = Path(tempfile.gettempdir()) / name
        if len(os.fsencode(path)) + _NAME_BYTES > _MAX_PATH_BYTES:
            path = Path("/tmp") / name
        try:
            self._folder = HostFolder(path, siblings=_KIN)
        except TransferFailed as error:
            # the cause is the operating system's error; an error without a cause states the reason in its message
            why = error.__cause__ or error
            raise OSError(f"cannot create a folder for vLLM's sockets in {path.parent}: {why}") from error
        os.environ[_SOCKETS_ENV] = str(path)

    async def end(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Terminate vLLM's ZeroMQ context, which vLLM leaves to the garbage collector, and remove the folder.

        Run the termination in another thread: after a crash, it blocks until this event loop closes the sockets.
        """
        thread = DaemonThreads("engine-context", max_threads=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_TIMEOUT_S):
                await thread.run(context.term)
        self.remove()

    def remove(self) -> None:
        self._folder.close()
