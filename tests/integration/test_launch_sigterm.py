"""SIGTERM to an actor's process, under a real Ray that does not block the signal, as on a cluster."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, contextlib, json, os, psutil, signal
from multiprocessing import resource_tracker
from pathlib import Path
from leeway.launch.cli import RAY_ENVIRONMENT
os.environ.update(RAY_ENVIRONMENT)
import ray
from leeway.launch.config import load_config
from leeway.launch.processes import ray_cluster
from leeway.launch.processes.actor_role import ActorRole, terminated
from leeway.launch.processes.placement import Reservation, spawn
from leeway.launch.processes.role_process import failure

class Work:
    def __init__(self, *_):
        self.stopped, self.drain_result = asyncio.Event(), (0, 0)
    async def start(self):
        resource_tracker.ensure_running()  # as an engine's start does
    async def run(self):
        await self.stopped.wait()
    async def stop(self):
        self.stopped.set()
        self.drain_result = 7, 0

class Actor(ActorRole):
    def __init__(self, log):
        import leeway.actors.engine_setup, leeway.launch.processes.actor_role
        leeway.launch.processes.actor_role._REPLY_GRACE_S = 5  # the cores may be busy
        leeway.actors.engine_setup.load_engine = lambda config: None
        super().__init__(log, None)
    async def start(self, *arguments):
        import leeway.actors.loop
        leeway.actors.loop.ActorLoop = Work
        await super().start(*arguments)

def unblocked(pid):
    lines = [line for each in Path(f"/proc/{pid}/task").glob("*/status") for line in each.read_text().splitlines()]
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    return [not mask >> (signal.SIGTERM - 1) & 1 for mask in masks]

ray_cluster.END_SIGNALS = frozenset()
watch = ray_cluster.start_ray(load_config(Path("examples/demo.toml")), "test")
log = Path("actor.log").absolute()
actor = spawn(Actor, log, on=Reservation({}), concurrency=4, takes_sigterm=True)
_, pid = ray.get(actor.location.remote(), timeout=60)
ray.get(actor.start.remote(None, 0, "pool"), timeout=60)
work, process = actor.run.remote(), psutil.Process(pid)
found = {"unblocked": unblocked(pid)}
process.send_signal(signal.SIGTERM)
ray.wait([work], timeout=60)
found["failure"] = str(terminated(failure(work)))
gone, _ = psutil.wait_procs([process], timeout=30)
found["gone"] = len(gone)
ray_cluster.end_ray()
watch.close()
print(json.dumps(found))
"""


def test_an_actor_reports_its_exit_and_ends_by_itself(tmp_path):
    place = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # the names of Ray's sockets are long
    environment = {**os.environ, "RAY_TMPDIR": place, "PYTHONPATH": str(ROOT)}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", PROGRAM]
    try:
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
    finally:
        shutil.rmtree(place)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["failure"] == "exited on SIGTERM, 7 samples requeued"
    assert found["gone"] == 1
    assert len(found["unblocked"]) > 10
    assert sum(found["unblocked"]) == 1, "Ray's handler may get the signal if several threads receive it"
