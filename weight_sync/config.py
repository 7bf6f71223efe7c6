"""The `[weight_sync]` section: the staleness knobs, how weights are stored, sent and applied."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from common.staleness import StalenessConfig
from common.user_input import Knob


class WeightSyncConfig(StalenessConfig):
    """Knobs of staleness and of the weight protocol."""

    lag_control: Literal["on", "off"] | None = Knob(
        None,
        "Below max_lag, keep the data near enough to the policy to learn from: how old new samples may become follows "
        "how far the policy moves, and updates that would go too far are held back. Unset: on, where max_lag is a "
        "number above 0.",
        basic=True,
    )

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

    @property
    def controls_lag(self) -> bool:
        return self.lag_control != "off" and self.max_lag not in (0, "unbounded")

    @model_validator(mode="after")
    def _control_needs_a_bound(self) -> WeightSyncConfig:
        if self.lag_control == "on" and not self.controls_lag:
            why = "data have no lag" if self.max_lag == 0 else "there is no bound to stay below"
            raise ValueError(
                f"lag_control = 'on', but with max_lag = {self.max_lag} {why}: turn it off, or give max_lag a number "
                "above 0"
            )
        return self

    def staleness(self) -> StalenessConfig:
        """The staleness knobs alone: what the buffer service is told."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
