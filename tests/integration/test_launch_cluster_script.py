"""launch/cluster.sh against hosts that only answer: what it asks of whom, what it refuses; and its script on a host."""

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

from launch.cluster_nodes import lines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "cluster.sh"
HEAD, EXACT, FAST = "10.9.0.1", "10.9.0.2", "10.9.0.3"
SSH = """#!/usr/bin/env bash
# [-o OPTION]... HOST COMMAND; what a host answers to a verb is in HOST.VERB, and one with HOST.gone answers nothing.
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


class Told:
    """Three hosts on which Ray is up, each in its pool, and a home from which the script is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "hosts.txt"
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH.replace("FOLDER", str(folder)))
        (folder / "bin" / "ssh").chmod(0o700)
        self.name(f"{HEAD} learner", f"{EXACT} exact", f"{FAST} fast")
        self.answer(
            HEAD, "nodes", *(f"{h} up 4 0 {p}" for h, p in ((HEAD, "learner"), (EXACT, "exact"), (FAST, "fast")))
        )
        for host in (HEAD, EXACT, FAST):
            self.answer(host, "facts", "python 3", "ray 2", "leeway 1", "raylet 77")

    def name(self, *lines: str) -> None:
        self.file.write_text("\n".join(lines) + "\n")

    def answer(self, host: str, verb: str, *lines: str) -> None:
        (self.folder / f"{host}.{verb}").write_text("\n".join(lines) + "\n")

    def call(self, *arguments: object, **environment: str) -> tuple[int, str]:
        """Exit status, and what it complained of."""
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

    def asked(self, verb: str) -> list[str]:
        """Of whom and with which words, since the last time that somebody wanted to know."""
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return sorted(line for line in lines if line.split()[1] == verb)

    @property
    def remembered(self) -> str:
        path = self.folder / ".cache" / "leeway" / "hosts-6379"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def told(tmp_path):
    return Told(tmp_path)


def test_new_pools_for_the_head_are_refused_before_anything_is_ended(told):
    assert told.call("up", told.file) == (0, "")
    told.name(f"{HEAD} learner,more", f"{EXACT} exact", f"{FAST} other")
    told.asked("start")
    status, said = told.call("up", told.file)
    sentence = f"the pools of the head changed from 'learner' to 'learner,more'; run '{SCRIPT} down' first"
    assert (status, said) == (1, f"cluster.sh: {sentence}\n")
    assert told.asked("stop") == []


def test_without_a_host_file_up_means_the_hosts_of_the_last_one_until_down(told):
    assert told.call("up", told.file) == (0, "")
    assert told.asked("start") == []
    told.answer(FAST, "facts", "python 3", "ray 2", "leeway 1")
    assert told.call("up") == (0, "")
    assert told.asked("start") == [f"{FAST} start {HEAD}"]
    assert told.call("down") == (0, "")
    assert told.asked("stop") == [f"{host} stop" for host in (HEAD, EXACT, FAST)]
    assert told.remembered == ""


def test_a_host_that_left_the_file_is_not_forgotten_before_its_ray_is_ended(told):
    assert told.call("up", told.file) == (0, "")
    told.name(f"{HEAD} learner", f"{EXACT} exact")
    (told.folder / f"{FAST}.gone").touch()
    status, said = told.call("up", told.file)
    assert status == 1
    assert f"{FAST} cannot be reached" in said
    assert "its Ray may still run there; call this again when it can be reached, or take it out of" in said
    assert FAST in told.remembered
    (told.folder / f"{FAST}.gone").unlink()
    told.asked("stop")
    assert told.call("up", told.file) == (0, "")
    assert told.asked("stop") == [f"{FAST} stop"]
    assert FAST not in told.remembered


def test_a_config_of_this_checkout_is_that_of_the_checkout_on_the_head(told, tmp_path):
    assert told.call("up", told.file) == (0, "")
    elsewhere = tmp_path / "mine.toml"
    elsewhere.touch()
    for config, there in ((ROOT / "examples" / "pools.toml", "/there/examples/pools.toml"), (elsewhere, elsewhere)):
        assert told.call("run", config, "--run.seed", "1", LEEWAY_DIR="/there") == (0, "")
        (call,) = told.asked("run")
        host, _, number, *words = call.split()
        assert (host, words) == (HEAD, ["train", str(there), "--run.seed", "1"])
        assert number.startswith(f"{os.uname().nodename}.")


def test_a_run_is_resumed_on_the_head_where_it_lies_there_or_by_its_name(told, tmp_path):
    assert told.call("up", told.file) == (0, "")
    seen = tmp_path / "seen" / "mine"
    seen.mkdir(parents=True)
    (seen / "config.toml").touch()
    for run, there in ((f"{seen}/../mine", str(seen)), ("runs/there", "runs/there"), ("mine", "mine")):
        assert told.call("resume", run, "--learner.num_steps", "9") == (0, "")
        (call,) = told.asked("run")
        assert (call.split()[0], call.split()[3:]) == (HEAD, ["resume", there, "--learner.num_steps", "9"])


def test_a_connection_over_which_nothing_comes_is_given_up(told):
    assert told.call("up", told.file) == (0, "")
    options = (told.folder / "options").read_text().split()
    assert {"BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=8"} <= set(options)


def test_a_clock_is_compared_with_ours_at_the_time_of_its_answer_however_late_others_are(told):
    (told.folder / f"{FAST}.late").touch()
    assert "clock" not in told.call("up", told.file)[1]
    (told.folder / f"{FAST}.late").unlink()
    told.answer(EXACT, "clock", "-100")
    # less what passes until it looks at its clock
    assert re.search(r"its clock is (8\d|9\d|100) s behind", told.call("up", told.file)[1])


def test_a_machine_that_lacks_what_the_script_needs_says_so_in_one_sentence(tmp_path):
    for tool in ("bash", "dirname", "timeout", "realpath"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [str(SCRIPT), "status"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20, check=False
    )
    said = "cluster.sh: this machine lacks getent; call it from Linux, such as the head\n"
    assert (done.returncode, done.stderr) == (2, said)


# --- on a host ----------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path):
    """The script in a checkout of its own, whose `leeway` hangs up its own terminal; `host(VERB, ...)` calls it."""
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
def test_a_run_outlives_its_terminal_in_the_checkout_and_on_the_ray_of_now(host, tmp_path, verb):
    done = host("run", "a.1", verb, "what", "--run.seed", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{tmp_path}: a.1 {verb} what --run.seed 1 --launch.ray_address 127.0.0.1:6379\n"
    assert (tmp_path / "state" / "ray-6379" / "run-a.1.pid").exists()


def test_an_interrupt_reaches_its_own_run_alone_and_no_process_that_has_its_number_now(host, tmp_path):
    ours, others = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "LEEWAY_CLUSTER_RUN": run}) for run in ("a.1", "a.2")
    )
    try:
        for run, process in (("a.1", ours), ("a.3", others)):
            (tmp_path / "state" / "ray-6379" / f"run-{run}.pid").write_text(f"{process.pid}\n")
        time.sleep(0.1)  # until both are `sleep`
        for run in ("a.3", "a.4", "a.1"):
            assert host("interrupt", run).returncode == 0
        assert ours.wait(60) == -signal.SIGTERM
        assert (host("end-runs", "1").stdout, others.poll()) == ("", None)
        assert others.poll() is None
    finally:
        for process in (ours, others):
            process.kill()
            process.wait()


def test_a_ray_that_ended_and_that_nobody_reaped_is_not_in_the_way():
    be_raylet = "open('/proc/self/comm', 'w').write('raylet')"
    stays = f"{be_raylet}; print(flush=True); import time; time.sleep(60)"
    with (
        subprocess.Popen([sys.executable, "-c", stays], stdout=subprocess.PIPE) as running,
        subprocess.Popen([sys.executable, "-c", be_raylet]) as ended,
    ):
        running.stdout.readline()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        facts = [str(ROOT / "launch" / "cluster_host.sh"), "facts", "127.0.0.1"]
        told = subprocess.run(facts, capture_output=True, text=True, timeout=60, check=True).stdout
        running.kill()
    others = re.findall(r"^other (\d+)", told, re.MULTILINE)
    assert (str(running.pid) in others, str(ended.pid) in others) == (True, False)


def test_a_folder_that_another_user_may_have_made_is_not_used(host, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "state")
    for verb in ("stop", "start", "nodes"):
        done = host(verb, "127.0.0.1", state=tmp_path / "link")
        assert done.returncode == 1
        assert f"{tmp_path / 'link'} is not a folder of this user's; set LEEWAY_STATE to one that is" in done.stderr
    assert (tmp_path / "state" / "ray-6379").exists()


def test_a_head_on_loopback_is_told_under_its_own_address_which_ray_changes():
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
def test_a_host_file_is_read_however_its_lines_end_and_whatever_marks_its_start(told, content):
    for name, host in ((b"{h}", HEAD), (b"{e}", EXACT), (b"{f}", FAST)):
        content = content.replace(name, host.encode())
    told.file.write_bytes(content)
    assert told.call("up", told.file) == (0, "")
    assert told.remembered == f"{HEAD} learner {HEAD}\n{EXACT} exact {EXACT}\n{FAST} fast {FAST}\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("10.9.0.1 learner\n".encode("utf-16"), "is not UTF-8 text (UTF-16?); save it as UTF-8"),
        (b"10.9.0.1 learner\r\n10.9.0.2 a b c\r\n", "hosts.txt:2: 'c' is too much"),
        (b"head all fd00::1\n", "fd00::1 is an IPv6 address, and a cluster needs IPv4; give its private address as"),
    ],
)
def test_a_host_file_that_cannot_be_used_is_refused_in_one_sentence(told, content, why):
    told.file.write_bytes(content)
    status, said = told.call("up", told.file)
    assert (status, said.count("\n"), why in said) == (2, 1, True), said
