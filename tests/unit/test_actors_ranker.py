"""The ranker with a buffer service in a thread of this process: what it asks, learns and says."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from actors.tasks import load_task
from buffer.client import BufferClient
from buffer.errors import BufferRefused
from buffer.service import BufferService
from planning.ranking import FEWEST, Ranker
from tests.unit.made_up_run import DEMO, context, plan
from tests.world.buffer import make_trajectory

NUM_PROMPTS, SEEN, K = 400, 200, 2


class World:
    """A run of the demo's sums whose answers are the longer, the larger the first digit."""

    def __init__(self, folder):
        said = {"task.num_train": NUM_PROMPTS, "actors.group_size": K, "learner.groups_per_step": 100}
        said["buffer.dispatch"] = "longest_first"  # so lengths are of use to a single pool
        made = plan(folder, *[word for key, value in said.items() for word in (f"--{key}", str(value))])
        self.context = context(made)
        self.folder, self.facts = folder / "store", self.context.facts
        self.problems = load_task(self.context.config.task).train
        self.serve()

    def serve(self):
        """Start a service on what is stored."""
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
        """Complete so many groups."""
        learner, actor = self.client("learner", "learner"), self.client("actor", "actor-0")
        learner.begin_incarnation(0, 0).result(30)
        learner.published(0, 0).result(30)
        leases, pushed = actor.lease(num_groups).result(30).leases, []
        for lease in leases:
            for index in lease.sample_indices:
                made = make_trajectory(lease, index, seq=0, num_completion_tokens=self.length(lease.prompt_id))
                pushed.append(actor.push(made))
        # a busy machine answers so late that some are sent twice
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


def test_what_was_seen_foretells_the_others_and_is_told_again_to_a_service_that_was_started_again(world):
    ranker = world.ranker()
    assert ranker.look() is None, "nothing is known yet"
    assert world.generate(SEEN) == SEEN > FEWEST
    expected = ranker.look()
    lengths = np.log([world.length(prompt) for prompt in range(NUM_PROMPTS)])
    assert np.corrcoef(expected.means, lengths)[0, 1] > 0.7
    assert ranker.look() is None, "nothing is new"
    world.close()
    world.serve()
    asking = world.client("ranker", "another")
    told = asking.visits().result(30)
    assert (told.num_seen, told.is_expecting) == (SEEN, False)
    assert ranker.look() is not None
    told = asking.visits().result(30)
    assert (told.num_seen, told.is_expecting) == (SEEN, True)
    asking.close(1.0)


def test_a_service_that_was_started_again_is_fitted_for_once_where_lengths_are_not_foretold_any_more(
    world, monkeypatch
):
    ranker, fits = world.ranker(), []
    world.generate(SEEN)
    assert ranker.look() is not None
    world.close()
    world.serve()
    monkeypatch.setattr("planning.ranking.expect", lambda *_: fits.append(1))
    assert [ranker.look() for _ in range(3)] == [None] * 3
    assert len(fits) == 1


def test_what_is_no_expectation_of_this_run_is_refused(world):
    asking = world.client("ranker", "another")
    for means in (np.zeros(NUM_PROMPTS + 1, np.float32), np.full(NUM_PROMPTS, np.nan, np.float32)):
        with pytest.raises(BufferRefused, match="whose ids are 0 to 399"):
            asking.expect(means, 1.0).result(30)
    told = asking.visits().result(30)
    assert not told.is_expecting
    asking.close(1.0)


def test_no_actor_may_say_what_to_expect(world):
    actor = world.client("actor", "actor-0")
    with pytest.raises(BufferRefused, match="ranker"):
        actor.expect(np.zeros(1, np.float32), 1.0).result(30)
    actor.close(1.0)
