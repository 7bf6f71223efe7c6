"""The `[weight_sync]` section: the staleness knobs, and how weights are stored and applied."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from weight_sync.staleness import StalenessConfig


class WeightSyncConfig(StalenessConfig):
    """Knobs of staleness and of the weight protocol."""

    kv_cache: Literal["keep", "recompute"] = Field(
        default="keep",
        description="What an update in flight does with running requests: keep their attention keys of the old "
        "version, or compute them anew under the new one.",
    )
    keep_versions: PositiveInt = Field(default=3, description="How many published versions stay in the store.")
    poll_interval_s: PositiveFloat = Field(default=0.05, description="How often an actor looks for a newer version.")
    update_timeout_s: PositiveFloat = Field(
        default=120.0, description="An update that takes an engine longer is an error that names the actor."
    )

    def staleness(self) -> StalenessConfig:
        """The staleness knobs alone: what the buffer service is told."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
