"""Who scores with the reference before a step: the learner, of two stages, while it waits; or nobody."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from buffer.client import BufferClient
from common.staleness import PolicyVersion
from tests.faults.learner_run import GROUP_SIZE, GROUPS_PER_STEP, LearnerRun, make_model, make_up

EARLY = (GROUPS_PER_STEP - 1) * GROUP_SIZE
"""Samples that are there when the learner begins to wait."""


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


def test_what_is_ready_is_scored_before_its_batch_is_complete_and_the_step_scores_the_rest(run, actor):
    run.start(num_steps=1)
    *early, late = samples(actor, GROUPS_PER_STEP)
    for sample in [sample for group in early for sample in group]:
        actor.push(sample).result(60)
    run.wait_until(lambda: len(run.scores()) == EARLY, "scoring of what is ready")
    scores = run.scores()
    for sample, found in zip([each for group in early for each in group], scores.values(), strict=True):
        np.testing.assert_allclose(found, scored_by_hand(run, sample), rtol=0, atol=1e-5)
    for sample in late:
        actor.push(sample)
    assert set(run.finish(run.ranks)) == {0}, run.logs()
    (report,) = run.reports()
    assert EARLY / (EARLY + GROUP_SIZE) <= report["scored/ahead_frac"] <= 1
    assert 0 < report["time/scored_ahead"] < report["time/wait_for_batch"]


def test_a_learner_in_float64_leaves_all_scores_to_the_step(run, actor):
    run.start(num_steps=1, precision="float64")
    *early, late = samples(actor, GROUPS_PER_STEP)
    for sample in [sample for group in early for sample in group]:
        actor.push(sample).result(60)
    run.wait_until_ready()
    time.sleep(1.0)
    assert run.scores() == {}
    for sample in late:
        actor.push(sample)
    assert set(run.finish(run.ranks)) == {0}, run.logs()
    (report,) = run.reports()
    assert report["scored/ahead_frac"] == 0
    assert len(run.scores()) == EARLY + GROUP_SIZE


def test_of_several_teachers_each_scores_its_own_prompts_while_the_learner_waits_and_in_the_step(run, actor):
    names = ("math", "code")
    for name, num_layers in zip(names, (2, 3), strict=True):
        make_model(run.folder / name, tied=True, num_layers=num_layers)

    def check(groups):
        pushed = [sample for group in groups for sample in group]
        for sample, found in zip(pushed, run.scores().values(), strict=True):
            by_hand = [scored_by_hand(run, sample, name) for name in names]
            np.testing.assert_allclose(found, by_hand[sample.prompt_id % 2], rtol=0, atol=1e-5)
            assert np.abs(by_hand[0] - by_hand[1]).max() > 1e-3

    run.start({"type": "distillation"}, num_steps=1, teachers=[run.folder / n for n in names])
    first, late, last = sorted(samples(actor, GROUPS_PER_STEP), key=lambda group: group[0].prompt_id % 2)
    early = [first, last]
    assert {group[0].prompt_id % 2 for group in early} == {0, 1}
    for sample in [sample for group in early for sample in group]:
        actor.push(sample).result(60)
    run.wait_until(lambda: len(run.scores()) == EARLY, "scoring of what is ready")
    check(early)
    for sample in late:
        actor.push(sample).result(60)
    assert set(run.finish(run.ranks)) == {0}, run.logs()
    check([*early, late])
