"""The buffer service as a process that can be killed, stopped and restarted, and a load on it that records results.

`Service` runs `tests.world.buffer_process`, or an entry script under tests/ that disables a protection.
`Load` runs actors and a learner in threads of the test, so that its record of acknowledgements survives the service.
`StoreContents` is read from the store after the service has stopped.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tests.trajectories import decode, from_batch
from tests.world.buffer import make_trajectory
from tests.world.waiting import LIMIT_S, wait_until

from leeway.buffer import schema
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.offline.inspect import verify
from leeway.buffer.rows import only
from leeway.buffer.schema import Trajectory
from leeway.buffer.store import Store
from leeway.buffer.tables import NO_RECORD
from leeway.common.rpc.auth import ClientKeys
from leeway.common.run import RunFacts
from leeway.common.staleness import StalenessConfig

FACTS = RunFacts(
    run_id="killed",
    seed=0,
    num_prompts=64,
    group_size=4,
    groups_per_step=8,
    vocab_size=32_000,
    max_tokens=8192,
    staleness=StalenessConfig(max_lag="unbounded"),
)
CONFIG = BufferConfig()
REQUEST_TIMEOUT_S = 1.0
"""Request timeout in seconds, shorter than in a run, so that test clients send lost messages again sooner."""
MANY = FACTS.model_copy(update={"groups_per_step": 4096})
"""Facts of a run whose actors can lease 65,536 samples while no learner draws."""

Key = tuple[int, int]
"""Identifies a sample: (group, index)."""


class Service:
    """A buffer service in its own process."""

    def __init__(
        self,
        folder: Path,
        facts: RunFacts = FACTS,
        config: BufferConfig = CONFIG,
        *,
        entry: Sequence[str] = ("-m", "tests.world.buffer_process"),
        host: str | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start the process.

        Args:
            folder: store folder.
            facts: facts of the run.
            config: config of the service.
            entry: arguments of Python: the module, or a script that patches the module first.
            host: address to bind; None for a Unix socket.
            environment: variables added to those of the test.
            log: file for stderr; by default beside the folder.
            prefix: command that runs the command of the service.
        """
        self.folder, self.facts, self.config, self._prefix = folder, facts, config, prefix
        self._entry, self._environment, self._host = list(entry), environment or {}, host
        self._log = log or folder.with_name(folder.name + ".log")
        self.start()

    def start(self, timeout_s: float = LIMIT_S) -> None:
        """Start the process and wait for its address."""
        self.launch()
        # A thread reads the address, because a read from a pipe has no timeout.
        reader = threading.Thread(target=self._read_address, daemon=True)
        reader.start()
        reader.join(timeout_s)
        if "://" not in self.address:
            self.close()
            raise AssertionError(f"the service did not start: {self.log[-3000:]}")

    def launch(self) -> None:
        """Start the process without waiting for it."""
        self.address = ""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._prefix, *self.command()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self._environment},
            )

    def command(self) -> list[str]:
        """Return the command line."""
        facts, config = self.facts.model_dump_json(), self.config.model_dump_json()
        address = [] if self._host is None else ["--host", self._host]
        return [
            sys.executable,
            *self._entry,
            "--folder",
            str(self.folder),
            "--facts",
            facts,
            "--config",
            config,
            *address,
        ]

    def _read_address(self) -> None:
        self.address = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """Return the stderr of all processes of this service."""
        return self._log.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, as a crash would."""
        self.process.kill()
        self.wait()

    def stop(self) -> None:
        """Shut the service down gracefully."""
        self.process.terminate()
        assert self.wait() == 0, self.log[-3000:]

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait until the process exits; return the exit code."""
        code = self.process.wait(timeout_s)
        self.process.stdout.close()
        return code

    def close(self) -> None:
        """Kill the process in any state."""
        if self.is_alive:
            self.process.kill()
        self.process.wait(LIMIT_S)
        self.process.stdout.close()

    def memory_bytes(self) -> int:
        """Return the anonymous memory of the process (RssAnon)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def sample(lease, index: int, num_completion_tokens: int = 4) -> Trajectory:
    """Return a trajectory whose tokens follow from its group and index, so that stored samples can be verified."""
    row = make_trajectory(lease, index, seq=0, num_completion_tokens=num_completion_tokens)
    return replace(row, token_ids=sample_tokens((lease.group_id, index), len(row.token_ids)))


def sample_tokens(key: Key, num_tokens: int) -> np.ndarray:
    """Return the tokens of a sample, prompt included."""
    return np.random.default_rng(key).integers(0, FACTS.vocab_size, num_tokens, np.int32)


def generate(client, stop, outcomes, *, num_completion_tokens: int = 4, groups: int = 4, pause_s: float = 0.0):
    """Lease, push and pause until `stop` is set; append (key, outcome) to `outcomes` for every reply."""
    while not stop.is_set():
        pushed = []
        for lease in client.lease(groups).result(60).leases:
            for index in lease.sample_indices:
                row = sample(lease, index, num_completion_tokens)
                pushed.append(((lease.group_id, index), client.push(row)))
        for key, future in pushed:
            outcomes.append((key, future.result(60).outcome))
        if pause_s or not pushed:
            stop.wait(pause_s or 0.01)


class Load:
    """Actors, and a learner that draws every step, on a service that may be killed and restarted."""

    def __init__(
        self,
        address: str,
        *,
        facts: RunFacts = FACTS,
        num_actors: int = 2,
        num_completion_tokens: int = 4,
        groups: int = 4,
        pause_s: float = 0.0,
        draws: bool = True,
        keys: ClientKeys | None = None,
    ) -> None:
        """Connect all clients; `start` starts the threads.

        Args:
            address: address of the service.
            facts: facts of its run.
            num_actors: number of clients that push.
            num_completion_tokens: completion tokens of every trajectory.
            groups: number of groups that an actor leases and pushes at once.
            pause_s: seconds between two lease requests; without pauses and draws, a load uses up all leases.
            draws: whether the learner draws and finishes steps; if False, the learner only publishes version 0.
            keys: keys of the run's clients, if the service requires them.
        """
        self._facts, self._draws = facts, draws
        self._size = {"num_completion_tokens": num_completion_tokens, "groups": groups, "pause_s": pause_s}
        self._stop = threading.Event()
        self.outcomes = _Outcomes()
        self.drawn: dict[int, list[int]] = {}
        """Record ids drawn for each step."""
        self.errors: list[BaseException] = []
        make = partial(BufferClient, keys=keys)
        self.learner = make(address, run_id=facts.run_id, role="learner", name="learner")
        self.actors = [
            make(address, run_id=facts.run_id, role="actor", name=f"actor-{number}") for number in range(num_actors)
        ]
        for client in (self.learner, *self.actors):
            client.connect()
        self.incarnation = self.learner.begin_incarnation(0, 0).result(60).incarnation
        self.learner.published(self.incarnation, 0).result(60)
        self._threads = [
            threading.Thread(target=self._run_guarded, args=(lambda a=actor: self._push(a),)) for actor in self.actors
        ]
        if draws:
            self._threads.append(threading.Thread(target=self._run_guarded, args=(self._train,)))

    def start(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def end(self, timeout_s: float = 60.0) -> None:
        """Stop the threads after every push was answered; raise the first error of a thread."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "a client is still waiting"
        if self.errors:
            raise self.errors[0]

    def close(self) -> None:
        """Close the clients, even with requests pending."""
        self._stop.set()
        for client in (self.learner, *self.actors):
            client.close(0.1)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(60)

    def wait_for(self, num_answers: int, timeout_s: float = LIMIT_S) -> None:
        """Wait until `num_answers` more pushes are answered."""
        goal = len(self.outcomes) + num_answers
        wait_until(lambda: len(self.outcomes) >= goal, f"{num_answers} acknowledgements", timeout_s, self.errors)

    @property
    def acknowledged(self) -> set[Key]:
        """Return the samples that the service acknowledged as durable."""
        return {key for key, outcome in list(self.outcomes) if outcome in ("committed", "duplicate")}

    def _run_guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if not self._stop.is_set():
                self._stop.set()
            self.errors.append(error)

    def _push(self, client: BufferClient) -> None:
        generate(client, self._stop, self.outcomes, **self._size)

    def _train(self) -> None:
        step = 0
        while not self._stop.is_set():
            batch = self.learner.draw(step + 1, step, self.incarnation, self._facts.groups_per_step, 0.5).result(60)
            if not batch.ready:
                continue
            step += 1
            for row in decode(batch.body):
                assert np.array_equal(
                    row.token_ids, sample_tokens((row.group_id, row.sample_index), len(row.token_ids))
                )
            self.drawn[step] = batch.record_ids
            self.learner.step_finished(step, step).result(60)
            self.learner.published(self.incarnation, step).result(60)
            self.learner.checkpoint_durable(step).result(60)


class _Outcomes(list):
    """(key, outcome) of every reply, and the arrival time of the reply."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def append(self, item) -> None:
        super().append(item)
        self.times_s.append(time.monotonic())


@dataclass
class StoreContents:
    """Contents of a store."""

    keys: set[Key]
    """Samples with a record that passes its checksum."""
    num_duplicates: int
    """Number of records beyond the first record of each sample."""
    torn: list[str]
    """Descriptions of the records that differ from the pushed samples."""
    report: dict
    """Report of the check that `leeway buffer verify` runs."""

    @classmethod
    def read(cls, folder: Path) -> "StoreContents":
        """Read the store of a service that has stopped."""
        store = Store(folder, None)
        try:
            return store.read(cls._read)
        finally:
            store.close()

    @classmethod
    def _read(cls, tx) -> "StoreContents":
        num_records: Counter[Key] = Counter()
        torn = []
        for (group_id,), group in tx.groups.all_items():
            for index, record in enumerate(group.records):
                if record == NO_RECORD:
                    continue
                (block,) = tx.blocks_of([record])
                (row,) = from_batch(schema.join_rows([only(block, record)], [record]))
                if (row.group_id, row.sample_index) != (group_id, index) or not np.array_equal(
                    row.token_ids, sample_tokens((group_id, index), len(row.token_ids))
                ):
                    torn.append(f"record {record} is not sample {index} of group {group_id}")
                num_records[row.group_id, row.sample_index] += 1
        return cls(set(num_records), num_records.total() - len(num_records), torn, verify(tx))

    def check(self, acknowledged: set[Key]) -> None:
        """Assert that every acknowledged sample is stored once, that no record is torn, and that `verify` is clean."""
        assert acknowledged, "nothing was acknowledged: the test proves nothing"
        lost = acknowledged - self.keys
        assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged samples are lost: {sorted(lost)[:5]}"
        assert self.num_duplicates == 0
        assert self.torn == []
        assert self.report["faults"] == []


def settle(seconds: float = 0.05) -> None:
    """Sleep, so that messages in flight between processes arrive."""
    time.sleep(seconds)
