import dataclasses
import struct
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from leeway.buffer import protocol as p
from leeway.buffer import rows, schema
from leeway.buffer.config import MAX_GROUP_SIZE
from leeway.buffer.errors import BadBody
from leeway.buffer.ingest import faults
from leeway.buffer.rows import SCHEMA_VERSION, bounds_of
from leeway.buffer.schema import VersionSpan
from leeway.common.run import RunFacts
from leeway.common.staleness import PolicyVersion, StalenessConfig
from tests.trajectories import decode, from_batch
from tests.world.buffer import make_trajectory

FACTS = RunFacts(
    run_id="r",
    seed=0,
    num_prompts=10,
    group_size=4,
    groups_per_step=2,
    vocab_size=64,
    max_tokens=16,
    staleness=StalenessConfig(),
)
LEASE = p.Lease(1, 1, 1, 3, [0, 1, 2, 3], 0, 60.0)
KNOWN = {0: 5}


def row(**changes):
    return dataclasses.replace(make_trajectory(LEASE, 0, seq=0), **changes)


def test_every_field_survives_the_wire():
    rich = row(
        spans=(VersionSpan(PolicyVersion(0, 3), 0, 1), VersionSpan(PolicyVersion(1, 2), 1, 4)),
        reward=None,
        reward_parts={"format": 0.5, "exact": None},
        columns={"question": "é5=", "nested": {"a": [1, None, "x"]}},
        reference_logprobs=np.array([-1, -2, -3, -4], np.float32),
        seq=2**40,
    )
    for sent, got in zip([row(), rich], decode(schema.encode([row(), rich], "r")), strict=True):
        for field in dataclasses.fields(sent):
            before, after = getattr(sent, field.name), getattr(got, field.name)
            if isinstance(before, np.ndarray):
                assert after.dtype == before.dtype
                np.testing.assert_array_equal(after, before)
            else:
                assert after == before, field.name


def test_records_are_joined_with_the_scores_that_were_written_later():
    batch = schema.to_batch([row(seq=1), row(seq=2)], "r")
    score = np.array([-1, -2, -3, -4], np.float32)
    as_bytes = rows.RowBytes(batch)
    blocks = [b"".join(as_bytes.block([i], [7 + i])) for i in range(2)]
    joined = from_batch(schema.join_rows(blocks, [8, 7], [score, None]))
    assert [each.seq for each in joined] == [2, 1]
    np.testing.assert_array_equal(joined[0].reference_logprobs, score)
    assert joined[1].reference_logprobs is None


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_body_is_rejected_before_it_is_decompressed(codec):
    batch = schema.to_batch([row()] * 8, "r")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_batch(batch)
    with pytest.raises(BadBody, match="compressed"):
        decode(sink.getvalue().to_pybytes())


def test_another_schema_nulls_and_garbage_are_rejected():
    batch = schema.to_batch([row()], "r")
    older = batch.replace_schema_metadata({"schema_version": "0"})
    with pytest.raises(BadBody, match="schema_version"):
        decode(schema.write_stream(older))
    tokens = pa.array([[1, None, 2]], pa.list_(pa.int32()))
    index = batch.schema.get_field_index("token_ids")
    with pytest.raises(BadBody, match="token_ids"):
        decode(schema.write_stream(batch.set_column(index, batch.schema.field(index), tokens)))
    good = schema.encode([row()], "r")
    for garbage in (b"", b"x" * 100, good[: len(good) // 2]):
        with pytest.raises(BadBody):
            decode(garbage)


def test_mutated_bodies_are_read_or_rejected_but_never_crash():
    good = schema.encode([row(), row(seq=1, reward=None)], "r")
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(1500):
        mutant = bytearray(good)
        for at in random.integers(0, len(good), random.integers(1, 4)):
            mutant[at] = random.integers(0, 256)
        try:
            faults(schema.read_stream(bytes(mutant)), FACTS, KNOWN)
            outcomes.add("read")
        except BadBody:
            outcomes.add("rejected")
    assert outcomes == {"read", "rejected"}


def as_arrow_0_17(message):
    """Return the message with a header of format version 4, which declares its compression as metadata."""
    old = bytearray(message.metadata.to_pybytes())

    def u32(at):
        return struct.unpack_from("<I", old, at)[0]

    def entry(table, position):
        """Return the position of the vtable entry of a field."""
        return table - struct.unpack_from("<i", old, table)[0] + 4 + 2 * position

    root = u32(0)
    header = root + struct.unpack_from("<H", old, entry(root, 2))[0]
    batch = header + u32(header)
    struct.pack_into("<H", old, entry(batch, 3), 0)  # the batch itself declares no compression
    key = b"ARROW:experimental_compression"
    new = bytearray(160)  # a new Message table, followed by the old batch
    struct.pack_into("<I", new, 0, 24)
    struct.pack_into("<7H", new, 8, 14, 24, 12, 14, 4, 16, 8)
    struct.pack_into("<iIIhB", new, 24, 16, len(new) + batch - 28, 48 - 32, 3, 3)
    struct.pack_into("<q", new, 40, message.body.size)
    struct.pack_into("<II4HiII", new, 48, 1, 64 - 52, 8, 12, 4, 8, 8, 80 - 68, 120 - 72)
    struct.pack_into(f"<I{len(key)}s", new, 80, len(key), key)
    struct.pack_into("<I4s", new, 120, 4, b"zstd")
    metadata = bytes(new + old)
    metadata += bytes(-len(metadata) % 8)
    return b"\xff\xff\xff\xff" + struct.pack("<I", len(metadata)) + metadata + message.body.to_pybytes()


def test_a_body_that_declares_its_compression_as_in_arrow_0_17_is_rejected():
    batch, sink = schema.to_batch([row(columns={"text": "x" * 100_000})], "r"), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    first = reader.read_next_message().serialize().to_pybytes()
    forged = as_arrow_0_17(reader.read_next_message())
    read = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(forged)), schema.SCHEMA)
    assert "x" * 100_000 in read.column("columns")[0].as_py(), "Arrow would decompress the forged message"
    with pytest.raises(BadBody, match="compressed"):
        decode(first + forged)


def test_a_body_may_have_any_number_of_rows_unless_its_reader_sets_a_limit():
    body = schema.encode([row()] * 10_000, "r")
    assert len(decode(body)) == 10_000
    scores = schema.encode_scores(range(10_000), [np.zeros(1, np.float32)] * 10_000)
    assert schema.read_stream(scores, schema.SCORES).num_rows == 10_000
    with pytest.raises(BadBody, match="10000 rows in one message; at most 4096"):
        schema.read_stream(body, max_rows=4096)


def test_a_flipped_bit_in_a_header_is_detected():
    header = p.encode(1, p.Published(0, 7))
    assert p.decode(header).message == p.Published(0, 7)
    for bit in range(8 * len(header)):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(p.msgspec.DecodeError):
            p.decode(flipped)


BAD = {
    "token outside the vocabulary": {"token_ids": np.array([1, 2, 3, 4, 5, 64, 6], np.int32)},
    "logprob not finite": {"logprobs": np.array([-1, np.nan, -1, -1], np.float32)},
    "logprob above 0": {"logprobs": np.array([-1, -1, 0.01, -1], np.float32)},
    "logprobs and completion differ in length": {"logprobs": np.zeros(3, np.float32)},
    "prompt_length out of range": {"prompt_length": 0},
    "empty completion": {"prompt_length": 7, "logprobs": np.zeros(0, np.float32), "spans": ()},
    "longer than max_tokens": {"token_ids": np.zeros(17, np.int32)},
    "reward not finite": {"reward": float("inf")},
    "sample_index out of range": {"sample_index": MAX_GROUP_SIZE},
    "prompt_id out of range": {"prompt_id": -1},
    "finish_reason": {"finish_reason": "abort"},
    "reference_logprobs": {"reference_logprobs": np.zeros(3, np.float32)},
    "wall time": {"finished_s": float("nan")},
    "version that was never published": {"spans": (VersionSpan(PolicyVersion(0, 6), 0, 4),)},
    "versions fall within a completion": {
        "spans": (VersionSpan(PolicyVersion(0, 3), 0, 2), VersionSpan(PolicyVersion(0, 2), 2, 4))
    },
    "spans do not cover the completion": {"spans": (VersionSpan(PolicyVersion(0, 0), 0, 3),)},
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_reported_and_its_neighbours_pass(reason):
    batch = schema.to_batch([row(), row(**BAD[reason]), row()], "r")
    assert faults(batch, FACTS, KNOWN) == {1: reason}


def test_a_row_of_another_run_is_reported():
    assert faults(schema.to_batch([row()], "other"), FACTS, KNOWN) == {0: "another run"}


def arrow_stream(*batches, schema=schema.SCHEMA, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_a_body_must_be_one_batch_in_current_framing_with_small_metadata():
    batch = schema.to_batch([row()], "r")
    assert schema.read_stream(arrow_stream(batch)).num_rows == 1
    with pytest.raises(BadBody, match="it has data after its record batch"):
        schema.read_stream(arrow_stream(batch, batch))
    with pytest.raises(BadBody, match="does not begin"):
        schema.read_stream(arrow_stream(batch, use_legacy_format=True))
    stuffed = schema.SCHEMA.with_metadata({"schema_version": str(SCHEMA_VERSION), "x": "y" * 2**17})
    with pytest.raises(BadBody, match="its schema has"):
        schema.read_stream(arrow_stream(batch.replace_schema_metadata(stuffed.metadata), schema=stuffed))


def test_a_json_bomb_creates_no_objects_and_invalid_json_is_reported():
    bomb = '{"a":[' + ",".join(["[]"] * 1_000_000) + "]}"
    tables = {name: schema.to_batch([row(), row()], "r").column(name) for name in schema.SCHEMA.names}
    tables["columns"] = pa.array([bomb, '{"a":[}'])
    batch = pa.RecordBatch.from_arrays(list(tables.values()), schema=schema.SCHEMA)
    tracemalloc.start()
    found = faults(batch, FACTS, KNOWN)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == {1: "columns are not JSON"}
    assert peak < 3 * len(bomb)


def test_offsets_beyond_32_bits_are_rejected_and_never_wrap():
    assert bounds_of([2**30, 2**30 - 1]).tolist() == [0, 2**30, 2**31 - 1]
    with pytest.raises(ValueError, match="has 3221225472 items"):
        bounds_of([2**30] * 3)
