"""A buffer service in a subprocess, and clients of this service."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import lmdb
from benchmarks.buffer_peers.workload import GROUP_SIZE, MAX_TOKENS, NUM_PROMPTS, PATIENCE_S, VOCAB_SIZE
from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import environment
from tests.constants import environment as constants
from tests.world.buffer_process import serving

from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.protocol import Lease
from leeway.common.rpc.messages import Role
from leeway.common.run import RunFacts
from leeway.common.staleness import StalenessConfig

RUN_ID = "benchmark"
ADMITTED_STEPS = 4
"""Number of steps whose groups may be open at once if the lag is unbounded."""
LEASES_PER_REQUEST = 64
LEASE_S = 3600.0
LONG_LEASES = constants({"leeway.buffer.leases.LEASE_TIMEOUT_S": LEASE_S})
"""Environment variables that set a long lease timeout, because clients of the benchmark do not renew leases."""


def facts_for(groups_per_step: int) -> RunFacts:
    """Return the facts of a replay run with unbounded lag."""
    return RunFacts(
        run_id=RUN_ID,
        seed=0,
        num_prompts=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        groups_per_step=groups_per_step,
        vocab_size=VOCAB_SIZE,
        max_tokens=MAX_TOKENS,
        staleness=StalenessConfig(max_lag="unbounded"),
    )


def config_for(**overrides: object) -> BufferConfig:
    """Return the default buffer config with overrides."""
    return BufferConfig.model_validate(overrides)


class Service:
    """Context manager that runs `python -m tests.world.buffer_process` on a folder."""

    def __init__(self, folder: Path, facts: RunFacts, config: BufferConfig, *, under: Sequence[str] = ()) -> None:
        """Start the service; `under` is a command that runs the service, such as a tracer."""
        self.folder = folder
        self.facts = facts
        self.config = config
        self._under = list(under)
        self._log = (folder.parent / f"{folder.name}.log").open("ab")
        self.start()

    def start(self) -> None:
        """Start the process and wait for the line with its address.

        Raises:
            RuntimeError: the process exited or timed out; the message has the end of the log.
        """
        command = [*self._under, *serving(self.folder, self.facts, "--config", self.config.model_dump_json())]
        started = time.monotonic()
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment() | LONG_LEASES, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        self.address = self.process.stdout.readline().strip() if readable else ""
        self.address_after_s = time.monotonic() - started
        if not self.address:
            self.stop()
            log = Path(self._log.name).read_text(errors="replace")
            raise RuntimeError(f"the buffer service on {self.folder} printed no address; end of its log: {log[-2000:]}")

    @property
    def pid(self) -> int:
        """Process id of the service itself, also if another command such as a tracer runs the service."""
        if not self._under:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else self.process.pid

    def rss_anon_bytes(self) -> int:
        """Return the bytes of anonymous resident memory: the service's allocations without the pages of the store."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"/proc/{self.pid}/status has no RssAnon")

    def client(self, name: str, role: Role = "actor") -> BufferClient:
        """Return a connected client."""
        client = BufferClient(self.address, run_id=RUN_ID, role=role, name=name)
        client.connect()
        return client

    def begin(self) -> BufferClient:
        """Return a learner client that has published its first version, after which the service grants leases."""
        learner = self.client("learner", "learner")
        learner.begin_incarnation(0, 0).result(PATIENCE_S)
        learner.published(0, 0).result(PATIENCE_S)
        return learner

    def num_commits(self) -> int:
        """Return LMDB's count of write transactions, read from the store without the service."""
        environment = lmdb.open(str(self.folder), readonly=True, lock=False, max_dbs=64)
        try:
            return int(environment.info()["last_txnid"])
        finally:
            environment.close()

    def kill(self) -> None:
        """Kill the service with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        """Terminate the process; kill it after 30 s."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
        try:
            self.process.wait(30.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE_S)

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()


def lease_all(actor: BufferClient, num_groups: int) -> list[Lease]:
    """Lease `num_groups` groups.

    Raises:
        RuntimeError: admission closed before all groups were leased.
    """
    leases: list[Lease] = []
    while len(leases) < num_groups:
        grant = actor.lease(min(LEASES_PER_REQUEST, num_groups - len(leases))).result(PATIENCE_S)
        if not grant.leases:
            raise RuntimeError(f"admission closed after {len(leases)} of {num_groups} groups")
        leases += grant.leases
    return leases


def steps_for(num_groups: int) -> int:
    """Return the number of groups per step with which `num_groups` groups can be open at once."""
    return -(-num_groups // ADMITTED_STEPS)
