"""Ray as a run starts it here: our signals stay ours, its session is this user's alone, and goes with it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from launch import host
from launch.errors import END_SIGNALS

ROOT = Path(__file__).parents[2]
LOOK = """
import json, os, psutil, signal
from pathlib import Path
from launch.cli import RAY_ENVIRONMENT
os.environ.update(RAY_ENVIRONMENT)
from launch.errors import END_SIGNALS, Interrupts, Stopped
from launch.config import load_config
from launch.processes.ray_cluster import end_ray, start_ray
from launch.processes.placement import PlacementGroup, Reservation, spawn
from launch.processes.role_process import RunFailed

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
        PlacementGroup([{"CPU": 0.25, "GPU": 8, "pool_small": 0.001}], "pool 'small'").wait(60, others_come=False)
    except RunFailed as error:
        found["shortage"] = str(error)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except Stopped:
        found["stopped"] = True
    found["alarm_s"] = signal.alarm(0)
    asked = []
    for (info,) in ray._private.worker._global_node.all_processes.values():
        info.process.terminate = lambda: asked.append("told")
    end_ray()
    found["asked"], found["alive"] = asked, [each.pid for each in psutil.wait_procs(rays_own, 20)[1]]
    watch.close()
print(json.dumps(found | {"left": [each.name for each in session.parent.iterdir() if not each.is_symlink()]}))
"""


@pytest.fixture(scope="module")
def found():
    """What a process saw that started Ray, and ended it."""
    place = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # the names of Ray's sockets are long
    environment = {**os.environ, "RAY_TMPDIR": place, "CUDA_VISIBLE_DEVICES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", LOOK],
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


def test_a_signal_after_the_start_is_heard_by_us_and_not_by_ray(found):
    assert found["stopped"]
    assert found["alarm_s"] == 0, "Ray's handler in C++ heard it first, and ends the process after 3 s"


def test_its_processes_and_the_roles_are_deaf_to_the_signals_that_are_meant_for_the_command(found):
    assert len(found["blocked"]) >= 4
    assert all(blocked == sorted(END_SIGNALS) for blocked in found["blocked"])


def test_none_of_its_processes_is_waited_for_by_a_signal_that_it_does_not_hear(found):
    assert (found["asked"], found["alive"]) == ([], [])


def test_workers_that_no_host_has_room_for_are_told_what_was_asked_for_and_what_there_is(found):
    assert re.match(r"pool 'small', and in \d+ s there was no room for it\. Free are: ", found["shortage"])
    assert "of 1 pool_small" in found["shortage"]


def test_the_session_lies_where_nobody_else_may_enter_and_goes_with_ray(found):
    session, around = Path(found["session"]), dict(zip((0, 1, 2), found["modes"], strict=False))
    assert session.parent.name == "r"
    assert session.parents[1].name == f"leeway-{os.geteuid()}-ray"
    assert around[2] == "0o700", "Ray itself opens what it makes to everybody"
    (left,) = found["left"]
    assert left.startswith("session_of_another_"), "of a process of our number in another container"


def test_gpus_are_hidden_from_a_role_that_reserved_none(found):
    assert found["cuda"] == ""


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_enter_is_not_used(tmp_path, monkeypatch, mode):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert host.make_sessions_folder() == tmp_path / f"leeway-{os.geteuid()}-ray" / "r"
    host.sessions_folder().parent.chmod(mode)
    with pytest.raises(PermissionError, match="is not a folder of this user alone"):
        host.make_sessions_folder()


def test_the_session_of_a_command_that_was_killed_is_removed_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder = host.make_sessions_folder()
    names = {f"session_2026-11-26_09-00-00_1_{pid}" for pid in (dead.pid, os.getpid())}
    for name in names | {"session_latest", "other"}:
        (folder / name / "logs").mkdir(parents=True)
    host.make_sessions_folder()
    assert len([*folder.iterdir()]) == 4, "it was written to just now, maybe by a process of another container"
    monkeypatch.setattr(host, "_QUIET_S", -1.0)
    assert not host._is_quiet(folder / "session_gone_1"), "two commands that start at once remove the same ones"
    assert host.make_sessions_folder() == folder
    left = {each.name for each in folder.iterdir()}
    assert left == {f"session_2026-11-26_09-00-00_1_{os.getpid()}", "session_latest", "other"}
