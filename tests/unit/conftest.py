"""Fixtures of the unit tests. Only tests marked `process` may start a process of Leeway."""

import multiprocessing.process
import os
import subprocess
import sys

import pytest

from tests.world.buffer import InProcessBuffer, facts
from tests.world.command import leeway_here


@pytest.fixture(autouse=True, scope="session")
def low_priority():
    """Lower the process priority, so engines that `make test` runs in parallel get the cores first."""
    os.nice(5)


@pytest.fixture(autouse=True)
def no_leeway_process(request, monkeypatch):
    """Fail a test that starts a process of Leeway without `pytest.mark.process`; `make unit` skips marked tests."""
    if request.node.get_closest_marker("process") is not None:
        return
    why = "a unit test starts a process of Leeway: mark the test `process`, or move the test to tests/integration"
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
    """Return `leeway(...)`, which runs `leeway buffer ...` and returns exit status, lines of output, and errors."""

    def run(*arguments):
        status, out, errors = leeway_here(capsys, "buffer", *arguments)
        return status, out.splitlines(), errors

    return run
