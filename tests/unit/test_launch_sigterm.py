"""An actor that gets SIGTERM: how its process leaves, and what the supervisor makes of it."""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from actors.engine import EngineDead
from launch.checks import check
from launch.config import load_config
from launch.processes import actor_pools as pools_module
from launch.processes import actor_role as role_module
from launch.processes.actor_pools import CALM_S, MAX_SIGTERMS, ActorPools
from launch.processes.actor_role import ActorRole, ToldToEnd
from tests.unit.fake_actor import FakeBuffer, FakeEngine, K, jump, make_actor, until
from tests.unit.fake_actor_process import Handle, Room, worker

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
FARE_WELL = ToldToEnd(12, 0)


# --- the process ----------------------------------------------------------------------------------------


class RoleHere(ActorRole):
    """An actor's role in the process of the test, over a given loop; nobody sends a signal to it but by `sigterm`."""

    def __init__(self, loop, monkeypatch) -> None:
        self.exited = asyncio.Event()
        monkeypatch.setattr("actors.loop.ActorLoop", lambda *_: loop)
        monkeypatch.setattr(ActorRole, "_hear_sigterm", lambda _: None)
        monkeypatch.setattr(role_module.os, "_exit", lambda status: self.exited.set())
        monkeypatch.setattr(role_module, "_ANSWER_S", 0.0)

    def sigterm(self) -> None:
        self._begin_to_leave()


async def running(monkeypatch, engine):
    """A role whose engine is full of two groups, its buffer, and the pending call of its work."""
    buffer = FakeBuffer(2)
    role = RoleHere(make_actor(buffer, engine), monkeypatch)
    await role.start(None, 0, "actors")
    work = asyncio.create_task(role.run())
    await until(lambda: engine.running == 2 * K)
    return role, buffer, work


async def test_at_sigterm_what_runs_is_handed_on_before_anybody_is_told_and_then_the_process_ends(monkeypatch):
    monkeypatch.setattr("actors.loop._LEASE_POLL_S", (0.0, 0.0))  # it asks in every turn
    engine, asked = FakeEngine(600), []
    role, buffer, work = await running(monkeypatch, engine)

    def hand_on(*left, **options):
        asked.append(len(buffer.asked))
        return FakeBuffer.hand_on(buffer, *left, **options)

    buffer.hand_on = hand_on
    role.sigterm()
    for call in (work, role.run(), role.evaluate(None)):
        with pytest.raises(ToldToEnd, match=f"^left by SIGTERM, {2 * K} samples handed on$"):
            await asyncio.wait_for(call, 60)
    assert sorted((lease, indices) for lease, indices, _, _ in buffer.handed_on) == [
        (n, list(range(K))) for n in (1, 2)
    ]
    assert all(len(rows) == K for _, _, rows, _ in buffer.handed_on), "their tokens are with them"
    assert asked == [len(buffer.asked)] * 2, "it leases while it lets go"
    assert (buffer.closed, engine.stopped) == (True, True)
    await asyncio.wait_for(role.exited.wait(), 60)


@pytest.mark.parametrize("is_stopped_first", [True, False])
async def test_who_stops_it_at_the_same_time_is_answered_when_all_is_handed_on(monkeypatch, is_stopped_first):
    role, buffer, work = await running(monkeypatch, FakeEngine(600))
    if is_stopped_first:
        stopping = asyncio.create_task(role.stop())
        await asyncio.sleep(0)
        role.sigterm()
    else:
        role.sigterm()
        await asyncio.sleep(0)
        stopping = asyncio.create_task(role.stop())
    ended = asyncio.create_task(role.exited.wait())
    await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED, timeout=60)
    assert len(buffer.handed_on) == 2, "the supervisor kills it, or it ends by itself, and groups are lost"
    with pytest.raises(ToldToEnd):
        await work


async def test_an_engine_that_dies_of_the_same_signal_makes_no_failure_of_it(monkeypatch):
    engine = FakeEngine(600)
    role, buffer, work = await running(monkeypatch, engine)
    engine.error = EngineDead("its process ended")
    for _, _, end in engine.requests.values():
        end.set()
    role.sigterm()
    with pytest.raises(ToldToEnd, match=f"{2 * K} samples handed on$"):
        await asyncio.wait_for(work, 60)
    assert len(buffer.handed_on) == 2


async def test_a_buffer_that_does_not_answer_keeps_it_no_longer_than_a_goodbye_and_what_was_lost_is_said(monkeypatch):
    monkeypatch.setattr("actors.sample.GOODBYE_S", 1.0)
    role, buffer, work = await running(monkeypatch, FakeEngine(600))
    buffer.hand_on = lambda *_, **__: Future()
    role.sigterm()
    with pytest.raises(ToldToEnd, match=rf"^left by SIGTERM, 0 samples handed on, {4 * K} tokens lost$"):
        await asyncio.wait_for(work, 60)


async def test_samples_that_do_not_end_in_time_are_handed_on_all_the_same(monkeypatch):
    for where in ("actors.sample", "actors.loop", "launch.processes.actor_role"):
        monkeypatch.setattr(f"{where}.GOODBYE_S", 200.0)
    engine, asked = FakeEngine(600), []
    role, buffer, work = await running(monkeypatch, engine)

    async def interrupt(keys):
        asked.append(keys)

    engine.interrupt = interrupt
    role.sigterm()
    await until(lambda: len(asked) == 2)
    jump(monkeypatch, 140.0)
    with pytest.raises(ToldToEnd, match=f"^left by SIGTERM, {2 * K} samples handed on$"):
        await asyncio.wait_for(work, 60)
    assert [len(rows) for _, _, rows, _ in buffer.handed_on] == [K, K], "their tokens are with them"


async def test_what_was_handed_on_is_said_where_the_engine_does_not_end_as_it_should(monkeypatch):
    engine = FakeEngine(600)
    role, _, work = await running(monkeypatch, engine)

    async def stop() -> None:
        raise TimeoutError

    engine.stop = stop
    role.sigterm()
    with pytest.raises(ToldToEnd, match=f"^left by SIGTERM, {2 * K} samples handed on$"):
        await asyncio.wait_for(work, 60)


async def test_it_ends_though_it_does_not_leave_in_order(monkeypatch):
    monkeypatch.setattr(role_module, "GOODBYE_S", 0.05)
    role, _, work = await running(monkeypatch, FakeEngine(600))
    role._loop.stop = lambda: asyncio.sleep(600)
    role.sigterm()
    with pytest.raises(ToldToEnd, match="0 samples handed on"):
        await asyncio.wait_for(work, 60)
    await asyncio.wait_for(role.exited.wait(), 60)


async def test_one_that_still_starts_says_so_and_ends(monkeypatch):
    actor = make_actor(FakeBuffer(1))
    actor._assemble = lambda *_: asyncio.sleep(600)
    role = RoleHere(actor, monkeypatch)
    starting = asyncio.create_task(role.start(None, 0, "actors"))
    await until(lambda: hasattr(role, "_told"))
    role.sigterm()
    with pytest.raises(ToldToEnd, match=r"^left by SIGTERM, 0 samples handed on$"):
        await asyncio.wait_for(starting, 60)
    await asyncio.wait_for(role.exited.wait(), 60)


# --- the supervisor -------------------------------------------------------------------------------------


@pytest.fixture
def pools(tmp_path, monkeypatch):
    """Pools with two actors that work, of which nobody has died; what a test puts in `ends` has ended so."""
    plan = check(load_config(DEMO, []), tmp_path / "run")
    events: list[tuple[str, str]] = []
    made = ActorPools(plan, lambda kind, text: events.append((kind, text)))
    made._context = plan.context(tmp_path, plan.model)
    made.actors = [worker(number, tmp_path, starting="ready", running=f"work {number}") for number in range(2)]
    made.events, made.ends, made.killed = events, {"ready": None}, []
    monkeypatch.setattr(pools_module, "done", lambda call: call in made.ends)
    monkeypatch.setattr(pools_module, "failure", lambda call: made.ends.get(call))
    monkeypatch.setattr(pools_module, "outcome", lambda call: str(made.ends[call] or ""))
    monkeypatch.setattr(pools_module, "spawn", lambda *_, **__: Handle())
    monkeypatch.setattr(pools_module, "place_of", lambda *_: Room())
    monkeypatch.setattr(ray, "wait", lambda calls, **_: ([], calls))  # whatever else is asked goes on
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: made.killed.append(handle))
    return made


def told(pools: ActorPools, call: str = "work 0") -> None:
    """SIGTERM came to the first actor, and it has left."""
    pools.actors[0].running = call
    pools.ends[call] = RayTaskError("run", "a page of text", FARE_WELL)


def numbers(pools: ActorPools) -> list[int]:
    return [actor.number for actor in pools.watch()]


def test_an_actor_that_left_is_started_again_in_a_new_place_and_it_is_no_failure(pools):
    first = pools.actors[0]
    place, handle = first.placement, first.handle
    told(pools)
    assert numbers(pools) == [1]
    assert pools.events == [("left", "actor.0 left by SIGTERM, 12 samples handed on")]
    assert (place.released, pools.killed, first.state) == (True, [handle], "waiting for resources")
    first.placement.is_placed = False
    assert numbers(pools) == [1], "its host is going, and there is no other yet"
    first.placement.is_placed = True
    pools.watch()
    assert (first.placement is place, first.state, first.restarts.total) == (False, "starting", 0)
    assert pools.wanted == {"actors": 2}
    assert len(pools.events) == 1


@pytest.mark.parametrize("ending_since", ["before", "between"])
def test_while_the_run_ends_nobody_is_started_again(pools, ending_since):
    told(pools)
    pools.are_ending = ending_since == "before"
    pools.watch()
    pools.are_ending = True
    for _ in range(2):
        assert numbers(pools) == [1]
    assert pools.actors[0].handle is None
    assert [kind for kind, _ in pools.events] == ["left"]


def leave_again_and_again(pools: ActorPools, times: int) -> None:
    first = pools.actors[0]
    for number in range(times):
        told(pools, f"work {number + 2}")
        pools.watch()  # it left
        pools.watch()  # it starts
        if not first.lost:
            first.starting = "ready"
            pools.watch()  # it works
            assert first.state == "working"


def test_one_that_is_told_to_end_again_and_again_is_given_up_by_name(pools):
    leave_again_and_again(pools, MAX_SIGTERMS)
    first = pools.actors[0]
    assert (first.lost, first.restarts.total, {kind for kind, _ in pools.events}) == ("", 0, {"left"})
    leave_again_and_again(pools, 1)
    why = f"told to end by SIGTERM {MAX_SIGTERMS + 1} times in a row"
    assert first.state == f"lost: given up: {why}"
    assert pools.events[-1] == ("given_up", f"actor.0 is given up: {why}; who sends it? See {first.log}")


def test_a_while_of_work_between_two_of_them_makes_them_count_anew(pools):
    leave_again_and_again(pools, MAX_SIGTERMS)
    first = pools.actors[0]
    first.after_sigterm.working_since_s = time.monotonic() - CALM_S
    leave_again_and_again(pools, MAX_SIGTERMS)
    assert first.lost == ""


def test_one_that_is_told_to_end_while_it_starts_is_started_again_too(pools):
    first = pools.actors[0]
    first.running, first.starting = None, "not ready"
    pools.ends["not ready"] = RayTaskError("start", "a page of text", FARE_WELL)
    assert not first.is_ready
    pools.watch()
    pools.watch()
    assert (first.state, first.restarts.total) == ("starting", 0)
