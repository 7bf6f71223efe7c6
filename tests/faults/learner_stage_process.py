"""One rank of a learner as a process: `python learner_stage_process.py SPEC.json RANK`, or `run_rank` in a fork."""

import errno
import functools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
from pydantic import TypeAdapter
from tests.world.run_context import run_context, run_facts

from leeway.algorithms.registry import AlgorithmConfig
from leeway.common.run import RunContext
from leeway.learner import checkpoint_files, coordinator, optimizer
from leeway.learner import stage as stage_file
from leeway.learner.checkpoint import TrainingState
from leeway.learner.config import LearnerConfig
from leeway.learner.stage import Stage
from leeway.weight_sync.config import WeightSyncConfig
from leeway.weight_sync.store import WeightStore


def run_rank(spec_path: Path, rank: int, log: Path) -> None:
    """Run as a rank that writes to its own log file."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    assert "tests.world.learner" not in sys.modules, "tests.world.learner would change only forks"
    warnings.filterwarnings("error", category=UserWarning, module="learner")
    main(spec_path, rank)


def main(spec_path: Path, rank: int) -> None:
    spec = json.loads(spec_path.read_text())
    folder = Path(spec["run_folder"])
    torch.use_deterministic_algorithms(True)
    keep_reports(folder / "reports.jsonl")
    for name, value in spec["constants"].items():
        mock.patch(name, value).start()
    for name, value in spec["hooks"].items():
        HOOKS[name](rank, value)
    stage = Stage(context_of(spec), rank, spec["rendezvous"])
    signal.signal(signal.SIGTERM, lambda *_: stage.request_stop())
    stage.setup()
    (folder / f"ready-{rank}").touch()
    stage.run()
    stage.export(folder / "export")


def context_of(spec: dict) -> RunContext:
    """Return the run context that the settings describe."""
    folder = Path(spec["run_folder"])
    config, knobs = LearnerConfig(**spec["config"]), WeightSyncConfig(**spec["weight_sync"])
    facts = run_facts(
        groups_per_step=config.groups_per_step,
        updates_per_step=config.updates_per_step,
        staleness=knobs.staleness(),
    )
    models = {}
    if teachers := spec["teachers"]:
        models["reference_paths"] = tuple(map(Path, teachers))
        models["teacher_of_prompt"] = bytes(prompt % len(teachers) for prompt in range(facts.num_prompts))
    return run_context(
        folder,
        facts,
        **models,
        model_path=Path(spec["model_path"]),
        buffer_address=spec["buffer_address"],
        learner=config,
        algorithm=TypeAdapter(AlgorithmConfig).validate_python(spec["algorithm"]),
        weight_sync=knobs,
    )


def keep_reports(path: Path) -> None:
    """Append every report to a file, including those of redone steps, which metrics.jsonl omits."""
    make = stage_file.step_report

    def make_and_keep(*args, **kwargs):
        report = make(*args, **kwargs)
        with path.open("a") as file:
            file.write(json.dumps(report) + "\n")
        return report

    stage_file.step_report = make_and_keep


# --- faults that a test can select, by their names in `HOOKS` --------------------------------------


def without_moments(_rank: int, _value: object) -> None:
    """Restore the weights, but set the optimizer's moments to zero."""
    put = TrainingState.put

    def put_weights(self, networks, read):
        put(self, networks, read)
        for each in networks.optimizers:
            for tensor in each.state().values():
                tensor.zero_()

    TrainingState.put = put_weights


def without_checksums(_rank: int, _value: object) -> None:
    """Accept every file of a checkpoint without verification."""
    checkpoint_files.CheckpointMeta.check = lambda *_: None


def without_heartbeats(_rank: int, _value: object) -> None:
    """Disable the coordinator's heartbeats while it waits for a batch."""
    coordinator.HEARTBEAT_S = 60.0


def nan_gradient(rank: int, value: dict) -> None:
    """Make the gradient of a parameter NaN on one rank at the given updates (1-based)."""
    squared_norm, count = optimizer.StageOptimizer.squared_norm, 0

    def squared_norm_with_nan(self):
        nonlocal count
        count += 1
        if count in value["updates"] and rank == value["rank"]:
            next(p for p in self.parameters.values() if p.grad is not None).grad.view(-1)[0] = torch.nan
        return squared_norm(self)

    optimizer.StageOptimizer.squared_norm = squared_norm_with_nan


def take_every_update(_rank: int, _value: object) -> None:
    """Apply every update, even if its gradient is not finite."""
    result = optimizer.UpdateResult
    optimizer.UpdateResult = lambda _taken, *others: result(True, *others)


def kill_in_checkpoint(rank: int, value: dict) -> None:
    """Make one rank kill itself just before the n-th fsync or rename of a checkpoint file."""
    count = 0

    def guarded(call, path_of):
        def counted(target, *args, **kwargs):
            nonlocal count
            if "/checkpoints/" in path_of(target):
                count += 1
                if count == value["at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(target, *args, **kwargs)

        return counted

    if rank == value["rank"]:
        os.fsync = guarded(os.fsync, lambda descriptor: f"{os.readlink(f'/proc/self/fd/{descriptor}')}/")
        os.rename = guarded(os.rename, str)
        os.replace = guarded(os.replace, str)


def full_disk(rank: int, value: dict) -> None:
    """Fail writes of weights on one rank with ENOSPC until a file exists."""
    write = WeightStore.write_part

    def write_if_there_is_room(self, part, files):
        if rank == value["rank"] and not Path(value["until"]).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, part, files)

    WeightStore.write_part = write_if_there_is_room


def slow_disk(rank: int, value: dict) -> None:
    """Delay the write of every version on one rank by `seconds`."""
    write = WeightStore.write_part

    def write_slowly(self, part, files):
        if rank == value["rank"]:
            time.sleep(value["seconds"])
        write(self, part, files)

    WeightStore.write_part = write_slowly


def slow_steps(_rank: int, seconds: float) -> None:
    """Delay every step by `seconds`."""
    take = Stage._take_step

    def take_slowly(self, *args):
        time.sleep(seconds)
        take(self, *args)

    Stage._take_step = take_slowly


def flush_before_steps(_rank: int, limit_s: float) -> None:
    """Delay every step until all versions are written; the learner skips a version while two are unwritten."""
    take = Stage._take_step

    def take_later(self, *args):
        self._publisher.flush(limit_s)
        take(self, *args)

    Stage._take_step = take_later


def clock_from_first_checkpoint(_rank: int, checkpoints: str) -> None:
    """Start the publisher's clock at the first checkpoint in this folder."""
    began_s = []

    def clock():
        if not began_s and any(Path(checkpoints).glob("step-*")):
            began_s.append(time.monotonic())
        return time.monotonic() - began_s[0] if began_s else 0.0

    stage_file.Publisher = functools.partial(stage_file.Publisher, clock=clock)


def publish_regardless(_rank: int, _value: object) -> None:
    """Publish every version, even while earlier versions are unwritten."""
    Stage._may_publish = lambda _: True


HOOKS = {
    "full_disk": full_disk,
    "slow_disk": slow_disk,
    "slow_steps": slow_steps,
    "flush_before_steps": flush_before_steps,
    "clock_from_first_checkpoint": clock_from_first_checkpoint,
    "publish_regardless": publish_regardless,
    "without_moments": without_moments,
    "without_checksums": without_checksums,
    "without_heartbeats": without_heartbeats,
    "nan_gradient": nan_gradient,
    "take_every_update": take_every_update,
    "kill_in_checkpoint": kill_in_checkpoint,
}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
