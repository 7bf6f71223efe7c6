"""The length model on known distributions: ranking, coverage, and speed of adaptation."""

import math
import time
from statistics import NormalDist

import numpy as np
import pytest

from leeway.buffer.tables import LengthStats, PromptPosterior
from leeway.planning import lengths
from leeway.planning.lengths import LengthModel

K, NUM_PROMPTS = 8, 1_500
SPREAD, NOISE, LEVEL = 0.52, 0.28, math.log(200)
"""Variances and mean of the log lengths: 65 % of the variance is between prompts."""


class World:
    """Prompts whose log lengths are LEVEL + own + noise, truncated at `longest`; `own` is a constant of each prompt."""

    def __init__(self, seed=0, longest=10**9, num_prompts=NUM_PROMPTS, group_size=K):
        self.random = np.random.default_rng(seed)
        self.own = self.random.normal(0.0, math.sqrt(SPREAD), num_prompts)
        self.level, self.longest, self.group_size = LEVEL, longest, group_size

    def group(self, prompt):
        values = self.level + self.own[prompt] + self.random.normal(0.0, math.sqrt(NOISE), self.group_size)
        lengths = np.maximum(1, np.rint(np.exp(values))).astype(int)
        return np.minimum(lengths, self.longest).tolist(), (lengths >= self.longest).tolist()

    def epoch(self, model, version=0):
        for prompt in self.random.permutation(len(self.own)).tolist():
            model.update(prompt, *self.group(prompt), version)


def recall(scores, longest):
    """Return the fraction of the longest fifth that is in the fifth with the highest scores."""
    num_longest = len(longest) // 5
    return len({*np.argsort(scores)[-num_longest:]} & {*np.argsort(longest)[-num_longest:]}) / num_longest


def test_groups_are_ranked_near_optimally_after_two_epochs():
    world, model, seen = World(), LengthModel(NUM_PROMPTS), np.zeros(NUM_PROMPTS)
    for prompt in 2 * [*range(NUM_PROMPTS)]:
        lengths, cut = world.group(prompt)
        seen[prompt] += np.log(lengths).mean()  # ranking by this mean is optimal for the known distribution
        model.update(prompt, lengths, cut, 0)
    prompts = np.arange(NUM_PROMPTS)
    predicted, found, best = model.longest_of(prompts, K, 0), [], []
    for _ in range(4):
        total = np.array([sum(world.group(prompt)[0]) for prompt in prompts])
        found.append(recall(predicted, total))
        best.append(recall(seen, total))
    assert np.mean(found) >= 0.99 * np.mean(best)
    assert np.mean(found) > 0.75
    assert model.spread == pytest.approx(SPREAD, rel=0.1)
    assert model.noise == pytest.approx(NOISE, rel=0.1)


@pytest.mark.parametrize("num_epochs", [0, 1, 3])
def test_the_quantile_has_its_nominal_coverage_with_any_number_of_observations(num_epochs):
    world, model = World(1), LengthModel(NUM_PROMPTS)
    known = slice(0, NUM_PROMPTS // 2)
    for _ in range(num_epochs):
        world.epoch(model)
    if not num_epochs:  # only the first half of the prompts is observed
        for prompt in range(NUM_PROMPTS)[known]:
            model.update(prompt, *world.group(prompt), 0)
    prompts = np.arange(NUM_PROMPTS)[NUM_PROMPTS // 2 :]
    predicted = model.longest_of(prompts, K, 0)
    covered = np.mean([max(world.group(p)[0]) <= most for p, most in zip(prompts, predicted, strict=True)])
    assert 0.87 <= covered <= 0.93


def test_visits_with_known_length_stats_give_the_shrunken_mean():
    count = 1e12
    shape = LengthStats(count, LEVEL, NOISE * count, count, SPREAD * count, count)
    model, world = LengthModel(1, shape), World(2)
    seen = []
    for visit in range(1, 6):
        lengths, cut = world.group(0)
        seen += [math.log(each) for each in lengths]
        found = model.update(0, lengths, cut, 7)
        num = visit * K
        own = num * SPREAD / (num * SPREAD + NOISE) * (np.mean(seen) - LEVEL)
        assert found.mean == pytest.approx(own, rel=1e-5)
        assert found.variance == pytest.approx(SPREAD * NOISE / (num * SPREAD + NOISE), rel=1e-5)


def test_lengths_that_grow_together_change_the_level_but_not_the_ranks():
    world, model = World(3), LengthModel(NUM_PROMPTS)
    world.epoch(model)
    before = model.predict(np.arange(NUM_PROMPTS), 0)[0]
    world.level += math.log(2)
    for prompt in range(NUM_PROMPTS // 2):
        model.update(prompt, *world.group(prompt), 0)
    others = np.arange(NUM_PROMPTS)[NUM_PROMPTS // 2 :]
    after = model.predict(others, 0)[0]
    assert np.mean(after - before[others]) == pytest.approx(math.log(2), abs=0.1)
    assert np.corrcoef(after, world.own[others])[0, 1] > 0.95


def test_the_offset_of_a_prompt_fades_as_fast_as_it_changes():
    steady, changing = LengthModel(NUM_PROMPTS), LengthModel(NUM_PROMPTS)
    world, other = World(4), World(5)
    for epoch in range(4):
        world.epoch(steady, version=100 * epoch)
        other.epoch(changing, version=100 * epoch)
        fresh = other.random.normal(0.0, math.sqrt(SPREAD), NUM_PROMPTS)
        other.own = 0.5 * other.own + math.sqrt(0.75) * fresh
    assert 100 * steady.fading < 0.05
    assert math.exp(-100 * changing.fading) == pytest.approx(0.5, abs=0.1)
    prompts = np.arange(NUM_PROMPTS)
    error = changing.predict(prompts, 400)[0] - LEVEL - other.own
    assert np.mean(error**2) == pytest.approx(np.mean(changing.predict(prompts, 400)[1]), rel=0.15)


def test_truncated_completions_do_not_bias_the_length_of_their_prompts():
    longest = round(math.exp(LEVEL + 0.8 * math.sqrt(SPREAD + NOISE)))  # a fifth of the completions is truncated
    world, model, blind = World(6, longest), LengthModel(NUM_PROMPTS), LengthModel(NUM_PROMPTS)
    for _ in range(2):
        for prompt in range(NUM_PROMPTS):
            lengths, cut = world.group(prompt)
            model.update(prompt, lengths, cut, 0)
            blind.update(prompt, lengths, [False] * K, 0)
    long = np.flatnonzero(world.own > 1.3 * math.sqrt(SPREAD))
    error = np.mean(model.predict(long, 0)[0] - LEVEL - world.own[long])
    missed = np.mean(blind.predict(long, 0)[0] - LEVEL - world.own[long])
    assert missed < -0.4
    assert abs(error) < 0.4 * abs(missed)


def test_single_samples_and_equal_lengths_give_finite_predictions():
    model = LengthModel(3)
    for _ in range(50):
        model.update(0, [7], [False], 0)
        model.update(1, [7] * K, [True] * K, 0)
    found = model.longest_of(np.arange(3), K, 0)
    assert np.isfinite(found).all()
    assert found[0] < found[1], "all completions of the second prompt are truncated"


def test_prompts_may_have_different_group_sizes():
    world, model = World(), LengthModel(NUM_PROMPTS)
    world.epoch(model)
    prompts, sizes = np.arange(6), np.array([K, 2 * K, K, 4 * K, 4 * K, 2 * K])
    found = model.longest_of(prompts, sizes, 0)
    of_each = [model.longest_of(prompts, size, 0)[place] for place, size in enumerate(sizes.tolist())]
    assert found.tolist() == of_each
    assert found[1] > model.longest_of(prompts, K, 0)[1]


def test_a_new_group_size_takes_a_few_milliseconds_to_compute():
    lengths._scores_of_longest.cache_clear()
    began_s = time.process_time()
    scores = [lengths._scores_of_longest(size)[0] for size in range(1, 41)]
    assert time.process_time() - began_s < 0.4
    assert scores == pytest.approx([NormalDist().inv_cdf(0.9 ** (1 / size)) for size in range(1, 41)], abs=1e-4)


def test_get_returns_the_visit_of_put_or_none():
    model = LengthModel(2)
    visit = PromptPosterior(0.5, 0.25, 3)
    model.put(1, visit)
    assert model.get(1) == visit
    assert model.get(0) is None
    model.put(1, None)
    assert model.get(1) is None


@pytest.mark.parametrize(("group_size", "longest"), [(1, 400), (2, 100), (2, 30), (8, 100)])
def test_predictions_stay_finite_and_near_the_limit_with_many_truncated_samples(group_size, longest):
    world, model = World(longest=longest, num_prompts=300, group_size=group_size), LengthModel(300)
    for _ in range(30):
        world.epoch(model)
    predicted = model.longest_of(np.arange(300), group_size, 0)
    assert np.isfinite(predicted).all()
    assert model.noise < 2.0
    assert math.exp(model.shape.level) < 50 * longest


def test_the_variance_of_samples_is_recovered_from_truncated_groups():
    world, model = World(longest=300), LengthModel(NUM_PROMPTS)
    for _ in range(6):
        world.epoch(model)
    assert model.noise == pytest.approx(NOISE, rel=0.2)
