"""`leeway status` of live, finished and failed runs, and of runs whose launcher is gone."""

import contextlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from leeway.buffer.ledger import COUNTS
from leeway.common.staleness import PolicyVersion
from leeway.launch.cli import main
from leeway.launch.observe.observer import Observer
from leeway.launch.observe.status import STALE_S, Accuracy, PollResult, read_status, view_run, write_status
from leeway.launch.run_folder import claimed
from tests.unit.made_up_run import plan, process, report, status, step_row
from tests.world.command import leeway_here


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in runs/ at step 1."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    made = plan(tmp_path / "runs" / "mine")
    made.folder.create(made.config)
    observer = Observer(made)
    observer.phase("training")
    observer.event("restart", "actor.0 died \x1b[2J and is restarted")
    processes = (process("actor.0", "actors"), process("actor.1", "actors", "lost: given up: it dies"))
    actors = [report("actor-0", num_running=5)]
    poll = {"actors": actors, "processes": processes, "working": frozenset({"actor-0"}), "status": status()}
    observer.ingest(PollResult(**poll, steps=[step_row(1, 10, 0.0)]))
    observer.polled()
    return made.folder, observer


def leeway_status(capsys, *arguments: str) -> tuple[int, str, str]:
    return leeway_here(capsys, "status", *arguments)


def test_status_shows_a_live_run_and_defaults_to_the_newest(run, capsys):
    folder, observer = run
    with claimed(folder):
        observer.polled()
        result, out, _ = leeway_status(capsys)
    assert result == 0
    assert re.search(rf"training, for 0:\d\d; process {os.getpid()}", out), out
    assert "step 1/120" in out
    assert "pool actors: 1 of 2 actors running, 5 samples in flight" in out
    assert "actor-1 is lost: given up: it dies; see /runs/x/logs/actor.1.log" in out
    assert "actor.0 died \\x1b[2J and is restarted" in out


def test_status_of_a_run_without_a_launcher_names_the_command_to_resume_it(run, capsys):
    folder, _ = run
    result, out, _ = leeway_status(capsys, "mine")
    assert result == 1
    assert f"the launcher (pid {os.getpid()}) exited at" in out
    assert f"without a final status: run `leeway resume {folder.root}`" in out


@pytest.mark.parametrize("exit_status", [None, 1])
def test_a_run_that_is_being_resumed_has_a_launcher(run, capsys, exit_status):
    folder, observer = run
    if exit_status is not None:
        observer.end("no actor is left", exit_status)
    write_status(folder.status, msgspec.structs.replace(read_status(folder.status), pid=2**22 + 1))
    with claimed(folder):
        result, out, _ = leeway_status(capsys, "mine")
        view = main(["top", "mine", "--once"])
    assert (result, view) == (0, 0)
    assert f"a launcher (pid {os.getpid()}) is resuming the run; the lines below are from the earlier launch" in out
    assert "without a final status" not in out
    assert f"a launcher (pid {os.getpid()}) is resuming the run" in capsys.readouterr().out


@pytest.mark.parametrize(("age_s", "expected"), [(1.0, 0), (STALE_S + 5, 1)])
def test_a_launcher_on_another_host_is_gone_after_its_status_is_stale(run, capsys, age_s, expected):
    folder, _ = run
    elsewhere = msgspec.structs.replace(read_status(folder.status), host="far-away", written_s=time.time() - age_s)
    write_status(folder.status, elsewhere)
    result, out, _ = leeway_status(capsys, str(folder.root))
    assert result == expected
    assert ("on far-away) exited" in out) == bool(expected)


@pytest.mark.parametrize(
    ("text", "exit_status", "expected"), [("done", 0, 0), ("no actor is left", 1, 1), ("stopped", 130, 1)]
)
def test_status_of_a_finished_run_shows_how_it_ended(run, capsys, text, exit_status, expected):
    _, observer = run
    observer.end(text, exit_status)
    result, out, _ = leeway_status(capsys, "mine")
    assert result == expected
    assert f"with exit status {exit_status}: {text}" in out


@pytest.mark.parametrize("reasons", [{"lease expired": 3, "reward failed: f: KeyError": 5}, {}])
def test_status_shows_the_share_of_failed_samples_and_the_reasons(run, capsys, reasons):
    _, observer = run
    ledger = {"issued": 100, "failed": sum(reasons.values()), "gap": 0}
    observer.ingest(PollResult(status=status(ledger=ledger, failed_by_reason=reasons)))
    observer.polled()
    _, out, _ = leeway_status(capsys, "mine")
    expected = ["8 of 100 samples failed (8.0%): reward failed: f: KeyError (5); lease expired (3)"]
    assert [line for line in out.splitlines() if "samples failed" in line] == expected[: len(reasons)]


def test_status_shows_every_count_of_the_ledger(run, capsys):
    _, observer = run
    states = dict(zip(COUNTS, (100, 1, 90, 4, 5, 10, 20, 30, 6, 7, 8, 9), strict=True))
    observer.ingest(PollResult(status=status(ledger={**states, "gap": 0})))
    observer.polled()
    _, out, _ = leeway_status(capsys, "mine")
    counts = dict(pair.split(" ") for pair in re.search(r"samples: (.*)", out)[1].split(", "))
    assert {name: int(count) for name, count in counts.items()} == {**states, "gap": 0}


def test_the_text_of_a_version_includes_its_start_unless_that_is_0():
    assert [str(PolicyVersion(start, 45)) for start in (0, 3)] == ["45", "45 (start 3)"]
    assert PolicyVersion.parse(PolicyVersion(3, 45).key) == (3, 45)


def test_json_output_is_the_file_and_the_state_of_the_launcher(run, capsys):
    folder, observer = run
    with claimed(folder):
        observer.polled()
        result, out, _ = leeway_status(capsys, "mine", "--json")
    document = json.loads(out)
    assert result == 0
    assert (document.pop("gone"), document.pop("resuming")) == ("", "")
    assert document == json.loads(folder.status.read_text())


def test_a_resuming_launcher_with_the_pid_of_the_earlier_one_is_recognized(run, capsys):
    folder, observer = run
    observer.end("it failed", 1)
    written_s = json.loads(folder.status.read_text())["written_s"]
    with claimed(folder):  # the pid of the claim is the pid in the status
        os.utime(folder.claim, (written_s - 1, written_s - 1))
        assert leeway_status(capsys, "mine")[0] == 1
        os.utime(folder.claim, (written_s + 1, written_s + 1))
        result, out, _ = leeway_status(capsys, "mine")
    assert (result, f"a launcher (pid {os.getpid()}) is resuming the run" in out) == (0, True), out


@pytest.mark.parametrize("set_by_s", [-3600.0, 3600.0])
def test_times_of_a_live_run_are_right_after_the_time_of_day_was_set(run, capsys, monkeypatch, set_by_s):
    folder, observer = run
    with claimed(folder):
        observer.phase("training")
        time_of_day, written_s = time.time, folder.status.stat().st_mtime
        monkeypatch.setattr(time, "time", lambda: time_of_day() + set_by_s)
        if set_by_s > 0:  # the kernel sets the mtime of the next status from the new time
            os.utime(folder.status, (written_s + set_by_s, written_s + set_by_s))
        result, out, _ = leeway_status(capsys, "mine")
        seen_s = view_run(folder).now_s - read_status(folder.status).written_s
    assert (result, "is resuming the run" in out) == (0, False), out
    assert 0.0 <= seen_s < 60.0


def test_a_missing_run_is_wrong_input(run, capsys, tmp_path, monkeypatch):
    folder, _ = run
    assert leeway_status(capsys, "other")[0] == 2
    folder.status.unlink()
    result, _, err = leeway_status(capsys, "mine")
    assert result == 2
    assert err.startswith("leeway: ")
    assert "does not exist" in err
    with claimed(folder):
        assert "just started" in leeway_status(capsys, "mine")[2]
    monkeypatch.chdir(tmp_path / "runs" / "mine")
    result, _, err = leeway_status(capsys)
    assert (result, err) == (2, "leeway: runs/ contains no run: pass the run folder that `leeway train` printed\n")
    assert main(["top"]) == 2


@pytest.mark.process
@pytest.mark.parametrize("is_live", [True, False])
def test_a_closed_output_pipe_changes_neither_stderr_nor_the_exit_status(run, is_live):
    folder, _ = run
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "leeway", "status", str(folder.root)]
    with claimed(folder) if is_live else contextlib.nullcontext(), os.fdopen(writing, "wb") as closed:
        # with buffered output the write fails only at exit, after the status is set
        buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, env=buffered, stdout=closed, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0 if is_live else 1, b"")


def test_an_accuracy_has_three_digits(run, capsys):
    folder, observer = run
    observer.evaluated(Accuracy(versions="12 (start 2)", greedy=0.123456789012345, sampled=None, num_problems=81))
    observer.polled()
    with claimed(folder):
        _, out, _ = leeway_status(capsys)
    assert "held-out accuracy at version 12 (start 2): greedy 0.123, sampled - (81 problems)" in out


def test_ls_lists_the_runs_of_a_folder_with_state_steps_reward_and_accuracy(run, capsys, tmp_path):
    folder, observer = run
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.toml").touch()
    os.utime(folder.config, (1, 1))
    observer.evaluated(Accuracy(versions="0", greedy=0.625, sampled=None, num_problems=8))
    with claimed(folder):
        observer.polled()
        _, out, _ = leeway_here(capsys, "ls")
    head, mine, broken = out.splitlines()
    assert head.split() == ["run", "state", "steps", "reward", "accuracy"]
    assert mine.split() == ["mine", "training", "1/120", "-", "0.625"]
    assert broken.split() == ["broken", "no", "status"]
    assert " no end recorded " in leeway_here(capsys, "ls")[1]
    observer.end("done", 0)
    _, out, _ = leeway_here(capsys, "ls", str(tmp_path / "runs"))
    assert " finished " in out.splitlines()[1]
    status, _, error = leeway_here(capsys, "ls", "elsewhere")
    assert (status, error) == (2, "leeway: elsewhere is not a folder: pass the parent folder of the runs\n")


def test_logs_prints_the_last_lines_of_a_role_and_lists_the_logs_without_one(run, capsys):
    folder, _ = run
    for name in ("actor.0", "actor.1", "stage.0"):
        (folder.logs / f"{name}.log").write_text("".join(f"{name} line {i}\n" for i in range(100)))
    assert leeway_here(capsys, "logs", "mine")[1].split() == [
        str(folder.logs / f"{name}.log") for name in ("actor.0", "actor.1", "stage.0")
    ]
    _, out, _ = leeway_here(capsys, "logs", "mine", "actor", "--lines", "2")
    assert out.splitlines() == [
        *(f"==> {folder.logs}/actor.0.log <==", "actor.0 line 98", "actor.0 line 99"),
        *(f"==> {folder.logs}/actor.1.log <==", "actor.1 line 98", "actor.1 line 99"),
    ]
    assert len(leeway_here(capsys, "logs", "mine", "stage.0")[1].splitlines()) == 51
    status, _, error = leeway_here(capsys, "logs", "mine", "learner")
    assert (status, error) == (2, "leeway: the run mine has no log of 'learner'; it has actor.0, actor.1, stage.0\n")


def test_stop_reports_what_it_waits_for_until_the_run_has_ended(run, capsys, monkeypatch):
    folder, observer = run
    monkeypatch.setattr("leeway.launch.run_verbs.POLL_S", 0.0)
    signals, phases = [], iter(["exporting the model", ""])
    monkeypatch.setattr("os.kill", lambda pid, number: signals.append((pid, number)))
    with claimed(folder):
        observer.polled()
        status, out, error = leeway_here(capsys, "stop", "mine", "--timeout", "0")
        assert (status, out) == (1, "")
        assert error.startswith(f"leeway: {folder.root} has not ended within 0 s: ")
        assert "step 1/120" in error

        def go_on(seconds):
            if phase := next(phases):
                observer.phase(phase)
            else:
                observer.end("interrupted; ended with a checkpoint", 130)

        monkeypatch.setattr("leeway.launch.run_verbs.time.sleep", go_on)
        status, out, _ = leeway_here(capsys, "stop", "mine")
    assert signals == [(os.getpid(), signal.SIGINT)] * 2
    first, second, last = out.splitlines()
    assert (status, last) == (0, "mine: interrupted")
    assert first.startswith("waiting for mine to end: ")
    assert "exporting the model" in second
    assert leeway_here(capsys, "stop", "mine")[:2] == (0, "mine: interrupted\n")
    assert len(signals) == 2, "an ended run receives no signal"
    assert leeway_here(capsys, "stop", "other")[0] == 2


def test_the_version_is_that_of_the_package(capsys):
    assert leeway_here(capsys, "--version")[:2] == (0, f"leeway {importlib.metadata.version('leeway-rl')}\n")
