"""`SleepingEngine` takes the time that its cost model predicts and labels each token with its policy version."""

import asyncio
import time
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks.fleet_parts.engine import SleepingEngine
from benchmarks.fleet_parts.setting import VARIABLE, EngineSetting, FleetSetting, score_of
from benchmarks.lib.lengths import constant, lognormal

from leeway.actors.config import ActorsConfig
from leeway.common.staleness import PolicyVersion
from leeway.planning.costs import TokenTime
from tests.unit.fake_actor import Clock, FakeBuffer, K, make_actor, run_to_end, until

LAW = TokenTime(5e-3, 1e-3)
SLOW = TokenTime(5e-2, 1e-2)
"""Step times that are long compared with the tenths of a second by which a busy machine extends a sleep."""
FORTY = constant(40)


@pytest.fixture
async def make_engine(monkeypatch):
    """Return `make_engine(law, lengths)`, which makes an engine that is stopped after the test."""
    engines = []

    def make(law=LAW, lengths=FORTY):
        monkeypatch.setattr(SleepingEngine, "setting", EngineSetting(law, lengths, pause_s=0.05), raising=False)
        engines.append(SleepingEngine(ActorsConfig(max_new_tokens=64), PolicyVersion(0, 0), vocab_size=50))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()


async def test_concurrent_samples_take_the_time_of_the_cost_model(make_engine):
    engine, began_s = make_engine(SLOW), time.perf_counter()
    made = await asyncio.gather(*(engine.generate([1, 2], seed=seed) for seed in range(4)))
    took_s = time.perf_counter() - began_s
    assert took_s > 0.95 * 40 * SLOW.seconds(4, 0)  # a busy machine may take longer
    assert engine.step_s * engine.num_steps == pytest.approx(40 * SLOW.seconds(4, 0), rel=0.2)
    assert all(len(sample.token_ids) == len(sample.logprobs) == 40 for sample in made)
    assert [sample.spans[0].end for sample in made] == [40] * 4
    assert engine.step_s * engine.num_steps <= 1.05 * took_s


async def test_an_update_pauses_the_engine_and_later_tokens_have_the_new_version(make_engine, monkeypatch):
    clock, step_s = Clock(), LAW.seconds(1, 0)
    monkeypatch.setattr("benchmarks.fleet_parts.engine.time", SimpleNamespace(perf_counter=clock))
    engine = make_engine()
    running = asyncio.create_task(engine.generate([1], seed=0))
    await until(lambda: engine._clock.num_running)
    clock.now_s += 20.2 * step_s
    await engine.apply(SimpleNamespace(version=PolicyVersion(0, 1)), "keep")
    clock.now_s += 19.8 * step_s + 0.04  # 0.01 s of the pause remain
    engine._pass_time()
    assert engine._clock.num_running == 1
    clock.now_s += 0.02
    engine._changed.set()
    sample = await asyncio.wait_for(running, 60)
    first, second = sample.spans
    assert (first.version, second.version) == (PolicyVersion(0, 0), PolicyVersion(0, 1))
    assert (first.start, first.end, second.start, second.end) == (0, 20, 20, 40)
    assert engine.step_s * engine.num_steps == pytest.approx(40 * step_s + 0.05, rel=0.05)


async def test_lengths_depend_only_on_prompt_and_seed(make_engine):
    engine = make_engine(TokenTime(1e-5), lognormal(20, 0.8, 60, 0.65))

    async def length(prompt, seed):
        return len((await engine.generate([prompt], seed=seed)).token_ids)

    assert await length(3, 1) == await length(3, 1)
    lengths = np.log([[await length(prompt, seed) for seed in range(8)] for prompt in range(40)])
    assert lengths.mean(axis=1).var() > 3 * (lengths.var(axis=1, ddof=1).mean() / 8), (
        "samples of a prompt have similar lengths"
    )


async def test_the_engine_runs_in_the_actor_loop_and_stops_cancelled_requests(make_engine):
    engine = make_engine(TokenTime(1e-4), constant(5))
    buffer = FakeBuffer(6)
    report = await run_to_end(make_actor(buffer, engine))
    assert report.num_outcomes == {"committed": 6 * K}
    task = asyncio.create_task(engine.generate([1], seed=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine._clock.num_running == 0


def test_a_setting_survives_a_round_trip_through_the_environment(monkeypatch):
    setting = FleetSetting({"a": LAW}, lognormal(20, 0.8, 60, 0.65), 0.5, 1e-4)
    monkeypatch.setenv(VARIABLE, setting.as_text())
    assert FleetSetting.here() == setting


def test_scores_are_standard_normal_and_deterministic_per_key():
    scores = [score_of("p", number) for number in range(4000)]
    assert (np.mean(scores), np.std(scores)) == (pytest.approx(0, abs=0.05), pytest.approx(1, abs=0.05))
    assert score_of(1, 2) == score_of(1, 2) != score_of(2, 1)
