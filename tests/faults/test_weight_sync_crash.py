"""A learner is killed while it publishes: actors see whole versions only, and the next learner continues."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.unit.published import publisher_of, read

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.delta import rebuild_file
from leeway.weight_sync.manifest import WeightsCorrupt, WeightsGone, delta_name, file_name
from leeway.weight_sync.puller import Puller
from leeway.weight_sync.store import WeightStore

DTYPES = ("float32", "bfloat16")
LEARNER = """
import sys
from pathlib import Path
import torch
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.publisher import Publisher
from leeway.weight_sync.store import WeightStore

folder, incarnation = Path(sys.argv[1]), int(sys.argv[2])
publishers = [
    Publisher(WeightStore(folder), rank, 2, ("float32", "bfloat16"), keep_versions=4, full_every=3) for rank in range(2)
]
for step in range(100_000):
    for rank, publisher in enumerate(publishers):
        tensors = {f"w{rank}.{i}": torch.full((50_000,), float(step)) for i in range(8)}
        publisher.publish(PolicyVersion(incarnation, step), tensors)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "learner.py"
    path.write_text(LEARNER)
    return path


@pytest.mark.fault(15, "kill -9 of the learner while it publishes")
def test_actors_see_only_whole_versions_of_a_repeatedly_killed_learner(tmp_path: Path, script: Path, show):
    folder = tmp_path / "weights"
    puller = Puller.of_folder(folder, "float32")
    WeightStore(folder).note_remote_reader()
    seen: list[PolicyVersion] = []
    num_deltas = 0
    for incarnation in range(3):
        learner = subprocess.Popen([sys.executable, script, folder, str(incarnation)])
        try:
            deadline_s = time.monotonic() + 60
            while len(seen) < 5 * (incarnation + 1):
                assert time.monotonic() < deadline_s, f"the learner of incarnation {incarnation} published too little"
                newest = puller.newest()
                if newest is None or (seen and newest <= seen[-1]):
                    time.sleep(0.001)
                    continue
                # retention may remove a version before the test reads the version; no other error may occur
                check_whole(puller, newest)
                num_deltas += check_deltas(folder, newest, tmp_path / "out")
                seen.append(newest)
        finally:
            learner.send_signal(signal.SIGKILL)
            learner.wait()
        newest = puller.newest()
        assert newest is not None
        check_whole(puller, newest)
        num_deltas += check_deltas(folder, newest, tmp_path / "out")
    assert num_deltas > 0
    publisher = publisher_of(folder, keep_versions=1)
    publisher.publish(PolicyVersion(9, 0), {"w0": torch.zeros(1)})
    publisher.close()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["9.0"]
    read(folder, PolicyVersion(9, 0))
    show(f"{len(seen)} versions of 3 learners read, {num_deltas} deltas, all whole; the next learner cleans up")


def check_whole(puller: Puller, version: PolicyVersion) -> None:
    try:
        staged = puller.fetch(version)
    except WeightsGone:
        return
    with staged:
        for dtype in DTYPES:
            tensors = read(staged.folder, version, dtype)
            assert len(tensors) == 16
            expected = torch.full((50_000,), float(version.version), dtype=getattr(torch, dtype))
            assert all(torch.equal(tensor, expected) for tensor in tensors.values())


def check_deltas(folder: Path, version: PolicyVersion, out: Path) -> int:
    """Return how many files were rebuilt from their deltas and parents; assert that all are exact."""
    store, num_checked = WeightStore(folder), 0
    try:
        manifest = store.manifest(version)
        if manifest.parent is None:
            return 0
        with store.lock_for_reading(version), store.lock_for_reading(PolicyVersion.parse(manifest.parent)):
            names = {file.name for file in manifest.files}
            for file in (file_name(rank, dtype) for rank in range(2) for dtype in DTYPES):
                if delta_name(file) in names:
                    entries = [entry for entry in manifest.tensors if entry.file == file]
                    mine, parent = folder / version.key, folder / manifest.parent
                    rebuild_file(entries, mine / delta_name(file), parent / file, out)
                    assert out.read_bytes() == (mine / file).read_bytes()
                    num_checked += 1
    except WeightsGone:
        return num_checked
    except WeightsCorrupt as error:
        raise AssertionError(f"version {version} is not whole") from error
    return num_checked
