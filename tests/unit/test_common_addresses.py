"""Where services listen: a name is looked up within a limit of time, and IPv6 is an address as any other."""

import socket
import threading

import pytest

from common.process import address_of
from launch.host import answers, cannot_bind
from tests.weights_by_hand import Machine, publish, v
from weight_sync.manifest import TransferFailed
from weight_sync.service import WeightService


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.2", "127.0.0.2"), ("*", "0.0.0.0"), ("::1", "::1"), ("[fd00::7]", "fd00::7")]
)
def test_an_address_is_itself(host, address):
    assert address_of(host) == address


def test_a_name_that_no_server_answers_for_is_given_up(monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(30))
    with pytest.raises(TimeoutError):
        address_of("slow.example", limit_s=0.01)
    monkeypatch.setattr(address_of, "__defaults__", (0.01,))
    assert cannot_bind("slow.example", 0) == "its name is not looked up in time"
    assert not answers("slow.example:6379", 0.01)
    end.set()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.7", "x" * 70, "a b"])
def test_what_is_no_address_of_this_machine_cannot_be_bound(host):
    assert cannot_bind(host, 0)
    assert cannot_bind("127.0.0.1", 0) == cannot_bind("localhost", 0) == cannot_bind("*", 0) == ""


@needs_ipv6
def test_a_port_of_ipv6_is_seen_to_be_taken_and_to_answer():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert cannot_bind("::1", port) == "Address already in use"
        assert answers(f"[::1]:{port}")
        assert cannot_bind("::1", 0) == ""


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "begins"), [("::1", "tcp://[::1]:"), ("[::1]", "tcp://[::1]:"), ("localhost", "tcp://127.0.0.1:")]
)
def test_a_service_serves_at_an_address_of_ipv6_and_at_a_name(tmp_path, host, begins):
    machine = Machine(tmp_path, host=host)
    try:
        assert machine.address.startswith(begins)
        publish(machine.client(), 1)
        assert machine.client().newest() == v(1)
    finally:
        machine.close()


def test_a_service_that_cannot_have_its_address_says_so_in_a_sentence(tmp_path):
    service = WeightService("run", tmp_path, host="no-such-host.invalid")
    with pytest.raises(TransferFailed) as caught:
        service.bind()
    service.close()
    assert "cannot bind tcp://no-such-host.invalid ([Errno -2] Name or service not known). Set" in str(caught.value)
