"""Measurements of weight transfer: updates of two engines, deltas, sync, many pullers and many clients."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import smollm2
from benchmarks.lib.processes import MeasurementFailed
from benchmarks.weights_parts.page import (
    copying_figures,
    delta_figures,
    fairness_figures,
    hosts_figures,
    learner_figures,
    pause_figures,
    sync_figures,
)
from benchmarks.weights_parts.peers import Figures, Peer, call_all, log

from leeway.common.hf_folder import check_model_folder
from leeway.common.serving_model import prepare_serving_model

SAMPLING_LIMIT_S = 240.0
TRAINING_LIMIT_S = 900.0
DTYPE = "bfloat16"
SMALL_RATE, LARGE_RATE = 1e-6, 1e-5


@dataclass(frozen=True)
class Setting:
    """Setting of one run of the benchmark."""

    scratch: Path
    """Temporary folder on the disk of runs."""
    memory: Path
    """Temporary folder in memory."""
    quick: bool

    @property
    def num_groups(self) -> int:
        """Number of sampled groups, which repeat after `num_groups / groups_per_step` steps."""
        return 4 if self.quick else 20

    @property
    def groups_per_step(self) -> int:
        """Number of groups of an optimizer step."""
        return 1 if self.quick else 4

    def samples(self) -> Path:
        """Return the path of the learner's training samples; generate missing samples."""
        path = self.scratch / "samples.npz"
        if not path.exists():
            log("generating training samples")
            with Peer("samples", model=smollm2()) as peer:
                peer.call("make", path=path, num_groups=self.num_groups, limit_s=SAMPLING_LIMIT_S)
        return path

    def snapshots(self) -> list[Path]:
        """Return the paths of two versions of the weights, one optimizer step apart; train missing versions."""
        paths = [self.scratch / f"{name}.safetensors" for name in ("before", "after")]
        if not all(path.exists() for path in paths):
            log("training two versions to transfer")
            with self.trainer(SMALL_RATE, snapshots=self.scratch) as peer:
                peer.call("steps", num_steps=3, limit_s=TRAINING_LIMIT_S)
        return paths

    def trainer(self, learning_rate: float, *, snapshots: Path | None = None, spread: bool = False) -> Peer:
        """Return a peer that trains and encodes deltas."""
        return Peer(
            "delta",
            model=smollm2(),
            samples=self.samples(),
            scratch=self.scratch,
            learning_rate=learning_rate,
            groups_per_step=self.groups_per_step,
            snapshots=snapshots or "",
            spread=spread,
        )

    def new_folder(self, name: str, *, in_memory: bool = False) -> Path:
        """Create an empty folder for one measurement."""
        folder = (self.memory if in_memory else self.scratch) / name
        try:
            folder.mkdir()
        except FileExistsError as error:
            raise MeasurementFailed(f"{folder} exists: two measurements have the same name") from error
        return folder


NUM_ACTORS = 2
NUM_RUNNING = 24
START_LIMIT_S = 300.0
STEP_LIMIT_S = 360.0


def update(setting: Setting) -> Figures:
    """Measure the cost of an update while two actors generate and the learner trains and publishes every step.

    Figures cover the updates of both engines, of which the first warms up, and the learner's steps. Both sides of
    `pause_over_step` come from one engine in one run under one load. After every update, the engine generates for a
    second. Then vLLM's bare reload of tensors in memory is timed, and after the reload the time between tokens until
    the next version arrives. The second engine and the learner continue during these measurements.
    """
    num_rounds = 3 if setting.quick else 9
    model = smollm2()
    samples = setting.samples()
    served = prepare_serving_model(model, setting.scratch / "serving_models")
    folder = setting.new_folder("update-weights")
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(
            Peer(
                "learner",
                model=model,
                samples=samples,
                scratch=setting.scratch,
                learning_rate=SMALL_RATE,
                groups_per_step=setting.groups_per_step,
                folder=folder,
                dtypes=[DTYPE],
            )
        )
        engines = [
            stack.enter_context(
                Peer(
                    "engine",
                    name=f"actor-{i}",
                    model=served,
                    folder=folder,
                    dtype=DTYPE,
                    num_running=NUM_RUNNING,
                    vocab_size=check_model_folder(model).vocab_size,
                    seed=i,
                )
            )
            for i in range(NUM_ACTORS)
        ]
        log("update: starting two engines")
        for engine in engines:
            engine.begin("start")
        for engine in engines:
            engine.result("start", limit_s=START_LIMIT_S)
        steps = _train_until_all_have_followed(learner, engines, num_rounds)
        rounds = [engine.result("follow") for engine in engines]
    return {
        **pause_figures([each[1:] for each in rounds]),
        **learner_figures(steps[1:]),
        "update_num_running": NUM_RUNNING,
        "update_num_actors": NUM_ACTORS,
    }


def _train_until_all_have_followed(learner: Peer, engines: list[Peer], num_rounds: int) -> list[dict[str, Any]]:
    """Train until all engines have finished; return the learner's steps. Like actors, busy engines skip versions."""
    limit_s = STEP_LIMIT_S * (num_rounds + 2)
    for engine in engines:
        engine.begin("follow", num_updates=num_rounds, limit_s=limit_s)
    num_steps = 0
    while not all(engine.has_result() for engine in engines):
        learner.call("train", num_steps=1, limit_s=STEP_LIMIT_S)
        num_steps += 1
        log(f"update: step {num_steps}")
        if num_steps > 4 * num_rounds:
            break  # the engines' timeout reports the reason
    steps: list[dict[str, Any]] = learner.call("finish")
    return steps


def deltas(setting: Setting) -> Figures:
    """Measure steps at two learning rates on equal batches, from the checkpoint and from spread weights."""
    num_steps = 3 if setting.quick else 6
    rates = {"1e-6": SMALL_RATE, "1e-5": LARGE_RATE}
    found: dict[str, list[dict[str, float]]] = {}
    boundary_share = 0.0
    for spread in (False, True):
        with contextlib.ExitStack() as stack:
            peers = [
                stack.enter_context(
                    setting.trainer(
                        rate, snapshots=setting.scratch if rate == SMALL_RATE and not spread else None, spread=spread
                    )
                )
                for rate in rates.values()
            ]
            if not spread:
                boundary_share = peers[0].call("boundary_share", limit_s=TRAINING_LIMIT_S)
            log(f"deltas: training at two learning rates{', from spread weights' if spread else ''}")
            steps = call_all(peers, "steps", num_steps=num_steps, limit_s=TRAINING_LIMIT_S)
        names = [f"{name}, spread" if spread else name for name in rates]
        found |= dict(zip(names, steps, strict=True))
    return {**delta_figures(found), "boundary_share": boundary_share}


PLACES = ("disk", "memory")
KEPT_FILES = 3
"""Number of torch.save files that are kept, like versions in the store."""
WARM_UP_ROUNDS = KEPT_FILES + 2
"""Number of uncounted rounds, after which new files reuse pages of removed files. A page that the machine has never
touched costs ten times as much, for the first side that uses the page."""


def sync(setting: Setting) -> Figures:
    """Measure the time from `publish` to staged in another process, compared with torch.save and torch.load.

    Covers the folder transport in bfloat16 and float32, on disk and in memory, and the network transport with full
    versions and with deltas. Both sides have the same tensors in memory, two processes, the same folder, and new files
    each time. The sides take turns, and neither side calls fsync. torch.load has read the whole file when it returns. A
    staged version has been read once for verification and stays mapped. Both files are therefore in the page cache. The
    receiver polls for a version every millisecond; the notification on the side of torch is not timed.
    """
    snapshots = setting.snapshots()
    with Peer("copying") as peer:
        rates = peer.call("rates", num_rounds=9)
    found: dict[str, Any] = {}
    for dtype in (DTYPE, "float32"):
        for place in PLACES:
            found[f"{dtype}_{place}"] = _against_torch(setting, snapshots, dtype, place)
    network = {kind: _over_network(setting, snapshots, kind) for kind in ("whole", "delta")}
    return {**copying_figures(rates), **sync_figures(found, network)}


def _against_torch(setting: Setting, snapshots: list[Path], dtype: str, place: str) -> Figures:
    folder = setting.new_folder(f"sync-{dtype}-{place}", in_memory=place == "memory")
    weights, files = folder / "weights", folder / "files"
    files.mkdir()
    rounds: list[dict[str, float]] = []
    with (
        Peer("sender", snapshots=snapshots, dtype=dtype, folder=weights) as sender,
        receiver("folder", weights, dtype) as target,
    ):
        num_bytes = sender.call("num_bytes")
        for number in range(1, 1 + WARM_UP_ROUNDS + (2 if setting.quick else 7)):
            turns = [lambda n=number: _transfer(sender, target, n), lambda n=number: _torch(sender, target, files, n)]
            found: dict[str, float] = {}
            for turn in turns if number % 2 else reversed(turns):
                found |= turn()
            rounds.append(found)
    log(f"sync, {dtype}, {place}: {rounds[-1]}")
    return {"num_bytes": num_bytes, "rounds": rounds[WARM_UP_ROUNDS:]}


def _over_network(setting: Setting, snapshots: list[Path], kind: str) -> Figures:
    folder = setting.new_folder(f"sync-network-{kind}")
    staging = setting.new_folder(f"sync-staging-{kind}", in_memory=True)
    weights = folder / "weights"
    full_every = 100 if kind == "delta" else 1
    with (
        Peer("service", folder=weights) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=weights, full_every=full_every) as sender,
        receiver("network", weights, DTYPE, address=service.call("address"), staging=staging) as target,
    ):
        num_bytes = sender.call("num_bytes")
        rounds = [
            _transfer(sender, target, number) | {"sent_bytes": sent_bytes(service, number)}
            for number in range(1, 1 + WARM_UP_ROUNDS + (2 if setting.quick else 5))
        ]
    log(f"sync, network, {kind}: {rounds[-1]}")
    return {"num_bytes": num_bytes, "rounds": rounds[WARM_UP_ROUNDS:]}


def _transfer(sender: Peer, target: Peer, version: int) -> dict[str, float]:
    target.begin("pull", version=version)
    sent = sender.call("publish", version=version)
    received = target.result("pull")
    return {
        "sync": received["staged"] - sent["began"],
        "call": sent["call"],
        "until_seen": received["seen"] - sent["began"],
        "fetch": received["staged"] - received["seen"],
    }


def _torch(sender: Peer, target: Peer, files: Path, number: int) -> dict[str, float]:
    path = files / f"{number}.pt"
    found = {"save": sender.call("save", path=path), "load": target.call("load", path=path)}
    (files / f"{number - KEPT_FILES}.pt").unlink(missing_ok=True)
    return found


def receiver(
    transport: str, folder: Path, dtype: str, *, address: str = "", staging: Path | None = None, name: str = "actor-0"
) -> Peer:
    """Return a peer process that receives weights."""
    return Peer(
        "receiver",
        name=name,
        transport=transport,
        folder=folder,
        address=address,
        staging=staging or "",
        dtype=dtype,
    )


def sent_bytes(service: Peer, version: int) -> int:
    """Return the bytes of a version's files that the service has sent."""
    return service.call("sent_bytes").get(f"0.{version}", 0)


NUM_PULLERS = 16
PULL_LIMIT_S = 120.0


def hosts(setting: Setting) -> Figures:
    """Measure how often a version is sent and verified if many actors of one machine pull the version at once.

    Covers the folder and the network transport. Each puller has a separate process. Each transport has a version of
    SmolLM2 in bfloat16.
    """
    num_pullers = 4 if setting.quick else NUM_PULLERS
    snapshots = setting.snapshots()
    weights = setting.new_folder("hosts") / "weights"
    staging = setting.new_folder("hosts-staging", in_memory=True)
    with (
        Peer("service", folder=weights) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=weights) as sender,
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
    """Pull a version with all pullers; return `sync` (seconds from `publish`) and `verified_bytes` of each puller."""
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
    log(f"hosts, {transport}: the last of {num_pullers} finished after {max(each['sync'] for each in took):.2f} s")
    return took


NUM_PROCESSES, CLIENTS_EACH = 8, 8
NUM_VALUES = 4 * 2**20
"""Number of values of a version (8 MiB), so that the machine can hold and send the versions of all clients."""
HEAD_START_S = 0.5


def fairness(setting: Setting) -> Figures:
    """Measure the slowest over the median time of many clients that fetch a version from one service at once."""
    num_each = 2 if setting.quick else CLIENTS_EACH
    snapshots = setting.snapshots()
    weights = setting.new_folder("fairness") / "weights"
    rounds: list[list[float]] = []
    with (
        Peer("service", folder=weights) as service,
        Peer("sender", snapshots=snapshots, dtype=DTYPE, folder=weights, num_values=NUM_VALUES) as sender,
        contextlib.ExitStack() as stack,
    ):
        address = service.call("address")
        sender.call("publish", version=1)
        num_bytes = sender.call("num_bytes")
        processes = [
            stack.enter_context(Peer("clients", address=address, num_clients=num_each)) for _ in range(NUM_PROCESSES)
        ]
        call_all(processes, "ready")
        for number in range(2 if setting.quick else 6):
            start = time.perf_counter() + HEAD_START_S
            found = call_all(processes, "fetch", version=1, start=start)
            rounds.append([seconds for each in found for seconds in each])
            log(f"fairness, round {number}: slowest {max(rounds[-1]):.2f} s")
    return fairness_figures(num_bytes, rounds[1:])
