"""The description of a run, which is resolved once and handed to every process of it.

RunFacts     what the run is: the same at every start, kept by its buffer's store as its identity
RunContext   the run as it is started now: its config, its facts, folders, addresses and keys

What a section of the config leaves open and several processes must agree on, such as the staleness contract, is filled
in here. Each package has a Protocol of the sections that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from common.rpc.auth import ClientKeys
from common.staleness import StalenessConfig, StalenessContract

C = TypeVar("C", covariant=True)


STARTUP_S = 1800.0
"""Every role must be ready, and the model exported, within this time: a large model loads for 20 minutes, and an engine
that starts cold on a GPU compiles and captures for some more. A role that dies meanwhile is noticed at once."""


class RunFacts(BaseModel):
    """What a run is; written into a new store of its buffer, and checked when that is opened again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    seed: int = Field(description="Seeds the order of prompts.")
    num_prompts: PositiveInt = Field(description="Size of the training set; prompt ids are 0..num_prompts-1.")
    group_size: PositiveInt = Field(description="K, samples per prompt.")
    groups_per_step: PositiveInt = Field(description="G, groups per step.")
    updates_per_step: PositiveInt = Field(
        default=1, description="M, optimizer steps on the groups of one step: each makes a policy version."
    )
    vocab_size: PositiveInt = Field(description="Token ids are below this.")
    max_tokens: PositiveInt = Field(
        description="Longest prompt plus completion that is taken in, in tokens; may change later."
    )
    token_budget: PositiveInt | None = Field(
        default=None, description="Longest that the learner can train; may change later. None: max_tokens."
    )
    correct_at: float = Field(default=1.0, description="Least reward of a sample that counts as a success.")
    staleness: StalenessConfig

    @property
    def contract(self) -> StalenessContract:
        """The rules of staleness of this run; ValueError if no group could be used within the bound."""
        return StalenessContract(self.staleness, self.groups_per_step, self.updates_per_step)

    @property
    def longest_drawn(self) -> int:
        return self.token_budget or self.max_tokens


@dataclass(frozen=True, kw_only=True)
class RunContext(Generic[C]):
    """A run as it is started now. Plain enough to travel to another machine, whose own folders it does not name."""

    config: C
    """Its sections; `actors` is that of the pool of the actor."""
    facts: RunFacts
    folder: Path
    """Of the run, on the machine that holds it."""
    weights_folder: Path
    """Of the weight store, on that machine."""
    model_path: Path
    """The checkpoint that is trained; its tokenizer encodes the prompts."""
    reference_paths: tuple[Path, ...]
    """Of the frozen reference model, or of teachers."""
    teacher_of_prompt: bytes = b""
    """The teacher of each prompt, by its id; empty without teachers."""
    temperature: float
    """Of sampling: log-probabilities are those of logits / temperature."""
    serving_dtypes: tuple[str, ...]
    """Dtypes in which actors serve."""
    startup_timeout_s: float
    """How long processes wait for each other to load or to export."""
    buffer_address: str = ""
    """Of the buffer service, tcp:// or ipc://; survives a restart."""
    weights_address: str = ""
    """Of the weight service; '' if there is none."""
    keys: ClientKeys | None = field(default=None, repr=False)
    """Of the run's clients; None: the services are not locked."""
