"""The reference model scores the samples of a step on two stages, and the buffer stores the scores."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from leeway.buffer.client import BufferClient
from leeway.common.staleness import PolicyVersion
from tests.faults.learner_run import GROUPS_PER_STEP, LearnerRun, make_model, new_sample


@pytest.fixture
def run(tmp_path):
    learner_run = LearnerRun(tmp_path / "run")
    yield learner_run
    learner_run.close()


@pytest.fixture
def actor(run):
    client = BufferClient(run.address, run_id="test", role="actor", name="actor-0")
    client.connect()
    yield client
    client.close(1.0)


def samples(actor, num_groups):
    """Return groups of synthetic samples that the actor has not pushed yet."""
    random, found = np.random.default_rng(0), []
    while len(found) < num_groups:
        leases = actor.lease(num_groups - len(found)).result(60).leases
        found += [[new_sample(lease, i, PolicyVersion(0, 0), random) for i in lease.sample_indices] for lease in leases]
        time.sleep(0.01)
    return found


def scored_by_hand(run, sample, model="model"):
    """Return the log-probabilities of the completion, computed by the whole model."""
    model = AutoModelForCausalLM.from_pretrained(run.folder / model).double()
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
    predicted = torch.arange(sample.prompt_length, len(tokens))
    return logprobs[predicted - 1, tokens[predicted]].numpy()


def check(run, pushed, models):
    """Check that each sample has the scores of the model assigned to its prompt."""
    for sample, found in zip(pushed, run.scores().values(), strict=True):
        by_hand = scored_by_hand(run, sample, models[sample.prompt_id % len(models)])
        np.testing.assert_allclose(found, by_hand, rtol=0, atol=1e-5)


def train_step(run, actor, **start):
    """Train one step on all samples and return the samples."""
    run.start(num_steps=1, **start)
    pushed = [sample for group in samples(actor, GROUPS_PER_STEP) for sample in group]
    for sample in pushed:
        actor.push(sample).result(60)
    assert set(run.finish(run.ranks)) == {0}, run.logs()
    return pushed


def test_a_step_stores_the_scores_of_its_samples(run, actor):
    check(run, train_step(run, actor), ["model"])


def test_each_of_several_teachers_scores_its_own_prompts(run, actor):
    names = ["math", "code"]
    for name, num_layers in zip(names, (2, 3), strict=True):
        make_model(run.folder / name, tied=True, num_layers=num_layers)
    pushed = train_step(run, actor, algorithm={"type": "distillation"}, teachers=[run.folder / n for n in names])
    assert {sample.prompt_id % 2 for sample in pushed} == {0, 1}
    check(run, pushed, names)
    one, other = (scored_by_hand(run, pushed[0], name) for name in names)
    assert np.abs(one - other).max() > 1e-3
