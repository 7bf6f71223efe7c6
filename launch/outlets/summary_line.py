"""A run in one line."""

from __future__ import annotations

from launch.state.snapshot import Snapshot
from launch.words import number

TRAINING = "training"
"""The phase in which steps are taken."""
NUM_WAITS = 3
"""So many of those who wait are in a line."""


def line(snapshot: Snapshot, num_waits: int = NUM_WAITS) -> str:
    """A run in one line: how far it is, and who waits for whom.

    Args:
        snapshot: of the run.
        num_waits: so many of those who wait are named.
    """
    elapsed_s = snapshot.written_s - snapshot.started_s
    if not snapshot.step:
        figures = f"{snapshot.phase}, for {snapshot.written_s - snapshot.phase_since_s:.0f} s"
    else:
        figures = (
            f"step {snapshot.step}/{snapshot.num_steps}  reward {number(snapshot.reward)}  "
            f"lag {number(snapshot.lag_mean)} (max {snapshot.lag_max} of {snapshot.max_lag})  "
            f"tokens/s generated {snapshot.generated_tokens_per_s:.0f} trained {snapshot.learner.tokens_per_s:.0f}"
        )
        if snapshot.phase != TRAINING and snapshot.ended is None:
            figures += f"  {snapshot.phase}, for {snapshot.written_s - snapshot.phase_since_s:.0f} s"
    waits = "".join(f"; {sentence}" for sentence in snapshot.waits[:num_waits])
    if num_waits and len(snapshot.waits) > num_waits:
        waits += f"; and {len(snapshot.waits) - num_waits} more wait"
    tripped = "".join(f"; {sentence}" for sentence in snapshot.tripped)
    return f"{elapsed_s:5.0f} s  {figures}{waits}{tripped}"
