"""benchmarks/fusion.py: metrics computed from the durations of passes, and stages that sleep."""

import pytest
from benchmarks import fusion
from benchmarks.learner_parts.fused import SleepingPair

from leeway.learner.mesh import Mesh, MeshPlace
from tests.world.learner import single_rank


def shape(gains, zero_bubble_s=1.3, forward_pair=1.2):
    by_held = {
        str(held): {"gain": gain, "bound": 1.3, "held": held, "seconds": 1.5 / gain} for held, gain in gains.items()
    }
    return {"forward_pair": forward_pair, "zero_bubble_s": zero_bubble_s, "1f1b_s": 1.5, "by_held": by_held}


SHAPES = {"p2_m8": shape({2: 1.0, 4: 1.1}, 1.2), "p4_m4": shape({9: 1.5}, 0.9), "p4_m8": shape({9: 1.25}, 1.3, 1.18)}


def test_gains_use_the_memory_that_the_bars_allow():
    found = fusion.compared(SHAPES)
    assert (found["p2_m8"], found["p4_m4"], found["p4_m8"], found["forward_pair"]) == (1.1, 1.5, 1.25, 1.18)
    assert found["over_zero_bubble"] == pytest.approx(min(1.2 * 1.1, 0.9 * 1.5, 1.3 * 1.25) / 1.5)


def test_the_page_shows_every_memory_bound_and_the_missed_bars():
    real = {"real_ppo": 1.01, "real_1f1b_s": 2.0, "real_fused_s": 1.98, "real_micro_batches": 8}
    result = {**fusion.compared(SHAPES), **real}
    machine = {"cores": 2, "processor": "x", "python": "3.11", "load_before": 0.1, "commit": "abc"}
    bars = fusion.judged(result, fusion.BARS, "at least", at_full_size=True)
    text = "\n".join(fusion.page({**result, "machine": machine, "wanted": bars}))
    assert "| `real_ppo` | 1.05 | 1.010 | **no** |" in text
    assert "| 2 | 8 | 2 | 2 | 1.000 | 1.300 | 0.800 |" in text


def test_sleeping_stages_run_serial_and_fused_schedules():
    with single_rank():
        pair = SleepingPair(Mesh.build(MeshPlace(0)), 2, 0.001)
        for run in (pair.serial("1f1b"), pair.serial("zero_bubble"), pair.serial("1f1b", train=False)):
            run()
        for run in (pair.fused(2), pair.fused(2, train=False)):
            run()
