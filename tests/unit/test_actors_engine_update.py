"""Engine and engine core with a fake client of vLLM: requests, weight updates, and a core that fails.

vLLM is never imported.
"""

import asyncio
import itertools
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest

from leeway.actors import engine as engine_module
from leeway.actors.config import ActorsConfig
from leeway.actors.engine import Engine, UpdateRefused, verify
from leeway.actors.engine_core import EngineCore, EngineDead, RequestRefused
from leeway.actors.report import EngineStats
from leeway.buffer.schema import REQUEUED
from leeway.common.staleness import PolicyVersion
from leeway.planning.costs import LeastSquares

OLD, NEW, NEWER = (PolicyVersion(0, number) for number in range(3))


class FakeClient:
    """Fakes vLLM's client of a core in this process: loads no model, and records the order of the calls.

    A verification completes at poll `num_polls`. If `refusal` is set, an update fails with `refusal`.
    """

    def __init__(self, num_polls: int = 1, refusal: str = "") -> None:
        self.called: list[str] = []
        self.added: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.outputs: list[SimpleNamespace] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self.scheduler = SimpleNamespace(has_requests=lambda: bool(self.outputs))
        self.engine_core = self
        self._polls_left, self._refusal = num_polls, refusal

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep"
        assert self.may_load.wait(60)
        self.called.append("pause")

    def resume_scheduler(self) -> None:
        self.called.append("resume")

    def set_weight_version(self, _: str) -> None:
        self.called.append("version")

    def collective_rpc(self, method: str, *_):
        self.called.append(method)
        if method == "weight_verification":
            self._polls_left -= 1
            return [None if self._polls_left > 0 else "", ""]
        if method == "update_weights" and self._refusal:
            raise RuntimeError(self._refusal)
        return [None]

    def add_request(self, request) -> None:
        self.added.append(request)

    def abort_requests(self, request_ids) -> None:
        self.aborted += request_ids

    def get_output(self) -> SimpleNamespace:
        found = self.outputs.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self, timeout_s: float) -> None:
        self.called.append("shutdown")


def output(
    request_id: str, *token_ids: int, finish_reason: str | None = None, version: PolicyVersion = OLD, at_s: float = 1.0
) -> SimpleNamespace:
    """Return the output of a step for one request, as vLLM returns it."""
    logprobs = SimpleNamespace(logprobs=np.full((len(token_ids), 1), -1.0, np.float32))
    one = SimpleNamespace(
        request_id=request_id, new_token_ids=list(token_ids), new_logprobs=logprobs, events=None, prefill_stats=None,
        finish_reason=finish_reason,
    )  # fmt: skip
    return SimpleNamespace(outputs=[one], weight_version=version.key, timestamp=at_s, scheduler_stats=None)


def staged(version: PolicyVersion) -> SimpleNamespace:
    return SimpleNamespace(folder=Path("/weights"), version=version, dtype="float32")


MODEL = SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 64)


@pytest.fixture
def make(monkeypatch):
    """Return `make(client)`, which makes an engine that uses `client` and serves the old version."""
    request = lambda *fields, priority: SimpleNamespace(request_id=fields[0], priority=priority)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", SimpleNamespace(EngineCoreRequest=request))

    def engine(client: FakeClient) -> Engine:
        stats = EngineStats()
        return Engine(EngineCore(client, MODEL, stats), ActorsConfig(), OLD, [2], stats)

    return engine


async def within_a_minute(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def pauses_of(num_polls: int, monkeypatch) -> list[float]:
    """Return the pauses between the polls of a verification that completes at the last poll."""
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    core = EngineCore(FakeClient(num_polls), MODEL, EngineStats())
    assert await verify(core, staged(NEW)) == ["", ""]
    return slept


async def test_verification_is_polled_early_and_then_at_growing_intervals(monkeypatch):
    slept = await pauses_of(60, monkeypatch)
    polled_s = list(itertools.accumulate(slept))
    # a tiny model is verified within milliseconds, so the first poll comes after at most 10 ms
    assert polled_s[0] <= 0.01
    # the end of a longer verification is noticed after a delay of at most half of its duration
    assert all(slept[poll] <= 0.01 + 0.5 * polled_s[poll - 1] for poll in range(1, len(slept)))
    assert sorted(slept) == slept
    assert max(slept) == 0.2
    # a verification of 10 s needs fewer than 60 polls; a fixed interval of 10 ms would need 1000
    assert sum(at_s < 10 for at_s in polled_s) < 60


async def test_an_engine_refuses_to_apply_versions_that_are_not_verified(make):
    client = FakeClient()
    engine = make(client)
    with pytest.raises(UpdateRefused, match=r"version 1 was not verified; the engine serves .*0"):
        await engine.apply(staged(NEW), "keep")
    await engine.prepare(staged(NEW))
    with pytest.raises(UpdateRefused, match=r"version 2 was not verified"):
        await engine.apply(staged(NEWER), "keep")
    assert "pause" not in client.called
    await engine.prepare(staged(NEWER))
    await engine.apply(staged(NEWER), "keep")
    updating = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert client.called[-6:] == ["pause", *updating, "version", "resume"]
    assert engine.version == NEWER
    with pytest.raises(UpdateRefused, match="was not verified"):
        await engine.apply(staged(NEWER), "keep")


async def test_an_engine_is_dead_after_an_update_fails_during_the_pause(make):
    engine = make(FakeClient(refusal="a byte is wrong"))
    await engine.prepare(staged(NEW))
    with pytest.raises(EngineDead, match="a byte is wrong"):
        await engine.apply(staged(NEW), "keep")
    assert engine.version == OLD
    with pytest.raises(EngineDead):
        await engine.prepare(staged(NEWER))


async def test_a_request_that_ends_during_an_update_is_removed(make):
    client = FakeClient()
    engine = make(client)
    generating = asyncio.create_task(engine.generate([1], key=(1, 0)))
    await within_a_minute(lambda: client.added)
    assert engine.runs((1, 0))
    engine._broken = "its update did not complete"  # `apply` sets this error until generation resumes
    client.outputs.append(output("r0", 7, finish_reason="stop"))
    engine._core._commands.put(lambda: None)
    assert (await generating).token_ids.tolist() == [7]
    assert not engine.runs((1, 0))


async def test_requests_can_be_interrupted_during_an_update(make):
    client = FakeClient()
    engine = make(client)
    generating = asyncio.create_task(engine.generate([1], key=(1, 0)))
    await within_a_minute(lambda: client.added)
    client.outputs.append(output("r0", 7))
    await engine.prepare(staged(NEW))
    client.may_load.clear()
    updating = asyncio.create_task(engine.apply(staged(NEW), "keep"))
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match=r"the update to version 1 did not complete"):
        await engine.prepare(staged(NEWER))
    interrupting = asyncio.create_task(engine.interrupt([(1, 0), (2, 0)]))
    client.may_load.set()
    await interrupting
    assert client.aborted == ["r0"]
    found = await generating
    assert (found.token_ids.tolist(), found.finish_reason) == ([7], REQUEUED)
    await updating


async def test_a_core_that_fails_ends_requests_and_calls_and_keeps_the_tokens(make):
    client = FakeClient()
    engine = make(client)
    generating = asyncio.create_task(engine.generate([1], key=(1, 0)))
    await within_a_minute(lambda: client.added)
    client.outputs += [output("r0", 7, 8), ZeroDivisionError("no step")]
    engine._core._commands.put(lambda: None)
    with pytest.raises(EngineDead, match="no step"):
        await generating
    assert engine.so_far((1, 0)).token_ids.tolist() == [7, 8]
    with pytest.raises(EngineDead, match="no step"):
        await engine.interrupt([(1, 0)])
    with pytest.raises(ZeroDivisionError):
        await engine._core.call_workers("weight_verification")


async def test_a_call_to_a_core_whose_process_exits_fails():
    client = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=False), outputs_queue=Queue(), utility_results={}, shutdown=lambda _: None
    )
    never: Future[None] = Future()
    client.utility_results[1] = never
    client.call_utility = lambda *_: never.result(60)
    core = EngineCore(client, MODEL, EngineStats())
    call = asyncio.create_task(core.call_workers("update_weights"))
    await asyncio.sleep(0.3)
    assert not call.done()
    client.resources.engine_dead = True
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="its process exited"):
            await call
    assert core.failure == "its process exited"


async def test_a_cancelled_request_is_aborted(make):
    client = FakeClient()
    engine = make(client)
    generating = asyncio.create_task(engine.generate([1], key=(1, 0)))
    await within_a_minute(lambda: client.added)
    generating.cancel()
    await asyncio.gather(generating, return_exceptions=True)
    await within_a_minute(lambda: client.aborted == ["r0"])
    assert not engine.runs((1, 0))


@pytest.mark.parametrize(
    ("prompt", "reason"), [([1] * 32, "1 to 31 tokens"), ([64], "between 0 and 63"), ([], "1 to 31")]
)
async def test_prompts_that_do_not_fit_the_model_are_refused(make, prompt, reason):
    with pytest.raises(RequestRefused, match=reason):
        await make(FakeClient()).generate(prompt)


async def test_requests_with_longer_prefixes_are_preempted_later(make):
    client = FakeClient()
    engine = make(client)
    prefixes = [SimpleNamespace(token_ids=np.ones(num_tokens, np.int32)) for num_tokens in (3, 10)]
    tasks = [asyncio.create_task(engine._run([1], None, None, prefix)) for prefix in (None, *prefixes)]
    await within_a_minute(lambda: len(client.added) == 3)
    priorities = [request.priority for request in client.added]
    assert priorities == [0, -3, -10], "vLLM preempts the request with the greatest priority value first"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_step_interrupted_by_an_update_is_not_measured(make):
    client = FakeClient()
    engine = make(client)
    generating = asyncio.create_task(engine.generate([1]))
    await within_a_minute(lambda: client.added)
    client.outputs += [output("r0", 7, at_s=each) for each in (1.0, 1.05)]
    client.outputs += [output("r0", 7, at_s=each, version=NEW) for each in (1.25, 1.3)]
    client.outputs.append(output("r0", 2, at_s=2.0, version=NEWER, finish_reason="stop"))
    engine._core._commands.put(lambda: None)
    assert len((await generating).token_ids) == 5
    measured = LeastSquares.from_list(engine.stats.report().moments)
    assert (measured.num_measured, measured.total) == (2, pytest.approx(0.1))


async def test_an_update_that_recomputes_keys_announces_its_preemptions_before_the_next_step(make, monkeypatch):
    client, order = FakeClient(), []
    engine = make(client)
    monkeypatch.setattr(engine.stats, "interrupt", lambda recomputes: order.append(recomputes))
    monkeypatch.setattr(engine.stats, "record", lambda step: order.append("step"))
    generating = asyncio.create_task(engine.generate([1]))
    await within_a_minute(lambda: client.added)
    resume = client.resume_scheduler
    client.resume_scheduler = lambda: (resume(), client.outputs.append(output("r0", 2, finish_reason="stop")))
    await engine.prepare(staged(NEW))
    await engine.apply(staged(NEW), "recompute")
    await generating
    assert order == [True, "step"]
