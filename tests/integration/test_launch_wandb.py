"""Weights & Biases online: without a login or network, a launch promptly prints one sentence and leaves no process."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leeway.launch import train
from leeway.launch.checks import check
from leeway.launch.config import load_config
from leeway.launch.errors import ConfigError, ExitStatus

ROOT = Path(__file__).parents[2]
KEY = "0123456789012345678901234567890123456789"
RUN = """
import sys
from leeway.launch.cli import main
status = main(sys.argv[1:])
import psutil
print("left behind:", [child.name() for child in psutil.Process().children(recursive=True)])
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "needs a login of Weights & Biases, but there is none: run 'wandb login'"),
        pytest.param({"WANDB_API_KEY": "short"}, "API key must have 40+ characters", marks=pytest.mark.full),
        pytest.param(
            {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "Check the network and",
            marks=pytest.mark.full,
        ),
    ],
)
def test_online_without_login_or_network_is_one_sentence_and_leaves_nothing(tmp_path, environment, expected):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    overrides = ["--run.dir", str(tmp_path / "runs"), "--run.name", "x", "--tracking.to", "wandb"]
    started_s = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", RUN, "train", str(ROOT / "examples" / "demo.toml"), *overrides],
        cwd=ROOT,
        env={**inherited, "HOME": str(tmp_path), "WANDB_MODE": "online", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    (sentence,) = [line for line in ended.stderr.splitlines() if line.startswith("leeway: ")]
    assert expected in sentence
    assert "WANDB_MODE=offline" in sentence
    assert "Traceback" not in ended.stderr
    assert "left behind: []" in ended.stdout
    assert time.monotonic() - started_s < 100
    assert not (tmp_path / "runs" / "x").exists(), "the run folder was created"


def test_files_of_the_service_of_wandb_are_private(tmp_path, monkeypatch):
    def start_a_service(*_):
        (tmp_path / "of_the_service").touch()
        raise ConfigError("no answer")

    plan = check(load_config(ROOT / "examples" / "demo.toml"), tmp_path / "run")
    monkeypatch.setattr(train, "Tracker", start_a_service)
    assert train.train(plan) == ExitStatus.WRONG_INPUT
    assert stat.S_IMODE((tmp_path / "of_the_service").stat().st_mode) == 0o600


KILLED = """
import sys
from pathlib import Path
import psutil
from leeway.launch.config import load_config
from leeway.launch.observe.sinks import Tracker
from leeway.launch.run_folder import RunFolder

config = load_config(Path("examples/demo.toml"), ["--tracking.to", "wandb"])
folder = RunFolder(Path(sys.argv[1]))
folder.create(config)
with Tracker(config, folder) as tracker:
    tracker.step({"step": 1, "actors/waiting": 1})
    (tracker_process,) = psutil.Process().children()
    (service,) = tracker_process.children()
    service.kill()
    service.wait(60)
    for step in (2, 3):
        tracker.step({"step": step, "actors/waiting": step})
    tracker.summary({"b": 1})
"""


def test_a_run_continues_without_the_process_of_wandb_and_reports_it_once(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "run"],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "run" / "actors.jsonl").read_text().splitlines()]
    assert [row["actors/waiting"] for row in rows] == [1, 2, 3]
    (event,) = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "tracker"
    assert "wandb does not respond" in event["text"]
    assert "metrics.jsonl continues" in event["text"]
