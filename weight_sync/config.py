"""The `[weight_sync]` section: the staleness knobs, how weights are stored, sent and applied."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from common.staleness import StalenessConfig


class WeightSyncConfig(StalenessConfig):
    """Knobs of staleness and of the weight protocol."""

    kv_cache: Literal["keep", "recompute"] = Field(
        default="keep",
        description="What an update in flight does with running requests: keep their attention keys of the old "
        "version, or compute them anew under the new one.",
    )
    transport: Literal["auto", "folder", "network"] = Field(
        default="auto",
        description="How weights travel: through the store's folder, which must be seen; over ZeroMQ through the "
        "weight service; 'auto' takes the folder where it is seen.",
    )
    folder: str | None = Field(
        default=None, description="Where versions lie; unset: weights/ in the run's folder. A tmpfs is fastest."
    )
    host: str | None = Field(
        default=None,
        description="Address that the weight service binds; unset: a Unix socket in `folder` where Ray was started by "
        "this command, or loopback where a port is given; else this machine's address in the Ray cluster.",
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Port of the weight service; 0 takes a free one, where one is needed."
    )
    staging_dir: str | None = Field(
        default=None,
        description="Where a machine keeps what its actors fetched over ZeroMQ, once for all of them; unset: a folder "
        "in /dev/shm, or in the temporary folder.",
    )
    keep_versions: PositiveInt = Field(
        default=3, description="How many published versions stay in the store, beside those being read."
    )
    update_timeout_s: PositiveFloat = Field(
        default=120.0, description="An update that takes an engine longer is an error that names the actor."
    )
    publish_timeout_s: PositiveFloat = Field(
        default=600.0,
        description="Weights that cannot be written for so long, as on a full disk, end the learner; until then it "
        "tries again, and trains on as far as the bound allows.",
    )

    def staleness(self) -> StalenessConfig:
        """The staleness knobs alone: what the buffer service is told."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
