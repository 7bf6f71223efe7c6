"""One actor end to end: real vLLM engine, real buffer service, real weight store, the demo's model and task."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from actors.config import ActorsConfig
from actors.evaluate import EvalRequest
from actors.loop import ActorLoop
from actors.spec import ActorSpec
from actors.tasks.config import ReasoningGymTask
from buffer.client import BufferClient
from buffer.config import BufferConfig, RunFacts
from buffer.service import BufferService
from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.publisher import Publisher
from weight_sync.serving import check_model_folder, prepare_serving_model
from weight_sync.sinks import FolderSink

# importing vLLM warns about other libraries' use of each other
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
K = 4
GROUPS_PER_STEP = 4
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}


@pytest.fixture
def spec(tmp_path):
    config = ActorsConfig(group_size=K, max_prompt_tokens=8, max_new_tokens=8, max_running_samples=16)
    return ActorSpec(
        name="actor-0",
        index=0,
        run_id="e2e",
        seed=3,
        serving_model_path=prepare_serving_model(MODEL, tmp_path / "serving"),
        tokenizer_path=MODEL,
        weights_folder=tmp_path / "weights",
        weights_address="",
        buffer_addresses=(),
        pool="actors",
        config=config,
        task=ReasoningGymTask(
            type="reasoning_gym", name="chain_sum", params=SUMS, template="{metadata[expression]:compact}=",
            num_train=64, num_heldout=32,
        ),
        weight_sync=WeightSyncConfig(max_lag=2),
        buffer=BufferConfig(),
    )  # fmt: skip


@pytest.fixture
def service(spec, tmp_path):
    facts = RunFacts(
        run_id=spec.run_id,
        seed=spec.seed,
        num_prompts=spec.task.num_train,
        group_size=K,
        groups_per_step=GROUPS_PER_STEP,
        vocab_size=check_model_folder(MODEL).vocab_size,
        max_tokens=spec.config.max_model_tokens,
        staleness=spec.weight_sync.staleness(),
    )
    service = BufferService(spec.buffer, facts, tmp_path / "buffer")
    address = service.bind()
    stop = threading.Event()
    thread = threading.Thread(target=service.serve, args=(stop,))
    thread.start()
    yield address
    stop.set()
    thread.join(10)


async def reply(future):
    return await asyncio.wrap_future(future)


async def drawn(learner, step, version):
    draw = await asyncio.wait_for(reply(learner.draw(step, version, 0, GROUPS_PER_STEP, 20.0)), 30)
    assert draw.ready, draw.waiting_for
    return draw.trajectories


async def test_an_actor_feeds_the_learner_follows_its_weights_and_the_ledger_closes(spec, service):
    spec = type(spec)(**{**{name: getattr(spec, name) for name in spec.__slots__}, "buffer_addresses": (service,)})
    learner = BufferClient(service, run_id=spec.run_id, role="learner", name="learner", config=spec.buffer)
    learner.connect()
    await reply(learner.begin_incarnation(0, 0))
    await reply(learner.published(0, 0))
    actor = ActorLoop(spec)
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

    publisher = Publisher(FolderSink(spec.weights_folder), 0, 1, ["float32"], keep_versions=3)
    tensors = {name: tensor * 0 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    publisher.publish(PolicyVersion(0, 1), tensors)
    await asyncio.to_thread(publisher.close)
    async with asyncio.timeout(20):
        while actor.report().version != (0, 1):
            await asyncio.sleep(0.01)
    # what is leased from here on, for step 3, is generated under the new weights
    await reply(learner.step_finished(1, 1))
    await reply(learner.published(0, 1))
    await drawn(learner, 2, 1)
    await reply(learner.step_finished(2, 2))
    late = await drawn(learner, 3, 2)
    assert {one.oldest_version for one in late} == {PolicyVersion(0, 1)}
    # a model of zeros is uniform over its vocabulary, which only the new weights can be
    uniform = -np.log(check_model_folder(MODEL).vocab_size)
    assert np.concatenate([one.logprobs for one in late]) == pytest.approx(uniform, abs=1e-3)

    after = await actor.evaluate(EvalRequest(num_problems=32, min_version=PolicyVersion(0, 1)))
    assert (before.version, after.version) == ((0, 0), (0, 1))
    assert before.greedy.num_scored == after.greedy.num_scored == 32
    assert before.greedy.num_correct > after.greedy.num_correct == 0

    await reply(learner.drain())
    await asyncio.wait_for(running, 30)
    report = actor.report()
    status = await reply(learner.status())
    await actor.stop()
    learner.close()
    assert status.ledger["gap"] == 0
    assert status.ledger["in_flight"] == 0
    assert status.ledger["committed"] == report.num_outcomes["committed"] == report.num_samples
    assert (report.num_updates, report.num_failed) == (1, {})
