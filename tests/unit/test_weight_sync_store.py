"""The version folder: versions are committed atomically, and versions in use are not removed."""

import json
import time
from pathlib import Path

import msgspec
import pytest

from leeway.common.files import leftovers
from leeway.weight_sync.manifest import (
    MANIFEST_NAME,
    DeltaEntry,
    FileEntry,
    Manifest,
    Part,
    PublishFailed,
    TensorEntry,
    WeightsCorrupt,
    WeightsGone,
    build_manifest,
    chain_of,
    decode,
    delta_name,
    encode,
)
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore
from tests.unit.published import DTYPE, PART, publish, publisher_of, pull, read, same, v, weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def puller_of(folder: Path) -> Puller:
    return Puller.of_folder(folder, DTYPE)


def test_a_pulled_version_equals_the_published_one(folder: Path):
    publish(folder, v(3))
    with puller_of(folder).fetch(v(3)) as staged:
        assert staged.version == v(3)
        assert same(read(staged.folder, v(3)), weights(3))


@pytest.mark.parametrize("name", [PART, MANIFEST_NAME])
def test_a_flipped_byte_is_refused_by_name(folder: Path, name: str):
    publish(folder, v(0))
    path = folder / "0.0" / name
    data = bytearray(path.read_bytes())
    # in the manifest, change a digit of a checksum, so the JSON stays valid
    position = data.index(b'"checksum": "') + 14 if name == MANIFEST_NAME else len(data) - 1
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsCorrupt, match=name):
        pull(folder, v(0))


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_truncated_file_is_refused(folder: Path, cut: int):
    publish(folder, v(0))
    path = folder / "0.0" / PART
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(WeightsCorrupt, match=PART):
        pull(folder, v(0))


def test_a_missing_file_is_refused(folder: Path):
    publish(folder, v(0))
    (folder / "0.0" / PART).unlink()
    with pytest.raises(WeightsCorrupt, match=f"{PART} is missing"):
        pull(folder, v(0))


def test_tensors_of_another_version_are_refused(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / PART).write_bytes((folder / "0.0" / PART).read_bytes())
    with pytest.raises(WeightsCorrupt, match="the file was changed after it was published"):
        pull(folder, v(1))


def test_a_manifest_of_another_version_is_refused(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / MANIFEST_NAME).write_bytes((folder / "0.0" / MANIFEST_NAME).read_bytes())
    with pytest.raises(WeightsCorrupt, match=r"describes version 0, not 1"):
        puller_of(folder).fetch(v(1))


def test_a_manifest_of_a_newer_format_is_refused_with_its_format_version(folder: Path):
    publish(folder, v(0))
    path = folder / "0.0" / MANIFEST_NAME
    newer = json.loads(path.read_text()) | {"format_version": 99, "a_field_of_the_future": 1}
    path.write_text(json.dumps(newer))
    with pytest.raises(WeightsCorrupt, match="format version 99"):
        puller_of(folder).fetch(v(0))


def test_a_dtype_that_was_not_published_is_refused_by_name(folder: Path):
    publish(folder, v(0))
    with pytest.raises(WeightsCorrupt, match="was published in float32, not in bfloat16"):
        Puller.of_folder(folder, "bfloat16").fetch(v(0))


def test_a_version_without_a_manifest_does_not_exist(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / MANIFEST_NAME).unlink()
    assert WeightStore(folder).committed() == [v(0)]
    with pytest.raises(WeightsGone, match="version 1 is not"):
        puller_of(folder).fetch(v(1))


def test_an_empty_store_has_no_newest_version(folder: Path):
    assert puller_of(folder).newest() is None
    with pytest.raises(WeightsGone):
        puller_of(folder).fetch(v(0))


def test_a_corrupt_newest_pointer_is_ignored(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "NEWEST").write_bytes(b"\xff\x00seven")
    assert puller_of(folder).newest() == v(1)
    publish(folder, v(2))
    assert (folder / "NEWEST").read_text() == "0.2\n"


def test_the_next_learner_publishes_after_a_power_cut_damaged_the_newest_version(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / MANIFEST_NAME).write_bytes(b"\x00" * 100)
    with pytest.raises(WeightsCorrupt, match="manifest"):
        puller_of(folder).fetch(v(1))
    publish(folder, v(1, incarnation=1))
    with puller_of(folder).fetch(v(1, incarnation=1)) as staged:
        assert staged.manifest.parent is None


def test_unfinished_versions_of_a_killed_learner_are_removed_before_the_next_write(folder: Path, monkeypatch):
    publish(folder, v(0))
    for name in ("0.1", "1.1"):
        (folder / name).mkdir()
        (folder / name / f".{PART}.4711.tmp").write_bytes(b"x")
    seen = []
    monkeypatch.setattr("leeway.weight_sync.store.write_whole", lambda *_: seen.append(sorted(folder.glob("[0-9]*"))))
    sink = WeightStore(folder)
    sink.write_part(Part(0, "1.2", None, (), ()), {PART: [b"x"]})
    assert seen[0] == [folder / name for name in ("0.0", "1.1", "1.2")], "unfinished versions of this incarnation stay"
    sink.write_part(Part(0, "2.0", None, (), ()), {PART: [b"x"]})
    assert seen[-1] == [folder / "0.0", folder / "2.0"]


def test_a_failed_fetch_holds_no_lock(folder: Path):
    publish(folder, v(0))
    (folder / "0.0" / MANIFEST_NAME).write_bytes(b"{")
    with pytest.raises(WeightsCorrupt):
        puller_of(folder).fetch(v(0))
    publish(folder, v(1), keep_versions=1)
    assert WeightStore(folder).committed() == [v(1)]


def test_a_crash_between_parts_and_manifest_keeps_the_old_version_and_is_cleaned_up(folder: Path):
    publish(folder, v(0))
    publish(folder, v(1), num_stages=2)
    assert (folder / "0.1" / PART).exists()
    assert puller_of(folder).newest() == v(0)
    publish(folder, v(0, incarnation=1))
    assert not (folder / "0.1").exists()
    assert WeightStore(folder).committed() == [v(0), v(0, incarnation=1)]


def test_retention_keeps_the_newest_versions_and_those_in_use(folder: Path):
    publish(folder, v(0))
    staged = puller_of(folder).fetch(v(0))
    publish(folder, v(1), v(2), v(3), keep_versions=2)
    assert WeightStore(folder).committed() == [v(0), v(2), v(3)]
    read(folder, v(0))
    staged.close()
    publish(folder, v(4), keep_versions=2)
    assert WeightStore(folder).committed() == [v(3), v(4)]


def test_a_version_that_cannot_be_removed_is_reported_once_and_publishing_continues(folder: Path, monkeypatch):
    publish(folder, v(1), keep_versions=1)
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "0.1" and path.name == MANIFEST_NAME:
            raise PermissionError(1, "Operation not permitted")
        real(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        publish(folder, v(2), v(3), keep_versions=1)
    assert (len([path for path in leftovers if folder in path.parents]), WeightStore(folder).newest()) == (1, v(3))
    publish(folder, v(4), keep_versions=1)
    assert not (folder / "0.1").exists(), "the next publication removes the version"


def test_versions_increase_across_publishers(folder: Path):
    publish(folder, v(5, incarnation=1))
    zombie = publisher_of(folder)
    zombie.publish(v(9), weights())
    with pytest.raises(PublishFailed, match=r"9 cannot follow 5 \(start 1\)"):
        zombie.flush(10)
    assert puller_of(folder).newest() == v(5, incarnation=1)


def test_an_older_version_replayed_into_the_store_is_never_the_newest(folder: Path, tmp_path: Path):
    publish(folder, v(0), v(1))
    publish(tmp_path / "replayed", v(0))
    store = WeightStore(folder)
    with pytest.raises(PublishFailed, match=r"0 cannot follow 1"):
        store.commit(WeightStore(tmp_path / "replayed").manifest(v(0)), 3)
    assert store.newest() == v(1)


def part_of(value: str, *, rank: int = 0, shape: tuple[int, ...] = (2,), parent: str | None = None) -> Part:
    """Return a part with one tensor; with a parent, also its delta."""
    file = f"part-{rank}.float32.safetensors"
    delta = DeltaEntry("xor", 0, 5) if parent else None
    files = (FileEntry(file, 1000), *([FileEntry(delta_name(file), 5)] if parent else []))
    return Part(rank, "0.1", parent, (TensorEntry("w", DTYPE, shape, file, value, delta),), files)


def test_the_fingerprint_identifies_the_architecture_and_the_chain_identifies_the_history():
    first = build_manifest(v(0), [part_of("aa")], None, 0.0)
    second = build_manifest(v(1), [part_of("bb")], first, 0.0)
    orphan = build_manifest(v(1), [part_of("bb")], None, 0.0)
    wider = build_manifest(v(1), [part_of("bb", shape=(3,))], first, 0.0)
    assert first.fingerprint == second.fingerprint != wider.fingerprint
    assert second.parent == "0.0"
    assert len({first.chain, second.chain, orphan.chain}) == 3


def test_one_tensor_from_two_stages_is_refused():
    with pytest.raises(PublishFailed, match=r"'w' is in part-0.float32.safetensors and in part-1.float32.safetensors"):
        build_manifest(v(1), [part_of("aa"), part_of("aa", rank=1)], None, 0.0)


def test_a_delta_from_a_version_other_than_the_parent_is_dropped_at_commit():
    first = build_manifest(v(0), [part_of("aa")], None, 0.0)
    kept = build_manifest(v(1), [part_of("bb", parent="0.0")], first, 0.0)
    assert kept.tensors[0].delta == DeltaEntry("xor", 0, 5)
    assert {file.name for file in kept.files} == {PART, delta_name(PART)}
    for parent in (None, build_manifest(v(0, incarnation=1), [part_of("aa")], None, 0.0)):
        dropped = build_manifest(v(1, incarnation=2), [part_of("bb", parent="0.0")], parent, 0.0)
        assert dropped.tensors[0].delta is None
        assert [file.name for file in dropped.files] == [PART]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "../../etc/passwd"}, "is not a valid name of a weight file"),
        ({"name": "/etc/passwd"}, "is not a valid name of a weight file"),
        ({"name": ".hidden"}, "is not a valid name of a weight file"),
        ({"file": "elsewhere.safetensors"}, "is in the unlisted file elsewhere"),
        ({"dtype": "complex64"}, "unknown dtype 'complex64'"),
        ({"shape": (10**6,)}, "does not match the size of its file"),
        ({"shape": (-1, -1)}, "does not match the size of its file"),
        ({"delta": DeltaEntry("xor", 3, 5)}, "is outside its file"),
        ({"delta": DeltaEntry("xor", -1, 2)}, "is outside its file"),
    ],
)
def test_an_inconsistent_manifest_with_a_valid_checksum_is_refused(change: dict[str, object], message: str):
    manifest = build_manifest(v(1), [part_of("aa")], None, 0.0)
    entry = manifest.tensors[0]
    files = (*manifest.files, FileEntry(delta_name(PART), 5))
    if "name" in change:
        files = (FileEntry(str(change["name"]), 1000), *files)
    else:
        entry = msgspec.structs.replace(entry, **change)
    chain = chain_of("", [entry])
    spoiled = msgspec.structs.replace(manifest, tensors=(entry,), files=files, chain=chain)
    with pytest.raises(WeightsCorrupt, match=f"there: .*{message}"):
        decode(encode(spoiled), Manifest, "there")


def test_a_manifest_that_lacks_a_tensor_is_refused_by_its_chain():
    two = Part(0, "0.1", None, tuple(part_of(x).tensors[0] for x in ("aa",)), part_of("aa").files)
    manifest = build_manifest(v(1), [two, _renamed(part_of("bb", rank=1), "u")], None, 0.0)
    lacking = msgspec.structs.replace(manifest, tensors=manifest.tensors[:1])
    with pytest.raises(WeightsCorrupt, match="chain does not match the parent and the content"):
        decode(encode(lacking), Manifest, "there")


def _renamed(part: Part, name: str) -> Part:
    return msgspec.structs.replace(part, tensors=(msgspec.structs.replace(part.tensors[0], name=name),))


def test_a_tensor_that_the_file_lacks_is_refused_by_name(folder: Path, tmp_path: Path):
    publish(folder, v(0))
    lead = publisher_of(tmp_path / "other")
    lead.publish(v(0), {name: tensor for name, tensor in weights().items() if name != "norm"})
    lead.close()
    (folder / "0.0" / PART).write_bytes((tmp_path / "other" / "0.0" / PART).read_bytes())
    with pytest.raises(WeightsCorrupt, match=f"{PART}: tensor 'norm' is missing"):
        pull(folder, v(0))


def test_polling_for_the_newest_version_is_cheap(folder: Path):
    publish(folder, v(0))
    puller = puller_of(folder)
    started_s = time.process_time()
    for _ in range(200):
        puller.newest()
    assert (time.process_time() - started_s) / 200 < 0.002
