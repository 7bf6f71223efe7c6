"""Hosts: machines of their own on this one, for tests of a cluster.

A host has its own network with an address on a common bridge, its own process table, host name, /tmp, /dev/shm and
home. It sees the checkout as this process does and, if so wanted, one folder more, where the runs go. `Hosts.ssh` takes
the place of ssh. A host ends with its first process, and that one with the test process, however that ends.
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
"""Of the first process of a host: NAME PYTHON FOLDER..., which stay in sight. It stays, and reaps what parents left."""

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
    """Why hosts cannot be made here; '' where they can."""
    if os.geteuid() != 0:
        return "hosts of their own namespaces need root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"the commands {', '.join(lacking)} are missing (Debian: apt-get install iproute2 iptables util-linux)"
    probe = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "hostname", "probe"]
    made = subprocess.run(probe, capture_output=True, text=True, timeout=20, check=False)
    return f"namespaces cannot be made here: {made.stderr.strip()}" if made.returncode else ""


class Host:
    """One of them. It is on from its making."""

    def __init__(self, number: int, net: str, bridge: str, folder: Path, shared: Path, *, sees: bool) -> None:
        self.name = f"host-{number}"
        self.address = f"{net}.{number}"
        self._device, self._bridge, self._folder = f"{bridge}p{number}", bridge, folder
        # the checkout lies below /tmp, too, where it was cloned there
        self._seen = [*([shared] if sees else []), *([CHECKOUT] if CHECKOUT.is_relative_to("/tmp") else [])]
        self._first: subprocess.Popen[str] | None = None
        self._pid = 0
        self.power_on()

    def power_on(self) -> None:
        """Boot it, with an empty /tmp."""
        spaces = ["--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        tied, python = ("setpriv", "--pdeathsig", "KILL"), os.path.realpath(sys.executable)
        self._first = subprocess.Popen(
            [*tied, "unshare", *spaces, "bash", "-c", _BOOT, "boot", self.name, python, *map(str, self._seen)],
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
        """Every process of it is gone at once, and so is its network; nobody is told."""
        if self._first is None:
            return
        (self._folder / f"{self.address}.pid").unlink(missing_ok=True)
        # Its end of the network first: a host that loses power sends no farewell.
        subprocess.run(["ip", "link", "delete", self._device], capture_output=True, check=False)
        self._first.kill()
        self._first.communicate(timeout=20)
        self._first = None

    def prefix(self) -> list[str]:
        """Put before a command to run it there."""
        return ["nsenter", "-t", str(self._pid), "-n", "-m", "-p", "-u", "-i", "--"]

    def inside(self, *command: str) -> str:
        """What a command there prints.

        Raises:
            OSError: it failed.
        """
        return run(*self.prefix(), *command)

    def tied_prefix(self) -> list[str]:
        """The same; the command ends with the process that is made of it."""
        return [*self.prefix(), "setpriv", "--pdeathsig", "KILL"]

    def processes(self) -> list[str]:
        """Command lines of all that runs there, but for the first process and this question."""
        lines = self.inside("ps", "-eo", "pid=,stat=,args=").splitlines()
        rows = [line.split(maxsplit=2) for line in lines]
        return [
            row[2] for row in rows if row[0] != "1" and not row[1].startswith("Z") and not row[2].startswith("ps -eo")
        ]

    def listening(self) -> list[str]:
        """ADDRESS:PORT of all that listens there."""
        return sorted(line.split()[3] for line in self.inside("ss", "-Hltn").splitlines())

    def files(self) -> list[str]:
        """Everything in its /tmp, which holds its home, and in its /dev/shm; not the folders of this machine there."""
        pruned = [word for folder in self._seen for word in ("-path", str(folder), "-prune", "-o")]
        found = self.inside("find", "/tmp", "/dev/shm", "-mindepth", "1", *pruned, "-print")
        own_way = {str(parent) for folder in self._seen for parent in folder.parents} | {
            "/tmp/home",
            "/tmp/home/.cache",
        }
        return sorted(set(found.splitlines()) - own_way)

    # --- its network ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Drop every packet in both directions; neither side is told."""
        (self._folder / f"{self.address}.cut").touch()
        self.inside("iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
        self.inside("iptables", "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def lose(self, share: float) -> None:
        """Drop this share of the packets that come, at random."""
        chance = ("-m", "statistic", "--mode", "random", "--probability", str(share))
        self.inside("iptables", "-A", "INPUT", "-i", "eth0", *chance, "-j", "DROP")

    def slow_down(self, megabits_per_s: float) -> None:
        """Limit both directions to this rate; what does not fit a queue of 0.4 s is dropped."""
        limit = ("root", "tbf", "rate", f"{megabits_per_s}mbit", "burst", "32kbit", "latency", "400ms")
        run("tc", "qdisc", "replace", "dev", self._device, *limit)
        self.inside("tc", "qdisc", "replace", "dev", "eth0", *limit)

    def num_dropped(self) -> int:
        """How many packets the rules of now have dropped: that an injection took place."""
        listed = self.inside("iptables", "-L", "-v", "-x", "-n")
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line and "Chain" not in line)

    def heal(self) -> None:
        """Take every rule and limit away."""
        (self._folder / f"{self.address}.cut").unlink(missing_ok=True)
        self.inside("iptables", "-F")
        for where in ([], self.prefix()):
            device = "eth0" if where else self._device
            gone = [*where, "tc", "qdisc", "delete", "dev", device, "root"]
            subprocess.run(gone, capture_output=True, check=False)


class Hosts(Sequence[Host]):
    """Hosts on one bridge, on which this process is too. A context manager."""

    def __init__(
        self,
        shared: Path,
        count: int = 3,
        environment: dict[str, str] | None = None,
        seen_by: Sequence[int] | None = None,
    ) -> None:
        """Nothing is made yet.

        Args:
            shared: the folder that hosts see where it is.
            count: how many.
            environment: what a login there finds, beside HOME and PATH.
            seen_by: the hosts that see the folder, from 0; None for all.
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
        """A command that takes the place of ssh."""
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
                sees = index in self._seen_by
                host = Host(index + 1, self._net, self._bridge, self._folder, self._shared, sees=sees)
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
    """What it prints.

    Raises:
        OSError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(what: str, look, limit_s: float, every_s: float = 0.5) -> float:
    """Seconds until `look()` is true.

    Raises:
        TimeoutError: it did not become so.
    """
    started = time.monotonic()
    while not look():
        if time.monotonic() - started > limit_s:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(every_s)
    return time.monotonic() - started
