"""Many actors of one machine pull a version at the same time: how often is it sent, and how often verified?"""

from __future__ import annotations

import contextlib
from pathlib import Path

from benchmarks.weights_parts.figures import hosts_figures
from benchmarks.weights_parts.peers import Figures, Peer, say
from benchmarks.weights_parts.setting import DTYPE, Setting
from benchmarks.weights_parts.sync import receiver, sent_bytes

NUM_PULLERS = 16
PULL_LIMIT_S = 120.0


def measure(setting: Setting) -> Figures:
    """Pullers of both transports, each a process of its own, and a version of SmolLM2 in bfloat16 for each."""
    num_pullers = 4 if setting.quick else NUM_PULLERS
    snapshots = [str(path) for path in setting.snapshots()]
    weights = setting.new_folder("hosts") / "weights"
    staging = setting.new_folder("hosts-staging", in_memory=True)
    with (
        Peer("service", folder=str(weights)) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=str(weights)) as sender,
    ):
        address = service.call("address")
        num_bytes = sender.call("num_bytes")
        network = _pull_at_once(sender, weights, 1, num_pullers, "network", address=address, staging=staging)
        sent = sent_bytes(service, 1)
        file_bytes = sum(path.stat().st_size for path in (weights / "0.1").glob("*.safetensors"))
        folder = _pull_at_once(sender, weights, 2, num_pullers, "folder")
    return hosts_figures(num_bytes, sent / file_bytes, {"network": network, "folder": folder})


def _pull_at_once(
    sender: Peer,
    weights: Path,
    version: int,
    num_pullers: int,
    transport: str,
    *,
    address: str = "",
    staging: Path | None = None,
) -> list[dict[str, float]]:
    """Of each puller: `sync` seconds from `publish` called, and `verified_bytes`."""
    with contextlib.ExitStack() as stack:
        pullers = [
            stack.enter_context(
                receiver(transport, weights, DTYPE, address=address, staging=staging, name=f"actor-{i}")
            )
            for i in range(num_pullers)
        ]
        for puller in pullers:
            puller.call("ready")
        for puller in pullers:
            puller.begin("pull", version=version)
        began = sender.call("publish", version=version)["began"]
        found = [puller.result("pull", limit_s=PULL_LIMIT_S) for puller in pullers]
    took = [{"sync": each["staged"] - began, "verified_bytes": each["verified_bytes"]} for each in found]
    say(f"hosts, {transport}: the last of {num_pullers} had it after {max(each['sync'] for each in took):.2f} s")
    return took
