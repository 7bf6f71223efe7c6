"""Simulated hosts on this machine, for tests of a cluster.

A host has its own network with an address on a common bridge, and its own process table, host name, /tmp, /dev/shm
and home. A host sees the checkout and optionally one shared folder, for the runs. `Hosts.ssh` replaces ssh. A host
stops when its first process exits, which happens when the test process exits or crashes.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "iptables", "tc", "nsenter", "unshare", "setpriv")

_BOOT = """
set -e
name=$1 python=$2
shift 2
mount -t tmpfs tmpfs /mnt
for folder; do mkdir -p "/mnt/$folder" && mount --bind "$folder" "/mnt/$folder"; done
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/home
for folder; do mkdir -p "$folder" && mount --move "/mnt/$folder" "$folder"; done
umount /mnt
hostname "$name"
ip link set lo up
echo booted
exec "$python" -c 'import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)'
"""
"""Script of the first process of a host, with the arguments NAME PYTHON FOLDER...; the host sees these folders. The
process reaps orphans until it is killed."""

_SSH = """#!/usr/bin/env bash
# SSH HOST COMMAND
pid=$(cat "{folder}/$1.pid" 2>/dev/null)
if [ -z "$pid" ] || [ -e "{folder}/$1.cut" ]; then
  echo "ssh: connect to host $1 port 22: No route to host" >&2
  exit 255
fi
exec nsenter -t "$pid" -n -m -p -u -i -- env -i {environment} bash -c "$2"
"""


def missing() -> str:
    """Return why hosts cannot be made on this machine, or ''."""
    if os.geteuid() != 0:
        return "hosts of their own namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the commands {', '.join(absent)} are missing (Debian: apt-get install iproute2 iptables util-linux)"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "hostname", "probe"]
    made = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    return f"namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""


class Host:
    """A simulated host, which is powered on at creation."""

    def __init__(self, number: int, net: str, bridge: str, folder: Path, shared: Path, *, sees_shared: bool) -> None:
        self.name = f"host-{number}"
        self.address = f"{net}.{number}"
        self._device, self._bridge, self._folder = f"{bridge}p{number}", bridge, folder
        # a checkout below /tmp must stay visible under the new /tmp of the host
        self._seen = [*([shared] if sees_shared else []), *([CHECKOUT] if CHECKOUT.is_relative_to("/tmp") else [])]
        self._first: subprocess.Popen[str] | None = None
        self._pid = 0
        self.power_on()

    def power_on(self) -> None:
        """Boot the host with an empty /tmp."""
        spaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        guard, python = ("setpriv", "--pdeathsig", "KILL"), os.path.realpath(sys.executable)
        self._first = subprocess.Popen(
            [*guard, "unshare", *spaces, "bash", "-c", _BOOT, "boot", self.name, python, *map(str, self._seen)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline() != "booted\n":
            raise OSError(f"{self.name} did not boot")
        (child,) = psutil.Process(self._first.pid).children()
        self._pid = child.pid
        run("ip", "link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", str(self._pid))
        run("ip", "link", "set", self._device, "master", self._bridge, "up")
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        (self._folder / f"{self.address}.pid").write_text(str(self._pid))

    def power_off(self) -> None:
        """Kill every process of the host at once and remove its network, without notifying any peer."""
        if self._first is None:
            return
        (self._folder / f"{self.address}.pid").unlink(missing_ok=True)
        # Remove the network first, so that exiting processes cannot notify their peers.
        subprocess.run(["ip", "link", "delete", self._device], capture_output=True, check=False)
        self._first.kill()
        self._first.communicate(timeout=20)
        self._first = None

    def prefix(self) -> list[str]:
        """Return the command prefix that runs a command on the host."""
        return ["nsenter", "-t", str(self._pid), "-n", "-m", "-p", "-u", "-i", "--"]

    def inside(self, *command: str) -> str:
        """Run a command on the host and return its output.

        Raises:
            OSError: the command failed.
        """
        return run(*self.prefix(), *command)

    def tied_prefix(self) -> list[str]:
        """Return `prefix` for a command that is killed when its parent exits."""
        return [*self.prefix(), "setpriv", "--pdeathsig", "KILL"]

    def processes(self) -> list[str]:
        """Return the command lines of the host's processes, except the first process and this `ps`."""
        lines = self.inside("ps", "-eo", "pid=,stat=,args=").splitlines()
        rows = [line.split(maxsplit=2) for line in lines]
        return [
            row[2] for row in rows if row[0] != "1" and not row[1].startswith("Z") and not row[2].startswith("ps -eo")
        ]

    def listening(self) -> list[str]:
        """Return ADDRESS:PORT of every listening socket."""
        return sorted(line.split()[3] for line in self.inside("ss", "-Hltn").splitlines())

    def files(self) -> list[str]:
        """Return all files in the host's /tmp (with its home) and /dev/shm, except folders of this machine."""
        pruned = [word for folder in self._seen for word in ("-path", str(folder), "-prune", "-o")]
        found = self.inside("find", "/tmp", "/dev/shm", "-mindepth", "1", *pruned, "-print")
        expected = {str(parent) for folder in self._seen for parent in folder.parents} | {
            "/tmp/home",
            "/tmp/home/.cache",
        }
        return sorted(set(found.splitlines()) - expected)

    # --- its network ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Drop every packet in both directions, without notifying either side."""
        (self._folder / f"{self.address}.cut").touch()
        self.inside("iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
        self.inside("iptables", "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def lose(self, share: float) -> None:
        """Drop a share of the incoming packets, chosen at random."""
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        self.inside("iptables", "-A", "INPUT", "-i", "eth0", *chance, "-j", "DROP")

    def slow_down(self, megabits_per_s: float) -> None:
        """Limit both directions to a rate; packets beyond a queue of 0.4 s are dropped."""
        limit = ("root", "tbf", "rate", f"{megabits_per_s}mbit", "burst", "32kbit", "latency", "400ms")
        run("tc", "qdisc", "replace", "dev", self._device, *limit)
        self.inside("tc", "qdisc", "replace", "dev", "eth0", *limit)

    def num_dropped(self) -> int:
        """Return how many packets the current rules dropped, as evidence that the fault was injected."""
        listed = self.inside("iptables", "-L", "-v", "-x", "-n")
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line and "Chain" not in line)

    def heal(self) -> None:
        """Remove every rule and limit."""
        (self._folder / f"{self.address}.cut").unlink(missing_ok=True)
        self.inside("iptables", "-F")
        for prefix in ([], self.prefix()):
            device = "eth0" if prefix else self._device
            command = [*prefix, "tc", "qdisc", "delete", "dev", device, "root"]
            subprocess.run(command, capture_output=True, check=False)


class Hosts(Sequence[Host]):
    """Context manager of hosts on a bridge to which this machine is connected too."""

    def __init__(
        self,
        shared: Path,
        count: int = 3,
        environment: dict[str, str] | None = None,
        seen_by: Sequence[int] | None = None,
    ) -> None:
        """Store the settings; the hosts are created on entry.

        Args:
            shared: folder visible to the hosts under its own path.
            count: number of hosts.
            environment: variables of a login shell, in addition to HOME and PATH.
            seen_by: indices of the hosts that see the folder; None for all.
        """
        number = random.SystemRandom().randrange(1, 250)
        self._bridge = f"lwb{os.getpid() % 10000}x{number}"[:12]
        self._net = f"10.214.{number}"
        self._shared, self._count = shared, count
        self._seen_by = range(count) if seen_by is None else seen_by
        self._folder = shared / "hosts"
        self._hosts: list[Host] = []
        login = {"HOME": "/tmp/home", "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **(environment or {})}
        self._environment = " ".join(f"'{key}={value}'" for key, value in login.items())

    @property
    def ssh(self) -> str:
        """Return the path of the command that replaces ssh."""
        return str(self._folder / "ssh")

    def __enter__(self) -> Hosts:
        self._folder.mkdir(parents=True, exist_ok=True)
        Path(self.ssh).write_text(_SSH.format(folder=self._folder, environment=self._environment))
        Path(self.ssh).chmod(0o700)
        run("ip", "link", "add", self._bridge, "type", "bridge")
        try:
            run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
            run("ip", "link", "set", self._bridge, "up")
            for index in range(self._count):
                sees_shared = index in self._seen_by
                host = Host(index + 1, self._net, self._bridge, self._folder, self._shared, sees_shared=sees_shared)
                self._hosts.append(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.power_off()
        run("ip", "link", "delete", self._bridge)

    def __getitem__(self, index):
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)


def run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        OSError: the command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(name: str, condition, limit_s: float, every_s: float = 0.5) -> float:
    """Wait until `condition()` is true; return the seconds that this took.

    Raises:
        TimeoutError: the condition was not true within `limit_s`.
    """
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > limit_s:
            raise TimeoutError(f"waited {limit_s:g} s for {name}")
        time.sleep(every_s)
    return time.monotonic() - started
