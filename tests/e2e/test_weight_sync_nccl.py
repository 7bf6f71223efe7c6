"""vLLM's own NCCL sender with our source and our calls: all of it but the broadcast itself, which takes two GPUs."""

import pytest
import torch
import torch.distributed as dist

from common.staleness import PolicyVersion
from weight_sync.nccl import Broadcast, EngineCalls, StageWeightSource

# of vLLM's own imports
pytestmark = pytest.mark.filterwarnings("ignore")


class Told:
    """Engines that remember what they were told."""

    def __init__(self):
        self.versions = []

    def join(self, init_info):
        raise AssertionError("not part of a version")

    def receive(self, version, update_info):
        self.versions.append((version, update_info))


def test_vllms_sender_takes_the_gathered_weights_and_tells_the_engines_what_they_can_read(tmp_path, monkeypatch):
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerWeightTransferEngine,
        NCCLWeightTransferUpdateInfo,
    )

    sent = {}

    def broadcast(self, source, meta):
        # vLLM's own check that iteration yields what was announced
        sent.update((name, tensor.clone()) for name, tensor in self._checked_iter(source, meta))

    monkeypatch.setattr(NCCLTrainerWeightTransferEngine, "_broadcast", broadcast)
    weights = {"b": torch.randn(3, 2), "a": torch.randn(5)}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        source = StageWeightSource(lambda: weights, dist.group.WORLD, "bfloat16")
        engines = Told()
        calls = EngineCalls(engines)
        sender = NCCLTrainerWeightTransferEngine(client=calls, source=source)
        Broadcast(sender, calls, num_engines=1, timeout_s=30).send(PolicyVersion(0, 4))
    finally:
        dist.destroy_process_group()
    assert sent.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name].to(torch.bfloat16)) for name, tensor in sent.items())
    [(version, update_info)] = engines.versions
    assert version == (0, 4)
    told = NCCLWeightTransferUpdateInfo(**update_info)
    assert (told.names, told.dtype_names, told.shapes) == (["a", "b"], ["bfloat16"] * 2, [[5], [3, 2]])
