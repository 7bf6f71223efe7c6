"""One actor end to end: real vLLM engine, buffer service and weight store, with the demo's model and task."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from leeway.actors.config import ActorsConfig
from leeway.actors.loop import ActorLoop
from leeway.actors.report import EvalRequest
from leeway.actors.tasks.config import ReasoningGymTask
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.service import BufferService
from leeway.common.hf_folder import check_model_folder
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.store import WeightStore
from tests.trajectories import decode
from tests.world.run_context import run_context, run_facts
from tests.world.serving import serving

# vLLM's imports warn about other libraries
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
K = 4
GROUPS_PER_STEP = 4
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


@pytest.fixture
def context(tmp_path):
    """Context of a run without a learner, with its buffer service running."""
    actors = ActorsConfig(group_size=K, max_prompt_tokens=8, max_new_tokens=8, max_running_samples=16)
    task = ReasoningGymTask(
        type="reasoning_gym", name="chain_sum", params=SUMS, template="{metadata[expression]:compact}=",
        num_train=64, num_heldout=32,
    )  # fmt: skip
    facts = run_facts(
        run_id="e2e",
        seed=3,
        num_prompts=task.num_train,
        group_size=K,
        groups_per_step=GROUPS_PER_STEP,
        vocab_size=check_model_folder(MODEL).vocab_size,
        max_tokens=actors.max_model_tokens,
        max_lag=2,
    )
    with serving(BufferService(BufferConfig(), facts, tmp_path / "buffer")) as address:
        yield run_context(
            tmp_path,
            facts,
            model_path=MODEL,
            buffer_address=address,
            actors=actors,
            task=task,
            weight_sync=WeightSyncConfig(max_lag=2),
        )


async def reply(future):
    return await asyncio.wrap_future(future)


async def drawn(learner, step, version):
    draw = await asyncio.wait_for(reply(learner.draw(step, version, 0, GROUPS_PER_STEP, 100.0)), 120)
    assert draw.ready, draw.waiting_for
    return decode(draw.body)


@pytest.mark.full  # test_life_of_a_run.py covers actors in their own processes
async def test_an_actor_feeds_the_learner_follows_its_weights_and_the_ledger_balances(context):
    address = context.buffer_address
    learner = BufferClient(address, run_id="e2e", role="learner", name="learner")
    learner.connect()
    await reply(learner.begin_incarnation(0, 0))
    await reply(learner.published(0, 0))
    actor = ActorLoop(context, 0, "actors")
    await actor.start()
    before = await actor.evaluate(EvalRequest(num_problems=32))
    running = asyncio.create_task(actor.run())

    first = await drawn(learner, 1, 0)
    assert len(first) == GROUPS_PER_STEP * K
    for one in first:
        assert one.reward in (0.0, 1.0) or 0.0 < one.reward < 1.0
        assert one.columns["metadata"]["expression"].replace(" ", "")
        assert [span.version for span in one.spans] == [PolicyVersion(0, 0)]
        assert one.spans[-1].end == one.num_completion_tokens == len(one.logprobs)

    publisher = Publisher(WeightStore(context.weights_folder), 0, 1, ["float32"], keep_versions=3)
    tensors = {name: tensor * 0 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    publisher.publish(PolicyVersion(0, 1), tensors)
    await asyncio.to_thread(publisher.close)
    async with asyncio.timeout(120):
        while actor.report().version != (0, 1):
            await asyncio.sleep(0.01)
    # samples that are leased after this line, for step 3, are generated with the new weights
    await reply(learner.step_finished(1, 1))
    await reply(learner.published(0, 1))
    await drawn(learner, 2, 1)
    await reply(learner.step_finished(2, 2))
    late = await drawn(learner, 3, 2)
    assert {one.spans[0].version for one in late} == {PolicyVersion(0, 1)}
    # the new weights are all zeros, so the model samples uniformly from its vocabulary
    uniform = -np.log(check_model_folder(MODEL).vocab_size)
    assert np.concatenate([one.logprobs for one in late]) == pytest.approx(uniform, abs=1e-3)

    after = await actor.evaluate(EvalRequest(num_problems=32, min_version=PolicyVersion(0, 1)))
    assert (before.version, after.version) == ((0, 0), (0, 1))
    assert before.greedy.num_scored == after.greedy.num_scored == 32
    assert before.greedy.num_correct > after.greedy.num_correct == 0

    # the actor stops while it generates samples, and the next lease has the tokens of these samples
    await reply(learner.step_finished(3, 2, skipped=True))  # makes room for more groups
    engine = actor._parts.engine
    async with asyncio.timeout(120):
        while not any(engine.so_far(key) for key in list(engine._running)):
            await asyncio.sleep(0)
    await actor.stop()
    await asyncio.wait_for(running, 120)
    counts, status = actor._maker.counts, await reply(learner.status())
    ledger = status.ledger
    assert (ledger["gap"], ledger["in_flight"], ledger["failed"]) == (0, 0, 0)
    assert ledger["requeued"] == counts.num_requeued > 0
    assert ledger["committed"] == counts.outcomes["committed"]
    assert counts.num_tokens_lost == 0
    heir = BufferClient(address, run_id="e2e", role="actor", name="heir")
    await asyncio.to_thread(heir.connect)
    granted = await reply(heir.lease(GROUPS_PER_STEP))
    prefixes = granted.prefixes()
    assert prefixes
    for (lease_id, index), prefix in prefixes.items():
        assert index in next(lease.sample_indices for lease in granted.leases if lease.lease_id == lease_id)
        assert prefix.newest == PolicyVersion(0, 1)
        assert prefix.logprobs == pytest.approx(uniform, abs=1e-3)
        assert 1 <= len(prefix.token_ids) == prefix.spans[-1].end <= 8
    await asyncio.to_thread(heir.close, 0.5)

    launch = BufferClient(address, run_id="e2e", role="launch", name="launch")
    launch.connect()
    await reply(launch.drain())
    launch.close()
    assert (await reply(learner.status())).draining
    learner.close()
