"""A vLLM engine on a thread of the actor's process, for actors on a CPU.

On a CPU, a separate process costs more than it isolates: vLLM would encode, send and decode each request and each
token, and two processes would compete for the actor's cores. The thread calls vLLM's EngineCore, which is not
thread-safe: it adds requests, steps the core, and passes finished requests to the event loop.

    event loop  --commands: add, abort, call, swap-->  thread  --finished requests, facts of the step-->  event loop

If the core crashes the process, the actor ends, too. Its unfinished samples are generated again from their start, or
from the tokens that the buffer has saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from leeway.actors.config import ActorsConfig
from leeway.actors.engine_output import EngineStats, EngineStep, Output, cache_of
from leeway.actors.engine_setup import engine_args

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

R = TypeVar("R")

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
"""Values of vLLM's EngineCoreEventType, which is imported with vLLM."""


class _Request:
    """A running request. The thread appends tokens; the event loop may read the tokens at any time."""

    __slots__ = ("finish_reason", "future", "logprobs", "num_cached_tokens", "queued_s", "token_ids", "versions")

    def __init__(self, future: asyncio.Future[Output]) -> None:
        self.future = future
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[tuple[int, str]] = []
        """First token and key of each weight version."""
        self.num_cached_tokens = 0
        self.queued_s = 0.0
        self.finish_reason = "abort"
        """The reason once the request has ended."""

    def add(self, output: EngineCoreOutput, version: str) -> int:
        """Append the tokens of a step; return how often the request was preempted before the step."""
        num_preempted = 0
        for event in output.events or ():
            num_preempted += event.type == _PREEMPTED
            if not self.token_ids:  # the queue ends with the first step
                self.queued_s += event.timestamp * {_QUEUED: -1, _SCHEDULED: 1}.get(event.type, 0)
        if output.new_logprobs is not None and output.new_token_ids:
            if not self.versions or self.versions[-1][1] != version:
                self.versions.append((len(self.token_ids), version))
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            self.token_ids += output.new_token_ids  # last: `output` counts the tokens first
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        return num_preempted

    def output(self) -> Output:
        num_tokens = len(self.token_ids)
        starts = [each for each in self.versions if each[0] < num_tokens]
        ends = [*(start for start, _ in starts), num_tokens][1:]
        spans = [(version, start, end) for (start, version), end in zip(starts, ends, strict=True)]
        tokens, logprobs = self.token_ids[:num_tokens], self.logprobs[:num_tokens]
        return Output(tokens, logprobs, spans, self.finish_reason, self.num_cached_tokens)


class EngineThread:
    """vLLM's EngineCore and the thread that steps it."""

    def __init__(self, config: VllmConfig, stats: EngineStats) -> None:
        """Load the model, which blocks for seconds, and start the thread. Call it in the event loop that uses it."""
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self._core = EngineCore(config, Executor.get_class(config), log_stats=True)
        self._max_tokens, self._vocab_size = config.model_config.max_model_len, config.model_config.get_vocab_size()
        self._stats = stats
        stats.cache = cache_of(config)
        self._events = asyncio.get_running_loop()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._requests: dict[str, _Request] = {}
        self._error: BaseException | None = None
        self._has_stopped = False
        self._stepped_s = 0.0
        """End of the newest step; 0.0 after a pause."""
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, model_path: Path, config: ActorsConfig, seed: int, stats: EngineStats) -> EngineThread:
        return cls(engine_args(model_path, config, seed).create_engine_config(), stats)

    @property
    def failure(self) -> str:
        """Why the engine has died; empty while it is alive."""
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, request_id: str, cache_salt: str, priority: int
    ) -> Output | None:
        """Return the output of a request that has ended; None without one. A cancelled call aborts the request."""
        from vllm.v1.engine import EngineCoreRequest

        if not 0 < len(prompt) < self._max_tokens:
            raise ValueError(f"a prompt must have 1 to {self._max_tokens - 1} tokens")
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            raise ValueError(f"token ids must be from 0 to {self._vocab_size - 1}")
        new = EngineCoreRequest(
            request_id, list(prompt), None, params, None, time.time(), None, cache_salt, None, priority=priority
        )
        request = _Request(self._events.create_future())
        self._commands.put(partial(self._add, new, request))
        try:
            return await request.future
        except asyncio.CancelledError:
            self._commands.put(partial(self._abort, [request_id]))
            raise

    def so_far(self, request_id: str) -> Output | None:
        """Return the tokens of a running request, or of a request that was running when the engine died."""
        request = self._requests.get(request_id)
        return None if request is None else request.output()

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now; `generate` returns the tokens until then."""
        await self._on_thread(partial(self._abort, list(request_ids)))

    async def call(self, method: str, **arguments: Any) -> list[Any]:  # noqa: ANN401 -- passed on to vLLM's workers
        """Call a method of every worker between two steps; return one result per worker."""
        return await self._on_thread(lambda: self._core.collective_rpc(method, kwargs=arguments))

    async def set_version(self, key: str) -> None:
        """Set the version of the tokens of the next steps."""
        await self._on_thread(lambda: self._core.set_weight_version(key))

    async def swap(self, update: dict[str, Any], key: str, kv_cache: Literal["keep", "recompute"]) -> float:
        """Load verified weights between two steps; return the seconds of the load."""

        def load() -> float:
            self._core.pause_scheduler("keep", clear_cache=kv_cache == "recompute")
            started_s = time.perf_counter()
            self._core.collective_rpc("start_weight_update")
            self._core.collective_rpc("update_weights", kwargs={"update_info": update})
            self._core.collective_rpc("finish_weight_update")
            self._core.set_weight_version(key)
            self._core.resume_scheduler()
            return time.perf_counter() - started_s

        return await self._on_thread(load)

    async def stop(self, error: Exception, timeout_s: float) -> None:
        """Free the model; running requests fail with `error`."""

        def end() -> None:
            self._fail(error)
            self._has_stopped = True
            self._core.shutdown()

        self._commands.put(end)
        await asyncio.to_thread(self._thread.join, timeout_s)

    async def _on_thread(self, work: Callable[[], R]) -> R:
        """Run a function on the thread between two steps; raise the error of the engine if the engine has failed."""
        future: Future[R] = Future()

        def run() -> None:
            if self._error is not None:
                return future.set_exception(self._error)
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    # --- on the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._has_stopped:
            try:
                if self._error is not None or not self._core.scheduler.has_requests():
                    self._commands.get()()
                while not (self._has_stopped or self._commands.empty()):
                    self._commands.get()()
                if not self._has_stopped and self._error is None and self._core.scheduler.has_requests():
                    self._step()
            except BaseException as error:  # the core is in an unknown state: commands fail from now on
                self._fail(error)

    def _add(self, new: EngineCoreRequest, request: _Request) -> None:
        if self._error is not None:
            self._post(_set_exception, [request], self._error)
        elif not request.future.done():  # a cancelled request is done
            self._requests[new.request_id] = request
            self._core.add_request(*self._core.preprocess_add_request(new))

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._core.abort_requests(list(request_ids))
        self._post(_set_results, [self._end(each, "abort") for each in request_ids if each in self._requests])

    def _step(self) -> None:
        outputs, is_executed = self._core.step_fn()
        self._core.post_step(is_executed)
        ended: list[_Request] = []
        num_tokens = num_prompt_tokens = num_preempted = 0
        has_continued = False
        for of_client in outputs.values():
            assert of_client.weight_version is not None
            for output in of_client.outputs:
                if (request := self._requests.get(output.request_id)) is None:
                    continue
                has_continued |= bool(request.token_ids)
                num_tokens += len(output.new_token_ids)
                num_preempted += request.add(output, of_client.weight_version)
                if output.prefill_stats is not None:
                    num_prompt_tokens += output.prefill_stats.num_computed_tokens
                if output.finish_reason is not None:
                    ended.append(self._end(output.request_id, str(output.finish_reason)))
        previous_s, self._stepped_s = self._stepped_s, time.monotonic()
        scheduler = self._core.scheduler
        step = EngineStep(
            scheduler.get_kv_cache_usage(),
            scheduler.get_request_counts()[0],
            num_tokens,
            num_prompt_tokens,
            num_preempted,
            [request.queued_s for request in ended],
            self._stepped_s - previous_s if has_continued else 0.0,
        )
        self._post(self._record, ended, step)

    def _end(self, request_id: str, finish_reason: str) -> _Request:
        request = self._requests.pop(request_id)
        request.finish_reason = finish_reason
        return request

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._post(_set_exception, list(self._requests.values()), self._error)

    def _post(self, call: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 -- passed on to `call`
        """Call a function in the event loop, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._events.call_soon_threadsafe(call, *arguments)

    # --- in the event loop ------------------------------------------------------------------------

    def _record(self, ended: Sequence[_Request], step: EngineStep) -> None:
        self._stats.record(step)
        _set_results(ended)


def _set_results(requests: Iterable[_Request]) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_result(request.output())


def _set_exception(requests: Iterable[_Request], error: BaseException) -> None:
    for request in requests:
        if not request.future.done():
            request.future.set_exception(error)
