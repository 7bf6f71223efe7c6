"""How a vLLM engine is set up: its arguments, the environment of its processes, and where its own sockets lie."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from math import prod
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.config import ON_GPU_BYTES, READY_ENV, ActorsConfig
from common.hf_folder import check_model_folder, tensors_in
from common.process import DaemonThreads, threads_of, uncollected
from common.user_input import did_you_mean
from weight_sync.host_folder import HostFolder
from weight_sync.manifest import ITEM_BYTES, TransferFailed
from weight_sync.vllm_engine import BACKEND, OWNER_ENV, WORKER_CALLS

if TYPE_CHECKING:
    import zmq
    from vllm.engine.arg_utils import AsyncEngineArgs

_READY_TIMEOUT_S = 300
_CPU_BLOCK_TOKENS = 128
_EXECUTOR_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_LOGITS_BYTES = 16
"""Per sample and word: 32-bit logits, and their copies that sampling and log-probabilities make."""

_SET_ALREADY = {
    **{"dtype": "it is actors.dtype", "seed": "it is run.seed", "max_num_seqs": "it is actors.max_running_samples"},
    "max_model_len": "it is actors.max_prompt_tokens + actors.max_new_tokens",
    **{"tensor_parallel_size": "it is actors.tensor_parallel_size", "model": "it is model.path"},
    **dict.fromkeys(("gpu_memory_utilization", "num_gpu_blocks_override"), "it is actors.gpu_memory_share"),
    "kv_cache_memory_bytes": "it is actors.kv_cache_gib",
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "logprobs_mode", "watermark_config"),
        "training samples by temperature alone, so that log-probabilities stay exact",
    ),
    **dict.fromkeys(
        ("weight_transfer_config", "worker_extension_cls", "worker_cls", "distributed_executor_backend"),
        "weights reach a running engine through what Leeway puts there",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "nnodes"),
        "an engine is one replica, split by actors.tensor_parallel_size alone; more of them are actors.num_actors",
    ),
    "scheduling_policy": "what another actor handed on goes before the rest",
    "skip_tokenizer_init": "engines take and give tokens, and have no tokenizer",
}
"""Arguments of an engine that are not for `engine_args`, and why."""
_SET_ON_CPU = {
    "enable_chunked_prefill": "a seeded request that is split over steps ends an engine on CPU",
    "enforce_eager": "an engine on CPU compiles nothing",
}


def set_environment(config: ActorsConfig) -> None:
    """Set what vLLM reads from the environment only; its processes inherit it."""
    os.environ[OWNER_ENV] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads_of(config.cpus))
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        READY_ENV: str(_READY_TIMEOUT_S),
        # a forked child would not load our plugin again, and so not die with its owner
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # engines share the cores of a machine: none may bind itself to the cores of another
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # it cuts by top-k and top-p, which we never do, and compiles itself for minutes where there is a compiler
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load_engine(config: ActorsConfig) -> None:
    """Import vLLM, which takes most of the start of an engine."""
    set_environment(config)
    with uncollected():
        import vllm.v1.engine.async_llm  # noqa: F401


@contextlib.contextmanager
def uncollected_children() -> Iterator[None]:
    """Start vLLM's processes in the block without the garbage collector; our plugin turns it on again."""
    command_line = spawn.get_command_line

    def with_collector_off(**arguments: object) -> list[str]:
        command: list[str] = command_line(**arguments)
        program = command.index("-c") + 1
        command[program] = f"import gc; gc.disable(); {command[program]}"
        return command

    spawn.get_command_line = with_collector_off
    try:
        yield
    finally:
        spawn.get_command_line = command_line


def engine_args(model_path: Path, config: ActorsConfig, seed: int) -> AsyncEngineArgs:
    """Return the arguments of one engine; ValueError if vLLM's build does not fit the GPUs reserved."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if not on_cpu and not config.gpus:
        raise ValueError(
            "actors.gpus = 0, and the vLLM installed here computes on GPUs: give each actor one, or "
            "install the vLLM for CPU (LEEWAY_EXTRA=cpu make install)"
        )
    if on_cpu and config.gpus:
        raise ValueError(
            f"this actor has reserved {config.gpus:g} GPUs, and the vLLM installed on this host computes on the CPU: "
            "LEEWAY_EXTRA=gpu make install there, or set actors.gpus = 0"
        )
    if on_cpu:
        # Prompts are not split over steps: vLLM rewinds the generator of a seeded request after such a
        # part, and a generator on CPU cannot be rewound, which ends the engine.
        placement: dict[str, Any] = {
            "kv_cache_memory_bytes": config.kv_cache_bytes_on_cpu,
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        }
        if config.tensor_parallel_size == 1:
            # vLLM would put the model into a third process, which costs a round trip for every step
            placement["distributed_executor_backend"] = _EXECUTOR_IN_PROCESS
        if config.max_prompt_tokens < _CPU_BLOCK_TOKENS:
            # no prompt fills a block, so none could be shared: save the hashing
            placement["enable_prefix_caching"] = False
    else:
        placement = _memory_on_gpu(model_path, config, current_platform.get_device_total_memory)
    if config.tensor_parallel_size > 1:
        # in a placement group vLLM would have Ray start its workers, each in a bundle of its own; ours has all GPUs
        placement["distributed_executor_backend"] = "mp"
    told = dict(config.engine_args)
    if config.dtype != "float32":
        # logits that are rounded to 16 bits would be off by hundredths; the learner's are not rounded either
        told["hf_overrides"] = {"head_dtype": "float32", **told.get("hf_overrides", {})}
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
        # our sampling parameters alone decide, not a generation_config.json
        "generation_config": "vllm",
    }
    return AsyncEngineArgs(**{"disable_log_stats": True, **placement, **told, **fixed})


def _memory_on_gpu(model_path: Path, config: ActorsConfig, total_bytes: Callable[[], int]) -> dict[str, Any]:
    """Return an engine's arguments for GPU memory; ValueError if its share does not hold model, keys and values.

    Alone on a GPU it gets its share, and gives keys and values what a trial leaves. Beside others the trial would
    measure them too. There it gets the bytes of keys and values, and as its share, which must be free before anything
    is loaded, those and the weights.
    """
    if config.kv_cache_gib is None and config.gpus >= 1:
        return {"gpu_memory_utilization": config.gpu_memory_share}
    total = total_bytes()
    weights = sum(prod(tensor.shape) for tensor in tensors_in(model_path).values()) * ITEM_BYTES[config.dtype]
    logits = _LOGITS_BYTES * config.max_running_samples * check_model_folder(model_path).vocab_size
    room = int(config.gpu_memory_share * total) - weights - logits - ON_GPU_BYTES
    kv_cache = room if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30)
    if config.gpus < 1 and (room <= 0 or kv_cache > room):
        wanted = "memory" if config.kv_cache_gib is None else f"actors.kv_cache_gib = {config.kv_cache_gib:g}"
        raise ValueError(
            f"actors.gpu_memory_share = {config.gpu_memory_share:g} of a GPU of {total / 2**30:.0f} GiB does not leave "
            f"{wanted} for attention keys and values beside {weights / 2**30:.1f} GiB of weights and about "
            f"{(ON_GPU_BYTES + logits) / 2**30:.1f} GiB that an engine takes: raise it, or lower "
            f"{'actors.max_running_samples' if config.kv_cache_gib is None else 'actors.kv_cache_gib'}"
        )
    needed = (weights // config.tensor_parallel_size + kv_cache) / total
    return {"kv_cache_memory_bytes": kv_cache, "gpu_memory_utilization": min(1.0, round(needed, 4))}


def check_engine_args(told: Mapping[str, Any], *, on_cpu: bool) -> None:
    """Refuse arguments that vLLM does not know or that Leeway sets; ValueError names it and the alternative."""
    set_already = {**_SET_ALREADY, **(_SET_ON_CPU if on_cpu else {})}
    for name, value in told.items():
        if name in set_already:
            raise ValueError(f"engine_args.{name} is set by Leeway: {set_already[name]}")
        known = known_engine_args()
        if known and name not in known:
            raise ValueError(f"engine_args.{name}: vLLM knows no such argument{did_you_mean(name, known)}")
        if name == "hf_overrides" and not isinstance(value, dict):
            raise ValueError(f"engine_args.hf_overrides = {value!r} must be a table")


@cache
def known_engine_args() -> frozenset[str]:
    """Return the fields of vLLM's AsyncEngineArgs from its source, since its import takes seconds; none without it."""
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
_END_S = 10.0
_MAX_PATH_BYTES = 107
_NAME_BYTES = 37
_KIN = r"leeway-{user}-vllm-\d+-\d{{1,9}}"
"""Pattern of such folders alone: those of fetched weights beside them end in the name of a store."""
_numbers = itertools.count()


class EngineSockets:
    """A folder for the sockets between one engine's processes, readable by this user alone.

    It is removed with the engine, or by the next engine after a kill. vLLM's own names in the temporary folder stay
    forever.
    """

    def __init__(self) -> None:
        """Make it, or raise OSError, and name it in the environment, which the engine's processes inherit."""
        name = f"leeway-{os.geteuid()}-vllm-{os.getpid()}-{next(_numbers)}"
        path = Path(tempfile.gettempdir()) / name
        if len(os.fsencode(path)) + _NAME_BYTES > _MAX_PATH_BYTES:
            path = Path("/tmp") / name
        try:
            self._folder = HostFolder(path, kin=_KIN)
        except TransferFailed as error:
            # the cause is the system's word; without one the folder is somebody else's, and the text says so
            why = error.__cause__ or error
            raise OSError(f"no folder for vLLM's sockets can be made in {path.parent}: {why}") from error
        os.environ[_SOCKETS_ENV] = str(path)

    async def end(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Terminate vLLM's ZeroMQ context, which it leaves to the garbage collector, and remove the folder.

        In another thread: it waits for sockets that this event loop closes after a crash.
        """
        thread = DaemonThreads("engine-context", max_threads=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await thread.run(context.term)
        self.remove()

    def remove(self) -> None:
        self._folder.close()
