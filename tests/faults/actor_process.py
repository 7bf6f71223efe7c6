"""An actor in a process of its own, for tests that kill it, stop it, or turn its clock.

`python -m tests.faults.actor_process OPTIONS` leases and pushes until it is ended, and appends a line
per event to a file: `epoch E`, `lease GROUP INDEX...`, `push GROUP INDEX`, `OUTCOME GROUP INDEX` and
`refused REASON`. Once it is refused it tries what a zombie might: `lost N of M` leases, then it ends.
One that hands on adds `there GROUP INDEX TOKENS SECOND` of what it was leased with, and `handed` of what it was told is
on disk; SECOND of the clock that all processes share, when the lease was asked for and when it was told.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec

from buffer import client as client_module
from buffer import protocol as p
from buffer.client import BufferClient
from buffer.errors import BufferError, BufferRefused
from buffer.outbox import Outbox
from buffer.schema import HANDED_ON
from tests.faults.service_process import Key, sample, sample_tokens
from tests.world.files import whole_lines
from tests.world.waiting import LIMIT_S, wait_until

_NEVER = threading.Event()
"""Waited on instead of `time.sleep`, which fails under libfaketime."""
ZOMBIE_EXIT = 3
"""Exit code of an actor that found itself replaced."""


class Options(msgspec.Struct, frozen=True):
    """What an actor process is to do."""

    address: str
    run_id: str
    name: str
    request_timeout_s: float
    """Of its client."""
    events: str
    """File to append to."""
    groups: int = 4
    """Leased at once."""
    num_completion_tokens: int = 4
    pause_s: float = 0.0
    """After each push, as generation would take."""
    bounded: bool = True
    """False takes away what bounds the client's memory."""
    hands_on: float = 0.0
    """Share of the leases that it hands on, or has kept, with some tokens more."""


class ActorProcess:
    """The process as its parent sees it."""

    def __init__(self, folder: Path, service, name: str, *, environment: dict[str, str] | None = None, **options):
        """Start it; events of processes of one name share a file.

        Args:
            folder: for its events and log.
            service: a `service_process.Service`.
            name: the client's.
            environment: variables beside those of the test.
            options: further `Options`.
        """
        self.name = name
        self._events = folder / f"{name}-{time.monotonic_ns()}.events"
        self._events.touch()
        timeout_s = client_module.REQUEST_TIMEOUT_S
        made = Options(service.address, service.facts.run_id, name, timeout_s, str(self._events), **options)
        with (folder / f"{name}.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.actor_process", msgspec.json.encode(made).decode()],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def events(self, *kinds: str) -> list[list[str]]:
        """The words of every event of these kinds (default: all), in order."""
        lines = [line.split() for line in whole_lines(self._events)]
        return [words for words in lines if not kinds or words[0] in kinds]

    def keys(self, *kinds: str) -> set[Key]:
        """The samples named by events of these kinds."""
        return {(int(words[1]), int(words[2])) for words in self.events(*kinds)}

    @property
    def acknowledged(self) -> set[Key]:
        """Samples that it was told are on disk."""
        return self.keys("committed", "duplicate")

    @property
    def leased(self) -> set[Key]:
        """Samples that it was leased."""
        return {(int(group), int(index)) for _, group, *indices in self.events("lease") for index in indices}

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = LIMIT_S) -> float:
        """Wait until so many events of a kind are there; seconds that it took."""
        return wait_until(lambda: len(self.events(kind)) >= count, f"{count} x '{kind}' of {self.name}", timeout_s)

    def memory_bytes(self) -> int:
        """Its anonymous memory (RssAnon)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would, whatever state it is in."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


class _BoundlessOutbox(Outbox):
    """Takes more from its owner than the service gave it credit for."""

    @property
    def _credit(self) -> p.Credit:
        return p.Credit(2**60, 2**60)

    @_credit.setter
    def _credit(self, credit: p.Credit) -> None:
        """What the service says is not heeded."""


def main(options: Options) -> int:
    """Lease and push for ever; ends with ZOMBIE_EXIT where a newer process of the name is there."""
    events = os.open(options.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(*words: object) -> None:
        os.write(events, (" ".join(map(str, words)) + "\n").encode())

    client_module.REQUEST_TIMEOUT_S = options.request_timeout_s
    if not options.bounded:
        mock.patch.object(client_module, "Outbox", _BoundlessOutbox).start()
    client = BufferClient(options.address, run_id=options.run_id, role="actor", name=options.name)
    client.connect()
    tell("epoch", client.epoch)
    held: list[p.Lease] = []
    try:
        while True:
            asked_s = time.monotonic()
            granted = client.lease(options.groups).result(120)
            leases, prefixes = granted.leases, granted.prefixes()
            held = leases or held
            for lease in leases:
                tell("lease", lease.group_id, *lease.sample_indices)
            for (lease_id, index), prefix in prefixes.items():
                key = next(lease.group_id for lease in leases if lease.lease_id == lease_id), index
                is_right = prefix.token_ids.tolist() == sample_tokens(key, 3 + len(prefix.token_ids))[3:].tolist()
                tell("there" if is_right else "wrong", *key, len(prefix.token_ids), asked_s)
            for lease in leases:
                if random.random() < options.hands_on:
                    there = {i: len(prefixes[lease.lease_id, i].token_ids) for i in lease.prefixes}
                    _hand_on(client, lease, there, tell)
                else:
                    _push(client, lease, options, tell)
            if not leases:
                _NEVER.wait(0.01)
    except BufferRefused as refused:
        tell("refused", refused)
    lost = client.renew([lease.lease_id for lease in held]).result(60).lost
    tell("lost", len(lost), "of", len(held))
    for lease in held:
        client.give_up(lease, lease.sample_indices, "a zombie gives up").result(60)
    client.close()
    return ZOMBIE_EXIT


_MOST_TOKENS = 8000
"""Of a sample that is handed on again and again: a longer one than the run allows would be set aside."""


def _hand_on(client: BufferClient, lease: p.Lease, there: dict[int, int], tell: Callable[..., None]) -> None:
    """Some samples first kept, then all handed on, each with some tokens more than there were."""
    for goes_on in (True, False):
        indices = [index for index in lease.sample_indices if not goes_on or random.random() < 0.5]
        there |= {index: min(_MOST_TOKENS, there.get(index, 0) + random.randint(1, 400)) for index in indices}
        rows = [replace(sample(lease, i, there[i]), reward=None, finish_reason=HANDED_ON) for i in indices]
        client.hand_on(lease, indices, rows, goes_on=goes_on).result(120)
        for index in indices:
            tell("handed", lease.group_id, index, there[index], time.monotonic())


def _push(client: BufferClient, lease: p.Lease, options: Options, tell: Callable[..., None]) -> None:
    for index in lease.sample_indices:
        tell("push", lease.group_id, index)
        pushed = client.push(sample(lease, index, options.num_completion_tokens))
        pushed.add_done_callback(partial(_answered, tell, (lease.group_id, index)))
        _NEVER.wait(options.pause_s)


def _answered(tell: Callable[..., None], key: Key, pushed: Future[p.RowResult]) -> None:
    try:
        tell(pushed.result().outcome, *key)
    except BufferError as error:
        tell("failed", *key, error)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1].encode(), type=Options)))
