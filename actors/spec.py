"""ActorSpec: all that an actor is told. Parts: all that it works with once they are started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.config import ActorsConfig
from actors.tasks.config import FileTask, ReasoningGymTask
from buffer.config import BufferConfig
from common.rpc.auth import ClientKeys
from weight_sync.config import WeightSyncConfig

if TYPE_CHECKING:  # whoever gives orders needs none of these
    from actors.engine import Engine
    from actors.sample import Decoder
    from actors.tasks import Task
    from buffer.client import BufferClient
    from buffer.sharded import ShardedClient
    from weight_sync.puller import Puller


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """All that an actor must be told, plain enough to travel to another machine."""

    name: str
    index: int
    run_id: str
    seed: int
    serving_model_path: Path
    """What the engine loads: version 0 of incarnation 0."""
    tokenizer_path: Path
    weights_folder: Path
    """Of the weight store; another machine need not see it."""
    weights_address: str
    """tcp://HOST:PORT of the weight service; '' where there is none."""
    buffer_addresses: tuple[str, ...]
    """Of the buffer service, shard by shard."""
    pool: str
    """Name of the pool that the actor is of."""
    config: ActorsConfig
    """As it is for the pool."""
    task: ReasoningGymTask | FileTask
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    keys: ClientKeys | None = None
    """What both services are talked to with; None where they take everybody."""


@dataclass(slots=True)
class Parts:
    """What an actor works with, each already started."""

    task: Task
    """With encoded prompts."""
    decoder: Decoder
    engine: Engine
    puller: Puller
    client: BufferClient | ShardedClient
