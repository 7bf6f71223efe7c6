"""An effective sample size below its budget lowers the learning rate, or drops the update."""

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
    assert result.metrics["ess/dropped"] == 0
    # exactly what a lower learning rate does, and not what this one does
    _, _, expected = run(learning_rate=RATE * scale)
    _, _, unscaled = run()
    for name in after:
        torch.testing.assert_close(after[name], expected[name], rtol=0, atol=1e-14)
    assert not same(after, unscaled)
    assert not same(before, after)


@pytest.mark.parametrize("action", ["scale_lr", "drop"])
def test_without_a_budget_or_within_it_nothing_happens(run, action):
    (plain,), _, expected = run()
    assert (plain.metrics["ess/lr_scale"], plain.metrics["ess/dropped"]) == (None, None)
    (within,), _, after = run(ess_budget=1e-6, ess_action=action)
    assert (within.metrics["ess/lr_scale"], within.metrics["ess/dropped"]) == (1.0, 0)
    assert same(expected, after)


def test_a_dropped_update_changes_nothing_and_the_version_stands_still_for_so_many_in_a_row(run, monkeypatch):
    results, before, after = run(num_steps=2, ess_budget=BUDGET, ess_action="drop")
    assert same(before, after)
    assert [(result.version, result.skipped, result.num_non_finite) for result in results] == [(0, True, 0)] * 2
    assert [result.metrics["ess/dropped"] for result in results] == [1, 1]
    assert results[0].metrics["grad_norm"] is None
    assert results[0].metrics["ess/lr_scale"] is None
    results, before, after = run(num_steps=4, ess_budget=BUDGET, ess_action="drop")
    assert [result.version for result in results] == [0, 0, 1, 1]
    assert 0 < results[2].metrics["ess/lr_scale"] < 1, "the update after two drops is taken, at a lower rate"
    assert not same(before, after)
    monkeypatch.setattr("learner.step.MAX_DROPS", 0)
    results, _, _ = run(num_steps=2, ess_budget=BUDGET, ess_action="drop")
    assert [result.version for result in results] == [1, 2]


def test_all_updates_of_a_draw_may_be_dropped_for_its_samples_do_not_become_fresher_meanwhile(run):
    several = {"num_minibatches": 2, "num_epochs": 2, "ess_budget": BUDGET, "ess_action": "drop"}
    results, _, _ = run(num_steps=4, **several)
    assert [result.metrics["ess/dropped"] for result in results] == [4, 4, 0, 4]
    assert [result.version for result in results] == [0, 0, 4, 4]


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
    (result,), before, after = run(unweighted, rows=rows, ess_budget=BUDGET, ess_action="drop")
    assert result.metrics["ess/lr_scale"] == 1.0
    assert not same(before, after)


def test_a_non_finite_update_is_that_and_not_dropped(run):
    rows = make_rows(0, reward=1e308)
    rows[0] = make_rows(0, reward=-1e308)[0]
    (result,), before, after = run(TrajectoryBalanceConfig(), rows=rows, ess_budget=BUDGET, ess_action="drop")
    assert (result.num_non_finite, result.metrics["ess/dropped"]) == (1, 0)
    assert same(before, after)
