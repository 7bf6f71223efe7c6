"""Stability: a reward that falls while the samples are old is told with what to try, and nothing else is."""

import random
from pathlib import Path

import pytest

from common.staleness import StalenessContract
from launch.config import load_config
from launch.observe.status import PollResult
from launch.observe.tripwires import LEARNER, WINDOW, Stability, Tripwires

DEMO = Path(__file__).parents[2] / "examples" / "demo.toml"
NOISE = 0.03
"""Standard deviation of a step's mean reward, as 256 samples in 32 groups have it."""


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


def told(steps, *overrides):
    """(kind, text) of what a run says of these steps."""
    config = load_config(DEMO, overrides)
    wires = Tripwires(config, StalenessContract(config.weight_sync, 1))
    return [(trip.kind, trip.text) for row in steps for trip in wires.look(PollResult(steps=[row]))]


COLLAPSE = [0.45] * 30 + [0.45 - 0.01 * n for n in range(30)] + [0.17] * 30


@pytest.mark.parametrize("seed", range(5))
def test_a_reward_that_falls_on_old_samples_is_told_once_with_the_steps_and_what_to_try(seed):
    ((kind, text),) = told(rows(noisy(COLLAPSE, seed)), "--weight_sync.lag_control", "on")
    assert kind == "unstable"
    assert text.startswith("the reward fell from 0.4")
    assert "(steps " in text
    assert "40% of the samples count" in text
    assert "learner.learning_rate (now 0.0001): lag control already lets new samples be no older than 3 " in text
    assert "and takes 90% of the rate" in text


def test_it_is_told_before_the_fall_is_over():
    steps = rows(noisy(COLLAPSE))
    assert told(steps[: 30 + WINDOW + 5])  # of 30 steps in which it falls


@pytest.mark.parametrize(
    ("overrides", "tried", "not_tried"),
    [
        (["--algorithm.corrections", "[]"], 'algorithm.corrections = ["token_tis"]', "learning_rate"),
        (["--weight_sync.max_lag", "0"], "learner.learning_rate", "max_lag"),
        ([], "lag control already lets new samples be no older than 3 versions", 'lag_control = "on"'),
        (["--weight_sync.lag_control", "off"], 'weight_sync.max_lag (now 4), or lag_control = "on"', "already"),
        (["--algorithm.type", "off_policy_ppo", "--algorithm.corrections", "[]"], "learner.learning_rate", "token_tis"),
    ],
)
def test_what_is_to_be_tried_is_what_the_run_has_not(tmp_path, overrides, tried, not_tried):
    path = tmp_path / "run.toml"
    path.write_text(DEMO.read_text().replace("beta = 0.2\n", "").replace('"demo_model"', f'"{DEMO.parent}/demo_model"'))
    stability = Stability(load_config(path, overrides))
    for row in rows(noisy(COLLAPSE)):
        stability.take_in(row)
    assert tried in stability.text
    assert not_tried not in stability.text


@pytest.mark.parametrize("seed", range(20))
def test_a_reward_that_only_wavers_or_rises_is_nothing_to_tell(seed):
    swings = [0.6 + 0.02 * (-1) ** (n // 40) for n in range(600)]
    assert told(rows(noisy(swings, seed))) == []
    assert told(rows(noisy([0.3 + n / 2000 for n in range(600)], seed))) == []


def test_a_reward_that_falls_on_fresh_samples_has_another_cause():
    assert told(rows(noisy(COLLAPSE), ess=0.95)) == []
    assert told(rows(noisy(COLLAPSE), ess=None)) == []


def test_it_is_over_when_the_reward_is_back_and_may_come_again():
    back = [0.17] * 10 + [0.46] * 60
    kinds = [kind for kind, _ in told(rows(noisy(COLLAPSE + back + COLLAPSE[30:])))]
    assert kinds == ["unstable", "unstable_ended", "unstable"]


def test_a_policy_that_drifts_from_its_samples_is_told_though_the_reward_stands():
    ((kind, text),) = told(rows(noisy([0.4] * 60), k3=0.3))
    assert kind == "unstable"
    assert "0.3 nats a token away from its samples" in text


def test_steps_that_a_restarted_learner_takes_again_are_counted_once():
    steps = rows(noisy(COLLAPSE))
    again = rows(noisy([0.45] * 60), first=20)
    assert told(steps[:40] + again) == []


def test_skipped_steps_say_nothing():
    steps = rows(noisy(COLLAPSE))
    assert told([{**row, "skipped": True} for row in steps]) == []


def test_a_loss_that_was_left_without_weights_is_warned_of_before_the_first_step():
    def foreseen(*overrides):
        return Stability(load_config(DEMO, overrides)).foreseen

    assert "algorithm.corrections = [] with weight_sync.max_lag = 4" in foreseen("--algorithm.corrections", "[]")
    assert foreseen("--algorithm.corrections", "[]", "--weight_sync.max_lag", "0") == ""
    assert foreseen() == ""


def test_the_learner_is_whom_it_is_told_of():
    config = load_config(DEMO)
    wires = Tripwires(config, StalenessContract(config.weight_sync, 1))
    wires.look(PollResult(steps=rows(noisy(COLLAPSE))))
    (trip,) = wires.standing
    assert (trip.who, trip.action) == (LEARNER, None)
