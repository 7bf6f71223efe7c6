"""benchmarks/time_to_reward.py: ratios computed from the evaluations of the compared systems."""

import pytest
from benchmarks import time_to_reward
from benchmarks.time_to_reward import compared, reached_s

SLOW = [(10.0, 0.5), (20.0, 0.7), (30.0, 0.8), (40.0, 0.8), (50.0, 0.8)]
"""(Seconds, accuracy) of a run that ends at 0.8. The target of 0.72 is reached at 22 s."""
FAST = [(s / 2, a) for s, a in SLOW]
NEVER = [(10.0, 0.6), (20.0, 0.7), (30.0, 0.71)]


def test_the_time_to_a_target_is_interpolated_or_unset_if_it_is_never_reached():
    assert reached_s(SLOW, 0.72) == pytest.approx(22)
    assert reached_s(SLOW, 0.4) == 10
    assert reached_s(NEVER, 0.72) is None


def test_ratios_are_medians_of_seeds_and_unset_if_a_seed_missed_the_target():
    found = compared({"synchronous": [SLOW, SLOW], "default": [FAST, FAST], "trl": [SLOW, NEVER]})
    assert found["target"] == pytest.approx(0.72)
    assert found["ratios"] == {"synchronous": pytest.approx(0.5), "trl": None}
    assert found["seconds"]["trl"] == [pytest.approx(22), None]


def test_the_page_shows_every_seed_and_the_met_bars(tmp_path):
    lines = {"adding": {"synchronous": [SLOW, SLOW], "default": [FAST, FAST], "trl": [SLOW, NEVER]}}
    result = {"trl": "trl==1.16.0", "cases": {"adding": compared(lines["adding"])}, "adding_over_synchronous": 0.5}
    bars = time_to_reward.judged(result, time_to_reward.BARS, "at most", at_full_size=True)
    machine = {"cores": 2, "processor": "x", "python": "3.11", "load_before": 0.1, "commit": "abc"}
    text = "\n".join(time_to_reward.page({**result, "wanted": bars, "machine": machine}, "--on adding", "x.svg"))
    assert "| adding | trl | 0.735 | 22, - |" in text
    assert "| `adding_over_synchronous` | 0.65 | 0.500 | yes |" in text
    assert "| `adding_over_trl` | 0.6 | - | - |" in text
    time_to_reward.draw(lines, result, tmp_path / "x.svg")
    assert "max_lag = 0" in (tmp_path / "x.svg").read_text()
