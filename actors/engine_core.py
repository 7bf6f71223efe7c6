"""vLLM's engine core, and the threads that use it.

On a CPU, the core runs on a thread of the actor's process. Another process would cost more than it isolates: vLLM would
encode, send and decode each request and token, and both processes would compete for the actor's cores. With GPUs or
tensor parallelism, the core runs in separate processes, which exit with the actor.

    event loop  --commands: add, abort, call-->  thread  --tokens, results, facts of a step-->  event loop

vLLM's clients are not thread-safe. For a core in this process, one thread executes commands and steps the core in turn.
For a core in another process, one thread executes commands, and one receives tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from leeway.actors.report import EngineStats, EngineStep
from leeway.buffer.schema import REQUEUED, Prefix, VersionSpan
from leeway.common.process import wall_time
from leeway.common.staleness import PolicyVersion

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

R = TypeVar("R")

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
"""Values of vLLM's EngineCoreEventType; vLLM is imported late."""
_ALIVE_POLL_S = 0.2


class EngineError(RuntimeError):
    """Base class of engine errors."""


class EngineDead(EngineError):
    """The engine has exited or failed, or the engine's model is in an unknown state: start another engine."""


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


Ends = Callable[[list[int]], bool] | None
"""Whether a request ends after these tokens; None if only its sampling parameters end it."""


class EngineRequest:
    """A request of an engine core. A thread appends tokens; the event loop may read the tokens at any time."""

    def __init__(self, request_id: str, future: asyncio.Future[None], ends: Ends = None) -> None:
        self.request_id = request_id
        self.future = future
        """Done once the request has ended."""
        self._ends, self.has_ended = ends, False
        self.finish_reason = "abort"
        self.queued_s = 0.0
        """Seconds in the queue before the first step."""
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._starts: list[tuple[int, str]] = []
        """First token and key of each weight version."""
        self._num_cached_tokens = 0

    def add(self, output: EngineCoreOutput, version: str) -> int:
        """Append the tokens of a step; return how often the request was preempted before the step."""
        num_preempted = 0
        for event in output.events or ():
            num_preempted += event.type == _PREEMPTED
            if not self.token_ids:
                self.queued_s += event.timestamp * {_QUEUED: -1, _SCHEDULED: 1}.get(event.type, 0)
        if output.prefill_stats is not None:
            self._num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.new_logprobs is not None:
            if not self._starts or self._starts[-1][1] != version:
                self._starts.append((len(self.token_ids), version))
            self._logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            self.token_ids += output.new_token_ids  # last, because `generation` counts these first
            self.has_ended = self._ends is not None and self._ends(self.token_ids)
        return num_preempted

    def generation(self, sent_under: PolicyVersion) -> Generation | None:
        """Return the output until now; None if the request must be generated again.

        A request that is queued during a weight update may reuse a cached prefix of the old weights. The tokens of this
        request belong to no version; dropping them regardless of content adds no bias. Raises RequestRefused if
        the request did not end with an end-of-sequence token, at its length limit, or by `Engine.interrupt`.
        """
        num_tokens, reason = len(self.token_ids), self.finish_reason
        starts = [each for each in self._starts if each[0] < num_tokens]
        ends = [start for start, _ in starts[1:]] + [num_tokens] * bool(starts)
        spans = [
            VersionSpan(PolicyVersion.parse(key), start, end) for (start, key), end in zip(starts, ends, strict=True)
        ]
        is_of_no_version = bool(self._num_cached_tokens and spans) and spans[0].version != sent_under
        if reason == "abort" and (is_of_no_version or not spans):
            return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), (), REQUEUED)
        if reason not in ("stop", "length", "abort"):
            raise RequestRefused(f"a request ended with '{reason}' after {num_tokens} tokens")
        if is_of_no_version:
            return None
        return Generation(
            np.array(self.token_ids[:num_tokens], np.int32),
            np.array(self._logprobs[:num_tokens], np.float32),
            tuple(spans),
            REQUEUED if reason == "abort" else cast("Literal['stop', 'length']", reason),
        )


class EngineCore:
    """A running engine core. Create it in the event loop that uses it."""

    def __init__(self, client: Any, model: ModelConfig, stats: EngineStats) -> None:  # noqa: ANN401 -- EngineCoreClient
        """Start the threads that use a client of vLLM."""
        self._client = client
        self._core: Any = getattr(client, "engine_core", None)
        """The core, if it runs in this process."""
        self._max_tokens, self._vocab_size = model.max_model_len, model.get_vocab_size()
        self._stats = stats
        self._events = asyncio.get_running_loop()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: dict[str, EngineRequest] = {}
        self._calls: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._last_step = "", 0.0
        """Weight version and time of the newest step."""
        jobs = [self._execute_forever, self._receive_forever] if self._core is None else [self._step_forever]
        self._threads = [threading.Thread(target=job, name="vllm", daemon=True) for job in jobs]
        for each in self._threads:
            each.start()

    @classmethod
    def start(cls, config: VllmConfig, stats: EngineStats, *, in_process: bool) -> EngineCore:
        """Load the model, which blocks for seconds."""
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        client = EngineCoreClient.make_client(
            not in_process,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,
        )
        return cls(client, config.model_config, stats)

    @property
    def failure(self) -> str:
        """Why the core has failed or stopped; empty while it is usable."""
        return "" if self._error is None else str(self._error) or type(self._error).__name__

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        cache_salt: str,
        priority: int,
        ends: Ends = None,
    ) -> EngineRequest:
        """Start a request. Raise ValueError if the prompt does not fit the model."""
        from vllm.v1.engine import EngineCoreRequest

        if not 0 < len(prompt) < self._max_tokens:
            raise ValueError(f"a prompt must have 1 to {self._max_tokens - 1} tokens")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise ValueError(f"token ids must be between 0 and {self._vocab_size - 1}")
        new = EngineCoreRequest(
            request_id, list(prompt), None, params, None, wall_time(), None, cache_salt, None, priority=priority
        )
        request = self._requests[request_id] = EngineRequest(request_id, self._events.create_future(), ends)
        self._commands.put(partial(self._add, new))
        return request

    async def abort(self, requests: Iterable[EngineRequest]) -> None:
        """End requests with the tokens until now."""
        await self._call(partial(self._abort, [each.request_id for each in requests]))

    def abort_soon(self, request: EngineRequest) -> None:
        self._commands.put(partial(self._abort, [request.request_id]))

    async def call_workers(self, method: str, **arguments: Any) -> list[Any]:  # noqa: ANN401 -- passed on to the workers
        """Call a method of every worker between two steps; return one result per worker."""
        return await self._call(partial(self._utility, "collective_rpc", method, None, (), arguments))

    async def set_version(self, key: str) -> None:
        """Set the version of the tokens of later steps."""
        await self._call(partial(self._utility, "set_weight_version", key))

    async def swap(self, update: dict[str, Any], key: str, *, recompute: bool) -> float:
        """Load verified weights between two steps, and return the seconds of the load.

        With `recompute`, running requests compute their attention keys and values again.
        """

        def load() -> float:
            self._utility("pause_scheduler", "keep", recompute)
            started_s = time.perf_counter()
            for method, arguments in (
                ("start_weight_update", {}),
                ("update_weights", {"update_info": update}),
                ("finish_weight_update", {}),
            ):
                self._utility("collective_rpc", method, None, (), arguments)
            self._utility("set_weight_version", key)
            load_s = time.perf_counter() - started_s
            self._post(self._stats.interrupt, recompute)  # posted before the next step, and therefore counted first
            self._utility("resume_scheduler")
            return load_s

        return await self._call(load)

    async def stop(self, error: Exception, timeout_s: float) -> None:
        """Free the model and end the processes of the core; running requests fail with `error`."""
        self._fail(error)
        self._commands.put(lambda: None)  # wakes the thread
        if self._core is not None:
            await asyncio.to_thread(self._threads[0].join, timeout_s)
        await asyncio.to_thread(self._client.shutdown, timeout_s)

    @property
    def context(self) -> Any:  # noqa: ANN401 -- a ZeroMQ context
        """ZeroMQ context of the sockets to the core's process; None for a core in this process."""
        return None if self._core is not None else self._client.ctx

    async def _call(self, work: Callable[[], R]) -> R:
        """Run a function on the thread that executes commands; raise the error of the core if the core has failed."""
        future: Future[R] = Future()
        self._calls.add(future)

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # `_fail` has set an error
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        self._commands.put(run)
        if self._error is not None:
            self._fail(self._error)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    # --- on the threads ---------------------------------------------------------------------------

    def _step_forever(self) -> None:
        while self._error is None:
            try:
                if not self._core.scheduler.has_requests():
                    self._commands.get()()
                while not self._commands.empty():
                    self._commands.get()()
                if self._error is None and self._core.scheduler.has_requests():
                    self._take(self._client.get_output())
            except BaseException as error:  # the core is in an unknown state
                self._fail(error)

    def _execute_forever(self) -> None:
        while self._error is None:
            try:
                self._commands.get()()
            except BaseException as error:
                self._fail(error)

    def _receive_forever(self) -> None:
        while self._error is None:
            try:
                outputs = self._client.outputs_queue.get(timeout=_ALIVE_POLL_S)
                if isinstance(outputs, Exception):
                    self._fail(outputs)
                else:
                    self._take(outputs)
            except Empty:
                if self._client.resources.engine_dead:
                    self._fail(RuntimeError("its process exited"))
            except BaseException as error:
                self._fail(error)

    def _utility(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401 -- a method of vLLM's EngineCore
        if self._core is None:
            return self._client.call_utility(method, *arguments)
        return getattr(self._core, method)(*arguments)

    def _add(self, new: EngineCoreRequest) -> None:
        if new.request_id in self._requests:  # otherwise the request was aborted
            self._client.add_request(new)

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._client.abort_requests(list(request_ids))
        self._post(_resolve, [self._requests.pop(each) for each in request_ids if each in self._requests])

    def _take(self, outputs: EngineCoreOutputs) -> None:
        """Add the tokens of a step to the requests."""
        ended: list[EngineRequest] = []
        num_tokens = num_prompt_tokens = num_preempted = 0
        version, has_continued = outputs.weight_version or "", False
        for output in outputs.outputs:
            if (request := self._requests.get(output.request_id)) is None:
                continue  # aborted
            has_continued |= bool(request.token_ids)
            num_tokens += len(output.new_token_ids)
            num_preempted += request.add(output, version)
            if output.prefill_stats is not None:
                num_prompt_tokens += output.prefill_stats.num_computed_tokens
            if request.has_ended and output.finish_reason is None:  # aborted before the next step if in this process
                self._commands.put(partial(self._client.abort_requests, [output.request_id]))
            if request.has_ended or output.finish_reason is not None:
                request.finish_reason = "stop" if request.has_ended else str(output.finish_reason)
                ended.append(self._requests.pop(output.request_id))
        (last_version, last_s), self._last_step = self._last_step, (version, outputs.timestamp)
        # the time before the first step of a version includes the load of the weights
        is_measured = has_continued and version == last_version
        scheduler = outputs.scheduler_stats
        step = EngineStep(
            num_tokens,
            num_prompt_tokens,
            num_preempted,
            num_running=None if scheduler is None else scheduler.num_running_reqs,
            kv_usage=0.0 if scheduler is None else scheduler.kv_cache_usage,
            queued_s=[request.queued_s for request in ended],
            seconds=outputs.timestamp - last_s if is_measured else 0.0,
        )
        self._post(self._record, step, ended)

    def _fail(self, error: BaseException) -> None:
        """Fail all requests and calls. A call to a core that has exited would block forever."""
        self._error = self._error or error
        waiting = [*self._calls, *([] if self._core is not None else self._client.utility_results.values())]
        for future in waiting:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(self._error)
        self._post(_resolve, list(self._requests.values()), self._error)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 -- passed on to `call`
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._events.call_soon_threadsafe(call, *arguments)

    # --- in the event loop ------------------------------------------------------------------------

    def _record(self, step: EngineStep, ended: Sequence[EngineRequest]) -> None:
        self._stats.record(step)
        _resolve(ended)


def _resolve(requests: Iterable[EngineRequest], error: BaseException | None = None) -> None:
    for request in requests:
        if request.future.done():
            continue
        if error is None:
            request.future.set_result(None)
        else:
            request.future.set_exception(error)
