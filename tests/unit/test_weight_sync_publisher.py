"""The publisher: `publish` blocks for a copy to host memory; a thread writes the version, with retries."""

import errno
import gc
import logging
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from leeway.common.staleness import PolicyVersion
from leeway.weight_sync import tensors
from leeway.weight_sync.manifest import PublishFailed, TransferFailed
from leeway.weight_sync.publisher import NUM_COPIES, Publisher
from leeway.weight_sync.store import WeightStore
from tests.unit.published import PART, publish, publisher_of, read, same, v, weights
from tests.world.waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


class FailingStore(WeightStore):
    """A store in which one kind of call fails `times` times."""

    def __init__(self, folder: Path, error: Exception | None = None, *, times: int = 0, call: str = "write_part"):
        super().__init__(folder)
        self.error, self.times, self.call = error, times, call
        self.tried: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def write_part(self, part, files):
        assert self.gate.wait(60)
        self._maybe_fail("write_part", part.version)
        super().write_part(part, files)

    def commit(self, manifest, keep_versions):
        self._maybe_fail("commit", manifest.policy.key)
        super().commit(manifest, keep_versions)
        self._maybe_fail("after_commit", manifest.policy.key)

    def _maybe_fail(self, call: str, version: str):
        if call != self.call:
            return
        self.tried.append(version)
        if self.times > 0:
            self.times -= 1
            raise self.error


def disk_error(number: int = errno.ENOSPC) -> OSError:
    return OSError(number, os.strerror(number))


def single_stage(sink, **arguments) -> Publisher:
    return Publisher(sink, 0, 1, ["float32"], **{"keep_versions": 3, "full_every": 1, **arguments})


def test_tensors_may_change_once_publish_has_returned(folder: Path):
    publisher = publisher_of(folder)
    tensors = weights(0)
    publisher.publish(v(0), tensors)
    tensors["embed"].zero_()
    publisher.close()
    assert same(read(folder, v(0)), weights(0))


def test_a_version_has_every_dtype_rounded_as_in_torch(folder: Path):
    tensors = {"w": torch.randn(50, 3, dtype=torch.float64).T, "b": torch.randn(4), "s": torch.tensor(1e-3)}
    dtypes = ("bfloat16", "float32", "float16", "float64")
    publisher = publisher_of(folder, dtypes=(*dtypes, "bfloat16"))
    publisher.publish(v(0), tensors)
    publisher.close()
    assert set(WeightStore(folder).manifest(v(0)).dtypes) == set(dtypes)
    for dtype in dtypes:
        expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
        assert same(read(folder, v(0), dtype), expected)


def test_a_published_file_is_a_valid_safetensors_file(folder: Path):
    from safetensors.torch import load_file

    publish(folder, v(3))
    assert same(load_file(folder / "0.3" / PART), weights(3))


def test_a_tied_head_and_embedding_are_two_tensors(folder: Path):
    table = torch.randn(5, 2)
    publisher = publisher_of(folder)
    publisher.publish(v(0), {"embed": table, "lm_head": table})
    publisher.close()
    assert same(read(folder, v(0)), {"embed": table, "lm_head": table})


def test_read_tensors_outlive_the_files_without_warnings(folder: Path):
    publish(folder, v(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = read(folder, v(0))
    (folder / "0.0" / PART).unlink()
    gc.collect()
    assert same(tensors, weights(0))


def test_empty_tensors_are_published(folder: Path):
    publisher = publisher_of(folder)
    publisher.publish(v(0), {"none": torch.empty(0, 4), "one": torch.ones(1)})
    publisher.close()
    assert same(read(folder, v(0)), {"none": torch.empty(0, 4), "one": torch.ones(1)})


def test_publish_waits_for_the_copy_and_not_for_the_disk(folder: Path):
    sink = FailingStore(folder)
    sink.gate.clear()
    publisher = single_stage(sink)
    publisher.publish(v(0), weights(0))
    publisher.publish(v(1), weights(1))
    assert publisher._unfinished
    assert WeightStore(folder).newest() is None
    sink.gate.set()
    publisher.flush(10)
    assert not publisher._unfinished
    assert WeightStore(folder).newest() == v(1)
    assert same(read(folder, v(0)), weights(0))
    assert same(read(folder, v(1)), weights(1))
    publisher.close()


def test_publish_waits_for_a_slow_disk_instead_of_filling_memory(folder: Path):
    sink = FailingStore(folder)
    sink.gate.clear()
    publisher = single_stage(sink, timeout_s=0.1)
    for version in range(NUM_COPIES):
        publisher.publish(v(version), weights(version))
    with pytest.raises(PublishFailed, match=r"waited 0\.1 s to accept version 2: stage 0 is still writing"):
        publisher.publish(v(2), weights(2))
    sink.gate.set()
    publisher.flush(10)
    publisher.publish(v(2), weights(2))
    publisher.close()
    assert same(read(folder, v(2)), weights(2))


def test_host_copies_are_allocated_once_and_reused(folder: Path, monkeypatch):
    made = []
    make = tensors.HostCopy.__init__
    monkeypatch.setattr(tensors.HostCopy, "__init__", lambda self, *a, **k: (made.append(1), make(self, *a, **k))[1])
    publish(folder, *map(v, range(8)))
    assert len(made) == NUM_COPIES
    assert same(read(folder, v(7)), weights(7))


def test_without_memory_for_a_base_copy_versions_are_written_one_by_one(folder: Path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOMEM, "cannot be pinned")

    monkeypatch.setattr(tensors.HostCopy, "another", fail)
    monkeypatch.setattr(WeightStore, "wants_deltas", lambda _: True)
    publish(folder, *map(v, range(6)), full_every=50)
    assert same(read(folder, v(5)), weights(5))
    assert WeightStore(folder).manifest(v(5)).parent == "0.4"


def test_tensors_of_another_architecture_are_refused_and_publishing_continues(folder: Path):
    publisher = publisher_of(folder)
    publisher.publish(v(0), weights(0))
    for _ in range(NUM_COPIES + 1):
        with pytest.raises(ValueError, match="one architecture"):
            publisher.publish(v(1), {"embed": torch.zeros(2)})
    publisher.publish(v(1), weights(1))
    publisher.close()
    assert same(read(folder, v(1)), weights(1))


def test_invalid_arguments_and_tensors_are_refused(folder: Path):
    with pytest.raises(ValueError, match=r"\['int64'\]; supported dtypes: float32"):
        publisher_of(folder, dtypes=["int64"])
    with pytest.raises(ValueError, match="rank = 2 is not one of the 2 pipeline stages"):
        publisher_of(folder, rank=2, num_stages=2)
    publisher = publisher_of(folder)
    with pytest.raises(ValueError, match=r"'w' has dtype torch\.int64"):
        publisher.publish(v(0), {"w": torch.ones(2, dtype=torch.int64)})
    publisher.publish(v(0), weights())
    with pytest.raises(ValueError, match=r"version 0 was published after 0"):
        publisher.publish(v(0), weights())
    publisher.close()
    with pytest.raises(PublishFailed, match="is closed"):
        publisher.publish(v(1), weights())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["write_part", "commit"])
def test_a_version_is_retried_after_temporary_disk_errors(folder: Path, call: str, number: int):
    sink = FailingStore(folder, disk_error(number), times=2, call=call)
    publisher = single_stage(sink)
    publisher.publish(v(4), weights(4))
    publisher.close()
    assert sink.tried == ["0.4"] * 3
    assert same(read(folder, v(4)), weights(4))


def test_a_commit_without_a_reply_is_retried_even_if_it_succeeded(folder: Path):
    sink = FailingStore(folder, TransferFailed("no reply"), times=1, call="after_commit")
    committed: list[PolicyVersion] = []
    publisher = single_stage(sink)
    publisher.publish(v(4), weights(4), committed.append)
    publisher.close()
    assert committed == [v(4)]
    assert WeightStore(folder).newest() == v(4)


def test_a_wait_for_disk_space_is_reported_with_folder_and_duration(folder: Path, caplog):
    sink = FailingStore(folder, disk_error(), times=10**9)
    clock = [100.0]
    publisher = single_stage(sink, clock=lambda: clock[0])
    assert publisher.waiting_for == ""
    with caplog.at_level(logging.WARNING):
        publisher.publish(v(0), weights())
        wait_until(lambda: len(sink.tried) > 1, "a second try")
        clock[0] += 12
        assert publisher.waiting_for == f"space in {folder} (No space left on device), for 12 s"
        tried = len(sink.tried)
        wait_until(lambda: len(sink.tried) > tried + 1, "further tries")
        assert len(caplog.records) == 1
        clock[0] += 60
        wait_until(lambda: len(caplog.records) == 2, "a warning every minute")
    assert f"version 0 waits for space in {folder}" in caplog.text
    assert WeightStore(folder).newest() is None
    sink.times = 0
    publisher.flush(10)
    assert publisher.waiting_for == ""
    publisher.close()
    assert same(read(folder, v(0)), weights())


def test_a_disk_that_stays_full_ends_publishing_with_the_fix(folder: Path):
    publisher = single_stage(FailingStore(folder, disk_error(), times=10**9), timeout_s=0.2)
    publisher.publish(v(0), weights())
    match = rf"version 0 waited \d+ s for space in {folder} \(No space left on device\); free some"
    with pytest.raises(PublishFailed, match=match):
        publisher.flush(10)
    with pytest.raises(PublishFailed, match="No space left"):
        publisher.publish(v(1), weights())


def test_a_stale_learner_is_refused_without_retry(folder: Path):
    publish(folder, v(0, incarnation=1))
    sink = FailingStore(folder, call="commit")
    publisher = single_stage(sink)
    publisher.publish(v(9), weights())
    with pytest.raises(PublishFailed, match=r"9 cannot follow 0 \(start 1\)"):
        publisher.flush(10)
    assert sink.tried == ["0.9"]


def test_a_permanent_error_is_not_retried(folder: Path):
    sink = FailingStore(folder, disk_error(errno.ENAMETOOLONG), times=1)
    publisher = single_stage(sink)
    publisher.publish(v(0), weights())
    with pytest.raises(PublishFailed, match="File name too long"):
        publisher.flush(10)
    assert sink.tried == ["0.0"]


def test_closing_does_not_wait_for_a_disk_that_stays_full(folder: Path):
    publisher = single_stage(FailingStore(folder, disk_error(), times=10**9))
    publisher.publish(v(0), weights())
    wait_until(lambda: publisher.waiting_for, "a first try")
    started_s = time.monotonic()
    with pytest.raises(PublishFailed, match="No space left"):
        publisher.close(0.1)
    assert time.monotonic() - started_s < 60
    wait_until(lambda: not publisher._thread.is_alive(), "its thread to end")


def test_versions_not_started_before_close_times_out_are_not_published(folder: Path):
    sink = FailingStore(folder)
    sink.gate.clear()
    publisher = single_stage(sink)
    publisher.publish(v(0), weights(0))
    publisher.publish(v(1), weights(1))
    wait_until(lambda: len(publisher._jobs) == 1, "the first one to start")
    with pytest.raises(PublishFailed, match=r"waited 0\.1 s for stage 0 to finish publishing"):
        publisher.close(0.1)
    sink.gate.set()
    publisher._thread.join(60)
    assert WeightStore(folder).newest() == v(0)


def test_a_failing_callback_surfaces_at_the_next_call(folder: Path):
    publisher = publisher_of(folder)

    def fail(version: PolicyVersion) -> None:
        raise RuntimeError(f"cannot report {version}")

    publisher.publish(v(0), weights(), on_committed=fail)
    with pytest.raises(PublishFailed, match=r"cannot report 0"):
        publisher.flush(10)


def test_a_version_is_committed_when_the_parts_of_all_stages_exist(folder: Path):
    stages = [publisher_of(folder, rank, 3, dtypes=("float32", "bfloat16")) for rank in range(3)]
    committed: list[PolicyVersion] = []
    for rank in (2, 0):
        stages[rank].publish(v(0), {f"layer{rank}": torch.ones(rank + 1)}, on_committed=committed.append)
    time.sleep(0.1)
    assert WeightStore(folder).newest() is None
    assert stages[2]._unfinished
    stages[1].publish(v(0), {"layer1": torch.ones(2)})
    stages[2].flush(10)
    assert committed == [v(0)]
    for dtype in ("float32", "bfloat16"):
        assert list(read(folder, v(0), dtype)) == ["layer0", "layer1", "layer2"]
    for stage in stages:
        stage.close()


def test_stages_publish_in_parallel_and_every_version_is_consistent(folder: Path):
    stages = [publisher_of(folder, rank, 2, keep_versions=20) for rank in range(2)]
    for version in range(10):
        for rank, stage in enumerate(stages):
            stage.publish(v(version), {f"layer{rank}": torch.full((1000,), float(version))})
    for stage in stages:
        stage.close()
    for version in range(10):
        expected = {f"layer{rank}": torch.full((1000,), float(version)) for rank in range(2)}
        assert same(read(folder, v(version)), expected)


def test_a_missing_part_is_named(folder: Path):
    lead = publisher_of(folder, rank=2, num_stages=3, parts_timeout_s=0.1)
    other = publisher_of(folder, rank=0, num_stages=3)
    other.publish(v(0), {"a": torch.ones(1)})
    other.close()
    lead.publish(v(0), {"b": torch.ones(1)})
    with pytest.raises(PublishFailed, match=r"part of stage 1 did not arrive within 0\.1 s; check the log of learner"):
        lead.flush(10)
    with pytest.raises(PublishFailed, match="stage 1"):
        lead.publish(v(1), {"b": torch.ones(1)})
    with pytest.raises(PublishFailed, match="stage 1"):
        lead.close()


def test_a_late_part_is_named_during_the_wait(folder: Path, monkeypatch):
    clock, looks, part = [0.0], [], WeightStore.part
    monkeypatch.setattr(WeightStore, "part", lambda *arguments: (looks.append(1), part(*arguments))[1])
    lead = publisher_of(folder, rank=1, num_stages=2, clock=lambda: clock[0])
    lead.publish(v(0), {"b": torch.ones(1)})
    wait_until(lambda: len(looks) > 1, "a second look for the part")
    assert lead.waiting_for == ""
    clock[0] = 30.0
    wait_until(lambda: lead.waiting_for, "the wait to be named")
    assert lead.waiting_for == "the part of stage 0 for version 0, for 30 s"
    other = publisher_of(folder, rank=0, num_stages=2)
    other.publish(v(0), {"a": torch.ones(1)})
    lead.flush(10)
    assert lead.waiting_for == ""
    other.close()
    lead.close()


def test_one_tensor_from_two_stages_is_refused(folder: Path):
    stages = [publisher_of(folder, rank, 2) for rank in range(2)]
    for stage in stages:
        stage.publish(v(0), {"embed": torch.ones(1)})
    with pytest.raises(PublishFailed, match=r"'embed' is in part-\d.float32.safetensors and in part-\d"):
        stages[1].flush(10)
    assert WeightStore(folder).newest() is None
    stages[0].close()
