"""`leeway scale`: what it says, and with which exit status, of runs that live, are over or gone."""

import os
import threading
import time

import pytest

from launch.errors import ExitStatus
from launch.observe.observer import Observer
from launch.run_folder import Control, claimed
from tests.unit.made_up_run import plan
from tests.world.command import leeway_here


@pytest.fixture
def run(tmp_path):
    """A run whose folder is there, and which nobody works on; (its folder, who writes its status)."""
    made = plan(tmp_path / "mine")
    made.folder.create(made.config)
    return made.folder, Observer(made)


@pytest.fixture
def living(run):
    """A run whose command lives, and answers as the pools do."""
    folder, _ = run
    ready, stop = threading.Event(), threading.Event()

    def scale(question) -> str:
        if question["pool"] != "actors":
            raise ValueError(f"there is no pool '{question['pool']}'; the pools of actors are actors")
        return f"to have {question['count']}"

    def serve() -> None:
        control = Control(folder.control)
        ready.set()
        while not stop.wait(0.01):
            control.answer({"scale": scale})

    with claimed(folder):
        thread = threading.Thread(target=serve)
        thread.start()
        assert ready.wait(60), "the run does not begin to answer"
        yield folder
        stop.set()
        thread.join()


def said(capsys, *arguments: object) -> tuple[int, str, str]:
    return leeway_here(capsys, "scale", *arguments)


def test_a_run_that_lives_says_what_it_begins(living, capsys):
    assert said(capsys, living.root, "--count", 3) == (ExitStatus.OK, "to have 3\n", "")


def test_what_the_run_refuses_is_wrong_input(living, capsys):
    status, _, error = said(capsys, living.root, "--pool", "big", "--count", 3)
    assert status == ExitStatus.WRONG_INPUT
    assert error == "leeway: there is no pool 'big'; the pools of actors are actors\n"


@pytest.mark.parametrize("count", ["-1", "1025", "two"])
def test_a_count_that_can_only_be_a_slip_is_refused_before_anybody_is_asked(run, capsys, count):
    status, _, error = said(capsys, run[0].root, f"--count={count}")
    assert status == ExitStatus.WRONG_INPUT
    assert f"'--count': expected an integer between 0 and 1,024, got '{count}'" in error
    assert not run[0].control.exists()


def test_a_run_that_nobody_works_on_is_named_at_once(run, capsys):
    folder, observer = run
    Control(folder.control)
    began_s = time.monotonic()
    unseen = said(capsys, folder.root, "--count", 3)
    observer.phase("training")
    gone = said(capsys, folder.root, "--count", 3)
    observer.end("done", ExitStatus.OK)
    over = said(capsys, folder.root, "--count", 3)
    assert time.monotonic() - began_s < 60
    assert [status for status, _, _ in (unseen, gone, over)] == [ExitStatus.FAILED] * 3
    assert f"no command works on the run {folder.root}" in unseen[2]
    assert f"the command (process {os.getpid()}) is gone since" in gone[2]
    assert f"the run {folder.root} is over (done); `leeway resume" in over[2]
    assert list(folder.control.iterdir()) == []
