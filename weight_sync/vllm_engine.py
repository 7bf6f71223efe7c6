"""The plugin that every vLLM process loads (entry point group `vllm.general_plugins`), and its side of an update.

`register` registers the weight transfer that `WeightTransferConfig(backend=BACKEND)` selects. An engine exits with its
owner, the process that `OWNER_ENV` names, even if the owner is killed. `register` also unblocks SIGTERM, which the
actor's process blocks, and requests AMX from the kernel.

An update first verifies a version in the store, then loads all of it:

    WorkerCalls          while the engine generates: a thread reads every tensor and verifies its checksum
    update_weights       while the engine is paused: loads the verified tensors from the memory map

On a GPU the thread copies each tensor to pinned memory while reading, and this copy is verified and loaded, because
loading from a memory map is several times slower. So the pause lasts only for one engine step and the reload.

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

from leeway.common.hf_folder import tensors_in
from leeway.common.process import DaemonThreads
from leeway.common.staleness import PolicyVersion
from leeway.weight_sync.manifest import WeightsError
from leeway.weight_sync.store import WeightStore

if TYPE_CHECKING:
    import torch

    from leeway.weight_sync.tensors import PinnedBuffer

BACKEND = "leeway"
WORKER_CALLS = "leeway.weight_sync.vllm_engine.WorkerCalls"
UpdateInfo = dict[str, str]
"""One update: `folder` of the store, `version`, and serving `dtype`. All values are text, which vLLM can transport."""
OWNER_ENV = "LEEWAY_ENGINE_OWNER"
"""Environment variable with the process id of the actor that owns an engine; set before the engine starts."""


def register() -> None:
    """Register the plugin; vLLM calls this in each of its processes. Idempotent."""
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    torch.cpu._init_amx()  # vLLM does not request AMX from the kernel: bf16 attention would raise SIGILL
    WeightTransferEngineFactory._registry.setdefault(BACKEND, transfer_class)
    owner = os.environ.get(OWNER_ENV, "")
    if owner.isdigit() and int(owner) != os.getpid():
        # vLLM stops its processes with SIGTERM, a signal that every other process of a run blocks
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        gc.freeze()  # vLLM's modules stay until the process exits, so collections need not examine them
        _die_with(int(owner))


def _die_with(owner: int) -> None:
    """Kill this process once `owner` has exited. vLLM's own cleanup runs only if the owner requests it."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        # the descriptor is readable once the owner has exited
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner-watch", daemon=True).start()


# --- an update ----------------------------------------------------------------------------------------


def transfer_class() -> type[StoreWeightTransfer]:
    """Return StoreWeightTransfer as a subclass of vLLM's base class, for worker processes."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import layerwise

    # rotary embeddings are computed, not loaded; vLLM would log a warning at every update
    logger = logging.getLogger(layerwise.__name__)
    logger.addFilter(lambda record: "RotaryEmbedding: Failed" not in record.getMessage())
    return type("StoreWeightTransfer", (StoreWeightTransfer, WeightTransferEngine), {})


class StoreWeightTransfer:
    """Loads versions of a `WeightStore` into a running model.

    Loading uses vLLM's layerwise reload, because engines repack weights after the first load (on CPU, always).
    """

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False
    device: torch.device
    model: Any
    model_config: Any
    _pinned: PinnedBuffer | None = None
    _verification: tuple[UpdateInfo, Future[dict[str, torch.Tensor]]] | None = None
    """The version to load next, and the future of its verified tensors."""

    def verify(self, info: UpdateInfo) -> None:
        """Start verifying a version in a background thread."""
        from leeway.weight_sync.tensors import PinnedBuffer

        if self._pinned is None and self.device.type == "cuda":
            self._pinned = PinnedBuffer(self.device)
        if self._pinned is not None:
            self._pinned.expected = PolicyVersion.parse(info["version"])
        thread = DaemonThreads("weights-verification", max_threads=1)
        self._verification = info, thread.submit(verified_tensors, info, self.model_config, self._pinned)

    def refusal(self) -> str | None:
        """Return why the version cannot be loaded: '' if it can, None while verification is running."""
        if self._verification is None or not self._verification[1].done():
            return None
        error = self._verification[1].exception()
        if error is None or isinstance(error, (WeightsError, ValueError, OSError)):
            return "" if error is None else str(error) or repr(error)
        raise error

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing: versions are pulled from a folder."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` changes the model only after the whole version is verified."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the verified version; raise RuntimeError, with the model unchanged, if no version is verified."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        reason, verification, self._verification = self.refusal(), self._verification, None
        if verification is None or reason is None or verification[0] != update_info:
            raise RuntimeError(f"version {update_info['version']} was not verified")
        if reason:
            raise RuntimeError(reason)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(verification[1].result().items())

    def finish_weight_update(self) -> None:
        """Repack the loaded weights into the layout of the kernels."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._verification = self._pinned = None


class WorkerCalls:
    """Worker methods for verification, which vLLM mixes into its workers (`worker_extension_cls`)."""

    weight_transfer_engine: Any

    def begin_weight_verification(self, update_info: UpdateInfo) -> None:
        self.weight_transfer_engine.verify(update_info)

    def weight_verification(self) -> str | None:
        return self.weight_transfer_engine.refusal()


def verified_tensors(
    info: UpdateInfo,
    model_config: Any,  # noqa: ANN401 -- vLLM's types are unknown here
    pinned: PinnedBuffer | None = None,
) -> dict[str, torch.Tensor]:
    """Return all tensors of a version, verified against their checksums and the shapes of the served model.

    Raises:
        WeightsError: the version is not in the store, or differs from the published version.
        ValueError: the version is of another model or in another dtype.
    """
    from leeway.weight_sync.tensors import read_tensors

    version = PolicyVersion.parse(info["version"])
    served_dtype = str(model_config.dtype).removeprefix("torch.")
    if info["dtype"] != served_dtype:
        raise ValueError(
            f"version {version} was staged in {info['dtype']}, but the engine serves {model_config.model} in "
            f"{served_dtype}; an actor pulls versions in actors.dtype"
        )
    store = WeightStore(Path(info["folder"]))
    manifest = store.manifest(version)
    shapes = {entry.name: entry.shape for entry in manifest.variant(info["dtype"])}
    _check_shapes(version, shapes, model_config.model)
    # without pinned memory, the tensors are memory-mapped, so loading copies from the verified pages
    return read_tensors(store, manifest, info["dtype"], pinned)


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
                f"but the served model {model} has {list(shape)}"
            )
