"""A learner is killed while it publishes: actors see whole versions only, and the next learner goes on."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from weight_sync.manifest import WeightsGone
from weight_sync.publisher import Publisher
from weight_sync.puller import Puller
from weight_sync.staleness import PolicyVersion
from weight_sync.store import WeightStore

LEARNER = """
import sys
from pathlib import Path
import torch
from weight_sync.publisher import Publisher
from weight_sync.staleness import PolicyVersion

folder, incarnation = Path(sys.argv[1]), int(sys.argv[2])
publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=2)
for step in range(100_000):
    tensors = {f"w{i}": torch.full((50_000,), float(step)) for i in range(8)}
    publisher.publish(PolicyVersion(incarnation, step), tensors)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "learner.py"
    path.write_text(LEARNER)
    return path


def test_actors_only_ever_see_whole_versions_of_a_learner_killed_again_and_again(tmp_path: Path, script: Path):
    folder = tmp_path / "weights"
    puller = Puller(folder)
    seen: list[PolicyVersion] = []
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
                # at full speed retention may be faster than the reader; nothing else may go wrong
                _check_whole(folder, newest)
                seen.append(newest)
        finally:
            learner.send_signal(signal.SIGKILL)
            learner.wait()
        newest = puller.newest()
        assert newest is not None
        _check_whole(folder, newest)
    publisher = Publisher(folder, rank=0, num_stages=1, keep_versions=1)
    publisher.publish(PolicyVersion(9, 0), {"w0": torch.zeros(1)})
    publisher.close()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["9.0"]
    assert WeightStore(folder).verify(PolicyVersion(9, 0)).policy == PolicyVersion(9, 0)


def _check_whole(folder: Path, version: PolicyVersion) -> None:
    try:
        staged = Puller(folder).fetch(version)
    except WeightsGone:
        return
    with staged:
        for _, tensor in WeightStore(folder).tensors(staged.manifest):
            assert torch.equal(tensor, torch.full((50_000,), float(version.version)))
