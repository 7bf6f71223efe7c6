"""From `publish` called to verified and staged in another process, beside torch.save and torch.load.

The same tensors in memory on both sides, two processes, the same folder, files that are new each time; the sides take
turns. Nobody calls fsync. torch.load has read all of the file when it returns, and a staged version has been read
once against its checksums and stays mapped, so both are in the page cache. The receiver notices a version by
asking every millisecond; the other side is not charged for being told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.weights_parts.figures import copying_figures, sync_figures
from benchmarks.weights_parts.peers import Figures, Peer, say
from benchmarks.weights_parts.setting import DTYPE, Setting

PLACES = ("disk", "memory")
KEPT = 3
"""Files of torch.save that stay, as versions of the store do."""
WARM_UP = KEPT + 2
"""Rounds that do not count: until what is removed gives its pages to what is written. A page that the machine has never
touched costs ten times as much, which either side may meet first."""


def measure(setting: Setting) -> Figures:
    """The folder's transport in bfloat16 and float32, on disk and in memory; and the network's, whole and as deltas."""
    snapshots = [str(path) for path in setting.snapshots()]
    with Peer("copying") as peer:
        rates = peer.call("rates", num_rounds=9)
    found: dict[str, Any] = {}
    for dtype in (DTYPE, "float32"):
        for place in PLACES:
            found[f"{dtype}_{place}"] = _against_torch(setting, snapshots, dtype, place)
    network = {kind: _over_network(setting, snapshots, kind) for kind in ("whole", "delta")}
    return {**copying_figures(rates), **sync_figures(found, network)}


def _against_torch(setting: Setting, snapshots: list[str], dtype: str, place: str) -> Figures:
    folder = setting.new_folder(f"sync-{dtype}-{place}", in_memory=place == "memory")
    weights, files = folder / "weights", folder / "files"
    files.mkdir()
    rounds: list[dict[str, float]] = []
    with (
        Peer("sender", snapshots=snapshots, dtype=dtype, folder=str(weights)) as sender,
        receiver("folder", weights, dtype) as taker,
    ):
        num_bytes = sender.call("num_bytes")
        for number in range(1, 1 + WARM_UP + (2 if setting.quick else 7)):
            turns = [lambda n=number: _sync(sender, taker, n), lambda n=number: _torch(sender, taker, files, n)]
            found: dict[str, float] = {}
            for turn in turns if number % 2 else reversed(turns):
                found |= turn()
            rounds.append(found)
    say(f"sync, {dtype}, {place}: {rounds[-1]}")
    return {"num_bytes": num_bytes, "rounds": rounds[WARM_UP:]}


def _over_network(setting: Setting, snapshots: list[str], kind: str) -> Figures:
    folder = setting.new_folder(f"sync-network-{kind}")
    staging = setting.new_folder(f"sync-staging-{kind}", in_memory=True)
    weights = folder / "weights"
    full_every = 100 if kind == "delta" else 1
    with (
        Peer("service", folder=str(weights)) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=str(weights), full_every=full_every) as sender,
        receiver("network", weights, DTYPE, address=service.call("address"), staging=staging) as taker,
    ):
        num_bytes = sender.call("num_bytes")
        rounds = [
            _sync(sender, taker, number) | {"sent_bytes": sent_bytes(service, number)}
            for number in range(1, 1 + WARM_UP + (2 if setting.quick else 5))
        ]
    say(f"sync, network, {kind}: {rounds[-1]}")
    return {"num_bytes": num_bytes, "rounds": rounds[WARM_UP:]}


def _sync(sender: Peer, taker: Peer, version: int) -> dict[str, float]:
    taker.begin("pull", version=version)
    sent = sender.call("publish", version=version)
    got = taker.result("pull")
    return {
        "sync": got["staged"] - sent["began"],
        "call": sent["call"],
        "until_seen": got["seen"] - sent["began"],
        "fetch": got["staged"] - got["seen"],
    }


def _torch(sender: Peer, taker: Peer, files: Path, number: int) -> dict[str, float]:
    path = files / f"{number}.pt"
    found = {"save": sender.call("save", path=str(path)), "load": taker.call("load", path=str(path))}
    (files / f"{number - KEPT}.pt").unlink(missing_ok=True)
    return found


def receiver(
    transport: str, folder: Path, dtype: str, *, address: str = "", staging: Path | None = None, name: str = "actor-0"
) -> Peer:
    """A peer of `receiver_role`."""
    return Peer(
        "receiver",
        name=name,
        transport=transport,
        folder=str(folder),
        address=address,
        staging=str(staging) if staging else "",
        dtype=dtype,
    )


def sent_bytes(service: Peer, version: int) -> int:
    """What the service has sent of a version's files so far."""
    return sum(service.call("stats")["read_bytes"].get(f"0.{version}", {}).values())
