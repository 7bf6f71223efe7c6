"""Fixtures of the unit tests."""

import pytest

from buffer import client
from tests.in_process_buffer import InProcessBuffer
from tests.unit.buffer_rules import facts


@pytest.fixture(autouse=True)
def quick_clients(monkeypatch):
    """Clients of a buffer send again sooner what is not answered."""
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 1.0)


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
        from launch.cli import main

        status = main(["buffer", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err

    return run
