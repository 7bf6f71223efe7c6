"""How an engine takes newer weights: how often it is looked at, what it may refuse, and who waits for one that died.

vLLM is a stand-in that answers its calls; none of it is imported.
"""

import asyncio
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actors import engine as engine_module
from actors.config import ActorsConfig
from actors.engine import Engine, EngineDead, UpdateRefused, verify, while_alive
from actors.engine_output import EngineStats
from common.staleness import PolicyVersion

OLD, NEW, NEWER = (PolicyVersion(0, number) for number in range(3))


async def test_what_is_asked_of_an_engine_that_dies_fails_though_no_answer_comes():
    llm, ended = SimpleNamespace(errored=False), asyncio.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    asking = asyncio.create_task(while_alive(llm, never()))
    await asyncio.sleep(0.3)
    assert not asking.done()
    llm.errored = True
    async with asyncio.timeout(60):
        with pytest.raises(EngineDead, match="its process ended"):
            await asking
        await ended.wait()


async def test_an_answer_or_an_error_of_an_engine_that_lives_is_passed_on():
    llm = SimpleNamespace(errored=False)

    async def answer() -> int:
        await asyncio.sleep(0.01)
        return 7

    async def refuse() -> None:
        raise ValueError("no")

    assert await while_alive(llm, answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await while_alive(llm, refuse())


class FakeVllm:
    """Stands for an AsyncLLM: a verification is over at the n-th look, an update fails with a text if told so.

    It loads nothing, and remembers the order of its calls.
    """

    def __init__(self, looks: int = 1, refusal: str = "") -> None:
        self.errored = False
        self.called: list[str] = []
        self.engine_core = SimpleNamespace(pause_scheduler_async=self._called("pause"))
        self.start_weight_update = self._called("start")
        self.finish_weight_update = self._called("finish")
        self.resume_generation = self._called("resume")
        self._looks, self._refusal = looks, refusal

    def _called(self, what: str):
        async def call(*_, **__) -> None:
            self.called.append(what)

        return call

    async def collective_rpc(self, method: str, **_):
        self.called.append(method)
        if method == "weight_verification":
            self._looks -= 1
            return [None if self._looks > 0 else "", ""]
        return None

    async def update_weights(self, _) -> None:
        self.called.append("update")
        if self._refusal:
            raise RuntimeError(self._refusal)


def staged(version: PolicyVersion) -> SimpleNamespace:
    return SimpleNamespace(folder=Path("/weights"), version=version, dtype="float32")


@pytest.fixture
def make(monkeypatch):
    """`make(llm)`: an engine on it that serves the old version."""
    stand_in = SimpleNamespace(WeightTransferUpdateRequest=lambda update_info: update_info)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", stand_in)

    def engine(llm: FakeVllm) -> Engine:
        return Engine(llm, ActorsConfig(), OLD, [2], sockets=None, stats=EngineStats())

    return engine


async def pauses_of(looks: int, monkeypatch) -> list[float]:
    """The pauses of a verification that is over at the n-th look."""
    slept: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    monkeypatch.setattr(engine_module.asyncio, "sleep", sleep)
    assert await verify(FakeVllm(looks), staged(NEW)) == ["", ""]
    return slept


async def test_a_verification_is_looked_at_soon_and_then_ever_more_rarely(monkeypatch):
    slept = await pauses_of(60, monkeypatch)
    seen_s = list(itertools.accumulate(slept))
    # a tiny model, whose verification is over within milliseconds, is seen as soon as by a look every 10 ms
    assert seen_s[0] <= 0.01
    # and any other at most by half of what it took later than it was over
    assert all(slept[look] <= 0.01 + 0.5 * seen_s[look - 1] for look in range(1, len(slept)))
    assert sorted(slept) == slept
    assert max(slept) == 0.2
    # one of ten seconds costs a call to all workers about sixty times, where it was a thousand
    assert sum(at_s < 10 for at_s in seen_s) < 60


async def test_an_engine_does_not_apply_what_it_has_not_verified(make):
    llm = FakeVllm()
    engine = make(llm)
    with pytest.raises(UpdateRefused, match=r"version 1 was not verified; still serving .*0"):
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


async def test_an_engine_whose_update_fails_in_the_pause_is_dead(make):
    engine = make(FakeVllm(refusal="a byte is wrong"))
    await engine.prepare(staged(NEW))
    with pytest.raises(EngineDead, match="a byte is wrong"):
        await engine.apply(staged(NEW), "keep")
    assert engine.version == OLD
    with pytest.raises(EngineDead):
        await engine.prepare(staged(NEWER))


async def test_a_request_that_ends_while_weights_change_is_known_no_longer(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", SimpleNamespace(tokens_input=lambda *_, **__: None))
    llm = FakeVllm()
    engine = make(llm)

    async def generate(*_, priority):
        assert priority == 0
        assert engine.runs((1, 0))
        engine._broken = "its update never ended"  # as `apply` has it until generation goes on
        yield "an output"

    llm.generate = generate
    assert await engine._run([1], None, (1, 0), None) == (OLD, "an output")
    assert not engine.runs((1, 0))


async def test_requests_are_interrupted_in_the_middle_of_an_update_too(make):
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
    with pytest.raises(EngineDead, match=r"its update to version 1 never ended"):
        await engine.prepare(staged(NEWER))
    await engine.interrupt([(1, 0), (2, 0)])
    assert ended == ["r0"]
    may_pause.set()
    await updating
    llm.errored = True
    with pytest.raises(EngineDead, match="its process ended"):
        await engine.interrupt([(1, 0)])


async def test_the_more_tokens_were_handed_on_the_later_a_request_is_preempted(make, monkeypatch):
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
    assert sent == [0, -3, -40], "vLLM preempts the greatest"
