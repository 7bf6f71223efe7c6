"""Stability: a reward that falls on stale samples raises an alert with a remedy; other rewards do not."""

import random
from pathlib import Path

import pytest

from leeway.common.staleness import StalenessContract
from leeway.launch.config import load_config
from leeway.launch.observe.alerts import LEARNER, WINDOW, Alerts, Stability
from leeway.launch.observe.status import PollResult

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
NOISE = 0.03
"""Standard deviation of a step's mean reward, as measured with 256 samples in 32 groups."""


def rows(rewards, ess=0.4, k3=0.01, first=1):
    return [
        {
            "step": step,
            "reward/mean": reward,
            "reward/std": 0.5,
            "off_policy/ess_sequence": ess,
            "mismatch/k3": k3,
            "lag/allowed": 3,
            "brake/lr_scale": 0.9,
        }
        for step, reward in enumerate(rewards, first)
    ]


def noisy(means, seed=0):
    noise = random.Random(seed)
    return [noise.gauss(mean, NOISE) for mean in means]


def alerts_of(steps, *overrides):
    """Return (kind, text) of each alert of these steps."""
    config = load_config(DEMO, overrides)
    alerts = Alerts(config, StalenessContract(config.weight_sync, 1))
    return [(alert.kind, alert.text) for row in steps for alert in alerts.check(PollResult(steps=[row]))]


COLLAPSE = [0.45] * 30 + [0.45 - 0.01 * n for n in range(30)] + [0.17] * 30


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_falls_on_stale_samples_is_reported_once_with_a_remedy(seed):
    ((kind, text),) = alerts_of(rows(noisy(COLLAPSE, seed)), "--weight_sync.lag_control", "on")
    assert kind == "unstable"
    assert text.startswith("the reward fell from 0.4")
    assert "(steps " in text
    assert "effective sample size of 40%" in text
    assert "learner.learning_rate (now 0.0001): lag control already limits the lag of new samples to 3 " in text
    assert "and the learning rate to 90%" in text


def test_a_falling_reward_is_reported_before_the_fall_ends():
    steps = rows(noisy(COLLAPSE))
    assert alerts_of(steps[: 30 + WINDOW + 5])  # the alert comes during the fall


@pytest.mark.parametrize(
    ("overrides", "tried", "not_tried"),
    [
        (["--algorithm.corrections", "[]"], 'algorithm.corrections = ["token_tis"]', "learning_rate"),
        (["--weight_sync.max_lag", "0"], "learner.learning_rate", "max_lag"),
        ([], "lag control already limits the lag of new samples to 3 versions", 'lag_control = "on"'),
        (["--weight_sync.lag_control", "off"], 'weight_sync.max_lag (now 4), or lag_control = "on"', "already"),
        (["--algorithm.type", "off_policy_ppo", "--algorithm.corrections", "[]"], "learner.learning_rate", "token_tis"),
    ],
)
def test_the_remedy_is_a_setting_that_the_run_lacks(tmp_path, overrides, tried, not_tried):
    path = tmp_path / "run.toml"
    path.write_text(DEMO.read_text().replace("beta = 0.2\n", "").replace('"demo_model"', f'"{DEMO.parent}/demo_model"'))
    stability = Stability(load_config(path, overrides))
    for row in rows(noisy(COLLAPSE)):
        stability.ingest(row)
    assert tried in stability.text
    assert not_tried not in stability.text


@pytest.mark.parametrize("seed", range(20))
def test_a_fluctuating_or_rising_reward_raises_no_alert(seed):
    swings = [0.6 + 0.02 * (-1) ** (n // 40) for n in range(600)]
    assert alerts_of(rows(noisy(swings, seed))) == []
    assert alerts_of(rows(noisy([0.3 + n / 2000 for n in range(600)], seed))) == []


def test_a_reward_that_falls_on_fresh_samples_raises_no_alert():
    assert alerts_of(rows(noisy(COLLAPSE), ess=0.95)) == []
    assert alerts_of(rows(noisy(COLLAPSE), ess=None)) == []


def test_the_alert_ends_when_the_reward_recovers_and_may_recur():
    back = [0.17] * 10 + [0.46] * 60
    kinds = [kind for kind, _ in alerts_of(rows(noisy(COLLAPSE + back + COLLAPSE[30:])))]
    assert kinds == ["unstable", "unstable_ended", "unstable"]


def test_a_policy_that_drifts_from_its_samples_is_reported():
    ((kind, text),) = alerts_of(rows(noisy([0.4] * 60), k3=0.3))
    assert kind == "unstable"
    assert "0.3 nats per token away from its samples" in text


def test_repeated_steps_of_a_restarted_learner_are_counted_once():
    steps = rows(noisy(COLLAPSE))
    again = rows(noisy([0.45] * 60), first=20)
    assert alerts_of(steps[:40] + again) == []


def test_skipped_steps_are_ignored():
    steps = rows(noisy(COLLAPSE))
    assert alerts_of([{**row, "skipped": True} for row in steps]) == []


def test_a_loss_without_importance_weights_gives_a_startup_warning():
    def warning(*overrides):
        return Stability(load_config(DEMO, overrides)).startup_warning

    assert "algorithm.corrections = [] with weight_sync.max_lag = 4" in warning("--algorithm.corrections", "[]")
    assert warning("--algorithm.corrections", "[]", "--weight_sync.max_lag", "0") == ""
    assert warning() == ""


def test_the_source_of_the_alert_is_the_learner():
    config = load_config(DEMO)
    alerts = Alerts(config, StalenessContract(config.weight_sync, 1))
    alerts.check(PollResult(steps=rows(noisy(COLLAPSE))))
    (alert,) = alerts.active
    assert (alert.source, alert.action) == (LEARNER, None)
