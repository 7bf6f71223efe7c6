"""Resolution of the name or the path of a run to its folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from leeway.launch.cli import main
from leeway.launch.errors import ExitStatus
from leeway.launch.run_folder import named_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that contains the run runs/first, and a folder `first` that is not a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "buffer").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").touch()
    (tmp_path / "first" / "buffer").mkdir(parents=True)
    return tmp_path


def test_a_run_takes_precedence_over_a_folder_of_the_same_name(here):
    assert named_run(Path("first")) == Path("runs/first")
    assert named_run(here / "first") == here / "first"


def test_a_path_to_a_run_takes_precedence_over_runs(here):
    (here / "first" / "config.toml").touch()
    assert named_run(Path("first")) == Path("first")
    assert named_run(Path("runs/first")) == Path("runs/first")


def test_a_buffer_folder_is_found_by_its_path_and_within_runs(here):
    assert named_run(Path("runs/first/buffer")) == Path("runs/first/buffer")
    (here / "first" / "buffer").rmdir()
    assert named_run(Path("first/buffer")) == Path("runs/first/buffer")


def test_an_unknown_name_stays_unchanged(here):
    assert named_run(Path("second")) == Path("second")


LONG = "x" * 300


@pytest.mark.parametrize("verb", ["status", "top", "report", "resume", "buffer ls"])
def test_an_invalid_folder_name_is_one_sentence(here, capsys, verb):
    assert main([*verb.split(), LONG]) == (ExitStatus.FAILED if "buffer" in verb else ExitStatus.WRONG_INPUT)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "File name too long; run the command as the owner of the run" in sentence


AS_OWNER = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def cannot_drop_capabilities() -> bool:
    if not AS_OWNER:
        return False
    return shutil.which("setpriv") is None or subprocess.run([*AS_OWNER, "true"], check=False).returncode != 0


@pytest.mark.process
@pytest.mark.skipif(cannot_drop_capabilities(), reason="root may enter every folder")
def test_a_run_of_another_user_is_one_sentence(tmp_path):
    foreign = tmp_path / "theirs"
    foreign.mkdir()
    program = "import sys, pathlib, leeway.launch.run_folder as f; f.named_run(pathlib.Path(sys.argv[1]))"
    command = [*AS_OWNER, sys.executable, "-c", program, foreign]
    foreign.chmod(0)
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        foreign.chmod(0o700)
    assert ended.stderr.splitlines()[-1].endswith(
        f"ConfigError: no run can be read at {foreign}: Permission denied; run the command as the owner of the run"
    )
