"""A learner stage on the GPU that is killed, resumed and exported, with a buffer service and a synthetic actor."""

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
from benchmarks.gpu.place import Place, rendezvous
from benchmarks.lib.machine import ROOT
from benchmarks.lib.processes import command_of, end_families, environment
from transformers import AutoModelForCausalLM

from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.schema import Trajectory, VersionSpan
from leeway.buffer.service import BufferService
from leeway.common.run import RunContext, RunFacts
from leeway.common.staleness import PolicyVersion, StalenessConfig
from leeway.launch.observe.metrics import Rows
from leeway.learner.config import LearnerConfig, LearnerSections
from leeway.learner.stage import Stage
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.store import WeightStore

NUM_STEPS, KILL_AFTER, CHECKPOINT_EVERY = 24, 4, 2
GROUP_SIZE, GROUPS_PER_STEP, PROMPT = 4, 4, 4
WAIT_S = 60.0
"""Timeout in seconds of each wait for a step, a service, or the exit of a process."""
POLL_S = 0.01


def stage(place: Place) -> None:
    """Kill a stage after step 4 and a checkpoint, resume the stage in another process, and check its export."""
    name, shape = place.shape("small")
    model = place.model("small")
    folder = place.folder / "life"
    folder.mkdir()
    longest = 512 if place.on_gpu else 48
    options: dict[str, Any] = {
        "folder": str(folder), "model": str(model), "vocab_size": shape["vocab_size"], "longest": longest,
        "device": place.device.type,
    }  # fmt: skip
    free_before = torch.cuda.mem_get_info()[0] if place.on_gpu else 0
    with _process("serve", options) as service:
        address = folder / "address"
        _wait(address.exists, service, "the address of the buffer service")
        options["address"] = address.read_text(encoding="utf-8")
        with SyntheticActor(options["address"], shape["vocab_size"], longest):
            with _process("train", options) as first:
                _wait(
                    lambda: _newest_step(folder) >= KILL_AFTER and any((folder / "checkpoints").glob("step-*")),
                    first,
                    f"step {KILL_AFTER} and a complete checkpoint",
                )
                first.kill()
                status = first.wait(WAIT_S)
            killed_at = _newest_step(folder)
            free_after = torch.cuda.mem_get_info()[0] if place.on_gpu else 0
            place.report(
                "killed",
                model=name,
                after_step=killed_at,
                status=status,
                gpu_bytes_left_behind=max(0, free_before - free_after),
            )
            start = time.monotonic()
            with _process("train", options) as second:
                _wait((folder / "done").exists, second, "the end of the run")
                second.wait(WAIT_S)
            place.report("resumed", seconds=time.monotonic() - start, **_reported(folder, killed_at))
    place.report("exported", **_compare(folder))


def _compare(folder: Path) -> dict[str, object]:
    """Check that the export is bit-identical to the last published version."""
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
        raise RuntimeError(f"{len(different)} of {len(published)} exported tensors differ from the published version")
    return {"tensors": len(published), "version": str(newest), "same_bits": True}


def _reported(folder: Path, killed_at: int) -> dict[str, object]:
    reports = _reports(folder)
    steps = [report["step"] for report in reports]
    resumed_from = next(report["step"] for report in reports if report["life"] == reports[-1]["life"]) - 1
    if steps[-1] != NUM_STEPS or resumed_from > killed_at:
        raise RuntimeError(f"steps {steps} do not match a run of {NUM_STEPS} steps that was killed at step {killed_at}")
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


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], event: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"exit status {process.returncode} before {event}: see the output of the process above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {WAIT_S:g} s waiting for {event}")
        time.sleep(POLL_S)


@contextmanager
def _process(function: str, options: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command_of(f"{__name__}:{function}", options), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        end_families(process)


# --- the processes --------------------------------------------------------------------------------


def _facts(options: dict[str, Any]) -> RunFacts:
    return RunFacts(
        run_id="gpu",
        seed=0,
        num_prompts=64,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        vocab_size=options["vocab_size"],
        max_tokens=options["longest"],
        staleness=StalenessConfig(max_lag=8),
    )


def serve(**options: Any) -> None:  # noqa: ANN401 -- JSON
    """Run the buffer service until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    folder = Path(options["folder"])
    service = BufferService(BufferConfig(), _facts(options), folder / "buffer")
    temporary = folder / "address.new"
    temporary.write_text(service.bind(), encoding="utf-8")
    temporary.rename(folder / "address")
    service.serve(stop)


def train(**options: Any) -> None:  # noqa: ANN401 -- JSON
    """Run the stage to the last step, and export its model."""
    folder, model = Path(options["folder"]), Path(options["model"])
    learner = LearnerConfig.model_validate(
        {
            "num_stages": 1, "num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP,
            "checkpoint_every": CHECKPOINT_EVERY, "token_budget": 4 * options["longest"], "precision": "bfloat16",
            "reference_offload": "cpu", "gpus": float(options["device"] == "cuda"),
        }
    )  # fmt: skip
    # set all sections, because this run has no config file
    sections: Any = SimpleNamespace(
        learner=learner,
        algorithm=TrajectoryBalanceConfig(),
        buffer=BufferConfig(),
        weight_sync=WeightSyncConfig(max_lag=8),
    )
    context: RunContext[LearnerSections] = RunContext(
        config=sections,
        facts=_facts(options),
        folder=folder,
        weights_folder=folder / "weights",
        model_path=model,
        reference_paths=(model,),
        temperature=1.0,
        serving_dtypes=("bfloat16",),
        startup_timeout_s=WAIT_S,
        buffer_address=options["address"],
    )
    (folder / "metrics.jsonl").touch()
    learner_stage = Stage(context, 0, rendezvous())
    learner_stage.setup()
    stop = threading.Event()
    rows = Rows(folder / "metrics.jsonl", at_end=True)
    writer = threading.Thread(target=_write_reports, args=(rows, folder / "reports.jsonl", stop), daemon=True)
    writer.start()
    learner_stage.run()
    stop.set()
    writer.join(WAIT_S)
    learner_stage.export(folder / "export")
    (folder / "done").touch()
    sys.stdout.flush()


def _write_reports(rows: Rows, path: Path, stop: threading.Event) -> None:
    """Copy each metrics row immediately, because a learner that resumes from a checkpoint deletes later rows."""
    life = time.time()
    while True:
        last = stop.is_set()
        for report in rows.read():
            figures = {"step": report["step"], "loss": report["loss"], "step_s": report.get("time/step")}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"life": life, **figures}) + "\n")
        if last:
            return
        time.sleep(POLL_S)


class SyntheticActor:
    """Actor without an engine that samples tokens uniformly and rewards small token ids."""

    def __init__(self, address: str, vocab_size: int, longest: int) -> None:
        """Prepare an actor for the buffer service at an address; the `with` statement starts the actor."""
        self._client = BufferClient(address, run_id="gpu", role="actor", name="actor-0")
        self._vocab_size, self._longest = vocab_size, longest
        self._stop = threading.Event()
        self._random = np.random.default_rng(0)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SyntheticActor:
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
