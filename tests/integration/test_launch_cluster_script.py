"""Calls and errors of launch/cluster.sh with fake hosts, and calls of launch/cluster_host.sh, its script on a host."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from leeway.launch.cluster_nodes import lines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "cluster.sh"
HEAD, EXACT, FAST = "10.9.0.1", "10.9.0.2", "10.9.0.3"
SSH = """#!/usr/bin/env bash
# [-o OPTION]... HOST COMMAND; HOST.VERB has the reply of a host to a command, and a host with HOST.gone is unreachable.
options=
while [ "$1" = -o ]; do options+=" $2" && shift 2; done
cd "FOLDER"
echo "$options" >options
read -ra words <<<"${2#*cluster_host.sh }"
[ ! -e "$1.gone" ] || { echo "No route to host" >&2 && exit 255; }
echo "$1 ${words[*]}" >>calls
[ ! -e "$1.late" ] || sleep 6
[ "${words[0]}" != facts ] || echo "time $(($(date +%s) + $(cat "$1.clock" 2>/dev/null || echo 0)))"
[ ! -e "$1.${words[0]}" ] || cat "$1.${words[0]}"
"""


class FakeCluster:
    """Three hosts with a running Ray, each in its own pool, and a home folder to call the script from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "hosts.txt"
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH.replace("FOLDER", str(folder)))
        (folder / "bin" / "ssh").chmod(0o700)
        self.write_hosts(f"{HEAD} learner", f"{EXACT} exact", f"{FAST} fast")
        self.answer(
            HEAD, "nodes", *(f"{h} up 4 0 {p}" for h, p in ((HEAD, "learner"), (EXACT, "exact"), (FAST, "fast")))
        )
        for host in (HEAD, EXACT, FAST):
            self.answer(host, "facts", "python 3", "ray 2", "leeway 1", "raylet 77")

    def write_hosts(self, *lines: str) -> None:
        self.file.write_text("\n".join(lines) + "\n")

    def answer(self, host: str, verb: str, *lines: str) -> None:
        (self.folder / f"{host}.{verb}").write_text("\n".join(lines) + "\n")

    def call(self, *arguments: object, **environment: str) -> tuple[int, str]:
        """Return the exit status and stderr."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LEEWAY_"))}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(SCRIPT), *map(str, arguments)],
            env={**kept, "HOME": str(self.folder), "PATH": path, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stderr

    def calls_of(self, verb: str) -> list[str]:
        """Return the calls of a subcommand since the last call of this method."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return sorted(line for line in lines if line.split()[1] == verb)

    @property
    def stored_hosts(self) -> str:
        path = self.folder / ".cache" / "leeway" / "hosts-6379"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def cluster(tmp_path):
    return FakeCluster(tmp_path)


def test_new_pools_for_the_head_are_refused_before_anything_is_stopped(cluster):
    assert cluster.call("up", cluster.file) == (0, "")
    cluster.write_hosts(f"{HEAD} learner,more", f"{EXACT} exact", f"{FAST} other")
    cluster.calls_of("start")
    status, error = cluster.call("up", cluster.file)
    sentence = f"the pools of the head changed from 'learner' to 'learner,more'; run '{SCRIPT} down' first"
    assert (status, error) == (1, f"cluster.sh: {sentence}\n")
    assert cluster.calls_of("stop") == []


def test_up_without_a_host_file_uses_the_hosts_of_the_last_one_until_down(cluster):
    assert cluster.call("up", cluster.file) == (0, "")
    assert cluster.calls_of("start") == []
    cluster.answer(FAST, "facts", "python 3", "ray 2", "leeway 1")
    assert cluster.call("up") == (0, "")
    assert cluster.calls_of("start") == [f"{FAST} start {HEAD}"]
    assert cluster.call("down") == (0, "")
    assert cluster.calls_of("stop") == [f"{host} stop" for host in (HEAD, EXACT, FAST)]
    assert cluster.stored_hosts == ""


def test_a_removed_host_is_stored_until_its_ray_is_stopped(cluster):
    assert cluster.call("up", cluster.file) == (0, "")
    cluster.write_hosts(f"{HEAD} learner", f"{EXACT} exact")
    (cluster.folder / f"{FAST}.gone").touch()
    status, error = cluster.call("up", cluster.file)
    assert status == 1
    assert f"{FAST} cannot be reached" in error
    assert "Ray may still run on the hosts above; repeat this command when they can be reached, or remove" in error
    assert FAST in cluster.stored_hosts
    (cluster.folder / f"{FAST}.gone").unlink()
    cluster.calls_of("stop")
    assert cluster.call("up", cluster.file) == (0, "")
    assert cluster.calls_of("stop") == [f"{FAST} stop"]
    assert FAST not in cluster.stored_hosts


def test_a_config_of_this_checkout_maps_to_the_checkout_on_the_head(cluster, tmp_path):
    assert cluster.call("up", cluster.file) == (0, "")
    elsewhere = tmp_path / "mine.toml"
    elsewhere.touch()
    for config, expected in ((ROOT / "examples" / "pools.toml", "/there/examples/pools.toml"), (elsewhere, elsewhere)):
        assert cluster.call("run", config, "--run.seed", "1", LEEWAY_DIR="/there") == (0, "")
        (call,) = cluster.calls_of("run")
        host, _, number, *words = call.split()
        assert (host, words) == (HEAD, ["train", str(expected), "--run.seed", "1"])
        assert number.startswith(f"{os.uname().nodename}.")


def test_a_run_is_resumed_on_the_head_by_its_path_or_its_name(cluster, tmp_path):
    assert cluster.call("up", cluster.file) == (0, "")
    seen = tmp_path / "seen" / "mine"
    seen.mkdir(parents=True)
    (seen / "config.toml").touch()
    for run, expected in ((f"{seen}/../mine", str(seen)), ("runs/there", "runs/there"), ("mine", "mine")):
        assert cluster.call("resume", run, "--learner.num_steps", "9") == (0, "")
        (call,) = cluster.calls_of("run")
        assert (call.split()[0], call.split()[3:]) == (HEAD, ["resume", expected, "--learner.num_steps", "9"])


def test_a_silent_connection_times_out(cluster):
    assert cluster.call("up", cluster.file) == (0, "")
    options = (cluster.folder / "options").read_text().split()
    assert {"BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=8"} <= set(options)


def test_the_clock_of_a_host_is_compared_at_the_time_of_its_reply(cluster):
    (cluster.folder / f"{FAST}.late").touch()
    assert "clock" not in cluster.call("up", cluster.file)[1]
    (cluster.folder / f"{FAST}.late").unlink()
    cluster.answer(EXACT, "clock", "-100")
    # 100 s minus the delay until the host reads its clock
    assert re.search(r"its clock is (8\d|9\d|100) s behind", cluster.call("up", cluster.file)[1])


def test_a_machine_without_a_required_tool_gets_one_sentence(tmp_path):
    for tool in ("bash", "dirname", "timeout", "realpath"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [str(SCRIPT), "status"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20, check=False
    )
    expected = "cluster.sh: this machine lacks getent; run it on Linux, such as the head\n"
    assert (done.returncode, done.stderr) == (2, expected)


# --- on a host ----------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path):
    """Return `host(VERB, ...)`, which calls the script in a checkout whose `leeway` sends SIGHUP to itself."""
    (tmp_path / "launch").mkdir()
    script = Path(shutil.copy(ROOT / "launch" / "cluster_host.sh", tmp_path / "launch"))
    leeway = tmp_path / ".venv" / "bin" / "leeway"
    leeway.parent.mkdir(parents=True)
    leeway.write_text('#!/bin/sh\nkill -HUP $$\necho "$PWD: $LEEWAY_CLUSTER_RUN $*"\n')
    leeway.chmod(0o700)
    (tmp_path / "state" / "ray-6379").mkdir(parents=True)

    def call(*arguments: str, state: Path = tmp_path / "state") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "LEEWAY_STATE": str(state), "LEEWAY_RAY_PORT": "6379"}
        return subprocess.run(
            [str(script), *arguments], env=environment, capture_output=True, text=True, timeout=30, check=False
        )

    return call


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_a_run_survives_its_terminal_and_uses_the_checkout_and_the_current_ray(host, tmp_path, verb):
    done = host("run", "a.1", verb, "path", "--run.seed", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}: a.1 {verb} path --run.seed 1 --launch.ray_address 127.0.0.1:6379\n"
    assert (tmp_path / "state" / "ray-6379" / "run-a.1.pid").exists()


def test_an_interrupt_reaches_only_its_run_and_no_process_with_a_reused_pid(host, tmp_path):
    ours, others = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "LEEWAY_CLUSTER_RUN": run}) for run in ("a.1", "a.2")
    )
    try:
        for run, process in (("a.1", ours), ("a.3", others)):
            (tmp_path / "state" / "ray-6379" / f"run-{run}.pid").write_text(f"{process.pid}\n")
        time.sleep(0.1)  # waits until both processes run `sleep`
        for run in ("a.3", "a.4", "a.1"):
            assert host("interrupt", run).returncode == 0
        assert ours.wait(60) == -signal.SIGTERM
        assert (host("end-runs", "1").stdout, others.poll()) == ("", None)
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


def test_a_zombie_process_of_ray_is_ignored():
    be_raylet = "open('/proc/self/comm', 'w').write('raylet')"
    stays = f"{be_raylet}; print(flush=True); import time; time.sleep(60)"
    with (
        subprocess.Popen([sys.executable, "-c", stays], stdout=subprocess.PIPE) as running,
        subprocess.Popen([sys.executable, "-c", be_raylet]) as ended,
    ):
        running.stdout.readline()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        facts = [str(ROOT / "launch" / "cluster_host.sh"), "facts", "127.0.0.1"]
        output = subprocess.run(facts, capture_output=True, text=True, timeout=60, check=True).stdout
        running.kill()
    others = re.findall(r"^other (\d+)", output, re.MULTILINE)
    assert (str(running.pid) in others, str(ended.pid) in others) == (True, False)


def test_a_state_folder_that_another_user_may_have_created_is_refused(host, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for verb in ("stop", "start", "nodes"):
        done = host(verb, "127.0.0.1", state=tmp_path / "link")
        assert done.returncode == 1
        assert f"{tmp_path / 'link'} is not a folder of this user; set LEEWAY_STATE to one that is" in done.stderr
    assert (tmp_path / "state" / "ray-6379").exists()


def test_a_head_on_loopback_is_listed_under_its_own_address():
    node = SimpleNamespace(node_manager_address="192.0.2.2", state=0, resources_total={"CPU": 4.0, "pool_a": 1.0})
    gone = SimpleNamespace(node_manager_address="192.0.2.2", state=1, resources_total={})
    assert lines([gone, node], "127.0.0.1") == ["127.0.0.1 up 4 0 a"]
    assert lines([gone, node], "192.0.2.1") == ["192.0.2.2 up 4 0 a"]


@pytest.mark.parametrize(
    "content",
    [
        "{h} learner\r\n{e} exact\r\n{f} fast\r\n".encode("utf-8-sig"),
        b"{h} learner\r{e} exact\r{f} fast",
        b"# the head first\r\n\r\n{h} learner \t\r\n  {e}\xc2\xa0exact # \xe4\r\n\t{f}\tfast",
    ],
    ids=["Windows", "old Mac", "white space"],
)
def test_a_host_file_may_have_any_line_ending_and_a_byte_order_mark(cluster, content):
    for name, host in ((b"{h}", HEAD), (b"{e}", EXACT), (b"{f}", FAST)):
        content = content.replace(name, host.encode())
    cluster.file.write_bytes(content)
    assert cluster.call("up", cluster.file) == (0, "")
    assert cluster.stored_hosts == f"{HEAD} learner {HEAD}\n{EXACT} exact {EXACT}\n{FAST} fast {FAST}\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("10.9.0.1 learner\n".encode("utf-16"), "is not UTF-8 text (UTF-16?); save it as UTF-8"),
        (b"10.9.0.1 learner\r\n10.9.0.2 a b c\r\n", "hosts.txt:2: remove 'c'"),
        (b"head all fd00::1\n", "fd00::1 is an IPv6 address, but a cluster needs IPv4; give its private address as"),
    ],
)
def test_an_invalid_host_file_is_refused_in_one_sentence(cluster, content, why):
    cluster.file.write_bytes(content)
    status, error = cluster.call("up", cluster.file)
    assert (status, error.count("\n"), why in error) == (2, 1, True), error
