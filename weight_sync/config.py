"""The `[weight_sync]` section: the staleness knobs, how weights are stored, sent and applied."""

from __future__ import annotations

from typing import Literal

from common.staleness import StalenessConfig
from common.user_input import Knob


class WeightSyncConfig(StalenessConfig):
    """Knobs of staleness and of the weight protocol."""

    kv_cache: Literal["keep", "recompute"] = Knob(
        "keep", "At an update in flight: keep the attention keys of running requests, or recompute them."
    )
    transport: Literal["auto", "folder", "network"] = Knob(
        "auto", "Read weights in the folder, over the network, or where the folder is seen ('auto').", basic=True
    )
    folder: str | None = Knob(
        None,
        "Where versions lie, as in a tmpfs; unset: weights/ in the run's folder.",
        fixed="the versions that actors are to read lie there",
    )

    def staleness(self) -> StalenessConfig:
        """The staleness knobs alone: what the buffer service is told."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
