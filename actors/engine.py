"""One vLLM engine: generates token in, token out, and takes newer weights while it does.

With `engine_setup` and `engine_output`, all of `actors` that knows vLLM's API. The engine runs in processes of its own,
which end with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from actors.config import ActorsConfig
from actors.engine_output import (
    EngineError,
    EngineStats,
    Generation,
    RequestRefused,
    completion_of,
    stat_logger,
)
from actors.engine_setup import EngineSockets, engine_args, load_engine, uncollected_children
from buffer.schema import Prefix
from common.hf_folder import check_model_folder
from common.staleness import PolicyVersion
from weight_sync.store import StagedVersion

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

R = TypeVar("R")

_LOOK_EVERY_S = 0.2
_FIRST_LOOK_S, _LAST_LOOK_S, _LOOKS_GROW = 0.005, 0.2, 1.5
"""Pauses between two looks at a verification: a tiny model is verified in milliseconds, and every look is a call to all
workers of an engine, which keeps it from preparing its next step."""
_STOP_TIMEOUT_S = 10.0


class EngineDead(EngineError):
    """The engine's process is gone, or its model is in an unknown state: start another."""


class UpdateRefused(EngineError):
    """New weights were missing, changed or of another model; the old ones are still served."""


RequestKey = tuple[int, int]
"""Lease and index of the sample in its group."""


@dataclass(frozen=True, slots=True)
class _Running:
    request_id: str
    prefix: Prefix | None
    version: PolicyVersion


class Engine:
    """A running vLLM engine. Create it with `Engine.start`, in the event loop that uses it."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ActorsConfig,
        version: PolicyVersion,
        stop_token_ids: list[int],
        sockets: EngineSockets,
        stats: EngineStats,
    ) -> None:
        self._llm: AsyncLLM | None = llm
        self.stats = stats
        self._sockets = sockets
        self._config = config
        self.version = version
        self._stop_token_ids = stop_token_ids
        self._numbers = itertools.count()
        self._known_sampling: dict[float, SamplingParams] = {}
        self._running: dict[RequestKey, _Running] = {}
        """After the engine died, those that it had then."""
        self._broken: str | None = None
        self._verified: dict[str, Any] | None = None
        # held while weights change, so that a request's cache salt is the version that it starts under
        self._updating = asyncio.Lock()

    @classmethod
    async def start(cls, model_path: Path, config: ActorsConfig, *, version: PolicyVersion, seed: int) -> Engine:
        """Start an engine, which takes 20 to 30 seconds on CPU and blocks the event loop. Each actor needs another
        seed.

        `model_path` is a checkpoint from `common.serving_model.prepare_serving_model`, `version` that of its weights.
        ModelFolderError if it is incomplete, EngineDead if the engine does not come up, OSError without a place for its
        sockets.
        """
        facts = check_model_folder(model_path)
        load_engine(config)
        sockets = EngineSockets()
        stats = EngineStats()
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            # held by `engine` alone: vLLM keeps this frame alive, and what it holds would outlive `stop`
            with uncollected_children():
                engine = cls(
                    AsyncLLM.from_engine_args(engine_args(model_path, config, seed), stat_loggers=[stat_logger(stats)]),
                    config,
                    version,
                    list(facts.eos_token_ids),
                    sockets,
                    stats,
                )
            await engine._alive().update_weight_version(version.key)
            # the first step of an engine takes seconds; an update must not have to wait for it
            await engine.generate([facts.eos_token_ids[0]], max_new_tokens=1)
        except Exception as error:
            sockets.remove()
            raise EngineDead(f"the vLLM engine for {model_path} did not start: {error}") from error
        return engine

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        prefix: Prefix | None = None,
        key: RequestKey | None = None,
    ) -> Generation:
        """Complete one tokenized prompt, from the first tokens of a `prefix` on. Cancelling the task aborts the
        request.

        A temperature of 0 is greedy, without a seed the engine's generator draws, and `interrupt` and `so_far` find the
        request by its key.

        Raises:
            RequestRefused: too long, or otherwise refused by vLLM.
            EngineDead: the engine is gone.
        """
        params = self._sampling(temperature, max_new_tokens, seed)
        if prefix is not None:
            params.max_tokens -= len(prefix.token_ids)
            prompt_token_ids = [*prompt_token_ids, *prefix.token_ids.tolist()]
        while True:
            version, final = await self._run(prompt_token_ids, params, key, prefix)
            completion = completion_of(final, version)
            if completion is not None:
                return completion.after(prefix)

    def ended(self, prefix: Prefix) -> Literal["stop", "length"] | None:
        """Why these tokens are a whole completion; None where they are not."""
        if prefix.token_ids[-1] in self._stop_token_ids:
            return "stop"
        return "length" if len(prefix.token_ids) >= self._config.max_new_tokens else None

    def runs(self, key: RequestKey) -> bool:
        """Return whether the engine has a request of this key, or had it when it died."""
        return key in self._running

    async def interrupt(self, keys: Iterable[RequestKey]) -> None:
        """End these requests now: `generate` returns their tokens so far. EngineDead if the engine is gone."""
        llm = self._llm
        if llm is None or llm.errored:  # not `_alive`: in the middle of an update requests can be ended too
            raise EngineDead(self._last_words())
        await llm.abort([self._running[key].request_id for key in keys if key in self._running])

    def so_far(self, key: RequestKey) -> Generation | None:
        """Return the tokens so far of a request that runs, or ran when the engine died; None if there are none."""
        running, llm = self._running.get(key), self._llm
        if running is None or llm is None:
            return None
        from vllm.v1.engine import FinishReason

        processor = llm.output_processor
        inside = [processor.request_states.get(each) for each in processor.external_req_ids.get(running.request_id, ())]
        for state in filter(None, inside):
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            completion = None if output is None else completion_of(output, running.version)
            return None if completion is None or not completion.spans else completion.after(running.prefix)
        return None

    async def _run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, key: RequestKey | None, prefix: Prefix | None
    ) -> tuple[PolicyVersion, RequestOutput]:
        from vllm.inputs.engine import tokens_input

        if self._updating.locked():
            async with self._updating:
                pass
        llm = self._alive()
        version = self.version
        # prefixes cached under one version are never reused under another
        prompt = tokens_input(list(prompt_token_ids), cache_salt=version.key)
        request_id = f"r{next(self._numbers)}"
        # requests with a long prefix are preempted last: most would have to be computed anew
        num_there = 0 if prefix is None else len(prefix.token_ids)
        if key is not None:
            self._running[key] = _Running(request_id, prefix, version)
        try:
            final = None
            with self.stats.request(len(prompt_token_ids)):
                async for output in llm.generate(prompt, params, request_id, priority=-num_there):
                    final = output
        except Exception as error:
            if self._broken is None and not llm.errored:
                raise RequestRefused(f"vLLM refused a prompt of {len(prompt_token_ids)} tokens: {error}") from error
            key = None  # `so_far` still returns what there was
            raise EngineDead(self._last_words()) from error
        finally:
            if key is not None:
                del self._running[key]
        if final is None:
            raise RequestRefused("vLLM ended a request without an output")
        return version, final

    async def prepare(self, staged: StagedVersion, *, timeout_s: float = 120.0) -> None:
        """Have the engine verify newer weights while it generates, so that `apply` pauses for their reload alone.

        Raises:
            UpdateRefused: the version is not as published, or of another model; nothing has changed.
            EngineDead: the engine is gone, or took longer than `timeout_s`.
        """
        llm = self._alive()
        try:
            async with asyncio.timeout(timeout_s):
                refusals = await while_alive(llm, verify(llm, staged))
        except Exception as error:
            late = f"not within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            self._broken = self._broken or f"it did not verify version {staged.version}: {late}"
            raise EngineDead(self._last_words()) from error
        for refusal in filter(None, refusals):
            raise UpdateRefused(f"{refusal}; still serving version {self.version}")
        self._verified = _update_of(staged)

    async def apply(
        self, staged: StagedVersion, kv_cache: Literal["keep", "recompute"], *, timeout_s: float = 120.0
    ) -> tuple[float, float]:
        """Put newer weights, which `prepare` has verified, under the running requests. New requests wait until it is
        done. Return the seconds of the pause, and what of them loaded the weights.

        With `kv_cache` "keep" running requests keep their attention keys of the old version.

        Raises:
            UpdateRefused: the version is not the one that was verified; nothing has changed.
            EngineDead: the update failed half way or took longer than `timeout_s`, or the engine is gone.
        """
        async with self._updating:
            llm = self._alive()
            verified, self._verified = self._verified, None
            if verified != _update_of(staged):
                raise UpdateRefused(f"version {staged.version} was not verified; still serving version {self.version}")
            started_s = time.perf_counter()
            # until generation goes on, whatever ends this early (cancellation too) leaves an engine to replace
            self._broken = f"its update to version {staged.version} never ended"
            try:
                async with asyncio.timeout(timeout_s):
                    load_s = await while_alive(llm, swap(llm, staged, kv_cache))
            except Exception as error:
                late = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                self._broken = f"its update to version {staged.version} failed half way: {late}"
                raise EngineDead(self._last_words()) from error
            self._broken = None
            self.stats.interrupt(recomputes=kv_cache == "recompute")
            self.version = staged.version
            return time.perf_counter() - started_s, load_s

    async def stop(self) -> None:
        """End the engine's processes; running requests fail with `EngineDead`. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._broken = "it was stopped"
        llm.output_processor.propagate_error(EngineDead(self._last_words()))
        # nobody is left to read outputs; their end would be logged as a crash
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        context = llm.engine_core.resources.ctx
        await asyncio.to_thread(llm.shutdown, _STOP_TIMEOUT_S)
        await self._sockets.end(context)
        # it is part of a cycle, and if it lasts until the interpreter ends, its __del__ complains
        del llm
        gc.collect()

    def _sampling(self, temperature: float | None, max_new_tokens: int | None, seed: int | None) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        heat = self._config.temperature if temperature is None else temperature
        # validating parameters takes longer than a token of a small model: once for each kind, then copies
        if heat not in self._known_sampling:
            self._known_sampling[heat] = SamplingParams(
                temperature=heat,
                max_tokens=self._config.max_new_tokens,
                stop_token_ids=self._stop_token_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
        params = copy.copy(self._known_sampling[heat])
        params.seed = seed
        params.max_tokens = self._config.max_new_tokens if max_new_tokens is None else max_new_tokens
        return params

    def _alive(self) -> AsyncLLM:
        if self._broken is not None or self._llm is None or self._llm.errored:
            raise EngineDead(self._last_words())
        return self._llm

    def _last_words(self) -> str:
        return (
            f"the vLLM engine that served version {self.version} is not usable: {self._broken or 'its process ended'}"
            f"; its own words are in the log of this process ({os.getpid()}). Start another"
        )


async def while_alive(llm: AsyncLLM, work: Coroutine[Any, Any, R]) -> R:
    """Await work with an engine; EngineDead if its process ends meanwhile.

    After a death vLLM fails the requests, but leaves calls to its workers waiting.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if llm.errored:
                raise EngineDead("its process ended")
            await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
        return task.result()
    finally:
        task.cancel()


async def verify(llm: AsyncLLM, staged: StagedVersion) -> list[str]:
    """Have the engine's workers verify a version while they generate; return the refusal of each, or ''."""
    await llm.collective_rpc("begin_weight_verification", kwargs={"update_info": _update_of(staged)})
    pause_s = _FIRST_LOOK_S
    while None in (refusals := await llm.collective_rpc("weight_verification")):
        await asyncio.sleep(pause_s)
        pause_s = min(_LOOKS_GROW * pause_s, _LAST_LOOK_S)
    return list(refusals)


async def swap(llm: AsyncLLM, staged: StagedVersion, kv_cache: Literal["keep", "recompute"]) -> float:
    """Pause, load a verified version, resume; return the load's seconds."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    # not llm.pause_generation, which sleeps 20 ms after this very call
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=kv_cache == "recompute")
    started_s = time.perf_counter()
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info=_update_of(staged)))
    await llm.finish_weight_update(weight_version=staged.version.key)
    load_s = time.perf_counter() - started_s
    await llm.resume_generation()
    return load_s


def _update_of(staged: StagedVersion) -> dict[str, Any]:
    return {"folder": str(staged.folder), "version": staged.version.key, "dtype": staged.dtype}
