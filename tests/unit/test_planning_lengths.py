"""Length distributions: their means, quantiles and explained shares."""

import math

import numpy as np
import pytest
from benchmarks.lib.lengths import constant, lognormal

from leeway.planning.lengths import LengthDistribution, explained_by_prompt


def drawn(law, num_prompts=4000, group_size=8, seed=0):
    random = np.random.default_rng(seed)
    scores = random.standard_normal(num_prompts)
    return law.lengths(scores[:, None], random.standard_normal((num_prompts, group_size)))


def test_a_lognormal_distribution_has_its_median_and_spread_and_is_truncated():
    lengths = drawn(lognormal(200, 0.7, 1000))
    assert np.median(lengths) == pytest.approx(200, rel=0.02)
    inside = np.log(lengths[(lengths > 1) & (lengths < 1000)])
    assert inside.std() == pytest.approx(0.7, rel=0.05)
    assert lengths.max() == 1000
    assert (lengths == 1000).mean() == pytest.approx(0.5 * math.erfc(math.log(5) / 0.7 / math.sqrt(2)), rel=0.1)
    assert lengths.mean() == pytest.approx(lognormal(200, 0.7, 1000).mean, rel=0.02)


@pytest.mark.parametrize("explained", [0.0, 0.3, 0.65, 1.0])
def test_the_share_explained_by_prompts_is_recovered_from_lengths(explained):
    lengths = drawn(lognormal(500, 0.5, 4000, explained))
    prompts = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    assert explained_by_prompt(prompts, lengths.reshape(-1)) == pytest.approx(explained, abs=0.03)


def test_a_measured_distribution_reproduces_the_measurements():
    seen = np.random.default_rng(1).integers(5, 90, 20_000)
    lengths = drawn(LengthDistribution.measured(seen))
    assert lengths.mean() == pytest.approx(seen.mean(), rel=0.02)
    assert np.quantile(lengths, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(seen, [0.1, 0.5, 0.9]), abs=2)


def test_constant_lengths_have_no_share_explained_by_prompts():
    assert (drawn(constant(7)) == 7).all()
    assert constant(7).mean == pytest.approx(7)
    assert explained_by_prompt([1, 1, 2, 2], [5, 5, 5, 5]) == 0.0


@pytest.mark.parametrize(
    ("quantiles", "explained", "message"),
    [((5.0, 3.0), 0.0, "ascending"), ((0.0, 3.0), 0.0, "at least 1"), ((1.0, 2.0), 1.5, "explained = 1.5")],
)
def test_invalid_distributions_are_rejected(quantiles, explained, message):
    with pytest.raises(ValueError, match=message):
        LengthDistribution(quantiles, explained)
    with pytest.raises(ValueError, match="at least one completion"):
        LengthDistribution.measured([])
