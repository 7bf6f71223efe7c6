"""Prompt laws: the posterior by its formula and by integration, what is drawn by it and in which numbers, and what
survives the service."""

from collections import Counter
from fractions import Fraction
from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import roots_jacobi

from buffer import dispatch
from buffer.config import BufferConfig
from buffer.dispatch import (
    FLOOR,
    ByChance,
    EpochOrder,
    GroupSizes,
    SuccessModel,
    Tries,
    chance_informative,
    order_of,
    rate_of,
)
from buffer.errors import StoreError
from buffer.length_model import LengthModel, Shape
from planning.buffer import SimulatedPrompts
from planning.lengths import PromptStream
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
    (weight,) = model.weights(np.array([0]), now)
    assert weight == pytest.approx(mean_under_beta(a, b, lambda p: p * (1.0 - p)), rel=1e-9)
    assert weight.dtype == np.float64


@given(visits=VISITS)
def test_the_rate_is_the_mean_of_the_posterior(visits):
    model, _ = seen(visits)
    tries = model.get(0) or Tries(0.0, 0.0, 0)
    expected = mean_under_beta(1.0 + tries.passed, 1.0 + tries.failed, lambda p: p)
    assert rate_of(tries) == pytest.approx(expected, rel=1e-9)


def test_what_is_unknown_or_long_ago_weighs_a_sixth_and_half_solved_prompts_weigh_most():
    model = SuccessModel(4, TAU)
    model.see(1, 400, 400, 0)
    model.see(2, 800, 0, 0)
    model.see(3, 0, 800, 0)
    unknown, half, solved, hopeless = model.weights(np.arange(4), 0)
    assert unknown == pytest.approx(1 / 6)
    assert half == pytest.approx(1 / 4, rel=2e-3)
    assert solved == hopeless == pytest.approx(1 / 803, rel=1e-2)
    assert model.weights(np.arange(4), 40 * round(TAU)) == pytest.approx([1 / 6] * 4)


def test_a_learner_that_goes_back_makes_no_sample_count_for_more_than_one():
    model = SuccessModel(1, TAU)
    model.see(0, 3, 1, 100)
    assert model.weights(np.array([0]), 20) == model.weights(np.array([0]), 100)
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


# --- how many samples -----------------------------------------------------------------------------


@given(a=st.floats(1.0, 50.0), b=st.floats(1.0, 50.0), num_samples=st.integers(1, 24))
def test_the_chance_of_an_informative_group_is_the_expectation_over_the_posterior(a, b, num_samples):
    unequal = mean_under_beta(a, b, lambda p: 1.0 - p**num_samples - (1.0 - p) ** num_samples, degree=num_samples)
    assert chance_informative(a, b, num_samples) == pytest.approx(unequal, abs=1e-9)


def informative_by_an_urn(a, b, num_samples):
    """Exactly, of whole a and b: an urn gives a ball of its colour back with another one; how many of each came."""
    chances = {0: Fraction(1)}
    for drawn in range(num_samples):
        after = Counter()
        for passed, chance in chances.items():
            share = Fraction(a + passed, a + b + drawn)
            after[passed + 1] += chance * share
            after[passed] += chance * (1 - share)
        chances = after
    return sum(chance for passed, chance in chances.items() if 0 < passed < num_samples)


def sizes_of(group_size, most, *seen):
    """Of prompts of which so many succeeded and failed."""
    model = SuccessModel(len(seen), TAU)
    for prompt, (num_passed, num_failed) in enumerate(seen):
        model.see(prompt, num_passed, num_failed, 0)
    return GroupSizes(group_size, most, model).of(np.arange(len(seen)), 0).tolist()


@settings(max_examples=40)
@given(seen=st.tuples(st.integers(0, 6), st.integers(0, 30)), group_size=st.integers(2, 9), more=st.integers(0, 30))
def test_a_prompt_that_mostly_fails_has_the_fewest_samples_that_tell_as_likely_as_those_of_a_new_one(
    seen, group_size, more
):
    (num_passed, num_failed), enough = seen, 1 - Fraction(2, group_size + 1)
    assert informative_by_an_urn(1, 1, group_size) == enough
    wanted, enough = group_size, enough - Fraction(1, 10**9)
    if num_failed > num_passed:
        while wanted < group_size + more and informative_by_an_urn(1 + num_passed, 1 + num_failed, wanted) < enough:
            wanted += 1
    assert sizes_of(group_size, group_size + more, seen) == [wanted]


def test_new_half_solved_and_solved_prompts_have_the_usual_number_and_hopeless_ones_as_many_as_are_allowed():
    seen = [(0, 0), (20, 20), (16, 0), (0, 16), (1, 7), (0, 10**6)]
    assert sizes_of(8, 1000, *seen) == [8, 8, 8, 60, 10, 1000]
    assert sizes_of(8, 32, *seen) == [8, 8, 8, 32, 10, 32]
    assert sizes_of(8, 8, *seen) == sizes_of(8, 0, *seen) == [8] * len(seen)
    assert GroupSizes(8).of(np.arange(3), 0).tolist() == [8] * 3


def test_what_failed_long_ago_counts_as_never_seen():
    model = SuccessModel(1, TAU)
    model.see(0, 0, 16, 0)
    sizes = GroupSizes(8, 1000, model)
    assert [int(sizes.of(np.array([0]), round(age * TAU))[0]) for age in (0, 1, 2, 3)] == [60, 25, 12, 8]


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
        self.actor, self.step, self.leased, self.sizes = Actor(self.buffer), 0, [], []

    def go(self, num_steps):
        for _ in range(num_steps):
            leases = self.actor.lease()
            self.leased += [lease.prompt_id for lease in leases]
            self.sizes += [len(lease.sample_indices) for lease in leases]
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
    monkeypatch.setattr(dispatch, "FLOOR", 0.3)
    run = Run(make).go(120)
    times = Counter(run.leased)
    assert times.keys() == set(range(NUM_PROMPTS))
    never, half, always = (sum(count for prompt, count in times.items() if prompt % 3 == kind) for kind in range(3))
    assert half > 1.4 * never
    assert half > 1.4 * always
    assert run.tries()[1].passed == pytest.approx(run.tries()[1].failed)
    assert (run.tries()[0].passed, run.tries()[2].failed) == (0.0, 0.0)


@pytest.mark.parametrize("keys", [{}, {"most_samples": 12}])
def test_a_service_that_is_killed_all_the_time_leases_what_one_that_lives_would(make, keys):
    lives, killed = Run(make, **keys).go(40), Run(make, **keys)
    for _ in range(40):
        killed.go(1)
        killed.buffer.restart()
    assert (killed.leased, killed.sizes, killed.tries()) == (lives.leased, lives.sizes, lives.tries())
    assert len({*lives.sizes}) > 1 if keys else {*lives.sizes} == {K}


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


MORE = {"law": "epoch", "most_samples": 12}


@pytest.fixture
def lasting(monkeypatch):
    """What is known of prompts does not fade."""
    monkeypatch.setattr("buffer.prompts.LEAST_TAU", 1e9)


@pytest.mark.usefixtures("lasting")
def test_never_solved_prompts_have_larger_groups_each_time_they_come_and_every_epoch_has_each_prompt_once(make):
    run = Run(make, **MORE).go(80)
    visits = Counter()
    for prompt, size in zip(run.leased, run.sizes, strict=True):
        # a group of four failures asks for 8, and the 12 failures of two for 20
        assert size == (K if prompt % 3 else (K, 8, 12)[min(2, visits[prompt])]), (prompt, visits[prompt])
        visits[prompt] += 1
    assert min(visits.values()) >= 3
    for start in range(0, len(run.leased) - NUM_PROMPTS, NUM_PROMPTS):
        assert sorted(run.leased[start : start + NUM_PROMPTS]) == list(range(NUM_PROMPTS))
    assert run.buffer.faults() == []


def never_solved(buffer):
    """From now on all prompts were never solved, as the service has it in the store and in memory."""

    def learn(tx):
        for prompt in range(buffer.facts.num_prompts):
            tx.tries.put(Tries(0.0, 100.0, 0), prompt)
            buffer.core.groups.prompts.successes.put(prompt, Tries(0.0, 100.0, 0))

    if buffer.core.groups.prompts.successes is not None:
        buffer.store.write(learn)


@pytest.mark.usefixtures("lasting")
def test_who_has_room_for_so_many_groups_gets_as_many_samples_and_no_more_than_one_group_beyond(make):
    run = Run(make, max_lag=16, **MORE)
    never_solved(run.buffer)
    for wanted, leased in ((1, 1), (3, 1), (4, 2), (7, 3)):
        assert len(run.actor.lease(wanted)) == leased, "each has as many samples as three of the usual size"


@pytest.mark.usefixtures("lasting")
def test_a_group_keeps_its_size_whatever_the_key_becomes_and_a_sample_beyond_it_is_no_sample(make):
    run = Run(make, **MORE)
    never_solved(run.buffer)
    (lease,) = run.actor.lease(1)
    assert run.actor.work(lease, range(11), reward=0.0) == ["committed"] * 11
    run.buffer.config = run.buffer.config.model_copy(update={"most_samples": 0})
    run.buffer.restart()
    assert run.actor.work(lease, [12]) == ["quarantined"]
    assert run.actor.work(lease, [11]) == ["committed"]
    assert [len(each.sample_indices) for each in run.actor.lease(2)] == [K, K]
    assert run.buffer.status().quarantined_by_reason == {"sample_index out of range": 1}
    assert run.buffer.faults() == []


@pytest.mark.usefixtures("lasting")
def test_what_is_issued_again_of_a_larger_group_are_the_samples_that_it_lacks(make):
    run = Run(make, **MORE)
    never_solved(run.buffer)
    (lease,) = run.actor.lease(1)
    run.actor.work(lease, range(3), reward=0.0)
    run.buffer.now_s += 61.0
    run.buffer.expire()
    (again,) = run.actor.lease(2)
    assert (again.group_id, again.sample_indices) == (lease.group_id, list(range(3, 12)))


def test_the_capacity_is_that_of_the_largest_groups(tmp_path):
    config = BufferConfig(capacity_trajectories=40, most_samples=12)
    InProcessBuffer(tmp_path / "small", facts(max_lag=1), config.model_copy(update={"most_samples": 0})).close()
    with pytest.raises(StoreError, match=r"capacity_trajectories = 40 is below the 72 samples .* buffer.most_samples"):
        InProcessBuffer(tmp_path / "large", facts(max_lag=1), config)


@pytest.mark.parametrize(
    ("group_size", "most", "why"), [(1, 8, "nothing that could"), (4, 3, "is below actors.group_size = 4")]
)
def test_a_bound_that_agrees_with_no_group_is_refused(group_size, most, why):
    with pytest.raises(ValueError, match=f"buffer.most_samples = {most} .*{why}"):
        BufferConfig(most_samples=most).check_sizes(group_size, 1)
    BufferConfig(most_samples=0).check_sizes(group_size, 1)
    BufferConfig(most_samples=8).check_sizes(8, 1)


@pytest.mark.parametrize("most", [0, 13, 16])
def test_of_a_larger_group_a_longer_answer_is_foretold(make, most):
    buffer = make(
        BufferConfig(prompt_law="uniform", most_samples=most), group_size=K, num_prompts=NUM_PROMPTS, max_tokens=4096
    )
    buffer.begin()
    never_solved(buffer)
    buffer.store.write(lambda tx: setattr(tx.state, "lengths", Shape(1e9, 5.0, 0.3e9, 1e9, 0.2e9, 1e9)))
    (lease,) = Actor(buffer).lease(1)
    group, lengths = buffer.store.read(lambda tx: tx.groups.require(lease.group_id)), LengthModel(1)
    lengths.shape = Shape(1e9, 5.0, 0.3e9, 1e9, 0.2e9, 1e9)
    assert group.foretold == pytest.approx(lengths.longest_of(np.array([0]), most or K, 0)[0], abs=1.0)
    assert lengths.longest_of(np.array([0]), 16, 0)[0] > 1.3 * lengths.longest_of(np.array([0]), K, 0)[0]


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
