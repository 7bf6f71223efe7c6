"""Stages on another machine than the weight service: uploads as full files and deltas, resumed and refused."""

from pathlib import Path

import msgspec
import pytest
import torch

from leeway.weight_sync.manifest import PublishFailed, TransferFailed, build_manifest, file_name
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.service import UploadReceiver
from leeway.weight_sync.store import WeightStore
from leeway.weight_sync.tensors import read_tensors
from tests.weights_by_hand import Machine, assert_holds, damage, make_part, publish, upload_sink, v, weights

WHOLE = file_name(0, "float32")
BOTH = ("float32", "bfloat16")


@pytest.fixture
def machine(tmp_path: Path):
    made = Machine(tmp_path)
    yield made
    made.close()


def test_a_remote_stage_uploads_only_deltas_and_the_service_rebuilds_full_files(machine: Machine):
    sink = upload_sink(machine)
    publish(sink, 0, BOTH)
    sent_whole = machine.service.requests["WriteRequest"]
    publish(sink, 1, BOTH, deltas=True)
    assert machine.service.requests["WriteRequest"] - sent_whole == 2 < sent_whole
    for dtype in BOTH:
        with Puller.of_folder(machine.folder, dtype).fetch(v(1)) as staged:
            assert_holds(staged, 1, dtype)


def test_unfinished_versions_of_a_killed_learner_are_removed_before_the_next_upload(machine: Machine):
    sink = upload_sink(machine)
    publish(sink, 0, BOTH)
    for name in ("0.1", "1.1"):
        (machine.folder / name).mkdir()
        (machine.folder / name / f".{WHOLE}.1000.upload").write_bytes(b"x")
    UploadReceiver(WeightStore(machine.folder)).write(v(0, 1), WHOLE, 0, 2, memoryview(b"x"))
    assert sorted(path.name for path in machine.folder.glob("[0-9]*")) == ["0.0", "1.0", "1.1"]


def test_only_files_with_deltas_are_uploaded_as_deltas(machine: Machine):
    sink = upload_sink(machine)
    publish(sink, 0, BOTH)
    part, files = make_part(0, v(1), weights(1), BOTH)
    smaller, changes = make_part(0, v(1), weights(1), ("float32",), old=weights(0), parent=v(0))
    part = msgspec.structs.replace(
        part,
        parent=smaller.parent,
        tensors=(*smaller.tensors, *(entry for entry in part.tensors if entry.dtype == "bfloat16")),
        files=(*smaller.files, *(file for file in part.files if "bfloat16" in file.name)),
    )
    sent = machine.service.requests["WriteRequest"]
    sink.write_part(part, {**files, **changes})
    num_chunks = -(-sum(map(len, files[file_name(0, "bfloat16")])) // 2**14)
    assert machine.service.requests["WriteRequest"] - sent == num_chunks + 1
    sink.commit(build_manifest(v(1), [part], sink.newest_manifest(), 0.0), 3)
    for dtype in BOTH:
        with Puller.of_folder(machine.folder, dtype).fetch(v(1)) as staged:
            assert_holds(staged, 1, dtype)


def test_a_remote_learner_publishes_for_remote_actors_in_every_dtype(machine: Machine):
    """The publisher is the real one, with two stages; its versions are uploaded and fetched as deltas."""
    tensors = [{f"{rank}.{name}": torch.from_numpy(w) for name, w in weights(0).items()} for rank in range(2)]
    publishers = [
        Publisher(upload_sink(machine, f"stage-{rank}"), rank, 2, BOTH, keep_versions=4, full_every=3)
        for rank in range(2)
    ]
    pullers = {dtype: machine.puller(dtype=dtype) for dtype in BOTH}
    for version in range(4):
        for publisher, own in zip(publishers, tensors, strict=True):
            own["0.w0" if "0.w0" in own else "1.w0"][version] += 1.0
            publisher.publish(v(version), own)
        for publisher in publishers:
            publisher.flush(30.0)
        for dtype, puller in pullers.items():
            assert puller.newest() == v(version)
            with puller.fetch(v(version)) as staged:
                found = read_tensors(WeightStore(staged.folder), staged.manifest, dtype)
                expected = {name: tensor.to(getattr(torch, dtype)) for own in tensors for name, tensor in own.items()}
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected)
    for publisher in publishers:
        publisher.close()
    deltas = {version: {name for name in files if "delta" in name} for version, files in machine.read_bytes().items()}
    assert {version: len(names) for version, names in deltas.items()} == {"0.0": 0, "0.1": 4, "0.2": 4, "0.3": 0}


def test_an_upload_with_unusable_deltas_is_repeated_in_full(machine: Machine):
    sink = upload_sink(machine)
    publish(sink, 0)
    damage(machine.folder / "0.0" / WHOLE)
    publish(sink, 1, deltas=True)
    with Puller.of_folder(machine.folder, "float32").fetch(v(1)) as staged:
        assert_holds(staged, 1)


def test_a_version_of_two_stages_is_committed_after_both_uploads(machine: Machine):
    sinks = [upload_sink(machine, f"stage-{rank}") for rank in range(2)]
    tensors = weights(0, 4)
    parts = []
    for rank, sink in enumerate(sinks):
        own = {f"{rank}.{name}": tensor for name, tensor in tensors.items()}
        part, files = make_part(rank, v(0), own, BOTH)
        assert sinks[0].part(v(0), rank) is None
        sink.write_part(part, files)
        found = sinks[0].part(v(0), rank)
        assert found is not None
        assert found.tensors == part.tensors
        parts.append(found)
        assert sinks[0].newest_manifest() is None
    sinks[0].commit(build_manifest(v(0), parts, None, 0.0), 3)
    assert sinks[1].newest_manifest() is not None
    with machine.puller(dtype="bfloat16").fetch(v(0)) as staged:
        assert len(staged.manifest.variant("bfloat16")) == 8


def test_a_version_is_not_committed_before_all_its_files_have_arrived(machine: Machine):
    sink = upload_sink(machine)
    part, _ = make_part(0, v(0), weights(0))
    with pytest.raises(TransferFailed, match="is missing"):
        sink.commit(build_manifest(v(0), [part], None, 0.0), 3)
    assert sink.newest_manifest() is None


def test_an_upload_resumes_after_the_service_was_killed(machine: Machine):
    part, files = make_part(0, v(0), weights(0))
    total = sum(map(len, files[WHOLE]))
    folder = machine.folder / "0.0"
    folder.mkdir()
    (folder / f".{WHOLE}.{total}.upload").write_bytes(b"".join(files[WHOLE])[: total - 1000])
    sink = upload_sink(machine)
    sink.write_part(part, files)
    assert machine.service.requests["WriteRequest"] == 1
    sink.commit(build_manifest(v(0), [part], None, 0.0), 3)
    sink.write_part(part, files)
    sink.commit(build_manifest(v(0), [part], sink.newest_manifest(), 1.0), 3)
    assert machine.service.requests["WriteRequest"] == 1
    with machine.puller().fetch(v(0)) as staged:
        assert_holds(staged, 0)


def test_a_corrupt_upload_is_not_committed_and_is_repeated(machine: Machine):
    part, files = make_part(0, v(0), weights(0))
    total = sum(map(len, files[WHOLE]))
    folder = machine.folder / "0.0"
    folder.mkdir()
    (folder / f".{WHOLE}.{total}.upload").write_bytes(b"".join(files[WHOLE]))
    damage(folder / f".{WHOLE}.{total}.upload")
    sink = upload_sink(machine)
    with pytest.raises(TransferFailed, match="must be uploaded again"):
        sink.write_part(part, files)
    assert sink.part(v(0), 0) is None
    sink.write_part(part, files)
    assert sink.part(v(0), 0) is not None


def test_a_stale_learner_cannot_upload(machine: Machine):
    sink = upload_sink(machine)
    publish(sink, 5, incarnation=1)
    part, files = make_part(0, v(6), weights(6))
    with pytest.raises(PublishFailed, match=r"version 6 cannot follow 5 \(start 1\)"):
        sink.write_part(part, files)


def test_a_full_disk_of_the_service_raises_enospc_in_the_stage(machine: Machine, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    sink = upload_sink(machine)
    part, files = make_part(0, v(0), weights(0))
    with monkeypatch.context() as patch:
        patch.setattr("leeway.weight_sync.service.os.pwrite", full)
        with pytest.raises(OSError, match="No space left") as error:
            sink.write_part(part, files)
        assert error.value.errno == 28
    sink.write_part(part, files)
