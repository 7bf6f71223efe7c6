"""SIGTERM to an actor: the shutdown of its process and the reaction of the supervisor."""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayTaskError

from leeway.actors.engine_core import EngineDead
from leeway.launch.checks import check
from leeway.launch.config import load_config
from leeway.launch.processes import actor_pools as pools_module
from leeway.launch.processes import actor_role as role_module
from leeway.launch.processes.actor_pools import MAX_SIGTERMS, SIGTERM_RESET_S, ActorPools
from leeway.launch.processes.actor_role import ActorRole, Terminated
from tests.unit.fake_actor import FakeBuffer, FakeEngine, K, jump, make_actor, until
from tests.unit.fake_actor_process import Handle, Room, worker

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"
TERMINATED = Terminated(12, 0)


# --- the process ----------------------------------------------------------------------------------------


class RoleHere(ActorRole):
    """An actor's role in the test process, with a given loop; `sigterm` replaces the signal."""

    def __init__(self, loop, monkeypatch) -> None:
        self.exited = asyncio.Event()
        monkeypatch.setattr("leeway.actors.loop.ActorLoop", lambda *_: loop)
        monkeypatch.setattr(ActorRole, "_await_sigterm", lambda _: None)
        monkeypatch.setattr(role_module.os, "_exit", lambda status: self.exited.set())
        monkeypatch.setattr(role_module, "_REPLY_GRACE_S", 0.0)

    def sigterm(self) -> None:
        self._start_shutdown()


async def running(monkeypatch, engine):
    """Return a role whose engine is full with two groups, the role's fake buffer, and the pending `run` call."""
    buffer = FakeBuffer(2)
    role = RoleHere(make_actor(buffer, engine), monkeypatch)
    await role.start(None, 0, "actors")
    work = asyncio.create_task(role.run())
    await until(lambda: engine.running == 2 * K)
    return role, buffer, work


async def test_on_sigterm_samples_are_requeued_before_calls_end_and_the_process_exits(monkeypatch):
    monkeypatch.setattr("leeway.actors.loop._LEASE_POLL_S", (0.0, 0.0))  # every iteration requests leases
    engine, num_leases = FakeEngine(600), []
    role, buffer, work = await running(monkeypatch, engine)

    def requeue(*left, **options):
        num_leases.append(len(buffer.requests))
        return FakeBuffer.requeue(buffer, *left, **options)

    buffer.requeue = requeue
    role.sigterm()
    for call in (work, role.run(), role.evaluate(None)):
        with pytest.raises(Terminated, match=f"^exited on SIGTERM, {2 * K} samples requeued$"):
            await asyncio.wait_for(call, 60)
    assert sorted((lease, indices) for lease, indices, _, _ in buffer.requeued) == [(n, list(range(K))) for n in (1, 2)]
    assert all(len(rows) == K for _, _, rows, _ in buffer.requeued), "samples are requeued with their tokens"
    assert num_leases == [len(buffer.requests)] * 2, "no lease during shutdown"
    assert (buffer.closed, engine.stopped) == (True, True)
    await asyncio.wait_for(role.exited.wait(), 60)


@pytest.mark.parametrize("is_stopped_first", [True, False])
async def test_a_concurrent_stop_returns_after_all_samples_are_requeued(monkeypatch, is_stopped_first):
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
    assert len(buffer.requeued) == 2, "groups are lost if the process ends first"
    with pytest.raises(Terminated):
        await work


async def test_an_engine_that_dies_of_the_same_signal_is_no_failure(monkeypatch):
    engine = FakeEngine(600)
    role, buffer, work = await running(monkeypatch, engine)
    engine.error = EngineDead("its process exited")
    for _, _, end in engine.requests.values():
        end.set()
    role.sigterm()
    with pytest.raises(Terminated, match=f"{2 * K} samples requeued$"):
        await asyncio.wait_for(work, 60)
    assert len(buffer.requeued) == 2


async def test_an_unresponsive_buffer_delays_the_exit_by_the_grace_period_at_most(monkeypatch):
    monkeypatch.setattr("leeway.actors.sample.SHUTDOWN_GRACE_S", 1.0)
    role, buffer, work = await running(monkeypatch, FakeEngine(600))
    buffer.requeue = lambda *_, **__: Future()
    role.sigterm()
    with pytest.raises(Terminated, match=rf"^exited on SIGTERM, 0 samples requeued, {4 * K} tokens lost$"):
        await asyncio.wait_for(work, 60)


async def test_samples_that_do_not_end_in_time_are_requeued(monkeypatch):
    for module in ("leeway.actors.sample", "leeway.actors.loop", "leeway.launch.processes.actor_role"):
        monkeypatch.setattr(f"{module}.SHUTDOWN_GRACE_S", 200.0)
    engine, interrupted = FakeEngine(600), []
    role, buffer, work = await running(monkeypatch, engine)

    async def interrupt(keys):
        interrupted.append(keys)

    engine.interrupt = interrupt
    role.sigterm()
    await until(lambda: len(interrupted) == 2)
    jump(monkeypatch, 140.0)
    with pytest.raises(Terminated, match=f"^exited on SIGTERM, {2 * K} samples requeued$"):
        await asyncio.wait_for(work, 60)
    assert [len(rows) for _, _, rows, _ in buffer.requeued] == [K, K], "samples are requeued with their tokens"


async def test_requeued_samples_are_reported_if_the_engine_fails_to_stop(monkeypatch):
    engine = FakeEngine(600)
    role, _, work = await running(monkeypatch, engine)

    async def stop() -> None:
        raise TimeoutError

    engine.stop = stop
    role.sigterm()
    with pytest.raises(Terminated, match=f"^exited on SIGTERM, {2 * K} samples requeued$"):
        await asyncio.wait_for(work, 60)


async def test_the_process_exits_if_its_shutdown_hangs(monkeypatch):
    monkeypatch.setattr(role_module, "SHUTDOWN_GRACE_S", 0.05)
    role, _, work = await running(monkeypatch, FakeEngine(600))
    role._loop.stop = lambda: asyncio.sleep(600)
    role.sigterm()
    with pytest.raises(Terminated, match="0 samples requeued"):
        await asyncio.wait_for(work, 60)
    await asyncio.wait_for(role.exited.wait(), 60)


async def test_sigterm_during_the_start_ends_the_process(monkeypatch):
    actor = make_actor(FakeBuffer(1))
    actor._assemble = lambda *_: asyncio.sleep(600)
    role = RoleHere(actor, monkeypatch)
    starting = asyncio.create_task(role.start(None, 0, "actors"))
    await until(lambda: hasattr(role, "_terminated"))
    role.sigterm()
    with pytest.raises(Terminated, match=r"^exited on SIGTERM, 0 samples requeued$"):
        await asyncio.wait_for(starting, 60)
    await asyncio.wait_for(role.exited.wait(), 60)


# --- the supervisor -------------------------------------------------------------------------------------


@pytest.fixture
def pools(tmp_path, monkeypatch):
    """Pools with two working actors; `ends` maps each ended call to its failure."""
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
    monkeypatch.setattr(ray, "wait", lambda calls, **_: ([], calls))  # other calls stay pending
    monkeypatch.setattr(ray, "kill", lambda handle, no_restart: made.killed.append(handle))
    return made


def end_by_sigterm(pools: ActorPools, call: str = "work 0") -> None:
    """End the first actor by SIGTERM."""
    pools.actors[0].running = call
    pools.ends[call] = RayTaskError("run", "a page of text", TERMINATED)


def numbers(pools: ActorPools) -> list[int]:
    return [actor.number for actor in pools.watch()]


def test_an_actor_ended_by_sigterm_restarts_in_a_new_place_without_a_failure(pools):
    first = pools.actors[0]
    place, handle = first.placement, first.handle
    end_by_sigterm(pools)
    assert numbers(pools) == [1]
    assert pools.events == [("left", "actor.0 exited on SIGTERM, 12 samples requeued")]
    assert (place.released, pools.killed, first.state) == (True, [handle], "waiting for resources")
    first.placement.is_placed = False
    assert numbers(pools) == [1], "no other host is available yet"
    first.placement.is_placed = True
    pools.watch()
    assert (first.placement is place, first.state, first.restarts.total) == (False, "starting", 0)
    assert pools.desired == {"actors": 2}
    assert len(pools.events) == 1


@pytest.mark.parametrize("ending_since", ["before", "between"])
def test_no_actor_is_restarted_while_the_run_ends(pools, ending_since):
    end_by_sigterm(pools)
    pools.stop_requested = ending_since == "before"
    pools.watch()
    pools.stop_requested = True
    for _ in range(2):
        assert numbers(pools) == [1]
    assert pools.actors[0].handle is None
    assert [kind for kind, _ in pools.events] == ["left"]


def end_repeatedly(pools: ActorPools, times: int) -> None:
    first = pools.actors[0]
    for number in range(times):
        end_by_sigterm(pools, f"work {number + 2}")
        pools.watch()  # the actor has exited
        pools.watch()  # its next process starts
        if not first.lost:
            first.starting = "ready"
            pools.watch()  # the next process works
            assert first.state == "working"


def test_an_actor_that_repeatedly_receives_sigterm_is_given_up(pools):
    end_repeatedly(pools, MAX_SIGTERMS)
    first = pools.actors[0]
    assert (first.lost, first.restarts.total, {kind for kind, _ in pools.events}) == ("", 0, {"left"})
    end_repeatedly(pools, 1)
    why = f"received SIGTERM {MAX_SIGTERMS + 1} times in a row"
    assert first.state == f"lost: given up: {why}"
    assert pools.events[-1] == ("given_up", f"actor.0 is given up: {why}: find the sender of SIGTERM; see {first.log}")


def test_a_period_of_work_resets_the_count_of_sigterms(pools):
    end_repeatedly(pools, MAX_SIGTERMS)
    first = pools.actors[0]
    first.after_sigterm.working_since_s = time.monotonic() - SIGTERM_RESET_S
    end_repeatedly(pools, MAX_SIGTERMS)
    assert first.lost == ""


def test_an_actor_that_receives_sigterm_during_its_start_is_restarted(pools):
    first = pools.actors[0]
    first.running, first.starting = None, "not ready"
    pools.ends["not ready"] = RayTaskError("start", "a page of text", TERMINATED)
    assert not first.is_ready
    pools.watch()
    pools.watch()
    assert (first.state, first.restarts.total) == ("starting", 0)
