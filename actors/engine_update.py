"""What a vLLM engine is asked, to take newer weights; nobody waits for the answer of one whose process ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from weight_sync.vllm_engine import REFUSED

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_sync.puller import StagedVersion

R = TypeVar("R")

_LOOK_EVERY_S = 0.2
_VERIFY_POLL_S = 0.01


class EngineGone(RuntimeError):
    """The engine's process ended while its answer was waited for."""


async def while_alive(llm: AsyncLLM, work: Coroutine[Any, Any, R]) -> R:
    """Do something with an engine for as long as its process lives.

    Of an engine that died vLLM fails the requests, but calls to its workers it leaves waiting.

    Raises:
        EngineGone: it died.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if llm.errored:
                raise EngineGone("its process ended")
            await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
        return task.result()
    finally:
        task.cancel()


async def verify(llm: AsyncLLM, staged: StagedVersion) -> list[str]:
    """Let the engine's workers verify a version while they generate.

    Returns:
        What each of them has against it; '' where nothing.
    """
    await llm.collective_rpc("begin_weight_verification", kwargs={"update_info": _update_of(staged)})
    while None in (refusals := await llm.collective_rpc("weight_verification")):
        await asyncio.sleep(_VERIFY_POLL_S)
    return list(refusals)


async def swap(
    llm: AsyncLLM, staged: StagedVersion, kv_cache: Literal["keep", "recompute"]
) -> tuple[str | None, float]:
    """Pause, load a version, go on.

    Returns:
        Why it was refused before anything changed, or None; and seconds of the load.
    """
    # not llm.pause_generation, which sleeps 20 ms after this very call
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=kv_cache == "recompute")
    started_s = time.perf_counter()
    refusal = await _load(llm, staged)
    load_s = time.perf_counter() - started_s
    await llm.resume_generation()
    return refusal, load_s


async def _load(llm: AsyncLLM, staged: StagedVersion) -> str | None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    try:
        await llm.update_weights(WeightTransferUpdateRequest(update_info=_update_of(staged)))
    except Exception as error:
        if REFUSED in str(error):
            return str(error)
        raise
    await llm.finish_weight_update(weight_version=str(staged.version))
    return None


def _update_of(staged: StagedVersion) -> dict[str, Any]:
    """What the engine's weight transfer is told."""
    return {"folder": str(staged.folder), "version": str(staged.version), "dtype": staged.dtype}
