"""A trajectory: one sample and what is known of it. `buffer.schema` makes it bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from common.staleness import PolicyVersion

SCHEMA_VERSION = 8

COMPLETE = ("stop", "length")
"""Why a sample ends: an end-of-sequence token, or as many tokens as it may have."""
HANDED_ON: Literal["handed_on"] = "handed_on"
"""Why the tokens of one end that is not complete."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled by `version`."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first tokens of a completion, which an earlier lease made; the arrays are as those of a trajectory."""

    token_ids: npt.NDArray[np.int32]
    """Without the prompt."""
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    started_s: float

    @property
    def newest(self) -> PolicyVersion:
        """No later token is of an older version."""
        return self.spans[-1].version


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One sample: a prompt, a completion, what the behaviour policy thought of it, and its reward."""

    lease_id: int
    attempt: int
    group_id: int
    sample_index: int
    """0..K-1 within the group."""
    prompt_id: int
    token_ids: npt.NDArray[np.int32]
    """Prompt, then completion."""
    prompt_length: int
    logprobs: npt.NDArray[np.float32]
    """log mu of each completion token, at the sampling temperature, over the full vocabulary."""
    spans: tuple[VersionSpan, ...]
    """Cover the completion tokens without gap, in order."""
    reward: float | None
    """None: no reward function applied, so the sample is counted as filtered."""
    finish_reason: str
    """One of `COMPLETE`; `HANDED_ON` on the way from one actor to the next."""
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The task's columns of this prompt, JSON-serialisable."""
    reference_logprobs: npt.NDArray[np.float32] | None = None
    """log pi_ref of each completion token; None until the learner has scored it."""
    actor: str = ""
    epoch: int = 0
    seq: int = 0
    """(actor, epoch, seq) is the key for de-duplication; the client fills it in."""
    started_s: float = 0.0
    finished_s: float = 0.0
    """Wall time, seconds since the Unix epoch."""

    @property
    def num_completion_tokens(self) -> int:
        """Length of the completion."""
        return len(self.token_ids) - self.prompt_length
