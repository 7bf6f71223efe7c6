"""Real tokens over the tokens of the micro-batches, packed as a step packs them."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np

from benchmarks.learner_parts.processes import Figures, Spot
from benchmarks.learner_parts.workload import TOKEN_BUDGET, long_tailed
from learner.packing import PackingRule, pack

STEP_SIZES = (64, 256, 1024)
"""Sequences of a step."""
HEADLINE = 256


def measure(spot: Spot, *, quick: bool) -> Figures:
    """The mean over draws, for steps of several sizes; what is left over in the last micro-batch counts as waste.

    `pack_extra_N` is how many micro-batches there are beyond what the tokens fill, in the mean.
    """
    figures: Figures = {}
    for size in STEP_SIZES:
        found, seconds, extra = [], [], 0
        for seed in range(4 if quick else 32):
            lengths = long_tailed(size, seed)
            sequences = [np.zeros(length, np.int32) for length in lengths]
            start = time.perf_counter()
            packed = pack(sequences, [1] * size, PackingRule(TOKEN_BUDGET))
            seconds.append(time.perf_counter() - start)
            found.append(packed.efficiency)
            extra += packed.num_micro_batches - math.ceil(sum(lengths) / TOKEN_BUDGET)
        figures[f"pack_efficiency_{size}"] = statistics.mean(found)
        figures[f"pack_efficiency_{size}_worst"] = min(found)
        figures[f"pack_extra_{size}"] = extra / len(found)
        figures[f"pack_ms_{size}"] = statistics.median(seconds) * 1000
    figures["pack_efficiency"] = figures[f"pack_efficiency_{HEADLINE}"]
    spot.say(f"packing: {figures['pack_efficiency']:.4f} with {HEADLINE} sequences a step")
    return figures
