"""The weight service with invalid requests, slow readers and many clients."""

import os
import pickle
import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from leeway.common.rpc.messages import ROLES, ClientIdentity, Envelope, Protocol, Refused, Role
from leeway.weight_sync import protocol as p
from leeway.weight_sync.client import StoreAccess
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.manifest import TransferFailed, WeightsCorrupt, WeightsGone, encode, file_name
from leeway.weight_sync.puller import open_puller
from leeway.weight_sync.service import MAX_SERVED, ServedVersions, WeightService
from leeway.weight_sync.store import WeightStore
from tests.weights_by_hand import RUN, Machine, assert_holds, make_part, publish, v, weights
from tests.world.waiting import wait_until

WHOLE = file_name(0, "float32")
CONFIG = WeightSyncConfig(transport="network")


@pytest.fixture
def machine(tmp_path: Path):
    made = Machine(tmp_path, host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def raw(machine: Machine):
    """`raw(address)` connects a bare socket to the service."""
    context = zmq.Context()
    sockets = []

    def connect(address: str = "") -> zmq.Socket:
        sockets.append(context.socket(zmq.DEALER))
        sockets[-1].linger = 0
        sockets[-1].connect(address or machine.address)
        return sockets[-1]

    yield connect
    for each in sockets:
        each.close()
    context.term()


def encode_request(number: int, message: p.Request, run_id: str = RUN, role: Role = "learner") -> bytes:
    return p.PROTOCOL.encode(number, message, run_id=run_id, client=ClientIdentity("raw", role, "s"))


def receive_reply(connection: zmq.Socket) -> Envelope:
    assert connection.poll(10_000), "no reply"
    return p.PROTOCOL.decode(connection.recv_multipart()[0])


def test_a_client_of_another_run_is_refused_with_the_names_of_both_runs(machine: Machine):
    access = StoreAccess(machine.config, machine.folder, machine.address, "other")
    with pytest.raises(TransferFailed, match="weight service serves run 'test-run', not 'other'"):
        open_puller(access, "a", "float32")


def test_a_client_of_another_release_is_refused_with_the_fix(machine: Machine, raw):
    connection = raw()
    old = Protocol("weight service", 99, p.Request, p.Reply, allowed_roles=p.ALLOWED_ROLES, max_header_bytes=2**16)
    connection.send(old.encode(1, p.StoreRequest("old"), run_id=RUN))
    refused = receive_reply(connection).message
    assert isinstance(refused, Refused)
    assert "from the same release" in refused.reason


def test_garbage_is_dropped_and_the_service_continues(machine: Machine, raw):
    publish(machine.folder, 0)
    connection, rng = raw(), random.Random(0)
    good = encode_request(1, p.ReadRequest("0.0", WHOLE, 0, 100))
    junk = [
        [b""],
        [pickle.dumps({"a": 1})],
        [os.urandom(5000)],
        [good, b"x", b"y", b"z"],
        [good[:-1]],
        [b"\xdc\xff\xff" * 1000],
        [b"x" * (p.PROTOCOL.max_header_bytes + 1)],
    ]
    for _ in range(200):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        junk.append([bytes(flipped)])
    for frames in junk:
        connection.send_multipart(frames)
    with socket.create_connection(tuple(machine.address.removeprefix("tcp://").split(":"))) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with machine.puller().fetch(v(0)) as staged:
        assert_holds(staged, 0)
    # the junk uses a separate connection, which may be slower
    deadline_s = time.monotonic() + 60
    while machine.service.requests["Damaged"] < len(junk) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert machine.service.requests["Damaged"] == len(junk)


@pytest.mark.parametrize(
    "message",
    [
        p.ReadRequest("0.0", "../STORE", 0, 1),
        p.ReadRequest("0.0", "manifest.json", 0, 1),
        p.ReadRequest("0.0", "part-9.float32.safetensors", 0, 1),
        p.ReadRequest("0.0", WHOLE, 2**40, 1),
        p.ReadRequest("../x", WHOLE, 0, 1),
        p.ReadRequest("00.0", WHOLE, 0, 1),
        p.ManifestRequest("0.00"),
        p.WriteRequest("0.1", "manifest.json", 0, 1),
        p.WriteRequest("0.1", "../../part-0.float32.safetensors", 0, 1),
        p.WriteRequest("../0.1", WHOLE, 0, 1),
        p.WriteRequest("0.1", ".hidden", 0, 1),
        p.PartRequest("/", 0),
        p.StoreFacts("a", "b"),
    ],
    ids=str,
)
def test_a_request_for_anything_but_files_of_a_version_is_refused(machine: Machine, raw, message: p.Request):
    publish(machine.folder, 0)
    before = {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()}
    connection = raw()
    connection.send(encode_request(7, message))
    envelope = receive_reply(connection)
    assert envelope.request_id == 7
    assert isinstance(envelope.message, Refused)
    assert {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("role", [None, *sorted(ROLES - {"learner"})])
def test_only_the_learner_can_write(machine: Machine, raw, role: Role | None):
    publish(machine.folder, 0)
    before = {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()}
    part, files = make_part(0, v(1), weights(1))
    (chunk, *_), client = files[WHOLE], None if role is None else ClientIdentity("raw", role, "s")
    requests = [
        (p.WriteRequest("0.1", WHOLE, 0, len(chunk)), bytes(chunk)),
        (p.PartDone(), encode(part)), (p.PartRequest("0.0", 0), b""), (p.CommitRequest(1), b"{}"),
    ]  # fmt: skip
    assert {type(message) for message, _ in requests} == {m for m, roles in p.ALLOWED_ROLES.items() if roles != ROLES}
    connection = raw()
    for number, (message, body) in enumerate(requests):
        header = p.PROTOCOL.encode(number, message, body, run_id=RUN, client=client)
        connection.send_multipart([header, body] if body else [header])
        refused = receive_reply(connection).message
        assert isinstance(refused, Refused)
        assert (
            "has no sender" if role is None else f"requires role learner, but 'raw' has role '{role}'"
        ) in refused.reason
    assert {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()} == before


def test_an_uploaded_part_cannot_name_files_outside_of_its_version(machine: Machine):
    part, files = make_part(0, v(0), weights(0))
    for name in ("../x.safetensors", "STORE", "manifest.json"):
        with pytest.raises((WeightsCorrupt, TransferFailed), match="is not the name of a"):
            machine.client().write(v(0), name, files[WHOLE])
    assert part.files


def test_retention_keeps_a_version_while_a_slow_reader_requests_it(tmp_path: Path):
    now = [0.0]
    service = WeightService(RUN, tmp_path, read_expires_s=30.0, clock=lambda: now[0])
    service.bind()
    try:
        publish(tmp_path, 0)
        served = service._served
        served.document(v(0))
        for version in range(1, 4):
            now[0] += 20.0
            served.read(v(0), WHOLE, 0, 10)
            served.expire()
            publish(tmp_path, version, keep_versions=1)
            assert v(0) in WeightStore(tmp_path).committed()
        now[0] += 31.0
        served.expire()
        publish(tmp_path, 4, keep_versions=1)
        assert WeightStore(tmp_path).committed() == [v(4)]
        with pytest.raises(WeightsGone):
            served.read(v(0), WHOLE, 0, 10)
    finally:
        service.close()


@pytest.fixture
def served(tmp_path: Path):
    """Yield served versions, a settable time, and the store."""
    now = [0.0]
    made = ServedVersions(WeightStore(tmp_path), expires_s=30.0, clock=lambda: now[0])
    yield made, now, WeightStore(tmp_path)
    made.close()


def test_a_version_expires_some_time_after_its_last_request(served):
    versions, now, store = served
    publish(store.folder, 0, keep_versions=2)
    for version, at_s, stays in ((2, 0.0, True), (4, 29.9, True), (6, 50.0, True), (8, 60.0, False)):
        publish(store.folder, version - 1, keep_versions=2)
        now[0] = at_s
        if version == 2:
            versions.document(v(0))
        if version == 4:
            versions.read(v(0), WHOLE, 0, 1)
        versions.expire()
        publish(store.folder, version, keep_versions=2)
        assert (v(0) in store.committed()) == stays


def test_readers_that_never_finish_keep_a_bounded_number_of_versions(served):
    versions, now, store = served
    for version in range(30):
        publish(store.folder, version, keep_versions=2)
        versions.read(v(version), WHOLE, 0, 1)
        now[0] += 1.0
        versions.expire()
    assert len(store.committed()) <= 2 + MAX_SERVED
    assert versions.read(v(29), WHOLE, 0, 1)


def test_sixty_four_clients_are_served_in_turn(tmp_path: Path, raw):
    publish(tmp_path / "fair", 0)
    service = WeightService(RUN, tmp_path / "fair")
    address = service.bind()
    handshakes = service._rpc._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def connect() -> zmq.Socket:
        made = raw(address)
        assert handshakes.poll(60_000), "no connection"
        handshakes.recv_multipart()
        return made

    try:
        greedy, *light = [connect() for _ in range(65)]
        for number in range(16):
            greedy.send(encode_request(number, p.ReadRequest("0.0", WHOLE, 0, 2**14)))
        for connection in light:
            for number in range(4):
                connection.send(encode_request(number, p.ReadRequest("0.0", WHOLE, number * 2**14, 2**14)))
        # Each side has one I/O thread, which handles a new connection after the messages of older connections. Once two
        # new connections are open, all messages have arrived, and only the order in which the socket is read matters.
        connect(), connect()
        served = dict.fromkeys(light, 0)
        for round_number in range(1, 5):
            for _ in range(65):
                service.turn()
            for connection in light:
                while connection.poll(60_000 if served[connection] < round_number else 0):
                    assert isinstance(p.PROTOCOL.decode(connection.recv_multipart()[0]).message, p.Chunk)
                    served[connection] += 1
            assert set(served.values()) == {round_number}
    finally:
        handshakes.close()
        service.close()


def test_a_request_to_a_stopped_service_times_out(machine: Machine):
    client = machine.client(timeout_s=0.6, resend_s=0.1)
    machine.end()
    began = time.monotonic()
    with pytest.raises(
        TransferFailed, match=rf"{machine.address} did not reply to NewestRequest for [\d.]+ s.* 0\.0\.0\.0"
    ):
        client.newest()
    assert 0.5 < time.monotonic() - began < 60
    machine.start()

    def is_back() -> object:
        with suppress(TransferFailed):
            return client.newest() is None

    wait_until(is_back, "the service to be back")


def test_a_slow_connection_is_not_reset_repeatedly(machine: Machine):
    """Each reply takes longer than the silence after which a client reconnects."""
    publish(machine.folder, 0)
    client = machine.client(resend_s=0.05, timeout_s=60.0)
    send = machine.service._rpc.answer

    def slowly(*arguments) -> None:
        time.sleep(0.4)
        send(*arguments)

    machine.service._rpc.answer = slowly
    assert client.newest() == v(0)


def test_slow_work_runs_once_despite_resent_requests(machine: Machine):
    part, files = make_part(0, v(0), weights(0))
    client = machine.client(resend_s=0.05)
    uploads, jobs, go = machine.service._uploads, [], threading.Event()
    finish, submit = uploads.finish_part, machine.service._worker.submit

    def slowly(document: memoryview) -> None:
        assert go.wait(60)
        finish(document)

    uploads.finish_part = slowly
    machine.service._worker.submit = lambda *job: (jobs.append(1), submit(*job))[1]
    for name, buffers in files.items():
        client.write(v(0), name, buffers)
    waiter = threading.Thread(target=client.part_done, args=(encode(part),))
    waiter.start()
    wait_until(lambda: machine.service.requests["PartDone"] >= 3, "a third request")
    assert machine.client("other").newest() is None, "other clients are served meanwhile"
    assert jobs == [1]  # one job for three requests; a request after completion may start another job
    go.set()
    waiter.join(20)
    assert not waiter.is_alive()
    assert encode(client.part(v(0), 0)) == encode(part)


def test_a_port_in_use_is_an_error_that_names_the_key(machine: Machine, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("leeway.common.rpc.server.BIND_RETRY_S", 0.0)
    port = int(machine.address.rsplit(":", 1)[1])
    other = WeightService(RUN, tmp_path / "other", host="127.0.0.1")
    (tmp_path / "other" / "PORT").write_text(str(port))
    try:
        with pytest.raises(TransferFailed, match=r"cannot bind .*Set launch.host"):
            other.bind()
    finally:
        other.close()
