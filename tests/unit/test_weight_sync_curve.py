"""Who may talk to a locked socket, who is told about it, and that no key is ever shown."""

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

from common.rpc import auth
from common.rpc.auth import ClientKeys, Doorkeeper, Key, RunKeys, is_loopback
from tests.world.waiting import wait_until

WHO = "the service under test"


class Locked:
    """A ROUTER behind a doorkeeper, and clients of it."""

    def __init__(self, keys: RunKeys) -> None:
        self.context, self._outside = zmq.Context(), zmq.Context()
        self._outside.linger = 0
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.door = Doorkeeper(self.router, keys.services, WHO)
        self.router.bind("tcp://127.0.0.1:*")
        self.address = self.router.last_endpoint.decode()
        self._clients: list[zmq.Socket] = []

    def client(self, **options) -> zmq.Socket:
        client = self._outside.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(client, name, value)
        client.connect(self.address)
        self._clients.append(client)
        with contextlib.suppress(zmq.Again):  # it was refused already, and has no line any more
            client.send(b"let me in", zmq.NOBLOCK)
        return client

    def client_with(self, keys: ClientKeys) -> zmq.Socket:
        names = ("curve_serverkey", "curve_publickey", "curve_secretkey")
        return self.client(
            **dict(zip(names, (k.reveal() for k in (keys.server, keys.public, keys.secret)), strict=True))
        )

    def hears(self, within_s: float) -> bool:
        return bool(self.router.poll(int(within_s * 1000)))

    def wait_for_refusals(self, number: int) -> None:
        wait_until(lambda: self.door.num_refused >= number, f"{number} refusals")

    def close(self) -> None:
        for client in self._clients:
            client.close(0)
        self._outside.term()
        self.router.close()
        self.door.stop()
        self.context.term()


@pytest.fixture
def keys():
    return RunKeys.make()


@pytest.fixture
def locked(keys):
    with contextlib.closing(Locked(keys)) as made:
        yield made


def strangers(keys: RunKeys) -> dict[str, dict]:
    """By who they are: the options of their sockets."""
    public, secret = zmq.curve_keypair()
    return {
        "no key": {},
        "PLAIN": {"plain_username": b"leeway", "plain_password": b"leeway"},
        "a key of its own": {
            "curve_serverkey": keys.clients.server.reveal(),
            "curve_publickey": public,
            "curve_secretkey": secret,
        },
        "the client's key, but another server's": {
            "curve_serverkey": public,
            "curve_publickey": keys.clients.public.reveal(),
            "curve_secretkey": keys.clients.secret.reveal(),
        },
    }


def test_the_holder_of_the_runs_key_is_let_in(keys, locked):
    locked.client_with(keys.clients)
    assert locked.hears(60.0)
    assert locked.door.num_refused == 0


@pytest.mark.parametrize("who", ["no key", "PLAIN", "a key of its own", "the client's key, but another server's"])
def test_a_stranger_is_refused_and_a_wrong_key_counted(who, keys, locked):
    locked.client(**strangers(keys)[who])
    if who == "a key of its own":
        locked.wait_for_refusals(1)
    assert not locked.hears(0.5)


def test_control_without_the_allow_list_a_strangers_key_is_let_in(keys, locked, monkeypatch):
    monkeypatch.setattr(Key, "is_same", lambda self, raw: True)
    locked.client(**strangers(keys)["a key of its own"])
    assert locked.hears(60.0)


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.0\r\n\r\n", b"\x80\x04garbage\n" * 20, b"\xff" + bytes(8) + b"\x7f\x03"]
)
def test_other_protocols_are_refused(words, locked):
    host, port = locked.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        stranger.sendall(words)
        assert not locked.hears(0.3)


def test_who_says_nothing_is_cut_off(locked):
    host, port = locked.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as silent:
        began = time.monotonic()
        while silent.recv(64):
            pass  # the greeting of the service
        assert time.monotonic() - began < 25.0  # libzmq by itself would wait for 30


def test_without_a_handler_nobody_is_let_in(keys, locked):
    locked.door.stop()
    locked.client_with(keys.clients)
    assert not locked.hears(0.5)


def test_each_burst_of_strangers_is_logged_once_with_their_number_and_the_last_address(keys, caplog, monkeypatch):
    monkeypatch.setattr(auth, "BURST_S", 0.5)
    monkeypatch.setattr(auth, "COMPLAIN_EVERY_S", 1.0)
    with caplog.at_level(logging.INFO), contextlib.closing(Locked(keys)) as locked:
        for burst in (1, 2, 3):
            for _ in range(3):
                already = locked.door.num_refused
                client = locked.client(**strangers(keys)["a key of its own"])
                locked.wait_for_refusals(already + 1)
                client.close(0)
            if burst < 3:  # the last one is logged at the end
                wait_until(lambda least=burst: len(caplog.records) >= least, "the line about the burst")
    said = [record.message for record in caplog.records]
    assert sum(int(re.search(r"(\d+) with a key that is not of this run", line)[1]) for line in said) >= 9
    assert 3 <= len(said) < 9
    assert all("127.0.0.1" in line and WHO in line for line in said)


def test_clients_that_come_and_go_are_no_strangers(keys, locked):
    for _ in range(3):
        client = locked.client_with(keys.clients)
        assert locked.hears(60.0)
        locked.router.recv_multipart()
        client.close(0)
    time.sleep(0.2)
    assert locked.door.num_refused == 0


def test_the_thread_of_the_door_ends_with_its_service(keys):
    before = threading.active_count()
    with contextlib.closing(Locked(keys)) as locked:
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    locked.door.stop()


@pytest.mark.parametrize("show", [repr, str, "{}".format, "%s".__mod__, lambda k: repr(dataclasses.asdict(k))])
def test_no_key_is_shown_however_it_is_printed(show, keys):
    secrets = [
        keys.services.secret,
        keys.services.client,
        keys.clients.server,
        keys.clients.public,
        keys.clients.secret,
    ]
    for holder in (keys, keys.services, keys.clients):
        shown = show(holder)
        assert not [key for key in secrets if key.reveal().decode() in shown]


def test_a_key_can_be_written_neither_as_json_nor_by_its_attributes(keys):
    with pytest.raises(TypeError):
        json.dumps(dataclasses.asdict(keys))
    with pytest.raises(TypeError):
        vars(keys.clients.secret)
    assert not hasattr(keys.clients, "__dict__")


def test_what_is_no_key_is_refused_without_being_shown():
    with pytest.raises(ValueError, match=r"^a CURVE key has 40 characters, and this one 6$"):
        Key(b"secret")


@pytest.mark.parametrize("carry", [pickle, cloudpickle])
def test_ray_carries_keys_to_the_processes_of_the_run(carry, keys):
    carried = carry.loads(carry.dumps(keys.clients))
    assert carried.secret.reveal() == keys.clients.secret.reveal()


def test_every_run_has_its_own_keys():
    assert RunKeys.make().clients.secret.reveal() != RunKeys.make().clients.secret.reveal()


@pytest.mark.parametrize(
    ("host", "is_this_machine"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("*", False), ("10.0.0.1", False), ("node-7", False), ("::", False), ("eth0", False),
    ],
)  # fmt: skip
def test_loopback_is_told_from_what_other_machines_reach(host, is_this_machine):
    assert is_loopback(host) is is_this_machine
