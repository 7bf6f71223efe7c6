"""A cluster: launch/cluster.sh on hosts of their own, as a user calls it from a machine that reaches them by ssh."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from tests.faults.hosts import CHECKOUT, Hosts, wait_until

SCRIPT = CHECKOUT / "launch" / "cluster.sh"
PORT = 6379
POOLS = ("learner", "exact", "fast")
LIMIT_S = 240.0


class Cluster:
    """`call("up")` and the like. The host file names a pool for each host."""

    def __init__(self, hosts: Hosts, folder: Path, pools: tuple[str, ...] = POOLS) -> None:
        """Nothing is started yet.

        Args:
            hosts: where.
            folder: of the caller's home, and of the host file.
            pools: of each host, `a,b`.
        """
        self.hosts = hosts
        self.home = folder / "caller"
        self.home.mkdir(parents=True)
        self.host_file = folder / "hosts.txt"
        self.name_hosts(*(f"{host.address} {pool}" for host, pool in zip(hosts, pools, strict=True)))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LEEWAY_"))}
        self.environment = {**kept, "HOME": str(self.home), "LEEWAY_SSH": hosts.ssh, "LEEWAY_CPUS": "4"}

    def name_hosts(self, *lines: str) -> None:
        """Write the host file."""
        self.host_file.write_text("# made by a test\n" + "\n".join(lines) + "\n")

    def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """The script, to its end."""
        return subprocess.run(
            [str(SCRIPT), *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def up(self) -> str:
        """What `up` prints, after it did well."""
        done = self.call("up", str(self.host_file))
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def states(self) -> dict[str, str]:
        """Of each host, what `status` says: "up" or "lost"."""
        done = self.call("status")
        assert done.returncode in (0, 1), done.stderr
        told = (line.split(":")[0:2] for line in done.stdout.splitlines() if line.startswith("10."))
        return {host: words.split(",")[0].strip() for host, words in told}

    def lost_after_s(self, address: str, limit_s: float) -> float:
        """Seconds until the head says that a host is lost."""
        return wait_until(f"{address} to be lost", lambda: self.states()[address] == "lost", limit_s, every_s=1.0)

    def run(self, folder: Path, config: str, *overrides: str) -> subprocess.Popen[str]:
        """Start a run into folder/run."""
        where = ("--run.dir", str(folder), "--run.name", "run")
        return subprocess.Popen(
            [str(SCRIPT), "run", config, *where, *overrides],
            env=self.environment,
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def end(process: subprocess.Popen[str], limit_s: float) -> str:
    """What a run has said, after it ended well."""
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
        raise AssertionError(f"the run did not end within {limit_s:g} s: {said}") from None
    assert process.returncode == 0, said
    return said
