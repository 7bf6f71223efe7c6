"""Cost models are recovered from measurements, have no negative coefficients and need few measurements."""

import numpy as np
import pytest

from leeway.planning.costs import LeastSquares, TokenTime

LAWS = [
    TokenTime(4e-3, 6e-5, 2e-8, 1e-5),
    TokenTime(4e-3, 0.0, 2e-8, 0.0),
    TokenTime(0.0, 1e-3, 0.0, 0.0),
]


@pytest.mark.parametrize("law", LAWS)
def test_the_fit_recovers_the_cost_model_that_generated_the_steps(law):
    random, moments = np.random.default_rng(1), LeastSquares(4)
    for _ in range(300):
        b, c, p = int(random.integers(1, 65)), int(random.integers(100, 60_000)), int(random.choice([0, 0, 0, 512]))
        moments.add((1.0, b, c, p), law.seconds(b, c, p))
    fit = moments.fit()
    found = TokenTime(*fit.coefficients)
    for name in ("base", "per_sample", "per_kv_token", "per_prompt_token"):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-4, abs=1e-10)
    assert fit.relative_error < 1e-4
    assert moments.num_measured == 300


def test_the_fit_has_the_least_error_of_all_non_negative_cost_models():
    random = np.random.default_rng(2)
    for _ in range(30):
        terms = np.c_[np.ones(20), random.integers(1, 9, 20), random.integers(1, 900, 20)].astype(float)
        seconds, moments = random.exponential(1e-2, 20), LeastSquares(3)
        for row, each in zip(terms, seconds, strict=True):
            moments.add(row, each)
        found = np.array(moments.fit().coefficients)
        assert (found >= 0.0).all()
        error = ((terms @ found - seconds) ** 2).sum()
        scale = seconds.mean() / np.array([1.0, 4.0, 400.0])
        for _ in range(200):
            other = np.maximum(0.0, found + random.normal(size=3) * random.choice([0.01, 0.1, 1.0]) * scale)
            assert ((terms @ other - seconds) ** 2).sum() >= error * (1 - 1e-3)


def test_equal_steps_are_predicted_without_other_terms_and_no_steps_give_no_fit():
    moments = LeastSquares(4)
    assert moments.fit() is None
    for _ in range(5):
        moments.add((1.0, 8, 800, 0), 0.01)
    law = TokenTime(*moments.fit().coefficients)
    assert law.seconds(8, 800) == pytest.approx(0.01)
    assert law.per_prompt_token == 0.0
    assert moments.error_at((1.0, 1.0, 1.0, 1.0)) < 0.02
    assert moments.error_at((1.0, 2.0, 2.0, 1.0)) > 1.0, "the fixed cost is unknown"


def test_the_standard_error_of_a_prediction_equals_that_of_repeated_measurements():
    random, wanted, rows = np.random.default_rng(5), np.array([1.0, 12.0, 300.0]), np.ones((40, 3))
    rows[:, 1:] = random.integers(1, 9, (40, 2)) * [1, 100]
    found, errors = [], []
    for _ in range(400):
        moments = LeastSquares(3)
        for row in rows:
            moments.add(row, row @ [2.0, 0.5, 0.01] + random.normal(0.0, 0.3))
        found.append(wanted @ moments.fit().coefficients)
        errors.append(moments.error_at(wanted / rows.mean(axis=0)))
    assert np.mean(errors) == pytest.approx(np.std(found) / np.mean(found), rel=0.15)


def test_stored_sums_of_several_engines_can_be_added():
    random, parts, whole = np.random.default_rng(4), [LeastSquares(4), LeastSquares(4)], LeastSquares(4)
    for _ in range(40):
        terms, seconds = (1.0, *random.integers(1, 99, 3)), float(random.exponential(1e-2))
        parts[random.integers(2)].add(terms, seconds)
        whole.add(terms, seconds)
    together = LeastSquares.from_list(parts[0].as_list()) + parts[1]
    assert together.as_list() == pytest.approx(whole.as_list())
    assert together.fit().coefficients == pytest.approx(whole.fit().coefficients)
    with pytest.raises(ValueError, match="6 numbers cannot be the sums"):
        LeastSquares.from_list([1.0] * 6)
