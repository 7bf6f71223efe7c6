"""Measurement of TransferQueue, the data plane of verl.

Settings: SimpleStorage with one storage unit, which on two cores is faster than the default of two. The asynchronous
interface sends `kv_batch_put` calls of 32 keys, with 16 calls in flight. Token ids and log-probabilities are jagged
nested tensors, and scalars are tensors. `push_plain_per_s` is the rate of the documented basic use: synchronous
`kv_batch_put` calls of 32 keys, one after the other.
"""

from __future__ import annotations

import asyncio
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import transfer_queue
from benchmarks.buffer_peers.ray_peers import start_ray
from benchmarks.buffer_peers.workload import (
    BATCH_TRAJECTORIES,
    PATIENCE_S,
    ROWS_PER_CALL,
    Figures,
    Workload,
    calls,
    rates,
    sampled,
)
from omegaconf import OmegaConf
from tensordict import TensorDict

from leeway.buffer.schema import Trajectory

STORAGE_UNITS = 1
PUTS_IN_FLIGHT = 16
NUM_SAMPLED_BATCHES = 5
PLAIN_PART = 4
"""Divisor: 1 / PLAIN_PART of the workload is put again with synchronous calls."""


def measure(work: Workload, folder: Path) -> Figures:
    """Put the workload, get batches of random keys, and put a part of the workload with synchronous calls."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    start_ray(folder)
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": STORAGE_UNITS}}}))
    rows = work.trajectories()
    client = transfer_queue.get_client()
    started = time.perf_counter()
    client._run_coroutine(_put_all(rows))  # uses the client's own event loop, like its synchronous calls
    push_s = time.perf_counter() - started
    num_held = len(transfer_queue.kv_list("train")["train"])
    if num_held != len(rows):
        raise RuntimeError(f"TransferQueue holds {num_held} of {len(rows)} trajectories")
    sample_s = _get(len(rows))
    part = rows[: len(rows) // PLAIN_PART]
    started = time.perf_counter()
    for keys, call in _keyed(part):
        transfer_queue.kv_batch_put(keys=keys, partition_id="plain", fields=_fields(call))
    plain_s = time.perf_counter() - started
    transfer_queue.close()
    return (
        rates(work, push_s)
        | sampled(NUM_SAMPLED_BATCHES, NUM_SAMPLED_BATCHES * BATCH_TRAJECTORIES, sample_s)
        | {"push_plain_per_s": len(part) / plain_s}
    )


def _keyed(rows: list[Trajectory]) -> Iterator[tuple[list[str], list[Trajectory]]]:
    for i, call in enumerate(calls(rows)):
        yield [str(i * ROWS_PER_CALL + j) for j in range(len(call))], call


async def _put_all(rows: list[Trajectory]) -> None:
    free = asyncio.Semaphore(PUTS_IN_FLIGHT)

    async def put(keys: list[str], call: list[Trajectory]) -> None:
        async with free:
            await transfer_queue.async_kv_batch_put(keys=keys, partition_id="train", fields=_fields(call))

    puts = [put(keys, call) for keys, call in _keyed(rows)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*puts)


def _fields(rows: list[Trajectory]) -> TensorDict:
    ids = [
        (row.lease_id, row.attempt, row.group_id, row.sample_index, row.prompt_id, row.prompt_length, row.seq)
        for row in rows
    ]
    columns = {
        "token_ids": _jagged([torch.from_numpy(row.token_ids) for row in rows]),
        "logprobs": _jagged([torch.from_numpy(row.logprobs) for row in rows]),
        "ids": torch.tensor(ids),
        "floats": torch.tensor([(row.reward, row.started_s, row.finished_s) for row in rows], dtype=torch.float64),
    }
    return TensorDict(columns, batch_size=[len(rows)])


def _jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def _get(num_held: int) -> float:
    """Get batches of random keys; return the seconds."""
    rng = random.Random(0)
    started = time.perf_counter()
    for _ in range(NUM_SAMPLED_BATCHES):
        keys = [str(i) for i in rng.sample(range(num_held), BATCH_TRAJECTORIES)]
        batch = transfer_queue.kv_batch_get(keys=keys, partition_id="train")
        if len(batch) != BATCH_TRAJECTORIES:
            raise RuntimeError(f"TransferQueue returned {len(batch)} of {BATCH_TRAJECTORIES} trajectories")
    return time.perf_counter() - started
