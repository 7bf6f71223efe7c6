"""Recovery from stopped processes, removed staging folders and full disks."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from leeway.weight_sync import staging as staging_file
from leeway.weight_sync.client import WeightClient, loopback_hint
from leeway.weight_sync.host_folder import HostFolder
from leeway.weight_sync.manifest import TransferFailed, delta_name, file_name
from leeway.weight_sync.store import StagedVersion, WeightStore
from tests.weights_by_hand import Machine, assert_holds, damage, publish, v

WHOLE = file_name(0, "float32")


@pytest.fixture
def machine(tmp_path: Path):
    made = Machine(tmp_path)
    yield made
    made.close()


def staging_of(machine: Machine) -> Path:
    (staging,) = machine.staging_dir.iterdir()
    return staging


# --- stopped processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["while it writes a file", "before the rename"])
def test_a_replaced_fetcher_that_continues_does_no_harm(machine: Machine, monkeypatch, when: str):
    publish(machine.folder, 0, num_values=2**18)
    pullers = [machine.puller(f"actor-{n}") for n in range(3)]
    for puller in pullers:
        puller.fetch(v(0)).close()
    staging = staging_of(machine)
    publish(machine.folder, 1, num_values=2**18)
    read = WeightClient.read
    replaced = threading.local()
    others: list[StagedVersion] = []

    def replace() -> None:
        if not hasattr(replaced, "done"):
            replaced.done = True
            (staging / "locks" / "0.1").unlink()
            others.append(pullers[1].fetch(v(1)))

    def stopped(self, version, file, total, start, write) -> None:
        def write_and_stop(data: memoryview) -> None:
            write(data)
            if when == "while it writes a file":
                replace()

        read(self, version, file, total, start, write_and_stop)
        replace()

    monkeypatch.setattr(WeightClient, "read", stopped)
    for staged in (pullers[0].fetch(v(1)), *others, pullers[2].fetch(v(1))):
        assert_holds(staged, 1, num_values=2**18)
        staged.close()
    assert len(others) == 1
    assert list((staging / "0.1").glob(".part-*")) == []


@pytest.mark.parametrize("deltas", [False, True], ids=["full", "deltas"])
def test_an_existing_file_is_verified_before_it_is_used(machine: Machine, deltas: bool):
    publish(machine.folder, 0)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    publish(machine.folder, 1, deltas=deltas)
    version_dir = staging_of(machine) / "0.1"
    version_dir.mkdir()
    shutil.copyfile(machine.folder / "0.1" / WHOLE, version_dir / WHOLE)
    damage(version_dir / WHOLE)
    with puller.fetch(v(1)) as staged:
        assert_holds(staged, 1)
    assert machine.read_bytes()["0.1"].keys() == {delta_name(WHOLE) if deltas else WHOLE}


# --- removed folders and full disks ---------------------------------------------------------------


@pytest.mark.parametrize("when", ["between fetches", "during a fetch"])
def test_a_removed_staging_folder_is_created_again(machine: Machine, monkeypatch, when: str):
    publish(machine.folder, 0)
    puller = machine.puller()
    puller.fetch(v(0)).close()
    staging = staging_of(machine)
    publish(machine.folder, 1)
    if when == "between fetches":
        shutil.rmtree(staging)
    else:
        with monkeypatch.context() as patch:
            patch.setattr("leeway.weight_sync.store.checked", lambda *_: shutil.rmtree(staging, ignore_errors=True))
            with pytest.raises(TransferFailed, match="another program removed that folder"):
                puller.fetch(v(1))
    for version in (1, 1):
        with puller.fetch(v(version)) as staged:
            assert_holds(staged, version)
    puller.close()
    assert list(machine.staging_dir.iterdir()) == []


def test_unused_versions_are_removed_if_the_disk_is_full_and_the_update_succeeds(machine: Machine, monkeypatch):
    puller = machine.puller()
    for version in (0, 1, 2):
        publish(machine.folder, version, deltas=version > 0)
        puller.fetch(v(version)).close()
    staging = WeightStore(staging_of(machine))
    assert staging.committed() == [v(1), v(2)]
    publish(machine.folder, 3, deltas=True)
    tried: list[int] = []
    fetch = staging_file.fetch

    def full(*arguments: object) -> None:
        tried.append(1)
        if v(1) in staging.committed():
            raise OSError(28, "No space left on device")
        fetch(*arguments)

    monkeypatch.setattr("leeway.weight_sync.staging.fetch", full)
    with puller.fetch(v(3)) as staged:
        assert_holds(staged, 3)
    assert len(tried) == 2
    assert staging.committed() == [v(2), v(3)]
    assert machine.read_bytes()["0.3"].keys() == {delta_name(WHOLE)}


def test_a_process_that_joins_while_a_folder_is_removed_gets_a_complete_folder(tmp_path: Path, monkeypatch):
    """Before a slow removal of the folder ends, another process joins and writes."""
    path = tmp_path / f"leeway-{os.geteuid()}-run"
    removing, joined = threading.Event(), threading.Event()
    rmtree = shutil.rmtree

    def slowly(folder: Path, **options: object) -> None:
        removing.set()
        assert joined.wait(60)
        rmtree(folder, **options)

    first = HostFolder(path)
    (path / "0.1").mkdir()
    monkeypatch.setattr(shutil, "rmtree", slowly)
    closing = threading.Thread(target=first.close)
    closing.start()
    assert removing.wait(60)
    # the joining process also calls rmtree, for abandoned folders
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    second = HostFolder(path)
    (path / "0.2").mkdir()
    joined.set()
    closing.join(20)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert {each.name for each in path.iterdir()} == {"users.lock", "0.2"}
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_removed_between_two_checks_is_created_again(tmp_path: Path, monkeypatch):
    path = tmp_path / "leeway-0-run"
    path.mkdir(mode=0o700)
    lstat = Path.lstat

    def vanishing(self: Path) -> os.stat_result:
        if self == path and path.exists():
            path.rmdir()
        return lstat(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", vanishing)
        joined = HostFolder(path)
    assert joined.is_there()
    joined.close()


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://10.0.0.7:5555", False),
        ("tcp://gpu-12:5555", False),
    ],
)
def test_only_a_loopback_address_gets_a_hint(address: str, is_loopback: bool):
    assert ("launch.host" in loopback_hint(address)) == is_loopback
