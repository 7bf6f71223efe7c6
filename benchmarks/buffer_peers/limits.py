"""Upper limits of this machine: network transport without storage, and storage without network transport.

Raw ZeroMQ: a PUSH socket sends 32 trajectories per message to a PULL socket over loopback, in the client's encoding.
The receiver reads and validates them like the service, and discards them. The receiver acknowledges only the end of the
workload.

Plain LMDB: one process writes one record of the same size per trajectory, synchronously, without writemap, and with 256
(then 32) records per commit. The process then reads records back by random keys.
"""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import lmdb
import zmq
from benchmarks.buffer_peers.service import RUN_ID, facts_for
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
from benchmarks.lib.processes import command_of

from leeway.buffer import schema
from leeway.buffer.ingest import faults

RECORDS_PER_COMMIT = 256
NUM_SAMPLED_BATCHES = 100
_PATIENCE_MS = int(PATIENCE_S * 1000)


def measure_raw_zmq(work: Workload, folder: Path) -> Figures:
    """Push the workload to a receiver that validates trajectories and stores nothing."""
    rows = work.trajectories()
    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as reply:
        push.bind("tcp://127.0.0.1:*")
        reply.bind("tcp://127.0.0.1:*")
        for socket in (push, reply):
            socket.linger = 0
            socket.sndtimeo = socket.rcvtimeo = _PATIENCE_MS
        addresses = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (push, reply)]
        arguments = dict(zip(("data_address", "reply_address"), addresses, strict=True))
        receiver = subprocess.Popen(command_of(f"{__name__}:receive", arguments), stdout=subprocess.DEVNULL)
        try:
            reply.recv()
            started = time.perf_counter()
            for call in calls(rows):
                push.send(schema.encode(call, RUN_ID), copy=False)
            push.send(b"")
            received = int(reply.recv())
            seconds = time.perf_counter() - started
        finally:
            receiver.terminate()
            receiver.wait(PATIENCE_S)
    if received != len(work):
        raise RuntimeError(f"the receiver accepted {received} of {len(work)} trajectories")
    return rates(work, seconds)


def receive(data_address: str, reply_address: str) -> None:
    """Run the receiver: validate messages until an empty one arrives, then send the number of valid rows."""
    facts, known = facts_for(1), {0: 0}
    num_rows = 0
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as reply:
        pull.connect(data_address)
        reply.connect(reply_address)
        pull.rcvtimeo = _PATIENCE_MS
        reply.send(b"ready")
        while body := pull.recv(copy=False).buffer:
            batch = schema.read_stream(body)
            num_rows += batch.num_rows - len(faults(batch, facts, known))
        reply.send(str(num_rows).encode())


def measure_lmdb(work: Workload, folder: Path) -> Figures:
    """Write every record in this process, then read batches of random records."""
    records = [row.token_ids.tobytes() + row.logprobs.tobytes() + bytes(128) for row in work.trajectories()]
    figures: Figures = {}
    for name, per_commit in (("push_32_a_commit", ROWS_PER_CALL), ("push", RECORDS_PER_COMMIT)):
        with lmdb.open(str(folder / name), map_size=2**34, writemap=False, sync=True) as environment:
            started = time.perf_counter()
            for first in range(0, len(records), per_commit):
                with environment.begin(write=True) as txn:
                    for i in range(first, min(first + per_commit, len(records))):
                        txn.put(i.to_bytes(8, "big"), records[i], append=True)
            figures |= rates(work, time.perf_counter() - started, name=name)
            seconds = _read(environment, len(records))
    return figures | sampled(NUM_SAMPLED_BATCHES, NUM_SAMPLED_BATCHES * BATCH_TRAJECTORIES, seconds)


def _read(environment: lmdb.Environment, num_records: int) -> float:
    """Return the seconds that copying batches of random records out of the store takes."""
    rng = random.Random(0)
    started = time.perf_counter()
    for _ in range(NUM_SAMPLED_BATCHES):
        with environment.begin() as txn:
            batch = [txn.get(rng.randrange(num_records).to_bytes(8, "big")) for _ in range(BATCH_TRAJECTORIES)]
        if None in batch:
            raise RuntimeError("a record that was written is missing")
    return time.perf_counter() - started
