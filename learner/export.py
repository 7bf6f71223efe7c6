"""The policy as a Hugging Face folder: from the stages at the end of a run, or from a checkpoint without its ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from common.files import replace_durably
from common.hf_folder import complete_folder, model_identity, shard_name
from learner.checkpoint import is_of_a_rank
from learner.checkpoint_meta import CheckpointMeta, DamagedCheckpoint
from learner.mesh import first_line
from learner.model import is_value_head

SHARD_BYTES = 4 * 2**30
"""Size of a file of weights, and memory taken at a time, unless a single tensor is larger."""


@dataclass(frozen=True)
class ExportedModel:
    """What was written."""

    step: int
    version: int
    size_bytes: int


def export_checkpoint(
    checkpoint: Path, model_path: Path, out: Path, *, shard_bytes: int = SHARD_BYTES
) -> ExportedModel:
    """Write the policy in a checkpoint as a folder for `from_pretrained`; it appears whole or not at all.

    `model_path` is the model that training started from: its config and tokenizer are copied. `out` does not exist yet.
    DamagedCheckpoint if a file of the checkpoint is not what was written, ValueError if it is of another model.
    """
    meta = CheckpointMeta.read(checkpoint)
    meta.check(checkpoint, sorted(meta.files))
    if meta.model and meta.model != model_identity(model_path):
        raise ValueError(
            f"the checkpoint {checkpoint} was written for the model {meta.model}, and the config.json in {model_path} "
            f"is of {model_identity(model_path)}; put back the model that the run started from"
        )
    shards = list(_shards(_policy(checkpoint), shard_bytes))
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        size_bytes, dtype = 0, torch.float32
        for number, entries in enumerate(shards):
            tensors = _read(checkpoint, entries)
            dtype = next(iter(tensors.values())).dtype
            size_bytes += write_shard(temporary, number, len(shards), tensors)
        complete_folder(temporary, model_path, len(shards), str(dtype).removeprefix("torch."))
        replace_durably(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ExportedModel(meta.progress.step, meta.progress.version, size_bytes)


def write_shard(folder: Path, number: int, num_shards: int, tensors: Mapping[str, Tensor]) -> int:
    """Write a share of the weights, as the file that `complete_folder` looks for; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / shard_name(number, num_shards), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in copies.values())


def _policy(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the policy's own weights by name: neither optimizer nor critic, nor a tied head."""
    with _reading(checkpoint):
        found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: entry
        for name, entry in sorted(found.items())
        if isinstance(entry, TensorStorageMetadata)
        and not name.startswith(("optimizer.", "critic."))
        and not is_value_head(name)
        and not is_of_a_rank(name)
    }


def _shards(
    entries: Mapping[str, TensorStorageMetadata], shard_bytes: int
) -> Iterator[dict[str, TensorStorageMetadata]]:
    shard: dict[str, TensorStorageMetadata] = {}
    size = 0
    for name, entry in entries.items():
        own = entry.size.numel() * entry.properties.dtype.itemsize
        if shard and size + own > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += own
    yield shard


def _read(checkpoint: Path, entries: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with _reading(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant to be
        load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint if a file, whole a moment ago, cannot be read: it was removed, or its disk fails."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        raise DamagedCheckpoint(f"{checkpoint} cannot be read: {first_line(error)}") from error
