"""Description of a run, resolved once and passed to all its processes.

RunFacts     identity of the run, which is equal at every start and stored in the buffer
RunContext   parameters of the current start: config, facts, folders, addresses and keys

This module resolves values that the config leaves open and on which several processes must agree, such as the staleness
contract. Each package defines a Protocol of the sections that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from leeway.common.rpc.auth import ClientKeys
from leeway.common.staleness import StalenessConfig, StalenessContract

C = TypeVar("C", covariant=True)


STARTUP_S = 1800.0
"""Timeout in seconds for all roles to become ready, and for the export of the model. Loading a large model takes 20
minutes, and a GPU engine without a cache then compiles and captures graphs. The exit of a role is detected at once."""

OVERLONG, LOGGED = "overlong_penalty", "log/"
"""Name of the length penalty, and prefix of values that functions log, among the parts of a reward."""


class RunFacts(BaseModel):
    """Identity of a run; written to a new store of its buffer and validated whenever the store is opened."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    seed: int = Field(description="Seed of the order of prompts.")
    num_prompts: PositiveInt = Field(description="Size of the training set; prompt ids are 0..num_prompts-1.")
    group_size: PositiveInt = Field(description="K, number of samples per prompt.")
    groups_per_step: PositiveInt = Field(description="G, number of groups per step.")
    updates_per_step: PositiveInt = Field(
        default=1, description="M, number of optimizer steps on the groups of one step; each creates a policy version."
    )
    vocab_size: PositiveInt = Field(description="Size of the vocabulary; token ids are 0..vocab_size-1.")
    max_tokens: PositiveInt = Field(
        description="Maximum number of tokens, prompt plus completion, of a stored sample; may change later."
    )
    token_budget: PositiveInt | None = Field(
        default=None, description="Maximum tokens of a sample used for training; may change later. None: max_tokens."
    )
    correct_at: float = Field(default=1.0, description="Minimum reward of a sample that counts as a success.")
    normalised_rewards: dict[str, float] = Field(
        default={}, description="Weight of each reward that the learner standardises by group; empty: none is."
    )
    informative_rewards: dict[str, float] = Field(
        default={}, description="Weight of each reward that decides whether a group's rewards are equal; empty: all."
    )
    staleness: StalenessConfig

    @property
    def contract(self) -> StalenessContract:
        """Staleness rules of this run; raise ValueError if no group could be used within the bound."""
        return StalenessContract(self.staleness, self.groups_per_step, self.updates_per_step)

    @property
    def longest_drawn(self) -> int:
        return self.token_budget or self.max_tokens


@dataclass(frozen=True, kw_only=True)
class RunContext(Generic[C]):
    """Parameters of the current start of a run, for all machines: no path depends on the machine that receives them."""

    config: C
    """Sections of the config; for an actor, `actors` is the section of its pool."""
    facts: RunFacts
    folder: Path
    """Run folder, on the machine that holds it."""
    weights_folder: Path
    """Folder of the weight store, on the machine that holds the run folder."""
    model_path: Path
    """Checkpoint from which training starts; its tokenizer encodes the prompts."""
    reference_paths: tuple[Path, ...]
    """Checkpoints of the frozen reference model, or of the teachers."""
    teacher_of_prompt: bytes = b""
    """Index of the teacher of each prompt, by prompt id; empty without teachers."""
    temperature: float
    """Sampling temperature; log-probabilities are computed from logits / temperature."""
    serving_dtypes: tuple[str, ...]
    """Dtypes in which actors serve."""
    startup_timeout_s: float
    """Timeout in seconds of a process that waits until other processes have loaded or exported a model."""
    buffer_address: str = ""
    """Address of the buffer service, tcp:// or ipc://, which does not change on a restart of the service."""
    weights_address: str = ""
    """Address of the weight service; '' if there is none."""
    keys: ClientKeys | None = field(default=None, repr=False)
    """Keys of the run's clients; None if the services do not authenticate clients."""
