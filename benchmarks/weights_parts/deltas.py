"""Bytes of a delta over bytes of the whole, at two learning rates, from real optimizer steps; a core each."""

from __future__ import annotations

import contextlib

from benchmarks.weights_parts.figures import delta_figures
from benchmarks.weights_parts.peers import Figures, call_all, say
from benchmarks.weights_parts.setting import LARGE_RATE, SMALL_RATE, TRAINING_LIMIT_S, Setting


def measure(setting: Setting) -> Figures:
    """Steps at both rates, from the same weights and on the same batches; then again from weights that are spread."""
    num_steps = 3 if setting.quick else 6
    rates = {"1e-6": SMALL_RATE, "1e-5": LARGE_RATE}
    found: dict[str, list[dict[str, float]]] = {}
    boundary_share = 0.0
    for spread in (False, True):
        with contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(
                    setting.trainer(
                        rate, snapshots=setting.scratch if rate == SMALL_RATE and not spread else None, spread=spread
                    )
                )
                for rate in rates.values()
            ]
            if not spread:
                boundary_share = peers[0].call("boundary_share", limit_s=TRAINING_LIMIT_S)
            say(f"deltas: training at two learning rates{', from spread weights' if spread else ''}")
            steps = call_all(peers, "steps", num_steps=num_steps, limit_s=TRAINING_LIMIT_S)
        names = [f"{name}, spread" if spread else name for name in rates]
        found |= dict(zip(names, steps, strict=True))
    return {**delta_figures(found), "boundary_share": boundary_share}
