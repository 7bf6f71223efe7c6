"""Measurement of TorchRL's `ReplayBuffer` in another process, behind a `multiprocessing.Queue`.

Settings: 32 trajectories per `put` and per `extend`, as concatenated arrays, which pickle fastest. Two storages are
measured. The memory-mapped storage is a `LazyMemmapStorage` of tokens with an `episode` column, so that nothing is
padded; a `SliceSampler` reads the storage. A second `LazyMemmapStorage` holds one row of scalars per trajectory. One
padded row of 8,192 tokens per trajectory was half as fast. The lazy stack is a `LazyStackStorage`, an in-memory storage
of tensors of any length. Timing ends when the consumer has extended its buffer by the last trajectory. Sampling runs in
the process of the buffer, without interprocess communication.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.buffer_peers.mp_queue import hand_over
from benchmarks.buffer_peers.workload import (
    BATCH_TRAJECTORIES,
    MAX_TOKENS,
    PATIENCE_S,
    PROMPT_TOKENS,
    Figures,
    Workload,
    rates,
    sampled,
)
from tensordict import TensorDict

from leeway.buffer.schema import Trajectory

NUM_SAMPLED_BATCHES = 20
Call = dict[str, np.ndarray]


def measure(work: Workload, folder: Path) -> Figures:
    """Measure the memory-mapped storage, whose rates are compared with Leeway's, and the lazy stack."""
    rows, sizes = work.trajectories(), (len(work), int(work.bounds[-1]))
    push_s, sample_s = hand_over(rows, as_arrays, _consume, fill_memmap, sizes, str(folder))
    stack_push_s, stack_sample_s = hand_over(rows, as_arrays, _consume, fill_lazy_stack, sizes, str(folder))
    num_sampled = NUM_SAMPLED_BATCHES * BATCH_TRAJECTORIES
    return (
        rates(work, push_s)
        | sampled(NUM_SAMPLED_BATCHES, num_sampled, sample_s)
        | rates(work, stack_push_s, name="push_lazy_stack")
        | {"sample_lazy_stack_per_s": num_sampled / stack_sample_s}
    )


def as_arrays(rows: list[Trajectory]) -> Call:
    """Return trajectories as concatenated arrays, with zero log-probabilities for prompt tokens."""
    prompt = np.zeros(PROMPT_TOKENS, np.float32)
    ids = [
        (row.lease_id, row.attempt, row.group_id, row.sample_index, row.prompt_id, row.prompt_length, row.seq)
        for row in rows
    ]
    return {
        "lengths": np.array([len(row.token_ids) for row in rows]),
        "token_ids": np.concatenate([row.token_ids for row in rows]),
        "logprobs": np.concatenate([part for row in rows for part in (prompt, row.logprobs)]),
        "ids": np.array(ids),
        "floats": np.array([(row.reward, row.started_s, row.finished_s) for row in rows]),
    }


def _consume(
    queue: Queue[Call | None], done: Connection, fill: Callable[..., Any], sizes: tuple[int, int], folder: str
) -> None:
    """Run the consumer: fill a buffer, send its number of trajectories, sample, and send the sampling time."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    extend, num_held, sample = fill(*sizes, folder)
    done.send(0)
    while (call := queue.get(timeout=PATIENCE_S)) is not None:
        extend(call)
    done.send(num_held())
    started = time.perf_counter()
    for _ in range(NUM_SAMPLED_BATCHES):
        sample()
    done.send(time.perf_counter() - started)


def fill_memmap(num_trajectories: int, num_tokens: int, folder: str) -> tuple[Callable[..., Any], ...]:
    """Return functions that extend, count and sample memory-mapped storage."""
    from torchrl.data import LazyMemmapStorage, ReplayBuffer, SliceSampler

    sampler = SliceSampler(num_slices=BATCH_TRAJECTORIES, traj_key="episode", strict_length=False, cache_values=True)
    tokens = ReplayBuffer(
        storage=LazyMemmapStorage(num_tokens, scratch_dir=f"{folder}/tokens"),
        sampler=sampler,
        batch_size=BATCH_TRAJECTORIES * MAX_TOKENS,
    )
    scalars = ReplayBuffer(storage=LazyMemmapStorage(num_trajectories, scratch_dir=f"{folder}/scalars"))

    def extend(call: Call) -> None:
        episodes = np.repeat(call["ids"][:, -1], call["lengths"])
        columns = {"token_ids": call["token_ids"], "logprobs": call["logprobs"], "episode": episodes}
        tokens.extend(_tensors(columns))
        scalars.extend(_tensors({"ids": call["ids"], "floats": call["floats"]}))

    return extend, lambda: len(scalars), tokens.sample


def fill_lazy_stack(num_trajectories: int, num_tokens: int, folder: str) -> tuple[Callable[..., Any], ...]:
    """Return functions that extend, count and sample a lazy stack."""
    from torchrl.data import LazyStackStorage, ReplayBuffer

    buffer = ReplayBuffer(storage=LazyStackStorage(num_trajectories), batch_size=BATCH_TRAJECTORIES)

    def extend(call: Call) -> None:
        lengths = call["lengths"].tolist()
        tokens = torch.from_numpy(call["token_ids"]).split(lengths)
        logprobs = torch.from_numpy(call["logprobs"]).split(lengths)
        ids, floats = torch.from_numpy(call["ids"]), torch.from_numpy(call["floats"])
        columns = zip(tokens, logprobs, ids, floats, strict=True)
        names = ("token_ids", "logprobs", "ids", "floats")
        buffer.extend([TensorDict(dict(zip(names, row, strict=True))) for row in columns])

    return extend, lambda: len(buffer), buffer.sample


def _tensors(columns: Call) -> TensorDict:
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    return TensorDict(tensors, batch_size=[len(next(iter(columns.values())))])
