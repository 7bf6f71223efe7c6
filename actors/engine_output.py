"""Output of a vLLM engine.

Generation   complete or partial output of one request
EngineStats  counts of steps, cache usage and preemptions for an EngineReport
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

from leeway.actors.config import KvCache
from leeway.buffer.schema import REQUEUED, Prefix, VersionSpan
from leeway.common.staleness import PolicyVersion

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class EngineError(RuntimeError):
    """Base class of engine errors."""


class RequestRefused(EngineError):
    """The engine cannot generate this request; other requests are not affected."""


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Output of one request, including the end-of-sequence token, because the learner trains on this token too."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    """Token ranges and the policy version that sampled each range, in order and without gaps."""
    finish_reason: Literal["stop", "length", "requeued"]
    """`REQUEUED` if the request was interrupted; `token_ids` then has the tokens generated until that time, if any."""

    def after(self, prefix: Prefix | None) -> Generation:
        """Prepend the tokens that the request resumed from."""
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
    """Convert vLLM's output; return None if the request must be generated again.

    A request that is queued during a weight update may reuse a cached prefix of the old weights. The tokens of this
    request belong to no version; dropping them regardless of content adds no bias. Raises RequestRefused if
    the request did not end with an end-of-sequence token, at its length limit, or by `Engine.interrupt`.
    """
    output: CompletionOutput = final.outputs[0]
    spans = tuple(
        VersionSpan(PolicyVersion.parse(span.version), span.start, span.end) for span in output.weight_versions or ()
    )
    is_interrupted = output.finish_reason == "abort"
    is_of_no_version = bool(final.num_cached_tokens and spans) and spans[0].version != sent_under
    if is_interrupted and (is_of_no_version or not spans):
        return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), REQUEUED)
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RequestRefused(f"a request ended with '{output.finish_reason}' after {len(output.token_ids)} tokens")
    if is_of_no_version:
        return None
    return Generation(
        token_ids=np.asarray(output.token_ids, dtype=np.int32),
        logprobs=np.asarray(output.logprobs.logprobs, dtype=np.float32),
        spans=spans,
        finish_reason=REQUEUED if is_interrupted else output.finish_reason,
    )


# --- engine statistics ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Counts since the engine's start; `kv_usage` is the peak fraction of the cache in use since the last report."""

    num_preempted: int = 0
    num_ended: int = 0
    queued_s: float = 0.0
    """Sum of the seconds that ended requests were queued in the engine before their first step."""
    kv_usage: float = 0.0
    moments: tuple[float, ...] = ()
    """Sums for a fit of step times by `leeway.planning.costs.LeastSquares`, without steps after a pause."""
    kv_tokens: int = 0
    """Capacity of the cache in tokens; 0 if unknown."""


class EngineStats:
    """Statistics of one engine. vLLM calls `record` once per step; each request runs within `request`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moments: npt.NDArray[np.float64] = np.zeros(3 + 4 + 4 * 4)
        """Sums for a fit of step times by `leeway.planning.costs.LeastSquares`; `record` defines the fit's terms."""
        self.num_steps = 0
        """Number of steps, including unmeasured ones; each step adds a token to every running sample."""
        self._running = 0
        self._prompt_tokens = 0
        self._first_steps = 0
        """Sum over the running requests of the step at which each began."""
        self._interrupted_s = -float("inf")
        self._kv_usage = 0.0
        self._num_preempted = self._num_ended = 0
        self._num_in_step = 0
        self._num_interrupted = 0
        """Number of coming preemptions that a weight update causes; these preemptions are not counted."""
        self._queued_s = 0.0
        self.cache: KvCache | None = None

    @contextlib.contextmanager
    def request(self, num_prompt_tokens: int) -> Iterator[None]:
        """Count a request as running for the duration of the block."""
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
        """Record that generation was paused until now, so that the current step is not measured. With `recomputes`,
        the preemptions that the pause causes are not counted.
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
        expected = min(self._num_interrupted, iteration.num_preempted_reqs)
        self._num_interrupted -= expected
        self._num_preempted += iteration.num_preempted_reqs - expected
        for ended in iteration.finished_requests:
            self._num_ended += 1
            self._queued_s += max(0.0, ended.queued_time)
        # if a sample also ran in the previous step, the latency of its new token is the duration of this step
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
        """Return the mean duration of an engine step in seconds; 0 before the first measured step."""
        return float(self._moments[2] / self._moments[1]) if self._moments[1] else 0.0

    def report(self) -> EngineReport:
        """Return the counts, and reset the peak cache usage."""
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

    # with this subclass, vLLM does not add its own Prometheus logger, which takes longer than a small model's step
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
    """Return the cache's capacity in blocks that span all layers; such a block may take several of vLLM's blocks."""
    cache, longest = config.cache_config, config.model_config.max_model_len
    if not cache.num_gpu_blocks or not cache.block_size or not cache.kv_cache_max_concurrency:
        return None
    num_blocks = int(cache.kv_cache_max_concurrency * ceil(longest / cache.block_size))
    # subtract the block that vLLM reserves
    return KvCache(max(1, num_blocks - 1), cache.block_size, bool(cache.enable_prefix_caching))
