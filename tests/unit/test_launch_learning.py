"""The verdict on a run, and the alerts on runs that cannot learn: each starts once, ends once, and does not flap."""

from math import sqrt
from pathlib import Path

import pytest

from leeway.common.staleness import StalenessContract
from leeway.launch.config import load_config
from leeway.launch.observe.alerts import Alerts
from leeway.launch.observe.learning import FEW_STEPS, NUM_ANSWERS, STREAK, WINDOW, accuracy_change, verdict
from leeway.launch.observe.status import Accuracy, ActorStatus, PollResult, RunStatus
from tests.unit.made_up_run import report

EXAMPLES = Path(__file__).parents[2] / "examples"
HEALTHY = {
    "reward/mean": 0.5, "reward/max": 1.0, "buffer/uninformative_frac": 0.4, "grad_norm": 2.0, "length/cut_frac": 0.1,
    "policy/entropy": 1.0,
}  # fmt: skip
SIGNS = {
    "equal_rewards": {"buffer/uninformative_frac": 1.0},
    "no_gradient": {"grad_norm": 0.0},
    "all_cut": {"length/cut_frac": 1.0, "reward/max": 0.9},
}
ANSWERS = {"rewards": {0.0: 60}, "num_cut": 0, "answers": [f"prompt '{n}+1=', completion 'x'" for n in range(4)]}


class Watched:
    """Alerts of a run whose steps and evaluations a test makes up."""

    def __init__(self, example="demo", *overrides):
        config = load_config(EXAMPLES / f"{example}.toml", overrides)
        self.alerts = Alerts(config, StalenessContract(config.weight_sync, 1), run="runs/first")
        self.evaluations, self.num_steps = [], 0

    def step(self, actors=(), **changes):
        self.num_steps += 1
        row = {"step": self.num_steps} | HEALTHY | changes
        return self.alerts.check(PollResult(steps=[row], actors=list(actors)))

    def kinds(self, num, **changes):
        return [alert.kind for _ in range(num) for alert in self.step(**changes)]

    def evaluate(self, greedy, num=400, actors=()):
        self.alerts.check(PollResult(actors=list(actors)))
        self.evaluations.append(accuracy(greedy, num=num))
        return [(alert.kind, alert.text) for alert in self.alerts.evaluated(self.evaluations)]


def accuracy(greedy, sampled=0.5, num=400):
    return Accuracy(versions="1", greedy=greedy, sampled=sampled, num_problems=num)


# --- alerts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIGNS)
def test_a_sign_is_reported_once_after_five_steps_and_ends_after_five_steps_without_it(kind):
    watched = Watched()
    assert watched.kinds(STREAK - 1, **SIGNS[kind]) == []
    assert watched.kinds(1) == [], "a single good step starts the count again"
    assert watched.kinds(STREAK - 1, **SIGNS[kind]) == []
    assert watched.kinds(20, **SIGNS[kind]) == [kind]
    for _ in range(10):
        assert watched.kinds(STREAK - 1) + watched.kinds(1, **SIGNS[kind]) == [], "alternating steps do not end it"
    assert watched.kinds(20) == [f"{kind}_ended"]
    assert watched.alerts.active == []


@pytest.mark.parametrize("kind", SIGNS)
def test_alternating_good_and_bad_steps_raise_no_alert(kind):
    watched = Watched()
    assert [watched.kinds(1) + watched.kinds(STREAK - 1, **SIGNS[kind]) for _ in range(20)] == [[]] * 20


def test_skipped_steps_neither_start_nor_end_an_alert():
    watched = Watched()
    assert watched.kinds(20, skipped=True, grad_norm=None) == []
    assert watched.kinds(STREAK, grad_norm=0.0) == ["no_gradient"]
    assert watched.kinds(20, skipped=True, grad_norm=None) == []


def test_equal_rewards_show_rewards_answers_and_the_next_command():
    watched = Watched()
    watched.step([report("actor-0", **ANSWERS), report("actor-1", rewards={0.0: 3, None: 2}, answers=[])])
    watched.kinds(STREAK, **SIGNS["equal_rewards"])
    (alert,) = watched.alerts.active
    assert "0.0 (63), None (2)" in alert.text
    assert [f"'{n}+1='" in alert.text for n in range(4)] == [False, True, True, True], "the three newest answers"
    assert alert.text.endswith("Run `leeway check-reward runs/first/config.toml`")


def test_equal_rewards_are_no_fault_of_a_loss_that_does_not_compare_groups():
    overrides = ("--algorithm.baseline", "batch")
    assert Watched("demo-ppo", *overrides).kinds(20, **SIGNS["equal_rewards"]) == []
    assert Watched("demo-ppo").kinds(20, **SIGNS["equal_rewards"]) == ["equal_rewards"]


def test_cut_answers_of_which_one_is_correct_are_no_fault():
    assert Watched().kinds(20, **{"length/cut_frac": 1.0, "reward/max": 1.0}) == []
    assert Watched("demo", "--task.correct_at", "0.5").kinds(20, **SIGNS["all_cut"]) == []


@pytest.mark.parametrize(
    ("rewards", "num_cut", "expected"),
    [
        ({0.0: 60}, 0, ["equal_rewards"]),
        ({None: 60}, 0, ["equal_rewards"]),
        ({0.0: 59, 1.0: 1}, 59, []),
        ({0.0: 59, 0.5: 1}, 60, ["all_cut"]),
        ({0.0: 59, 1.0: 1}, 60, []),
        ({each / 60: 1 for each in range(61)}, 61, []),
        ({0.0: NUM_ANSWERS - 1}, NUM_ANSWERS - 1, []),
    ],
)
def test_the_first_evaluation_raises_alerts_before_the_first_step(rewards, num_cut, expected):
    watched = Watched()
    actor = report("actor-0", rewards=rewards, num_cut=num_cut, answers=[])
    assert [kind for kind, _ in watched.evaluate(0.0, actors=[actor])] == expected
    assert watched.kinds(20) == [f"{kind}_ended" for kind in expected]
    assert watched.evaluate(0.0, actors=[actor]) == [], "only the first evaluation counts"


def test_a_held_out_accuracy_below_the_first_by_two_errors_is_reported_until_it_is_within_one():
    watched = Watched()
    error = accuracy_change([accuracy(0.5), accuracy(0.45)]).error
    assert watched.evaluate(0.5) == []
    assert watched.evaluate(0.5 - 1.9 * error) == []
    ((kind, text),) = watched.evaluate(0.4)
    assert kind == "fell"
    assert "greedy 0.50 -> 0.40 (-0.10 ± 0.03)" in text
    assert watched.evaluate(0.5 - 1.9 * error) == [], "it starts at two errors and ends at one"
    ((kind, _),) = watched.evaluate(0.5 - 0.9 * error)
    assert kind == "fell_ended"
    assert watched.evaluate(0.5 - 1.9 * error) == []


def entropies(watched, *means, **changes):
    return [kind for mean in means for kind in watched.kinds(WINDOW, **{"policy/entropy": mean}, **changes)]


def test_a_collapsed_entropy_is_reported_until_it_is_well_above_the_limit():
    watched = Watched()
    assert entropies(watched, 1.0, 0.11) == []
    assert entropies(watched, 0.09) == ["collapsed"]
    assert entropies(watched, 0.15, 0.09, 0.19) == []
    assert entropies(watched, 0.3, 0.12) == ["collapsed_ended"]


@pytest.mark.parametrize("gained", ["reward", "accuracy"])
def test_a_low_entropy_of_a_policy_that_has_improved_is_no_fault(gained):
    watched = Watched()
    watched.evaluate(0.5)
    entropies(watched, 1.0)
    if gained == "accuracy":
        watched.evaluate(0.6)
    better = {"reward/mean": 0.6} if gained == "reward" else {}
    assert "collapsed" not in entropies(watched, 0.01, **better)[:1], "the last steps of the window have improved"
    watched.evaluate(0.5)
    assert entropies(watched, 0.01)[-1:] == ["collapsed"]


# --- the verdict --------------------------------------------------------------------------------------


def status_of(*accuracies, actors=True):
    status = RunStatus(run="x", run_id="x", folder="x", pid=1, host="h", started_s=0.0, num_steps=9, max_lag=4)
    status.evaluations = list(accuracies)
    status.actors = [ActorStatus(name="actor-0", state="working", restarts=0, host="", pid=0, log="")] if actors else []
    return status


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (0.52, 0.79, "learned: greedy 0.52 -> 0.79 (+0.27 ± 0.02)"),
        (0.52, 0.53, "no improvement: greedy 0.52 -> 0.53 (+0.01 ± 0.02)"),
        (0.52, 0.41, "worse: greedy 0.52 -> 0.41 (-0.11 ± 0.02)"),
    ],
)
def test_the_verdict_compares_the_first_and_the_last_evaluation(before, after, expected):
    accuracies = [accuracy(each, None, num=1024) for each in (before, 0.6, after)]
    assert verdict(status_of(*accuracies), []) == expected


def test_the_error_of_a_change_is_that_of_two_independent_shares_with_two_answers_more():
    error = accuracy_change([accuracy(0.0, num=8), accuracy(1.0, num=18)]).error
    assert error == pytest.approx(sqrt(0.1 * 0.9 / 10 + 0.05 * 0.95 / 20), abs=1e-12)
    assert not accuracy_change([accuracy(4 / 64, num=64), accuracy(0.0, num=64)]).gain < -2 * error


def test_without_evaluations_the_verdict_compares_mean_rewards():
    rewards = [0.1, 0.11] * 10 + [0.3, 0.32] * 10
    assert verdict(status_of(), rewards) == "learned: reward 0.105 -> 0.310 (+0.205 ± 0.004)"
    assert verdict(status_of(), rewards[:20] * 2).startswith("no improvement: reward 0.105 -> 0.105 (+0.000")
    assert verdict(status_of(), rewards[: FEW_STEPS - 1]).startswith("unknown: ")


def test_a_verdict_names_every_known_change_and_ignores_rewards_of_recorded_samples():
    evaluations = accuracy(0.5, 0.4), accuracy(0.7, 0.6)
    assert "sampled 0.40 -> 0.60 (+0.20 ± 0.03), reward" in verdict(status_of(*evaluations), [0.1, 0.2] * 20)
    assert verdict(status_of(actors=False), [0.1] * 20 + [0.9] * 20).startswith("unknown: ")
    assert verdict(status_of(accuracy(None, 0.4), accuracy(None, 0.6)), []).startswith("learned: sampled 0.40")
