"""vLLM's side of an update: verify a version in the store, then load all of it. Imported by vLLM alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from weight_sync.manifest import WeightsError
from weight_sync.serving import HEAD, UNTIED_MARK, embedding_of
from weight_sync.staleness import PolicyVersion
from weight_sync.store import WeightStore
from weight_sync.vllm_engine import REFUSED


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: versions are pulled from a folder."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: a version of a store. Both are text, as vLLM carries them between processes."""

    folder: str
    version: str


class StoreWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads versions of a `WeightStore` into a running model.

    Layers are reloaded through vLLM's layerwise reload because engines repack weights after the
    first load (on CPU always). Every tensor is verified before the first layer is touched.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Nothing to start: `receive_weights` touches the model only after it has verified all of the version."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Verify a version, then load it.

        Raises:
            RuntimeError: with `REFUSED` in its text: the version is not in the store, not as published, or not
                of this model; the model is unchanged.
        """
        try:
            tensors = self._verified(Path(update_info.folder), PolicyVersion.parse(update_info.version))
        except (WeightsError, ValueError) as error:
            raise RuntimeError(f"{REFUSED} {error}") from error
        initialize_layerwise_reload(self.model)
        self.model.load_weights(tensors.items())

    def finish_weight_update(self) -> None:
        """Repack what was loaded into the form that the kernels read."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""

    def _verified(self, folder: Path, version: PolicyVersion) -> dict[str, torch.Tensor]:
        store = WeightStore(folder)
        # memory-mapped: the pages that verification read are those that loading copies from
        tensors = {entry.name: tensor for entry, tensor in store.tensors(store.manifest(version))}
        expected = served_shapes(Path(self.model_config.model))
        if getattr(self.model_config.hf_config, UNTIED_MARK, False) and HEAD not in tensors:
            # the learner trains tied embeddings, the served copy has a head of its own
            tensors[HEAD] = tensors[embedding_of(tensors)]
        missing, unknown = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
        if missing or unknown:
            raise ValueError(
                f"version {version} does not fit the served model {self.model_config.model}: "
                f"missing {sorted(missing)[:3]}, unknown {sorted(unknown)[:3]} "
                f"({len(missing)} and {len(unknown)} in all)"
            )
        for name, shape in expected.items():
            if tuple(tensors[name].shape) != shape:
                raise ValueError(
                    f"version {version}: tensor '{name}' has shape {list(tensors[name].shape)}, "
                    f"the served model {self.model_config.model} has {list(shape)}"
                )
        return tensors


def served_shapes(model_folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a checkpoint folder, from the headers of its safetensors files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes
