"""Prompt laws: the posterior by its formula and by integration, what is drawn by it and in which numbers, and what
survives the service."""

from collections import Counter
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import roots_jacobi

from buffer.config import BufferConfig
from buffer.groups import order_of
from buffer.tables import Shape, Tries
from planning import prompts as laws
from planning.buffer import SimulatedPrompts
from planning.lengths import LengthModel, PromptStream
from planning.prompts import FLOOR, ByChance, EpochOrder, SuccessModel
from tests.unit.test_planning_simulator import world
from tests.world.buffer import Actor, InProcessBuffer, facts, make_trajectory

TAU = 50.0


def mean_under_beta(a, b, function, degree=7):
    """Of a polynomial of a degree or less, by Gauss and Jacobi, whose weight is the density up to its constant."""
    nodes, weights = roots_jacobi(degree // 2 + 1, b - 1.0, a - 1.0)
    return float(weights @ function((nodes + 1.0) / 2.0) / weights.sum())


VISITS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8), st.integers(0, 8)), max_size=8)
"""Versions since the visit before, samples that succeeded, and samples that did not."""


def seen(visits):
    """A model of one prompt after visits, and its version."""
    model, version = SuccessModel(1, TAU), 0
    for passed_versions, num_passed, num_failed in visits:
        version += passed_versions
        model.see(0, num_passed, num_failed, version)
    return model, version


# --- the posterior --------------------------------------------------------------------------------


@given(visits=VISITS, later=st.integers(0, 300))
def test_the_weight_is_the_expectation_over_the_posterior_of_all_samples_by_their_age(visits, later):
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
def test_the_rate_is_the_mean_of_the_posterior(visits):
    model, _ = seen(visits)
    tries = model.get(0) or Tries(0.0, 0.0, 0)
    expected = mean_under_beta(1.0 + tries.passed, 1.0 + tries.failed, lambda p: p)
    assert tries.rate == pytest.approx(expected, rel=1e-9)


def test_what_is_unknown_or_long_ago_weighs_a_sixth_and_half_solved_prompts_weigh_most():
    model = SuccessModel(4, TAU)
    model.see(1, 400, 400, 0)
    model.see(2, 800, 0, 0)
    model.see(3, 0, 800, 0)
    unknown, half, solved, hopeless = model.weights(0)
    assert unknown == pytest.approx(1 / 6)
    assert half == pytest.approx(1 / 4, rel=2e-3)
    assert solved == hopeless == pytest.approx(1 / 803, rel=1e-2)
    assert model.weights(40 * round(TAU)) == pytest.approx([1 / 6] * 4)


def test_a_learner_that_goes_back_makes_no_sample_count_for_more_than_one():
    model = SuccessModel(1, TAU)
    model.see(0, 3, 1, 100)
    assert model.weights(20) == model.weights(100)
    assert model.see(0, 1, 0, 20) == Tries(4.0, 1.0, 20)


# --- what is drawn --------------------------------------------------------------------------------


def by_posterior(num=40):
    model = SuccessModel(num, TAU)
    for prompt in range(num):
        model.see(prompt, 10**6 * (prompt % 4 > 0), 10**6 * (prompt % 4 < 3), 0)  # each fourth has half of it
    return ByChance(num, 7, model)


def test_every_prompt_has_the_share_of_the_floor_and_the_rest_by_weight():
    chances = by_posterior().chances(0)
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)
    assert chances.min() == pytest.approx(FLOOR / 40, rel=1e-3)
    assert chances[1] == chances[2] == pytest.approx(FLOOR / 40 + (1 - FLOOR) / 20, rel=1e-3)


def test_prompts_are_drawn_by_their_chances():
    law = by_posterior()
    first = Counter(int(law.ahead(place, 1, 0)[0]) for place in range(4000))
    shares = np.array([first[prompt] for prompt in range(40)]) / 4000
    assert shares == pytest.approx(law.chances(0), abs=0.012)  # three and a half standard deviations
    assert min(first[prompt] for prompt in range(40)) > 0


@pytest.mark.parametrize("law", [by_posterior(), ByChance(40, 7)], ids=["posterior", "uniform"])
def test_what_is_drawn_at_once_differs_and_is_the_same_when_it_is_asked_again(law):
    some = law.ahead(12, 8, 0)
    assert len(set(some.tolist())) == 8
    assert law.ahead(12, 8, 0).tolist() == some.tolist() != law.ahead(20, 8, 0).tolist()
    assert len(law.ahead(0, 40, 0)) == 10, "a quarter of the prompts: of all at once none would be preferred"
    assert len(ByChance(3, 7).ahead(0, 8, 0)) == 1


def test_the_order_of_an_epoch_goes_on_in_the_next():
    law = EpochOrder(10, 7)
    order = [*order_of(7, 0, 10), *order_of(7, 1, 10), *order_of(7, 2, 10)]
    assert law.ahead(4, 20, 0).tolist() == order[4:24]
    assert [int(law.ahead(place, 1, 0)[0]) for place in range(30)] == order


# --- in the buffer --------------------------------------------------------------------------------

NUM_PROMPTS, K, G = 48, 4, 2


class Run:
    """A buffer whose prompts are solved never, half of the time and always, by their ids modulo 3."""

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

    def go(self, num_steps):
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


def test_prompts_that_are_solved_half_of_the_time_are_trained_more_and_none_is_left_out(make, monkeypatch):
    monkeypatch.setattr(laws, "FLOOR", 0.3)
    run = Run(make).go(120)
    times = Counter(run.leased)
    assert times.keys() == set(range(NUM_PROMPTS))
    never, half, always = (sum(count for prompt, count in times.items() if prompt % 3 == kind) for kind in range(3))
    assert half > 1.4 * never
    assert half > 1.4 * always
    assert run.tries()[1].passed == pytest.approx(run.tries()[1].failed)
    assert (run.tries()[0].passed, run.tries()[2].failed) == (0.0, 0.0)


def test_a_service_that_is_killed_all_the_time_leases_what_one_that_lives_would(make):
    lives, killed = Run(make).go(40), Run(make)
    for _ in range(40):
        killed.go(1)
        killed.buffer.restart()
    assert (killed.leased, killed.tries()) == (lives.leased, lives.tries())


@pytest.mark.parametrize("what", ["commit", "service"])
def test_a_group_whose_commit_is_lost_is_learned_from_once(make, what):
    run = Run(make)
    (lease,) = run.actor.lease(1)
    run.actor.work(lease, range(K - 1), reward=1.0)
    run.buffer.loses = what
    run.actor.work(lease, [K - 1], reward=0.0)  # lost with its transaction, and pushed again
    assert run.tries() == {lease.prompt_id: Tries(K - 1, 1.0, 0)}


def test_a_sample_without_a_reward_is_no_try(make):
    run = Run(make)
    (lease,) = run.actor.lease(1)
    rows = [
        make_trajectory(lease, index, seq=index, reward=reward) for index, reward in enumerate((None, 0.7, 0.1, 0.5))
    ]
    run.buffer.push(rows)
    assert run.tries() == {lease.prompt_id: Tries(2.0, 1.0, 0)}


@pytest.mark.parametrize("law", ["epoch", "uniform"])
def test_other_laws_learn_nothing(make, law):
    assert Run(make, law).go(3).tries() == {}


def test_the_longest_answer_of_a_group_is_foretold(make):
    config = BufferConfig(prompt_law="uniform", dispatch="by_deadline")
    buffer = make(config, group_size=K, num_prompts=NUM_PROMPTS, max_tokens=4096)
    buffer.begin()
    lengths = LengthModel(1)
    lengths.shape = Shape(1e9, 5.0, 0.3e9, 1e9, 0.2e9, 1e9)
    buffer.store.write(lambda tx: setattr(tx.state, "lengths", lengths.shape))
    (lease,) = Actor(buffer).lease(1)
    group = buffer.store.read(lambda tx: tx.groups.require(lease.group_id))
    assert group.foretold == pytest.approx(lengths.longest_of(np.array([0]), K, 0)[0], abs=1.0)


def test_a_run_that_is_resumed_under_another_law_goes_on(make):
    run = Run(make, "epoch").go(3)
    run.buffer.config = run.buffer.config.model_copy(update={"prompt_law": "posterior"})
    run.buffer.restart()
    run.go(3)
    assert run.tries()


def test_the_listing_says_how_often_a_prompt_is_answered_with_success(tmp_path, leeway):
    run = Run(lambda config, **changes: InProcessBuffer(tmp_path / "buffer", facts(**changes), config))
    (lease,) = run.actor.lease(1)
    run.actor.work(lease, reward=1.0)
    run.buffer.close()
    status, lines, _ = leeway("ls", run.buffer.folder)
    assert (status, lines[2].endswith("4 waiting  success 0.83 of 4.0")) == (0, True)


def test_a_simulated_run_draws_by_the_law_of_the_real_one(make):
    made = world(sampler={"prompt_law": "uniform"})
    stream = PromptStream(made.lengths, made.num_prompts, made.group_size, 0)
    simulated = SimulatedPrompts(made, stream, facts().seed, lambda: 0.0)
    real = make(
        made.buffer, num_prompts=made.num_prompts, groups_per_step=made.contract.groups_per_step, max_lag="unbounded"
    )
    real.begin()
    leased = [lease.prompt_id for lease in Actor(real).lease(12)]
    assert [simulated.next(made.pools[0], 0)[0] for _ in leased] == leased
