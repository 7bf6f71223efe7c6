"""The watch detects dead processes of Ray and names their logs."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from leeway.launch.processes.ray_cluster import RayWatch
from leeway.launch.processes.role_process import RunFailed

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store():
    """Yield a socket that accepts connections like Ray's GCS."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def children(tmp_path):
    """Start children of this process with the names of Ray's processes."""
    started = []
    folder = tmp_path / "site-packages" / "ray"
    folder.mkdir(parents=True)
    for name in ("gcs_server", "raylet"):
        program = folder / name
        shutil.copy("/bin/sleep", program)
        started.append(subprocess.Popen([str(program), "60"]))
    yield started
    for child in started:
        child.kill()
        child.wait()


@pytest.fixture
def watching():
    """Return `watching(address, logs, **options)`, which makes a RayWatch; the watches are closed after the test."""
    made = []

    def make(*arguments, **options) -> RayWatch:
        made.append(RayWatch(*arguments, **options))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def address_of(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


@pytest.mark.parametrize(("number", "name"), [(0, "GCS (gcs_server"), (1, "node manager (raylet")])
def test_a_dead_process_of_ray_is_named_with_its_log(watching, store, children, tmp_path, number, name):
    watch = watching(address_of(store), tmp_path)
    watch.check()
    children[number].kill()
    children[number].wait()
    with pytest.raises(RunFailed) as failed:
        watch.check()
    assert watch.is_dead
    assert name in str(failed.value)
    assert str(children[number].pid) in str(failed.value)
    assert str(tmp_path) in str(failed.value)


def test_all_processes_of_ray_are_ended_and_no_others(watching, store, children, tmp_path):
    watch = watching(address_of(store), tmp_path)
    # The command line of a multiprocessing server contains a path of Ray if the server starts after an import of Ray.
    code = f"import time; sys_path = ['{tmp_path}/site-packages/ray/thirdparty_files']; time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code])
    watch.end_all()
    alive = [child.poll() is None for child in (*children, other)]
    other.kill()
    other.wait()
    assert alive == [False, False, True]


def test_a_remote_gcs_ends_the_run_only_if_it_stays_unreachable(watching, store):
    now_s = [0.0]
    watch = watching(address_of(store), Path("logs"), clock=lambda: now_s[0])
    for now_s[0] in (10.0, 40.0):
        watch.check()  # the GCS is reachable at 10 s and at 40 s
    address = store.getsockname()
    store.close()
    now_s[0] = 60.0
    watch.check()
    with socket.create_server(address):
        now_s[0] = 70.0
        watch.check()
    for now_s[0] in (80.0, 110.0):
        watch.check()
    now_s[0] = 116.0
    with pytest.raises(RunFailed, match="unreachable for 46 s"):
        watch.check()


COMMAND = """
import os, signal, subprocess, sys
from pathlib import Path
from leeway.launch.processes.ray_cluster import RayWatch
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
children = [subprocess.Popen([sys.argv[1], "120"], **quiet) for _ in range(2)]
watch = RayWatch(sys.argv[2], Path("logs"))
print(*(child.pid for child in children), watch._reaper.pid, flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
watch.close()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_processes_of_a_killed_launcher_are_ended_and_others_stay(store, children, tmp_path, end):
    program = children[0].args[0]
    output = subprocess.run(
        [sys.executable, "-c", COMMAND, program, address_of(store), end], capture_output=True, text=True, cwd=ROOT
    ).stdout
    *left, reaper = (psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None for pid in output.split())
    psutil.wait_procs([each for each in (reaper, *left) if each is not None and end == "killed"], timeout=60)
    assert reaper is None or not reaper.is_running(), "the reaper survives the launcher"
    alive = [each for each in left if each is not None and each.is_running()]
    assert len(alive) == (0 if end == "killed" else 2)
    for each in alive:
        each.kill()


def test_the_reaper_imports_neither_packages_nor_the_current_folder(watching, store, tmp_path, monkeypatch):
    (tmp_path / "signal.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    watch = watching(address_of(store), Path("logs"))
    assert {"-S", "-E"} <= set(watch._reaper.args), "the reaper could import Ray"
    watch.close()
    assert watch._reaper.returncode == 0


def test_a_killed_reaper_is_harmless(watching, store):
    now_s = [0.0]
    watch = watching(address_of(store), Path("logs"), clock=lambda: now_s[0])
    watch._reaper.kill()
    watch._reaper.wait()
    now_s[0] = 10.0
    watch.check()
    watch.close()


def test_the_address_of_the_gcs_may_be_ipv6(watching):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        now_s = [0.0]
        watch = watching(f"[::1]:{server.getsockname()[1]}", Path("logs"), clock=lambda: now_s[0])
        for now_s[0] in (10.0, 100.0):
            watch.check()
