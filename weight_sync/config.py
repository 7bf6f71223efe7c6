"""The `[weight_sync]` section: staleness, and how weights are stored, transferred and applied."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from leeway.common.staleness import StalenessConfig
from leeway.common.user_input import Knob


class WeightSyncConfig(StalenessConfig):
    """Settings of staleness and of weight transfer."""

    lag_control: Literal["on", "off"] | None = Knob(
        None,
        "Adapt the lag of new samples to the policy's rate of change, and limit updates that change it too much. "
        "Unset: on if max_lag is a number above 0.",
        basic=True,
    )

    kv_cache: Literal["keep", "recompute"] = Knob(
        "keep", "During an in-flight update, 'keep' or 'recompute' the KV cache of running requests."
    )
    transport: Literal["auto", "folder", "network"] = Knob(
        "auto", "Read weights from the folder or over the network; 'auto': the folder if mounted.", basic=True
    )
    folder: str | None = Knob(
        None,
        "Folder of published versions, such as a tmpfs; unset: weights/ in the run folder.",
        fixed="actors read the published versions from it",
    )

    @property
    def controls_lag(self) -> bool:
        return self.lag_control != "off" and self.max_lag not in (0, "unbounded")

    @model_validator(mode="after")
    def _control_needs_a_bound(self) -> WeightSyncConfig:
        if self.lag_control == "on" and not self.controls_lag:
            why = "samples have no lag" if self.max_lag == 0 else "there is no bound to adapt to"
            raise ValueError(
                f"lag_control = 'on' has no effect with max_lag = {self.max_lag}, because {why}: set lag_control = "
                "'off', or max_lag to a number above 0"
            )
        return self

    def staleness(self) -> StalenessConfig:
        """Return only the staleness keys, which the buffer service receives."""
        return StalenessConfig.model_validate(self.model_dump(include=set(StalenessConfig.model_fields)))
