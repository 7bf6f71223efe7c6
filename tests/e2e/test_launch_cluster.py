"""A real run across three hosts; calls of launch/cluster.sh on Slurm and SkyPilot; and checks of the host file."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from benchmarks.lib.runs import joined

from leeway.launch.run_folder import RunFolder
from tests.faults import hosts as machines
from tests.faults.cluster import SCRIPT, Cluster, end

pytestmark = pytest.mark.timeout(400)
SHORT = (
    *("--learner.num_steps", "8", "--learner.groups_per_step", "8", "--learner.checkpoint_every", "8"),
    *("--task.num_heldout", "32", "--task.num_train", "512", "--weight_sync.max_lag", "0"),
    *("--pools.exact.max_running_samples", "24", "--pools.fast.max_running_samples", "40"),
)
"""Overrides for a short run: at lag 0, pool `exact` has room for 3 of the 8 groups of a step, and `fast` for 5."""


@pytest.fixture
def hosts(tmp_path):
    if reason := machines.missing():
        pytest.skip(reason)
    with machines.Hosts(tmp_path / "shared", environment={"OMP_NUM_THREADS": "1"}, seen_by=[0]) as made:
        yield made


@pytest.mark.full
def test_a_run_across_three_hosts_trains_if_actors_do_not_share_its_folder(hosts, tmp_path):
    cluster = Cluster(hosts, tmp_path)
    cluster.up()
    run = tmp_path / "shared" / "run"
    try:
        process = cluster.run(tmp_path / "shared", "examples/pools.toml", *SHORT)
        machines.wait_until("both engines", lambda: all(has_engine(host) for host in hosts[1:]), 180)
        assert not has_engine(hosts[0]), "an actor runs on the host of the learner"
        output = end(process, 300)
    finally:
        done = cluster.call("down")
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["num_steps"], summary["ledger_gap"], summary["trained_trajectories"]) == (8, 0, 8 * 64), output
    rows = [*joined(RunFolder(run))]
    exact, fast = (newest(rows, f"pool/{pool}/mismatch_lag0_abs") for pool in ("exact", "fast"))
    assert exact < 1e-4 < fast, "a pool does not serve in its own precision"
    for host in hosts:
        left = [path for path in host.files() if "leeway" in path or "/ray" in path]
        assert (host.processes(), host.listening(), left) == ([], [], [])


OWN = """
[model]
path = "CHECKOUT/examples/demo_model"
[task]
type = "file"
path = "CHECKOUT/examples/file_rows.jsonl"
template = "{question:compact}="
rewards = ["CHECKOUT/examples/file_reward.py:exact"]
[algorithm]
type = "/tmp/own/reinforce.py:ALGORITHM"
[pools.front]
role = "learner"
count = 1
[pools.back]
role = "learner"
count = 1
[pools.exact]
role = "actors"
count = 1
[actors]
max_prompt_tokens = 8
max_new_tokens = 8
[learner]
num_stages = 2
num_steps = 3
groups_per_step = 4
token_budget = 256
[weight_sync]
transport = "network"
"""


@pytest.mark.full
def test_a_user_loss_trains_on_another_host_and_a_host_without_it_is_named(tmp_path):
    """The last stage, which evaluates the loss, is on the second host; each host has the loss file in its /tmp."""
    if reason := machines.missing():
        pytest.skip(reason)
    shared = tmp_path / "shared"
    with machines.Hosts(shared, count=2, environment={"OMP_NUM_THREADS": "1"}) as made:
        (shared / "own.toml").write_text(OWN.replace("CHECKOUT", str(machines.CHECKOUT)))
        cluster = Cluster(made, tmp_path, pools=("front,exact", "back"))
        cluster.up()
        copy = ("bash", "-c", f"mkdir -p /tmp/own && cp {machines.CHECKOUT}/examples/reinforce.py /tmp/own/")
        try:
            made[0].inside(*copy)
            process = cluster.run(shared, str(shared / "own.toml"))
            output, _ = process.communicate(timeout=300)
            assert process.returncode != 0
            assert "stage.1: " in output
            assert "no file /tmp/own/reinforce.py on host host-2" in output
            assert "Traceback" not in output
            made[1].inside(*copy)
            output = end(cluster.run(shared, str(shared / "own.toml"), "--run.name", "second"), 300)
        finally:
            cluster.call("down")
        rows = [json.loads(line) for line in (shared / "second" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "reinforce/advantage_abs" in row] == [1, 2, 3], output


def newest(rows: list[dict], key: str) -> float:
    return [row[key] for row in rows if row.get(key) is not None][-1]


def has_engine(host) -> bool:
    return any("VLLM" in line or "ActorRole" in line for line in host.processes())


# --- Slurm and SkyPilot -----------------------------------------------------------------------------

RECORDER = """#!/usr/bin/env bash
echo "$*" >>calls
[ "$1" != up ] || { cp "$LEEWAY_HOSTS" hosts && echo "${LEEWAY_STATE:-} ${LEEWAY_SSH:-}" >settings; }
"""
NODES = "node-1\nnode-2\nnode-3\nnode-4"
HOSTS = "node-1 learner\nnode-2 exact\nnode-3 fast\nnode-4 fast\n"


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with a launch/cluster.sh that records its calls, and a scontrol that lists four nodes."""
    for path, text in (("launch/cluster.sh", RECORDER), ("bin/scontrol", f"#!/bin/sh\nprintf '{NODES}\\n'\n")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o700)
    return tmp_path


def calls_of(checkout: Path, command: list[str], **environment: str) -> list[str]:
    """Run a script and return its calls of launch/cluster.sh; assert that the script leaves no file behind."""
    (checkout / "calls").unlink(missing_ok=True)
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    subprocess.run(command, cwd=checkout, env={"PATH": path, **environment}, check=True, timeout=60)
    assert (checkout / "hosts").read_text() == HOSTS
    assert [path for path in (checkout / "runs").iterdir() if path.is_file()] == []
    return (checkout / "calls").read_text().splitlines()


def test_a_job_of_slurm_uses_its_nodes_as_hosts_and_takes_them_down(checkout):
    script = [str(machines.CHECKOUT / "launch" / "slurm.sbatch"), "examples/pools.toml", "--run.seed", "1"]
    job = {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-4]"}
    calls = calls_of(checkout, ["bash", *script], SLURM_JOB_NAME="leeway", **job)
    assert calls == ["up", "run examples/pools.toml --run.dir runs --run.name leeway-7 --run.seed 1", "down"]
    assert (checkout / "settings").read_text() == "/tmp/leeway-job-7.0 \n", "two jobs share the files of Ray"


def test_a_job_of_slurm_resumes_the_run_of_its_name_also_after_a_requeue(checkout):
    script = [str(machines.CHECKOUT / "launch" / "slurm.sbatch"), "examples/pools.toml", "--learner.num_steps", "9"]
    job = {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-4]"}
    for name, restarts, run in (("mine", {}, "mine"), ("leeway", {"SLURM_RESTART_COUNT": "1"}, "leeway-7")):
        create_run(checkout, run)
        calls = calls_of(checkout, ["bash", *script], SLURM_JOB_NAME=name, **job, **restarts)
        assert calls == ["up", f"resume runs/{run} --learner.num_steps 9", "down"]
    assert (checkout / "settings").read_text() == "/tmp/leeway-job-7.1 \n", "the requeued job reuses old files"


def create_run(checkout: Path, name: str) -> None:
    """Create a run that has only a config."""
    (checkout / "runs" / name).mkdir(parents=True)
    (checkout / "runs" / name / "config.toml").touch()


def test_a_task_of_skypilot_uses_its_nodes_as_hosts_and_takes_them_down(checkout):
    task = yaml.safe_load((machines.CHECKOUT / "launch" / "skypilot.yaml").read_text())
    assert task["setup"].strip() == "make install"
    node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": NODES, **task["envs"]}
    calls = calls_of(checkout, ["bash", "-euo", "pipefail", "-c", task["run"]], **node)
    assert calls == ["up", "run examples/pools.toml", "down"]
    assert "-o ServerAliveInterval=15" in (checkout / "settings").read_text()
    named = {**node, "RUN": "mine"}
    calls = calls_of(checkout, ["bash", "-euo", "pipefail", "-c", task["run"]], **named)
    assert calls == ["up", "run examples/pools.toml --run.dir runs --run.name mine", "down"]
    create_run(checkout, "mine")
    assert calls_of(checkout, ["bash", "-euo", "pipefail", "-c", task["run"]], **named)[1] == "resume runs/mine"
    (checkout / "calls").unlink()
    subprocess.run(["bash", "-c", task["run"]], cwd=checkout, env={**node, "SKYPILOT_NODE_RANK": "1"}, check=True)
    assert not (checkout / "calls").exists(), "a node other than the first one started a cluster"


# --- the host file ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# no host\n\n", "the host file FILE has no hosts; see examples/hosts.txt"),
        ("10.0.0.1 a b c", "FILE:1: remove 'c'; a line is HOST [POOL[,POOL...] [ADDRESS]]"),
        ("10.0.0.1 a,,b", "FILE:1: 'a,,b' is not a list of pools; write it as a,b without spaces"),
        ("10.0.0.1 a\n10.0.0.1 b", "FILE:2: 10.0.0.1 is listed twice; give all its pools in one line"),
        ("-oProxyCommand=x a", "FILE:1: '-oProxyCommand=x' is not a host"),
        (
            "localhost a\n10.0.0.2 b",
            "localhost resolves to 127.0.0.1 here, which other hosts cannot reach; give its private address as "
            "the third word of its line in FILE",
        ),
        (
            "nowhere.invalid a\n10.0.0.2 b",
            "the address of nowhere.invalid cannot be resolved here; give its private address as the third word of its "
            "line in FILE",
        ),
    ],
)
def test_an_invalid_host_file_is_refused_in_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "hosts.txt"
    path.write_text(text)
    environment = {**os.environ, "HOME": str(tmp_path), "LEEWAY_SSH": "false"}
    done = subprocess.run(
        [SCRIPT, "up", path], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cluster.sh: {sentence}\n".replace("FILE", str(path))
    assert list(tmp_path.iterdir()) == [path]


def test_the_pools_of_the_example_config_are_those_of_the_example_hosts():
    lines = [
        line.split()
        for line in (machines.CHECKOUT / "examples" / "hosts.txt").read_text().splitlines()
        if line[:1].isdigit()
    ]
    pools = re.findall(
        r"^\[pools\.(\w+)\]", (machines.CHECKOUT / "examples" / "pools.toml").read_text(), flags=re.MULTILINE
    )
    assert sorted(line[1] for line in lines) == sorted(pools)
