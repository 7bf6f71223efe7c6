"""The `[weight_sync]` section: the staleness knobs, how weights are stored, sent and applied."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

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
        fixed="the versions that actors are told of lie there",
    )
    host: str | None = Knob(
        None,
        "Address that the weight service binds; unset: a Unix socket in `folder` where Ray was started by "
        "this command, or loopback where a port is given; else this machine's address in the Ray cluster.",
    )
    port: int = Knob(0, "Port of the weight service; 0 takes a free one, where one is needed.", ge=0, le=65535)
    staging_dir: str | None = Knob(
        None,
        "Where a machine keeps what its actors fetched over ZeroMQ, once for all of them; unset: a folder "
        "in /dev/shm, or in the temporary folder.",
    )
    keep_versions: PositiveInt = Knob(3, "How many published versions stay in the store, beside those being read.")
    update_timeout_s: PositiveFloat = Knob(
        120.0, "An update that takes an engine longer is an error that names the actor."
    )
    publish_timeout_s: PositiveFloat = Knob(
        600.0,
        "Weights that cannot be written for so long, as on a full disk, end the learner; until then it "
        "tries again, and trains on as far as the bound allows.",
    )

    def staleness(self) -> StalenessConfig:
        """The staleness knobs alone: what the buffer service is told."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
