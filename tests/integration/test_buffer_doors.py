"""The door of a service on one machine, as other users and later processes find it.

Only real processes show what another user of the machine can do, what a kill leaves behind, and what listens where.
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

from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.service import BufferService
from common.rpc import server
from tests.world.buffer import facts
from tests.world.buffer_process import serving

FACTS = facts()
NOBODY = 65534
KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as knocking:
    knocking.connect(sys.argv[1])
"""


class Served:
    """`python -m tests.world.buffer_process` on a folder."""

    def __init__(self, folder, host=None):
        self._command = serving(folder, FACTS, *([] if host is None else ["--host", host]))
        self.start()

    def start(self):
        # under the mask of most systems, for the service has to see to its own door
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, umask=0o022)
        self.address = self.process.stdout.readline().strip()

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def serve(request):
    """`serve(folder, host)`: a service that ends with the test."""

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
    """A short folder, which everybody may enter; temporary files are there too."""
    short = Path("/tmp") / f"leeway-doors-test-{os.getpid()}"
    short.mkdir(mode=0o755)
    (short / "tmp").mkdir()
    short.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(short / "tmp"))
    monkeypatch.setenv("TMPDIR", str(short / "tmp"))
    yield short
    subprocess.run(["rm", "-r", str(short)], check=True)


def knock(path, user) -> str:
    command = [sys.executable, "-c", KNOCK, str(path), str(user)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else "let in"


def test_its_owner_alone_can_open_the_socket_and_no_port_is_listened_on(serve, home):
    served = serve(home / "buffer")
    path = path_of(served.address)
    assert path == home / "buffer" / "socket"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (home / "buffer").chmod(0o755)  # as where somebody opens the folder of a run to colleagues
    assert not [each for each in psutil.Process(served.process.pid).net_connections("inet") if each.status == "LISTEN"]
    assert knock(path, os.geteuid()) == "let in"
    if os.geteuid() == 0:
        assert "PermissionError" in knock(path, NOBODY)
    with client_of(served.address) as client:
        client.connect()


def test_a_killed_service_is_followed_at_its_address_and_its_clients_come_back(serve, home):
    served = serve(home / "buffer")
    with client_of(served.address) as client:
        client.connect()
        before = served.address
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            served.end(number)
            assert path_of(before).exists() == (number == signal.SIGKILL)
            asked = client.status()
            served.start()
            assert served.address == before
            assert asked.result(60).ledger["gap"] == 0


@pytest.mark.parametrize("why", ["its path is too long", "its file system takes no sockets"])
def test_where_the_folder_can_hold_no_socket_it_has_a_private_one_of_its_own(serve, home, why, monkeypatch):
    folder = home / ("x" * 120 if "long" in why else "buffer")
    if "long" not in why:  # as on file systems that refuse them; libzmq says so in the same way
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


def test_a_private_folder_that_another_may_enter_is_not_used(home):
    (home / "tmp" / f"leeway-sockets-{os.geteuid()}").mkdir(mode=0o777)
    (home / "tmp" / f"leeway-sockets-{os.geteuid()}").chmod(0o777)
    service = BufferService(BufferConfig(), FACTS, home / ("x" * 120))
    with closing(service), pytest.raises(OSError, match=r"not a folder that this user alone may enter.*launch.host"):
        service.bind()


def test_nobody_takes_the_socket_of_a_service_that_lives_nor_a_file_of_its_name(home, monkeypatch):
    monkeypatch.setattr(server, "BIND_RETRY_S", 0.2)
    (home / "buffer").mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(home / "buffer" / "socket"))
        other.listen()
        service = BufferService(BufferConfig(), FACTS, home / "buffer")
        with closing(service), pytest.raises(OSError, match="another service listens there"):
            service.bind()
    (home / "buffer" / "socket").unlink()
    (home / "buffer" / "socket").write_text("precious")
    service = BufferService(BufferConfig(), FACTS, home / "buffer")
    with closing(service):
        assert path_of(service.bind()).parent.name == f"leeway-sockets-{os.geteuid()}"
    assert (home / "buffer" / "socket").read_text() == "precious"


def test_a_port_is_had_for_the_asking(serve, home):
    by_host = serve(home / "buffer", host="127.0.0.1")
    port = int(by_host.address.removeprefix("tcp://127.0.0.1:"))
    by_host.end(signal.SIGKILL)
    by_host.start()
    assert by_host.address == f"tcp://127.0.0.1:{port}"
    with client_of(by_host.address) as client:
        client.connect()
