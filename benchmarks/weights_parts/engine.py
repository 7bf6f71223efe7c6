"""Engine under load that updates to the learner's versions like an actor, and measures the cost of updates.

The load is a constant number of running requests. Each step of the engine adds a token to every request, so the tokens
have the times of the steps.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.weights_parts.handover import RUN_ID

from leeway.actors.config import ActorsConfig
from leeway.actors.engine import Engine
from leeway.actors.report import EngineStep
from leeway.actors.weights import WeightFollower
from leeway.common.staleness import PolicyVersion, StalenessContract
from leeway.weight_sync.client import StoreAccess
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.puller import open_puller

PROMPT_TOKENS, NEW_TOKENS = 16, 224
LOWEST_TOKEN = 1000
"""Lowest token id of prompts; lower ids are bytes and special tokens."""
SETTLE_S = 1.0
"""Seconds of generation between an update and the bare reload with which the update is compared."""
POLL_S = 0.02
_ready: dict[str, torch.Tensor] = {}
"""Tensors of the served checkpoint in the engine's dtype, which are read only once."""


class FollowingEngine:
    """Engine of one actor, with its puller and its load."""

    def __init__(
        self, *, name: str, model: str, folder: str, dtype: str, num_running: int, vocab_size: int, seed: int
    ) -> None:
        """Prepare an engine with a constant number of `num_running` requests; `start` starts the engine."""
        # permits vLLM to run a function in its process
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        self._name, self._model, self._seed = name, Path(model), seed
        self._random = np.random.default_rng(seed)
        self._vocab_size = vocab_size
        self._config = ActorsConfig(
            dtype=dtype,  # type: ignore[arg-type]  # pydantic checks it
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=NEW_TOKENS,
            max_running_samples=num_running,
            kv_cache_gib=0.5,
        )
        self._knobs = WeightSyncConfig(transport="folder")
        self._puller = open_puller(StoreAccess(self._knobs, Path(folder), "", RUN_ID), name, dtype)
        self._tasks: list[asyncio.Task[None]] = []
        self._token_s: list[float] = []

    async def start(self) -> None:
        """Start the engine and its load, and prepare the bare reload."""
        self._engine = await Engine.start(self._model, self._config, version=PolicyVersion(0, 0), seed=self._seed)
        record = self._engine.stats.record

        def timed(step: EngineStep) -> None:
            self._token_s.append(time.perf_counter())
            record(step)

        self._engine.stats.record = timed  # type: ignore[method-assign]
        self._follower = WeightFollower(
            self._name,
            self._engine,
            self._puller,
            self._knobs,
            StalenessContract(self._knobs.staleness(), groups_per_step=1),
        )
        loads = [self._keep_one_running() for _ in range(self._config.max_running_samples)]
        self._tasks = [asyncio.create_task(load) for load in loads]
        await self._bare_reload()

    async def follow(self, *, num_updates: int, limit_s: float) -> list[dict[str, Any]]:
        """Follow `num_updates` updates, with one bare reload after each.

        Args:
            num_updates: number of updates to wait for.
            limit_s: timeout for all updates, in seconds.

        Returns:
            For each round, times in seconds, with `version` and `num_running`. Times of the update are `update` (from
            detection of the version until it is served), `pause` of generation, `load` of the weights, `gap` (longest
            time between two tokens), and `staging_steps` (times between tokens during staging and verification).
            `bare` is the time of the bare reload, with `bare_pause` and `bare_gap`. `step` is the median time between
            tokens after the bare reload.
        """
        async with asyncio.timeout(limit_s):
            return [await self._round() for _ in range(num_updates)]

    async def close(self) -> None:
        """Stop the load and the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._puller.close()
        await self._engine.stop()

    async def _round(self) -> dict[str, Any]:
        await self._newer_version()
        seen_s = time.perf_counter()
        await self._follower.update()
        done_s = time.perf_counter()
        (update,) = self._follower.take_updates()
        pause_s = update.pause_s
        await asyncio.sleep(SETTLE_S)
        bare_began_s = time.perf_counter()
        bare_s, bare_pause_s = await self._bare_reload()
        bare_done_s = time.perf_counter()
        version = self._engine.version.key
        await asyncio.sleep(SETTLE_S)
        await self._newer_version()
        return {
            "version": version,
            "pause": pause_s,
            "load": update.load_s,
            "update": done_s - seen_s,
            "bare": bare_s,
            "bare_pause": bare_pause_s,
            "step": statistics.median(self._gaps(bare_done_s, time.perf_counter())),
            "staging_steps": self._gaps(seen_s, done_s - pause_s),
            "gap": self._longest_gap(done_s - pause_s, done_s),
            "bare_gap": self._longest_gap(bare_began_s, bare_done_s),
            "num_running": len(self._tasks),
        }

    async def _newer_version(self) -> None:
        while (newest := self._puller.newest()) is None or newest <= self._engine.version:
            self._raise_if_dead()
            await asyncio.sleep(POLL_S)

    async def _bare_reload(self) -> tuple[float, float]:
        """Run a bare reload; return the seconds of the reload, and of the pause of generation around the reload."""
        core = self._engine._alive()

        def reload() -> float:
            core._utility("pause_scheduler", "keep", False)
            (seconds,) = core._utility("collective_rpc", bare_reload, None, (), {})
            core._utility("resume_scheduler")
            return float(seconds)

        start = time.perf_counter()
        async with self._engine._updating:
            seconds = await core._call(reload)
        return seconds, time.perf_counter() - start

    # --- the load -----------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        return [int(token) for token in self._random.integers(LOWEST_TOKEN, self._vocab_size, PROMPT_TOKENS)]

    async def _keep_one_running(self) -> None:
        while True:
            await self._engine.generate(self._prompt())

    def _gaps(self, from_s: float, to_s: float) -> list[float]:
        """Return the times between tokens within an interval."""
        inside = [moment for moment in self._token_s if from_s <= moment <= to_s]
        return [after - before for before, after in itertools.pairwise(inside)]

    def _longest_gap(self, from_s: float, to_s: float) -> float:
        """Return the longest time between two tokens, one of which may be before or after the interval."""
        pairs = itertools.pairwise(self._token_s)
        return max((after - before for before, after in pairs if after >= from_s and before <= to_s), default=0.0)

    def _raise_if_dead(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()


def bare_reload(worker: Any) -> float:  # noqa: ANN401 -- vLLM's types are unknown here
    """Reload tensors in memory with vLLM; return the seconds, which are the cost of an update without weight transfer.

    The function runs in the engine's process (`collective_rpc`). The function reads no files, verifies nothing and
    sends nothing.
    """
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    if not _ready:
        for path in sorted(Path(runner.model_config.model).glob("*.safetensors")):
            found = load_file(path)
            _ready.update({name: tensor.to(runner.model_config.dtype).clone() for name, tensor in found.items()})
    start = time.perf_counter()
    with torch.inference_mode():
        initialize_layerwise_reload(runner.model)
        runner.model.load_weights(_ready.items())
        finalize_layerwise_reload(runner.model, runner.model_config)
    return time.perf_counter() - start
