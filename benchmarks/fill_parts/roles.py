"""An actor that leases groups by the rule from before."""

from __future__ import annotations

from pathlib import Path

from actors.config import ActorsConfig
from launch.processes.actor_role import ActorRole


def rounded_down(config: ActorsConfig, num_to_generate: int, num_open: int, num_ahead: float, slots: int | None) -> int:
    """As `ActorsConfig.room`: only groups that fit whole, beside all that is leased and not yet in the buffer."""
    return max(0, (config.max_running_samples - num_open) // config.group_size)


class RoundedDownActorRole(ActorRole):
    """The real actor, but for this rule."""

    def __init__(self, log: Path, config: ActorsConfig) -> None:
        """Put the rule in place, in this process alone."""
        ActorsConfig.room = rounded_down  # type: ignore[method-assign, assignment]
        super().__init__(log, config)
