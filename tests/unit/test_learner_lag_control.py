"""Lag control: the allowed age of data, the learning-rate brake, and the token mask."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.common.staleness import StalenessConfig, StalenessContract
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.lag_control import (
    ALLOWED_DRIFT,
    BRAKE_DRIFT,
    LEAST_LR_SCALE,
    MASK_AT,
    LagControl,
    LagState,
    masked,
    root_length,
)
from leeway.learner.step import TrainStep
from tests.world.learner import build, make_models, make_networks, make_rows, single_rank, weights_of

RATE = 1e-2
PACE = 5.0
"""Drift per token of a version at a learning rate of 1."""
ROOT = 3.0
ALLOWED, BRAKE = ALLOWED_DRIFT / 3, BRAKE_DRIFT / 3
"""Targets for answers of nine tokens, in drift per token."""


def control(max_lag=16, updates_per_step=1, **knobs):
    return LagControl(StalenessContract(StalenessConfig(max_lag=max_lag, **knobs), 1, updates_per_step))


def train(control, num_updates, rate=1e-3, pace=PACE, history=None):
    """Simulate a policy; its drift is the sum of learning rates since sampling. Return (drift, lag, scale) per update.

    Every update fills the queue to the current allowance; data stay in the queue if the allowance falls.
    """
    rates, queue = ([], []) if history is None else history
    queue += [0] * (control.allowed - len(queue)) if not rates else []
    seen = []
    for _ in range(num_updates):
        version = len(rates)
        sampled = queue.pop(0)
        while len(queue) < control.allowed:
            queue.append(version)
        drift, lag = pace * sum(rates[sampled:]), float(version - sampled)
        scale = control.observe(drift, lag, rate, ROOT)
        rates.append(rate * scale)
        seen.append((drift, lag, scale))
    return seen


def test_the_allowance_converges_to_the_target_drift():
    drift, lag, scale = train(control(), 200, rate=2.4e-3)[-1]
    assert lag == ALLOWED // (PACE * 2.4e-3)
    assert drift <= ALLOWED
    assert scale == 1
    assert train(control(), 200, rate=ALLOWED / PACE / 17)[-1][1:] == (16, 1)


def test_the_target_per_token_falls_with_the_root_of_the_length():
    lags = {}
    for length in (1, 3, 12, 36, 1e4):
        found = control(max_lag=64)
        for _ in range(5):
            answer = SimpleNamespace(sequence_T=range(int(length)), rewards_B=[0.0])
            found.observe(0.01, 1.0, RATE, root_length(answer))
        lags[length] = found.allowed
    assert lags == {1: 9, 3: 9, 12: 4, 36: 2, 1e4: 2}


def test_the_allowance_stays_between_the_least_bound_plus_one_step_and_max_lag():
    fast = control()
    train(fast, 100, rate=1.0)
    assert fast.allowed == 2
    assert train(control(max_lag=1), 100, rate=1.0)[-1][1] <= 1
    assert train(control(), 100, rate=1e-6)[-1][1] == 16
    several = control(updates_per_step=4, max_actor_lag=0)
    several.observe(10.0, 4.0, RATE, ROOT)
    several.observe(10.0, 4.0, RATE, ROOT)
    assert several.allowed == 7


def test_the_drift_stays_bounded_after_a_tenfold_learning_rate():
    controlled, history = control(), ([], [])
    before = train(controlled, 100, rate=2e-3, history=history)
    after = train(controlled, 60, rate=2e-2, history=history)
    drifts = [drift for drift, _, _ in after]
    assert before[-1][2] == 1
    assert max(drifts) < 1.2 * BRAKE
    assert max(drifts[16 + 4 :]) <= ALLOWED * (1 + 1e-9), "the allowance is at its minimum"


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
            st.floats(0, 64),
            st.floats(0, 1, allow_subnormal=False),
            st.floats(0, 1e5),
        ),
        max_size=40,
    )
)
def test_the_allowance_and_the_rate_stay_within_bounds_for_any_measurement(measured):
    controlled = control()
    for drift, lag, rate, length in measured:
        scale = controlled.observe(drift if drift is None else abs(drift), lag, rate, math.sqrt(length))
        assert LEAST_LR_SCALE <= scale <= 1
        assert 2 <= controlled.allowed <= 16


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf, 0.0])
def test_an_unknown_drift_gives_the_least_allowance_and_the_scheduled_rate(unknown, caplog):
    controlled = control()
    train(controlled, 50)
    for _ in range(2):
        assert controlled.observe(unknown, 16.0, 1.0, ROOT) == 1
        assert controlled.allowed == 2
    (message,) = caplog.messages
    assert "the drift of the data is unknown" in message
    assert "allows a lag of up to 2" in message


def test_a_policy_that_does_not_move_has_an_allowance_of_max_lag():
    still = control()
    for _ in range(5):
        assert still.observe(1e-9, 3.0, RATE, ROOT) == 1
    assert still.allowed == 16


def test_lag_control_continues_identically_from_its_saved_state():
    one, other = control(), control()
    history = ([], [])
    train(one, 30, rate=3e-3, history=history)
    other.state = one.state
    again = ([*history[0]], [*history[1]])
    assert train(one, 30, rate=3e-3, history=history) == train(other, 30, rate=3e-3, history=again)


# --- in a step -------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Return a function that trains on stale data and returns the step results and the final weights."""
    make_models(tmp_path)
    with single_rank():

        def train(control=None, algorithm=None, num_steps=1, **config):
            algorithm = algorithm or TrajectoryBalanceConfig()
            one_pass = config.pop("one_pass", True)
            config = LearnerConfig(**{"learning_rate": RATE, "warmup_steps": 0, **config})
            networks, reference = make_networks(tmp_path / "untied", config, algorithm)
            step = TrainStep(networks, reference, algorithm, config, control=control, one_pass=one_pass)
            results, version = [], 0
            for number in range(num_steps):
                results.append(step.run(build(make_rows(number), version, 64), number))
                version = results[-1].version
            return results, weights_of(networks)

        yield train


def test_the_brake_lowers_the_learning_rate(run):
    strict = control()
    strict.state = LagState(16, pace=1e6, rate=RATE)
    (result,), braked = run(strict)
    assert result.metrics["brake/lr_scale"] == LEAST_LR_SCALE
    assert result.metrics["lr"] == pytest.approx(RATE * LEAST_LR_SCALE)
    assert result.metrics["lag/allowed"] == 2
    _, slow = run(control(), learning_rate=RATE * LEAST_LR_SCALE)
    _, fast = run(control())
    for name in braked:
        torch.testing.assert_close(braked[name], slow[name], rtol=0, atol=1e-14)
    assert any(not torch.equal(braked[name], fast[name]) for name in braked)


@pytest.mark.parametrize("algorithm", [TrajectoryBalanceConfig(), OffPolicyPPOConfig()])
def test_masked_tokens_have_no_gradient_in_one_pass_and_in_two(run, algorithm):
    (free,), unmasked = run(algorithm=algorithm)
    assert free.metrics["brake/masked_frac"] is None
    (result,), once = run(control(), algorithm)
    assert 0 < result.metrics["brake/masked_frac"] < 1
    _, twice = run(control(), algorithm, one_pass=False)
    for name in once:
        torch.testing.assert_close(once[name], twice[name], rtol=0, atol=1e-12)
    assert any(not torch.equal(once[name], unmasked[name]) for name in once)


def test_only_a_token_that_moves_further_from_the_behaviour_policy_is_masked():
    batch = build(make_rows(0), 0, 64)
    num_tokens = len(batch.sequence_T)
    leaves = torch.full((num_tokens,), -1.0)
    inputs = batch.loss_inputs(Leaves(leaves), Leaves(leaves), leaves)
    for moved, gradient, kept in [
        (MASK_AT + 0.01, 1.0, True),
        (MASK_AT + 0.01, -1.0, False),
        (-MASK_AT - 0.01, 1.0, False),
        (-MASK_AT - 0.01, -1.0, True),
        (MASK_AT - 0.01, -1.0, True),
        (math.nan, -1.0, True),
    ]:
        inputs.behaviour_logprobs_T[:] = -1.0 - moved
        found = masked(torch.full((num_tokens,), gradient), inputs)
        assert bool((found == (gradient if kept else 0.0)).all())
