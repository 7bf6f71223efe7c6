"""benchmarks/scoring.py: that its figures follow from what the runs took."""

import pytest

from benchmarks import scoring
from benchmarks.overlap_parts.long_tail import Setting


def side(period_s, reference_s, ahead=0.0):
    return {"period_s": period_s, "wait_s": 0.5, "reference_s": reference_s, "step_s": 0.5, "ahead": ahead}


ROUND = {
    "synchronous": (side(2.0, 0.4), side(1.7, 0.1)),
    "generation_bound": (side(3.0, 0.4), side(2.5, 0.03)),
}


def test_gains_are_held_against_what_the_runs_that_score_in_the_step_allow():
    found = scoring.compared([ROUND, ROUND], Setting(10, 2, groups_per_step=4))
    assert found["synchronous_bound"] == pytest.approx(2.0 / (2.0 - 0.3)), "the last of 4 groups cannot come earlier"
    assert found["step_over_bound"] == pytest.approx((2.0 / 1.7) / (2.0 / 1.7))
    assert found["generation_bound_gain"] == pytest.approx(1.2)
    assert found["reference_share"] == pytest.approx(0.012)
    assert found["pairs"]["generation_bound"][1]["reference_s"] == pytest.approx(0.03)


def test_the_page_shows_every_run_and_which_bars_are_missed():
    result = scoring.compared([ROUND], Setting(10, 2, groups_per_step=4))
    machine = {"cores": 2, "processor": "x", "python": "3.11", "load_before": 0.1, "commit": "abc"}
    bars = {
        **scoring.judged(result, scoring.AT_LEAST, "at least", at_full_size=True),
        **scoring.judged(result, scoring.AT_MOST, "at most", at_full_size=True),
    }
    text = "\n".join(scoring.page({**result, "machine": machine, "wanted": bars}, Setting(10, 2, 4), 1))
    assert "| `step_over_bound` | 0.9 | 1.000 | yes |" in text
    assert "| generation-bound | before it | 2.500 | 0.500 | 0.500 | 0.030 | 0% |" in text
