"""One vLLM engine: takes and returns token ids, and loads newer weights while it generates.

In `actors`, only the modules named engine use vLLM's API. `engine_core` runs vLLM: on a thread of this process, or in
separate processes.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from leeway.actors.config import ActorsConfig
from leeway.actors.engine_core import (
    Ends,
    EngineCore,
    EngineDead,
    EngineError,
    EngineRequest,
    Generation,
    RequestRefused,
)
from leeway.actors.engine_setup import EngineSockets, cache_of, engine_args, load_engine
from leeway.actors.report import EngineStats
from leeway.actors.tasks.chat import PromptCodec
from leeway.buffer.schema import Prefix
from leeway.common.hf_folder import check_model_folder
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.store import StagedVersion

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_MIN_POLL_S, _MAX_POLL_S, _POLL_GROWTH = 0.005, 0.2, 1.5
"""First and longest pause in seconds between polls of a verification, and growth factor of the pause. The verification
of a tiny model takes milliseconds. Each poll calls all workers of an engine and delays the engine's next step."""
_STOP_TIMEOUT_S = 10.0


class UpdateRefused(EngineError):
    """New weights were missing, modified or of another model; the engine still serves the old weights."""


RequestKey = tuple[int, int]
"""Lease id, and index of the sample in its group."""


@dataclass(frozen=True, slots=True)
class _Running:
    request: EngineRequest
    prefix: Prefix | None
    version: PolicyVersion


class Engine:
    """A running vLLM engine. Create it with `Engine.start`, in the event loop that uses it."""

    def __init__(
        self,
        core: EngineCore,
        config: ActorsConfig,
        version: PolicyVersion,
        stop_token_ids: list[int],
        stats: EngineStats,
        sockets: EngineSockets | None = None,
        codec: PromptCodec | None = None,
    ) -> None:
        self._core: EngineCore | None = core
        self.stats = stats
        self._sockets = sockets
        self._config = config
        self.version = version
        self._stop_token_ids = stop_token_ids + (codec.stop_token_ids if codec is not None else [])
        self._codec = codec
        self._numbers = itertools.count()
        self._known_sampling: dict[float, SamplingParams] = {}
        self._running: dict[RequestKey, _Running] = {}
        """Requests that are running, or that were running when the engine died."""
        self._broken: str | None = None
        self._verified: dict[str, Any] | None = None
        # locked while weights change, so that the cache salt of a request is the policy version at its start
        self._updating = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model_path: Path,
        config: ActorsConfig,
        *,
        version: PolicyVersion,
        seed: int,
        in_process: bool | None = None,
        codec: PromptCodec | None = None,
    ) -> Engine:
        """Start an engine, which takes 20 to 30 s on CPU and blocks the event loop. Each actor needs its own seed.

        `model_path` is a checkpoint from `leeway.common.serving_model.prepare_serving_model`, with the weights of
        `version`. `in_process`: run vLLM on a thread of this process; default: without GPUs and tensor parallelism.
        `codec` knows the texts and tokens of `task.stop`.
        Raises ModelFolderError if the checkpoint is incomplete, EngineDead if the engine does not start, and OSError if
        the folder of its sockets cannot be created.
        """
        facts = check_model_folder(model_path)
        load_engine(config)
        stats = EngineStats()
        if in_process is None:
            in_process = not config.gpus and config.tensor_parallel_size == 1
        sockets = None if in_process else EngineSockets()
        try:
            vllm_config = engine_args(model_path, config, seed).create_engine_config()
            core = EngineCore.start(vllm_config, stats, in_process=in_process)
            stats.cache = cache_of(vllm_config)
            await core.set_version(version.key)
            engine = cls(core, config, version, list(facts.eos_token_ids), stats, sockets, codec)
            # the first step of an engine takes seconds: run a step now, so that no weight update waits for the first
            await engine.generate([facts.eos_token_ids[0]], max_new_tokens=1)
        except Exception as error:
            if sockets is not None:
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
        """Complete one tokenized prompt, or resume it after a `prefix`. Cancelling the task aborts the request.

        Temperature 0 is greedy. Without a seed, the engine's own generator samples. `interrupt` and `so_far` find the
        request by `key`.

        Raises:
            RequestRefused: the prompt is too long, or vLLM rejects it for another reason.
            EngineDead: the engine has died.
        """
        params = self._sampling(temperature, max_new_tokens, seed)
        if prefix is not None:
            params.max_tokens -= len(prefix.token_ids)
            prompt_token_ids = [*prompt_token_ids, *prefix.token_ids.tolist()]
        while True:
            completion = await self._run(prompt_token_ids, params, key, prefix)
            if completion is not None:
                return completion.after(prefix)

    def ended(self, prefix: Prefix) -> Literal["stop", "length"] | None:
        """Return the finish reason of a complete prefix; None if the sample needs more tokens."""
        ends = self._ends_after(prefix)
        if prefix.token_ids[-1] in self._stop_token_ids or (ends is not None and ends([])):
            return "stop"
        return "length" if len(prefix.token_ids) >= self._config.max_new_tokens else None

    def runs(self, key: RequestKey) -> bool:
        """Return whether a request with this key is running, or was running when the engine died."""
        return key in self._running

    async def interrupt(self, keys: Iterable[RequestKey]) -> None:
        """End requests now: `generate` returns the tokens until then. Raises EngineDead if the engine has died."""
        core = self._core
        if core is None or core.failure:  # `_alive` would raise during an update, when requests can be ended
            raise EngineDead(self._death_message())
        await core.abort([self._running[key].request for key in keys if key in self._running])

    def so_far(self, key: RequestKey) -> Generation | None:
        """Return the tokens that a running request has generated, also after the engine died; None without tokens."""
        running = self._running.get(key)
        completion = None if running is None else running.request.generation(running.version)
        if running is None or completion is None or not completion.spans:
            return None
        return completion.after(running.prefix)

    async def _run(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, key: RequestKey | None, prefix: Prefix | None
    ) -> Generation | None:
        if self._updating.locked():
            async with self._updating:
                pass
        core, version = self._alive(), self.version
        # requests with a long prefix are preempted last: they are the most expensive to recompute
        priority = 0 if prefix is None else -len(prefix.token_ids)
        try:
            # the cache salt prevents the reuse of a cached prefix under another policy version
            ends = self._ends_after(prefix)
            request = core.submit(f"r{next(self._numbers)}", prompt_token_ids, params, version.key, priority, ends)
        except ValueError as error:
            raise RequestRefused(f"vLLM refused a prompt of {len(prompt_token_ids)} tokens: {error}") from error
        if key is not None:
            self._running[key] = _Running(request, prefix, version)
        try:
            with self.stats.request(len(prompt_token_ids)):
                await request.future
        except asyncio.CancelledError:
            core.abort_soon(request)
            raise
        except Exception as error:
            key = None  # keep the request in `_running`: `so_far` returns its tokens after the failure
            raise EngineDead(self._death_message()) from error
        finally:
            if key is not None:
                del self._running[key]
        return request.generation(version)

    async def prepare(self, staged: StagedVersion, *, timeout_s: float = 120.0) -> None:
        """Verify newer weights while the engine generates, so that `apply` pauses generation only for the load.

        Raises:
            UpdateRefused: the weights differ from the published ones, or are of another model; the engine is unchanged.
            EngineDead: the engine has died, or did not verify the weights within `timeout_s`.
        """
        core = self._alive()
        try:
            async with asyncio.timeout(timeout_s):
                refusals = await verify(core, staged)
        except Exception as error:
            reason = f"timed out after {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            self._broken = self._broken or f"version {staged.version} was not verified: {reason}"
            raise EngineDead(self._death_message()) from error
        for refusal in filter(None, refusals):
            raise UpdateRefused(f"{refusal}; the engine still serves version {self.version}")
        self._verified = _update_of(staged)

    async def apply(
        self, staged: StagedVersion, kv_cache: Literal["keep", "recompute"], *, timeout_s: float = 120.0
    ) -> tuple[float, float]:
        """Load the weights that `prepare` has verified, and keep running requests. New requests wait for the load.

        Return the seconds of the pause, and of the load within it. With `kv_cache` "keep", running requests
        keep their attention keys and values of the old version.

        Raises:
            UpdateRefused: `prepare` has not verified this version; the engine is unchanged.
            EngineDead: the update failed midway or exceeded `timeout_s`, or the engine has died.
        """
        async with self._updating:
            core = self._alive()
            verified, self._verified = self._verified, None
            if verified != _update_of(staged):
                raise UpdateRefused(f"version {staged.version} was not verified; the engine serves {self.version}")
            started_s = time.perf_counter()
            # after an error or a cancellation before generation resumes, the engine must be replaced
            self._broken = f"the update to version {staged.version} did not complete"
            try:
                async with asyncio.timeout(timeout_s):
                    load_s = await core.swap(verified, staged.version.key, recompute=kv_cache == "recompute")
            except Exception as error:
                reason = f"timed out after {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                self._broken = f"the update to version {staged.version} failed midway: {reason}"
                raise EngineDead(self._death_message()) from error
            self._broken = None
            self.version = staged.version
            return time.perf_counter() - started_s, load_s

    async def stop(self) -> None:
        """Shut down vLLM; running requests fail with `EngineDead`. Idempotent."""
        core, self._core = self._core, None
        if core is None:
            return
        self._broken = "it was stopped"
        await core.stop(EngineDead(self._death_message()), _STOP_TIMEOUT_S)
        if self._sockets is not None:
            await self._sockets.end(core.context)

    def _sampling(self, temperature: float | None, max_new_tokens: int | None, seed: int | None) -> SamplingParams:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        temperature = self._config.temperature if temperature is None else temperature
        # validation takes longer than a token of a small model: validate once per temperature, then copy
        if temperature not in self._known_sampling:
            self._known_sampling[temperature] = SamplingParams(
                temperature=temperature,
                max_tokens=self._config.max_new_tokens,
                stop_token_ids=self._stop_token_ids,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
        params = copy.copy(self._known_sampling[temperature])
        params.seed = seed
        params.max_tokens = self._config.max_new_tokens if max_new_tokens is None else max_new_tokens
        return params

    def _ends_after(self, prefix: Prefix | None) -> Ends:
        """Return a function that finds texts of `task.stop` in the prefix and later tokens; None without texts."""
        codec = self._codec
        if codec is None or not codec.stop_window:
            return None
        before = [] if prefix is None else prefix.token_ids[-codec.stop_window :].tolist()
        return lambda token_ids: codec.is_stopped([*before, *token_ids[-codec.stop_window :]])

    def _alive(self) -> EngineCore:
        if self._broken is not None or self._core is None or self._core.failure:
            raise EngineDead(self._death_message())
        return self._core

    def _death_message(self) -> str:
        why = self._broken or (self._core.failure if self._core is not None else "")
        return (
            f"the vLLM engine that served version {self.version} is unusable: {why}"
            f"; see its output in the log of this process (pid {os.getpid()}), and start another engine"
        )


async def verify(core: EngineCore, staged: StagedVersion) -> list[str]:
    """Verify a version in the engine's workers while they generate; return the error of each worker, or ''."""
    await core.call_workers("begin_weight_verification", update_info=_update_of(staged))
    pause_s = _MIN_POLL_S
    while None in (refusals := await core.call_workers("weight_verification")):
        await asyncio.sleep(pause_s)
        pause_s = min(_POLL_GROWTH * pause_s, _MAX_POLL_S)
    return refusals


def _update_of(staged: StagedVersion) -> dict[str, Any]:
    return {"folder": str(staged.folder), "version": staged.version.key, "dtype": staged.dtype}
