"""The actor's loop, with three things faked.

FakeEngine answers with the tokens it is told to after a given time and serves whatever it was told
to apply; FakeBuffer grants leases from a list and acknowledges at once, in this process; FakeStore
names the newest version. Tasks, scoring, the weight follower and the loop are the real ones.
"""

import asyncio
import contextlib
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actors.config import ActorsConfig
from actors.engine import EngineDead, UpdateRefused
from actors.evaluate import EvalRequest
from actors.loop import ActorFenced, ActorLoop
from actors.spec import ActorSpec, Parts
from actors.tasks import Problem, RewardFunction, Task
from actors.tasks.config import ReasoningGymTask
from actors.weights import PolicyTimeout
from buffer.config import BufferConfig
from buffer.protocol import Lease, LeaseGrant, RenewReply, RowResult
from buffer.trajectory import VersionSpan
from weight_sync.config import WeightSyncConfig
from weight_sync.manifest import WeightsCorrupt
from weight_sync.staleness import PolicyVersion

K = 4


class FakeEngine:
    """Generates four tokens per request, one of them the prompt's first."""

    def __init__(self, seconds=0.0):
        self.version = PolicyVersion(0, 0)
        self.seconds = seconds
        self.started_at = []
        self.seeds = []
        self.cancelled = 0
        self.running = 0
        self.most_running = 0
        self.error = None
        self.stopped = False
        self.refuses = set()

    async def generate(self, prompt_token_ids, *, temperature=None, max_new_tokens=None, seed=None):
        self.started_at.append(self.version)
        self.seeds.append(seed)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        tokens = np.array([prompt_token_ids[0], 1, 2, 3], dtype=np.int32)
        spans = (VersionSpan(self.version, 0, 4),)
        return SimpleNamespace(
            token_ids=tokens, logprobs=np.full(4, -0.5, np.float32), spans=spans, finish_reason="stop"
        )

    async def apply(self, staged, kv_cache, *, timeout_s):
        await asyncio.sleep(0.01)
        if staged.version in self.refuses:
            raise UpdateRefused(f"{staged.version}: another model")
        self.version = staged.version
        return SimpleNamespace(pause_s=0.01, load_s=0.005)

    async def stop(self):
        self.stopped = True


class FakeStore:
    """A puller whose newest version a test sets; `corrupt` versions cannot be fetched."""

    def __init__(self):
        self.version = PolicyVersion(0, 0)
        self.corrupt = set()

    def newest(self):
        return self.version

    def fetch(self, version):
        if version in self.corrupt:
            raise WeightsCorrupt(f"{version}: a flipped byte")
        return FakeStaged(version)


class FakeStaged(contextlib.AbstractContextManager):
    def __init__(self, version):
        self.version = version

    def __exit__(self, *_):
        return None


class FakeBuffer:
    """Grants `num_groups` leases and then drains; remembers what it was told."""

    def __init__(self, num_groups, min_version=0, timeout_s=60.0):
        self.num_groups = num_groups
        self.min_version = min_version
        self.timeout_s = timeout_s
        self.newest = (0, 0)
        self.granted = 0
        self.pushed = []
        self.given_up = []
        self.renewals = 0
        self.lose = set()
        self.outcome = "committed"
        self.closed = False

    def lease(self, max_groups):
        leases = []
        while self.granted < self.num_groups and len(leases) < max_groups:
            self.granted += 1
            lease = Lease(self.granted, 1, 100 + self.granted, self.granted % 8, list(range(K)), self.min_version,
                          self.timeout_s)  # fmt: skip
            leases.append(lease)
        return done(LeaseGrant(leases, self.newest, draining=self.granted == self.num_groups))

    def push(self, trajectory):
        self.pushed.append(trajectory)
        return done(RowResult(len(self.pushed), self.outcome))

    def give_up(self, lease, sample_indices, reason):
        self.given_up.append((lease.lease_id, sample_indices, reason))
        return done(None)

    def renew(self, lease_ids):
        self.renewals += 1
        return done(RenewReply([one for one in lease_ids if one in self.lose]))

    def close(self):
        self.closed = True


class Words:
    """A decoder: the numbers as text."""

    def decode(self, token_ids):
        return " ".join(map(str, token_ids))


def done(result):
    future = Future()
    future.set_result(result)
    return future


def half(problems, completions):
    return [0.5 for _ in completions]


def make_actor(buffer, engine=None, store=None, reward=half, config=None, weight_sync=None):
    problems = [Problem(f"q{i}", f"q{i}", {"question": f"q{i}"}, {}, [10 + i, 20]) for i in range(8)]
    task = Task(problems, problems[:6], (RewardFunction("half", reward),))
    parts = Parts(task, Words(), engine or FakeEngine(), store or FakeStore(), buffer)
    spec = ActorSpec(
        "actor-0", 0, "run", 7, Path("m"), Path("m"), Path("w"), "tcp://fake",
        ActorsConfig(group_size=K, max_running_samples=16, **(config or {})),
        ReasoningGymTask(type="reasoning_gym", name="chain_sum"),
        WeightSyncConfig(poll_interval_s=0.005, **(weight_sync or {})), BufferConfig(),
    )  # fmt: skip

    async def assemble(_):
        return parts

    return ActorLoop(spec, assemble)


async def run_to_end(actor, timeout_s=20):
    await actor.start()
    try:
        async with asyncio.timeout(timeout_s):
            await actor.run()
        return actor.report()
    finally:
        await actor.stop()


async def test_every_leased_sample_is_pushed_once_with_its_own_seed_and_the_loop_ends_when_drained():
    buffer, engine = FakeBuffer(20), FakeEngine(0.001)
    report = await run_to_end(make_actor(buffer, engine))
    keys = [(one.lease_id, one.sample_index) for one in buffer.pushed]
    assert sorted(keys) == [(lease, index) for lease in range(1, 21) for index in range(K)]
    assert len(set(engine.seeds)) == 20 * K
    assert engine.most_running <= 16
    one = buffer.pushed[0]
    assert one.token_ids.tolist() == [10 + one.prompt_id, 20, 10 + one.prompt_id, 1, 2, 3]
    assert (one.prompt_length, one.reward, one.reward_parts) == (2, 0.5, {"half": 0.5})
    assert report.num_outcomes == {"committed": 20 * K}
    assert (report.num_running, report.num_tokens) == (0, 20 * K * 4)
    assert report.busy_intervals
    assert all(start <= end for start, end in report.busy_intervals)
    assert buffer.closed
    assert engine.stopped


async def test_a_failed_reward_or_generation_gives_the_sample_up_with_its_reason_and_pushes_no_zero():
    def broken(problems, completions):
        raise KeyError("answer")

    buffer = FakeBuffer(1)
    await run_to_end(make_actor(buffer, reward=broken))
    assert not buffer.pushed
    assert {reason for _, _, reason in buffer.given_up} == {"reward failed: half: KeyError"}
    assert sorted(index for _, [index], _ in buffer.given_up) == list(range(K))

    buffer, engine = FakeBuffer(1), FakeEngine()
    engine.error = ValueError("prompt too long")
    report = await run_to_end(make_actor(buffer, engine))
    assert report.num_failed == {"generation failed: ValueError": K}

    buffer = FakeBuffer(1)
    await run_to_end(make_actor(buffer, FakeEngine(5.0), config={"generate_timeout_s": 0.05}))
    assert {reason for _, _, reason in buffer.given_up} == {"generation failed: took too long"}


async def test_a_dead_engine_ends_the_loop_with_its_own_error():
    engine = FakeEngine()
    engine.error = EngineDead("the engine is gone, see its log")
    with pytest.raises(EngineDead, match="see its log"):
        await run_to_end(make_actor(FakeBuffer(1), engine))


async def test_a_fenced_actor_stops_and_says_who_took_its_name():
    buffer = FakeBuffer(3)
    buffer.outcome = "fenced"
    with pytest.raises(ActorFenced, match="actor-0"):
        await run_to_end(make_actor(buffer))


async def test_a_lost_lease_is_cancelled_and_neither_pushed_nor_given_up():
    buffer, engine = FakeBuffer(2, timeout_s=0.15), FakeEngine(0.4)
    buffer.lose = {1}
    report = await run_to_end(make_actor(buffer, engine))
    assert buffer.renewals >= 2
    assert {one.lease_id for one in buffer.pushed} == {2}
    assert engine.cancelled == K
    assert not buffer.given_up
    assert report.num_leases_lost == 1


async def test_stopping_hands_back_what_is_leased():
    buffer, engine = FakeBuffer(2), FakeEngine(60)
    actor = make_actor(buffer, engine)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0.05)
    await asyncio.wait_for(actor.stop(), 5)
    await asyncio.wait_for(running, 5)
    assert sorted(buffer.given_up) == [(lease, list(range(K)), "actor stopped") for lease in (1, 2)]
    assert engine.stopped


async def test_a_request_waits_for_the_version_that_its_lease_demands():
    buffer, engine, store = FakeBuffer(1, min_version=3), FakeEngine(), FakeStore()
    actor = make_actor(buffer, engine, store)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await asyncio.sleep(0.05)
    assert not engine.started_at
    store.version = PolicyVersion(0, 3)
    await asyncio.wait_for(running, 5)
    assert set(engine.started_at) == {PolicyVersion(0, 3)}
    assert actor.report().num_updates == 1
    await actor.stop()


async def test_an_actor_too_far_behind_pulls_first_even_after_a_learner_restart():
    for served, newest in (((0, 0), (0, 2)), ((0, 9), (1, 4))):
        buffer, engine, store = FakeBuffer(1), FakeEngine(), FakeStore()
        engine.version, buffer.newest, store.version = PolicyVersion(*served), newest, PolicyVersion(*served)
        actor = make_actor(buffer, engine, store)
        await actor.start()
        running = asyncio.create_task(actor.run())
        await asyncio.sleep(0.05)
        assert not engine.started_at
        assert actor.report().waiting == f"waiting for policy {newest[0]}.{newest[1]}"
        store.version = PolicyVersion(*newest)
        await asyncio.wait_for(running, 5)
        assert set(engine.started_at) == {PolicyVersion(*newest)}
        await actor.stop()


async def test_a_version_that_never_comes_is_an_error_that_names_it():
    actor = make_actor(FakeBuffer(1, min_version=9), weight_sync={"update_timeout_s": 0.05})
    with pytest.raises(PolicyTimeout, match=r"version 9.*serves 0\.0"):
        await run_to_end(actor)


async def test_corrupt_weights_are_passed_over_and_the_next_version_is_taken():
    buffer, engine, store = FakeBuffer(0), FakeEngine(), FakeStore()
    store.corrupt, engine.refuses = {PolicyVersion(0, 1)}, {PolicyVersion(0, 2)}
    store.version = PolicyVersion(0, 1)
    actor = make_actor(buffer, engine, store)
    await actor.start()
    store.version = PolicyVersion(0, 2)
    await actor._follower.update()
    assert engine.version == (0, 0)
    assert actor.report().num_updates == 0
    store.version = PolicyVersion(0, 3)
    await actor._follower.catch_up(PolicyVersion(0, 3))
    assert engine.version == (0, 3)
    await actor.stop()


async def test_an_update_is_finished_even_when_the_loop_ends_in_its_middle():
    engine, store = FakeEngine(), FakeStore()
    actor = make_actor(FakeBuffer(0), engine, store)
    await actor.start()
    store.version = PolicyVersion(0, 1)
    update = asyncio.create_task(actor._follower.update())
    await asyncio.sleep(0.005)
    update.cancel()
    await asyncio.wait({update})
    assert engine.version == (0, 1)
    await actor.stop()


async def test_an_evaluation_holds_updates_and_training_requests_and_counts_its_shard():
    def even_prompt(problems, completions):
        return [float(int(text.split()[0]) % 2 == 0) for text in completions]

    buffer, engine, store = FakeBuffer(0), FakeEngine(0.03), FakeStore()
    actor = make_actor(buffer, engine, store, reward=even_prompt)
    await actor.start()
    evaluation = asyncio.create_task(actor.evaluate(EvalRequest(num_problems=5, shard=1, num_shards=2)))
    await asyncio.sleep(0.01)
    store.version = PolicyVersion(0, 1)
    update = asyncio.create_task(actor._follower.update())
    admission = asyncio.create_task(actor._follower.admit(0))
    result = await evaluation
    assert set(engine.started_at) == {PolicyVersion(0, 0)}
    assert result.version == (0, 0)
    assert result.num_problems == 2  # problems 1 and 3 of 0..4, whose first tokens are 11 and 13
    assert (result.greedy.num_correct, result.greedy.num_scored) == (0, 2)
    assert result.greedy == result.sampled
    await asyncio.gather(update, admission)
    assert engine.version == (0, 1)
    late = await actor.evaluate(EvalRequest(5, 0, 2, min_version=PolicyVersion(0, 1)))
    assert (late.version, late.greedy.num_correct, late.greedy.num_scored) == ((0, 1), 3, 3)
    with pytest.raises(ValueError, match="the task holds 6 out"):
        await actor.evaluate(EvalRequest(7))
    await actor.stop()


async def test_the_loop_costs_well_under_a_millisecond_of_processor_time_per_sample():
    num_groups = 500
    actor = make_actor(FakeBuffer(num_groups), FakeEngine(), config={"max_new_tokens": 6})
    started = time.process_time()
    report = await run_to_end(actor)
    micros = (time.process_time() - started) / (num_groups * K) * 1e6
    print(f"{micros:.0f} microseconds of processor time per sample")
    assert report.num_outcomes == {"committed": num_groups * K}
    assert micros < 900
