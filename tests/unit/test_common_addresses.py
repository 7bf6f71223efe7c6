"""Addresses of services: name lookups time out, and IPv6 addresses are supported."""

import socket
import threading

import pytest

from leeway.common.process import address_of
from leeway.launch.host import bind_error, is_reachable
from leeway.weight_sync.manifest import TransferFailed
from leeway.weight_sync.service import WeightService
from tests.weights_by_hand import Machine, publish, v


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
def test_a_numeric_address_is_returned_unchanged(host, address):
    assert address_of(host) == address


def test_the_lookup_of_a_name_times_out(monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(30))
    with pytest.raises(TimeoutError):
        address_of("slow.example", limit_s=0.01)
    monkeypatch.setattr(address_of, "__defaults__", (0.01,))
    assert bind_error("slow.example", 0) == "the lookup of its name timed out"
    assert not is_reachable("slow.example:6379", 0.01)
    end.set()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.7", "x" * 70, "a b"])
def test_an_address_of_another_machine_cannot_be_bound(host):
    assert bind_error(host, 0)
    assert bind_error("127.0.0.1", 0) == bind_error("localhost", 0) == bind_error("*", 0) == ""


@needs_ipv6
def test_an_ipv6_port_in_use_is_detected_and_reachable():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        assert bind_error("::1", port) == "Address already in use"
        assert is_reachable(f"[::1]:{port}")
        assert bind_error("::1", 0) == ""


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "prefix"), [("::1", "tcp://[::1]:"), ("[::1]", "tcp://[::1]:"), ("localhost", "tcp://127.0.0.1:")]
)
def test_a_service_listens_on_an_ipv6_address_and_on_a_name(tmp_path, host, prefix):
    machine = Machine(tmp_path, host=host)
    try:
        assert machine.address.startswith(prefix)
        publish(machine.client(), 1)
        assert machine.client().newest() == v(1)
    finally:
        machine.close()


def test_a_bind_error_names_the_address_and_the_reason(tmp_path):
    service = WeightService("run", tmp_path, host="no-such-host.invalid")
    with pytest.raises(TransferFailed) as caught:
        service.bind()
    service.close()
    assert "cannot bind tcp://no-such-host.invalid ([Errno -2] Name or service not known). Set" in str(caught.value)
