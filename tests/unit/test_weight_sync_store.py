"""Publishing and pulling: a version is there whole or not at all, and no reader loses what it reads."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from weight_sync.manifest import PublishFailed, WeightsCorrupt, WeightsGone, build_manifest, entry_of
from weight_sync.publisher import Publisher
from weight_sync.puller import Puller
from weight_sync.staleness import PolicyVersion
from weight_sync.store import MANIFEST_NAME, WeightStore


def v(version: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, version)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(7, 3, generator=generator),
        "norm": torch.randn(3, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(float(seed)),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def publish(folder: Path, *versions: PolicyVersion, keep_versions: int = 3) -> None:
    publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=keep_versions)
    for version in versions:
        publisher.publish(version, weights(version.version))
    publisher.close()


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)


def test_what_was_published_is_what_is_pulled(folder: Path):
    publish(folder, v(3))
    with Puller(folder).fetch(v(3)) as staged:
        pulled = {entry.name: tensor for entry, tensor in WeightStore(folder).tensors(staged.manifest)}
    expected = weights(3)
    assert pulled.keys() == expected.keys()
    assert all(pulled[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(pulled[name], expected[name]) for name in expected)


def test_tensors_may_change_once_publish_has_returned(folder: Path):
    publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=1)
    tensors = weights(0)
    publisher.publish(v(0), tensors)
    tensors["embed"].zero_()
    publisher.close()
    manifest = WeightStore(folder).verify(v(0))
    assert dict((e.name, t) for e, t in WeightStore(folder).tensors(manifest))["embed"].equal(weights(0)["embed"])


@pytest.mark.parametrize("name", ["part-0.safetensors", MANIFEST_NAME])
def test_a_flipped_byte_is_refused_by_name(folder: Path, name: str):
    publish(folder, v(0))
    path = folder / "0.0" / name
    data = bytearray(path.read_bytes())
    # in the manifest a digit of a checksum: JSON stays valid
    position = data.index(b'"checksum": "') + 14 if name == MANIFEST_NAME else len(data) - 1
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsCorrupt, match=name):
        Puller(folder).fetch(v(0))


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_cut_file_is_refused(folder: Path, cut: int):
    publish(folder, v(0))
    path = folder / "0.0" / "part-0.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(WeightsCorrupt, match=r"part-0.safetensors"):
        Puller(folder).fetch(v(0))


def test_tensors_of_another_version_are_refused(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / "part-0.safetensors").write_bytes((folder / "0.0" / "part-0.safetensors").read_bytes())
    with pytest.raises(WeightsCorrupt, match="the file was changed after it was published"):
        Puller(folder).fetch(v(1))


def test_a_manifest_of_another_version_is_refused(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / MANIFEST_NAME).write_bytes((folder / "0.0" / MANIFEST_NAME).read_bytes())
    with pytest.raises(WeightsCorrupt, match=r"describes version 0\.0, not 0\.1"):
        Puller(folder).fetch(v(1))


def test_a_manifest_of_a_newer_format_says_so(folder: Path):
    publish(folder, v(0))
    path = folder / "0.0" / MANIFEST_NAME
    newer = json.loads(path.read_text()) | {"format_version": 99, "a_field_of_the_future": 1}
    path.write_text(json.dumps(newer))
    with pytest.raises(WeightsCorrupt, match="format version 99"):
        Puller(folder).fetch(v(0))


def test_a_version_without_a_manifest_does_not_exist(folder: Path):
    publish(folder, v(0), v(1))
    (folder / "0.1" / MANIFEST_NAME).unlink()
    assert WeightStore(folder).committed() == [v(0)]
    with pytest.raises(WeightsGone, match=r"0\.1"):
        Puller(folder).fetch(v(1))


def test_an_empty_store_has_no_newest_version(folder: Path):
    assert Puller(folder).newest() is None
    with pytest.raises(WeightsGone):
        Puller(folder).fetch(v(0))


def test_a_spoiled_pointer_is_an_error_that_names_the_file(folder: Path):
    publish(folder, v(0))
    (folder / "NEWEST").write_text("seven")
    with pytest.raises(WeightsCorrupt, match=r"NEWEST: 'seven'"):
        Puller(folder).newest()


def test_a_failed_fetch_holds_no_lock(folder: Path):
    publish(folder, v(0))
    flip_last_byte(folder / "0.0" / "part-0.safetensors")
    with pytest.raises(WeightsCorrupt):
        Puller(folder).fetch(v(0))
    publish(folder, v(1), keep_versions=1)
    assert WeightStore(folder).committed() == [v(1)]


def test_a_crash_between_parts_and_manifest_leaves_the_old_version_and_is_cleaned_up_later(folder: Path):
    publish(folder, v(0))
    crashed = Publisher(folder, rank=0, num_stages=2, keep_versions=3)
    crashed.publish(v(1), weights(1))
    crashed.close()
    assert (folder / "0.1" / "part-0.safetensors").exists()
    assert Puller(folder).newest() == v(0)
    publish(folder, v(0, incarnation=1))
    assert not (folder / "0.1").exists()
    assert WeightStore(folder).committed() == [v(0), v(0, incarnation=1)]


def test_retention_keeps_so_many_versions_and_every_one_being_read(folder: Path):
    publish(folder, v(0))
    staged = Puller(folder).fetch(v(0))
    publish(folder, v(1), v(2), v(3), keep_versions=2)
    assert WeightStore(folder).committed() == [v(0), v(2), v(3)]
    assert WeightStore(folder).verify(v(0)).policy == v(0)
    staged.close()
    publish(folder, v(4), keep_versions=2)
    assert WeightStore(folder).committed() == [v(3), v(4)]


def test_a_version_of_all_stages_is_committed_once_the_last_part_is_there(folder: Path):
    stages = [Publisher(folder, rank=rank, num_stages=3, keep_versions=2) for rank in range(3)]
    committed: list[PolicyVersion] = []
    for rank in (2, 0):
        stages[rank].publish(v(0), {f"layer{rank}": torch.ones(rank + 1)}, on_committed=committed.append)
    time.sleep(0.1)
    assert Puller(folder).newest() is None
    stages[1].publish(v(0), {"layer1": torch.ones(2)})
    stages[2].flush(10)
    assert committed == [v(0)]
    assert [entry.name for entry in WeightStore(folder).verify(v(0)).tensors] == ["layer0", "layer1", "layer2"]
    for stage in stages:
        stage.close()


def test_a_missing_part_is_named(folder: Path):
    lead = Publisher(folder, rank=2, num_stages=3, keep_versions=2, parts_timeout_s=0.1)
    other = Publisher(folder, rank=0, num_stages=3, keep_versions=2)
    other.publish(v(0), {"a": torch.ones(1)})
    other.close()
    lead.publish(v(0), {"b": torch.ones(1)})
    with pytest.raises(PublishFailed, match=r"part of stage 1 did not come within 0\.1 s"):
        lead.flush(10)
    with pytest.raises(PublishFailed, match="stage 1"):
        lead.publish(v(1), {"b": torch.ones(1)})
    with pytest.raises(PublishFailed, match="stage 1"):
        lead.close()


def test_one_tensor_from_two_stages_is_refused(folder: Path):
    stages = [Publisher(folder, rank=rank, num_stages=2, keep_versions=2) for rank in range(2)]
    for stage in stages:
        stage.publish(v(0), {"embed": torch.ones(1)})
    with pytest.raises(PublishFailed, match=r"'embed' is in part-\d.safetensors and in part-\d.safetensors"):
        stages[1].flush(10)
    assert Puller(folder).newest() is None
    stages[0].close()


def test_publish_waits_for_a_slow_disk_instead_of_filling_memory(folder: Path):
    gate = threading.Event()
    publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=9, parts_timeout_s=0.1)
    publisher.publish(v(0), weights(), on_committed=lambda _: gate.wait(10) and None)
    while Puller(folder).newest() is None:
        time.sleep(0.01)
    publisher.publish(v(1), weights())
    publisher.publish(v(2), weights())
    with pytest.raises(PublishFailed, match=r"waited 0\.1 s to take version 0\.3"):
        publisher.publish(v(3), weights())
    gate.set()
    publisher.flush(10)
    publisher.publish(v(3), weights())
    publisher.close()
    assert Puller(folder).newest() == v(3)


def test_versions_only_grow_even_across_publishers(folder: Path):
    publish(folder, v(5, incarnation=1))
    zombie = Publisher(folder, rank=0, num_stages=1, keep_versions=3)
    zombie.publish(v(9), weights())
    with pytest.raises(PublishFailed, match=r"0\.9 cannot follow 1\.5"):
        zombie.flush(10)
    assert Puller(folder).newest() == v(5, incarnation=1)


def test_a_failing_callback_surfaces_at_the_next_call(folder: Path):
    publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=3)

    def fail(version: PolicyVersion) -> None:
        raise RuntimeError(f"nobody heard of {version}")

    publisher.publish(v(0), weights(), on_committed=fail)
    with pytest.raises(PublishFailed, match=r"nobody heard of 0\.0"):
        publisher.flush(10)


def test_the_fingerprint_names_the_architecture_and_the_chain_names_the_history():
    first = build_manifest(v(0), [entry_of("w", torch.zeros(2), "p")], None, 0.0)
    second = build_manifest(v(1), [entry_of("w", torch.ones(2), "p")], first, 0.0)
    orphan = build_manifest(v(1), [entry_of("w", torch.ones(2), "p")], None, 0.0)
    wider = build_manifest(v(1), [entry_of("w", torch.ones(3), "p")], first, 0.0)
    assert first.fingerprint == second.fingerprint != wider.fingerprint
    assert second.parent == "0.0"
    assert len({first.chain, second.chain, orphan.chain}) == 3


def test_polling_for_the_newest_version_is_cheap(folder: Path):
    publish(folder, v(0))
    puller = Puller(folder)
    started_s = time.perf_counter()
    for _ in range(200):
        puller.newest()
    assert (time.perf_counter() - started_s) / 200 < 0.002
