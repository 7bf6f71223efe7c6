"""The plugin that every vLLM process loads (entry point group `vllm.general_plugins`), and its side of an update.

`register` registers our weight transfer, which `WeightTransferConfig(backend=BACKEND)` then selects. It ties the
process to its owner: an engine ends with the process that `OWNER_ENV` names, even if that was killed. It restores what
the actor's process runs without: the garbage collector and SIGTERM. And it asks for AMX.

An update verifies a version in the store, and then loads all of it:

    WorkerCalls          while the engine generates: a thread reads every tensor against its checksum
    update_weights       while it is paused: load what was verified, from the memory map that the thread has read

For a GPU the thread copies while it reads, into pinned memory, and the copy is what is verified and loaded: a map goes
to a GPU several times slower. So a pause is one engine step and the reload.

Importing this module needs neither vLLM nor torch.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.hf_folder import tensors_in
from common.process import DaemonThreads
from common.staleness import PolicyVersion
from weight_sync.manifest import WeightsError
from weight_sync.store import WeightStore

if TYPE_CHECKING:
    import torch

    from weight_sync.tensors import PinnedRoom

BACKEND = "leeway"
WORKER_CALLS = "weight_sync.vllm_engine.WorkerCalls"
UpdateInfo = dict[str, str]
"""One update: `folder` of a store, `version`, and `dtype`, in which the engine serves. All text, as vLLM carries it."""
OWNER_ENV = "LEEWAY_ENGINE_OWNER"
"""Process id of the actor that an engine belongs to; set by the actor before it starts the engine."""


def register() -> None:
    """Called by vLLM in each of its processes; may be called again."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    torch.cpu._init_amx()  # bf16 attention on a CPU that has it would end in SIGILL: vLLM asks no leave of the kernel
    WeightTransferEngineFactory._registry.setdefault(BACKEND, transfer_class)
    owner = os.environ.get(OWNER_ENV, "")
    if owner.isdigit() and int(owner) != os.getpid():
        # by this one vLLM ends it; all else below a run is deaf to it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        gc.enable()
        _die_with(int(owner))


def _die_with(owner: int) -> None:
    """Kill this process once `owner` has ended. vLLM's own clean-up runs only if the owner lives to ask for it."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        # readable when the owner has ended
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()


# --- an update ----------------------------------------------------------------------------------------


def transfer_class() -> type[StoreWeightTransfer]:
    """Return StoreWeightTransfer as a subclass of vLLM's, for a process that has a worker."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import layerwise

    # a rotary embedding is computed and never loaded, of which vLLM would warn at every update
    logger = logging.getLogger(layerwise.__name__)
    logger.addFilter(lambda record: "RotaryEmbedding: Failed" not in record.getMessage())
    return type("StoreWeightTransfer", (StoreWeightTransfer, WeightTransferEngine), {})


class StoreWeightTransfer:
    """Loads versions of a `WeightStore` into a running model.

    It uses vLLM's layerwise reload, because engines repack weights after the first load (on CPU always).
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False
    device: torch.device
    model: Any
    model_config: Any
    _room: PinnedRoom | None = None
    _begun: tuple[UpdateInfo, Future[dict[str, torch.Tensor]]] | None = None
    """The version that will be loaded next, and its tensors."""

    def verify(self, info: UpdateInfo) -> None:
        """Start reading a version against its checksums, in a thread of its own."""
        from weight_sync.tensors import PinnedRoom

        if self._room is None and self.device.type == "cuda":
            self._room = PinnedRoom(self.device)
        if self._room is not None:
            self._room.awaited = PolicyVersion.parse(info["version"])
        thread = DaemonThreads("weights-verification", max_threads=1)
        self._begun = info, thread.submit(fitting_tensors, info, self.model_config, self._room)

    def refusal(self) -> str | None:
        """Why the version cannot be loaded: '' if it can, None as long as it is being read."""
        if self._begun is None or not self._begun[1].done():
            return None
        error = self._begun[1].exception()
        if error is None or isinstance(error, (WeightsError, ValueError, OSError)):
            return "" if error is None else str(error) or repr(error)
        raise error

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to agree on: versions are pulled from a folder."""

    def start_weight_update(self) -> None:
        """Nothing to start: `receive_weights` touches the model only after all of the version is verified."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that was verified, or raise RuntimeError and leave the model as it is."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        reason, begun, self._begun = self.refusal(), self._begun, None
        if begun is None or reason is None or begun[0] != update_info:
            raise RuntimeError(f"version {update_info['version']} was not verified")
        if reason:
            raise RuntimeError(reason)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(begun[1].result().items())

    def finish_weight_update(self) -> None:
        """Repack what was loaded into the form that the kernels read."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._begun = self._room = None


class WorkerCalls:
    """What vLLM adds to its workers (`worker_extension_cls`), so that the actor can ask for more than an update."""

    weight_transfer_engine: Any

    def begin_weight_verification(self, update_info: UpdateInfo) -> None:
        self.weight_transfer_engine.verify(update_info)

    def weight_verification(self) -> str | None:
        refusal: str | None = self.weight_transfer_engine.refusal()
        return refusal


def fitting_tensors(
    info: UpdateInfo,
    model_config: Any,  # noqa: ANN401 -- vLLM's types are unknown here
    room: PinnedRoom | None = None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of a version, each read against its checksum, as the served model wants them.

    Raises:
        WeightsError: the version is not in the store, or not as published.
        ValueError: it is of another model, or in another dtype.
    """
    from weight_sync.tensors import read_tensors

    version = PolicyVersion.parse(info["version"])
    served_dtype = str(model_config.dtype).removeprefix("torch.")
    if info["dtype"] != served_dtype:
        raise ValueError(
            f"version {version} was staged in {info['dtype']}, but the engine serves {model_config.model} in "
            f"{served_dtype}; an actor pulls in actors.dtype"
        )
    store = WeightStore(Path(info["folder"]))
    manifest = store.manifest(version)
    shapes = {entry.name: entry.shape for entry in manifest.variant(info["dtype"])}
    _check_shapes(version, shapes, model_config.model)
    # memory-mapped without a room: the pages that are verified are those that loading copies from
    return read_tensors(store, manifest, info["dtype"], room)


def _check_shapes(version: PolicyVersion, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    expected = {name: tensor.shape for name, tensor in tensors_in(Path(model)).items()}
    missing, unknown = expected.keys() - shapes.keys(), shapes.keys() - expected.keys()
    if missing or unknown:
        raise ValueError(
            f"version {version} does not fit the served model {model}: missing {sorted(missing)[:3]}, "
            f"unknown {sorted(unknown)[:3]} ({len(missing)} and {len(unknown)} in all)"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"version {version}: tensor '{name}' has shape {list(shapes[name])}, "
                f"the served model {model} has {list(shape)}"
            )
