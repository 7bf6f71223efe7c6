"""Nobody waits for the answer of an engine whose process ended."""

import asyncio
from types import SimpleNamespace

import pytest

from actors.engine import EngineGone, while_alive


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
        with pytest.raises(EngineGone):
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
