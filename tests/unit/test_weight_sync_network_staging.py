"""Staging folders: their contents, locks between pullers, and versions that an actor refuses."""

import errno
import fcntl
import functools
import os
import shutil
import stat
import threading
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from leeway.weight_sync import host_folder
from leeway.weight_sync.client import UPDATE_TIMEOUT_S
from leeway.weight_sync.host_folder import HostFolder, folder_for, lock_within, locked
from leeway.weight_sync.manifest import (
    MANIFEST_NAME,
    TransferFailed,
    WeightsCorrupt,
    WeightsGone,
    build_manifest,
    file_name,
)
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import StagedVersion, WeightStore
from tests.weights_by_hand import Machine, assert_holds, damage, make_part, publish, v, weights
from tests.world.waiting import wait_until

WHOLE = file_name(0, "float32")


@pytest.fixture
def machine(tmp_path: Path):
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


# --- staging folders ------------------------------------------------------------------------------


def test_the_last_puller_removes_the_staging_folder(machine: Machine):
    publish(machine.folder, 0)
    first, second = machine.puller("actor-0"), machine.puller("actor-1")
    for puller in (first, second):
        puller.fetch(v(0)).close()
    (kept,) = machine.staging_dir.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    first.close()
    second.fetch(v(0)).close()
    second.close()
    second.close()
    assert list(machine.staging_dir.iterdir()) == []


def test_folders_of_killed_processes_are_removed_by_the_next_process(tmp_path: Path):
    left, used, foreign = (tmp_path / f"leeway-{os.geteuid()}-{name}" for name in ("old", "used", "foreign"))
    (left / "0.1").mkdir(parents=True)
    (left / "users.lock").touch()
    foreign.mkdir()
    holder = HostFolder(used)
    HostFolder(tmp_path / f"leeway-{os.geteuid()}-mine").close()
    assert not left.exists()
    assert used.exists()
    assert foreign.exists(), "a folder without users.lock may be foreign, or new"
    holder.close()


def test_a_folder_that_other_users_can_write_is_refused(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("open", "link"):
        with pytest.raises(TransferFailed, match="must be a folder writable by this user alone"):
            HostFolder(tmp_path / name)


def test_the_staging_folder_is_in_memory_if_it_fits_and_in_tmp_otherwise(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(host_folder, "_SHM", tmp_path)
    small = folder_for("a run/1", "abc", 1000)
    assert small.parent == tmp_path
    assert small.name == f"leeway-{os.geteuid()}-a_run_1-abc"
    assert folder_for("r", "abc", 2**60).parent != tmp_path


def test_a_machine_keeps_the_two_newest_versions_and_those_in_use(machine: Machine):
    puller = machine.puller()
    publish(machine.folder, 0)
    reading = puller.fetch(v(0))
    for version in range(1, 5):
        publish(machine.folder, version)
        puller.fetch(v(version)).close()
    kept = WeightStore(reading.folder)
    assert kept.committed() == [v(0), v(3), v(4)]
    assert_holds(reading, 0)
    reading.close()
    publish(machine.folder, 5)
    puller.fetch(v(5)).close()
    assert kept.committed() == [v(4), v(5)]
    assert sorted(path.name for path in (reading.folder / "locks").iterdir()) == ["0.4", "0.5"]


@pytest.mark.parametrize("deltas", [False, True])
def test_a_damaged_staged_version_is_fetched_again_after_it_is_invalidated(machine: Machine, deltas: bool):
    publish(machine.folder, 0)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    publish(machine.folder, 1, deltas=deltas)
    with puller.fetch(v(1)) as staged:
        damage(staged.folder / "0.1" / WHOLE)
        with pytest.raises(WeightsCorrupt, match=WHOLE):
            assert_holds(staged, 1)
        puller.invalidate(staged)
    with puller.fetch(v(1)) as staged:
        assert_holds(staged, 1)
    with machine.puller("actor-1").fetch(v(1)) as staged:
        assert_holds(staged, 1)


def test_a_full_disk_is_an_error_that_names_the_folder_and_the_fix(machine: Machine, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    publish(machine.folder, 0)
    puller = machine.puller()
    with monkeypatch.context() as patch:
        patch.setattr("leeway.weight_sync.staging.fetch", full)
        with pytest.raises(TransferFailed, match=rf"{machine.staging_dir}.*the disk is full. Free space"):
            puller.fetch(v(0))
    with puller.fetch(v(0)) as staged:
        assert_holds(staged, 0)


# --- locks between pullers ------------------------------------------------------------------------


def test_a_wait_for_a_stopped_process_names_it_and_times_out(tmp_path: Path):
    path = tmp_path / "lock"
    with lock_within(path, 1.0, owner="actor-3", what="version 1"):
        began = time.monotonic()
        with pytest.raises(TransferFailed, match=rf"version 1: waited 0\.2 s for actor-3 \(process {os.getpid()}\)"):
            lock_within(path, 0.2, owner="actor-4", what="version 1")
        assert time.monotonic() - began < 60
    with lock_within(path, 0.2, owner="actor-4", what="version 1"):
        pass


def test_progress_of_the_lock_holder_extends_the_wait(tmp_path: Path):
    now = [0.0]

    def pause(_: float) -> None:
        now[0] += 1.0
        if now[0] > 50:
            holder.close()

    holder = locked(tmp_path / "lock")
    assert holder is not None
    lock_within(
        tmp_path / "lock", 2.0, owner="b", what="x", progress=lambda: int(now[0]), clock=lambda: now[0], pause=pause
    ).close()
    assert now[0] > 50


def test_a_lock_file_removed_by_its_holder_is_created_again(tmp_path: Path, monkeypatch):
    path = tmp_path / "lock"
    real = fcntl.flock
    removals = iter([path.unlink])

    def flock(file, operation: int) -> None:
        next(removals, lambda: None)()
        real(file, operation)

    monkeypatch.setattr("leeway.common.files.fcntl.flock", flock)
    with lock_within(path, 0.2, owner="b", what="x"):
        assert locked(path) is None


def test_a_fetch_does_not_wait_for_a_stopped_fetch_of_another_version(machine: Machine):
    publish(machine.folder, 0)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    publish(machine.folder, 1)
    (staging,) = machine.staging_dir.iterdir()
    with lock_within(staging / "locks" / "0.1", 1.0, owner="stopped", what="it"):
        publish(machine.folder, 2)
        with puller.fetch(v(2)) as staged:
            assert_holds(staged, 2)


def test_a_stopped_fetcher_is_replaced_by_one_of_the_waiting_processes(machine: Machine, monkeypatch):
    now, waiting = [0.0], set()

    def clock() -> float:
        found = now[0]
        waiting.add(threading.get_ident())
        return found

    publish(machine.folder, 0)
    pullers = [machine.puller(f"actor-{n}") for n in range(4)]
    for puller in pullers:
        puller.fetch(v(0)).close()
    (staging,) = machine.staging_dir.iterdir()
    manifest = publish(machine.folder, 1)
    (staging / "0.1").mkdir()
    monkeypatch.setattr("leeway.weight_sync.staging.lock_within", functools.partial(lock_within, clock=clock))
    began = time.monotonic()
    with lock_within(staging / "locks" / "0.1", 1.0, owner="stopped", what="it"):
        stale = (staging / "0.1" / f".{WHOLE}.0a.partial").open("ab", buffering=0)
        stale.write((machine.folder / "0.1" / WHOLE).read_bytes()[:1000])
        staged: list[StagedVersion] = []
        threads = [threading.Thread(target=lambda p=puller: staged.append(p.fetch(v(1)))) for puller in pullers]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(waiting) == 4, "all four to wait")
        now[0] += UPDATE_TIMEOUT_S / 4  # a longer wait would also replace the new fetcher
        for thread in threads:
            thread.join(60)
        stale.write(b"late data")
        stale.close()
    assert len(staged) == 4
    assert time.monotonic() - began < 60
    for each in staged:
        assert_holds(each, 1)
        each.close()
    assert machine.read_bytes()["0.1"] == {WHOLE: manifest.size_of(WHOLE)}


def test_partial_files_of_a_replaced_fetcher_are_removed(machine: Machine, monkeypatch):
    publish(machine.folder, 0)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    publish(machine.folder, 1)
    (staging,) = machine.staging_dir.iterdir()
    (staging / "0.1").mkdir()
    stale = staging / "0.1" / f".{WHOLE}.0a.partial"
    stale.write_bytes(bytes(1000))
    now = [0.0]

    def clock() -> float:
        now[0] += UPDATE_TIMEOUT_S / 4
        return now[0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("leeway.weight_sync.staging.lock_within", functools.partial(lock_within, clock=clock))
    monkeypatch.setattr("leeway.weight_sync.staging._fetch_bytes", full)
    with (
        lock_within(staging / "locks" / "0.1", 1.0, owner="stopped", what="it"),
        pytest.raises(TransferFailed, match="the disk is full"),
    ):
        puller.fetch(v(1))
    assert not stale.exists()


@pytest.mark.parametrize("deltas", [False, True])
def test_a_fetcher_reports_progress_at_every_tensor(machine: Machine, monkeypatch, deltas: bool):
    """No file grows while a preallocated file is filled or verified, so the sizes of files show no progress."""
    publish(machine.folder, 0, num_tensors=5)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    (staging,) = machine.staging_dir.iterdir()
    publish(machine.folder, 1, deltas=deltas, num_tensors=5)
    seen, lock = [], staging / "locks" / "0.1"
    module = "leeway.weight_sync.delta" if deltas else "leeway.weight_sync.store"
    checksum = import_module(module).checksum_of

    def slow(data) -> str:
        if lock.exists():
            seen.append(lock.stat().st_mtime_ns)
            os.utime(lock, (0, 0))  # so that only a new touch makes the time positive
        return checksum(data)

    monkeypatch.setattr(f"{module}.checksum_of", slow)
    puller.fetch(v(1)).close()
    assert len(seen) >= 5
    assert all(seen[:5])


# --- mounted folders ------------------------------------------------------------------------------


def test_an_unreadable_folder_is_refused_with_the_fix(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(TransferFailed, match=r"cannot read the weight store's folder .* transport = 'network'"):
        Puller.of_folder(tmp_path / "file" / "weights", "float32")


# --- refused versions -----------------------------------------------------------------------------


@pytest.fixture(params=["folder", "network"])
def puller(request, machine: Machine) -> Puller:
    return machine.puller() if request.param == "network" else Puller.of_folder(machine.folder, "float32")


def test_an_older_version_reported_as_the_newest_is_refused_by_name(machine: Machine, puller: Puller):
    publish(machine.folder, 7)
    publish(machine.folder, 1, incarnation=1)
    assert puller.newest() == v(1, 1)
    puller.fetch(v(1, 1)).close()
    (machine.folder / "NEWEST").write_text("0.7\n")
    with pytest.raises(WeightsCorrupt, match=r"reports 7 as the newest version after 1 \(start 1\)"):
        puller.newest()
    with pytest.raises(WeightsCorrupt, match=r"version 7 is older than 1 \(start 1\)"):
        puller.fetch(v(7))


def test_a_manifest_of_another_version_is_refused(machine: Machine, puller: Puller):
    publish(machine.folder, 1)
    publish(machine.folder, 2)
    (machine.folder / "0.2" / MANIFEST_NAME).write_bytes((machine.folder / "0.1" / MANIFEST_NAME).read_bytes())
    with pytest.raises(WeightsCorrupt, match=r"describes version 1, not 2"):
        puller.fetch(v(2))


def test_another_architecture_is_refused_and_the_next_valid_version_accepted(machine: Machine, puller: Puller):
    publish(machine.folder, 0)
    puller.fetch(v(0)).close()
    sink = WeightStore(machine.folder)
    part, files = make_part(0, v(1), {"w0": np.zeros(5, np.float32)})
    sink.write_part(part, files)
    sink.commit(build_manifest(v(1), [part], sink.newest_manifest(), 0.0), 3)
    with pytest.raises(WeightsCorrupt, match="another architecture"):
        puller.fetch(v(1))
    publish(machine.folder, 2)
    with puller.fetch(v(2)) as staged:
        assert_holds(staged, 2)


def test_two_learners_that_publish_one_version_are_detected(machine: Machine):
    publish(machine.folder, 0)
    machine.puller("actor-0").fetch(v(0)).close()
    sink = WeightStore(machine.folder)
    part, files = make_part(0, v(0), weights(3))
    sink.write_part(part, files)
    (machine.folder / "NEWEST").unlink()
    sink.commit(build_manifest(v(0), [part], None, 1.0), 3)
    machine.end()
    machine.start()
    with pytest.raises(WeightsCorrupt, match="two learners publish the same version"):
        machine.puller("actor-1").fetch(v(0))


def test_deltas_for_the_parent_of_another_learner_are_not_fetched(machine: Machine):
    publish(machine.folder, 0)
    puller = machine.puller("actor-0")
    puller.fetch(v(0)).close()
    machine.end()
    shutil.rmtree(machine.folder / "0.0")
    (machine.folder / "NEWEST").unlink()
    sink = WeightStore(machine.folder)
    part, files = make_part(0, v(0), weights(3))
    sink.write_part(part, files)
    sink.commit(build_manifest(v(0), [part], None, 1.0), 3)
    publish(machine.folder, 1, deltas=True)
    machine.start()
    with puller.fetch(v(1)) as staged:
        assert_holds(staged, 1)
    assert machine.read_bytes()["0.1"].keys() == {WHOLE}


def test_an_unknown_version_is_gone(puller: Puller):
    assert puller.newest() is None
    with pytest.raises(WeightsGone, match=r"version 9 is not in"):
        puller.fetch(v(9))
