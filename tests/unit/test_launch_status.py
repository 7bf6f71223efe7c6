"""`leeway status`: a run that lives, is over, failed, or whose command is gone."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time

import msgspec
import pytest

from buffer.ledger import COUNTS
from common.staleness import PolicyVersion
from launch.cli import main
from launch.observe.observer import Observer
from launch.observe.status import STALE_S, Accuracy, PollResult, look, read_status, write_status
from launch.run_folder import claimed
from tests.unit.made_up_run import plan, process, report, status, step_row
from tests.world.command import leeway_here


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in runs/ that is at step 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    made = plan(tmp_path / "runs" / "mine")
    made.folder.create(made.config)
    observer = Observer(made)
    observer.phase("training")
    observer.event("restart", "actor.0 died \x1b[2J and is started again")
    processes = (process("actor.0", "actors"), process("actor.1", "actors", "lost: given up: it dies"))
    actors = [report("actor-0", num_running=5)]
    news = {"actors": actors, "processes": processes, "working": frozenset({"actor-0"}), "status": status()}
    observer.take_in(PollResult(**news, steps=[step_row(1, 10, 0.0)]))
    observer.polled()
    return made.folder, observer


def said(capsys, *arguments: str) -> tuple[int, str, str]:
    return leeway_here(capsys, "status", *arguments)


def test_a_run_that_lives_says_how_it_does_and_the_newest_is_meant(run, capsys):
    folder, observer = run
    with claimed(folder):
        observer.polled()
        result, out, _ = said(capsys)
    assert result == 0
    assert re.search(rf"training, for 0:00:\d\d; process {os.getpid()}", out), out
    assert "step 1/120" in out
    assert "pool actors: 1 of 2 actors work, 5 samples running" in out
    assert "actor-1 is lost: given up: it dies; see /runs/x/logs/actor.1.log" in out
    assert "actor.0 died \\x1b[2J and is started again" in out


def test_a_run_whose_command_is_gone_says_so_and_what_goes_on_with_it(run, capsys):
    folder, _ = run
    result, out, _ = said(capsys, "mine")
    assert result == 1
    assert f"the command (process {os.getpid()}) is gone since" in out
    assert f"nothing runs; `leeway resume {folder.root}` goes on" in out


@pytest.mark.parametrize("exit_status", [None, 1])
def test_a_run_that_another_command_is_just_going_on_with_is_not_gone(run, capsys, exit_status):
    folder, observer = run
    if exit_status is not None:
        observer.end("no actor is left", exit_status)
    write_status(folder.status, msgspec.structs.replace(read_status(folder.status), pid=2**22 + 1))
    with claimed(folder):
        result, out, _ = said(capsys, "mine")
        view = main(["top", "mine", "--once"])
    assert (result, view) == (0, 0)
    assert f"a command (process {os.getpid()}) is just going on with it; what follows is of before" in out
    assert "nothing runs" not in out
    assert f"a command (process {os.getpid()}) is just going on with it" in capsys.readouterr().out


@pytest.mark.parametrize(("age_s", "expected"), [(1.0, 0), (STALE_S + 5, 1)])
def test_a_command_on_another_host_is_gone_once_it_has_not_written_for_long(run, capsys, age_s, expected):
    folder, _ = run
    elsewhere = msgspec.structs.replace(read_status(folder.status), host="far-away", written_s=time.time() - age_s)
    write_status(folder.status, elsewhere)
    result, out, _ = said(capsys, str(folder.root))
    assert result == expected
    assert ("on far-away) is gone" in out) == bool(expected)


@pytest.mark.parametrize(
    ("text", "exit_status", "expected"), [("done", 0, 0), ("no actor is left", 1, 1), ("stopped", 130, 1)]
)
def test_a_run_that_is_over_says_how_it_ended(run, capsys, text, exit_status, expected):
    _, observer = run
    observer.end(text, exit_status)
    result, out, _ = said(capsys, "mine")
    assert result == expected
    assert f"with exit status {exit_status}: {text}" in out


@pytest.mark.parametrize("reasons", [{"lease expired": 3, "reward failed: f: KeyError": 5}, {}])
def test_it_says_which_share_of_the_samples_failed_and_why(run, capsys, reasons):
    _, observer = run
    ledger = {"issued": 100, "failed": sum(reasons.values()), "gap": 0}
    observer.take_in(PollResult(status=status(ledger=ledger, failed_by_reason=reasons)))
    observer.polled()
    _, out, _ = said(capsys, "mine")
    told = ["8 of 100 samples failed (8.0%): reward failed: f: KeyError (5); lease expired (3)"]
    assert [line for line in out.splitlines() if "samples failed" in line] == told[: len(reasons)]


def test_every_count_of_the_identity_is_in_it(run, capsys):
    _, observer = run
    states = dict(zip(COUNTS, (100, 1, 90, 4, 5, 10, 20, 30, 6, 7, 8, 9), strict=True))
    observer.take_in(PollResult(status=status(ledger={**states, "gap": 0})))
    observer.polled()
    _, out, _ = said(capsys, "mine")
    told = dict(pair.split(" ") for pair in re.search(r"samples: (.*)", out)[1].split(", "))
    assert {name: int(count) for name, count in told.items()} == {**states, "gap": 0}


def test_a_version_is_a_number_and_says_of_which_start_it_is_where_it_is_not_the_first():
    assert [str(PolicyVersion(start, 45)) for start in (0, 3)] == ["45", "45 (start 3)"]
    assert PolicyVersion.parse(PolicyVersion(3, 45).key) == (3, 45)


def test_as_json_it_is_the_file_and_whether_the_command_is_gone(run, capsys):
    folder, observer = run
    with claimed(folder):
        observer.polled()
        result, out, _ = said(capsys, "mine", "--json")
    document = json.loads(out)
    assert result == 0
    assert (document.pop("gone"), document.pop("resuming")) == ("", "")
    assert document == json.loads(folder.status.read_text())


def test_a_command_with_the_number_of_the_one_before_it_is_seen_to_resume_the_run(run, capsys):
    folder, observer = run
    observer.end("it failed", 1)
    written_s = json.loads(folder.status.read_text())["written_s"]
    with claimed(folder):  # by this process, which wrote the status too
        os.utime(folder.claim, (written_s - 1, written_s - 1))
        assert said(capsys, "mine")[0] == 1
        os.utime(folder.claim, (written_s + 1, written_s + 1))
        result, out, _ = said(capsys, "mine")
    assert (result, f"a command (process {os.getpid()}) is just going on with it" in out) == (0, True), out


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_what_a_live_run_says_of_times_is_right_after_the_time_of_day_was_set(run, capsys, monkeypatch, set_by_s):
    folder, observer = run
    with claimed(folder):
        observer.phase("training")
        time_of_day, written_s = time.time, folder.status.stat().st_mtime
        monkeypatch.setattr(time, "time", lambda: time_of_day() + set_by_s)
        if set_by_s > 0:  # the kernel stamps the next file of a live run by the new time
            os.utime(folder.status, (written_s + set_by_s, written_s + set_by_s))
        result, out, _ = said(capsys, "mine")
        seen_s = look(folder).now_s - read_status(folder.status).written_s
    assert (result, "going on with it" in out) == (0, False), out
    assert 0.0 <= seen_s < 60.0


def test_what_is_no_run_is_wrong_input(run, capsys, tmp_path, monkeypatch):
    folder, _ = run
    assert said(capsys, "yours")[0] == 2
    folder.status.unlink()
    result, _, err = said(capsys, "mine")
    assert result == 2
    assert err.startswith("leeway: ")
    assert "is not there" in err
    with claimed(folder):
        assert "only just begun" in said(capsys, "mine")[2]
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    result, _, err = said(capsys)
    assert (result, err) == (2, "leeway: there is no run in runs/; give the folder that `leeway train` named\n")
    assert main(["top"]) == 2


@pytest.mark.process
@pytest.mark.parametrize("lives", [True, False])
def test_a_reader_that_has_seen_enough_ends_it_without_a_word_and_changes_no_status(run, lives):
    folder, _ = run
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "launch.cli", "status", str(folder.root)]
    with claimed(folder) if lives else contextlib.nullcontext(), os.fdopen(writing, "wb") as nobody:
        # what is printed is kept back until the end, when the status is known
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, env=buffered, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0 if lives else 1, b"")


def test_an_accuracy_has_the_digits_that_say_something(run, capsys):
    folder, observer = run
    observer.evaluated(Accuracy(versions="12 (start 2)", greedy=0.123456789012345, sampled=None, num_problems=81))
    observer.polled()
    with claimed(folder):
        _, out, _ = said(capsys)
    assert "held-out accuracy at version 12 (start 2): greedy 0.123, sampled - (81 problems)" in out
