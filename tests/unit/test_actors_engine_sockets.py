"""An engine removes its folder of vLLM sockets when it stops. The next engine removes the folder of a killed engine."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from leeway.actors.engine_setup import EngineSockets

VARIABLE = "VLLM_RPC_BASE_PATH"


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Temporary folder of the machine during the test."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.setenv(VARIABLE, "")
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    folder.rmdir()  # fails if the folder contains files


async def test_the_socket_folder_is_private_and_removed_with_the_engine(temporary):
    sockets = EngineSockets()
    path = Path(os.environ[VARIABLE])
    assert path.parent == temporary
    assert path.stat().st_mode & 0o777 == 0o700
    context = zmq.Context()
    await sockets.end(context)
    assert context.closed
    assert not path.exists()


def test_socket_paths_fit_for_any_length_of_the_temporary_folder(temporary, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("x" * 80)))
    sockets = EngineSockets()
    assert len(os.environ[VARIABLE]) + len("/") + 36 <= 107
    sockets.remove()
    sockets.remove()


def test_a_path_that_is_not_a_private_folder_is_rejected(temporary, monkeypatch):
    monkeypatch.setattr("leeway.actors.engine_setup._numbers", iter([0]))
    taken = temporary / f"leeway-{os.geteuid()}-vllm-{os.getpid()}-0"
    taken.write_text("no folder")
    with pytest.raises(OSError, match=r"sockets in .*: .* must be a folder writable by this user alone"):
        EngineSockets()
    taken.unlink()


@pytest.mark.process
def test_the_folder_of_a_killed_engine_is_removed_by_the_next(temporary):
    code = f"""
import os, signal, tempfile
tempfile.tempdir = {str(temporary)!r}
from leeway.actors.engine_setup import EngineSockets
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
        shutil.rmtree(path)  # fails if the folder was removed; a later actor reuses its weights
    assert not left.exists()
    sockets.remove()
