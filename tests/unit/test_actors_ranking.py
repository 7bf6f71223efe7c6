"""Predicted completion lengths of unseen prompts, fitted to the lengths of other prompts."""

import numpy as np
import pytest

from leeway.actors.tasks.task import Problem
from leeway.planning.lengths import LengthModel
from leeway.planning.ranking import FEWEST, Features, fit_prior

CLASSES, NUM_PROMPTS, NUM_KNOWN, K = 16, 2_000, 1_000, 8
OWN = np.random.default_rng(3).normal(0.0, 0.8, CLASSES)
"""Mean log-length offset of the prompts of each class."""


def problem(random, kind, columns=None):
    """Return a prompt with two tokens that encode its class, among uninformative tokens."""
    others = random.integers(100, 400, random.integers(4, 20)).tolist()
    at = int(random.integers(0, len(others)))
    return Problem("", "", columns or {}, token_ids=[*others[:at], 10 + kind % 4, 20 + kind // 4, *others[at:]])


@pytest.fixture(scope="module")
def world():
    random = np.random.default_rng(0)
    kinds = random.integers(0, CLASSES, NUM_PROMPTS)
    return kinds, Features([problem(random, int(kind)) for kind in kinds])


def recall(scores, longest):
    num = len(longest) // 5
    return len({*np.argsort(scores)[-num:]} & {*np.argsort(longest)[-num:]}) / num


def test_unseen_prompts_are_ranked_by_their_tokens(world):
    kinds, features = world
    random, model = np.random.default_rng(1), LengthModel(NUM_PROMPTS)
    for prompt in range(NUM_KNOWN):
        values = 5.0 + OWN[kinds[prompt]] + random.normal(0.0, 0.5, K)
        model.update(prompt, np.exp(values).astype(int).tolist(), [False] * K, 0)
    known = np.arange(NUM_KNOWN)
    visits = [model.get(prompt) for prompt in known.tolist()]
    expected = fit_prior(features, known, *np.array([[each.mean, each.variance] for each in visits]).T)
    model.set_prior(0, *expected)
    others = np.arange(NUM_KNOWN, NUM_PROMPTS)
    predicted = model.longest_of(others, K, 0)
    longest = np.exp(5.0 + OWN[kinds[others]] + random.normal(0.0, 0.5, (K, len(others)))).max(axis=0)
    best = np.mean([recall(OWN[kinds[others]] + 1e-9 * random.standard_normal(len(others)), longest) for _ in range(9)])
    assert recall(predicted, longest) >= 0.95 * best
    assert 0.83 <= np.mean(longest <= predicted) <= 0.97
    assert expected.variance < 0.2 * OWN.var()


def test_numeric_columns_predict_lengths():
    random = np.random.default_rng(2)
    terms = random.integers(1, 9, 600)
    features = Features([problem(random, 0, {"terms": int(each), "name": "x"}) for each in terms])
    known = np.arange(300)
    expected = fit_prior(features, known, 0.3 * terms[known] + 0.0, np.full(300, 0.01))
    assert np.corrcoef(expected.means[300:], terms[300:])[0, 1] > 0.95


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), 10**400, -1e200, None, "7"])
def test_a_column_with_an_invalid_number_is_ignored(odd):
    random = np.random.default_rng(2)
    rows = [{"odd": odd if each == 7 else each, "fair": each} for each in range(300)]
    features = Features([problem(random, 0, row) for row in rows])
    assert features.numbers.shape == (300, 2)
    known = np.arange(100)
    expected = fit_prior(features, known, 0.1 * known, np.full(100, 0.01))
    assert np.isfinite(expected.means).all()


def test_uninformative_tokens_give_no_prior(world):
    _, features = world
    random, known = np.random.default_rng(4), np.arange(NUM_KNOWN)
    assert fit_prior(features, known, random.standard_normal(NUM_KNOWN), np.full(NUM_KNOWN, 0.01)) is None
    few = np.arange(FEWEST - 1)
    assert fit_prior(features, few, random.standard_normal(len(few)), np.full(len(few), 0.01)) is None


def test_n_grams_do_not_cross_prompts():
    apart = Features([Problem("", "", {}, token_ids=ids) for ids in ([1, 2], [3], [3], [9, 1, 2])])
    rows = apart.rows(np.array([1, 2, 0]))
    assert (rows[0] != rows[1]).nnz == 0
    one, three = apart.rows(np.array([0]))[:, : 2**18], apart.rows(np.array([3]))[:, : 2**18]
    assert set(one.indices) <= set(three.indices), "a pair of tokens has the same feature at any position"
    assert (len(one.indices), len(three.indices)) == (3, 6)
