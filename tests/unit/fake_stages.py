"""Fake learner with a fake clock and without processes. The test completes the pending calls of its ranks."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayTaskError

from leeway.launch.checks import check
from leeway.launch.config import load_config
from leeway.launch.processes import learner_group as group_module
from leeway.launch.processes.learner_group import LearnerGroup
from leeway.learner.checkpoint_files import META_NAME, CheckpointMeta, TrainingProgress
from leeway.learner.mesh import StageLost

DEMO = Path(__file__).parents[1] / "world" / "demo.toml"


class Call:
    """A pending call that the test completes."""

    def __init__(self) -> None:
        self.is_done, self.value, self.error = False, None, None

    def end(self, value=None, error=None) -> None:
        self.is_done, self.value, self.error = True, value, error


class Rank:
    """Fake StageRole that records its calls."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.is_killed = False
        self.variables: dict[str, str] = {}

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: object) -> Call:
            if method == "setup":
                self.on_setup(*arguments)
            self.calls.setdefault(method, []).append(Call())
            if method == "rendezvous":
                self(method).end("tcp://here:1")
            return self.calls[method][-1]

        return SimpleNamespace(remote=remote)

    def on_setup(self, *arguments: object) -> None:
        """Receive the arguments of `setup`."""

    def __call__(self, method: str) -> Call:
        return self.calls[method][-1]


class Learner:
    """LearnerGroup with fake ranks and a fake clock."""

    def __init__(self, folder, monkeypatch, *overrides: str, max_restarts: int = 2) -> None:
        self.ranks: list[Rank] = []
        self.now_s = 0.0
        self.events: list[tuple[str, str]] = []
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=lambda _: self.on_sleep())
        monkeypatch.setattr(group_module, "time", clock)
        monkeypatch.setattr(group_module, "MAX_RESTARTS", max_restarts)
        monkeypatch.setattr(group_module, "spawn", self._spawn)
        self.room = SimpleNamespace(
            is_placed=True, missing_s=0.0, reservation=lambda rank: None, shortage=lambda: "no room"
        )
        monkeypatch.setattr(group_module, "PlacementGroup", lambda *_: self.room)
        monkeypatch.setattr(ray, "wait", self._wait)
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "kill", lambda rank, no_restart: setattr(rank, "is_killed", True))
        plan = check(load_config(DEMO, overrides), folder / "run")
        self.folder, self.checkpoints = plan.folder, plan.folder.checkpoints
        self.checkpoints.mkdir(parents=True)
        self.folder.metrics.touch()
        self.context = dataclasses.replace(
            plan.context(folder, plan.model),
            buffer_address="tcp://buffer:1",
            weights_address="tcp://weights:1",
        )
        self.stages = LearnerGroup(plan, lambda kind, text: self.events.append((kind, text)))
        self.on_sleep = lambda: pytest.fail("unexpected wait")

    def _spawn(self, *_: object, variables: dict[str, str], **__: object) -> Rank:
        self.ranks.append(Rank())
        self.ranks[-1].variables = variables
        return self.ranks[-1]

    def _wait(self, calls, num_returns=1, timeout=None):
        ready = [call for call in calls if call.is_done]
        return ready, [call for call in calls if not call.is_done]

    def _get(self, call, timeout=None):
        if call.error is not None:
            raise call.error
        return call.value

    @property
    def live(self) -> list[Rank]:
        return [rank for rank in self.ranks if not rank.is_killed]

    def start(self) -> None:
        self.stages.request_placement()
        self.stages.spawn()
        calls = self.stages.start(self.context, deadline=300.0)
        assert [process.name for process, _ in calls] == [f"stage.{rank}" for rank in range(len(self.ranks))]
        self.stages.begin()

    def get_ready(self) -> None:
        """Complete the pending `setup` call of every live rank."""
        self.stages.watch()
        for rank in self.live:
            rank("setup").end()
        self.stages.watch()

    def end_all(self, method: str, error=None) -> None:
        for rank in self.live:
            rank(method).end(error=error)
        self.stages.watch()

    def checkpoint(self, step: int) -> None:
        write_checkpoint(self.checkpoints, step)


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write the checkpoint metadata that the launcher reads. Every step makes two versions."""
    path = folder / f"step-{step:08d}"
    path.mkdir()
    progress = TrainingProgress(step, 2 * step, 0)
    meta = CheckpointMeta(progress, num_stages=2, num_replicas=1, model="", files={})
    (path / META_NAME).write_bytes(meta.encode())
    return path


def raised(error: Exception) -> RayTaskError:
    return RayTaskError("run", str(error), error)


def lost(rank: int) -> RayTaskError:
    return raised(StageLost(f"stage {rank} could not train: gloo failed"))
