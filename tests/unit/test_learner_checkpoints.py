"""Checkpoints of one process: atomic and asynchronous writes, checksums, and rejection of other models."""

import errno
import io
import json
import math
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem
from transformers import LlamaConfig, LlamaForCausalLM

from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.common.files import leftovers
from leeway.common.hf_folder import model_identity
from leeway.learner import checkpoint as checkpoint_file
from leeway.learner.batch import Leaves
from leeway.learner.checkpoint import CheckpointFailed, CheckpointMismatch, Checkpoints, TrainingProgress, live_tensors
from leeway.learner.checkpoint_files import META_NAME, CheckpointMeta, DamagedCheckpoint
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh, MeshPlace, StageLost
from leeway.learner.networks import Networks
from leeway.learner.packing import micro_batches_required
from leeway.learner.report import MetricsFile
from tests.world.learner import build, make_networks, make_rows, single_rank, weights_of

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=10)  # a learning rate high enough to show a failed restore
BALANCE = TrajectoryBalanceConfig()
CRITIC_HEAD = OffPolicyPPOConfig(baseline="value_head")
CRITIC_MODEL = OffPolicyPPOConfig(baseline="critic")
DAMAGES = ["flip", "truncate", "lengthen", "missing"]


@pytest.fixture(autouse=True)
def process_group():
    with single_rank():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def make_model(folder: Path, **changes) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).double().save_pretrained(folder)
    return folder


def networks_of(model: Path, algorithm=BALANCE, precision="float64") -> Networks:
    return make_networks(model, CONFIG, algorithm, precision=precision)[0]


def test_checkpoint_metadata_may_have_unknown_fields_but_must_match_its_checksum(tmp_path):
    document = json.loads(CheckpointMeta(TrainingProgress(7, 7, 0), 1, 1, "", {}).encode())
    del document["xxh3"]
    document["progress"]["reports"] = ["{}"]
    seal = xxhash.xxh3_64_hexdigest(json.dumps(document, sort_keys=True).encode())
    other = document | {"xxh3": seal}
    (tmp_path / META_NAME).write_text(json.dumps(other))
    assert CheckpointMeta.read(tmp_path).progress.step == 7
    other["progress"]["version"] = 8
    (tmp_path / META_NAME).write_text(json.dumps(other))
    with pytest.raises(DamagedCheckpoint, match="checksum"):
        CheckpointMeta.read(tmp_path)


def test_metrics_have_one_row_per_step_after_restarts_and_a_full_disk(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(FileNotFoundError, match="share the run folder"):
        MetricsFile(path).truncate(0)
    path.touch()
    first = MetricsFile(path)
    first.truncate(0)
    for step in (1, 2, 3):
        first.append({"step": step, "loss": math.nan, "lag_by_actor": {"actor-0": {10: step}}})
    with path.open("ab") as file:
        file.write(b'{"step": 4, "lo')  # the partial row of a killed learner
    second = MetricsFile(path)
    second.truncate(2)
    path.rename(tmp_path / "aside")
    second.append({"step": 3})
    assert "metrics.jsonl cannot be written" in caplog.text
    (tmp_path / "aside").rename(path)
    with path.open("ab") as file:
        file.write(b'{"st')  # a partial write on a full disk
    second.append({"step": 4})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"step": 1, "loss": None, "lag_by_actor": {"actor-0": {"10": 1}}}
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    third = MetricsFile(path)
    third.truncate(9)
    third.append({"step": 5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl has a line that is not JSON: .*; remove that line"):
        MetricsFile(path).truncate(2)


def checkpoints_in(folder: Path, keep=2, timeout_s=300.0, **options) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep, Mesh.build(MeshPlace(0)), timeout_s, **options)


def take_step(networks: Networks, seed: int) -> None:
    place = networks.mesh.place
    least, multiple = micro_batches_required("interleaved_1f1b", place.num_stages)
    rule = {"num_replicas": place.num_replicas, "min_micro_batches": least, "multiple": multiple}
    batch = networks.on_device(build(make_rows(seed), **rule).packed)
    leaves = networks.forward_only(batch)
    gradient = None
    if leaves is not None:
        values_T = None if leaves.values_T is None else leaves.values_T - 1
        gradient = Leaves(torch.ones_like(leaves.logprobs_T), values_T)
    networks.train(batch, gradient)
    lr_scale = 1.0 if place.is_coordinator else None
    assert networks.update(0, lr_scale).taken


def save(checkpoints: Checkpoints, networks: Networks, step: int) -> None:
    checkpoints.save(networks, TrainingProgress(step, step, 0))
    checkpoints.wait()


def test_the_checkpoint_writer_does_not_wait_for_the_gpu(tmp_path, model, monkeypatch):
    networks, checkpoints = networks_of(model), checkpoints_in(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        filesystem, "_OverlappingCpuLoader", lambda *_, **__: pytest.fail("the writer waits for the GPU")
    )
    save(checkpoints, networks, 1)
    assert checkpoints.steps() == [1]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes({"truncate": content[: len(content) // 2], "lengthen": content + b"\0"}.get(how, content))


def same(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("algorithm", [BALANCE, CRITIC_HEAD, CRITIC_MODEL], ids=["none", "head", "model"])
def test_a_restored_run_continues_bit_for_bit(tmp_path, model, algorithm, precision):
    first = networks_of(model, algorithm, precision)
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.restore(first) is None
    for step in (1, 2, 3):
        take_step(first, seed=step)
        save(checkpoints, first, step)
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.released() == 2, "a restart may have to use the older checkpoint"
    assert checkpoints.released() is None
    draws = torch.rand(3)
    take_step(first, seed=4)

    torch.rand(5)
    second = networks_of(model, algorithm, precision)
    untouched = weights_of(second)
    assert checkpoints_in(tmp_path).restore(second).step == 3
    assert torch.equal(torch.rand(3), draws), "the state of the random generator is restored"
    take_step(second, seed=4)
    assert same(weights_of(first), weights_of(second))
    assert not same(weights_of(first), untouched)


def test_a_bfloat16_run_saves_the_same_float32_tensors_as_a_float32_run(model):
    wide, rounded = (live_tensors(networks_of(model, CRITIC_MODEL, precision)) for precision in ("float32", "bfloat16"))
    assert wide.keys() == rounded.keys()
    for name, tensors in wide.items():
        assert [tensor.dtype for tensor in rounded[name]] == [tensor.dtype for tensor in tensors] == [torch.float32]


def test_a_run_restored_without_optimizer_moments_diverges_from_the_original(tmp_path, model):
    first, second = networks_of(model), networks_of(model)
    checkpoints = checkpoints_in(tmp_path)
    take_step(first, seed=1)
    save(checkpoints, first, 1)
    checkpoints.restore(second)
    for tensor in second.optimizers[0].state().values():
        tensor.zero_()
    for networks in (first, second):
        take_step(networks, seed=2)
    assert not same(weights_of(first), weights_of(second))


def test_a_restore_returns_the_saved_training_progress(tmp_path, model):
    progress = TrainingProgress(7, 12, 3, non_finite_steps=(6, 7), learning_rate=0.0)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(networks_of(model), progress)
    checkpoints.wait()
    assert checkpoints_in(tmp_path).restore(networks_of(model)) == progress


def test_training_continues_during_a_checkpoint_write_and_does_not_change_it(tmp_path, model, monkeypatch):
    resume, write = threading.Event(), checkpoint_file.save
    monkeypatch.setattr(checkpoint_file, "save", lambda *args, **kwargs: resume.wait(60) and write(*args, **kwargs))
    networks = networks_of(model)
    take_step(networks, seed=1)
    saved = weights_of(networks)
    checkpoints = checkpoints_in(tmp_path)
    checkpoints.save(networks, TrainingProgress(1, 1, 0))
    take_step(networks, seed=2)
    assert checkpoints.released() is None
    assert checkpoints.steps() == []
    resume.set()
    checkpoints.wait()
    assert checkpoints.released() == 1
    assert checkpoints.restore(networks).step == 1
    assert same(weights_of(networks), saved)


def test_a_checkpoint_that_exceeds_its_timeout_raises_an_error(tmp_path, model, monkeypatch):
    resume, write = threading.Event(), checkpoint_file.save
    monkeypatch.setattr(checkpoint_file, "save", lambda *args, **kwargs: resume.wait(60) and write(*args, **kwargs))
    checkpoints = checkpoints_in(tmp_path, timeout_s=0.2)
    networks = networks_of(model)
    checkpoints.save(networks, TrainingProgress(1, 1, 0))
    with pytest.raises(CheckpointFailed, match=r"rank 0: .*step-00000001 was not written within 0.2 s"):
        checkpoints.save(networks, TrainingProgress(2, 2, 0))
    checkpoints._timeout_s = 300.0  # the first write of a process imports modules, which may take a second
    resume.set()
    save(checkpoints, networks, 2)
    assert checkpoints.steps() == [1, 2], "the slow write completes undisturbed"


@pytest.mark.parametrize(
    ("message", "error", "reason"),
    [
        ("gloo/tcp/pair.cc:537] Read error [h]:1: Connection reset by peer", StageLost, "another rank died"),
        ("gloo/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms", CheckpointFailed, "another rank timed out"),
    ],
)
def test_a_dead_rank_is_a_lost_stage_but_a_slow_rank_is_a_failed_checkpoint(
    tmp_path, model, monkeypatch, message, error, reason
):
    checkpoints = checkpoints_in(tmp_path)

    def all_gather(_):
        raise RuntimeError(message)

    monkeypatch.setattr(checkpoints._ranks, "all_gather", all_gather)
    checkpoints.save(networks_of(model), TrainingProgress(1, 1, 0))
    with pytest.raises(error, match=f"rank 0: .*step-00000001 was not completed because {reason}: RuntimeError"):
        checkpoints.wait()


@pytest.mark.parametrize("call", [Checkpoints.released, Checkpoints.wait, Checkpoints.close, "save"])
def test_a_full_disk_raises_at_the_next_call_and_keeps_the_previous_checkpoint(tmp_path, model, monkeypatch, call):
    networks = networks_of(model)
    checkpoints = checkpoints_in(tmp_path, keep=1)
    save(checkpoints, networks, 1)
    saved = weights_of(networks)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_file, "save", full)
        checkpoints.save(networks, TrainingProgress(2, 2, 0))
        checkpoints._in_progress[1].exception(20)
    with pytest.raises(CheckpointFailed, match=r"rank 0 could not write .*step-00000002: .*No space left"):
        checkpoints.save(networks, TrainingProgress(3, 3, 0)) if call == "save" else call(checkpoints)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000001"]
    take_step(networks, seed=1)
    assert checkpoints.restore(networks).step == 1
    assert same(weights_of(networks), saved)
    save(checkpoints, networks, 2)
    assert checkpoints.steps() == [2]


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "meta.json"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_logged_and_the_previous_one_is_restored(tmp_path, model, caplog, file, how):
    networks = networks_of(model)
    checkpoints = checkpoints_in(tmp_path)
    for step in (1, 2):
        take_step(networks, seed=step)
        save(checkpoints, networks, step)
    damaged = tmp_path / "checkpoints" / "step-00000002"
    damage(damaged / file, how)
    restored = networks_of(model)
    assert checkpoints_in(tmp_path).restore(restored).step == 1
    if (file, how) != ("meta.json", "missing"):  # without meta.json a checkpoint counts as incomplete
        assert str(damaged / file) in caplog.text
        assert "rank 0 could not use the checkpoint" in caplog.text
        assert (tmp_path / "checkpoints" / "damaged-step-00000002" / "__0_0.distcp").exists() or how == "missing"
    take_step(restored, seed=2)
    assert same(weights_of(restored), weights_of(networks))


def test_no_tensor_changes_if_every_checkpoint_is_damaged(tmp_path, model):
    networks = networks_of(model)
    checkpoints = checkpoints_in(tmp_path)
    for step in (1, 2):
        take_step(networks, seed=step)
        save(checkpoints, networks, step)
        damage(tmp_path / "checkpoints" / f"step-0000000{step}" / "__0_0.distcp", "flip")
    restored = networks_of(model)
    before = weights_of(restored)
    with pytest.raises(CheckpointFailed, match=r"no intact checkpoint in .*steps \[2, 1\].*move that folder away"):
        checkpoints.restore(restored)
    assert same(weights_of(restored), before)
    assert checkpoints.steps() == [1, 2], "damaged checkpoints are still listed"


def test_a_failed_read_of_a_checkpoint_changes_no_tensor(tmp_path, model, monkeypatch):
    networks = networks_of(model)
    checkpoints = checkpoints_in(tmp_path)
    take_step(networks, seed=1)
    save(checkpoints, networks, 1)
    restored, load = networks_of(model), checkpoint_file.load
    before = weights_of(restored)

    def fail_after_load(state, **kwargs):
        load(state, **kwargs)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_file, "load", fail_after_load)
    with pytest.raises(CheckpointFailed):
        checkpoints.restore(restored)
    assert same(weights_of(restored), before)


MISMATCHES = {
    "vocabulary": ({"vocab_size": 32}, BALANCE, r"embed_tokens.weight has shape \[40, 16\] .* but shape \[32, 16\]"),
    "width": (
        {"hidden_size": 32},
        BALANCE,
        r"has shape \[.*16.*\] \(torch.float64\) .* but shape \[.*32",
    ),
    "deeper": ({"num_hidden_layers": 5}, BALANCE, r"it has no tensor model\.layers\.4\."),
    "shallower": (
        {"num_hidden_layers": 3},
        BALANCE,
        r"this run has no tensor (\w+\.)*layers\.3\.",
    ),
    "untied": ({"tie_word_embeddings": False}, BALANCE, r"it has no tensor lm_head\.weight"),
    "critic head": ({}, CRITIC_HEAD, r"it has no tensor value_head\.\w+ .*\[algorithm\]"),
    "critic model": ({}, CRITIC_MODEL, r"it has no tensor critic\..*\[algorithm\]"),
    "positions": (
        {"rope_theta": 5.0},
        BALANCE,
        r"written for the model llama-\w+, but this run trains llama-\w+",
    ),
}


@pytest.mark.parametrize(("changes", "algorithm", "message"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_checkpoint_of_another_model_is_rejected_with_a_tensor_name(tmp_path, model, changes, algorithm, message):
    save(checkpoints_in(tmp_path, model=model_identity(model)), networks_of(model), 1)
    other = make_model(tmp_path / "other", **changes)
    networks = networks_of(other, algorithm)
    before = weights_of(networks)
    path = tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(CheckpointMismatch, match=rf"checkpoint {path} does not belong to this run: .*{message}"):
        checkpoints_in(tmp_path, model=model_identity(other)).restore(networks)
    assert same(weights_of(networks), before)
    assert checkpoints_in(tmp_path).steps() == [1]


def test_a_checkpoint_with_a_critic_is_rejected_by_a_run_without_one(tmp_path, model):
    save(checkpoints_in(tmp_path), networks_of(model, CRITIC_HEAD), 1)
    with pytest.raises(CheckpointMismatch, match=r"this run has no tensor .*value_head.*\[algorithm\]"):
        checkpoints_in(tmp_path).restore(networks_of(model))


def test_leftovers_of_a_crash_are_removed_and_not_listed_as_checkpoints(tmp_path, model):
    checkpoints = checkpoints_in(tmp_path)
    save(checkpoints, networks_of(model), 1)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000001", folder / ".step-00000002.tmp")
    shutil.copytree(folder / "step-00000001", folder / ".step-00000000.old")
    shutil.copytree(folder / "step-00000001", folder / "step-00000003")
    (folder / "step-00000003" / "meta.json").unlink()
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.steps() == [1]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000003"]


def test_an_old_checkpoint_that_cannot_be_removed_is_reported_and_retried(tmp_path, model, monkeypatch):
    checkpoints = checkpoints_in(tmp_path, keep=1)
    folder, networks = tmp_path / "checkpoints", networks_of(model)
    save(checkpoints, networks, 1)
    real = shutil.rmtree

    def busy(path, ignore_errors=False):
        if ".old" not in Path(path).name:
            real(path, ignore_errors)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        for step in (2, 3, 2, 4):  # a repeated step needs a unique leftover name
            save(checkpoints, networks, step)
            shutil.rmtree(folder / "step-00000003", ignore_errors=True)
        checkpoints = checkpoints_in(tmp_path, keep=1)
    assert checkpoints.steps() == [4]
    left = sorted(path.name.split(".")[1] for path in folder.glob(".step*.old"))
    assert left == ["step-00000001", "step-00000002", "step-00000002"]
    texts = [text for path, text in leftovers.items() if path.parent == folder]
    assert len(texts) == 3, "each leftover is reported once"
    assert texts[0].startswith(f"{folder}/.step-00000001.")
    assert ".old cannot be removed and takes up disk space ([Errno 16] Device or resource busy): remove it" in texts[0]
    assert checkpoints.restore(networks).step == 4
    save(checkpoints, networks, 5)
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


def test_an_old_checkpoint_that_cannot_be_renamed_does_not_retain_draw_records(tmp_path, model, monkeypatch):
    checkpoints = checkpoints_in(tmp_path, keep=1)
    networks = networks_of(model)
    save(checkpoints, networks, 1)
    assert checkpoints.released() == 1
    real_rename, real_rmtree = Path.rename, shutil.rmtree

    def deny(path):
        if path.name == "step-00000001":
            raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "rename", lambda path, target: deny(path) or real_rename(path, target))
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or deny(path) or real_rmtree(path)
    )
    for step in (2, 3):
        save(checkpoints, networks, step)
        assert checkpoints.released() == step
    assert checkpoints.steps() == [1, 3]
    assert checkpoints_in(tmp_path, keep=1).restore(networks).step == 3


def test_a_leftover_temporary_folder_does_not_block_a_checkpoint(tmp_path, model, monkeypatch):
    checkpoints = checkpoints_in(tmp_path)
    networks = networks_of(model)
    (tmp_path / "checkpoints" / ".step-00000001.tmp" / "mounted").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
        save(checkpoints, networks, 1)
    assert checkpoints_in(tmp_path).restore(networks).step == 1


@pytest.mark.parametrize("after_bytes", [0, 100, 5000, 100_000])
def test_a_full_disk_error_reports_the_free_and_the_required_space(tmp_path, model, monkeypatch, after_bytes):
    class Small(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > after_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    @contextmanager
    def on_a_small_disk(_, path, mode):
        with Small(path, mode) as raw, io.BufferedWriter(raw) as stream:
            yield stream

    checkpoints, networks = checkpoints_in(tmp_path), networks_of(model)
    monkeypatch.setattr(FileSystem, "create_stream", on_a_small_disk)
    checkpoints.save(networks, TrainingProgress(1, 1, 0))
    error = r"step-00000001: OSError: \[Errno 28\] No space left on device. The disk has \d+ MiB free; a rank needs \d+"
    with pytest.raises(CheckpointFailed, match=error):
        checkpoints.wait()


def test_damaged_checkpoints_do_not_count_towards_the_number_to_keep(tmp_path, model):
    networks = networks_of(model)
    checkpoints = checkpoints_in(tmp_path, keep=2)
    for step in (1, 4):
        save(checkpoints, networks, step)
    damage(tmp_path / "checkpoints" / "step-00000004" / "__0_0.distcp", "flip")
    checkpoints = checkpoints_in(tmp_path, keep=1)
    assert checkpoints.restore(networks).step == 1
    save(checkpoints, networks, 2)
    assert checkpoints_in(tmp_path).restore(networks).step == 2


def test_an_unwritable_checkpoint_folder_raises_an_error_before_training(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointFailed, match=rf"rank 0 could not write to the checkpoint folder {tmp_path}"):
        checkpoints_in(tmp_path)
