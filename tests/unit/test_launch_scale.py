"""`leeway scale`: its output and exit status for live, finished and dead runs."""

import os
import threading
import time

import pytest

from leeway.launch.errors import ExitStatus
from leeway.launch.observe.observer import Observer
from leeway.launch.run_folder import Control, claimed
from tests.unit.made_up_run import plan
from tests.world.command import leeway_here


@pytest.fixture
def run(tmp_path):
    """The folder and the observer of a run without a launcher."""
    made = plan(tmp_path / "mine")
    made.folder.create(made.config)
    return made.folder, Observer(made)


@pytest.fixture
def live(run):
    """A run whose launcher is alive and answers requests to scale as the actor pools do."""
    folder, _ = run
    ready, stop = threading.Event(), threading.Event()

    def scale(request) -> str:
        if request["pool"] != "actors":
            raise ValueError(f"unknown pool '{request['pool']}': use one of actors")
        return f"scales to {request['count']}"

    def serve() -> None:
        control = Control(folder.control)
        ready.set()
        while not stop.wait(0.01):
            control.answer({"scale": scale})

    with claimed(folder):
        thread = threading.Thread(target=serve)
        thread.start()
        assert ready.wait(60), "the run did not start to answer"
        yield folder
        stop.set()
        thread.join()


def leeway_scale(capsys, *arguments: object) -> tuple[int, str, str]:
    return leeway_here(capsys, "scale", *arguments)


def test_a_live_run_reports_the_change(live, capsys):
    assert leeway_scale(capsys, live.root, "--count", 3) == (ExitStatus.OK, "scales to 3\n", "")


def test_a_request_that_the_run_refuses_is_wrong_input(live, capsys):
    status, _, error = leeway_scale(capsys, live.root, "--pool", "big", "--count", 3)
    assert status == ExitStatus.WRONG_INPUT
    assert error == "leeway: unknown pool 'big': use one of actors\n"


@pytest.mark.parametrize("count", ["-1", "1025", "two"])
def test_a_count_out_of_range_is_refused_without_a_request(run, capsys, count):
    status, _, error = leeway_scale(capsys, run[0].root, f"--count={count}")
    assert status == ExitStatus.WRONG_INPUT
    assert f"'--count': expected an integer between 0 and 1,024, got '{count}'" in error
    assert not run[0].control.exists()


def test_a_run_without_a_launcher_is_reported_at_once(run, capsys):
    folder, observer = run
    Control(folder.control)
    began_s = time.monotonic()
    unseen = leeway_scale(capsys, folder.root, "--count", 3)
    observer.phase("training")
    gone = leeway_scale(capsys, folder.root, "--count", 3)
    observer.end("done", ExitStatus.OK)
    over = leeway_scale(capsys, folder.root, "--count", 3)
    assert time.monotonic() - began_s < 60
    assert [status for status, _, _ in (unseen, gone, over)] == [ExitStatus.FAILED] * 3
    assert f"the run {folder.root} has no live launcher" in unseen[2]
    assert f"the launcher (pid {os.getpid()}) exited at" in gone[2]
    assert f"the run {folder.root} has ended (done): run `leeway resume" in over[2]
    assert list(folder.control.iterdir()) == []
