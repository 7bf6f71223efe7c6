"""A stage of the learner: timeouts of waits for other ranks, the device, and errors that count as a lost rank."""

import os
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from leeway.learner import mesh, stage
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Agreement, GpuFailed, Mesh, StageLost, is_rank_loss
from leeway.learner.report import TrainingDiverged
from leeway.learner.stage import Stage
from tests.world.learner import run_ranks
from tests.world.run_context import run_context

STARTUP_S = 250.0
DUPLICATE = """NCCL error in: NCCLUtils.cpp, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000"""
GONE = """NCCL error in: ProcessGroupNCCL.cpp:2010, remote process exited or there was a network error
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."""


def make_stage(folder: Path, **changes) -> Stage:
    context = run_context(folder, startup_timeout_s=STARTUP_S, learner=LearnerConfig(num_stages=2, **changes))
    return Stage(context, rank=0, rendezvous="")


@pytest.mark.parametrize(
    ("dtypes", "rounded"), [(("bfloat16",), True), (("float32",), False), (("bfloat16", "float32"), False)]
)
def test_rounded_weights_are_published_if_all_actors_serve_bfloat16(tmp_path, dtypes, rounded):
    learner = Stage(run_context(tmp_path, serving_dtypes=dtypes), rank=0, rendezvous="")
    policy = SimpleNamespace(published_tensors=lambda *, rounded: rounded)
    published = []
    learner._networks = SimpleNamespace(policy=policy)
    learner._publisher = SimpleNamespace(
        publish=lambda version, tensors, _: published.append((version.version, tensors))
    )
    for version in (3, 3):
        learner._publish(version)
    assert published == [(3, rounded)]


# --- waiting for other ranks ----------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch):
    """Record the actions of a stage in order, with fakes for its models and for the other ranks."""
    seen: list[str] = []

    def record(event, result=None):
        return lambda *_, **__: seen.append(event) or result

    class Ranks:
        def __init__(self, rank, timeout_s):
            self.timeout_s = timeout_s

        def all_gather(self, text):
            seen.append(f"all_gather within {self.timeout_s:g} s")
            return [text, text]

    def train_step(*_, **__):
        seen.append("step")
        raise KeyboardInterrupt  # ends the stage after one step

    policy = SimpleNamespace(exported_tensors=dict, dtype=torch.float32)
    networks = SimpleNamespace(policy=policy)
    monkeypatch.setattr(stage, "join_group", record("rendezvous"))
    monkeypatch.setattr(stage.Mesh, "build", lambda *_: None)
    monkeypatch.setattr(stage, "Agreement", Ranks)
    monkeypatch.setattr(stage, "load_networks", record("policy loaded", networks))
    monkeypatch.setattr(stage, "build_reference", record("reference loaded"))
    monkeypatch.setattr(stage, "TrainStep", train_step)
    monkeypatch.setattr(stage, "write_shard", record("shard written"))
    monkeypatch.setattr(stage, "complete_folder", record("folder written"))
    monkeypatch.setattr(dist, "barrier", record("collective"))
    monkeypatch.setattr(dist, "destroy_process_group", record("group destroyed"))
    return seen


def test_stages_wait_for_a_slow_load_or_export_until_the_startup_timeout(events, tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.learner.stage.COLLECTIVE_TIMEOUT_S", 1.0)
    learner = make_stage(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learner.setup()
    gathered = f"all_gather within {STARTUP_S:g} s"
    assert events == ["rendezvous", "policy loaded", "reference loaded", gathered, "step"]
    events.clear()
    learner.export(tmp_path)
    assert events == ["shard written", gathered, gathered, "group destroyed"]


def test_the_death_of_a_rank_is_detected_by_its_closed_connection(tmp_path):
    run_ranks("tests.integration.test_learner_stage", tmp_path, [(1, 2)])
    assert (tmp_path / "error").read_text().startswith("stage 0 could not set up: one of the ranks [1] died")


def one_rank(folder: Path, mesh: Mesh) -> None:
    """Run on each process of the test above: rank 1 dies while rank 0 waits with a timeout of an hour."""
    ranks = Agreement(mesh.place.rank, 3600.0)
    if mesh.place.rank == 0:
        with pytest.raises(StageLost) as caught:
            make_stage(folder)._guard(lambda: ranks.all_gather(""), "set up")
        (folder / "error").write_text(str(caught.value))
    os._exit(0)


# --- lost ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (dist.DistBackendError(DUPLICATE), False),
        (RuntimeError(DUPLICATE), False),
        (
            dist.DistBackendError("NCCL error in: init.cpp, ncclInvalidArgument: Invalid value for an argument."),
            False,
        ),
        (RuntimeError("a matrix has the wrong shape"), False),
        (dist.DistBackendError(GONE), True),
        (dist.DistStoreError("wait timeout after 1000ms"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (TrainingDiverged("steps 1, 2, 3. The batches are in /runs/gloo-or-NCCL/bad_batches"), False),
        (dist.DistBackendError("NCCL error: Cuda failure 700 'an illegal memory access was encountered'"), False),
    ],
)
def test_only_lost_connections_count_as_a_lost_rank(tmp_path, error, is_loss):
    def fail():
        raise error

    assert is_rank_loss(error) == is_loss
    with pytest.raises(StageLost if is_loss else type(error)) as caught:
        make_stage(tmp_path)._guard(fail, "train")
    assert (caught.value is error) != is_loss


HINTS = "\nCUDA kernel errors might be asynchronously reported at some other API call.\n"


@pytest.mark.parametrize(
    ("message", "is_fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error", True),
        ("CUDA error: unspecified launch failure", True),
        ("NCCL error in: NCCLUtils.cpp, unhandled cuda error\nCuda failure 719 'unspecified launch failure'", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_hardware_fault_counts_as_a_failed_gpu_and_a_bug_does_not(tmp_path, message, is_fault):
    """The messages are CUDA errors as raised by torch; no GPU is used."""
    error = torch.AcceleratorError(message + HINTS)

    def fail():
        raise error

    with pytest.raises(GpuFailed if is_fault else torch.AcceleratorError) as caught:
        make_stage(tmp_path)._guard(fail, "train")
    if is_fault:
        first = message.splitlines()[0]
        assert f"stage 0 could not train: its GPU cpu failed: AcceleratorError: {first}. Check" in str(caught.value)
        assert "\n" not in str(caught.value)
    else:
        assert caught.value is error


# --- the device -----------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Fake two GPUs and return the current device by thread."""
    current: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): device}))
    return current


def test_every_thread_that_enters_a_stage_uses_its_gpu(events, gpus, tmp_path):
    learner = make_stage(tmp_path, gpus=1)
    with pytest.raises(KeyboardInterrupt):
        learner.setup()
    assert gpus.pop(threading.get_ident()) == torch.device("cuda", 0)
    another = threading.Thread(target=learner.export, args=(tmp_path,))
    another.start()
    another.join()
    assert list(gpus.values()) == [torch.device("cuda", 0)]


def test_a_stage_limits_its_memory_on_a_shared_gpu_before_the_rendezvous(events, gpus, tmp_path, monkeypatch):
    caps = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: caps.append((*args, list(events))))
    with pytest.raises(KeyboardInterrupt):
        make_stage(tmp_path, gpus=0.6).setup()
    assert caps == [(0.6, torch.device("cuda", 0), [])]


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_the_process_group_gets_the_gpu_or_no_device_on_a_cpu(monkeypatch, device):
    passed = {}
    store = SimpleNamespace(set_timeout=lambda limit: passed.update(store_s=limit.seconds))
    monkeypatch.setattr(dist, "TCPStore", lambda *at, **_: passed.update(met_s=at[4].seconds) or store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: passed.update(options, backend=backend))
    monkeypatch.setattr(mesh, "_interface_to", lambda *_: None)
    limits = {"rendezvous_timeout": timedelta(seconds=300), "timeout": timedelta(seconds=1)}
    mesh.join_group("tcp://127.0.0.1:1", torch.device(device), rank=1, num_ranks=2, **limits)
    assert (passed["met_s"], passed["store_s"], passed["timeout"].seconds) == (300, 1, 1), "the last rank may join late"
    if device == "cpu":
        assert (passed["backend"], passed["device_id"]) == ("gloo", None)
    else:
        assert (passed["backend"], passed["device_id"]) == ("cpu:gloo,cuda:nccl", torch.device("cuda", 1))


@pytest.mark.parametrize("chosen", [None, "eth7"])
def test_ranks_communicate_only_over_the_interface_of_the_rendezvous(monkeypatch, chosen):
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **__: SimpleNamespace(set_timeout=lambda _: None))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, chosen or "")
        if chosen is None:
            monkeypatch.delenv(name)
    limits = {"rendezvous_timeout": timedelta(seconds=1), "timeout": timedelta(seconds=1)}
    mesh.join_group("tcp://127.0.0.1:1", torch.device("cpu"), rank=1, num_ranks=2, **limits)
    assert os.environ["GLOO_SOCKET_IFNAME"] == (chosen or "lo")
    assert os.environ["NCCL_SOCKET_IFNAME"] == (chosen or "=lo")
