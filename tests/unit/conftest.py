"""Fixtures of the unit tests, and what keeps them to themselves."""

import multiprocessing.process
import os
import subprocess
import sys

import pytest

from tests.world.buffer import InProcessBuffer, facts
from tests.world.command import leeway_here


@pytest.fixture(autouse=True, scope="session")
def others_go_first():
    """Beside these tests `make test` has a run with engines, which waits for what they need not."""
    os.nice(5)


@pytest.fixture(autouse=True)
def no_process_of_ours(request, monkeypatch):
    """A test that starts one says so, and `make unit` leaves it out: `pytest.mark.process`."""
    if request.node.get_closest_marker("process") is not None:
        return
    why = "a unit test starts a process of ours: mark it `process`, or let it live in tests/integration"
    start = subprocess.Popen.__init__

    def started(popen, args, *others, **options):
        program = str(args if isinstance(args, str) else next(iter(args)))
        assert program not in (sys.executable, "bash", "sh"), why
        start(popen, args, *others, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda _: pytest.fail(why))


@pytest.fixture
def make(tmp_path):
    made = []

    def build(config=None, **changes):
        made.append(InProcessBuffer(tmp_path / f"buffer-{len(made)}", facts(**changes), config))
        return made[-1]

    yield build
    for buffer in made:
        assert buffer.faults() == []
        assert buffer.status().ledger["gap"] == 0
        buffer.close()


@pytest.fixture
def leeway(capsys):
    """`leeway(...)`: status, lines and errors of `leeway buffer ...`."""

    def run(*arguments):
        status, out, errors = leeway_here(capsys, "buffer", *arguments)
        return status, out.splitlines(), errors

    return run
