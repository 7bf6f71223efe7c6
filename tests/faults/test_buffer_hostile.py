"""Messages of a broken or hostile sender: malformed messages, bombs, and invalid trajectories."""

import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from tests.faults import bombs, malformed
from tests.faults.service_process import CONFIG, FACTS, MANY, StoreContents, sample
from tests.full import FULL, pick
from tests.trajectories import decode
from tests.world.waiting import bound, wait_until

from leeway.buffer import protocol as p
from leeway.buffer.client import BufferClient
from leeway.buffer.service import BufferService, opened
from leeway.common.rpc.messages import ClientIdentity, Envelope

ENDLESS = MANY.model_copy(update={"groups_per_step": 40_000})
UNVALIDATED = ("-m", "tests.world.service", "without_validation")
UNLIMITED = ("-m", "tests.world.service", "without_size_limits")
BAD_PER_S = 100
LONGEST_HANG_S = bound(1.0)
BOMBER = ClientIdentity("bomber", "actor", "b")
LAST = 2**52
"""Request number above all other request numbers."""


@pytest.fixture
def join(request):
    """Return `join(service, name, role)`, which connects a client; the clients are closed after the test."""

    def make(service, name, role="actor"):
        client = BufferClient(service.address, run_id=service.facts.run_id, role=role, name=name)
        request.addfinalizer(lambda: client.close(0.1))
        client.connect()
        return client

    return make


@pytest.fixture
def raw_socket(request):
    """Return `raw_socket(service)`, which opens a socket for arbitrary messages."""

    def make(service) -> zmq.Socket:
        context = zmq.Context()
        request.addfinalizer(context.term)
        socket = malformed.connect(context, service.address)
        request.addfinalizer(socket.close)
        return socket

    return make


class Probe:
    """Context manager that requests the status of the service continuously and measures the longest wait."""

    def __init__(self, client):
        self._client, self._stop, self.longest_s = client, threading.Event(), 0.0
        self._error = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self):
        while not self._stop.wait(0.02) and self._error is None:
            began = time.monotonic()
            self._error = self._client.status().exception(60)
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def replies_of(socket) -> list[Envelope]:
    """Return the replies that have arrived."""
    received = []
    while socket.poll(0):
        received.append(p.decode(socket.recv_multipart()[0]))
    return received


def send(service, socket, frames) -> list[Envelope]:
    """Send a message to a running service; return the replies that have arrived meanwhile."""
    while not socket.poll(2000, zmq.POLLOUT):
        assert service.is_alive, f"the service died: {service.log[-3000:]}"
    socket.send_multipart(frames)
    return replies_of(socket)


def last_answers(service, socket, client=malformed.CLIENT) -> list[Envelope]:
    """Send a request and return all replies up to its own; all earlier messages have then been processed."""
    request = p.encode(LAST, p.StatusRequest(), run_id=service.facts.run_id, client=client)
    replies = send(service, socket, [request])
    while not any(reply.request_id == LAST for reply in replies):
        assert socket.poll(20_000), f"the service does not answer: {service.log[-3000:]}"
        replies += replies_of(socket)
    return replies


def num_quarantined(client) -> int:
    return client.status().result(60).ledger["quarantined"]


def outcomes_of(replies) -> set[str]:
    """Return every outcome of a trajectory in these replies."""
    return {row.outcome for reply in replies if isinstance(reply.message, p.PushReply) for row in reply.message.results}


@pytest.mark.fault(23, "malformed messages")
def test_every_malformed_message_is_quarantined_beside_good_traffic(start_service, load_on, join, raw_socket, show):
    service = start_service()
    load = load_on(service)
    num_set_aside, num_resealed = pick(2_000, 50_000), pick(500, 10_000)
    socket, replies = raw_socket(service), []
    source = malformed.Source(FACTS.run_id, malformed.greet(socket, FACTS.run_id), seed=23)
    observer = join(service, "observer", "observer")
    with Probe(observer) as probe:
        for _ in range(num_set_aside):
            replies += send(service, socket, source.next(*malformed.SET_ASIDE).frames)
        other = join(service, "second-observer", "observer")
        wait_until(lambda: num_quarantined(other) >= num_set_aside, "the quarantine of every message", 60, load.errors)
        status = other.status().result(60)
        assert sum(status.quarantined_by_reason.values()) == num_set_aside
        for _ in range(num_resealed):
            replies += send(service, socket, source.next(*malformed.RESEALED).frames)
        replies += last_answers(service, socket)
    load.wait_for(100)
    load.end()
    load.close()
    service.stop()
    assert outcomes_of(replies) <= {"quarantined", "late", "duplicate", "fenced"}
    assert probe.longest_s <= LONGEST_HANG_S
    kept = StoreContents.read(service.folder)
    kept.check(load.acknowledged)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(status.quarantined_by_reason.items()))
    show(f"{num_set_aside} of {num_set_aside} quarantined ({reasons})")
    show(f"{num_resealed} more with right checksums: none stored, no answer later than {probe.longest_s:.2f} s")


@pytest.mark.fault(23, f"{BAD_PER_S} malformed messages/s beside good ones", full=True)
def test_malformed_messages_hardly_slow_good_traffic(start_service, load_on, join, show):
    service = start_service(facts=ENDLESS)
    load = load_on(service, draws=False, num_completion_tokens=256, groups=16)
    command = [sys.executable, "-m", "tests.faults.malformed", service.address, ENDLESS.run_id]
    sender = subprocess.Popen([*command, str(BAD_PER_S)])
    try:
        observer = join(service, "observer", "observer")
        wait_until(lambda: num_quarantined(observer) > 0, "the first malformed message")
        rates = {True: [], False: []}
        for number in range(20):
            is_bad = bool(number % 2)
            sender.send_signal(signal.SIGCONT if is_bad else signal.SIGSTOP)
            time.sleep(0.2)
            before = len(load.outcomes)
            time.sleep(2.0)
            rates[is_bad].append((len(load.outcomes) - before) / 2.0)
    finally:
        sender.kill()
        sender.wait(60)
    load.end()
    ratio = statistics.median(bad / good for bad, good in zip(rates[True], rates[False], strict=True))
    assert ratio >= 0.7, "other load on the cores may be the cause; benchmarks/buffer.py measures the ratio"
    show(f"good traffic at {ratio:.2f}x of its rate alone ({statistics.median(rates[False]):.0f} trajectories/s)")


@pytest.mark.fault(23, "no validation", control=True)
def test_control_without_validation_damage_is_stored_or_crashes_the_service(
    start_service, load_on, join, raw_socket, show
):
    service = start_service(facts=MANY, entry=UNVALIDATED)
    load_on(service, num_actors=0, draws=False)
    client = join(service, malformed.NAME)
    socket, replies, num_sent = raw_socket(service), [], 0
    for lease in client.lease(500).result(60).leases:
        # Each message has its own lease, because a sample is stored only once.
        source = malformed.Source(MANY.run_id, client.epoch, seed=lease.lease_id, lease=lease, client=client._identity)
        socket.send_multipart(source.next("resealed_body").frames)
        num_sent += 1
        time.sleep(0.002)
        replies += replies_of(socket)
        if not service.is_alive:
            show(f"the service died after message {num_sent}")
            return
    assert "committed" in outcomes_of(replies)
    show(f"damaged trajectories were stored: {len(replies)} answers to {num_sent} messages")


INVALID = {
    "reward not finite": [{"reward": float("nan")}, {"reward": float("inf")}, {"reward": -float("inf")}],
    "logprob above 0": [{"logprobs": np.array([-0.5, 0.1, -0.5, -0.5], np.float32)}],
    "logprob not finite": [
        {"logprobs": np.array([-0.5, value, -0.5, -0.5], np.float32)} for value in (np.nan, np.inf, -np.inf)
    ],
    "token outside the vocabulary": [
        {"token_ids": np.array([1, 2, 3, 4, 5, 6, token], np.int32)} for token in (FACTS.vocab_size, -1)
    ],
    "logprobs and completion differ in length": [
        {"logprobs": np.full(length, -0.5, np.float32)} for length in (0, 3, 5)
    ],
    "empty completion": [
        {"token_ids": np.zeros(3, np.int32), "logprobs": np.zeros(0, np.float32), "spans": ()},
        {"token_ids": np.zeros(0, np.int32), "logprobs": np.zeros(0, np.float32), "spans": ()},
    ],
}
"""Reason of the quarantine -> invalid changes to a valid trajectory of 3 + 4 tokens."""


def push_invalid(client) -> list[tuple[str, p.RowResult]]:
    """Push one trajectory of every invalid kind, as the first sample of a lease whose other samples are valid."""
    changes = [(reason, change) for reason, kinds in INVALID.items() for change in kinds]
    leases = client.lease(len(changes)).result(60).leases
    assert len(leases) == len(changes)
    pushed = []
    for lease, (reason, change) in zip(leases, changes, strict=True):
        bad, *good = (sample(lease, index) for index in lease.sample_indices)
        others = [client.push(each) for each in good]
        pushed.append((reason, client.push(replace(bad, **change))))
        assert {other.result(60).outcome for other in others} == {"committed"}
    return [(reason, future.result(60)) for reason, future in pushed]


@pytest.mark.fault(25, "trajectories with NaN, infinite or out-of-range values, different lengths, or no completion")
def test_an_invalid_trajectory_is_quarantined_with_its_reason_and_never_drawn(start_run, join, show):
    service, learner = start_run()
    results = push_invalid(join(service, "actor-0"))
    assert [(result.outcome, result.reason) for _, result in results] == [
        ("quarantined", reason) for reason, _ in results
    ]
    status = learner.status().result(60)
    assert status.quarantined_by_reason == {reason: len(kinds) for reason, kinds in INVALID.items()}
    assert status.failed_by_reason == {f"quarantined: {reason}": len(kinds) for reason, kinds in INVALID.items()}
    assert status.ledger["gap"] == 0
    draw = learner.draw(1, 0, 0, FACTS.groups_per_step, 5.0).result(60)
    assert len(decode(draw.body)) == 3 * FACTS.groups_per_step
    assert all(np.isfinite(row.reward) and (row.logprobs <= 0).all() for row in decode(draw.body))
    service.stop()
    assert StoreContents.read(service.folder).report["faults"] == []
    show(f"{len(results)} of {len(results)} kinds quarantined with their reason, the rest of each group was drawn")


@pytest.mark.fault(25, "no validation", control=True)
def test_control_without_validation_the_learner_draws_invalid_trajectories(start_run, join, show):
    service, learner = start_run(entry=UNVALIDATED)
    client = join(service, "actor-0")
    for lease in client.lease(FACTS.groups_per_step).result(60).leases:
        for index in lease.sample_indices:
            client.push(replace(sample(lease, index), logprobs=np.full(4, np.nan, np.float32)))
    draw = learner.draw(1, 0, 0, FACTS.groups_per_step, 10.0).result(60)
    assert draw.ready
    assert all(np.isnan(row.logprobs).all() for row in decode(draw.body))
    show(f"the learner received {len(decode(draw.body))} trajectories of NaN")


@pytest.fixture
def start_run(start_service, join):
    """Return `start_run(**arguments of Service)`, which starts a service and a learner that publishes a version."""

    def start(**arguments):
        service = start_service(**arguments)
        learner = join(service, "learner", "learner")
        begun = learner.begin_incarnation(0, 0).result(60)
        learner.published(begun.incarnation, 0).result(60)
        return service, learner

    return start


def make_bombs(run_id, client, epoch) -> dict[str, list[bytes]]:
    """Return every bomb that is a whole message, by kind."""
    return {
        "zstd 32,000x": bombs.compressed(run_id, client, epoch, pick(2**27, 2**30)),
        "a million columns": bombs.wide(run_id, client, epoch, 1_000_000),
        "100,000 brackets": bombs.nested(run_id, client, epoch, 100_000),
        "2,500,000 spans": bombs.spanned(run_id, client, epoch, 2_500_000),
        "10,000,000 leases": bombs.renewal(run_id, client, epoch, 10_000_000),
    }


@pytest.mark.fault(24, "bombs, in the function that refuses them")
def test_bombs_are_refused_within_a_millisecond(tmp_path, show):
    service = BufferService(CONFIG, FACTS, tmp_path / "buffer")
    try:
        made = make_bombs(FACTS.run_id, BOMBER, 1)
        for kind in ("zstd 32,000x", "a million columns"):
            took_s = sorted(_time_to_refuse(service, made[kind]) for _ in range(5))
            size = sum(map(len, made[kind]))
            show(f"{kind} ({size:,} bytes): refused in {took_s[2] * 1000:.2f} ms")
            assert took_s[2] <= (0.001 if FULL else 0.005)  # other processes may share the core
    finally:
        service.close()


def _time_to_refuse(service, frames) -> float:
    """Return the CPU time in seconds in which the service refuses a message, before or during a transaction."""
    sent = []
    service._rpc.answer = lambda *outgoing: sent.append(outgoing)

    def answer(tx):
        began = time.thread_time()
        arrivals = opened([service._rpc.open([zmq.Frame(frame) for frame in (b"bomber", *frames)])], "")
        sent.extend(service._answer(tx, service._answer_rejected(arrivals)).outbox)
        return time.thread_time() - began

    service._store.write(lambda tx: service._core.leases.hello(tx, p.Hello(BOMBER.role, BOMBER.name, BOMBER.session)))
    took_s = service._store.write(answer)
    ((_, _, reply, *_),) = sent
    assert isinstance(reply, p.Refused)
    assert "quarantined" in reply.reason
    return took_s


def memory_mib(service, key) -> int:
    """Return a line of /proc/PID/status in MiB; VmHWM is the peak memory."""
    lines = Path(f"/proc/{service.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(key))


@pytest.mark.fault(24, "bombs, sent to the service")
def test_bombs_neither_stop_the_service_nor_fill_its_memory(start_service, join, raw_socket, show):
    service = start_service()
    socket = raw_socket(service)
    epoch = malformed.greet(socket, FACTS.run_id, BOMBER)
    before, took_s = memory_mib(service, "VmHWM"), {}
    with Probe(join(service, "observer", "observer")) as probe:
        for kind, frames in make_bombs(FACTS.run_id, BOMBER, epoch).items():
            began = time.monotonic()
            send(service, socket, frames)
            last_answers(service, socket, BOMBER)
            took_s[kind] = time.monotonic() - began
        virtual = memory_mib(service, "VmSize")
        began = time.monotonic()
        with bombs.announce_a_large_frame(service.address) as connection:
            assert connection.recv(1) == b"", "the connection stays open"
        cut_s = time.monotonic() - began
        reserved = memory_mib(service, "VmSize") - virtual
    assert probe.longest_s <= LONGEST_HANG_S, took_s
    grown = memory_mib(service, "VmHWM") - before
    assert grown <= 256, took_s
    assert reserved <= 64
    show(f"a frame of 2 GiB: its connection was closed after {cut_s * 1000:.0f} ms, {reserved} MiB reserved")
    show(f"memory grew by {grown} MiB at most, no answer later than {probe.longest_s:.2f} s")


@pytest.mark.fault(24, "no size limits", control=True, full=True)
def test_control_without_limits_bombs_fill_the_memory(start_service, join, raw_socket, show):
    service = start_service(entry=UNLIMITED)
    client = join(service, "bomber")
    before, virtual = memory_mib(service, "VmHWM"), memory_mib(service, "VmSize")
    with bombs.announce_a_large_frame(service.address):
        wait_until(lambda: memory_mib(service, "VmSize") - virtual > 2000, "2 GiB to be reserved")
    socket = raw_socket(service)
    send(service, socket, bombs.compressed(FACTS.run_id, client._identity, client.epoch, 2**29))
    last_answers(service, socket, client._identity)
    grown = memory_mib(service, "VmHWM") - before
    assert grown > 400
    show(f"2 GiB reserved for a sender of 1 KB, and memory grew by {grown} MiB for a message of 16 KB")
