"""LearnerSpec: all that one rank of the learner is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from algorithms.registry import AlgorithmConfig
from buffer.config import BufferConfig
from common.rpc.auth import ClientKeys
from learner.config import LearnerConfig
from learner.mesh import Place
from weight_sync.config import WeightSyncConfig


@dataclass(frozen=True)
class LearnerSpec:
    """One rank's orders. Ranks differ in `rank` alone."""

    rank: int
    """0 .. num_replicas * num_stages - 1; see learner.mesh."""
    rendezvous: str
    """tcp://HOST:PORT, free on the host of rank 0."""
    model_path: Path
    reference_path: Path
    temperature: float
    """Of sampling: all log-probabilities are those of logits / temperature."""
    max_tokens: int
    """Longest prompt plus completion."""
    run_id: str
    seed: int
    buffer_addresses: tuple[str, ...]
    """tcp://HOST:PORT of the buffer service, shard by shard."""
    run_folder: Path
    weights_folder: Path
    """Of the weight store, as the machine that holds it sees it."""
    weights_address: str
    """tcp://HOST:PORT of the weight service; '' where there is none."""
    publish_dtypes: tuple[str, ...]
    """In which the actors serve: weights are published in each."""
    startup_timeout_s: float
    """How long ranks wait for each other where one may take much longer than another: to load, and to export."""
    config: LearnerConfig
    algorithm: AlgorithmConfig
    weight_sync: WeightSyncConfig
    buffer: BufferConfig
    keys: ClientKeys | None = None
    """What both services are talked to with; None where they take everybody."""

    @property
    def place(self) -> Place:
        """Stage and replica of this rank."""
        return Place(self.rank, self.config.num_stages, self.config.num_replicas)

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ValueError: names the keys at odds.
        """
        self.place.check()
        self.config.check_pipeline()
        if self.config.token_budget < self.max_tokens:
            raise ValueError(
                f"learner.token_budget = {self.config.token_budget} is less than actors.max_prompt_tokens + "
                f"actors.max_new_tokens = {self.max_tokens}, so the longest sample would fit no micro-batch. "
                f"Raise token_budget to {self.max_tokens} or more"
            )
