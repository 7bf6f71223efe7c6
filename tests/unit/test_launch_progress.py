"""The figures that the display, the metrics and the summary share."""

import json
from types import SimpleNamespace

import pytest

from actors.report import ActorReport
from launch.config import Config
from launch.progress import PollResult, Progress, Rate
from launch.tracking import Tracker


def report(name: str, num_tokens: int, pause_s: list[float]) -> ActorReport:
    fields = dict.fromkeys(ActorReport.__dataclass_fields__, 0)
    lists = {"busy_intervals": [], "num_outcomes": {}, "num_failed": {}, "load_s": [], "waiting": ""}
    return ActorReport(**{**fields, **lists, "name": name, "num_tokens": num_tokens, "pause_s": pause_s})


def step_row(step: int, num_tokens: int, lag: float) -> dict:
    row = {"step": step, "version": step, "started_s": 10.0 * step, "finished_s": 10.0 * step + 4}
    return row | {
        "skipped": False,
        "batch/completion_tokens": num_tokens,
        "lag/token_mean": lag,
        "lag/token_max": lag,
        "buffer/ledger_gap": 0,
    }


@pytest.fixture
def config(tmp_path):
    return Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "task": {"type": "reasoning_gym", "name": "chain_sum"},
            "algorithm": {"type": "trajectory_balance"},
            "tracking": {"wandb": "disabled", "log_every": 2},
        }
    )


def test_mean_lag_is_over_completion_tokens_not_over_steps(config):
    progress = Progress(config, 0.0)
    progress.update(PollResult(steps=[step_row(1, 100, 0.0), step_row(2, 300, 4.0)]))
    progress.update(PollResult(steps=[{**step_row(3, 100, 9.0), "skipped": True}]))
    assert progress.lag_mean == pytest.approx(3.0)
    assert progress.lag_max == 4


def test_a_restarted_actor_does_not_take_back_what_it_generated(config):
    progress = Progress(config, 0.0)
    for num_tokens in (50, 120, 30):
        progress.update(PollResult(actors=[report("actor-0", num_tokens, [])]))
    assert progress.num_generated_tokens == 150


def test_every_pause_is_in_one_row_and_in_one_only(config):
    progress = Progress(config, 0.0)
    progress.update(PollResult(actors=[report("actor-0", 0, [0.2])]))
    progress.update(PollResult(actors=[report("actor-0", 0, [0.4])]))
    rows = progress.update(PollResult(steps=[step_row(1, 1, 0.0), step_row(2, 1, 0.0)]))
    assert [row["time/weight_pause"] for _, row in rows] == [pytest.approx(0.3), None]


def test_a_rate_needs_two_points():
    rate = Rate(window_s=10.0)
    rate.update(0.0, 0.0)
    assert rate.value() == 0.0
    rate.update(2.0, 10.0)
    assert rate.value() == 5.0


def test_what_is_not_finite_is_null_and_an_evaluation_is_never_left_out(config, tmp_path):
    folder = SimpleNamespace(metrics=tmp_path / "metrics.jsonl", events=tmp_path / "events.jsonl", root=tmp_path)
    with Tracker(config, folder) as tracker:
        tracker.step({"loss": 1.0}, 1)
        tracker.step({"loss": float("nan"), "lr": 0.5}, 2)
        tracker.metrics({"eval/accuracy_greedy": 0.5}, 3)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert rows == [{"step": 2, "loss": None, "lr": 0.5}, {"step": 3, "eval/accuracy_greedy": 0.5}]
