"""Which folder is meant by the name or the path of a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.errors import ExitStatus
from launch.run_folder import named_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A place with a run "first" in runs/, and a folder of the same name beside it that is none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "buffer").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").touch()
    (tmp_path / "first" / "buffer").mkdir(parents=True)
    return tmp_path


def test_a_run_goes_before_a_folder_that_only_has_its_name(here):
    assert named_run(Path("first")) == Path("runs/first")
    assert named_run(here / "first") == here / "first"


def test_a_path_to_a_run_means_it_whatever_lies_in_runs(here):
    (here / "first" / "config.toml").touch()
    assert named_run(Path("first")) == Path("first")
    assert named_run(Path("runs/first")) == Path("runs/first")


def test_the_folder_of_a_runs_buffer_is_found_by_its_path_and_within_runs(here):
    assert named_run(Path("runs/first/buffer")) == Path("runs/first/buffer")
    (here / "first" / "buffer").rmdir()
    assert named_run(Path("first/buffer")) == Path("runs/first/buffer")


def test_what_is_nowhere_stays_as_it_was_said(here):
    assert named_run(Path("second")) == Path("second")


LONG = "x" * 300


@pytest.mark.parametrize("verb", ["status", "top", "report", "resume", "buffer ls"])
def test_what_cannot_be_the_folder_of_a_run_is_one_sentence(here, capsys, verb):
    assert main([*verb.split(), LONG]) == (ExitStatus.FAILED if "buffer" in verb else ExitStatus.WRONG_INPUT)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert "File name too long; the folder of a run is its owner's alone" in sentence


AS_OWNER = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


def may_not_give_up_rights() -> bool:
    if not AS_OWNER:
        return False
    return shutil.which("setpriv") is None or subprocess.run([*AS_OWNER, "true"], check=False).returncode != 0


@pytest.mark.process
@pytest.mark.skipif(may_not_give_up_rights(), reason="root may enter every folder")
def test_a_run_of_somebody_else_is_one_sentence(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    program = "import sys, pathlib, launch.run_folder; launch.run_folder.named_run(pathlib.Path(sys.argv[1]))"
    command = [*AS_OWNER, sys.executable, "-c", program, theirs]
    theirs.chmod(0)
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        theirs.chmod(0o700)
    assert ended.stderr.splitlines()[-1].endswith(
        f"ConfigError: no run can be read at {theirs}: Permission denied; the folder of a run is its owner's alone"
    )
