"""Deltas are lossless, and a damaged delta is refused or fails the checksum."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from leeway.weight_sync import delta
from leeway.weight_sync.delta import decode_delta, encode_delta
from leeway.weight_sync.manifest import WeightsCorrupt, checksum_of

ITEM_BYTES = st.sampled_from([2, 4, 8])


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Reduce the block size, so that small examples have several blocks."""
    before, delta.BLOCK_BYTES = delta.BLOCK_BYTES, 1024
    yield
    delta.BLOCK_BYTES = before


@st.composite
def pairs(draw):
    """Draw (new, old, item bytes), from equal to entirely different, with dense and sparse changes."""
    item_bytes = draw(ITEM_BYTES)
    size = item_bytes * draw(st.integers(0, 700))
    old = draw(arrays.arrays(np.uint8, size, fill=st.integers(0, 255)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    change = generator.integers(1, 256, size, dtype=np.uint8)
    change[generator.random(size) >= draw(st.sampled_from([0.0, 0.002, 0.02, 0.3, 1.0]))] = 0
    if draw(st.booleans()):
        # in practice, only the low bits of a value change, which are in its first byte
        change[np.arange(size) % item_bytes > 0] = 0
    return (old ^ change).data, old.data, item_bytes


@settings(max_examples=400)
@given(pairs())
def test_decoding_inverts_encoding(pair):
    new, old, item_bytes = pair
    encoding, blob = encode_delta(new, old, item_bytes)
    assert bytes(decode_delta(encoding, memoryview(blob), old, item_bytes)) == bytes(new)
    assert (encoding == "same") == (bytes(new) == bytes(old))
    assert len(blob) <= len(new)


@settings(max_examples=200)
@given(pairs(), st.integers(0, 2**32 - 1))
def test_a_wrong_base_never_gives_the_right_tensor(pair, seed: int):
    new, old, item_bytes = pair
    encoding, blob = encode_delta(new, old, item_bytes)
    if encoding == "raw" or not len(old):
        return
    wrong = bytearray(old)
    wrong[seed % len(wrong)] ^= 1 + seed % 255
    assert checksum_of(decode_delta(encoding, memoryview(blob), memoryview(wrong), item_bytes)) != checksum_of(new)


@settings(max_examples=400)
@given(pairs(), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_a_cut_or_changed_blob_is_refused_or_decodes_to_the_right_size(pair, position: float, flip: int, cut):
    new, old, item_bytes = pair
    encoding, blob = encode_delta(new, old, item_bytes)
    if encoding != "xor":
        return
    spoiled = bytearray(blob)
    at = int(position * len(spoiled))
    if cut:
        with pytest.raises(WeightsCorrupt):
            decode_delta(encoding, memoryview(spoiled[:at]), old, item_bytes)
        return
    spoiled[at] ^= flip
    try:
        found = decode_delta(encoding, memoryview(spoiled), old, item_bytes)
    except WeightsCorrupt:
        return
    # the content may be wrong; its checksum detects the damage later
    assert len(found) == len(new)


@settings(max_examples=400)
@given(st.binary(max_size=200), st.sampled_from(["same", "xor", "raw"]), ITEM_BYTES, st.integers(0, 300))
def test_any_blob_is_refused_or_decodes_to_the_size_of_the_parent(blob, encoding, item_bytes, size):
    old = bytes(size)
    try:
        found = decode_delta(encoding, memoryview(blob), memoryview(old), item_bytes)
    except WeightsCorrupt:
        return
    assert len(found) == size
