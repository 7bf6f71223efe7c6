"""The `[buffer]` section, and the facts of a run that the service checks and keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from weight_sync.staleness import StalenessConfig


class BufferConfig(BaseModel):
    """Knobs of the replay buffer: its service, its store and its clients."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address that the service binds; loopback by default.")
    port: int = Field(default=0, ge=0, le=65535, description="TCP port; 0 lets the system choose a free one.")
    law: Literal["fifo"] = Field(
        default="fifo", description="Sampling law: 'fifo' draws each ready group once, oldest tokens first."
    )
    lease_timeout_s: PositiveFloat = Field(
        default=60.0, description="A lease that is neither completed nor renewed for so long is issued again."
    )
    max_attempts: PositiveInt = Field(
        default=5, description="A group whose lease was issued so often without completing is given up and counted."
    )
    coalesce_ms: float = Field(
        default=5.0, ge=0.0, le=100.0, description="How long a client collects trajectories for one message."
    )
    max_message_mib: PositiveInt = Field(default=64, description="A larger message is refused.")
    request_timeout_s: PositiveFloat = Field(
        default=10.0, description="A client resends a request that was not answered for so long."
    )
    give_up_after_s: PositiveFloat = Field(
        default=120.0, description="A client that got no answer for so long raises, naming the service."
    )
    capacity_trajectories: PositiveInt = Field(
        default=1_000_000, description="Above this count the oldest evictable trajectories are removed."
    )


class RunFacts(BaseModel):
    """What the service must know of the run; written into a new store and checked when it is opened again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    seed: int = Field(description="Seeds the order of prompts.")
    num_prompts: PositiveInt = Field(description="Size of the training set; prompt ids are 0..num_prompts-1.")
    group_size: PositiveInt = Field(description="K, samples per prompt.")
    groups_per_step: PositiveInt = Field(description="G, groups per optimizer step.")
    vocab_size: PositiveInt = Field(description="Token ids are below this.")
    max_tokens: PositiveInt = Field(description="Longest prompt plus completion, in tokens.")
    staleness: StalenessConfig
