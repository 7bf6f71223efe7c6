"""vLLM's own sockets lie in a folder that goes with its engine, or with the next engine where it was killed."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from actors.engine_setup import EngineSockets

VARIABLE = "VLLM_RPC_BASE_PATH"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder of the machine, for the length of the test."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setenv(VARIABLE, "")
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()  # fails where something was left


async def test_the_folder_is_its_users_alone_and_goes_with_the_engine(temporary):
    sockets = EngineSockets()
    path = Path(os.environ[VARIABLE])
    assert path.parent == temporary
    assert path.stat().st_mode & 0o777 == 0o700
    context = zmq.Context()
    await sockets.end(context)
    assert context.closed
    assert not path.exists()


def test_a_socket_fits_however_long_the_temporary_folder_is_called(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 80)))
    sockets = EngineSockets()
    assert len(os.environ[VARIABLE]) + len("/") + 36 <= 107
    sockets.remove()
    sockets.remove()


def test_a_folder_that_is_somebody_elses_is_refused_with_that_reason(temporary, monkeypatch):
    monkeypatch.setattr("actors.engine_setup._numbers", iter([0]))
    taken = temporary / f"leeway-{os.geteuid()}-vllm-{os.getpid()}-0"
    taken.write_text("no folder")
    with pytest.raises(OSError, match=r"sockets can be made in .*: .* is not a folder that this user alone may write"):
        EngineSockets()
    taken.unlink()


@pytest.mark.process
def test_what_a_killed_engine_left_is_removed_by_the_next(temporary):
    code = f"""
import os, signal, tempfile
tempfile.tempdir = {str(temporary)!r}
from actors.engine_setup import EngineSockets
kept = EngineSockets()
open(os.environ[{VARIABLE!r}] + "/socket", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, cwd=Path(__file__).parents[2])
    (left,) = temporary.iterdir()
    stores = ("run-0123456789ab", "run-012345678901", "vllm-1-0123456789ab", "vllm-1-012345678901")
    fetched = [temporary / f"leeway-{os.geteuid()}-{store}" for store in stores]
    for path in fetched:
        path.mkdir()
        (path / "users.lock").touch()
    sockets = EngineSockets()
    for path in fetched:
        shutil.rmtree(path)  # fails where it was removed: an actor goes on with what a killed one fetched
    assert not left.exists()
    sockets.remove()
