"""A vLLM engine in separate processes, for actors with GPUs or tensor parallelism.

The processes exit when the process that started them exits or is killed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from leeway.actors.config import ActorsConfig
from leeway.actors.engine_output import EngineDead, EngineStats, Output, stat_logger
from leeway.actors.engine_setup import EngineSockets, engine_args, gc_disabled_children

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

R = TypeVar("R")

_ALIVE_POLL_S = 0.2
_EXITED = "its process exited"


class EngineProcess:
    """vLLM's AsyncLLM, whose core runs in another process. The methods are those of `EngineThread`."""

    def __init__(self, llm: AsyncLLM, sockets: EngineSockets) -> None:
        self._llm = llm
        self._sockets = sockets

    @classmethod
    def start(cls, model_path: Path, config: ActorsConfig, seed: int, stats: EngineStats) -> EngineProcess:
        """Start the processes and load the model. Raise OSError if the folder of the sockets cannot be created."""
        from vllm.v1.engine.async_llm import AsyncLLM

        sockets = EngineSockets()
        try:
            # store the AsyncLLM only in the result: vLLM keeps this frame alive, so other variables outlive `stop`
            with gc_disabled_children():
                return cls(
                    AsyncLLM.from_engine_args(engine_args(model_path, config, seed), stat_loggers=[stat_logger(stats)]),
                    sockets,
                )
        except Exception:
            sockets.remove()
            raise

    @property
    def failure(self) -> str:
        return _EXITED if self._llm.errored else ""

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str, priority: int
    ) -> Output | None:
        from vllm.inputs.engine import tokens_input

        final = None
        tokens = tokens_input(list(prompt), cache_salt=cache_salt)
        async for output in self._llm.generate(tokens, params, request_id, priority=priority):
            final = output
        return None if final is None else _output_of(final)

    def so_far(self, request_id: str) -> Output | None:
        from vllm.v1.engine import FinishReason

        processor = self._llm.output_processor
        inside = [processor.request_states.get(each) for each in processor.external_req_ids.get(request_id, ())]
        for state in filter(None, inside):
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            return None if output is None else _output_of(output)
        return None

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self._llm.abort(list(request_ids))

    async def call(self, method: str, **arguments: Any) -> list[Any]:  # noqa: ANN401 -- passed on to vLLM's workers
        return list(await while_alive(self._llm, self._llm.collective_rpc(method, kwargs=arguments)))

    async def set_version(self, key: str) -> None:
        await self._llm.update_weight_version(key)

    async def swap(self, update: dict[str, Any], key: str, kv_cache: Literal["keep", "recompute"]) -> float:
        return await while_alive(self._llm, _swap(self._llm, update, key, kv_cache))

    async def stop(self, error: Exception, timeout_s: float) -> None:
        llm = self._llm
        llm.output_processor.propagate_error(error)
        # stop reading outputs: without this cancellation, vLLM would log the exit of its processes as a crash
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        context = llm.engine_core.resources.ctx
        await asyncio.to_thread(llm.shutdown, timeout_s)
        await self._sockets.end(context)
        # `llm` is in a reference cycle: collect it now, because its __del__ logs errors when the interpreter exits
        del llm, self._llm
        gc.collect()


async def _swap(llm: AsyncLLM, update: dict[str, Any], key: str, kv_cache: Literal["keep", "recompute"]) -> float:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    # llm.pause_generation would make this call and then sleep for 20 ms
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=kv_cache == "recompute")
    started_s = time.perf_counter()
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
    await llm.finish_weight_update(weight_version=key)
    load_s = time.perf_counter() - started_s
    await llm.resume_generation()
    return load_s


async def while_alive(llm: AsyncLLM, work: Coroutine[Any, Any, R]) -> R:
    """Await a call to an engine; raise EngineDead if the engine's process exits during the call.

    After the exit, vLLM fails running requests but never completes calls to its workers.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if llm.errored:
                raise EngineDead(_EXITED)
            await asyncio.wait({task}, timeout=_ALIVE_POLL_S)
        return task.result()
    finally:
        task.cancel()


def _output_of(final: RequestOutput) -> Output:
    output = final.outputs[0]
    spans = [(each.version, each.start, each.end) for each in output.weight_versions or ()]
    logprobs = () if output.logprobs is None else output.logprobs.logprobs
    return Output(output.token_ids, logprobs, spans, str(output.finish_reason), final.num_cached_tokens or 0)
