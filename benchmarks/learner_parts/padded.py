"""The learner's packed step against the plain padded loop.

Same model, data, loss, optimizer and threads, and one pass on both sides.
"""

from __future__ import annotations

import statistics

from benchmarks.learner_parts.ours import ALGORITHM, TEMPERATURE, Learner, configured
from benchmarks.learner_parts.plain import PlainLoop, padded
from benchmarks.learner_parts.processes import Figures, Spot, median_ratio
from benchmarks.learner_parts.workload import TOKEN_BUDGET, long_tailed, small_llama, trajectories

BATCH_SIZE = 16
NUM_SEQUENCES = 128
VOCABULARY = 1024
SAME_WITHIN = 1e-3
"""Greatest relative difference between the gradient norms of the two sides: float32 sums in another order."""


def measure(spot: Spot, *, quick: bool) -> Figures:
    """Seconds of a step on both sides, in alternating order; real tokens are counted."""
    num_sequences = 32 if quick else NUM_SEQUENCES
    path = small_llama(spot.folder / "model", hidden_size=128, num_layers=4, vocab_size=VOCABULARY)
    rows = trajectories(long_tailed(num_sequences, seed=1), VOCABULARY, seed=2)
    mesh = spot.mesh()
    learner = Learner(path, mesh, configured(mesh, token_budget=TOKEN_BUDGET))
    plain = PlainLoop(path, ALGORITHM, configured(mesh))
    packed_batch = learner.batch(rows)
    padded_batches = padded(rows, BATCH_SIZE, TEMPERATURE)
    norms = learner.step(packed_batch), plain.step(padded_batches)
    if abs(norms[0] / norms[1] - 1) > SAME_WITHIN:
        raise RuntimeError(f"the two sides do not train the same loss: gradient norms {norms}")
    ours_s: list[float] = []
    plain_s: list[float] = []
    for number in range(1 if quick else 3):
        sides = [(ours_s, lambda: learner.step(packed_batch)), (plain_s, lambda: plain.step(padded_batches))]
        for seconds, step in sides[:: 1 if number % 2 == 0 else -1]:
            seconds.append(spot.seconds(step))
        spot.say(f"padded: {ours_s[-1]:.2f} s packed, {plain_s[-1]:.2f} s padded")
    num_tokens = sum(len(row.token_ids) for row in rows)
    return {
        "packed_over_padded": median_ratio(plain_s, ours_s),
        "packed_tokens_per_s": num_tokens / statistics.median(ours_s),
        "padded_tokens_per_s": num_tokens / statistics.median(plain_s),
        "padded_real_share": num_tokens / sum(batch.num_slots for batch in padded_batches),
        "packed_grad_norm": norms[0],
        "padded_grad_norm": norms[1],
        "padded_num_tokens": num_tokens,
        "padded_num_sequences": num_sequences,
    }
