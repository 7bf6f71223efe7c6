"""A whole stage on the GPU, with a buffer service and an actor that makes samples up: killed, resumed, exported."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from algorithms.trajectory_balance import TrajectoryBalanceConfig
from benchmarks.gpu.place import Place, rendezvous
from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import command_of, end_families, environment
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.schema import Trajectory, VersionSpan
from buffer.service import BufferService
from common.run import RunContext, RunFacts
from common.staleness import PolicyVersion, StalenessConfig
from launch.observe.metrics import Rows
from learner.config import LearnerConfig, LearnerSections
from learner.stage import Stage
from weight_sync.config import WeightSyncConfig
from weight_sync.store import WeightStore

NUM_STEPS, KILL_AFTER, CHECKPOINT_EVERY = 24, 4, 2
GROUP_SIZE, GROUPS_PER_STEP, PROMPT = 4, 4, 4
WAIT_S = 60.0
"""For a step, a service or an end."""
POLL_S = 0.01


def stage(place: Place) -> None:
    """Some steps; kill -9 once the fourth is over and a checkpoint is whole; a process that resumes, and exports."""
    name, shape = place.shape("small")
    model = place.model("small")
    folder = place.folder / "life"
    folder.mkdir()
    longest = 512 if place.on_gpu else 48
    orders: dict[str, Any] = {
        "folder": str(folder), "model": str(model), "vocab_size": shape["vocab_size"], "longest": longest,
        "device": place.device.type,
    }  # fmt: skip
    free_before = torch.cuda.mem_get_info()[0] if place.on_gpu else 0
    with _process("serve", orders) as service:
        address = folder / "address"
        _wait(address.exists, service, "the buffer service")
        orders["address"] = address.read_text(encoding="utf-8")
        with MadeUpActor(orders["address"], shape["vocab_size"], longest):
            with _process("train", orders) as first:
                _wait(
                    lambda: _newest_step(folder) >= KILL_AFTER and any((folder / "checkpoints").glob("step-*")),
                    first,
                    f"step {KILL_AFTER} and a whole checkpoint",
                )
                first.kill()
                status = first.wait(WAIT_S)
            killed_at = _newest_step(folder)
            free_after = torch.cuda.mem_get_info()[0] if place.on_gpu else 0
            place.tell(
                "killed",
                model=name,
                after_step=killed_at,
                status=status,
                gpu_bytes_left_behind=max(0, free_before - free_after),
            )
            start = time.monotonic()
            with _process("train", orders) as second:
                _wait((folder / "done").exists, second, "the end of the run")
                second.wait(WAIT_S)
            place.tell("resumed", seconds=time.monotonic() - start, **_reported(folder, killed_at))
    place.tell("exported", **_compare(folder))


def _compare(folder: Path) -> dict[str, object]:
    """What was exported against what was published last, to the bit."""
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32).state_dict()
    store = WeightStore(folder / "weights")
    try:
        manifest = store.newest_manifest()
        assert manifest is not None, "no version was published"
        newest = store.newest()
        published = {
            entry.name: torch.frombuffer(bytearray(content), dtype=torch.bfloat16)
            for entry, content in store.tensors(manifest, "bfloat16")
        }
    finally:
        store.close()
    different = [
        name
        for name, values in published.items()
        if not torch.equal(exported[name].flatten().to(torch.bfloat16), values)
    ]
    if different:
        raise RuntimeError(f"{len(different)} of {len(published)} tensors were exported otherwise than published last")
    return {"tensors": len(published), "version": str(newest), "same_bits": True}


def _reported(folder: Path, killed_at: int) -> dict[str, object]:
    reports = _reports(folder)
    steps = [report["step"] for report in reports]
    resumed_from = next(report["step"] for report in reports if report["life"] == reports[-1]["life"]) - 1
    if steps[-1] != NUM_STEPS or resumed_from > killed_at:
        raise RuntimeError(f"the steps {steps} are not those of a run of {NUM_STEPS} that was killed at {killed_at}")
    losses: dict[int, list[float]] = {}
    for report in reports:
        losses.setdefault(report["step"], []).append(report["loss"])
    return {
        "steps": steps,
        "resumed_from": resumed_from,
        "losses": losses,
        "redone_differ_by": max(abs(each[0] - each[-1]) for each in losses.values()),
        "step_s": [report["step_s"] for report in reports],
    }


def _reports(folder: Path) -> list[dict[str, Any]]:
    path = folder / "reports.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _newest_step(folder: Path) -> int:
    reports = _reports(folder)
    return int(reports[-1]["step"]) if reports else 0


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"a process of the run ended with {process.returncode} before {what}; it said why above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(POLL_S)


@contextmanager
def _process(function: str, orders: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command_of(f"{__name__}:{function}", orders), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        end_families(process)


# --- the processes --------------------------------------------------------------------------------


def _facts(orders: dict[str, Any]) -> RunFacts:
    return RunFacts(
        run_id="gpu",
        seed=0,
        num_prompts=64,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        vocab_size=orders["vocab_size"],
        max_tokens=orders["longest"],
        staleness=StalenessConfig(max_lag=8),
    )


def serve(**orders: Any) -> None:  # noqa: ANN401 -- JSON
    """The buffer service, until it is ended."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    folder = Path(orders["folder"])
    service = BufferService(BufferConfig(), _facts(orders), folder / "buffer")
    written = folder / "address.new"
    written.write_text(service.bind(), encoding="utf-8")
    written.rename(folder / "address")
    service.serve(stop)


def train(**orders: Any) -> None:  # noqa: ANN401 -- JSON
    """One life of the stage."""
    folder, model = Path(orders["folder"]), Path(orders["model"])
    learner = LearnerConfig.model_validate(
        {
            "num_stages": 1, "num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP,
            "checkpoint_every": CHECKPOINT_EVERY, "token_budget": 4 * orders["longest"], "precision": "bfloat16",
            "reference_offload": "cpu", "gpus": float(orders["device"] == "cuda"),
        }
    )  # fmt: skip
    # every section is said: what it leaves open is not filled in from elsewhere
    sections: Any = SimpleNamespace(
        learner=learner,
        algorithm=TrajectoryBalanceConfig(),
        buffer=BufferConfig(),
        weight_sync=WeightSyncConfig(max_lag=8),
    )
    context: RunContext[LearnerSections] = RunContext(
        config=sections,
        facts=_facts(orders),
        folder=folder,
        weights_folder=folder / "weights",
        model_path=model,
        reference_paths=(model,),
        temperature=1.0,
        serving_dtypes=("bfloat16",),
        startup_timeout_s=WAIT_S,
        buffer_address=orders["address"],
    )
    (folder / "metrics.jsonl").touch()
    made = Stage(context, 0, rendezvous())
    made.setup()
    over = threading.Event()
    rows = Rows(folder / "metrics.jsonl", at_end=True)
    writer = threading.Thread(target=_write_reports, args=(rows, folder / "reports.jsonl", over), daemon=True)
    writer.start()
    made.run()
    over.set()
    writer.join(WAIT_S)
    made.export(folder / "export")
    (folder / "done").touch()
    sys.stdout.flush()


def _write_reports(rows: Rows, path: Path, over: threading.Event) -> None:
    """Keep each at once: a learner that goes on from a checkpoint cuts off those after it."""
    life = time.time()
    while True:
        last = over.is_set()
        for report in rows.read():
            told = {"life": life, "step": report["step"], "loss": report["loss"], "step_s": report.get("time/step")}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told) + "\n")
        if last:
            return
        time.sleep(POLL_S)


class MadeUpActor:
    """Leases like an actor; samples tokens uniformly, rewards small ids."""

    def __init__(self, address: str, vocab_size: int, longest: int) -> None:
        """Talk to the buffer service at an address once it is entered."""
        self._client = BufferClient(address, run_id="gpu", role="actor", name="actor-0")
        self._vocab_size, self._longest = vocab_size, longest
        self._stop = threading.Event()
        self._random = np.random.default_rng(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MadeUpActor:
        self._client.connect()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._client.close(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            grant = self._client.lease(4).result(WAIT_S)
            if not grant.leases:
                time.sleep(POLL_S)
            for lease in grant.leases:
                for index in lease.sample_indices:
                    self._client.push(self._sample(lease, index, PolicyVersion(*grant.newest)))

    def _sample(self, lease: Any, index: int, version: PolicyVersion) -> Trajectory:  # noqa: ANN401 -- a message
        length = int(self._random.integers(2, self._longest - PROMPT))
        tokens = self._random.integers(0, self._vocab_size, PROMPT + length).astype(np.int32)
        return Trajectory(
            lease_id=lease.lease_id,
            attempt=lease.attempt,
            group_id=lease.group_id,
            sample_index=index,
            prompt_id=lease.prompt_id,
            token_ids=tokens,
            prompt_length=PROMPT,
            logprobs=np.full(length, -np.log(self._vocab_size), np.float32),
            spans=(VersionSpan(version, 0, length),),
            reward=float((tokens[PROMPT:] < self._vocab_size // 2).mean()),
            finish_reason="stop",
            started_s=time.time(),
            finished_s=time.time(),
        )
