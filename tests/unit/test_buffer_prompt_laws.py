"""Prompt sampling: the posterior by formula and by integration, the frequencies of drawn prompts, and recovery after
a restart of the service."""

from collections import Counter
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import roots_jacobi

from leeway.buffer.config import BufferConfig
from leeway.buffer.groups import order_of
from leeway.buffer.tables import LengthStats, Tries
from leeway.planning import prompts as laws
from leeway.planning.buffer import SimulatedPrompts
from leeway.planning.lengths import LengthModel, PromptStream
from leeway.planning.prompts import FLOOR, ByChance, EpochOrder, SuccessModel
from tests.unit.test_planning_simulator import world
from tests.world.buffer import Actor, InProcessBuffer, facts, make_trajectory

TAU = 50.0


def mean_under_beta(a, b, function, degree=7):
    """Return the mean of a polynomial of up to this degree under a beta density, by Gauss-Jacobi quadrature."""
    nodes, weights = roots_jacobi(degree // 2 + 1, b - 1.0, a - 1.0)
    return float(weights @ function((nodes + 1.0) / 2.0) / weights.sum())


VISITS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8), st.integers(0, 8)), max_size=8)
"""Visits of a prompt: versions since the previous visit, number of successful samples, number of failed samples."""


def seen(visits):
    """Return the success model of one prompt after the given visits, and the version at the last visit."""
    model, version = SuccessModel(1, TAU), 0
    for passed_versions, num_passed, num_failed in visits:
        version += passed_versions
        model.update(0, num_passed, num_failed, version)
    return model, version


# --- the posterior --------------------------------------------------------------------------------


@given(visits=VISITS, later=st.integers(0, 300))
def test_the_weight_is_the_posterior_expectation_with_samples_discounted_by_age(visits, later):
    model, version = seen(visits)
    now, at, a, b = version + later, 0, 1.0, 1.0
    for passed_versions, num_passed, num_failed in visits:
        at += passed_versions
        for _ in range(num_passed):
            a += exp(-(now - at) / TAU)
        for _ in range(num_failed):
            b += exp(-(now - at) / TAU)
    (weight,) = model.weights(now)
    assert weight == pytest.approx(mean_under_beta(a, b, lambda p: p * (1.0 - p)), rel=1e-9)
    assert weight.dtype == np.float64


@given(visits=VISITS)
def test_the_success_rate_is_the_mean_of_the_posterior(visits):
    model, _ = seen(visits)
    tries = model.get(0) or Tries(0.0, 0.0, 0)
    expected = mean_under_beta(1.0 + tries.passed, 1.0 + tries.failed, lambda p: p)
    assert tries.rate == pytest.approx(expected, rel=1e-9)


def test_unknown_or_old_prompts_weigh_a_sixth_and_half_solved_prompts_weigh_most():
    model = SuccessModel(4, TAU)
    model.update(1, 400, 400, 0)
    model.update(2, 800, 0, 0)
    model.update(3, 0, 800, 0)
    unknown, half, solved, hopeless = model.weights(0)
    assert unknown == pytest.approx(1 / 6)
    assert half == pytest.approx(1 / 4, rel=2e-3)
    assert solved == hopeless == pytest.approx(1 / 803, rel=1e-2)
    assert model.weights(40 * round(TAU)) == pytest.approx([1 / 6] * 4)


def test_a_rollback_of_the_learner_does_not_increase_the_count_of_a_sample():
    model = SuccessModel(1, TAU)
    model.update(0, 3, 1, 100)
    assert model.weights(20) == model.weights(100)
    assert model.update(0, 1, 0, 20) == Tries(4.0, 1.0, 20)


# --- drawn prompts --------------------------------------------------------------------------------


def by_posterior(num=40):
    model = SuccessModel(num, TAU)
    for prompt in range(num):
        # two of every four prompts are solved half of the time
        model.update(prompt, 10**6 * (prompt % 4 > 0), 10**6 * (prompt % 4 < 3), 0)
    return ByChance(num, 7, model)


def test_probabilities_are_an_equal_share_of_the_floor_plus_a_share_by_weight():
    probabilities = by_posterior().probabilities(0)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    assert probabilities.min() == pytest.approx(FLOOR / 40, rel=1e-3)
    assert probabilities[1] == probabilities[2] == pytest.approx(FLOOR / 40 + (1 - FLOOR) / 20, rel=1e-3)


def test_prompts_are_drawn_by_their_probabilities():
    law = by_posterior()
    first = Counter(int(law.ahead(place, 1, 0)[0]) for place in range(4000))
    shares = np.array([first[prompt] for prompt in range(40)]) / 4000
    assert shares == pytest.approx(law.probabilities(0), abs=0.012)  # 3.5 standard deviations
    assert min(first[prompt] for prompt in range(40)) > 0


@pytest.mark.parametrize("law", [by_posterior(), ByChance(40, 7)], ids=["posterior", "uniform"])
def test_prompts_drawn_together_are_distinct_and_a_repeated_draw_is_the_same(law):
    some = law.ahead(12, 8, 0)
    assert len(set(some.tolist())) == 8
    assert law.ahead(12, 8, 0).tolist() == some.tolist() != law.ahead(20, 8, 0).tolist()
    assert len(law.ahead(0, 40, 0)) == 10, "a draw has at most a quarter of the prompts, so that weights have an effect"
    assert len(ByChance(3, 7).ahead(0, 8, 0)) == 1


def test_the_order_of_an_epoch_continues_in_the_next():
    law = EpochOrder(10, 7)
    order = [*order_of(7, 0, 10), *order_of(7, 1, 10), *order_of(7, 2, 10)]
    assert law.ahead(4, 20, 0).tolist() == order[4:24]
    assert [int(law.ahead(place, 1, 0)[0]) for place in range(30)] == order


# --- in the buffer --------------------------------------------------------------------------------

NUM_PROMPTS, K, G = 48, 4, 2


class Run:
    """Buffer in which a prompt is solved never, half of the time or always, depending on its id modulo 3."""

    def __init__(self, make, law="posterior", max_lag=4, **config):
        self.buffer = make(
            BufferConfig(prompt_law=law, **config),
            group_size=K,
            groups_per_step=G,
            num_prompts=NUM_PROMPTS,
            correct_at=0.5,
            max_lag=max_lag,
        )
        self.buffer.begin()
        self.actor, self.step, self.leased = Actor(self.buffer), 0, []

    def train(self, num_steps):
        for _ in range(num_steps):
            leases = self.actor.lease()
            self.leased += [lease.prompt_id for lease in leases]
            rewards = ((0.4, 0.4), (0.0, 1.0), (0.5, 0.5))
            rows = [
                self.actor.rows(lease, [index], reward=rewards[lease.prompt_id % 3][index % 2])
                for lease in leases
                for index in lease.sample_indices
            ]
            self.buffer.push([row for (row,) in rows])
            self.step += 1
            assert self.buffer.draw(self.step, self.step - 1)[0].ready
            self.buffer.finish(self.step, self.step)
            self.buffer.publish(self.step)
        return self

    def tries(self):
        return self.buffer.store.read(lambda tx: {prompt: tries for (prompt,), tries in tx.tries.all_items()})


def test_half_solved_prompts_are_leased_more_often_and_none_is_left_out(make, monkeypatch):
    monkeypatch.setattr(laws, "FLOOR", 0.3)
    run = Run(make).train(120)
    times = Counter(run.leased)
    assert times.keys() == set(range(NUM_PROMPTS))
    never, half, always = (sum(count for prompt, count in times.items() if prompt % 3 == kind) for kind in range(3))
    assert half > 1.4 * never
    assert half > 1.4 * always
    assert run.tries()[1].passed == pytest.approx(run.tries()[1].failed)
    assert (run.tries()[0].passed, run.tries()[2].failed) == (0.0, 0.0)


def test_a_service_that_restarts_at_every_step_leases_the_same_prompts(make):
    steady, restarted = Run(make).train(40), Run(make)
    for _ in range(40):
        restarted.train(1)
        restarted.buffer.restart()
    assert (restarted.leased, restarted.tries()) == (steady.leased, steady.tries())


@pytest.mark.parametrize("fails", ["commit", "service"])
def test_a_group_whose_commit_is_lost_counts_once(make, fails):
    run = Run(make)
    (lease,) = run.actor.lease(1)
    run.actor.work(lease, range(K - 1), reward=1.0)
    run.buffer.loses = fails
    run.actor.work(lease, [K - 1], reward=0.0)  # the transaction is lost, and the sample is pushed again
    assert run.tries() == {lease.prompt_id: Tries(K - 1, 1.0, 0)}


def test_a_sample_without_a_reward_does_not_count_as_a_try(make):
    run = Run(make)
    (lease,) = run.actor.lease(1)
    rows = [
        make_trajectory(lease, index, seq=index, reward=reward) for index, reward in enumerate((None, 0.7, 0.1, 0.5))
    ]
    run.buffer.push(rows)
    assert run.tries() == {lease.prompt_id: Tries(2.0, 1.0, 0)}


@pytest.mark.parametrize("law", ["epoch", "uniform"])
def test_other_prompt_laws_store_no_tries(make, law):
    assert Run(make, law).train(3).tries() == {}


def test_the_longest_answer_of_a_group_is_predicted(make):
    config = BufferConfig(prompt_law="uniform", dispatch="by_deadline")
    buffer = make(config, group_size=K, num_prompts=NUM_PROMPTS, max_tokens=4096)
    buffer.begin()
    lengths = LengthModel(1)
    lengths.shape = LengthStats(1e9, 5.0, 0.3e9, 1e9, 0.2e9, 1e9)
    buffer.store.write(lambda tx: setattr(tx.state, "lengths", lengths.shape))
    (lease,) = Actor(buffer).lease(1)
    group = buffer.store.read(lambda tx: tx.groups.require(lease.group_id))
    assert group.predicted == pytest.approx(lengths.longest_of(np.array([0]), K, 0)[0], abs=1.0)


def test_a_run_can_be_resumed_with_another_prompt_law(make):
    run = Run(make, "epoch").train(3)
    run.buffer.config = run.buffer.config.model_copy(update={"prompt_law": "posterior"})
    run.buffer.restart()
    run.train(3)
    assert run.tries()


def test_the_listing_shows_the_success_rate_of_a_prompt(tmp_path, leeway):
    run = Run(lambda config, **changes: InProcessBuffer(tmp_path / "buffer", facts(**changes), config))
    (lease,) = run.actor.lease(1)
    run.actor.work(lease, reward=1.0)
    run.buffer.close()
    status, lines, _ = leeway("ls", run.buffer.folder)
    assert (status, lines[2].endswith("4 waiting  success 0.83 of 4.0")) == (0, True)


def test_a_simulated_run_draws_the_same_prompts_as_a_real_one(make):
    spec = world(sampler={"prompt_law": "uniform"})
    stream = PromptStream(spec.lengths, spec.num_prompts, spec.group_size, 0)
    simulated = SimulatedPrompts(spec, stream, facts().seed, lambda: 0.0)
    real = make(
        spec.buffer, num_prompts=spec.num_prompts, groups_per_step=spec.contract.groups_per_step, max_lag="unbounded"
    )
    real.begin()
    leased = [lease.prompt_id for lease in Actor(real).lease(12)]
    assert [simulated.next(spec.pools[0], 0)[0] for _ in leased] == leased
