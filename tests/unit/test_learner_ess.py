"""An effective sample size below its budget lowers the learning rate."""

import numpy as np
import pytest
import torch

from algorithms.off_policy_ppo import OffPolicyPPOConfig
from algorithms.trajectory_balance import TrajectoryBalanceConfig
from learner.config import LearnerConfig
from learner.step import TrainStep
from tests.world.learner import alone, build, make_models, make_networks, make_rows, weights_of

RATE = 1e-2
BUDGET = 0.9


@pytest.fixture
def run(tmp_path):
    """Train some steps on stale data; the learner's results, and the weights before and after."""
    make_models(tmp_path)
    with alone():

        def train(algorithm=None, num_steps=1, rows=None, **config):
            algorithm = algorithm or OffPolicyPPOConfig()
            config = LearnerConfig(**{"learning_rate": RATE, **config})
            networks, reference = make_networks(tmp_path / "untied", config, algorithm)
            before = weights_of(networks)
            step, results, version = TrainStep(networks, reference, algorithm, config), [], 0
            for number in range(num_steps):
                batch = build(rows or make_rows(number), version, 64)
                results.append(step.run(batch, number))
                version = results[-1].version
            return results, before, weights_of(networks)

        yield train


def same(before, after) -> bool:
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_small_sample_lowers_the_learning_rate_by_the_root_of_its_share(run):
    (result,), before, after = run(ess_budget=BUDGET)
    ess = result.metrics["off_policy/ess_sequence"]
    scale = (ess / BUDGET) ** 0.5
    assert ess < BUDGET / 2, "the data are far from the policy"
    assert result.metrics["ess/lr_scale"] == pytest.approx(scale, rel=1e-12)
    assert result.metrics["lr"] == pytest.approx(RATE * scale, rel=1e-12)
    # exactly what a lower learning rate does, and not what this one does
    _, _, expected = run(learning_rate=RATE * scale)
    _, _, unscaled = run()
    for name in after:
        torch.testing.assert_close(after[name], expected[name], rtol=0, atol=1e-14)
    assert not same(after, unscaled)
    assert not same(before, after)


def test_without_a_budget_or_within_it_nothing_happens(run):
    (plain,), _, expected = run()
    assert plain.metrics["ess/lr_scale"] is None
    (within,), _, after = run(ess_budget=1e-6)
    assert within.metrics["ess/lr_scale"] == 1.0
    assert same(expected, after)


def test_every_update_of_a_draw_is_judged_by_its_own_samples(run):
    (result,), _, _ = run(num_minibatches=2, ess_budget=1.0)
    first, second = (update.result.lr_scale for update in result.updates)
    assert first != second


def test_a_loss_without_weights_is_judged_as_well_and_data_that_do_not_tell_pass(run):
    unweighted = TrajectoryBalanceConfig(corrections=[])
    (result,), _, _ = run(unweighted, ess_budget=BUDGET)
    assert result.metrics["ess/lr_scale"] < 1
    rows = make_rows(0)
    rows[4].logprobs[0] = np.nan
    (result,), before, after = run(unweighted, rows=rows, ess_budget=BUDGET)
    assert result.metrics["ess/lr_scale"] == 1.0
    assert not same(before, after)
