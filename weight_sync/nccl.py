"""Weights from GPU to GPU: vLLM's own NCCL broadcast, instead of a store that is pulled from.

    every stage   StageWeightSource    its own tensors; the lead also those of the others, one at a time
    the lead      Broadcast            vLLM's sender: tells the engines what comes, and sends it
    every actor   Engine.join          meets the lead; then Engine.apply(BroadcastVersion) for each version

It is a rendezvous: all engines have to come to every version, one that is missing holds the others and the learner
up until a bound ends the wait, and nobody joins later. Checksums do not travel with it. So pulling is the default.

NEVER RUN: what needs NCCL (`Broadcast.open` and what vLLM does in it) has not run on any machine of this project, as
it takes two GPUs. What runs in the tests: the gathering of the stages, over gloo, and the bounds. And one thing is
missing, so that `check_transport` refuses it in a run: nobody carries the calls of `Engines` from the learner to the
actors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from common.staleness import PolicyVersion
from weight_sync.config import WeightSyncConfig
from weight_sync.errors import PublishFailed
from weight_sync.tensors import DTYPES

R = TypeVar("R")


class Meta(NamedTuple):
    """One tensor as it is sent; what vLLM calls ParamMeta."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class StageWeightSource:
    """The weights of all pipeline stages, in one fixed order, as vLLM's trainer wants them (its `WeightSource`).

    Not derived from vLLM's class, which its sender does not ask for: the learner imports no vLLM for it.

    All stages iterate at the same time: the others send their tensors to the lead, which yields all. The lead holds
    one tensor of another stage at a time, as long as whoever iterates keeps none.
    """

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], group: dist.ProcessGroup, dtype: str) -> None:
        """Tell each other what there is; all stages call it together.

        Args:
            tensors: this stage's share now, by the names of a Hugging Face checkpoint; asked for at every iteration.
            group: the stages of one replica, in order; the last one leads. Its timeout bounds every wait.
            dtype: what the engines serve, as "bfloat16".

        Raises:
            ValueError: two stages have a tensor of the same name.
            RuntimeError: a stage did not come within the timeout of the group.
        """
        self._tensors = tensors
        self._group = group
        self._dtype = DTYPES[dtype]
        self._stage = dist.get_rank(group)
        self._lead = dist.get_world_size(group) - 1
        self._order = self._meet()

    @property
    def is_lead(self) -> bool:
        """Does this stage hand the weights on?"""
        return self._stage == self._lead

    def metadata(self) -> list[Meta]:
        """What iteration on the lead yields: the whole model, on every stage."""
        return [Meta(name, self._dtype, shape) for _, name, shape in self._order]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its name; on other stages than the lead their own, once the lead has it.

        Raises:
            RuntimeError: a stage did not iterate too, within the timeout of the group.
        """
        own = self._tensors()
        device = next(iter(own.values())).device
        for stage, name, shape in self._order:
            if stage == self._stage:
                tensor = own[name].detach().to(self._dtype).contiguous()
                if not self.is_lead:
                    dist.send(tensor, group=self._group, group_dst=self._lead)
            elif self.is_lead:
                tensor = torch.empty(shape, dtype=self._dtype, device=device)
                dist.recv(tensor, group=self._group, group_src=stage)
            else:
                continue
            yield name, tensor
            # before the next one is made
            del tensor

    def _meet(self) -> list[tuple[int, str, tuple[int, ...]]]:
        own = sorted((name, tuple(tensor.shape)) for name, tensor in self._tensors().items())
        order: list[tuple[int, str, tuple[int, ...]]] = []
        for stage in range(self._lead + 1):
            text = msgspec.json.encode(own) if stage == self._stage else b""
            size = torch.tensor([len(text)])
            dist.broadcast(size, group=self._group, group_src=stage)
            data = torch.zeros(int(size), dtype=torch.uint8)
            if stage == self._stage:
                data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(data, group=self._group, group_src=stage)
            found = msgspec.json.decode(data.numpy().tobytes(), type=list[tuple[str, tuple[int, ...]]])
            order += [(stage, name, shape) for name, shape in found]
        holder: dict[str, int] = {}
        for stage, name, _ in order:
            if name in holder:
                raise ValueError(
                    f"tensor '{name}' is on stage {holder[name]} and on stage {stage}; "
                    "every tensor is published by exactly one pipeline stage"
                )
            holder[name] = stage
        return order


class Engines(Protocol):
    """All engines of a run, as the lead calls them. Each call returns once every engine has done it."""

    def join(self, init_info: dict[str, Any]) -> None:
        """`Engine.join` on each."""
        ...

    def receive(self, version: PolicyVersion, update_info: dict[str, Any]) -> None:
        """`Engine.apply` with a `BroadcastVersion` on each; they wait inside it for what the lead sends."""
        ...


class Sender(Protocol):
    """vLLM's trainer engine, as far as it is used here."""

    def send_weights(self) -> None:
        """Tell the engines what comes, and send it."""
        ...


class EngineCalls:
    """`Engines` as vLLM's sender calls them (its `VLLMWeightSyncClient`); an update is one call there, three here."""

    def __init__(self, engines: Engines) -> None:
        """Args:
        engines: of the run.
        """
        self._engines = engines
        self.version: PolicyVersion | None = None
        """What is sent now."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have all engines join."""
        self._engines.join(init_info)

    def start_weight_update(self) -> None:
        """Nothing: `receive` pauses, loads and goes on."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have all engines receive."""
        assert self.version is not None
        self._engines.receive(self.version, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing: see `start_weight_update`."""


class Broadcast:
    """Sends versions to all engines at once. Every stage of the first replica has one; all call `send` together."""

    def __init__(self, sender: Sender, calls: EngineCalls, num_engines: int, timeout_s: float) -> None:
        """See `open`."""
        self._sender = sender
        self._calls = calls
        self._num_engines = num_engines
        self._timeout_s = timeout_s

    @classmethod
    def open(
        cls,
        source: StageWeightSource,
        engines: Engines,
        *,
        address: str,
        port: int,
        num_engines: int,
        gpus_per_engine: int,
        timeout_s: float,
    ) -> Broadcast:
        """Meet the engines. Never run: see the top of this file.

        Args:
            source: of this stage.
            engines: asked by the lead alone.
            address: of the lead's host, as the engines see it.
            port: free there.
            num_engines: how many come.
            gpus_per_engine: actors.tensor_parallel_size.
            timeout_s: of this meeting, and of every version.

        Raises:
            ValueError: torch sees no GPU.
            PublishFailed: not all of them came in time.
        """
        _check_gpus()
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        # rank 0 sends; only the lead meets the engines, so the others merely must not be 0
        rank = 0 if source.is_lead else 1
        info = NCCLTrainerInitInfo(address, port, 1 + num_engines * gpus_per_engine, rank=rank)
        calls = EngineCalls(engines)
        sender = within(
            lambda: NCCLTrainerWeightTransferEngine.trainer_init(info, client=calls, source=source),
            timeout_s,
            f"the {num_engines} engines to meet at {address}:{port}",
        )
        return cls(sender, calls, num_engines, timeout_s)

    def send(self, version: PolicyVersion) -> None:
        """Send the weights that the stages hold now; they must not change before this returns.

        Raises:
            PublishFailed: not all engines took it in time, or one failed. Some may serve it, some not, and the
                broadcast cannot be used again: end the run, and start it with transport = 'auto'.
        """
        self._calls.version = version
        within(
            self._sender.send_weights,
            self._timeout_s,
            f"all {self._num_engines} engines to take version {version}",
        )


def check_transport(config: WeightSyncConfig) -> None:
    """Refuse a transport that this release cannot launch.

    Raises:
        ValueError: says what is missing.
    """
    if config.transport != "nccl":
        return
    raise ValueError(
        "weight_sync.transport = 'nccl' cannot be launched yet: stages are gathered (StageWeightSource) and engines "
        "can join and receive (Engine.join, Engine.apply), but nothing carries these calls from the learner to the "
        "actors (weight_sync.nccl.Engines). Use 'auto', which pulls"
    )


def within(call: Callable[[], R], timeout_s: float, what: str) -> R:
    """Run a call that may never return, and wait for it no longer than this.

    Args:
        call: runs in a thread; given up on, it keeps the thread.
        timeout_s: the bound.
        what: it waits for.

    Raises:
        PublishFailed: it did not end in time, or it failed.
    """
    ended: Future[R] = Future()
    # the current GPU is a thread's own
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            ended.set_result(call())
        except Exception as error:  # belongs to the caller
            ended.set_exception(error)

    threading.Thread(target=run, name="broadcast", daemon=True).start()
    try:
        return ended.result(timeout_s)
    except Exception as error:
        # since 3.11 a timeout of the wait and one of the call are the same class
        why = f"failed: {error}" if ended.done() else f"did not happen within {timeout_s:g} s"
        raise PublishFailed(f"the broadcast waited for {what}, which {why}; look at the actors' logs") from error


def _check_gpus() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "weight_sync.transport = 'nccl' broadcasts between GPUs, but torch sees no CUDA device here; "
            "use 'auto', which takes the folder or ZeroMQ"
        )
