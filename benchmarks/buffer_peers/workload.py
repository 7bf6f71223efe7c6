"""Trajectories with which all systems are measured, and conversion of times to rates.

Lengths are log-normal with a median of 512 tokens, a mean of about 820 and a maximum of 8,192. Token ids are int32 and
log-probabilities float32. Every trajectory has the scalars of `leeway.buffer.schema.Trajectory`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway.buffer.protocol import Lease
from leeway.buffer.schema import Trajectory, VersionSpan
from leeway.common.staleness import PolicyVersion

MEDIAN_TOKENS = 512
SIGMA = 1.0
"""Standard deviation of the logarithm of a length."""
MAX_TOKENS = 8192
PROMPT_TOKENS = 16
VOCAB_SIZE = 50_000
GROUP_SIZE = 8
NUM_PROMPTS = 1000
ROWS_PER_CALL = 32
"""Number of trajectories per message, call, commit or pipeline of every system."""
BATCH_TRAJECTORIES = 256
"""Number of trajectories in a sampled batch."""
PATIENCE_S = 300.0
"""Timeout of each operation of a measurement in seconds."""

FIRST_VERSION = PolicyVersion(0, 0)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """Trajectories in memory, as views into one block of memory, like the output of an engine."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.int64]
    """Start offset of each trajectory, followed by the end offset of the last one."""

    @classmethod
    def make(cls, num_trajectories: int, seed: int = 0, *, fixed_tokens: int | None = None) -> Workload:
        """Generate trajectories deterministically; `fixed_tokens` is the length of every trajectory."""
        rng = np.random.default_rng(seed)
        drawn = np.exp(rng.normal(np.log(MEDIAN_TOKENS), SIGMA, num_trajectories))
        lengths = np.clip(drawn, PROMPT_TOKENS + 1, MAX_TOKENS).astype(np.int64)
        if fixed_tokens is not None:
            lengths[:] = fixed_tokens
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        tokens = rng.integers(0, VOCAB_SIZE, bounds[-1], dtype=np.int32)
        logprobs = -rng.random(bounds[-1], dtype=np.float32)
        return cls(tokens, logprobs, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_bytes(self) -> int:
        """Total bytes of token ids and log-probabilities, without scalars."""
        completions = self.bounds[-1] - PROMPT_TOKENS * len(self)
        return int(4 * self.bounds[-1] + 4 * completions)

    def trajectory(self, i: int, lease: Lease | None = None, sample_index: int | None = None) -> Trajectory:
        """Return the i-th trajectory as a sample of `lease`. If `lease` is None, derive a synthetic lease from `i`."""
        start, end = int(self.bounds[i]), int(self.bounds[i + 1])
        num_completion = end - start - PROMPT_TOKENS
        group = i // GROUP_SIZE + 1
        reward = float(self.logprobs[start])
        return Trajectory(
            lease_id=group if lease is None else lease.lease_id,
            attempt=1 if lease is None else lease.attempt,
            group_id=group if lease is None else lease.group_id,
            sample_index=i % GROUP_SIZE if sample_index is None else sample_index,
            prompt_id=group % NUM_PROMPTS if lease is None else lease.prompt_id,
            token_ids=self.tokens[start:end],
            prompt_length=PROMPT_TOKENS,
            logprobs=self.logprobs[start + PROMPT_TOKENS : end],
            spans=(VersionSpan(FIRST_VERSION, 0, num_completion),),
            reward=reward,
            finish_reason="stop",
            reward_parts={"exact": reward, "format": 1.0},
            columns={"question": "What is 17 + 25?", "answer": "42"},
            actor="actor-0",
            epoch=1,
            seq=i,
            started_s=1.7e9 + i,
            finished_s=1.7e9 + i + 1,
        )

    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories, with synthetic leases."""
        return [self.trajectory(i) for i in range(len(self))]

    def leased(self, leases: list[Lease]) -> list[Trajectory]:
        """Return one trajectory per sample of the leases, in the order of the leases."""
        samples = ((lease, index) for lease in leases for index in lease.sample_indices)
        made = [self.trajectory(i, lease, index) for i, (lease, index) in enumerate(samples)]
        # A real actor holds few trajectories at a time: exclude the workload from garbage collection.
        gc.collect()
        gc.freeze()
        return made


def calls(trajectories: list[Trajectory]) -> Iterator[list[Trajectory]]:
    """Yield the trajectories in chunks of ROWS_PER_CALL."""
    for start in range(0, len(trajectories), ROWS_PER_CALL):
        yield trajectories[start : start + ROWS_PER_CALL]


def rates(work: Workload, seconds: float, *, name: str = "push") -> Figures:
    """Return the push rates of a whole workload that was pushed in `seconds`."""
    return {f"{name}_per_s": len(work) / seconds, f"{name}_mb_per_s": work.num_bytes / 1e6 / seconds}


def sampled(num_batches: int, num_trajectories: int, seconds: float) -> Figures:
    """Return the sampling rates of batches that were drawn in `seconds`."""
    return {"sample_per_s": num_trajectories / seconds, "batches_per_s": num_batches / seconds}


def until(condition: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S, poll_s: float = 0.01) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: the condition stayed false; the message names the condition.
    """
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {patience_s:g} s waiting for {what}")
        time.sleep(poll_s)


def expect(connection: Connection) -> Any:  # noqa: ANN401 -- any object of the other process
    """Receive an object from the other process within PATIENCE_S.

    Raises:
        TimeoutError: nothing arrived.
    """
    if not connection.poll(PATIENCE_S):
        raise TimeoutError(f"the other process sent nothing for {PATIENCE_S:g} s")
    return connection.recv()
