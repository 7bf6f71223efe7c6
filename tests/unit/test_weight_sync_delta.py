"""Delta files are small if few weights changed, are exact, and use bounded memory for any header."""

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch

from leeway.weight_sync import publisher as publisher_file
from leeway.weight_sync.delta import decode_delta, encode_delta, rebuild_file
from leeway.weight_sync.manifest import Encoding, WeightsCorrupt, delta_name
from leeway.weight_sync.store import WeightStore
from tests.unit.published import PART, flip_last_byte, publisher_of, v

DELTA = delta_name(PART)
DTYPES = ("float32", "bfloat16")
HALF = "part-0.bfloat16.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    WeightStore(folder).note_remote_reader()
    return folder


def big(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": 0.05 * torch.randn(200, 300, generator=generator), "frozen": torch.ones(10_000), "b": torch.zeros(3)}


def nudged(tensors: dict[str, torch.Tensor], by: float = 1e-6) -> dict[str, torch.Tensor]:
    """Return the tensors after a small optimizer step: every weight changes, but only few in bfloat16."""
    return tensors | {"w": tensors["w"] + by * torch.sign(torch.sin(1e4 * tensors["w"]))}


def steps(num: int, by: float = 1e-6) -> list[dict[str, torch.Tensor]]:
    found = [big()]
    while len(found) < num:
        found.append(nudged(found[-1], by))
    return found


def publish_all(folder: Path, versions: list[dict[str, torch.Tensor]], **arguments) -> None:
    publisher = publisher_of(folder, **{"dtypes": DTYPES, "full_every": 10, "keep_versions": 50, **arguments})
    for version, tensors in enumerate(versions):
        publisher.publish(v(version), tensors)
    publisher.close()


def encodings(folder: Path, version: int, dtype: str) -> dict[str, Encoding | None]:
    manifest = WeightStore(folder).manifest(v(version))
    return {entry.name: entry.delta.encoding if entry.delta else None for entry in manifest.variant(dtype)}


def noise(num: int, seed: int) -> torch.Tensor:
    """Return values of all magnitudes, so two tensors differ even in their exponents."""
    bits = torch.randint(-(2**31), 2**31, (num,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int32).view(torch.float32).nan_to_num()


def deltas_of(folder: Path, version: int) -> set[str]:
    return {file.name for file in WeightStore(folder).manifest(v(version)).files if file.name.endswith(".delta")}


def rebuild(folder: Path, version: int, file: str, parent: int | None = None) -> bytes:
    """Rebuild a file of a version from its delta and the file of the previous version (or of `parent`)."""
    dtype = file.split(".")[1]
    parent_file = folder / v(version - 1 if parent is None else parent).key / file
    entries = WeightStore(folder).manifest(v(version)).variant(dtype)
    rebuild_file(entries, folder / v(version).key / delta_name(file), parent_file, folder / "out")
    return (folder / "out").read_bytes()


@pytest.mark.parametrize("file", [PART, HALF])
def test_a_file_rebuilt_from_a_delta_equals_the_published_file(folder: Path, file: str):
    publish_all(folder, steps(4))
    for version in (1, 2, 3):
        assert deltas_of(folder, version) == {DELTA, delta_name(HALF)}
        assert rebuild(folder, version, file) == (folder / f"0.{version}" / file).read_bytes()


def test_a_delta_is_much_smaller_if_few_weights_changed(folder: Path):
    publish_all(folder, steps(2))
    whole, delta = (folder / "0.1" / name for name in (HALF, delta_name(HALF)))
    changed = torch.ne(*(tensors["w"].bfloat16() for tensors in steps(2))).float().mean()
    assert 0.001 < changed < 0.02
    assert delta.stat().st_size < 0.02 * whole.stat().st_size
    assert delta.stat().st_size == WeightStore(folder).manifest(v(1)).size_of(delta.name)


def test_unchanged_tensors_take_no_bytes_and_an_unchanged_version_has_an_empty_delta(folder: Path):
    publish_all(folder, [big(), nudged(big()), nudged(big())])
    assert encodings(folder, 1, "bfloat16") == {"w": "xor", "frozen": "same", "b": "same"}
    assert encodings(folder, 2, "bfloat16") == dict.fromkeys(big(), "same")
    assert (folder / "0.2" / DELTA).stat().st_size == 0
    assert rebuild(folder, 2, PART) == (folder / "0.1" / PART).read_bytes()


def test_weights_that_all_changed_are_published_without_a_delta(folder: Path):
    publish_all(folder, [{"w": noise(10_000, seed)} for seed in range(2)])
    assert deltas_of(folder, 1) == set()
    assert encodings(folder, 1, "bfloat16") == {"w": None}
    assert not (folder / "0.1" / DELTA).exists()
    assert WeightStore(folder).manifest(v(1)).parent == "0.0"


def test_an_incompressible_tensor_is_not_retried_before_the_next_full_version(folder: Path, monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(
        publisher_file, "encode_delta", lambda new, *rest: (tried.append(len(new)), encode_delta(new, *rest))[1]
    )
    versions = [{"noise": noise(500, seed), "frozen": torch.ones(10_000)} for seed in range(7)]
    for version, tensors in enumerate(versions):
        tensors["frozen"][0] = version
    publish_all(folder, versions, full_every=4, dtypes=["float32"])
    # Versions 0 and 4 are full; a delta of the noise is tried in versions 1 and 5.
    assert [size for size in tried if size == 2000] == [2000] * 2
    for version in (1, 2, 3, 5, 6):
        assert encodings(folder, version, "float32") == {"noise": "raw", "frozen": "xor"}
        assert rebuild(folder, version, PART) == (folder / f"0.{version}" / PART).read_bytes()


def test_a_tensor_that_changes_less_later_gets_deltas_before_the_next_full_version(folder: Path, monkeypatch):
    tried: list[int] = []
    monkeypatch.setattr(publisher_file, "encode_delta", lambda *of: (tried.append(made[0]), encode_delta(*of))[1])
    made, publisher = [0], publisher_of(folder, full_every=100, dtypes=["float32"], keep_versions=50)
    WeightStore(folder).note_remote_reader()
    tensors = {"w": noise(5000, 0)}
    for version in range(13):
        made[0] = version
        tensors = {"w": noise(5000, version) if version < 5 else tensors["w"].clone()}
        tensors["w"][version] = version
        publisher.publish(v(version), tensors)
        publisher.flush(10)
    publisher.close()
    assert tried == [1, 10, 11, 12]
    assert [bool(deltas_of(folder, version)) for version in range(13)] == [False] * 10 + [True] * 3


def test_full_every_sets_the_versions_without_deltas(folder: Path):
    publish_all(folder, steps(7), full_every=3)
    assert [bool(deltas_of(folder, version)) for version in range(7)] == [False, True, True, False, True, True, False]


def test_no_deltas_are_made_without_remote_readers_or_if_every_version_is_full(tmp_path: Path, folder: Path):
    publish_all(tmp_path / "local", steps(2))
    assert deltas_of(tmp_path / "local", 1) == set()
    publish_all(folder, steps(2), full_every=1)
    assert deltas_of(folder, 1) == set()


def test_deltas_start_with_the_first_remote_reader(tmp_path: Path):
    folder = tmp_path / "weights"
    publisher = publisher_of(folder, dtypes=DTYPES, full_every=10)
    for version, tensors in enumerate(steps(4)):
        if version == 2:
            publisher.flush(10)
            WeightStore(folder).note_remote_reader()
        publisher.publish(v(version), tensors)
    publisher.close()
    assert [bool(deltas_of(folder, version)) for version in (1, 2, 3)] == [False, False, True]
    assert rebuild(folder, 3, PART) == (folder / "0.3" / PART).read_bytes()


def test_a_delta_from_a_superseded_parent_is_not_in_the_manifest(folder: Path):
    old, overtaken = steps(2)
    first = publisher_of(folder, dtypes=DTYPES, full_every=10)
    first.publish(v(0, incarnation=1), old)
    first.flush(10)
    other = publisher_of(folder, dtypes=DTYPES)
    other.publish(v(1, incarnation=1), big(3))
    other.close()
    first.publish(v(2, incarnation=1), overtaken)
    first.close()
    manifest = WeightStore(folder).manifest(v(2, incarnation=1))
    assert manifest.parent == "1.1"
    assert {entry.delta for entry in manifest.tensors} == {None}


def test_the_wrong_base_is_refused_by_name(folder: Path):
    publish_all(folder, steps(3))
    with pytest.raises(WeightsCorrupt, match=rf"{DELTA}: cannot rebuild tensor 'w' from .*0\.0.*wrong checksum"):
        rebuild(folder, 2, PART, parent=0)
    assert not (folder / "out").exists()
    assert list(folder.glob(".*.tmp")) == []


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("spoil", [flip_last_byte, _cut, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_corrupt_delta_is_refused_by_name_and_leaves_no_files(folder: Path, spoil: Callable[[Path], None]):
    publish_all(folder, steps(2))
    spoil(folder / "0.1" / DELTA)
    with pytest.raises(WeightsCorrupt, match=DELTA):
        rebuild(folder, 1, PART)
    assert not (folder / "out").exists()
    assert list(folder.glob(".*.tmp")) == []


def test_a_tensor_that_the_parent_or_the_delta_lacks_is_refused(folder: Path):
    publish_all(folder, steps(2))
    entries = WeightStore(folder).manifest(v(1)).variant("float32")
    strange = [msgspec.structs.replace(entry, name=f"{entry.name}2") for entry in entries]
    files = [folder / name for name in (f"0.1/{DELTA}", f"0.0/{PART}", "out")]
    with pytest.raises(WeightsCorrupt, match="tensor 'b2'"):
        rebuild_file(strange, *files)
    bare = [msgspec.structs.replace(entry, delta=None) for entry in entries]
    with pytest.raises(WeightsCorrupt, match="the manifest has no delta for the tensor"):
        rebuild_file(bare, *files)


def test_tensors_of_different_sizes_are_encoded_raw():
    encoding, blob = encode_delta(memoryview(bytes(8)), memoryview(bytes(12)), 4)
    assert (encoding, bytes(blob)) == ("raw", bytes(8))


def test_trailing_bytes_after_a_delta_are_refused():
    old = memoryview(bytes(1000))
    encoding, blob = encode_delta(memoryview(b"x" + bytes(999)), old, 2)
    assert encoding == "xor"
    with pytest.raises(WeightsCorrupt, match="1 bytes are left over"):
        decode_delta(encoding, memoryview(blob + b"x"), old, 2)


@pytest.mark.parametrize("kind", [2, 3])
def test_a_decompression_bomb_is_refused_before_it_allocates_memory(kind: int):
    bomb = pa.Codec("zstd").compress(bytes(256 * 2**20), asbytes=True)
    assert len(bomb) < 2**16
    old = bytes(4096)
    tracemalloc.start()
    before = pa.default_memory_pool().max_memory()
    for count in (0, 1, 2048, 2**32 - 1):
        blob = memoryview(struct.pack("<BII", kind, count, len(bomb)) + bomb)
        with pytest.raises(WeightsCorrupt):
            decode_delta("xor", blob, memoryview(old), 2)
    assert pa.default_memory_pool().max_memory() - before < 2**20
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_encoding_allocates_only_a_few_blocks():
    old = np.random.default_rng(0).integers(0, 2**16, 2**24, dtype=np.uint16)
    new = old.copy()
    new[::100] ^= 1
    views = [memoryview(array).cast("B") for array in (new, old)]
    tracemalloc.start()
    encoding, blob = encode_delta(*views, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert encoding == "xor"
    assert peak < 4 * len(blob) + 16 * 2**20
