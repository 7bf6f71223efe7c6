"""What the tokens of a step say of each actor: how stale they were, and whether both sides agree about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from learner.batch import StepBatch

Lag0ByActor = dict[str, tuple[float, int]]
"""Actor -> mean absolute difference of log-probabilities (nats), and over how many tokens."""
LagByActor = dict[str, dict[int, int]]
"""Actor -> lag in versions -> trained tokens."""


def lag0_by_actor(batch: StepBatch, logprobs_T: Tensor) -> Lag0ByActor:
    """The metric `mismatch/lag0_abs`, actor by actor.

    Only tokens of lag 0 in sequences of a single version count: there the difference is an implementation gap, or
    wrong weights, and not staleness.

    Args:
        batch: the draw.
        logprobs_T: the learner's, at the weights with which the step begins.
    """
    sampled_T = np.concatenate([trajectory.logprobs for trajectory in batch.trajectories]).astype(np.float64)
    difference_T = np.abs(sampled_T - logprobs_T.detach().double().cpu().numpy())
    counts_T = (batch.lag_T == 0) & batch.single_version_B[batch.sequence_T] & np.isfinite(difference_T)
    found: Lag0ByActor = {}
    for actor in sorted({trajectory.actor for trajectory in batch.trajectories}):
        is_its_B = np.array([trajectory.actor == actor for trajectory in batch.trajectories])
        where_T = counts_T & is_its_B[batch.sequence_T]
        if where_T.any():
            found[actor] = float(difference_T[where_T].mean()), int(where_T.sum())
    return found


def lag_by_actor(updates: Sequence[StepBatch]) -> LagByActor:
    """The distribution behind the metrics `lag/token_...`, actor by actor: exact, and all that is needed to add up.

    Args:
        updates: what each update trained, at its own version; a token counts once for each.
    """
    found: LagByActor = {}
    for batch in updates:
        actors, actor_B = np.unique([trajectory.actor for trajectory in batch.trajectories], return_inverse=True)
        width = int(batch.lag_T.max(initial=0)) + 1
        counts = np.bincount(actor_B[batch.sequence_T] * width + batch.lag_T)
        for key in np.flatnonzero(counts):
            lags = found.setdefault(str(actors[key // width]), {})
            lags[int(key % width)] = lags.get(int(key % width), 0) + int(counts[key])
    return found
