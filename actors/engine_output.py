"""What comes out of a vLLM engine.

Generation   what one request generated, whole or in part
EngineStats  counts of steps, cache and preemptions for an EngineReport
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from actors.config import KvCache
from buffer.schema import HANDED_ON, Prefix, VersionSpan
from common.staleness import PolicyVersion

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class EngineError(RuntimeError):
    """Base of what can go wrong with an engine."""


class RequestRefused(EngineError):
    """This request is not one that the engine can generate; others are not affected."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one request generated. The end-of-sequence token is part of it: the learner trains on it."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    """Which version sampled which tokens, without gap, in order."""
    finish_reason: Literal["stop", "length", "handed_on"]
    """`HANDED_ON`: it was interrupted, and these are its first tokens, if any."""

    def after(self, prefix: Prefix | None) -> Generation:
        """Prepend the tokens that it went on from."""
        if prefix is None:
            return self
        first = len(prefix.token_ids)
        spans = [
            *prefix.spans,
            *(VersionSpan(each.version, first + each.start, first + each.end) for each in self.spans),
        ]
        joint = len(prefix.spans)
        if self.spans and spans[joint - 1].version == spans[joint].version:
            spans[joint - 1 : joint + 1] = [VersionSpan(spans[joint].version, spans[joint - 1].start, spans[joint].end)]
        return Generation(
            token_ids=np.concatenate((prefix.token_ids, self.token_ids)),
            logprobs=np.concatenate((prefix.logprobs, self.logprobs)),
            spans=tuple(spans),
            finish_reason=self.finish_reason,
        )


def completion_of(final: RequestOutput, sent_under: PolicyVersion) -> Generation | None:
    """Read vLLM's output; None if the request must be generated anew.

    A request may wait inside the engine until weights have changed, and then reuse a prefix that the old ones computed.
    Its tokens are of no version: they are dropped, whatever they are, so nothing is favoured. RequestRefused if it
    ended neither by an end-of-sequence token nor by length nor by us.
    """
    output: CompletionOutput = final.outputs[0]
    spans = tuple(
        VersionSpan(PolicyVersion.parse(span.version), span.start, span.end) for span in output.weight_versions or ()
    )
    is_interrupted = output.finish_reason == "abort"
    is_of_no_version = bool(final.num_cached_tokens and spans) and spans[0].version != sent_under
    if is_interrupted and (is_of_no_version or not spans):
        return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), HANDED_ON)
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RequestRefused(f"a request ended with '{output.finish_reason}' after {len(output.token_ids)} tokens")
    if is_of_no_version:
        return None
    return Generation(
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        spans=spans,
        finish_reason=HANDED_ON if is_interrupted else output.finish_reason,
    )


# --- of its steps ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Counts since the engine's start; `kv_usage` is the greatest share of the cache in use since the last report."""

    num_preempted: int = 0
    num_ended: int = 0
    queued_s: float = 0.0
    """Seconds that these waited in the engine before their first step."""
    kv_usage: float = 0.0
    moments: tuple[float, ...] = ()
    """`planning.costs.Moments` of the seconds of its steps, but for those after an idle moment or a weight update."""
    kv_tokens: int = 0
    """Tokens that its cache holds; 0 if not known."""


class EngineStats:
    """Fed by vLLM once for each step, and by the engine with what runs; read by `report`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: npt.NDArray[np.float64] = np.zeros(3 + 4 + 4 * 4)
        """`planning.costs.Moments` by 1, running samples, tokens of context and computed prompt tokens."""
        self.num_steps = 0
        """All so far, measured or not: a running sample's context grows by a token in each."""
        self._running = 0
        self._prompt_tokens = 0
        self._first_steps = 0
        """Sum over the running requests of the step at which each began."""
        self._interrupted_s = -float("inf")
        self._kv_usage = 0.0
        self._num_preempted = self._num_ended = 0
        self._num_in_step = 0
        self._num_interrupted = 0
        """Preemptions to come that an update asked for."""
        self._queued_s = 0.0
        self.cache: KvCache | None = None

    @contextlib.contextmanager
    def request(self, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request while the block lasts."""
        began = self.num_steps
        self._running += 1
        self._prompt_tokens += num_prompt_tokens
        self._first_steps += began
        try:
            yield
        finally:
            self._running -= 1
            self._prompt_tokens -= num_prompt_tokens
            self._first_steps -= began

    def interrupt(self, *, recomputes: bool = False) -> None:
        """Note that generation was paused until now: the step at hand is not measured, and with `recomputes` its
        preemptions do not count.
        """
        self._interrupted_s = self._clock()
        self._num_interrupted = self._num_in_step if recomputes else 0

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None) -> None:
        """Count one step of the engine."""
        if scheduler is not None:
            self._kv_usage = max(self._kv_usage, scheduler.kv_cache_usage)
            self._num_in_step = scheduler.num_running_reqs
        if iteration is None or not iteration.num_generation_tokens:
            return
        self.num_steps += 1
        asked_for = min(self._num_interrupted, iteration.num_preempted_reqs)
        self._num_interrupted -= asked_for
        self._num_preempted += iteration.num_preempted_reqs - asked_for
        for ended in iteration.finished_requests:
            self._num_ended += 1
            self._queued_s += max(0.0, ended.queued_time)
        # every sample that was in the step before has waited for this one alone
        if not iteration.inter_token_latencies_iter:
            return
        step_s = min(iteration.inter_token_latencies_iter)
        if step_s <= 0.0 or self._clock() - step_s < self._interrupted_s:
            return
        contexts = self._prompt_tokens + self._running * self.num_steps - self._first_steps
        terms = np.array([1.0, iteration.num_generation_tokens, contexts, iteration.prompt_token_stats.computed])
        self._moments += [step_s**2, 1.0, step_s, *(step_s * terms), *np.outer(terms, terms).ravel()]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step so far, which makes a token of each running sample; 0 before the first."""
        return float(self._moments[2] / self._moments[1]) if self._moments[1] else 0.0

    def report(self) -> EngineReport:
        """Return the counts; the greatest use of the cache begins anew."""
        kv_usage, self._kv_usage = self._kv_usage, 0.0
        return EngineReport(
            num_preempted=self._num_preempted,
            num_ended=self._num_ended,
            queued_s=self._queued_s,
            kv_usage=kv_usage,
            moments=tuple(self._moments.tolist()) if self._moments[1] else (),
            kv_tokens=0 if self.cache is None else self.cache.num_blocks * self.cache.block_tokens,
        )


def stat_logger(stats: EngineStats) -> type[AggregateStatLoggerBase]:
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    # of Prometheus in name only: without one vLLM adds its own, which costs more than the step of a small model
    class Logger(PrometheusStatLogger):
        def __init__(self, vllm_config: VllmConfig, engine_indexes: object = None) -> None:
            stats.cache = _cache_of(vllm_config)

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
        ) -> None:
            stats.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

        def record_admission_rejection(self, reason: str) -> None:
            pass

    return Logger


def _cache_of(config: VllmConfig) -> KvCache | None:
    """Return what an engine's cache holds, in blocks of all layers: models differ in what their layers keep."""
    cache, longest = config.cache_config, config.model_config.max_model_len
    if not cache.num_gpu_blocks or not cache.block_size or not cache.kv_cache_max_concurrency:
        return None
    num_blocks = int(cache.kv_cache_max_concurrency * ceil(longest / cache.block_size))
    # one is vLLM's own
    return KvCache(max(1, num_blocks - 1), cache.block_size, bool(cache.enable_prefix_caching))
