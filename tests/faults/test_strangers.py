"""Unauthenticated clients at the sockets of a run are refused, without effect on authenticated clients."""

import contextlib
import itertools
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import zmq
from tests.faults import strangers
from tests.faults.locked_service import write_keys
from tests.faults.service_process import MANY, Service, StoreContents
from tests.faults.weight_processes import ROOT
from tests.full import FULL, pick
from tests.weights_by_hand import RUN, publish
from tests.world.waiting import wait_until

from leeway.buffer import protocol as buffer_protocol
from leeway.buffer.client import BufferClient
from leeway.common.rpc.auth import LOOPBACK
from leeway.common.rpc.messages import ClientIdentity
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import protocol as weights_protocol
from leeway.weight_sync.client import WeightClient

MODULE = "tests.faults.locked_service"
NUM_SLOW = 500
CUT_OFF_S = 15.0
"""Seconds until a silent connection is closed, with slack for busy cores: the proxy allows 2 s, the service's socket
5 s, and libzmq by itself 30 s."""
ENDLESS = MANY.model_copy(update={"groups_per_step": 40_000})
VERSION = PolicyVersion(0, 0)
NO_REPLY_S = 1.5
UNAUTHENTICATED = ClientIdentity("stranger", "actor", "s")


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "keys"


@pytest.fixture
def keys(keys_file):
    return write_keys(keys_file)


class LockedBuffer:
    """A buffer service that requires keys, good traffic on it, and the hello of an unauthenticated client."""

    hello = staticmethod(
        lambda: buffer_protocol.encode(
            1, buffer_protocol.Hello("actor", "stranger", "s"), run_id=ENDLESS.run_id, client=UNAUTHENTICATED
        )
    )

    def __init__(self, tmp_path, keys_file, keys, kind, load_on) -> None:
        entry = ("-m", MODULE, str(keys_file), kind)
        self.service = Service(tmp_path / "buffer", ENDLESS, entry=entry, host=LOOPBACK)
        self.address, self.pid = self.service.address, self.service.pid
        self._keys, self._load_on, self.load = keys, load_on, None

    def start_traffic(self) -> None:
        self.load = self._load_on(
            self.service, draws=False, num_completion_tokens=64, groups=16, keys=self._keys.clients
        )

    @property
    def progress(self) -> int:
        """Return the number of trajectories acknowledged so far."""
        assert not self.load.errors, self.load.errors
        return len(self.load.outcomes)

    def check(self, data: bytes) -> None:
        """Assert that invalid bytes from a client with a key are quarantined, and that nothing acknowledged is lost."""
        client = BufferClient(
            self.address,
            run_id=ENDLESS.run_id,
            role="observer",
            name="o",
            keys=self._keys.clients,
        )
        client.connect()
        assert client.status().result(60).ledger["quarantined"] == 0, "unauthenticated bytes were read as a message"
        with zmq.Context() as context, context.socket(zmq.DEALER) as insider:
            self._keys.clients.lock(insider)
            insider.linger = 2000
            insider.connect(self.address)
            insider.send_multipart([data, data])
            wait_until(lambda: client.status().result(60).ledger["quarantined"] == 1, "the quarantine")
        client.close(1.0)
        self.load.end()
        self.service.stop()
        StoreContents.read(self.service.folder).check(self.load.acknowledged)

    @property
    def log(self) -> str:
        return self.service.log

    def close(self) -> None:
        self.service.close()


class LockedWeights:
    """A weight service that requires keys; its traffic is a client that fetches the same version repeatedly."""

    hello = staticmethod(
        lambda: weights_protocol.PROTOCOL.encode(
            1, weights_protocol.StoreRequest("stranger"), run_id=RUN, client=UNAUTHENTICATED
        )
    )

    def __init__(self, tmp_path, keys_file, keys, kind, _) -> None:
        folder = tmp_path / "weights"
        self._manifest = publish(folder, 0, num_tensors=4, num_values=200_000)
        self._log = tmp_path / "weights.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(keys_file), kind, str(folder)],
                stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            )  # fmt: skip
        self.address, self.pid = self._process.stdout.readline().strip(), self._process.pid
        self._keys = keys
        self._stop, self._errors, self.progress = threading.Event(), [], 0
        self._thread = threading.Thread(target=self._fetch)

    def start_traffic(self) -> None:
        self._thread.start()

    def _client(self) -> WeightClient:
        return WeightClient(self.address, RUN, "actor-0", role="actor", chunk_bytes=2**16, keys=self._keys.clients)

    def _fetch(self) -> None:
        client = self._client()
        file = max(self._manifest.files, key=lambda entry: entry.size_bytes).name
        size = self._manifest.size_of(file)
        try:
            while not self._stop.is_set():
                client.read(VERSION, file, size, 0, lambda _: None)
                self.progress += 1
        except Exception as error:
            self._errors.append(error)
        finally:
            client.close()

    def check(self, data: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as insider:
            self._keys.clients.lock(insider)
            insider.linger = 2000
            insider.connect(self.address)
            insider.send_multipart([data, data])
            wait_until(lambda: "invalid or damaged message" in self.log, "the report of the message")
        client = self._client()
        assert client.newest() == VERSION
        client.close()
        self._end()
        assert not self._errors, self._errors

    def _end(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(60)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self._end()
        self._process.kill()
        self._process.wait(60)
        self._process.stdout.close()


SERVICES = {"buffer": LockedBuffer, "weights": LockedWeights}


@pytest.fixture
def start_locked(tmp_path, keys_file, keys, load_on):
    """Return `start_locked("weights")`, which starts a service that requires keys and ends with the test."""
    running = []

    def start(name, kind=None):
        running.append(SERVICES[name](tmp_path, keys_file, keys, kind or name, load_on))
        return running[-1]

    yield start
    for each in running:
        each.close()


def is_answered(address: str, options: dict, message: bytes, within_s: float) -> bool:
    """Return whether a socket with these options gets any reply to this message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        socket.connect(address)
        with contextlib.suppress(zmq.Again):  # the service may refuse before the send
            socket.send(message, zmq.NOBLOCK)
        return bool(socket.poll(int(within_s * 1000)))


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.fault(27, "unauthenticated clients: no key, PLAIN, wrong keys, garbage, a pickle", full=True)
def test_unauthenticated_clients_are_refused_without_effect_on_good_traffic(name, start_locked, keys, tmp_path, show):
    began, service, trap = time.monotonic(), start_locked(name), tmp_path / "unpickled"
    service.start_traffic()
    wait_until(lambda: service.progress > 10, "good traffic")
    for kind, options in strangers.unauthenticated_sockets(keys).items():
        assert not is_answered(service.address, options, service.hello(), NO_REPLY_S), kind
        assert not is_answered(service.address, options, strangers.pickled(trap), 0.1), kind
    invalid = strangers.garbage(trap)
    for data in invalid:
        strangers.send_bytes(service.address, data)
    before = service.progress
    wait_until(lambda: service.progress > before + 10, "more good traffic")
    service.check(strangers.pickled(trap))
    assert not trap.exists(), "unpickled code was run"
    lines = [line for line in service.log.splitlines() if "key is not of this run" in line]
    assert 1 <= len(lines) <= 2 + (time.monotonic() - began) // 60, "refusals are logged once a minute, and at the end"
    assert "127.0.0.1" in lines[0]
    everything = service.log.encode()
    shown = [
        key for key in (keys.clients.secret, keys.clients.public, keys.services.secret) if key.reveal() in everything
    ]
    assert not shown, "a key is in the log"
    refused = f"4 kinds of sockets and {len(invalid)} kinds of bytes refused"
    show(f"the {name} service: {refused}, no code run, logged in {len(lines)} line(s)")


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.fault(27, "the list of accepted keys", control=True)
def test_control_without_the_key_list_any_key_is_accepted(name, start_locked, keys, show):
    service = start_locked(name, f"unlisted-{name}")
    wrong = strangers.unauthenticated_sockets(keys)["wrong key"]
    assert is_answered(service.address, wrong, service.hello(), 15.0)
    show(f"the {name} service answered the hello of an unlisted key")


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.fault(27, f"{NUM_SLOW} sockets that send nothing, half a greeting or half a handshake", full=True)
def test_slow_sockets_are_closed_and_good_traffic_continues(name, start_locked, show):
    service = start_locked(name)
    process = psutil.Process(service.pid)
    service.start_traffic()
    wait_until(lambda: service.progress > 10, "good traffic")
    at_rest = process.num_fds()
    host, port = strangers.host_and_port(service.address)
    sender = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.strangers", host, str(port), str(NUM_SLOW)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    most, rates, cut_off_s = at_rest, {True: [], False: []}, []
    try:
        assert sender.stdout.readline() == b"ready\n"
        for is_slow in itertools.islice(itertools.cycle([True, False]), pick(4, 20)):
            sender.send_signal(signal.SIGCONT if is_slow else signal.SIGSTOP)
            if is_slow:
                wait_until(lambda: process.num_fds() > at_rest + NUM_SLOW // 2, "the slow sockets")
            else:  # a stopped sender opens no new connections
                cut_off_s.append(wait_until(lambda: process.num_fds() < at_rest + 50, "the cut-off", CUT_OFF_S))
            before, began = service.progress, time.monotonic()
            wait_until(lambda before=before: service.progress > before + 10, "good traffic meanwhile")
            if FULL:  # the short run has only two measurements, too few on shared cores
                time.sleep(1.5)
                rates[is_slow].append((service.progress - before) / (time.monotonic() - began))
            most = max(most, process.num_fds())
    finally:
        sender.kill()
        sender.wait(60)
        sender.stdout.close()
    wait_until(lambda: process.num_fds() < at_rest + 20, "the descriptors to be closed")
    assert most <= at_rest + 2 * NUM_SLOW
    shown = f"at most {most - at_rest} descriptors, closed within {max(cut_off_s):.1f} s, none left open"
    if FULL:
        ratio = statistics.median(rates[True]) / statistics.median(rates[False])
        assert ratio >= 0.5
        shown = f"good traffic at {ratio:.2f}x, {shown}"
    show(f"the {name} service: {shown}")


@pytest.mark.fault(27, "a locked buffer service is killed and started again")
def test_clients_reconnect_to_a_locked_service_after_a_kill(start_locked, show):
    locked = start_locked("buffer")
    locked.start_traffic()
    num_kills = pick(2, 10)
    for _ in range(num_kills):
        locked.load.wait_for(20)
        locked.service.kill()
        locked.service.start()
        assert locked.service.address == locked.address
    locked.load.wait_for(20)
    locked.load.end()
    locked.service.stop()
    StoreContents.read(locked.service.folder).check(locked.load.acknowledged)
    show(f"{num_kills} kills, 0 lost")


def test_no_key_is_on_the_command_line_or_in_the_environment_of_a_service(start_locked, keys):
    process = Path(f"/proc/{start_locked('buffer').pid}")
    seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
    for key in (keys.services.secret, keys.services.client, keys.clients.secret, keys.clients.server):
        assert key.reveal() not in seen
