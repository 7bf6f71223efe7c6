"""The reference scores in the step, over two stages, and its scores are stored."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.client import BufferClient
from common.staleness import PolicyVersion
from tests.faults.learner_run import GROUPS_PER_STEP, LearnerRun, make_model, make_up


@pytest.fixture
def run(tmp_path):
    made = LearnerRun(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def actor(run):
    client = BufferClient(run.address, run_id="test", role="actor", name="actor-0")
    client.connect()
    yield client
    client.close(1.0)


def samples(actor, num_groups):
    """Groups that an actor has made up, before it hands them in."""
    random, found = np.random.default_rng(0), []
    while len(found) < num_groups:
        leases = actor.lease(num_groups - len(found)).result(60).leases
        found += [[make_up(lease, i, PolicyVersion(0, 0), random) for i in lease.sample_indices] for lease in leases]
        time.sleep(0.01)
    return found


def scored_by_hand(run, sample, model="model"):
    """Log-probabilities of the completion, by the whole model in one piece."""
    model = AutoModelForCausalLM.from_pretrained(run.folder / model).double()
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    predicted = torch.arange(sample.prompt_length, len(tokens))
    return logprobs[predicted - 1, tokens[predicted]].numpy()


def check(run, pushed, models):
    """Each sample has the scores of the model of its prompt."""
    for sample, found in zip(pushed, run.scores().values(), strict=True):
        by_hand = scored_by_hand(run, sample, models[sample.prompt_id % len(models)])
        np.testing.assert_allclose(found, by_hand, rtol=0, atol=1e-5)


def train_step(run, actor, **start):
    """One step of all samples, which are returned."""
    run.start(num_steps=1, **start)
    pushed = [sample for group in samples(actor, GROUPS_PER_STEP) for sample in group]
    for sample in pushed:
        actor.push(sample).result(60)
    assert set(run.finish(run.ranks)) == {0}, run.logs()
    return pushed


def test_a_step_stores_the_scores_of_its_samples(run, actor):
    check(run, train_step(run, actor), ["model"])


def test_of_several_teachers_each_scores_its_own_prompts(run, actor):
    names = ["math", "code"]
    for name, num_layers in zip(names, (2, 3), strict=True):
        make_model(run.folder / name, tied=True, num_layers=num_layers)
    pushed = train_step(run, actor, algorithm={"type": "distillation"}, teachers=[run.folder / n for n in names])
    assert {sample.prompt_id % 2 for sample in pushed} == {0, 1}
    check(run, pushed, names)
    one, other = (scored_by_hand(run, pushed[0], name) for name in names)
    assert np.abs(one - other).max() > 1e-3
