"""SleepingEngine: the interface of `leeway.actors.engine.Engine` with a token-time model instead of a network.

The generated tokens are random. The generation time of concurrent samples, the version of each token and the pause of
an update match those of a real engine with this token time. The engine computes nothing, so sixteen engines fit on two
cores.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from benchmarks.fleet_parts.setting import EngineSetting, score_of

from leeway.actors.config import ActorsConfig
from leeway.actors.engine import RequestKey
from leeway.actors.engine_core import EngineDead, Generation
from leeway.actors.report import EngineReport
from leeway.buffer.schema import REQUEUED, Prefix, VersionSpan
from leeway.common.hf_folder import check_model_folder
from leeway.common.staleness import PolicyVersion
from leeway.planning.costs import LeastSquares
from leeway.planning.world import TokenClock
from leeway.weight_sync.store import StagedVersion

_LOGPROB = -1.0
_MOST_DRAWN = 1000
_LEAST_MADE = 0.01
"""Minimum number of tokens per sample in an interval that counts as a measurement of the step time."""


class SleepingEngine:
    """An engine that sleeps instead of computing; its role assigns `setting` before the engine starts."""

    setting: EngineSetting

    def __init__(self, config: ActorsConfig, version: PolicyVersion, vocab_size: int) -> None:
        """Initialize the engine; use `start` instead of calling this directly."""
        self._config, self._version, self._vocab_size = config, version, vocab_size
        self._clock: TokenClock[int] = TokenClock(self.setting.law, time.perf_counter())
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._versions: list[tuple[float, PolicyVersion]] = [(-float("inf"), version)]
        """Versions served since the oldest running sample started, each with the clock's `made` at its start."""
        self._numbers_of: dict[RequestKey, int] = {}
        self._interrupted: dict[int, int] = {}
        """Request number -> tokens generated before the request was interrupted."""
        self._began: dict[int, float] = {}
        """Request number -> the clock's `made` when the sample started."""
        self._waker = asyncio.create_task(self._wake())
        self._num_steps = self._steps_s = 0.0
        self._moments = LeastSquares(4)
        """Least-squares sums of the engine's step times, by the terms of `TokenTime`."""
        self._stalled_until_s = -float("inf")
        """Clock time until which step times are not recorded, because a stall of the engine would bias step times."""

    @classmethod
    async def start(
        cls, model_path: Path, config: ActorsConfig, *, version: PolicyVersion, seed: int
    ) -> SleepingEngine:
        """Create an engine with the vocabulary of a checkpoint, as `Engine.start` does."""
        return cls(config, version, check_model_folder(model_path).vocab_size)

    @property
    def version(self) -> PolicyVersion:
        """Policy version that samples the tokens of new requests."""
        return self._version

    @property
    def stats(self) -> SleepingEngine:
        """Statistics of the steps: this engine, which counts its own steps."""
        return self

    @property
    def step_s(self) -> float:
        """Mean duration of an engine step in seconds."""
        return self._steps_s / self._num_steps if self._num_steps else 0.0

    @property
    def num_steps(self) -> int:
        """Number of engine steps since the start."""
        return int(self._num_steps)

    @property
    def cache(self) -> None:
        """None: this engine has no cache."""
        return None

    def report(self) -> EngineReport:
        """Return the report on the steps since the start of the engine."""
        return EngineReport(moments=tuple(self._moments.as_list()) if self._moments.num_measured else ())

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
        """Generate a completion as `Engine.generate` does.

        The length depends on the prompt and the seed, and on the policy version if `stretch` is set. If a sample
        resumes from a prefix, its length is redrawn until it exceeds the length of the prefix.
        """
        there = 0 if prefix is None else len(prefix.token_ids)
        longest = max_new_tokens or self._config.max_new_tokens
        async with self._updating:
            length = self._length(score_of(*prompt_token_ids), seed, there)
            finish_reason: Literal["stop", "length"] = "length" if length >= longest else "stop"
            length = min(length, longest) - there
            number, began = self._start(len(prompt_token_ids) + there, length)
        if key is not None:
            self._numbers_of[key] = number
        try:
            await self._ends[number]
        except asyncio.CancelledError:
            if number in self._began:
                self._pass_time()
                if number in self._began:
                    self._clock.cancel(number)
            raise
        finally:
            self._ends.pop(number, None)
            self._began.pop(number, None)
            if key is not None:
                del self._numbers_of[key]
        made = self._interrupted.pop(number, length)
        made_all = made == length
        random = np.random.default_rng(abs(hash((seed, length))))
        return Generation(
            token_ids=random.integers(0, self._vocab_size, made, dtype=np.int32),
            logprobs=np.full(made, _LOGPROB, np.float32),
            spans=self._spans(began, made),
            finish_reason=finish_reason if made_all else REQUEUED,
        ).after(prefix)

    def ended(self, prefix: Prefix) -> Literal["length"] | None:
        """Return "length" if the prefix is full, as in `Engine.ended`; no end-of-sequence token completes a prefix."""
        return "length" if len(prefix.token_ids) >= self._config.max_new_tokens else None

    def runs(self, key: RequestKey) -> bool:
        """Return whether a request is running, as `Engine.runs` does."""
        return key in self._numbers_of

    async def interrupt(self, keys: Iterable[RequestKey]) -> None:
        """End running requests early and return their tokens as requeued samples, as `Engine.interrupt` does."""
        self._pass_time()
        for number in [self._numbers_of[key] for key in keys if key in self._numbers_of]:
            if number in self._began:
                self._interrupted[number] = int(self._clock.made - self._began[number])
                self._clock.cancel(number)
                self._ends[number].set_result(None)
        self._changed.set()

    def so_far(self, key: RequestKey) -> None:
        """Return None, because this engine keeps no partial output for `Engine.so_far`."""
        return None

    async def prepare(self, staged: StagedVersion, *, timeout_s: float = 120.0) -> float:
        """Return 0 seconds: this engine has nothing to prepare before an update."""
        return 0.0

    async def apply(
        self, staged: StagedVersion, kv_cache: Literal["keep", "recompute"], *, timeout_s: float = 120.0
    ) -> tuple[float, float]:
        """Apply a version as `Engine.apply` does: stop generation for `pause_s`, then serve the version."""
        async with self._updating:
            self._pass_time()
            self._clock.stall(self.setting.pause_s)
            self._expect_stall(self.setting.pause_s)
            self._changed.set()
            await asyncio.sleep(self.setting.pause_s)
            self._version = staged.version
            oldest = min(self._began.values(), default=self._clock.made)
            later = [each for each in self._versions if each[0] > oldest]
            before = [each for each in self._versions if each[0] <= oldest][-1:]
            self._versions = [*before, *later, (self._clock.made, staged.version)]
        return self.setting.pause_s, self.setting.pause_s

    async def stop(self) -> None:
        """Stop the engine and fail its running requests, as `Engine.stop` does."""
        self._waker.cancel()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(EngineDead("the engine was stopped"))

    def _length(self, prompt_score: float, seed: int | None, there: int) -> int:
        """Draw lengths until one exceeds `there`, the number of tokens that the sample has; return that length."""
        law, stretch = self.setting.lengths, self.setting.stretch
        for turn in range(_MOST_DRAWN):
            score = score_of("sample", seed, turn) if turn else score_of("sample", seed)
            length = int(law.lengths(prompt_score, [score])[0])
            if stretch is not None:
                length = max(1, round(stretch.at(self._version.version) * length))
            if length > there:
                return length
        return there + 1

    # --- time -------------------------------------------------------------------------------------

    def _start(self, num_prompt_tokens: int, length: int) -> tuple[int, float]:
        self._pass_time()
        number = next(self._numbers)
        self._ends[number] = asyncio.get_running_loop().create_future()
        if not self._clock.num_running:
            self._versions = [(-float("inf"), self._version)]
        self._clock.start(number, num_prompt_tokens, length)
        self._expect_stall(self.setting.law.per_prompt_token * num_prompt_tokens)
        self._began[number] = self._clock.made
        self._changed.set()
        return number, self._clock.made

    def _pass_time(self) -> None:
        """Advance the clock to the current time, and end each sample at the time of its last token."""
        now_s, clock = time.perf_counter(), self._clock
        while (next_s := clock.next_end_s()) <= now_s:
            self._advance(next_s)
            number = clock.end()
            if not self._ends[number].done():
                self._ends[number].set_result(None)
            self._began.pop(number, None)
        self._advance(now_s)

    def _advance(self, now_s: float) -> None:
        before, before_s = self._clock.made, self._clock.now_s
        self._clock.advance(now_s)
        if (running := self._clock.num_running) > 0:
            made = self._clock.made - before
            self._num_steps += made
            self._steps_s += now_s - before_s
            if made > _LEAST_MADE and before_s >= self._stalled_until_s:
                contexts = self._clock.kv_tokens - running * made / 2
                self._moments.add((1.0, running, contexts, 0.0), (now_s - before_s) / made)

    def _expect_stall(self, seconds: float) -> None:
        if seconds > 0.0:
            self._stalled_until_s = max(self._stalled_until_s, self._clock.now_s) + seconds

    async def _wake(self) -> None:
        while True:
            self._changed.clear()
            self._pass_time()
            wait_s = self._clock.next_end_s() - time.perf_counter()
            try:
                async with asyncio.timeout(wait_s if wait_s < float("inf") else None):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _spans(self, began: float, length: int) -> tuple[VersionSpan, ...]:
        """Return the range of tokens that each version sampled."""
        starts = [(round(at - began) if at > began else 0, version) for at, version in self._versions]
        spans: list[VersionSpan] = []
        for (start, version), (end, _) in zip(starts, [*starts[1:], (length, self._version)], strict=True):
            if min(end, length) > start:
                spans.append(VersionSpan(version, start, min(end, length)))
        return tuple(spans)
