"""How a vLLM engine is set up: its arguments, the environment of its processes, and where its own sockets lie."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.config import ActorsConfig
from common.imports import uncollected
from common.threads import DaemonThreads
from weight_sync.errors import TransferFailed
from weight_sync.host_folder import HostFolder
from weight_sync.vllm_engine import BACKEND, OWNER_ENV, WORKER_CALLS

if TYPE_CHECKING:
    import zmq
    from vllm.engine.arg_utils import AsyncEngineArgs

_READY_TIMEOUT_S = 300
_CPU_BLOCK_TOKENS = 128
_EXECUTOR_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def set_environment(config: ActorsConfig) -> None:
    """What vLLM reads from the environment only. Inherited by the engine's processes."""
    os.environ[OWNER_ENV] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(_READY_TIMEOUT_S),
        # a forked child would not load our plugin again, and so not die with its owner
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # engines share the cores of a machine: none may bind itself to the cores of another
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def load_engine(config: ActorsConfig) -> None:
    """Import vLLM, which takes most of the start of an engine; `Engine.start` finds it imported."""
    set_environment(config)
    with uncollected():
        import vllm.v1.engine.async_llm  # noqa: F401


@contextlib.contextmanager
def uncollected_children() -> Iterator[None]:
    """The processes that vLLM starts in the block import it in the same way; our plugin turns their collector on."""
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
    """The arguments of one engine; ValueError if it could only run on a GPU, and has none."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if not on_cpu and not config.gpus:
        raise ValueError(
            "actors.gpus = 0, and the vLLM installed here computes on GPUs: give each actor one, or a part of one, or "
            "install the vLLM for CPU (LEEWAY_EXTRA=cpu make install)"
        )
    placement: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_share}
    if on_cpu:
        # Prompts are not split over steps: vLLM rewinds the generator of a seeded request after such a
        # part, and a generator on CPU cannot be rewound, which ends the engine.
        placement = {
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        }
        if config.tensor_parallel_size == 1:
            # vLLM would put the model into a third process, which costs a round trip for every step
            placement["distributed_executor_backend"] = _EXECUTOR_IN_PROCESS
        if config.max_prompt_tokens < _CPU_BLOCK_TOKENS:
            # no prompt fills a block, so none could be shared: save the hashing
            placement["enable_prefix_caching"] = False
    if config.tensor_parallel_size > 1:
        # in a placement group vLLM would have Ray start its workers, each in a bundle of its own; ours has all GPUs
        placement["distributed_executor_backend"] = "mp"
    return AsyncEngineArgs(
        model=str(model_path),
        skip_tokenizer_init=True,
        dtype=config.dtype,
        seed=seed,
        max_model_len=config.max_model_tokens,
        max_num_seqs=config.max_running_samples,
        tensor_parallel_size=config.tensor_parallel_size,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls=WORKER_CALLS,
        # our sampling parameters alone decide, not a generation_config.json
        generation_config="vllm",
        disable_log_stats=True,
        **placement,
    )


_SOCKETS_ENV = "VLLM_RPC_BASE_PATH"
_END_S = 10.0
_MAX_PATH_BYTES = 107
"""Of a Unix socket."""
_NAME_BYTES = 37
"""Of those that vLLM makes: a slash and a UUID."""
_KIN = r"leeway-{user}-vllm-\d+-\d{{1,9}}"
"""Names of such folders alone: those of fetched weights beside them, where the next actor resumes what a killed one
began to fetch, end in the twelve characters of a store's name."""
_numbers = itertools.count()


class EngineSockets:
    """A folder for the sockets between one engine's processes, readable by this user alone.

    It goes with the engine; the next engine removes a killed one's. vLLM would put them into the temporary folder, by
    random names, where a killed engine's stay for ever.
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
        """End vLLM's ZeroMQ context, which it leaves to the garbage collector, and remove the folder.

        The context not in this thread: it waits for sockets, which after a crash are closed by this very event loop.
        """
        thread = DaemonThreads("engine-context", max_threads=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await thread.run(context.term)
        self.remove()

    def remove(self) -> None:
        """Remove the folder. May be called twice."""
        self._folder.close()
