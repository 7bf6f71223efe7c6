"""Fixtures of the unit tests."""

import pytest

from tests.in_process_buffer import InProcessBuffer
from tests.unit.buffer_rules import facts


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
