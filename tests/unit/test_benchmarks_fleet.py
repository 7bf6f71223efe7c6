"""A sleeping engine: samples take the time of the law, and every token has the version of its time."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest

from actors.config import ActorsConfig
from benchmarks.fleet_parts.engine import SleepingEngine
from benchmarks.fleet_parts.setting import VARIABLE, EngineSetting, FleetSetting, score_of
from benchmarks.lib.lengths import constant, lognormal
from common.staleness import PolicyVersion
from planning.costs import TokenTime
from tests.unit.fake_actor import Clock, FakeBuffer, K, make_actor, run_to_end, until

LAW = TokenTime(5e-3, 1e-3)
SLOW = TokenTime(5e-2, 1e-2)
"""On a busy machine a process may sleep for some tenths of a second longer than it asked to."""
FORTY = constant(40)


@pytest.fixture
async def sleeping(monkeypatch):
    """Makes one engine."""
    engines = []

    def make(law=LAW, lengths=FORTY):
        monkeypatch.setattr(SleepingEngine, "setting", EngineSetting(law, lengths, pause_s=0.05), raising=False)
        engines.append(SleepingEngine(ActorsConfig(max_new_tokens=64), PolicyVersion(0, 0), vocab_size=50))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()


async def test_samples_share_the_engine_and_take_the_time_of_the_law(sleeping):
    engine, began_s = sleeping(SLOW), time.perf_counter()
    made = await asyncio.gather(*(engine.generate([1, 2], seed=seed) for seed in range(4)))
    took_s = time.perf_counter() - began_s
    assert took_s > 0.95 * 40 * SLOW.seconds(4, 0)  # and longer where others have the cores: the engine's clock tells
    assert engine.step_s * engine.num_steps == pytest.approx(40 * SLOW.seconds(4, 0), rel=0.2)
    assert all(len(one.token_ids) == len(one.logprobs) == 40 for one in made)
    assert [one.spans[0].end for one in made] == [40] * 4
    assert engine.step_s * engine.num_steps <= 1.05 * took_s


async def test_an_update_pauses_and_tokens_after_it_are_of_the_new_version(sleeping, monkeypatch):
    clock, step_s = Clock(), LAW.seconds(1, 0)
    monkeypatch.setattr("benchmarks.fleet_parts.engine.time", SimpleNamespace(perf_counter=clock))
    engine = sleeping()
    running = asyncio.create_task(engine.generate([1], seed=0))
    await until(lambda: engine._clock.num_running)
    clock.now_s += 20.2 * step_s
    await engine.apply(SimpleNamespace(version=PolicyVersion(0, 1)), "keep")
    clock.now_s += 19.8 * step_s + 0.04  # and 0.01 s of the pause are left
    engine._pass_time()
    assert engine._clock.num_running == 1
    clock.now_s += 0.02
    engine._changed.set()
    one = await asyncio.wait_for(running, 60)
    first, second = one.spans
    assert (first.version, second.version) == (PolicyVersion(0, 0), PolicyVersion(0, 1))
    assert (first.start, first.end, second.start, second.end) == (0, 20, 20, 40)
    assert engine.step_s * engine.num_steps == pytest.approx(40 * step_s + 0.05, rel=0.05)


async def test_lengths_follow_from_prompt_and_seed(sleeping):
    engine = sleeping(TokenTime(1e-5), lognormal(20, 0.8, 60, 0.65))

    async def length(prompt, seed):
        return len((await engine.generate([prompt], seed=seed)).token_ids)

    assert await length(3, 1) == await length(3, 1)
    lengths = np.log([[await length(prompt, seed) for seed in range(8)] for prompt in range(40)])
    assert lengths.mean(axis=1).var() > 3 * (lengths.var(axis=1, ddof=1).mean() / 8), "siblings are alike"


async def test_it_works_under_the_real_loop_and_stops_what_is_cancelled(sleeping):
    engine = sleeping(TokenTime(1e-4), constant(5))
    buffer = FakeBuffer(6)
    report = await run_to_end(make_actor(buffer, engine))
    assert report.num_outcomes == {"committed": 6 * K}
    task = asyncio.create_task(engine.generate([1], seed=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine._clock.num_running == 0


def test_a_setting_survives_the_environment(monkeypatch):
    setting = FleetSetting({"a": LAW}, lognormal(20, 0.8, 60, 0.65), 0.5, 1e-4)
    monkeypatch.setenv(VARIABLE, setting.as_text())
    assert FleetSetting.here() == setting


def test_scores_are_standard_normal_and_the_same_for_the_same_key():
    scores = [score_of("p", number) for number in range(4000)]
    assert (np.mean(scores), np.std(scores)) == (pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.05))
    assert score_of(1, 2) == score_of(1, 2) != score_of(2, 1)
