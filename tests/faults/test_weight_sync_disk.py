"""Rows 6 and 26 of the fault matrix, for weights at rest: a folder without space, and damaged files."""

import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.faults.disks import MIB, fill
from tests.full import pick
from tests.unit.published import publisher_of, pull, read, same
from tests.world.waiting import bound, wait_until

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.delta import rebuild_file
from leeway.weight_sync.manifest import (
    MANIFEST_NAME,
    PublishFailed,
    TensorFile,
    WeightsCorrupt,
    WeightsGone,
    delta_name,
    file_name,
)
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore
from leeway.weight_sync.tensors import tensor_of

DTYPE = "float32"


def v(version: int) -> PolicyVersion:
    return PolicyVersion(0, version)


def tensors_of(version: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return 1 MiB of tensors whose values are the version number."""
    return {f"w{rank}.{i}": torch.full((MIB // 16,), float(version)) for i in range(4)}


class Reader:
    """An actor that fetches the newest version repeatedly and compares every value."""

    def __init__(self, folder: Path, num_stages: int) -> None:
        self.fetches: list[PolicyVersion] = []
        self.errors: list[BaseException] = []
        self._folder, self._num_stages = folder, num_stages
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(60)

    def _run(self) -> None:
        puller = Puller.of_folder(self._folder, DTYPE)
        try:
            while not self._end.wait(0.002):
                newest = puller.newest()
                if newest is not None:
                    self._fetch(puller, newest)
        except BaseException as error:
            self.errors.append(error)
        puller.close()

    def _fetch(self, puller: Puller, version: PolicyVersion) -> None:
        try:
            staged = puller.fetch(version)
        except WeightsGone:  # retention removed the version
            return
        with staged:
            found = read(staged.folder, version)
        expected: dict[str, torch.Tensor] = {}
        for rank in range(self._num_stages):
            expected |= tensors_of(version.version, rank)
        assert same(found, expected)
        self.fetches.append(version)


@pytest.mark.fault(6, "no space in the weights folder, then freed", root=True)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_publishing_waits_for_space_and_readers_keep_the_old_version(num_stages: int, mounts, show):
    folder = mounts.tmpfs("weights", 16)
    stages = [publisher_of(folder, rank, num_stages, keep_versions=2) for rank in range(num_stages)]
    lead = stages[-1]

    def publish(version: int) -> float:
        started_s = time.monotonic()
        for rank, stage in enumerate(stages):
            stage.publish(v(version), tensors_of(version, rank))
        return time.monotonic() - started_s

    publish(0)
    publish(1)
    lead.flush(10)
    reader = Reader(folder, num_stages)
    try:
        ballast = fill(folder, leave_bytes=MIB // 2)
        took_s = publish(2) + publish(3)
        wait_until(lambda: all("space in" in stage.waiting_for for stage in stages), "every stage to report its wait")
        assert "No space left on device" in lead.waiting_for
        before = len(reader.fetches)
        wait_until(lambda: len(reader.fetches) > before + 3 or reader.errors, "reads meanwhile")
        assert lead._unfinished
        assert set(reader.fetches[before:]) == {v(1)}
        assert not (folder / "0.2" / MANIFEST_NAME).exists()
        assert not any((folder / "0.2").glob("*.safetensors"))
        ballast.unlink()
        freed_s = wait_until(
            lambda: v(3) in reader.fetches or reader.errors, "the newest version after there was space"
        )
    finally:
        reader.close()
    assert reader.errors == []
    assert reader.fetches == sorted(reader.fetches)
    assert all(stage.waiting_for == "" for stage in stages)
    publish(4)  # removes version 1, which the reader held open while version 3 was committed
    for stage in stages:
        stage.close()
    assert WeightStore(folder).committed() == [v(3), v(4)]
    assert not list(folder.rglob("*.tmp"))
    assert freed_s < bound(2.0)
    show(
        f"{num_stages} stage(s): the learner resumed after {1000 * took_s:.0f} ms, readers kept version 1, the newest "
        f"was available {1000 * freed_s:.0f} ms after there was space, {len(reader.fetches)} fetches all whole"
    )


@pytest.mark.fault(6, "a version whose write found no space is not retried", control=True, root=True)
def test_a_publisher_without_retries_loses_the_version(mounts, show):
    folder = mounts.tmpfs("weights", 8)
    publisher = publisher_of(folder, timeout_s=0.0)
    publisher.publish(v(0), tensors_of(0))
    publisher.flush(10)
    ballast = fill(folder, leave_bytes=MIB // 2)
    publisher.publish(v(1), tensors_of(1))
    with pytest.raises(PublishFailed, match="No space left on device"):
        publisher.flush(10)
    ballast.unlink()
    with pytest.raises(PublishFailed, match="No space left on device"):
        publisher.publish(v(2), tensors_of(2))
    assert WeightStore(folder).newest() == v(0)
    show("publishing fails with the reason; version 1 is never published")


@pytest.mark.fault(6, "space for one more version, partly used by the leftovers of a killed learner", root=True)
def test_leftovers_of_a_killed_learner_do_not_block_the_next_one_on_a_small_disk(mounts, show):
    folder = mounts.tmpfs("weights", 3)
    first = publisher_of(folder, keep_versions=1)
    first.publish(v(0), tensors_of(0))
    first.close()
    unfinished = folder / "0.1" / f".{file_name(0, DTYPE)}.4711.tmp"
    unfinished.parent.mkdir()
    unfinished.write_bytes(bytes(3 * MIB // 2))
    restarted = publisher_of(folder, keep_versions=1, timeout_s=1.0)
    for version in (0, 1):
        restarted.publish(PolicyVersion(1, version), tensors_of(version))
    restarted.close()
    assert WeightStore(folder).committed() == [PolicyVersion(1, 1)]
    show("1.5 MiB of version 0.1 beside version 0.0 on a disk of 3 MiB; versions 1.0 and 1.1 were published")


@pytest.mark.fault(26, "weights at rest: a byte flipped, a file cut or missing")
def test_a_damaged_version_is_refused_and_the_old_one_stays_readable(tmp_path: Path, show):
    chance = random.Random(0)
    folder = tmp_path / "weights"
    versions = publish_two(folder)
    puller = Puller.of_folder(folder, DTYPE)
    newest, num = folder / "0.1", pick(30, 200)
    for _ in range(num):
        damage(newest, chance)
        with pytest.raises((WeightsCorrupt, WeightsGone), match=r"version 1\b|0\.1"):
            pull(folder, v(1))
        with puller.fetch(v(0)) as staged:
            assert same(read(staged.folder, v(0)), versions[0])
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "copy" / "0.1", newest)
    with puller.fetch(v(1)) as staged:
        assert same(read(staged.folder, v(1)), versions[1])
    puller.close()
    show(f"{num} of {num} refused by name; the old version stays readable")


@pytest.mark.fault(26, "weights are read without their checksums", control=True)
def test_without_checksums_changed_weights_are_read(tmp_path: Path, show):
    publish_two(tmp_path / "weights")
    path = tmp_path / "weights" / "0.1" / file_name(0, DTYPE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    entry = WeightStore(tmp_path / "weights").manifest(v(1)).variant(DTYPE)[-1]
    unchecked = tensor_of(entry, TensorFile(path).view(entry.name))
    changed = (unchecked != tensors_of(1)[entry.name]).sum().item()
    assert changed == 1
    show(f"{changed} weight changed, {unchecked[-1]:g} instead of 1")


@pytest.mark.fault(26, "a delta on the wrong base, cut, or with a byte flipped")
def test_a_damaged_delta_makes_no_file_and_the_whole_file_is_used(tmp_path: Path, show):
    chance = random.Random(1)
    folder, out = tmp_path / "weights", tmp_path / "out"
    versions = publish_two(folder)
    file = file_name(0, DTYPE)
    entries = WeightStore(folder).manifest(v(1)).variant(DTYPE)
    delta, parent = folder / "0.1" / delta_name(file), folder / "0.0" / file
    with pytest.raises(WeightsCorrupt, match="wrong checksum"):
        rebuild_file(entries, delta, folder / "0.1" / file, out)
    good, num = delta.read_bytes(), pick(100, 500)
    for _ in range(num):
        at = chance.randrange(len(good))
        flipped = good[:at] + bytes([good[at] ^ chance.randrange(1, 256)]) + good[at + 1 :]
        delta.write_bytes(chance.choice([flipped, good[:at]]))
        try:
            rebuild_file(entries, delta, parent, out)
        except WeightsCorrupt:
            assert not out.exists()
        else:
            # the changed byte has no effect: the header of a compressed frame has unused bytes, for example
            assert out.read_bytes() == (folder / "0.1" / file).read_bytes()
            out.unlink()
    with Puller.of_folder(folder, DTYPE).fetch(v(1)) as staged:
        assert same(read(staged.folder, v(1)), versions[1])
    show(f"{num} damaged deltas and the wrong base: no file made, the whole file is used")


def publish_two(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Publish two versions, the second also as a delta, and copy the folder. Return the tensors."""
    folder.mkdir()
    WeightStore(folder).note_remote_reader()
    versions = [tensors_of(version) for version in range(2)]
    versions[1] = versions[0] | {"w0.3": versions[1]["w0.3"]}
    publisher = publisher_of(folder, full_every=2)
    for version, tensors in enumerate(versions):
        publisher.publish(v(version), tensors)
    publisher.close()
    shutil.copytree(folder, folder.with_name("copy"))
    return versions


def damage(folder: Path, chance: random.Random) -> None:
    """Choose the safetensors file or the manifest, and flip one of its bits, truncate it, or remove it."""
    path = folder / chance.choice([file_name(0, DTYPE), MANIFEST_NAME])
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    match chance.randrange(4):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[:at])
        case _:
            data[at] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
