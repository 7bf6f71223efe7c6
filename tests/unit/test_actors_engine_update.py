"""Weight updates of an engine: polls of a verification, refused updates, and calls to a dead engine.

A fake replaces vLLM, which is never imported.
"""

import asyncio
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from leeway.actors import engine as engine_module
from leeway.actors.config import ActorsConfig
from leeway.actors.engine import Engine, EngineDead, UpdateRefused, verify, while_alive
from leeway.actors.engine_output import EngineStats
from leeway.common.staleness import PolicyVersion

OLD, NEW, NEWER = (PolicyVersion(0, number) for number in range(3))


async def test_a_pending_call_fails_when_the_engine_dies():
    llm, ended = SimpleNamespace(errored=False), asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    call = asyncio.create_task(while_alive(llm, never()))
    await asyncio.sleep(0.3)
    assert not call.done()
    llm.errored = True
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead, match="its process exited"):
            await call
        await ended.wait()


async def test_results_and_errors_of_a_live_engine_propagate():
    llm = SimpleNamespace(errored=False)

    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def fail() -> None:
        raise ValueError("no")

    assert await while_alive(llm, answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await while_alive(llm, fail())


class FakeVllm:
    """Fake AsyncLLM. A verification completes at the given poll. If `refusal` is set, an update fails with `refusal`.

    The fake loads no model and records the order of its calls.
    """

    def __init__(self, num_polls: int = 1, refusal: str = "") -> None:
        self.errored = False
        self.called: list[str] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._called("pause"))
        self.start_weight_update = self._called("start")
        self.finish_weight_update = self._called("finish")
        self.resume_generation = self._called("resume")
        self._polls_left, self._refusal = num_polls, refusal

    def _called(self, name: str):
        async def call(*_, **__) -> None:
            self.called.append(name)

        return call

    async def collective_rpc(self, method: str, **_):
        self.called.append(method)
        if method == "weight_verification":
            self._polls_left -= 1
            return [None if self._polls_left > 0 else "", ""]
        return None

    async def update_weights(self, _) -> None:
        self.called.append("update")
        if self._refusal:
            raise RuntimeError(self._refusal)


def staged(version: PolicyVersion) -> SimpleNamespace:
    return SimpleNamespace(folder=Path("/weights"), version=version, dtype="float32")


@pytest.fixture
def make(monkeypatch):
    """Return `make(llm)`, which makes an engine that uses `llm` and serves the old version."""
    stand_in = SimpleNamespace(WeightTransferUpdateRequest=lambda update_info: update_info)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", stand_in)

    def engine(llm: FakeVllm) -> Engine:
        return Engine(llm, ActorsConfig(), OLD, [2], sockets=None, stats=EngineStats())

    return engine


async def pauses_of(num_polls: int, monkeypatch) -> list[float]:
    """Return the pauses between the polls of a verification that completes at the last poll."""
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    assert await verify(FakeVllm(num_polls), staged(NEW)) == ["", ""]
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
    llm = FakeVllm()
    engine = make(llm)
    with pytest.raises(UpdateRefused, match=r"version 1 was not verified; the engine serves .*0"):
        await engine.apply(staged(NEW), "keep")
    await engine.prepare(staged(NEW))
    with pytest.raises(UpdateRefused, match=r"version 2 was not verified"):
        await engine.apply(staged(NEWER), "keep")
    assert "pause" not in llm.called
    await engine.prepare(staged(NEWER))
    await engine.apply(staged(NEWER), "keep")
    assert llm.called[-5:] == ["pause", "start", "update", "finish", "resume"]
    assert engine.version == NEWER
    with pytest.raises(UpdateRefused, match="was not verified"):
        await engine.apply(staged(NEWER), "keep")


async def test_an_engine_is_dead_after_an_update_fails_during_the_pause(make):
    engine = make(FakeVllm(refusal="a byte is wrong"))
    await engine.prepare(staged(NEW))
    with pytest.raises(EngineDead, match="a byte is wrong"):
        await engine.apply(staged(NEW), "keep")
    assert engine.version == OLD
    with pytest.raises(EngineDead):
        await engine.prepare(staged(NEWER))


async def test_a_request_that_ends_during_an_update_is_removed(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", SimpleNamespace(tokens_input=lambda *_, **__: None))
    llm = FakeVllm()
    engine = make(llm)

    async def generate(*_, priority):
        assert priority == 0
        assert engine.runs((1, 0))
        engine._broken = "its update did not complete"  # `apply` sets this error until generation resumes
        yield "an output"

    llm.generate = generate
    assert await engine._run([1], None, (1, 0), None) == (OLD, "an output")
    assert not engine.runs((1, 0))


async def test_requests_can_be_interrupted_during_an_update(make):
    llm, may_pause, ended = FakeVllm(), asyncio.Event(), []

    async def pause(**_) -> None:
        await may_pause.wait()

    async def abort(requests) -> None:
        ended.extend(requests)

    llm.engine_core.pause_scheduler_async, llm.abort = pause, abort
    engine = make(llm)
    engine._running[1, 0] = SimpleNamespace(request_id="r0")
    await engine.prepare(staged(NEW))
    updating = asyncio.create_task(engine.apply(staged(NEW), "keep"))
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match=r"the update to version 1 did not complete"):
        await engine.prepare(staged(NEWER))
    await engine.interrupt([(1, 0), (2, 0)])
    assert ended == ["r0"]
    may_pause.set()
    await updating
    llm.errored = True
    with pytest.raises(EngineDead, match="its process exited"):
        await engine.interrupt([(1, 0)])


async def test_requests_with_longer_prefixes_are_preempted_later(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", SimpleNamespace(tokens_input=lambda *_, **__: None))
    llm = FakeVllm()
    engine, sent = make(llm), []

    async def generate(*_, priority):
        sent.append(priority)
        yield "an output"

    llm.generate = generate
    for num_tokens in (0, 3, 40):
        prefix = SimpleNamespace(token_ids=np.zeros(num_tokens, np.int32)) if num_tokens else None
        await engine._run([1], None, (1, num_tokens), prefix)
    assert sent == [0, -3, -40], "vLLM preempts the request with the greatest priority value first"
