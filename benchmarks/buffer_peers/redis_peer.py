"""Measurement of a Redis stream whose append-only file is synced before every reply.

Settings: `appendonly yes`, `appendfsync always`, no snapshots, loopback TCP, redis-py with hiredis and RESP 3. Each
trajectory is one stream entry with token ids, log-probabilities, and the scalars as msgpack. A pipeline has 32 XADD
calls. Four pipelines in flight on one connection were the fastest number of 1 to 16, and as fast as four threads.
Sampling reads the stream in batches with XRANGE and views the values as NumPy arrays.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import redis
from benchmarks.buffer_peers.mp_queue import as_dict
from benchmarks.buffer_peers.workload import (
    BATCH_TRAJECTORIES,
    PATIENCE_S,
    Figures,
    Workload,
    calls,
    rates,
    sampled,
    until,
)

from leeway.buffer.schema import Trajectory

PIPELINES_IN_FLIGHT = 4
STREAM = "trajectories"
_encoder = msgspec.msgpack.Encoder()


def measure(work: Workload, folder: Path) -> Figures:
    """Append the workload to a stream of a new server, then read the stream.

    Raises:
        FileNotFoundError: redis-server is not installed.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("redis-server not found: install it (Debian package redis-server)")
    port = _free_port()
    settings = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes"}
    command = [program, *(str(part) for name, value in settings.items() for part in (f"--{name}", value))]
    server = subprocess.Popen([*command, "--appendfsync", "always"], stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(port=port, protocol=3, socket_timeout=PATIENCE_S)
        until(lambda: _answers(client), "redis-server to answer", patience_s=30.0)
        push_s = _append(client, work.trajectories())
        num_held = client.xlen(STREAM)
        if num_held != len(work):
            raise RuntimeError(f"the stream holds {num_held} of {len(work)} trajectories")
        started = time.perf_counter()
        num_batches = _read(client)
        sample_s = time.perf_counter() - started
        client.close()
    finally:
        server.terminate()
        server.wait(PATIENCE_S)
    return rates(work, push_s) | sampled(num_batches, num_held, sample_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _fields(row: Trajectory) -> list[Any]:
    values = as_dict(row)
    tokens, logprobs = values.pop("token_ids"), values.pop("logprobs")
    return ["token_ids", tokens.tobytes(), "logprobs", logprobs.tobytes(), "scalars", _encoder.encode(values)]


def _append(client: redis.Redis, rows: list[Trajectory]) -> float:
    """Append all rows to the stream; return the seconds until the last reply."""
    connection = client.connection_pool.get_connection()
    pending: deque[int] = deque()
    started = time.perf_counter()
    for call in calls(rows):
        commands = [("XADD", STREAM, "*", *_fields(row)) for row in call]
        connection.send_packed_command(connection.pack_commands(commands))
        pending.append(len(commands))
        if len(pending) >= PIPELINES_IN_FLIGHT:
            _read_replies(connection, pending.popleft())
    for num_replies in pending:
        _read_replies(connection, num_replies)
    seconds = time.perf_counter() - started
    client.connection_pool.release(connection)
    return seconds


def _read_replies(connection: Any, num_replies: int) -> None:  # noqa: ANN401 -- redis does not export its class
    for _ in range(num_replies):
        connection.read_response()


def _read(client: redis.Redis) -> int:
    """Read the whole stream; return the number of batches."""
    start, num_batches = "-", 0
    while entries := client.xrange(STREAM, min=start, count=BATCH_TRAJECTORIES):
        for _, values in entries:
            np.frombuffer(values[b"token_ids"], np.int32)
            np.frombuffer(values[b"logprobs"], np.float32)
        start = f"({entries[-1][0].decode()}"
        num_batches += 1
    return num_batches
