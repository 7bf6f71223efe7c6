"""CURVE authentication: accepted and refused clients, the log of refusals, and keys that are never printed."""

import contextlib
import dataclasses
import json
import logging
import pickle
import re
import socket
import threading
import time

import cloudpickle
import pytest
import zmq

from leeway.common.rpc import auth
from leeway.common.rpc.auth import ClientKeys, CurveAuthenticator, Key, RunKeys, is_loopback
from tests.world.waiting import wait_until

SERVICE = "the service under test"


class Locked:
    """A ROUTER socket with a CURVE authenticator, and its clients."""

    def __init__(self, keys: RunKeys) -> None:
        self.context, self._outside = zmq.Context(), zmq.Context()
        self._outside.linger = 0
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.authenticator = CurveAuthenticator(self.router, keys.services, SERVICE)
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.last_endpoint.decode()
        self._clients: list[zmq.Socket] = []

    def client(self, **options) -> zmq.Socket:
        client = self._outside.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(client, name, value)
        client.connect(self.address)
        self._clients.append(client)
        with contextlib.suppress(zmq.Again):  # the server may have refused the client already
            client.send(b"hello", zmq.NOBLOCK)
        return client

    def client_with(self, keys: ClientKeys) -> zmq.Socket:
        names = ("curve_serverkey", "curve_publickey", "curve_secretkey")
        return self.client(
            **dict(zip(names, (k.reveal() for k in (keys.server, keys.public, keys.secret)), strict=True))
        )

    def receives(self, within_s: float) -> bool:
        return bool(self.router.poll(int(within_s * 1000)))

    def wait_for_refusals(self, number: int) -> None:
        wait_until(lambda: self.authenticator.num_refused >= number, f"{number} refusals")

    def close(self) -> None:
        for client in self._clients:
            client.close(0)
        self._outside.term()
        self.router.close()
        self.authenticator.stop()
        self.context.term()


@pytest.fixture
def keys():
    return RunKeys.make()


@pytest.fixture
def locked(keys):
    with contextlib.closing(Locked(keys)) as made:
        yield made


def unauthenticated_clients(keys: RunKeys) -> dict[str, dict]:
    """Return the socket options of clients without the key of the run, by kind."""
    public, secret = zmq.curve_keypair()
    return {
        "no key": {},
        "PLAIN": {"plain_username": b"leeway", "plain_password": b"leeway"},
        "an unknown key": {
            "curve_serverkey": keys.clients.server.reveal(),
            "curve_publickey": public,
            "curve_secretkey": secret,
        },
        "the client's key, another server's key": {
            "curve_serverkey": public,
            "curve_publickey": keys.clients.public.reveal(),
            "curve_secretkey": keys.clients.secret.reveal(),
        },
    }


def test_a_client_with_the_key_of_the_run_is_accepted(keys, locked):
    locked.client_with(keys.clients)
    assert locked.receives(60.0)
    assert locked.authenticator.num_refused == 0


@pytest.mark.parametrize("kind", ["no key", "PLAIN", "an unknown key", "the client's key, another server's key"])
def test_an_unauthenticated_client_is_refused_and_an_unknown_key_counted(kind, keys, locked):
    locked.client(**unauthenticated_clients(keys)[kind])
    if kind == "an unknown key":
        locked.wait_for_refusals(1)
    assert not locked.receives(0.5)


def test_control_without_the_allow_list_an_unknown_key_is_accepted(keys, locked, monkeypatch):
    monkeypatch.setattr(Key, "is_same", lambda self, raw: True)
    locked.client(**unauthenticated_clients(keys)["an unknown key"])
    assert locked.receives(60.0)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", b"\x80\x04garbage\n" * 20, b"\xff" + bytes(8) + b"\x7f\x03"]
)
def test_other_protocols_are_refused(data, locked):
    host, port = locked.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(data)
        assert not locked.receives(0.3)


def test_a_silent_connection_times_out(locked):
    host, port = locked.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        began = time.monotonic()
        while connection.recv(64):
            pass  # discards the greeting of the service
        assert time.monotonic() - began < 25.0  # the default of libzmq is 30 s


def test_without_an_authenticator_no_client_is_accepted(keys, locked):
    locked.authenticator.stop()
    locked.client_with(keys.clients)
    assert not locked.receives(0.5)


def test_each_burst_of_refusals_is_logged_once_with_its_count_and_last_address(keys, caplog, monkeypatch):
    monkeypatch.setattr(auth, "BURST_S", 0.5)
    monkeypatch.setattr(auth, "WARN_EVERY_S", 1.0)
    with caplog.at_level(logging.INFO), contextlib.closing(Locked(keys)) as locked:
        for burst in (1, 2, 3):
            for _ in range(3):
                num_before = locked.authenticator.num_refused
                client = locked.client(**unauthenticated_clients(keys)["an unknown key"])
                locked.wait_for_refusals(num_before + 1)
                client.close(0)
            if burst < 3:  # the last burst is logged on close
                wait_until(lambda least=burst: len(caplog.records) >= least, "the log line of the burst")
    messages = [record.message for record in caplog.records]
    assert sum(int(re.search(r"(\d+) connections whose key is not of this run", line)[1]) for line in messages) >= 9
    assert 3 <= len(messages) < 9
    assert all("127.0.0.1" in line and SERVICE in line for line in messages)


def test_clients_that_reconnect_are_not_counted_as_refused(keys, locked):
    for _ in range(3):
        client = locked.client_with(keys.clients)
        assert locked.receives(60.0)
        locked.router.recv_multipart()
        client.close(0)
    time.sleep(0.2)
    assert locked.authenticator.num_refused == 0


def test_the_thread_of_the_authenticator_ends_with_its_service(keys):
    before = threading.active_count()
    with contextlib.closing(Locked(keys)) as locked:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    locked.authenticator.stop()


@pytest.mark.parametrize("to_text", [repr, str, "{}".format, "%s".__mod__, lambda k: repr(dataclasses.asdict(k))])
def test_no_format_prints_a_key(to_text, keys):
    secrets = [
        keys.services.secret,
        keys.services.client,
        keys.clients.server,
        keys.clients.public,
        keys.clients.secret,
    ]
    for holder in (keys, keys.services, keys.clients):
        text = to_text(holder)
        assert not [key for key in secrets if key.reveal().decode() in text]


def test_a_key_is_neither_serializable_as_json_nor_readable_by_attributes(keys):
    with pytest.raises(TypeError):
        json.dumps(dataclasses.asdict(keys))
    with pytest.raises(TypeError):
        vars(keys.clients.secret)
    assert not hasattr(keys.clients, "__dict__")


def test_an_invalid_key_is_refused_without_printing_it():
    with pytest.raises(ValueError, match=r"^a CURVE key has 40 characters, got 6$"):
        Key(b"secret")


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_keys_survive_pickling_by_ray(pickler, keys):
    received = pickler.loads(pickler.dumps(keys.clients))
    assert received.secret.reveal() == keys.clients.secret.reveal()


def test_every_run_has_its_own_keys():
    assert RunKeys.make().clients.secret.reveal() != RunKeys.make().clients.secret.reveal()


@pytest.mark.parametrize(
    ("host", "is_this_machine"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("*", False), ("10.0.0.1", False), ("node-7", False), ("::", False), ("eth0", False),
    ],
)  # fmt: skip
def test_loopback_addresses_are_distinguished_from_reachable_ones(host, is_this_machine):
    assert is_loopback(host) is is_this_machine
