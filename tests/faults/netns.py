"""Link: a network link to a namespace, which tests can cut, slow down and make lossy.

Every rule and queue is attached to the link's own pair of interfaces, so that other traffic is not affected.
`missing()` returns why a link cannot be made.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess

TOOLS = ("ip", "iptables", "tc")


def missing() -> str:
    """Return why a link cannot be made on this machine, or ''."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"the commands {', '.join(absent)} are missing (Debian: apt-get install iproute2 iptables)"
    name = f"lwprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return ""


class Link:
    """Context manager of a link; its near end is this process, and `prefix` runs commands at its far end."""

    def __init__(self) -> None:
        number = random.SystemRandom().randrange(2**16)
        self._name = f"lw{os.getpid()}x{number:04x}"[:15]
        """Name of the namespace."""
        self._near_device, self._far_device = f"lwn{number:04x}", f"lwf{number:04x}"
        subnet = f"10.213.{number >> 8}.{(number & 63) * 4}"
        base = subnet.rsplit(".", 1)
        self.near, self.far = (f"{base[0]}.{int(base[1]) + end}" for end in (1, 2))
        """Addresses of the two ends."""
        self.prefix = ["ip", "netns", "exec", self._name]
        """Command prefix that runs a command at the far end."""

    def __enter__(self) -> Link:
        _run("ip", "netns", "add", self._name)
        try:
            pair = ("peer", "name", self._far_device, "netns", self._name)
            _run("ip", "link", "add", self._near_device, "type", "veth", *pair)
            _run("ip", "addr", "add", f"{self.near}/30", "dev", self._near_device)
            _run("ip", "link", "set", self._near_device, "up")
            _run("ip", "-n", self._name, "addr", "add", f"{self.far}/30", "dev", self._far_device)
            for device in (self._far_device, "lo"):
                _run("ip", "-n", self._name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Deleting one end deletes the pair of interfaces at once; deleting the namespace would delete the pair later.
        subprocess.run(["ip", "link", "delete", self._near_device], capture_output=True, check=False)
        _run("ip", "netns", "delete", self._name)

    def cut(self) -> None:
        """Drop every packet in both directions, without notifying either end."""
        self._rule("INPUT")
        self._rule("OUTPUT")

    def cut_one_way(self, direction: str, near_port: int) -> None:
        """Drop the packets of one connection in one direction: this connection is half open, new connections work.

        Args:
            direction: 'to_near' or 'to_far'.
            near_port: the near end's port of the connection.
        """
        if direction == "to_far":
            self._rule("INPUT", "-p", "tcp", "--sport", str(near_port))
        else:
            self._rule("OUTPUT", "-p", "tcp", "--dport", str(near_port))

    def lose(self, share: float) -> None:
        """Drop a share of the packets in both directions, chosen at random."""
        for chain in ("INPUT", "OUTPUT"):
            self._rule(chain, "-m", "statistic", "--mode", "random", "--probability", str(share))

    def slow_down(self, megabits_per_s: float) -> None:
        """Limit both directions to a rate; packets beyond a queue of 0.4 s are dropped."""
        limit = ("root", "tbf", "rate", f"{megabits_per_s}mbit", "burst", "32kbit", "latency", "400ms")
        _run("tc", "qdisc", "replace", "dev", self._near_device, *limit)
        _run(*self.prefix, "tc", "qdisc", "replace", "dev", self._far_device, *limit)

    def num_dropped(self) -> int:
        """Return how many packets the current rules dropped, as evidence that the fault was injected."""
        listed = _run(*self.prefix, "iptables", "-L", "-v", "-x", "-n")
        return sum(int(line.split()[0]) for line in listed.splitlines() if " DROP " in line and "Chain" not in line)

    def heal(self) -> None:
        """Remove every rule and limit."""
        _run(*self.prefix, "iptables", "-F")
        subprocess.run(["tc", "qdisc", "delete", "dev", self._near_device, "root"], capture_output=True, check=False)
        far = [*self.prefix, "tc", "qdisc", "delete", "dev", self._far_device, "root"]
        subprocess.run(far, capture_output=True, check=False)

    def _rule(self, chain: str, *match: str) -> None:
        _run(*self.prefix, "iptables", "-A", chain, *match, "-j", "DROP")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
