"""SIGTERM to an actor's process, under a Ray that hears it, as on a cluster. Only the real Ray can show it."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOK = """
import asyncio, contextlib, json, os, psutil, signal
from multiprocessing import resource_tracker
from pathlib import Path
from launch.cli import RAY_ENVIRONMENT
os.environ.update(RAY_ENVIRONMENT)
import ray
from launch.config import load_config
from launch.processes import ray_cluster
from launch.processes.actor_role import ActorRole, told_to_end
from launch.processes.placement import Reservation, spawn
from launch.processes.role_process import failure

class Work:
    def __init__(self, *_):
        self.stopped, self.goodbye = asyncio.Event(), (0, 0)
    async def start(self):
        resource_tracker.ensure_running()  # as an engine's start does
    async def run(self):
        await self.stopped.wait()
    async def stop(self):
        self.stopped.set()
        self.goodbye = 7, 0

class Actor(ActorRole):
    def __init__(self, log):
        import actors.engine_setup, launch.processes.actor_role
        launch.processes.actor_role._ANSWER_S = 5  # others may have the cores for a while
        actors.engine_setup.load_engine = lambda config: None
        super().__init__(log, None)
    async def start(self, *arguments):
        import actors.loop
        actors.loop.ActorLoop = Work
        await super().start(*arguments)

def who_hears(pid):
    lines = [line for each in Path(f"/proc/{pid}/task").glob("*/status") for line in each.read_text().splitlines()]
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    return [not mask >> (signal.SIGTERM - 1) & 1 for mask in masks]

ray_cluster.END_SIGNALS = frozenset()
watch = ray_cluster.start_ray(load_config(Path("examples/demo.toml")), "test")
log = Path("actor.log").absolute()
actor = spawn(Actor, log, on=Reservation({}), concurrency=4, takes_sigterm=True)
_, pid = ray.get(actor.whereabouts.remote(), timeout=60)
ray.get(actor.start.remote(None, 0, "pool"), timeout=60)
work, process = actor.run.remote(), psutil.Process(pid)
found = {"hear": who_hears(pid)}
process.send_signal(signal.SIGTERM)
ray.wait([work], timeout=60)
found["told"] = str(told_to_end(failure(work)))
gone, _ = psutil.wait_procs([process], timeout=30)
found["gone"] = len(gone)
ray_cluster.end_ray()
watch.close()
print(json.dumps(found))
"""


def test_an_actor_answers_that_it_has_left_and_ends_by_itself(tmp_path):
    place = tempfile.mkdtemp(prefix="r-", dir="/tmp")  # the names of Ray's sockets are long
    environment = {**os.environ, "RAY_TMPDIR": place, "PYTHONPATH": str(ROOT)}
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-c", LOOK]
    try:
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
    finally:
        shutil.rmtree(place)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["told"] == "left by SIGTERM, 7 samples handed on"
    assert found["gone"] == 1
    assert len(found["hear"]) > 10
    assert sum(found["hear"]) == 1, "more than one thread hears the signal, and Ray's handler may get it"
