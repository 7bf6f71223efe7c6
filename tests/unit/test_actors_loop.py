"""The actor loop with a fake engine, buffer and store: leases, samples, evaluation and shutdown."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from leeway.actors import loop
from leeway.actors.engine import Engine
from leeway.actors.engine_core import EngineDead
from leeway.actors.loop import ActorFenced
from leeway.actors.report import EngineReport, EvalRequest
from leeway.actors.sample import MAX_COLUMN_BYTES, kept_columns
from leeway.actors.weights import ActorError
from leeway.buffer.schema import REQUEUED, Trajectory, VersionSpan
from leeway.common.staleness import PolicyVersion
from tests.unit.fake_actor import (
    Clock,
    FakeBuffer,
    FakeEngine,
    FakeStore,
    K,
    half,
    jump,
    make_actor,
    run_to_end,
    until,
    wait_clock,
)
from tests.unit.small_models import tiny_checkpoint
from tests.world.reward_callers import TASK, scorer
from tests.world.run_context import run_context


async def test_each_sample_is_pushed_once_with_its_own_seed_until_the_buffer_drains():
    buffer, engine = FakeBuffer(20), FakeEngine(0.001)
    report = await run_to_end(make_actor(buffer, engine))
    keys = [(one.lease_id, one.sample_index) for one in buffer.pushed]
    assert sorted(keys) == [(lease, index) for lease in range(1, 21) for index in range(K)]
    assert len(set(engine.seeds)) == 20 * K
    assert engine.max_running <= 16
    one = buffer.pushed[0]
    assert one.token_ids.tolist() == [10 + one.prompt_id, 20, 10 + one.prompt_id, 1, 2, 3]
    assert (one.prompt_length, one.reward, one.reward_parts) == (2, 0.5, {"half": 0.5})
    assert report.num_outcomes == {"committed": 20 * K}
    assert (report.num_running, report.num_tokens) == (0, 20 * K * 4)
    assert report.busy_intervals
    assert all(start <= end for start, end in report.busy_intervals)
    assert buffer.closed
    assert engine.stopped


async def test_a_long_answer_is_penalised_in_training_but_not_in_evaluations():
    buffer, engine = FakeBuffer(1), FakeEngine(0.001)
    changes = {"overlong_penalty": {"from": 2, "to": 6}, "correct_at": 0.5}
    actor = make_actor(buffer, engine, task_config=TASK.model_copy(update=changes))
    await actor.start()
    assert (await actor.evaluate(EvalRequest(num_problems=2))).greedy.num_correct == 2
    await actor.run()
    await actor.stop()
    one = buffer.pushed[0]
    assert (one.reward, one.reward_parts) == (0.0, {"half": 0.5, "overlong_penalty": -0.5}), "4 of 2 to 6 tokens"


async def test_the_reported_task_fingerprint_covers_the_teachers_of_prompts():
    for teachers in (b"", bytes([0, 1] * 4)):
        actor = make_actor(FakeBuffer(1), teacher_of_prompt=teachers)
        report = await run_to_end(actor)
        assert report.task_fingerprint == actor._task.facts(teachers).fingerprint


async def test_an_engine_loads_the_serving_model_prepared_on_its_own_host(tmp_path, monkeypatch):
    tiny_checkpoint(tmp_path / "model", tied=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "this-host"))
    loaded = []

    async def start(path, *_, **__):
        loaded.append(path)
        raise EngineDead("no engine here")

    monkeypatch.setattr(Engine, "start", start)
    monkeypatch.setattr(loop, "load_encoded", lambda *_: (SimpleNamespace(rewards=()), None))
    monkeypatch.setattr(loop, "Scorer", lambda *_: scorer(half))
    monkeypatch.setattr(loop, "open_puller", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(loop, "BufferClient", lambda *_, **__: SimpleNamespace(close=lambda: None))
    with pytest.raises(EngineDead):
        await loop.assemble(run_context(tmp_path / "elsewhere", model_path=tmp_path / "model"), 0)
    assert loaded == list((tmp_path / "this-host" / "leeway" / "serving_models").glob("llama-*"))
    assert not (tmp_path / "elsewhere").exists()


async def test_failed_rewards_and_generations_are_reported_with_a_reason_and_not_pushed(monkeypatch):
    tried = []

    def broken(problems, completions):
        tried.extend(completions * (len(completions) == 1))
        raise KeyError("answer")

    buffer = FakeBuffer(1)
    await run_to_end(make_actor(buffer, reward=broken))
    assert len(tried) == 2 * K, "each sample is scored twice in a call of its own"
    assert not buffer.pushed
    assert {reason for _, _, reason in buffer.failed} == {"reward failed: half: KeyError"}
    assert sorted(index for _, [index], _ in buffer.failed) == list(range(K))

    buffer, engine = FakeBuffer(1), FakeEngine()
    engine.error = ValueError("prompt too long")
    await run_to_end(make_actor(buffer, engine))
    assert [reason for _, _, reason in buffer.failed] == ["generation failed: ValueError"] * K

    buffer = FakeBuffer(1)
    monkeypatch.setattr("leeway.actors.sample.GENERATE_TIMEOUT_S", 0.05)
    await run_to_end(make_actor(buffer, FakeEngine(5.0)))
    assert {reason for _, _, reason in buffer.failed} == {"generation failed: took too long"}


async def test_a_reward_that_raises_cancelled_error_fails_its_samples_and_not_the_loop():
    async def broken(problems, completions):
        raise asyncio.CancelledError

    buffer = FakeBuffer(2)
    await run_to_end(make_actor(buffer, reward=broken))
    assert [reason for _, _, reason in buffer.failed] == ["reward failed: half: CancelledError"] * 2 * K
    assert len(buffer.failed) == 2 * K


async def test_an_unexpectedly_cancelled_sample_ends_the_loop():
    engine = FakeEngine()
    engine.error = asyncio.CancelledError()
    with pytest.raises(ActorError, match="of group 101 ended before it was pushed or reported"):
        await run_to_end(make_actor(FakeBuffer(1), engine))


async def test_samples_cancelled_by_an_error_do_not_hide_it():
    buffer = FakeBuffer(2)
    actor = make_actor(buffer, FakeEngine(600))

    async def fail():
        await until(lambda: actor._parts.engine.running == 2 * K)
        raise ZeroDivisionError

    await actor.start()
    actor._follower.run = fail
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(actor.run(), 60)
    await actor.stop()
    assert len(buffer.requeued) == 2


async def test_samples_wait_in_order_for_credit_while_leases_are_renewed():
    buffer = FakeBuffer(2, timeout_s=0.06)
    buffer.credit = False
    actor = make_actor(buffer)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: buffer.renewals >= 3)
    assert not buffer.pushed
    assert actor.report().num_samples == 2 * K
    buffer.credit = True
    await asyncio.wait_for(running, 60)
    await actor.stop()
    assert [(one.lease_id, one.sample_index) for one in buffer.pushed] == [(g, i) for g in (1, 2) for i in range(K)]


async def test_a_dead_engine_ends_the_loop_with_the_error_of_the_engine():
    engine = FakeEngine()
    engine.error = EngineDead("the engine is gone, see its log")
    with pytest.raises(EngineDead, match="see its log"):
        await run_to_end(make_actor(FakeBuffer(1), engine))


async def test_a_fenced_actor_stops_with_an_error_that_names_it():
    buffer = FakeBuffer(3)
    buffer.outcome = "fenced"
    with pytest.raises(ActorFenced, match="actor-0"):
        await run_to_end(make_actor(buffer))


async def test_samples_of_a_lost_lease_are_cancelled_and_not_reported():
    buffer, engine = FakeBuffer(2, timeout_s=0.15), FakeEngine(600)
    buffer.lost = {1}
    running = asyncio.create_task(run_to_end(make_actor(buffer, engine)))
    await until(lambda: engine.cancelled == K and buffer.renewals >= 2)
    engine.finish()
    await running
    assert {one.lease_id for one in buffer.pushed} == {2}
    assert engine.cancelled == K
    assert not buffer.failed


@pytest.mark.parametrize("end", ["stop", "the engine dies"])
async def test_running_samples_are_requeued_with_tokens_and_waiting_ones_without(end):
    buffer, engine = FakeBuffer(2), FakeEngine(600)
    engine.error = None if end == "stop" else EngineDead("its process exited")
    actor = make_actor(buffer, engine, config={"max_running_samples": K + 1})
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: engine.running == K + 1)
    if end == "stop":
        await asyncio.wait_for(actor.stop(), 60)
        await asyncio.wait_for(running, 60)
    else:
        engine.finish()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(running, 60)
        await actor.stop()
    assert not buffer.failed
    assert [
        (lease, indices, goes_on) for lease, indices, _, goes_on in sorted(buffer.requeued, key=lambda x: x[0])
    ] == [(lease, list(range(K)), False) for lease in (1, 2)]
    partials = [row for _, _, rows, _ in buffer.requeued for row in rows]
    assert sorted((row.lease_id, row.sample_index) for row in partials) == [*[(1, i) for i in range(K)], (2, 0)]
    for row in partials:
        assert row.token_ids.tolist() == [10 + row.prompt_id, 20, 10 + row.prompt_id, 1]
        assert (row.finish_reason, row.reward, row.prompt_length, len(row.logprobs)) == (REQUEUED, None, 2, 2)
    assert engine.stopped


async def test_a_sample_resumes_from_its_prefix_once_the_engine_serves_that_version():
    def row(index, tokens, version):
        return Trajectory(
            lease_id=77, attempt=1, group_id=101, sample_index=index, prompt_id=1,
            token_ids=np.array([11, 20, *tokens], np.int32), prompt_length=2,
            logprobs=np.full(len(tokens), -0.25, np.float32), spans=(VersionSpan(version, 0, len(tokens)),),
            reward=None, finish_reason=REQUEUED, started_s=5.0, finished_s=6.0,
        )  # fmt: skip

    old, new = PolicyVersion(0, 0), PolicyVersion(0, 1)
    buffer, engine, store = FakeBuffer(1), FakeEngine(0.01), FakeStore()
    buffer.saved = [row(0, [11, 1], old), row(1, [11], new), row(2, [11, 1, 2, 3], old)]
    actor = make_actor(buffer, engine, store)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: len(buffer.pushed) == 3)
    store.version = new  # only now, the version that generated the first token of sample 1 is published
    await asyncio.wait_for(running, 60)
    report = actor.report()
    await actor.stop()
    pushed = {one.sample_index: one for one in buffer.pushed}
    assert [pushed[i].token_ids.tolist() for i in range(K)] == [[11, 20, 11, 1, 2, 3]] * K
    assert [pushed[i].logprobs.tolist().count(-0.25) for i in range(K)] == [2, 1, 4, 0]
    assert pushed[0].spans == (VersionSpan(old, 0, 4),)
    assert pushed[1].spans == (VersionSpan(new, 0, 4),)
    assert [pushed[i].started_s for i in range(3)] == [5.0] * 3
    assert {one.finish_reason for one in buffer.pushed} == {"stop"}
    assert {one.reward for one in buffer.pushed} == {0.5}
    assert len(engine.seeds) == 3, "sample 2 was already complete and only lacked its reward"
    assert report.num_tokens == 2 + 3 + 4, "the report counts only tokens that this actor generated"


async def test_a_group_with_an_overlong_sample_is_requeued_with_its_unfinished_samples():
    buffer, engine = FakeBuffer(1), FakeEngine(0.01)
    buffer.requeue_at = 2
    report = await run_to_end(make_actor(buffer, engine, config={"max_running_samples": K - 1}))
    [(_, indices, partials, goes_on)] = buffer.requeued
    assert (indices, goes_on) == (list(range(K)), False)
    assert [row.sample_index for row in partials][: K - 1] == list(range(K - 1)), "the last sample waited for a slot"
    assert {row.num_completion_tokens for row in partials} == {2}
    assert not buffer.pushed
    assert report.num_tokens_lost == 0


async def test_an_overlong_sample_stays_if_no_faster_lane_remains():
    buffer, engine = FakeBuffer(2), FakeEngine(600)
    buffer.requeue_at = 2
    actor = make_actor(buffer, engine)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: engine.running == 2 * K)
    buffer.requeue_at = 0
    # a grant sets the value; a grant in flight would overwrite a value set by the test
    await until(lambda: actor._requeue_at == 0)
    engine.finish()
    await asyncio.wait_for(running, 60)
    await actor.stop()
    assert not buffer.requeued
    assert {tuple(row.token_ids[3:].tolist()) for row in buffer.pushed} == {(1, 2, 3)}
    assert len(set(engine.seeds)) == 4 * K, "each part of a sample is generated with its own seed"
    assert len(buffer.pushed) == 2 * K


async def test_partial_rollouts_of_running_samples_are_saved_periodically(monkeypatch):
    monkeypatch.setattr("leeway.actors.sample.PARTIAL_SAVE_INTERVAL_S", 0.01)
    buffer, engine = FakeBuffer(1), FakeEngine(600)
    running = asyncio.create_task(run_to_end(make_actor(buffer, engine)))
    await until(lambda: len(buffer.requeued) > 2)
    engine.finish()
    await running
    assert all(goes_on and len(rows) == K for _, _, rows, goes_on in buffer.requeued)
    assert len(buffer.pushed) == K


async def test_a_sample_without_a_reward_is_requeued_with_all_its_tokens():
    may_score = threading.Event()

    def slow(problems, completions):
        may_score.wait(60)
        return [1.0 for _ in completions]

    buffer = FakeBuffer(1)
    actor = make_actor(buffer, FakeEngine(0.001), reward=slow)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: actor.report().num_samples == K)
    try:
        await asyncio.wait_for(actor.stop(), 60)
        await asyncio.wait_for(running, 60)
    finally:
        may_score.set()
    [(_, indices, rows, _)] = buffer.requeued
    assert (indices, [row.num_completion_tokens for row in rows]) == (list(range(K)), [4] * K)


async def test_shutdown_without_a_buffer_closes_the_store_and_stops_the_engine(monkeypatch):
    for module in ("leeway.actors.loop", "leeway.actors.sample"):
        monkeypatch.setattr(f"{module}.SHUTDOWN_GRACE_S", 1.0)
    monkeypatch.setattr("leeway.actors.loop._CLOSE_S", 0.1)
    buffer, engine, store, gone = FakeBuffer(2), FakeEngine(600), FakeStore(), threading.Event()
    buffer.requeue = lambda *_, **__: Future()
    buffer.close = gone.wait
    actor = make_actor(buffer, engine, store)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: engine.running == 2 * K)
    async with asyncio.timeout(60):
        await actor.stop()
        await running
    assert actor._maker.counts.num_tokens_lost == 2 * K * 2, "the fake engine had generated two tokens per sample"
    gone.set()
    assert store.closed
    assert engine.stopped


async def test_running_samples_are_requeued_even_if_an_update_never_completes(monkeypatch):
    buffer, engine, store = FakeBuffer(2), FakeEngine(600), FakeStore()
    actor = make_actor(buffer, engine, store)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: engine.running == 2 * K)
    engine.may_apply.clear()
    store.version = PolicyVersion(0, 1)
    async with asyncio.timeout(60):
        await engine.applying.wait()
        stopping = asyncio.create_task(actor.stop())
        await until(lambda: actor.drain_result == (2 * K, 0))
        jump(monkeypatch, 2 * loop.SHUTDOWN_GRACE_S)
        await stopping
    assert not running.done(), "the update completed, so the actor did not stop during an update"
    assert sorted(lease for lease, *_ in buffer.requeued) == [1, 2]
    assert [row.num_completion_tokens for _, _, rows, _ in buffer.requeued for row in rows] == [2] * 2 * K
    engine.may_apply.set()
    await asyncio.wait_for(running, 60)


async def test_leases_granted_during_shutdown_are_requeued():
    class SlowBuffer(FakeBuffer):
        """Fake buffer that grants a lease when the test completes the future `late`."""

        def lease(self, *args, **options):
            self.grant, self.late = super().lease(*args, **options), Future()
            return self.late

    buffer = SlowBuffer(2)
    actor = make_actor(buffer)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: buffer.granted == 2)
    stopping = asyncio.create_task(actor.stop())
    await asyncio.sleep(0.05)
    buffer.late.set_result(buffer.grant.result())
    await asyncio.wait_for(asyncio.gather(stopping, running), 60)
    assert buffer.requeued == [(lease, list(range(K)), [], False) for lease in (1, 2)]
    assert actor.drain_result == (2 * K, 0)


async def test_an_evaluation_that_waits_for_a_slot_is_scored(monkeypatch):
    class FullEngine(FakeEngine):
        requested, slot = asyncio.Event(), asyncio.Event()

        async def generate(self, *prompt, **options):
            self.requested.set()
            await self.slot.wait()
            return await super().generate(*prompt, **options)

    engine = FullEngine()
    monkeypatch.setattr("leeway.actors.sample.GENERATE_TIMEOUT_S", 100.0)
    actor = make_actor(FakeBuffer(0), engine, config={"max_running_samples": 1})
    await actor.start()
    evaluation = asyncio.create_task(actor.evaluate(EvalRequest(num_problems=1)))
    await asyncio.wait_for(engine.requested.wait(), 60)
    jump(monkeypatch, 140.0)
    await asyncio.sleep(0.01)  # lets expired timeouts fire
    engine.slot.set()
    result = await asyncio.wait_for(evaluation, 60)
    await actor.stop()
    assert (result.greedy.num_scored, result.sampled.num_scored) == (1, 1)


async def test_an_evaluation_blocks_updates_and_requests_and_scores_its_shard():
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
    assert result.num_problems == 2  # problems 1 and 3, which begin with tokens 11 and 13
    assert (result.greedy.num_correct, result.greedy.num_scored) == (0, 2)
    assert result.greedy == result.sampled
    await asyncio.gather(update, admission)
    assert engine.version == (0, 1)
    late = await actor.evaluate(EvalRequest(5, 0, 2, min_version=PolicyVersion(0, 1)))
    assert (late.version, late.greedy.num_correct, late.greedy.num_scored) == ((0, 1), 3, 3)
    report = actor.report()
    assert report.rewards == {0.0: 4, 1.0: 6}, "two prompts and three prompts, greedy and sampled"
    assert len(report.answers) == 3
    assert all(text.endswith("reward 1.0") for text in report.answers)
    assert report.num_cut in (0, 10)
    with pytest.raises(ValueError, match="the task has 6 held-out problems"):
        await actor.evaluate(EvalRequest(7))
    await actor.stop()


async def test_the_report_names_a_running_evaluation_and_a_pending_reward():
    released, clock, entered = threading.Event(), Clock(), threading.Event()

    def stuck(problems, completions):
        entered.set()
        released.wait(60)
        return [0.5 for _ in completions]

    actor = make_actor(FakeBuffer(1), reward=stuck, clock=clock)
    await actor.start()
    evaluation = asyncio.create_task(actor.evaluate(EvalRequest(num_problems=2)))
    assert await asyncio.to_thread(entered.wait, 60)
    report = actor.report()
    assert (report.waiting, report.waiting_s) == ("evaluating policy 0", 0.0)
    clock.now_s += 12.0
    report = actor.report()
    assert (report.waiting, report.waiting_s) == ("evaluating policy 0, waiting for reward half", 12.0)
    released.set()
    await evaluation
    released.clear()
    entered.clear()
    running = asyncio.create_task(actor.run())
    assert await asyncio.to_thread(entered.wait, 60)
    clock.now_s += 7.0
    report = actor.report()
    assert (report.waiting, report.waiting_s) == ("waiting for reward half", 7.0)
    released.set()
    await asyncio.wait_for(running, 60)
    await actor.stop()


async def test_the_loop_takes_less_than_a_millisecond_of_cpu_time_per_sample():
    num_groups = 500
    actor = make_actor(FakeBuffer(num_groups), FakeEngine(), config={"max_new_tokens": 6})
    started = time.process_time()
    report = await run_to_end(actor)
    micros = (time.process_time() - started) / (num_groups * K) * 1e6
    print(f"{micros:.0f} microseconds of CPU time per sample")
    assert report.num_outcomes == {"committed": num_groups * K}
    assert micros < 900


async def test_a_lease_request_has_the_pool_and_the_speed_of_the_engine():
    buffer, engine = FakeBuffer(2), FakeEngine()
    engine.stats = SimpleNamespace(step_s=0.25, num_steps=0, cache=None, report=EngineReport)
    await run_to_end(make_actor(buffer, engine))
    assert set(buffer.requests) == {("actors", 0.25)}


async def test_no_slot_stays_empty_if_groups_do_not_divide_the_free_slots(monkeypatch):
    class UnevenEngine(FakeEngine):
        """Fake engine that takes ten times as long for one sample of each group, so slots become free one by one."""

        async def generate(self, prompt_token_ids, **options):
            self.seconds = 0.3 if len(self.seeds) % K == 0 else 0.03
            return await super().generate(prompt_token_ids, **options)

    buffer, engine = FakeBuffer(60), UnevenEngine()
    actor = make_actor(buffer, engine, config={"max_running_samples": 2 * K - 1}, clock=wait_clock(monkeypatch))
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: buffer.granted >= 4)
    used = []
    while buffer.granted < 50:
        used.append(engine.running)
        await asyncio.sleep(0.007)
    await asyncio.wait_for(running, 60)
    await actor.stop()
    assert max(used) == 2 * K - 1
    assert sum(used) / len(used) > 0.8 * (2 * K - 1), "leasing whole groups would use about half of the slots"


async def test_no_slot_stays_empty_while_a_lease_is_in_flight(monkeypatch):
    class SlowBuffer(FakeBuffer):
        """Fake buffer that grants a lease after a delay as long as a sample takes."""

        def lease(self, max_groups, lane="", token_s=0.0, *, wants_lengths=False):
            grant, late = super().lease(max_groups), Future()
            asyncio.get_running_loop().call_later(0.04, late.set_result, grant.result())
            return late

    buffer, engine = SlowBuffer(200), FakeEngine(0.04)
    actor = make_actor(buffer, engine, clock=wait_clock(monkeypatch))
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: buffer.granted >= 80)
    used = []
    while buffer.granted < 190:
        used.append(engine.running)
        await asyncio.sleep(0.007)
    await asyncio.wait_for(running, 60)
    await actor.stop()
    assert max(used) == 16
    assert sum(used) / len(used) > 0.7 * 16, "leasing on demand would leave half of the slots empty"


async def test_an_actor_leases_nothing_ahead_if_admission_is_near_its_bound():
    class NearBound(FakeBuffer):
        """Fake buffer that grants a lease after a delay and reports that admission is near its bound."""

        def lease(self, max_groups, lane="", token_s=0.0, *, wants_lengths=False):
            grant, late = super().lease(max_groups).result(), Future()
            near = msgspec.structs.replace(grant, is_near_bound=True)
            asyncio.get_running_loop().call_later(0.02, late.set_result, near)
            return late

    buffer, engine = NearBound(60), FakeEngine(0.02)
    actor = make_actor(buffer, engine, config={"max_running_samples": 2 * K})
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: buffer.granted >= 20)
    num_requests = len(buffer.requests)
    actor._num_departed = 1000  # simulates that 1000 samples ended since the last grant
    await until(lambda: len(buffer.requests) > num_requests + 1)
    assert actor._num_ahead == 0.0
    await asyncio.wait_for(running, 60)
    await actor.stop()


async def test_samples_that_wait_for_a_reward_hold_no_slot_and_are_bounded():
    may_score = threading.Event()

    def slow(problems, completions):
        assert may_score.wait(60)
        return [0.5 for _ in completions]

    buffer, engine = FakeBuffer(40), FakeEngine(0.001)
    actor = make_actor(buffer, engine, reward=slow)
    await actor.start()
    running = asyncio.create_task(actor.run())
    await until(lambda: len(engine.seeds) >= 2 * 16)
    await until(lambda: engine.running == 0)  # all complete samples wait for their rewards
    await asyncio.sleep(0.1)
    assert len(engine.seeds) <= 3 * 16, "at most twice the slots, plus samples that ended while leases were in flight"
    may_score.set()
    await asyncio.wait_for(running, 60)
    await actor.stop()
    assert len(buffer.pushed) == 40 * K


def test_columns_that_are_too_large_are_not_stored_with_each_sample(caplog):
    small = {"question": "q", "answer": 1.5, "tags": ["a", None]}
    assert kept_columns(small) == small
    assert kept_columns({**small, "tests": "x" * MAX_COLUMN_BYTES, "more": "y" * 1000}) == {
        **small,
        "more": "y" * 1000,
    }
    assert "column 'tests' is too large" in caplog.text
