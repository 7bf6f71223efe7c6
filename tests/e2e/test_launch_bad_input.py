"""Errors during a run are reported in one sentence with an exit status, and leave no process behind."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.faults.disks import Mounts, fill
from tests.world.command import leeway_here
from tests.world.live_run import LIMIT_S, ROOT, command_of, descendants, start, wait_for_end, wait_for_steps
from tests.world.ports import free_port

RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def mounts(tmp_path):
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("mounts need root")
    mounts = Mounts(tmp_path)
    yield mounts
    mounts.close()


def only_sentence(output: str) -> str:
    """Return the launcher's error, which must be a single line."""
    lines = [line for line in output.splitlines() if line.startswith("leeway: ")]
    assert len(lines) == 1, output
    assert "Traceback" not in output
    return lines[0]


def test_a_disk_without_space_for_the_folder_is_refused_before_anything_starts(mounts, capsys):
    disk = mounts.tmpfs("small", 1)
    fill(disk, leave_bytes=0)
    status, _, error = leeway_here(capsys, "train", "examples/demo.toml", "--run.dir", disk, "--run.name", "run")
    assert status == 2, error
    assert "No space left on device" in only_sentence(error)
    assert not (disk / "run").exists()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_full_disk_ends_the_run_with_one_sentence_and_the_run_can_be_resumed(mounts):
    disk = mounts.tmpfs("disk", 96)
    # a failed checkpoint write ends the run at once; a failed publication waits for space instead
    often = ("--learner.checkpoint_every", "1")
    process = start(disk, "--learner.num_steps", "400", "--actors.eval_every", "0", *often)
    wait_for_steps(process, disk, 4, timeout_s=LIMIT_S)
    family = descendants(process)
    ballast = fill_up(disk)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    assert "leeway resume" in only_sentence(output)
    assert wait_for_end(family) == []
    ballast.unlink()
    command = [sys.executable, "-m", "leeway", "resume", disk / "run", "--learner.num_steps", "15"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unreachable_cluster_is_refused_in_time(tmp_path):
    process = start(tmp_path, "--launch.ray_address", "127.0.0.1:9")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert "no Ray cluster answers at launch.ray_address = '127.0.0.1:9' within 3 s" in only_sentence(output)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def other_ray(monkeypatch):
    """Start another Ray cluster on this machine and set RAY_ADDRESS to its address; yield its process and address."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path has to be short
    port = free_port()
    address = f"127.0.0.1:{port}"
    options = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}", "--num-cpus=1"]
    options += ["--include-dashboard=false", f"--object-store-memory={80 * 2**20}", "--block"]
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with (Path(folder) / "log").open("wb") as log:
        other = subprocess.Popen([RAY, "start", *options], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for_ray(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield other, address
    finally:
        family = descendants_of(other)
        for each in (*family, psutil.Process(other.pid)):  # on SIGTERM, Ray would drain for 30 s
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        other.wait(timeout=30)
        wait_for_end(family)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_beside_another_ray_neither_joins_nor_disturbs_it(tmp_path, other_ray):
    other, address = other_ray
    deadline = time.monotonic() + LIMIT_S
    while len(before := servers(other)) < 2:
        assert time.monotonic() < deadline, "the other Ray cluster did not start"
        time.sleep(0.5)
    process = start(tmp_path, "--learner.num_steps", "4", "--actors.eval_every", "0")
    wait_for_steps(process, tmp_path, 1, timeout_s=LIMIT_S)
    roles = [each for each in descendants_of(other) if "Role" in command_of(each)]
    assert roles == [], "a role runs on the other cluster"
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert servers(other) == before, "a server of the other cluster is gone"
    wait_for_ray(address)


def fill_up(disk: Path) -> Path:
    """Fill a disk to which other processes write; remove the returned file to free the space."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 4096)
    return ballast


def wait_for_ray(address: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while subprocess.run(
        [RAY, "status", "--address", address], capture_output=True, timeout=60, check=False
    ).returncode:
        assert time.monotonic() < deadline, "the other Ray cluster did not respond"
        time.sleep(0.5)


def descendants_of(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def servers(other: subprocess.Popen) -> set[int]:
    return {each.pid for each in descendants_of(other) if each.name() in ("raylet", "gcs_server")}
