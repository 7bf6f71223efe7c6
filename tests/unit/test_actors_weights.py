"""Weight updates of an actor, with a fake engine, buffer and store."""

import asyncio
import time

import pytest

from leeway.actors.weights import PolicyTimeout
from leeway.common.process import wall_time
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.client import UPDATE_TIMEOUT_S
from tests.unit.fake_actor import Clock, FakeBuffer, FakeEngine, FakeStore, make_actor, run_to_end, until


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
async def test_an_update_uses_the_configured_kv_cache_mode(kv_cache):
    engine, store = FakeEngine(), FakeStore()
    store.version = PolicyVersion(0, 1)
    actor = make_actor(FakeBuffer(0), engine, store, weight_sync={"kv_cache": kv_cache})
    await actor.start()
    await actor.stop()
    assert engine.kv_caches == [kv_cache]


async def test_a_request_waits_for_the_minimum_version_of_its_lease():
    buffer, engine, store = FakeBuffer(1, min_version=3), FakeEngine(), FakeStore()
    buffer.newest = (0, 3)
    actor = make_actor(buffer, engine, store)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0.05)
    assert not engine.started_at
    store.version = PolicyVersion(0, 3)
    before_s = wall_time()
    await asyncio.wait_for(running, 60)
    assert set(engine.started_at) == {PolicyVersion(0, 3)}
    report = actor.report()
    (update,) = report.updates
    assert update.version == (0, 3)
    assert update.load_s == 0.005  # the load time that the fake engine reports
    assert update.pause_s == pytest.approx(0.01)
    assert before_s <= update.end_s <= wall_time()
    assert actor.report().updates == [], "an update is reported only once"
    await actor.stop()


async def test_a_stale_actor_pulls_weights_first_even_after_a_learner_restart():
    for served, newest in (((0, 0), (0, 2)), ((0, 9), (1, 4))):
        buffer, engine, store = FakeBuffer(1), FakeEngine(), FakeStore()
        engine.version, buffer.newest, store.version = PolicyVersion(*served), newest, PolicyVersion(*served)
        actor = make_actor(buffer, engine, store)
        await actor.start()
        running = asyncio.create_task(actor.run())
        async with asyncio.timeout(60):
            while actor.report().waiting != f"waiting for policy {PolicyVersion(*newest)}":
                await asyncio.sleep(0.01)
        assert not engine.started_at
        store.version = PolicyVersion(*newest)
        await asyncio.wait_for(running, 60)
        assert set(engine.started_at) == {PolicyVersion(*newest)}
        await actor.stop()


async def test_waiting_for_a_missing_version_times_out_with_its_number(monkeypatch):
    monkeypatch.setattr("leeway.actors.weights.UPDATE_TIMEOUT_S", 0.05)
    buffer = FakeBuffer(1, min_version=9)
    buffer.newest = (0, 9)
    with pytest.raises(PolicyTimeout, match=r"policy 9.*serves 0"):
        await run_to_end(make_actor(buffer))


async def start_update():
    """Start an update to version 1, which waits for `engine.may_apply`; return the engine, the actor and the update."""
    engine, store = FakeEngine(), FakeStore()
    actor = make_actor(FakeBuffer(0), engine, store)
    await actor.start()
    store.version = PolicyVersion(0, 1)
    engine.may_apply.clear()
    update = asyncio.create_task(actor._follower.update())
    async with asyncio.timeout(60):
        await engine.applying.wait()
    return engine, actor, update


async def test_a_request_for_the_served_version_does_not_wait_for_an_update():
    engine, actor, update = await start_update()
    await asyncio.wait_for(actor._follower.catch_up(PolicyVersion(0, 0)), 60)
    assert not update.done()
    engine.may_apply.set()
    await update
    await actor.stop()


async def test_time_spent_in_an_evaluation_does_not_count_as_catch_up_time():
    engine, store, clock = FakeEngine(), FakeStore(), Clock()
    actor = make_actor(FakeBuffer(0), engine, store, clock=clock)
    await actor.start()
    async with actor._follower.held():
        store.version = PolicyVersion(0, 1)
        catching_up = asyncio.create_task(actor._follower.catch_up(PolicyVersion(0, 2)))
        async with asyncio.timeout(60):
            while (0, 1) not in engine.prepared:
                await asyncio.sleep(0.001)
        clock.now_s += 1e6
    async with asyncio.timeout(60):
        while engine.version != (0, 1):
            await asyncio.sleep(0.001)
    store.version = PolicyVersion(0, 2)
    await asyncio.wait_for(catching_up, 60)
    await actor.stop()


async def test_refused_weights_are_reported_and_skipped():
    engine, store, clock = FakeEngine(), FakeStore(), Clock()
    store.corrupt, engine.refuses = {PolicyVersion(0, 1)}, {PolicyVersion(0, 2)}
    store.version = PolicyVersion(0, 1)
    actor = make_actor(FakeBuffer(0), engine, store, clock=clock)
    await actor.start()
    assert actor.report().refused == "version 1: a flipped byte"
    store.version = PolicyVersion(0, 2)
    clock.now_s += 5
    await actor._follower.update()
    assert engine.version == (0, 0)
    report = actor.report()
    assert (report.refused, report.updates) == ("version 2: of another model", [])
    assert store.invalidated == [(0, 2)]
    store.version = PolicyVersion(0, 3)
    await actor._follower.catch_up(PolicyVersion(0, 3))
    report = actor.report()
    assert (engine.version, report.version, report.refused) == ((0, 3), (0, 3), "")
    assert [update.version for update in report.updates] == [(0, 3)]
    await actor.stop()
    assert store.closed


async def test_a_refused_version_is_retried_after_growing_pauses():
    engine, store, clock = FakeEngine(), FakeStore(), Clock()
    store.version = PolicyVersion(0, 1)
    store.corrupt = {PolicyVersion(0, 1)}
    actor = make_actor(FakeBuffer(0), engine, store, clock=clock)
    await actor.start()
    reads = []
    for _ in range(400):
        await actor._follower.update()
        reads.append(len(store.fetched))
        clock.now_s += 0.1
    assert reads[5] == 1
    # one first fetch, and six retries after pauses of 1, 2, 4, 8, 10 and 10 seconds
    assert reads[-1] == 7
    store.corrupt = set()
    clock.now_s += 10
    await actor._follower.update()
    assert engine.version == (0, 1)
    await actor.stop()


async def test_a_silent_weight_service_ends_the_actor_only_if_a_request_times_out():
    engine, store, clock = FakeEngine(), FakeStore(), Clock()
    store.silent = True
    actor = make_actor(FakeBuffer(0), engine, store, clock=clock)
    await actor.start()
    for _ in range(100):
        await actor._follower.update()
        clock.now_s += 0.1
    assert actor.report().refused == "the newest version: tcp://fake did not answer"
    assert 8 <= store.num_polls <= 11
    await asyncio.wait_for(actor._follower.admit(0), 60)
    store.silent, store.version = False, PolicyVersion(0, 1)
    clock.now_s += 1
    await actor._follower.update()
    assert (engine.version, actor.report().refused) == ((0, 1), "")
    await actor.stop()

    buffer, store = FakeBuffer(1, min_version=2), FakeStore()
    buffer.newest, store.silent = (0, 2), True
    with pytest.raises(PolicyTimeout, match=r"policy 2.*serves 0.*did not answer"):
        await run_to_end(make_actor(buffer, FakeEngine(), store, clock=lambda: 200 * time.monotonic()))


async def test_a_fetch_that_times_out_is_refused_and_no_second_fetch_starts(monkeypatch):
    engine, store, clock, loop = FakeEngine(), FakeStore(), Clock(), asyncio.get_running_loop()
    actor = make_actor(FakeBuffer(0), engine, store, clock=clock)
    await actor.start()
    store.version = PolicyVersion(0, 1)
    store.may_fetch.clear()
    update, now_s = asyncio.create_task(actor._follower.update()), loop.time
    await until(lambda: store.fetched)
    monkeypatch.setattr(loop, "time", lambda: now_s() + UPDATE_TIMEOUT_S)
    await update
    assert "version 1: the weights were not read and verified within 600 s" in actor.report().refused
    clock.now_s += 3
    await actor._follower.update()
    assert "an earlier request for weights is still running" in actor.report().refused
    assert store.fetched == [(0, 1)]
    store.may_fetch.set()
    actor._follower._request.result(60)
    clock.now_s += 3
    await actor._follower.update()
    assert engine.version == (0, 1)
    assert store.fetched == [(0, 1)], "the version was fetched again, although the late fetch had completed"
    await actor.stop()


async def test_an_older_version_never_replaces_a_newer_one():
    engine, store = FakeEngine(), FakeStore()
    store.version = PolicyVersion(1, 3)
    actor = make_actor(FakeBuffer(0), engine, store)
    await actor.start()
    for older in (PolicyVersion(1, 2), PolicyVersion(0, 9), PolicyVersion(1, 3)):
        store.version = older
        await actor._follower.update()
    assert engine.version == (1, 3)
    assert store.fetched == [(1, 3)]
    # a version that was staged while a newer version was applied does not replace the newer version
    async with actor._follower.held():
        store.version = PolicyVersion(1, 4)
        update = asyncio.create_task(actor._follower.update())
        while (1, 4) not in engine.prepared:
            await asyncio.sleep(0.001)
        engine.version = PolicyVersion(1, 5)
    await update
    assert engine.version == (1, 5)
    await actor.stop()


async def test_an_update_completes_even_if_it_is_cancelled():
    engine, actor, update = await start_update()
    update.cancel()
    await asyncio.wait({update}, timeout=0.05)
    assert not update.done(), "the cancelled update was abandoned"
    engine.may_apply.set()
    await asyncio.wait({update}, timeout=60)
    assert update.cancelled()
    assert engine.version == (0, 1)
    await actor.stop()


@pytest.mark.parametrize("rounds", range(5))
async def test_the_follower_stops_if_it_is_cancelled_while_a_new_version_arrives(rounds, monkeypatch):
    # this happens at the end of a run, because the reply that ends the run also reports the newest version
    monkeypatch.setattr("leeway.actors.weights.POLL_S", 60)
    actor = make_actor(FakeBuffer(0))
    await actor.start()
    following = asyncio.create_task(actor._follower.run())
    await asyncio.sleep(0.05)
    actor._follower.observe_version(PolicyVersion(0, 1))
    for _ in range(rounds):
        await asyncio.sleep(0)
    following.cancel()
    done, _ = await asyncio.wait([following], timeout=60)
    assert done, "the follower ignored its cancellation"
    await actor.stop()
