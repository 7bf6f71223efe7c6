"""Local access to a service: permissions, and its address after a restart.

Access by another user, the leftovers of a kill, and open ports need real processes.
"""

import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.service import BufferService
from leeway.common.rpc import server
from tests.world.buffer import facts
from tests.world.buffer_process import serving

FACTS = facts()
OTHER_UID = 65534
CONNECT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
"""


class Served:
    """Process of `python -m tests.world.buffer_process` on a folder."""

    def __init__(self, folder, host=None):
        self._command = serving(folder, FACTS, *([] if host is None else ["--host", host]))
        self.start()

    def start(self):
        # most systems use this umask, so the service must restrict access itself
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, umask=0o022)
        self.address = self.process.stdout.readline().strip()

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def serve(request):
    """Return `serve(folder, host)`, which starts a service that ends with the test."""

    def start(folder, host=None):
        served = Served(folder, host)
        request.addfinalizer(lambda: served.end(signal.SIGKILL))
        return served

    return start


def client_of(address, name="observer"):
    return closing(BufferClient(address, run_id=FACTS.run_id, role="observer", name=name))


def path_of(address) -> Path:
    return Path(address.removeprefix("ipc://"))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Create a folder with a short path and access for all users; temporary files are also in this folder."""
    short = Path("/tmp") / f"leeway-doors-test-{os.getpid()}"
    short.mkdir(mode=0o755)
    (short / "tmp").mkdir()
    short.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(short / "tmp"))
    monkeypatch.setenv("TMPDIR", str(short / "tmp"))
    yield short
    subprocess.run(["rm", "-r", str(short)], check=True)


def connect_as(path, user) -> str:
    command = [sys.executable, "-c", CONNECT, str(path), str(user)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else "connected"


def test_only_the_owner_can_open_the_socket_and_no_port_is_open(serve, home):
    served = serve(home / "buffer")
    path = path_of(served.address)
    assert path == home / "buffer" / "socket"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (home / "buffer").chmod(0o755)  # as if a user opens the run folder to colleagues
    assert not [each for each in psutil.Process(served.process.pid).net_connections("inet") if each.status == "LISTEN"]
    assert connect_as(path, os.geteuid()) == "connected"
    if os.geteuid() == 0:
        assert "PermissionError" in connect_as(path, OTHER_UID)
    with client_of(served.address) as client:
        client.connect()


def test_a_restarted_service_has_the_same_address_and_its_clients_reconnect(serve, home):
    served = serve(home / "buffer")
    with client_of(served.address) as client:
        client.connect()
        before = served.address
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            served.end(number)
            assert path_of(before).exists() == (number == signal.SIGKILL)
            status = client.status()
            served.start()
            assert served.address == before
            assert status.result(60).ledger["gap"] == 0


@pytest.mark.parametrize("reason", ["its path is too long", "its file system has no sockets"])
def test_a_private_folder_is_used_if_the_run_folder_cannot_hold_a_socket(serve, home, reason, monkeypatch):
    folder = home / ("x" * 120 if "long" in reason else "buffer")
    if "long" not in reason:  # libzmq reports the same error on file systems without sockets
        (folder / "socket").mkdir(parents=True)
    served = serve(folder)
    path = path_of(served.address)
    assert path.parent == home / "tmp" / f"leeway-sockets-{os.geteuid()}"
    assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
    served.end(signal.SIGKILL)
    served.start()
    assert path_of(served.address) == path
    other = serve(home / ("y" * 120))
    assert other.address != served.address
    for each in (served, other):
        with client_of(each.address) as client:
            client.connect()


def test_a_private_folder_that_is_accessible_to_others_is_rejected(home):
    (home / "tmp" / f"leeway-sockets-{os.geteuid()}").mkdir(mode=0o777)
    (home / "tmp" / f"leeway-sockets-{os.geteuid()}").chmod(0o777)
    service = BufferService(BufferConfig(), FACTS, home / ("x" * 120))
    with closing(service), pytest.raises(OSError, match=r"not a folder accessible to this user alone.*launch.host"):
        service.bind()


def test_the_socket_of_a_live_service_and_a_file_of_its_name_are_not_replaced(home, monkeypatch):
    monkeypatch.setattr(server, "BIND_RETRY_S", 0.2)
    (home / "buffer").mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(home / "buffer" / "socket"))
        other.listen()
        service = BufferService(BufferConfig(), FACTS, home / "buffer")
        with closing(service), pytest.raises(OSError, match="another service listens on this socket"):
            service.bind()
    (home / "buffer" / "socket").unlink()
    (home / "buffer" / "socket").write_text("precious")
    service = BufferService(BufferConfig(), FACTS, home / "buffer")
    with closing(service):
        assert path_of(service.bind()).parent.name == f"leeway-sockets-{os.geteuid()}"
    assert (home / "buffer" / "socket").read_text() == "precious"


def test_a_service_with_a_host_listens_on_a_port_that_it_keeps(serve, home):
    by_host = serve(home / "buffer", host="127.0.0.1")
    port = int(by_host.address.removeprefix("tcp://127.0.0.1:"))
    by_host.end(signal.SIGKILL)
    by_host.start()
    assert by_host.address == f"tcp://127.0.0.1:{port}"
    with client_of(by_host.address) as client:
        client.connect()
