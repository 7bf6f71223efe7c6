"""The ranker with a buffer service in a thread of this process: fits, priors and permissions."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from leeway.actors.tasks import load_task
from leeway.buffer.client import BufferClient
from leeway.buffer.errors import BufferRefused
from leeway.buffer.service import BufferService
from leeway.planning.ranking import FEWEST, Ranker
from tests.unit.made_up_run import DEMO, context, plan
from tests.world.buffer import make_trajectory

NUM_PROMPTS, SEEN, K = 400, 200, 2


class World:
    """Run of the demo task in which problems with a larger first digit have longer completions."""

    def __init__(self, folder):
        keys = {"task.num_train": NUM_PROMPTS, "actors.group_size": K, "learner.groups_per_step": 100}
        keys["buffer.dispatch"] = "longest_first"  # a policy that uses lengths even with one pool
        made = plan(folder, *[word for key, value in keys.items() for word in (f"--{key}", str(value))])
        self.context = context(made)
        self.folder, self.facts = folder / "store", self.context.facts
        self.problems = load_task(self.context.config.task).train
        self.serve()

    def serve(self):
        """Start a buffer service on the stored data."""
        self.stop = threading.Event()
        service = BufferService(self.context.config.buffer, self.facts, self.folder)
        self.address = service.bind()
        self.thread = threading.Thread(target=service.serve, args=(self.stop,), daemon=True)
        self.thread.start()

    def client(self, role, name):
        made = BufferClient(self.address, run_id=self.facts.run_id, role=role, name=name)
        made.connect()
        return made

    def ranker(self):
        return Ranker(replace(self.context, model_path=DEMO.parent / "demo_model", buffer_address=self.address))

    def length(self, prompt):
        return 1 + int(self.problems[prompt].text[0])

    def generate(self, num_groups):
        """Complete `num_groups` groups."""
        learner, actor = self.client("learner", "learner"), self.client("actor", "actor-0")
        learner.begin_incarnation(0, 0).result(30)
        learner.published(0, 0).result(30)
        leases, pushed = actor.lease(num_groups).result(30).leases, []
        for lease in leases:
            for index in lease.sample_indices:
                made = make_trajectory(lease, index, seq=0, num_completion_tokens=self.length(lease.prompt_id))
                pushed.append(actor.push(made))
        # on a busy machine, a late reply can make the actor push a sample twice
        assert {each.result(60).outcome for each in pushed} <= {"committed", "duplicate"}
        learner.close(1.0)
        actor.close(1.0)
        return len(leases)

    def close(self):
        self.stop.set()
        self.thread.join(30)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "run")
    yield made
    made.close()


def test_observed_lengths_predict_others_and_a_restarted_service_gets_them_again(world):
    ranker = world.ranker()
    assert ranker.refit() is None, "no lengths are observed yet"
    assert world.generate(SEEN) == SEEN > FEWEST
    expected = ranker.refit()
    lengths = np.log([world.length(prompt) for prompt in range(NUM_PROMPTS)])
    assert np.corrcoef(expected.means, lengths)[0, 1] > 0.7
    assert ranker.refit() is None, "no lengths were observed since the last fit"
    world.close()
    world.serve()
    client = world.client("ranker", "another")
    reply = client.posteriors().result(30)
    assert (reply.num_seen, reply.is_expecting) == (SEEN, False)
    assert ranker.refit() is not None
    reply = client.posteriors().result(30)
    assert (reply.num_seen, reply.is_expecting) == (SEEN, True)
    client.close(1.0)


def test_a_restarted_service_triggers_one_fit_if_lengths_are_unpredictable(world, monkeypatch):
    ranker, fits = world.ranker(), []
    world.generate(SEEN)
    assert ranker.refit() is not None
    world.close()
    world.serve()
    monkeypatch.setattr("leeway.planning.ranking.fit_prior", lambda *_: fits.append(1))
    assert [ranker.refit() for _ in range(3)] == [None] * 3
    assert len(fits) == 1


def test_an_invalid_prior_is_rejected(world):
    client = world.client("ranker", "another")
    for means in (np.zeros(NUM_PROMPTS + 1, np.float32), np.full(NUM_PROMPTS, np.nan, np.float32)):
        with pytest.raises(BufferRefused, match="prompt ids of this run between 0 and 399"):
            client.set_prior(means, 1.0).result(30)
    reply = client.posteriors().result(30)
    assert not reply.is_expecting
    client.close(1.0)


def test_an_actor_may_not_set_the_prior(world):
    actor = world.client("actor", "actor-0")
    with pytest.raises(BufferRefused, match="ranker"):
        actor.set_prior(np.zeros(1, np.float32), 1.0).result(30)
    actor.close(1.0)
