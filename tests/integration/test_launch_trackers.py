"""External trackers: TensorBoard reads the event files; a tracker that fails or hangs does not affect a run."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError
from leeway.launch.observe import sinks
from leeway.launch.observe.sinks import Tracker
from leeway.launch.observe.status import Accuracy
from leeway.launch.run_folder import RunFolder
from tests.world.buffer import Actor, InProcessBuffer, facts

ROOT = Path(__file__).parents[2]
READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={TENSORS: 0}).Reload()
tags = events.Tags()
scalars = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags["scalars"]}
texts = {
    tag: [(each.step, each.tensor_proto.string_val[0].decode()) for each in events.Tensors(tag)]
    for tag in tags["tensors"]
}
print(json.dumps([scalars, texts]))
"""
FAKE = """
import os, time

class Table: ...

def init(project, **settings):
    {at_start}
    return Run()

class Run:
    def log(self, row, step):
        {at_log}
    def finish(self): ...
"""


def accuracy(greedy: float, version: int) -> Accuracy:
    return Accuracy(versions=str(version), policy_version=version, start=0, greedy=greedy, sampled=None, num_problems=8)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return `start(names, at_start, at_log)`: a Tracker of a new run; a fake of trackio runs the given statements."""

    def tracker_of(*names: str, at_start: str = "pass", at_log: str = "pass") -> Tracker:
        (tmp_path / "fakes").mkdir()
        (tmp_path / "fakes" / "trackio.py").write_text(FAKE.format(at_start=at_start, at_log=at_log))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
        config = load_config(ROOT / "examples" / "demo.toml", ["--tracking.to", json.dumps(names)])
        folder = RunFolder(tmp_path / "run")
        folder.create(config)
        return Tracker(config, folder)

    return tracker_of


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars_and_texts(run: Path) -> tuple[dict, dict]:
    """Read the event files in another process, because TensorBoard's reader warns when it is imported."""
    command = [sys.executable, "-c", READER, str(run / "tensorboard")]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_the_reader_of_tensorboard_reads_metrics_evaluations_and_samples_on_one_axis(start, tmp_path):
    with start("tensorboard") as tracker:
        buffer = InProcessBuffer(tmp_path / "run" / "buffer", facts())
        buffer.begin()
        actor = Actor(buffer)
        for number, lease in enumerate(actor.lease()):
            actor.work(lease, reward=number / 4, num_completion_tokens=3)
        buffer.draw(1, 0)
        buffer.finish(1, 1)
        buffer.close()
        tracker.evaluated(accuracy(0.25, 0), 0, 1.0)
        for step in (1, 2, 3):
            tracker.step({"step": step, "loss": step / 2, "lag/token_mean": None, "grad_norm": float("nan")})
        tracker.evaluated(accuracy(0.75, 3), 3, 2.0)
        tracker.summary({"wall_s": 1.0})
    scalars, texts = scalars_and_texts(tmp_path / "run")
    assert scalars["loss"] == [[1, 0.5], [2, 1.0], [3, 1.5]]
    assert scalars["eval/accuracy_greedy"] == [[0, 0.25], [3, 0.75]]
    assert not {"step", "lag/token_mean", "grad_norm", "eval/accuracy_sampled"} & scalars.keys()
    ((step, table), *_) = texts["samples"]
    head, rule, *rows = table.splitlines()
    assert (step, head, rule) == (0, "| prompt | completion | reward | lag | trained_step |", 5 * "| --- " + "|")
    assert [row.split(" | ")[2:] for row in rows] == [["0.0", "0", "1 |"], ["0.25", "0", "1 |"]]
    assert lines(tmp_path / "run" / "events.jsonl") == []


@pytest.mark.parametrize(
    ("at_log", "why"),
    [
        ("raise ValueError('no space')", "ValueError: no space"),
        ("os._exit(3)", "its process exited with status 3"),
        ("time.sleep(600)", "rows are unsent after 20 s"),
    ],
)
def test_a_tracker_that_fails_or_hangs_is_dropped_and_the_others_continue(start, tmp_path, monkeypatch, at_log, why):
    monkeypatch.setattr(sinks, "FINISH_TIMEOUT_S", 20.0)
    with start("trackio", "tensorboard", at_log=at_log) as tracker:
        for step in range(1, 100):
            tracker.step({"step": step, "actors/waiting": 0, "loss": 1.0})
    assert len(lines(tmp_path / "run" / "actors.jsonl")) == 99
    assert len(scalars_and_texts(tmp_path / "run")[0]["loss"]) == 99
    (event,) = lines(tmp_path / "run" / "events.jsonl")
    assert event["kind"] == "tracker"
    assert event["text"].startswith(f"trackio does not respond ({why}")
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("at_start", "why"),
    [("raise OSError('no server')", "OSError: no server. Fix"), ("time.sleep(600)", "no answer within 5 s. Fix")],
)
def test_a_tracker_that_does_not_start_is_one_sentence_and_leaves_no_process(start, monkeypatch, at_start, why):
    monkeypatch.setattr(sinks, "START_TIMEOUT_S", 5.0)
    with pytest.raises(ConfigError, match=f"^tracking.to: trackio cannot start: {why}"):
        start("trackio", at_start=at_start)
    assert psutil.Process().children() == []
