"""vLLM's side of an update: verify a version in the store, then load all of it. Imported by vLLM alone.

    Verification         while the engine generates: a thread reads every tensor against its checksum
    update_weights       while it is paused: load what was verified, from the memory map that the thread has read

For a GPU the thread copies while it reads, into pinned memory, and the copy is what is verified and loaded: a map goes
to a GPU several times slower. So a pause is one engine step and the reload.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from common.hf_folder import tensors_in
from common.process import DaemonThreads
from common.staleness import PolicyVersion
from weight_sync.manifest import WeightsError
from weight_sync.store import WeightStore
from weight_sync.tensors import PinnedRoom, read_tensors
from weight_sync.vllm_engine import REFUSED

# a rotary embedding is computed and never loaded, of which vLLM would warn at every update
logging.getLogger(layerwise.__name__).addFilter(lambda record: "RotaryEmbedding: Failed" not in record.getMessage())

_REFUSALS = (WeightsError, ValueError, OSError)
"""A version that fails with one of these is refused; the model is unchanged."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: versions are pulled from a folder."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: a version of a store, in the dtype that the engine serves. All text, as vLLM carries it."""

    folder: str
    version: str
    dtype: str


class Verification:
    """One version being read against its checksums, in a thread of its own."""

    def __init__(self, info: UpdateInfo, model_config: Any, room: PinnedRoom | None) -> None:  # noqa: ANN401
        """Start reading a version, which has to fit the model of `model_config`; the room is overwritten."""
        self.info = info
        thread = DaemonThreads("weights-verification", max_threads=1)
        self._found = thread.submit(fitting_tensors, info, model_config, room)

    def refusal(self) -> str | None:
        """Why the version cannot be loaded: '' where it can, None as long as it is being read."""
        if not self._found.done():
            return None
        error = self._found.exception()
        if error is None:
            return ""
        if isinstance(error, _REFUSALS):
            return f"{REFUSED} {error}"
        raise error

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._found.result(timeout=0)


class StoreWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads versions of a `WeightStore` into a running model.

    It uses vLLM's layerwise reload, because engines repack weights after the first load (on CPU always).
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    verification: Verification | None = None
    """The version that will be loaded next."""
    _room: PinnedRoom | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def verify(self, info: UpdateInfo) -> None:
        if self._room is None and self.device.type == "cuda":
            self._room = PinnedRoom(self.device)
        if self._room is not None:
            self._room.awaited = PolicyVersion.parse(info.version)
        self.verification = Verification(info, self.model_config, self._room)

    def start_weight_update(self) -> None:
        """Nothing to start: `receive_weights` touches the model only after all of the version is verified."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the version that was verified, or raise RuntimeError and leave the model as it is."""
        begun, self.verification = self.verification, None
        if begun is None or begun.info != update_info:
            raise RuntimeError(f"{REFUSED} version {update_info.version} was not verified")
        if (reason := begun.refusal()) != "":
            raise RuntimeError(reason or f"{REFUSED} version {update_info.version} is not verified yet")
        initialize_layerwise_reload(self.model)
        self.model.load_weights(begun.tensors().items())

    def finish_weight_update(self) -> None:
        """Repack what was loaded into the form that the kernels read."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self.verification = self._room = None


class WorkerCalls:
    """What vLLM adds to its workers (`worker_extension_cls`), so that the actor can ask for more than an update."""

    weight_transfer_engine: Any

    def begin_weight_verification(self, update_info: Mapping[str, str]) -> None:
        self.weight_transfer_engine.verify(UpdateInfo(**update_info))

    def weight_verification(self) -> str | None:
        verification = self.weight_transfer_engine.verification
        return None if verification is None else verification.refusal()


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
    version = PolicyVersion.parse(info.version)
    served_dtype = str(model_config.dtype).removeprefix("torch.")
    if info.dtype != served_dtype:
        raise ValueError(
            f"version {version} was staged in {info.dtype}, but the engine serves {model_config.model} in "
            f"{served_dtype}; an actor pulls in actors.dtype"
        )
    store = WeightStore(Path(info.folder))
    manifest = store.manifest(version)
    shapes = {entry.name: entry.shape for entry in manifest.variant(info.dtype)}
    _check_shapes(version, shapes, model_config.model)
    # memory-mapped without a room: the pages that are verified are those that loading copies from
    return read_tensors(store, manifest, info.dtype, room)


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
