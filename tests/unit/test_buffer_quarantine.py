"""What was quarantined is looked at as what it is: bytes from anybody, which may be made to do harm."""

import random

import pyarrow as pa

from buffer import protocol as p
from buffer import schema
from buffer.nonsense import MAX_QUARANTINED_BYTES, SetAside
from buffer.offline.inspect import Quarantined, read_row
from launch.buffer_cli import quarantine_line, quarantined_in_full
from tests.world.buffer import block_of, make_trajectory

LEASE = p.Lease(1, 1, 1, 0, [0, 1, 2, 3], 0, 60.0)
NO_ROW = "  no row can be read from it; its first bytes:"


def one_row(**columns):
    """A batch of one trajectory, with some columns replaced."""
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    arrays = [pa.array(columns[f.name], f.type) if f.name in columns else batch.column(f.name) for f in batch.schema]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def quarantined(reason, data):
    return Quarantined(1, SetAside(reason, "", data))


def shown(data):
    return list(quarantined_in_full(quarantined("body", data[:MAX_QUARANTINED_BYTES])))


def test_a_row_is_read():
    data = block_of(schema.to_batch([make_trajectory(LEASE, 2, seq=0)], "r"))
    assert read_row(data)["sample_index"] == 2
    assert "  actor: actor-0" in shown(data)


def test_a_message_is_shown_as_bytes():
    for data in (schema.encode([make_trajectory(LEASE, 0, seq=0)], "r"), one_row().serialize().to_pybytes()):
        assert shown(bytes(data))[1] == NO_ROW


def test_values_that_are_missing_are_shown_as_such():
    parts = [[{"name": "exact", "value": None}]]
    lines = shown(block_of(one_row(reward=[None], reward_parts=parts, reference_logprobs=[None])))
    assert lines[0].startswith("quarantined 1: body")
    for line in ("  reward: None", "  reward_parts: [{'name': 'exact', 'value': None}]", "  reference_logprobs: None"):
        assert line in lines


def test_long_values_and_reasons_are_cut_and_say_so():
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    long = block_of(one_row(columns=["x" * 60_000]))
    assert "and 58000 more characters" in " ".join(shown(long))
    lines = list(quarantined_in_full(quarantined("r\x1b" * 10_000, block_of(batch))))
    assert max(map(len, lines)) < 500
    assert "\x1b" not in lines[0]
    assert len(quarantine_line(quarantined("r" * 10_000, b""))) < 500


def test_no_bytes_make_it_fail():
    batch = schema.to_batch([make_trajectory(LEASE, 0, seq=0)], "r")
    bodies = [block_of(batch), batch.serialize().to_pybytes(), bytes(schema.encode([], "r"))]
    chance = random.Random(1)
    for turn in range(1500):
        data = bytearray(bodies[turn % 3])
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(8, len(data))] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        assert shown(bytes(data[: chance.randrange(len(data))] if turn % 4 == 0 else data))
