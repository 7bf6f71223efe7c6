"""An actor in its own process, for tests that kill or stop the actor or change its clock.

`python -m tests.faults.actor_process OPTIONS` leases and pushes until it is terminated, and appends one line per event
to a file: `epoch E`, `lease GROUP INDEX...`, `push GROUP INDEX`, `OUTCOME GROUP INDEX` and `refused REASON`.

After a refusal, the actor is a zombie: a replaced process that still runs. The zombie renews its leases (`lost N of
M`), reports the samples of these leases as failed, and exits.

With `requeue_share`, the actor adds two kinds of events: `prefix GROUP INDEX TOKENS SECOND` for each partial sample in
a lease, and `requeued GROUP INDEX TOKENS SECOND` for each requeued sample that was acknowledged. SECOND is the
monotonic time of the lease request or of the reply.
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
from tests.faults.service_process import Key, sample, sample_tokens
from tests.world.files import whole_lines
from tests.world.waiting import LIMIT_S, wait_until

from leeway.buffer import client as client_module
from leeway.buffer import protocol as p
from leeway.buffer.client import BufferClient
from leeway.buffer.errors import BufferError, BufferRefused
from leeway.buffer.outbox import Outbox
from leeway.buffer.schema import REQUEUED

_NEVER = threading.Event()
"""Event that is never set; its wait replaces `time.sleep`, which fails under libfaketime."""
ZOMBIE_EXIT = 3
"""Exit code of an actor that was replaced by a newer process."""


class Options(msgspec.Struct, frozen=True):
    """Options of an actor process."""

    address: str
    run_id: str
    name: str
    request_timeout_s: float
    """Request timeout of the actor's client, in seconds."""
    events: str
    """File to which events are appended."""
    groups: int = 4
    """Groups per lease request."""
    num_completion_tokens: int = 4
    pause_s: float = 0.0
    """Seconds to wait after each push, in place of generation."""
    bounded: bool = True
    """False removes the bound on the client's memory."""
    requeue_share: float = 0.0
    """Share of the leases whose samples are not pushed, but extended and requeued, or only saved."""


class ActorProcess:
    """An actor process and the events that it wrote, for the parent process."""

    def __init__(self, folder: Path, service, name: str, *, environment: dict[str, str] | None = None, **options):
        """Start the process. Processes of one name write to separate files.

        Args:
            folder: folder for the events and the log.
            service: a `service_process.Service`.
            name: client name.
            environment: variables added to those of the test.
            options: more `Options`.
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
        """Return the words of every event of these kinds (default: all), in order."""
        lines = [line.split() for line in whole_lines(self._events)]
        return [words for words in lines if not kinds or words[0] in kinds]

    def keys(self, *kinds: str) -> set[Key]:
        """Return the samples that appear in events of these kinds."""
        return {(int(words[1]), int(words[2])) for words in self.events(*kinds)}

    @property
    def acknowledged(self) -> set[Key]:
        """Return the samples whose push was acknowledged as durable."""
        return self.keys("committed", "duplicate")

    @property
    def leased(self) -> set[Key]:
        """Return the samples in the leases of the actor."""
        return {(int(group), int(index)) for _, group, *indices in self.events("lease") for index in indices}

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = LIMIT_S) -> float:
        """Wait until there are `count` events of a kind; return the seconds that this took."""
        return wait_until(lambda: len(self.events(kind)) >= count, f"{count} x '{kind}' of {self.name}", timeout_s)

    def memory_bytes(self) -> int:
        """Return the anonymous memory of the process (RssAnon)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process, also if it is stopped."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)


class _BoundlessOutbox(Outbox):
    """An outbox that accepts more than the service's credit allows."""

    @property
    def _credit(self) -> p.Credit:
        return p.Credit(2**60, 2**60)

    @_credit.setter
    def _credit(self, credit: p.Credit) -> None:
        """Ignore the credit that the service grants."""


def main(options: Options) -> int:
    """Lease and push until terminated; return ZOMBIE_EXIT after a newer process of this name has replaced this one."""
    events = os.open(options.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def log_event(*words: object) -> None:
        os.write(events, (" ".join(map(str, words)) + "\n").encode())

    client_module.REQUEST_TIMEOUT_S = options.request_timeout_s
    if not options.bounded:
        mock.patch.object(client_module, "Outbox", _BoundlessOutbox).start()
    client = BufferClient(options.address, run_id=options.run_id, role="actor", name=options.name)
    client.connect()
    log_event("epoch", client.epoch)
    held: list[p.Lease] = []
    try:
        while True:
            requested_s = time.monotonic()
            granted = client.lease(options.groups).result(120)
            leases, prefixes = granted.leases, granted.prefixes()
            held = leases or held
            for lease in leases:
                log_event("lease", lease.group_id, *lease.sample_indices)
            for (lease_id, index), prefix in prefixes.items():
                key = next(lease.group_id for lease in leases if lease.lease_id == lease_id), index
                is_right = prefix.token_ids.tolist() == sample_tokens(key, 3 + len(prefix.token_ids))[3:].tolist()
                log_event("prefix" if is_right else "wrong", *key, len(prefix.token_ids), requested_s)
            for lease in leases:
                if random.random() < options.requeue_share:
                    num_tokens = {i: len(prefixes[lease.lease_id, i].token_ids) for i in lease.prefixes}
                    _requeue(client, lease, num_tokens, log_event)
                else:
                    _push(client, lease, options, log_event)
            if not leases:
                _NEVER.wait(0.01)
    except BufferRefused as refused:
        log_event("refused", refused)
    lost = client.renew([lease.lease_id for lease in held]).result(60).lost
    log_event("lost", len(lost), "of", len(held))
    for lease in held:
        client.report_failed(lease, lease.sample_indices, "released by a zombie").result(60)
    client.close()
    return ZOMBIE_EXIT


_MOST_TOKENS = 8000
"""Maximum number of tokens of a requeued sample; the buffer would quarantine samples longer than the run allows."""


def _requeue(client: BufferClient, lease: p.Lease, num_tokens: dict[int, int], log_event: Callable[..., None]) -> None:
    """Save some samples of a lease, then requeue all its samples, each with more tokens than before."""
    for goes_on in (True, False):
        indices = [index for index in lease.sample_indices if not goes_on or random.random() < 0.5]
        num_tokens |= {index: min(_MOST_TOKENS, num_tokens.get(index, 0) + random.randint(1, 400)) for index in indices}
        rows = [replace(sample(lease, i, num_tokens[i]), reward=None, finish_reason=REQUEUED) for i in indices]
        client.requeue(lease, indices, rows, goes_on=goes_on).result(120)
        for index in indices:
            log_event("requeued", lease.group_id, index, num_tokens[index], time.monotonic())


def _push(client: BufferClient, lease: p.Lease, options: Options, log_event: Callable[..., None]) -> None:
    for index in lease.sample_indices:
        log_event("push", lease.group_id, index)
        pushed = client.push(sample(lease, index, options.num_completion_tokens))
        pushed.add_done_callback(partial(_log_outcome, log_event, (lease.group_id, index)))
        _NEVER.wait(options.pause_s)


def _log_outcome(log_event: Callable[..., None], key: Key, pushed: Future[p.RowResult]) -> None:
    try:
        log_event(pushed.result().outcome, *key)
    except BufferError as error:
        log_event("failed", *key, error)


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1].encode(), type=Options)))
