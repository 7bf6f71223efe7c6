"""An actor that leases groups by the rule that `ActorsConfig.room` replaced."""

from __future__ import annotations

from pathlib import Path

from leeway.actors.config import ActorsConfig
from leeway.launch.processes.actor_role import ActorRole


def rounded_down(config: ActorsConfig, num_to_generate: int, num_open: int, num_ahead: float, slots: int | None) -> int:
    """Return the number of whole groups that fit beside the leased samples not yet in the buffer."""
    return max(0, (config.max_running_samples - num_open) // config.group_size)


class RoundedDownActorRole(ActorRole):
    """The real actor with `rounded_down` as its lease rule."""

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Replace the lease rule in the process of this actor only."""
        ActorsConfig.room = rounded_down  # type: ignore[method-assign, assignment]
        super().__init__(log, config)
