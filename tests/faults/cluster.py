"""`launch/cluster.sh` on simulated hosts, called by a user on a machine that reaches the hosts by ssh."""

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
    """Runs `launch/cluster.sh`, for example with `call("up")`. The host file assigns pools to each host."""

    def __init__(self, hosts: Hosts, folder: Path, pools: tuple[str, ...] = POOLS) -> None:
        """Write the host file; start nothing.

        Args:
            hosts: hosts of the cluster.
            folder: folder for the caller's home and the host file.
            pools: pools of each host, in the order of the hosts, such as `a,b`.
        """
        self.hosts = hosts
        self.home = folder / "caller"
        self.home.mkdir(parents=True)
        self.host_file = folder / "hosts.txt"
        self.write_hosts(*(f"{host.address} {pool}" for host, pool in zip(hosts, pools, strict=True)))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "LEEWAY_"))}
        self.environment = {**kept, "HOME": str(self.home), "LEEWAY_SSH": hosts.ssh, "LEEWAY_CPUS": "4"}

    def write_hosts(self, *lines: str) -> None:
        """Write these lines to the host file."""
        self.host_file.write_text("# made by a test\n" + "\n".join(lines) + "\n")

    def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the script and wait until it exits."""
        return subprocess.run(
            [str(SCRIPT), *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def up(self) -> str:
        """Run `up`, which must succeed, and return its output."""
        done = self.call("up", str(self.host_file))
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each host as reported by `status`: "up" or "lost"."""
        done = self.call("status")
        assert done.returncode in (0, 1), done.stderr
        lines = (line.split(":")[0:2] for line in done.stdout.splitlines() if line.startswith("10."))
        return {host: state.split(",")[0].strip() for host, state in lines}

    def lost_after_s(self, address: str, limit_s: float) -> float:
        """Return the seconds until the head reports a host as lost."""
        return wait_until(f"{address} to be lost", lambda: self.states()[address] == "lost", limit_s, every_s=1.0)

    def run(self, folder: Path, config: str, *overrides: str) -> subprocess.Popen[str]:
        """Start a run in folder/run."""
        run_folder = ("--run.dir", str(folder), "--run.name", "run")
        return subprocess.Popen(
            [str(SCRIPT), "run", config, *run_folder, *overrides],
            env=self.environment,
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def end(process: subprocess.Popen[str], limit_s: float) -> str:
    """Wait until a run exits with status 0; return its output."""
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        raise AssertionError(f"the run did not exit within {limit_s:g} s: {output}") from None
    assert process.returncode == 0, output
    return output
