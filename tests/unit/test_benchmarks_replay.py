"""benchmarks/replay.py: metrics computed from runs, and the configs of its runs."""

from pathlib import Path

import pytest
from benchmarks import replay
from benchmarks.replay import FRESH, PARTS, REPLAY, Setting

from leeway.launch.config import load_config

SUMS = Path(__file__).resolve().parents[2] / replay.CONFIG
BASE = {"sampled": 0.5, "trained": 1000.0, "uses": 1.0, "lag": 2.0, "ess": 0.5, "ledger_gap": 0, "seconds": 60.0}


def runs(tokens, *accuracies):
    return [{**BASE, "generated": tokens, "greedy": accuracy} for accuracy in accuracies]


def results(**replayed):
    """Return runs with and without replay.

    The runs without replay have mean accuracies of 0.8, 0.84 and 0.88 after 100, 200 and 400 tokens.
    """
    found = {("oapl", setting): runs(400 * setting.share, 0.78 + 0.04 * n, 0.82 + 0.04 * n) for n, setting in
             zip((2, 1, 0), FRESH, strict=True)}  # fmt: skip
    return found | {("oapl", Setting(max_uses=int(name[1:]))): each for name, each in replayed.items()}


def test_tokens_saved_are_relative_to_runs_without_replay_of_equal_accuracy():
    found = results(u2=runs(100, 0.85, 0.85), u4=runs(50, 0.79, 0.79), u8=runs(200, 0.9, 0.9))
    saved = [replay.tokens_saved(found, "oapl", Setting(max_uses=uses), "greedy") for uses in (2, 4, 8)]
    # 0.85 is a quarter of the way from 0.84 to 0.88; tokens are interpolated from 200 to 400 on a log scale
    assert saved[0] == pytest.approx(200 * 2**0.25 / 100)
    assert saved[1] is None, "every run without replay is more accurate"
    assert saved[2] == pytest.approx(400 / 200), "tokens are not extrapolated above the accuracy of the longest run"
    line = replay.summarised(found)
    assert line["oapl"]["greedy"]["tokens_saved"] == pytest.approx(2 * 2**0.25, abs=1e-3)
    assert line["oapl"]["greedy"]["setting"] == Setting(max_uses=2).name
    assert line["tokens_saved_at_equal_accuracy_greedy"] == line["oapl"]["greedy"]["tokens_saved"]
    # all runs have a sampled accuracy of 0.5, so the setting with the fewest tokens is the best
    assert line["tokens_saved_at_equal_accuracy"] == 8


def test_accuracies_within_the_standard_error_over_seeds_count_as_equal():
    found = results(u2=runs(100, 0.85, 0.89), u4=runs(100, 0.861, 0.861))
    # the seeds of the longest run without replay reach 0.86 and 0.90
    # the standard errors of the two differences from this run are 0.028 and 0.02
    assert replay.standard_error(
        "greedy", found["oapl", Setting(max_uses=2)], found["oapl", FRESH[0]]
    ) == pytest.approx(0.0283, abs=1e-4)
    assert replay.tokens_saved(found, "oapl", Setting(max_uses=2), "greedy") == 4
    assert replay.tokens_saved(found, "oapl", Setting(max_uses=4), "greedy") == 4
    found = results(u2=runs(100, 0.859, 0.859))
    assert replay.tokens_saved(found, "oapl", Setting(max_uses=2), "greedy") < 4


def test_a_page_has_a_row_for_every_setting_and_marks_missed_bars(tmp_path):
    found = results(u2=runs(390, 0.88, 0.88))
    parts = replay.page(found, replay.summarised(found), "Written by a test.", "replay")
    rows = [line for part in parts for line in part.splitlines() if line.startswith("| oapl | no replay")]
    assert len(rows) == 3
    assert "**missed**" in "".join(parts)
    replay.draw(found, tmp_path / "replay.svg")
    assert "held-out accuracy" in (tmp_path / "replay.svg").read_text()


@pytest.mark.parametrize("setting", sorted({*FRESH, *(each for part in PARTS.values() for each in part)}, key=str))
def test_every_setting_is_a_valid_override_of_the_example(setting):
    for algorithm in replay.ALGORITHMS:
        config = load_config(SUMS, ["--algorithm.type", algorithm, *setting.overrides(replay.STEPS)])
        assert (config.buffer.max_uses, config.buffer.sampler) == (setting.max_uses, setting.law)
        assert config.learner.num_steps == replay.STEPS * setting.share
    assert REPLAY in PARTS["uses"]
