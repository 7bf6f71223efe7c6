"""Ray as a run starts it: signals reach the launcher, and the session of Ray is private and removed at the end."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from leeway.launch import host
from leeway.launch.errors import END_SIGNALS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, psutil, signal
from pathlib import Path
from leeway.launch.cli import RAY_ENVIRONMENT
os.environ.update(RAY_ENVIRONMENT)
from leeway.launch.errors import END_SIGNALS, Interrupts, Stopped
from leeway.launch.config import load_config
from leeway.launch.processes.ray_cluster import end_ray, start_ray
from leeway.launch.processes.placement import PlacementGroup, Reservation, spawn
from leeway.launch.processes.role_process import RunFailed

class Role:
    def __init__(self, log):
        self.seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    def see(self):
        return self.seen

def signals_blocked(pid):
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk")]
    mask = int(line.split()[1], 16)
    return [number for number in sorted(END_SIGNALS) if mask >> (number - 1) & 1]

others = Path(os.environ["RAY_TMPDIR"]) / f"leeway-{os.geteuid()}-ray" / "r" / f"session_of_another_{os.getpid()}"
os.umask(0o077)
others.mkdir(parents=True)
with Interrupts():
    watch = start_ray(load_config(Path("examples/demo.toml"), ["--pools.small.role", "actors"]), "test")
    import ray
    role = spawn(Role, Path("log"), on=Reservation({}), concurrency=1)
    (session,) = others.parent.glob("session_[0-9]*")
    modes = [oct(each.stat().st_mode & 0o777) for each in (session, *session.parents)]
    found = {"cuda": ray.get(role.see.remote(), timeout=60), "session": str(session), "modes": modes}
    rays_own = [each for each in psutil.Process().children(recursive=True) if each.pid != watch._reaper.pid]
    found["blocked"] = [signals_blocked(each.pid) for each in rays_own]
    try:
        PlacementGroup([{"CPU": 0.25, "GPU": 8, "pool_small": 0.001}], "pool 'small'").wait(60, hosts_may_join=False)
    except RunFailed as error:
        found["shortage"] = str(error)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Stopped:
        found["stopped"] = True
    found["alarm_s"] = signal.alarm(0)
    terminated = []
    for (info,) in ray._private.worker._global_node.all_processes.values():
        info.process.terminate = lambda: terminated.append(info.process.pid)
    end_ray()
    found["terminated"], found["alive"] = terminated, [each.pid for each in psutil.wait_procs(rays_own, 20)[1]]
    watch.close()
print(json.dumps(found | {"left": [each.name for each in session.parent.iterdir() if not each.is_symlink()]}))
"""


@pytest.fixture(scope="module")
def found():
    """Return the observations of a process that started and ended Ray."""
    place = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # the names of Ray's sockets are long
    environment = {**os.environ, "RAY_TMPDIR": place, "CUDA_VISIBLE_DEVICES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shutil.rmtree(place)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_a_signal_after_the_start_reaches_the_launcher_and_not_ray(found):
    assert found["stopped"]
    assert found["alarm_s"] == 0, "Ray's C++ handler received the signal and exits in 3 s"


def test_processes_of_ray_and_roles_block_the_signals_for_the_launcher(found):
    assert len(found["blocked"]) >= 4
    assert all(blocked == sorted(END_SIGNALS) for blocked in found["blocked"])


def test_processes_of_ray_are_not_ended_by_a_signal_that_they_block(found):
    assert (found["terminated"], found["alive"]) == ([], [])


def test_a_shortage_states_the_requested_and_the_free_resources(found):
    assert re.match(r"pool 'small', but no host had these resources free within \d+ s\. Free: ", found["shortage"])
    assert "of 1 pool_small" in found["shortage"]


def test_the_session_is_in_a_private_folder_and_removed_with_ray(found):
    session, around = Path(found["session"]), dict(zip((0, 1, 2), found["modes"], strict=False))
    assert session.parent.name == "r"
    assert session.parents[1].name == f"leeway-{os.geteuid()}-ray"
    assert around[2] == "0o700", "Ray makes its own folders accessible to all users"
    (left,) = found["left"]
    assert left.startswith("session_of_another_"), "the session of another container was removed"


def test_gpus_are_hidden_from_a_role_that_reserved_none(found):
    assert found["cuda"] == ""


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_other_users_may_enter_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert host.make_sessions_folder() == tmp_path / f"leeway-{os.geteuid()}-ray" / "r"
    host.sessions_folder().parent.chmod(mode)
    with pytest.raises(PermissionError, match="must be a folder that belongs only to this user"):
        host.make_sessions_folder()


def test_the_session_of_a_killed_launcher_is_removed_and_that_of_a_live_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder = host.make_sessions_folder()
    names = {f"session_2026-11-26_09-00-00_1_{pid}" for pid in (dead.pid, os.getpid())}
    for name in names | {"session_latest", "other"}:
        (folder / name / "logs").mkdir(parents=True)
    host.make_sessions_folder()
    assert len([*folder.iterdir()]) == 4, "a session that another container may use was removed"
    monkeypatch.setattr(host, "_QUIET_S", -1.0)
    assert not host._is_quiet(folder / "session_gone_1"), "a session removed by another launcher counts as quiet"
    assert host.make_sessions_folder() == folder
    left = {each.name for each in folder.iterdir()}
    assert left == {f"session_2026-11-26_09-00-00_1_{os.getpid()}", "session_latest", "other"}
