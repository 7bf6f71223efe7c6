"""benchmarks/trl.py: metrics computed from runs of Leeway and TRL, and equal settings of Leeway and TRL."""

import pytest
from benchmarks import trl
from benchmarks.trl_parts import trainer

from leeway.actors.tasks import load_task
from leeway.launch.config import load_config


def side(samples_per_s, target_s=None, accuracy=None):
    cpu_ms = {"actor": 600 / samples_per_s, "rewards": 0.001}
    return {"samples_per_s": samples_per_s, "cpu_ms": cpu_ms, "accuracy": accuracy, "target_s": target_s}


ROUNDS = [
    {"short": {"trl": side(1000, 12, 0.97), "leeway": side(500, 30, 0.98), "leeway, same loss": side(700, 9, 0.97)}},
    {"short": {"trl": side(900, 14, 0.96), "leeway": side(630, None, 0.89), "leeway, same loss": side(720, 9, 0.97)}},
    {"short": {"trl": side(1000, 12, 0.97), "leeway": side(600, 28, 0.98), "leeway, same loss": side(710, 9, 0.97)}},
]


def test_ratios_are_medians_of_rounds_and_a_target_missed_once_has_no_time():
    found = trl.compared(ROUNDS)
    assert found["short_over_trl"] == pytest.approx(0.6)
    assert found["short_same_loss_over_trl"] == pytest.approx(0.71)
    assert found["cases"]["short"]["trl"] == {
        "cpu_ms": {"actor": 0.6, "rewards": 0.001},
        "samples_per_s": pytest.approx(966.67, abs=0.1),
        "accuracy": 0.97,
        "target_s": 12,
    }
    assert found["cases"]["short"]["leeway"]["target_s"] is None


def test_the_page_shows_both_sides_and_the_missed_bars():
    result = {**dict.fromkeys(trl.BARS, 2.5), **trl.compared(ROUNDS), "trl": "trl==1.16.0"}
    machine = {"cores": 2, "processor": "x", "python": "3.11", "load_before": 0.1, "commit": "abc"}
    bars = trl.judged(result, trl.BARS, "at least", at_full_size=True)
    text = "\n".join(trl.page({**result, "machine": machine, "wanted": bars}, 3))
    assert "| `long_over_trl` | 2.8 | 2.500 | **no** |" in text
    assert "| short | leeway | 576.67 | 0.980 | - |" in text
    assert "| short | trl | 0.60 | actor 0.60 |" in text, "processes with a share below 0.5 % are not listed"
    result["cases"]["long"] = {"leeway": side(50, 37, 1.0), "trl": side(20)}
    text = "\n".join(trl.page({**result, "machine": machine, "wanted": bars}, 3))
    assert "| long | leeway | 50.00 | - | - |" in text, "Leeway's accuracy is hidden, because TRL has no accuracy"


@pytest.mark.parametrize("name", trl.CASES)
def test_both_sides_train_on_the_same_samples_with_the_same_optimizer(name, tmp_path):
    case = trl.CASES[name](tmp_path, quick=False)
    config = load_config(case.config, case.arguments)
    trl_arguments = trainer._arguments(config)
    case = trl.same_loss(case, tmp_path / "same.toml")
    same = load_config(case.config, case.arguments)
    assert same.learner.num_steps == config.learner.num_steps
    assert not same.algorithm.needs.reference
    assert same.learner.updates_per_step == 1
    assert trl_arguments["max_steps"] == config.learner.num_steps == case.num_steps > case.num_warmup
    assert trl_arguments["per_device_train_batch_size"] == config.learner.groups_per_step * config.actors.group_size
    assert trl_arguments["learning_rate"] == config.learner.learning_rate
    task = load_task(config.task)
    rewards = trainer._rewards(
        [lambda problems, texts: [1.0, None], lambda problems, texts: [0.5, 0.25]], task.train[:2], "ab"
    )
    assert rewards == [1.5, 0.25]
