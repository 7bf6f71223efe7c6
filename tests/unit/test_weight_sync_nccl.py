"""Broadcast: what can be tested without GPUs. The stages are processes over gloo; vLLM's sender is a fake."""

import threading
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.staleness import PolicyVersion
from learner.mesh import Mesh
from tests.unit.small_models import Model, load
from tests.unit.two_pass import run_ranks
from weight_sync import nccl
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import PublishFailed
from weight_sync.nccl import Broadcast, EngineCalls, StageWeightSource, check_transport, within

NUM_STAGES = 3
VERSION = PolicyVersion(0, 3)


# --- in the processes of the stages ---------------------------------------------------------------


def one_rank(folder: Path, mesh: Mesh) -> None:
    stage = load(folder / "model", mesh.place.stage, NUM_STAGES)
    source = StageWeightSource(stage.published_tensors, mesh.pipeline, "bfloat16")
    sent = take(source, folder / "first")
    if source.is_lead:
        assert sent == [(meta.name, meta.shape) for meta in source.metadata()]
        assert {meta.dtype for meta in source.metadata()} == {torch.bfloat16}
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(1.0)
    take(source, folder / "second")
    refuse_a_tensor_on_two_stages(mesh)
    miss_a_stage(folder, mesh)


def take(source: StageWeightSource, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Iterate once; the lead writes down what came, and sees that it holds no two tensors of others."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    files: dict[str, torch.Tensor] = {}
    received: list[weakref.ref[torch.Tensor]] = []
    recv = dist.recv

    def watched(tensor: torch.Tensor, **told: object) -> None:
        assert all(before() is None for before in received)
        received.append(weakref.ref(tensor))
        recv(tensor, **told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv", watched)
        for name, tensor in source:
            seen.append((name, tuple(tensor.shape)))
            files[name] = tensor.clone()
            del tensor
    assert bool(received) == source.is_lead
    if source.is_lead:
        save_file(files, folder.with_suffix(".safetensors"))
    return seen


def refuse_a_tensor_on_two_stages(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="tensor 'w' is on stage 0 and on stage 1"):
        StageWeightSource(lambda: {"w": torch.zeros(2)}, mesh.pipeline, "float32")


def miss_a_stage(folder: Path, mesh: Mesh) -> None:
    """The first stage never sends: the lead's wait ends with the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    stage = mesh.place.stage
    source = StageWeightSource(lambda: {f"w{stage}": torch.full((2,), float(stage))}, group, "float32")
    if source.is_lead:
        started_s = time.monotonic()
        with pytest.raises(RuntimeError):
            next(iter(source))
        (folder / "waited").write_text(str(time.monotonic() - started_s))
    dist.barrier()


# --- in the test's own process --------------------------------------------------------------------


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    Model("llama", tied=True).save(folder / "model")
    run_ranks("tests.unit.test_weight_sync_nccl", folder, [(1, NUM_STAGES)])
    return folder


def whole_model(folder: Path) -> dict[str, torch.Tensor]:
    """With a head of its own, as it is published."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).state_dict()


def test_the_lead_hands_on_the_tensors_of_all_stages_and_at_every_pass_those_of_then(gathered: Path):
    truth = whole_model(gathered)
    for name, change in (("first", 0.0), ("second", 1.0)):
        found = load_file(gathered / f"{name}.safetensors")
        assert found.keys() == truth.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, (truth[key] + change).to(torch.bfloat16)), (name, key)


def test_a_stage_that_does_not_come_ends_the_leads_wait_within_the_timeout_of_the_group(gathered: Path):
    assert 1 < float((gathered / "waited").read_text()) < 30


class FakeEngines:
    def __init__(self) -> None:
        self.received: list[tuple[PolicyVersion, Mapping[str, object]]] = []

    def join(self, init_info: Mapping[str, object]) -> None:
        raise AssertionError("not part of a version")

    def receive(self, version: PolicyVersion, update_info: Mapping[str, object]) -> None:
        self.received.append((version, update_info))


def test_engines_are_told_the_version_and_what_is_sent_in_one_call():
    engines = FakeEngines()
    calls = EngineCalls(engines)

    def send_weights() -> None:
        # as vLLM's sender does
        calls.start_weight_update()
        calls.update_weights({"names": ["w"]})
        calls.finish_weight_update()

    Broadcast(SimpleNamespace(send_weights=send_weights), calls, 2, 5.0).send(VERSION)
    assert engines.received == [(VERSION, {"names": ["w"]})]


def test_a_broadcast_that_an_engine_does_not_join_ends_within_its_bound_and_names_what_it_waited_for():
    for_ever = threading.Event()
    broadcast = Broadcast(SimpleNamespace(send_weights=for_ever.wait), EngineCalls(FakeEngines()), 2, 0.1)
    started_s = time.monotonic()
    with pytest.raises(PublishFailed, match=r"all 2 engines to take version 0.3, which did not happen within 0.1 s"):
        broadcast.send(VERSION)
    assert time.monotonic() - started_s < 5
    for_ever.set()


def test_a_broadcast_that_fails_says_why():
    def fails() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    with pytest.raises(PublishFailed, match="which failed: NCCL error"):
        within(fails, 5.0, "engines")


def test_nccl_is_refused_with_what_is_missing_and_without_a_gpu_nothing_is_opened(monkeypatch):
    check_transport(WeightSyncConfig())
    with pytest.raises(ValueError, match=r"nothing carries these calls .* Use 'auto'"):
        check_transport(WeightSyncConfig(transport="nccl"))
    monkeypatch.setattr(nccl.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        Broadcast.open(None, FakeEngines(), address="host", port=1, num_engines=1, gpus_per_engine=1, timeout_s=1)
