"""Two stages with real compute, one core each, against one stage on one core; and what the two cores could give at all.

The second figure is the gain of two processes that have nothing to do with each other: a machine whose cores share
their memory bandwidth, or their clock, cannot give 2.
"""

from __future__ import annotations

import statistics

from benchmarks.learner_parts.ours import Learner, configured
from benchmarks.learner_parts.processes import Figures, Spot, median_ratio
from benchmarks.learner_parts.workload import long_tailed, small_llama, trajectories

NUM_MICRO_BATCHES = 8
BUDGET, LONGEST = 1024, 512
VOCABULARY = 2048
SAME_WITHIN = 1e-3
"""Greatest relative difference between gradient norms: float32 sums in another order."""
FILL = 0.9
"""Of the micro-batches' tokens that are drawn: the rest is what packing leaves."""


def measure(spot: Spot, *, quick: bool) -> Figures:
    """Taking turns: a pipeline of two (the first world), one stage alone, and two such at once on a core each."""
    spot.pin()
    mesh, path = spot.mesh(), spot.folder / "model"
    hidden, layers = (64, 4) if quick else (256, 8)
    if spot.number == 0:
        small_llama(path, hidden_size=hidden, num_layers=layers, vocab_size=VOCABULARY)
    spot.meet()
    rows = trajectories(_lengths(), VOCABULARY, seed=3)
    learner = Learner(path, mesh, configured(mesh, token_budget=BUDGET))
    batch = learner.batch(rows, min_micro_batches=NUM_MICRO_BATCHES)
    assert batch.packed.num_micro_batches == NUM_MICRO_BATCHES, batch.packed.num_micro_batches
    norms = spot.gather(learner.step(batch))
    if max(norms) > min(norms) * (1 + SAME_WITHIN):
        raise RuntimeError(f"the sides do not train the same loss: gradient norms {norms}")
    split_s: list[float] = []
    one_s: list[float] = []
    two_s: list[float] = []
    for _ in range(1 if quick else 5):
        for seconds, worlds in ((split_s, [0]), (one_s, [1]), (two_s, [1, 2])):
            seconds.append(spot.seconds(lambda: learner.step(batch), worlds=worlds))
        spot.say(f"real compute: split {split_s[-1]:.2f} s, one {one_s[-1]:.2f} s, two at once {two_s[-1]:.2f} s")
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {
        "pp2_over_pp1_real": median_ratio(one_s, split_s),
        "two_process_scaling": 2 * median_ratio(one_s, two_s),
        "pp1_tokens_per_s": num_tokens / statistics.median(one_s),
        "pp2_tokens_per_s": num_tokens / statistics.median(split_s),
        "real_num_tokens": num_tokens,
    }


def _lengths() -> list[int]:
    wanted = int(NUM_MICRO_BATCHES * BUDGET * FILL)
    lengths = [length for length in long_tailed(400, seed=4, longest=LONGEST) if length >= 16]
    chosen: list[int] = []
    while sum(chosen) + lengths[len(chosen)] <= wanted:
        chosen.append(lengths[len(chosen)])
    return chosen[: len(chosen) // 8 * 8]
