"""Checkpoint files: `meta.json`, the metadata with checksums; and export of the policy as a Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from leeway.common.files import replace_durably
from leeway.common.hf_folder import complete_folder, model_identity, shard_name
from leeway.learner.lag_control import LagState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

logger = logging.getLogger(__name__)

META_NAME = "meta.json"
KEPT_CHECKPOINTS = 2
"""Number of checkpoints kept, in case the newest is damaged. The buffer keeps all draws since the oldest checkpoint."""

_COMPLETE = re.compile(r"step-(\d{8})")

SHARD_BYTES = 4 * 2**30
"""Maximum bytes per exported weights file, and of memory during an export, unless a single tensor is larger."""
RNG, RNG_CUDA = "rng", "rng_cuda"
"""Name prefixes of random generator states."""


class DamagedCheckpoint(ValueError):
    """A checkpoint file is damaged; the message names the file."""


class TrainingProgress(msgspec.Struct, frozen=True):
    """Training progress recorded in a checkpoint."""

    step: int
    """Number of finished steps, including skipped steps; also the number of the last batch."""
    version: int
    """Number of optimizer steps taken: up to learner.num_minibatches * learner.num_epochs per step."""
    incarnation: int
    non_finite_steps: tuple[int, ...] = msgspec.field(default=(), name="sick_steps")
    """Most recent consecutive steps without a finite loss or gradient; see `leeway.learner.report.BadBatches`."""
    lag_control: LagState | None = None
    """State of lag control; None if lag is not controlled, or before the first update."""
    learning_rate: float | None = None
    """Learning rate of the last update (`Networks.rate`); None in checkpoints of older versions."""


class Seal(msgspec.Struct, frozen=True):
    size_bytes: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> Seal:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
            return cls(file.tell(), digest)


class CheckpointMeta(msgspec.Struct, frozen=True):
    progress: TrainingProgress
    num_stages: int
    num_replicas: int
    model: str
    """`leeway.common.hf_folder.model_identity` of the trained model; '' if unknown."""
    files: dict[str, Seal]
    xxh3: str = ""

    def encode(self) -> bytes:
        document = msgspec.to_builtins(self)
        return json.dumps(document | {"xxh3": _seal(document)}).encode() + b"\n"

    @staticmethod
    def read(folder: Path) -> CheckpointMeta:
        """Read and verify the metadata of a checkpoint; raise DamagedCheckpoint if it is damaged."""
        path = folder / META_NAME
        try:
            data = path.read_bytes()
            meta, document = _DECODER.decode(data), json.loads(data)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if meta.xxh3 != _seal(document):
            raise DamagedCheckpoint(f"{path} is damaged: checksum mismatch")
        return meta

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Verify the size and checksum of these files; raise DamagedCheckpoint for the first that differs."""
        for name in names:
            expected = self.files[name]
            try:
                found = Seal.of(folder / name)
            except OSError as error:
                raise DamagedCheckpoint(f"{folder / name} cannot be read: {error.strerror or error}") from error
            if found.size_bytes != expected.size_bytes:
                raise DamagedCheckpoint(
                    f"{folder / name} is damaged: {found.size_bytes} bytes, expected {expected.size_bytes}"
                )
            if found.xxh3 != expected.xxh3:
                raise DamagedCheckpoint(f"{folder / name} is damaged: checksum mismatch")


def _seal(document: dict[str, Any]) -> str:
    """Return the checksum of a document as stored in the file, including fields that other versions added."""
    document = {name: value for name, value in document.items() if name != "xxh3"}
    return xxhash.xxh3_64_hexdigest(json.dumps(document, sort_keys=True).encode())


# created at import: the first use of a type in msgspec is not thread-safe
_DECODER = msgspec.json.Decoder(CheckpointMeta)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a checkpoint folder, ascending."""
    found = (_COMPLETE.fullmatch(path.name) for path in folder.iterdir() if (path / META_NAME).exists())
    return sorted(int(match[1]) for match in found if match)


def newest_progress(folder: Path) -> TrainingProgress | None:
    """Return the progress of the newest checkpoint with intact metadata; None without such a checkpoint."""
    for step in reversed(steps_in(folder)):
        try:
            return CheckpointMeta.read(folder / f"step-{step:08d}").progress
        except DamagedCheckpoint as error:
            logger.warning("%s; falling back to the previous checkpoint", error)
    return None


def is_rng_state(name: str) -> bool:
    """Return whether a stored tensor with this name is a random generator state and not a model tensor."""
    return name.startswith((f"{RNG}.", f"{RNG_CUDA}."))


# --- the policy as a Hugging Face folder ----------------------------------------------------------


def export_checkpoint(checkpoint: Path, model_path: Path, out: Path) -> tuple[TrainingProgress, int]:
    """Export the policy of a checkpoint as a folder for `from_pretrained`, atomically.

    Return the checkpoint's progress and the size of the weights in bytes. `model_path` is the model that training
    started from; its config and tokenizer are copied. `out` must not exist.

    Raises DamagedCheckpoint if a file is damaged, and ValueError if the checkpoint belongs to another model.
    """
    meta = CheckpointMeta.read(checkpoint)
    meta.check(checkpoint, sorted(meta.files))
    if meta.model and meta.model != model_identity(model_path):
        raise ValueError(
            f"the checkpoint {checkpoint} was written for the model {meta.model}, but the config.json in {model_path} "
            f"describes {model_identity(model_path)}: restore the model that the run started from"
        )
    shards = list(_shards(_policy(checkpoint)))
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
    return meta.progress, size_bytes


def write_shard(folder: Path, number: int, num_shards: int, tensors: Mapping[str, Tensor]) -> int:
    """Write one shard of the weights under the name that `complete_folder` expects; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / shard_name(number, num_shards), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in copies.values())


def _policy(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the weights of the policy by name, without optimizer, critic and tied head."""
    # imported lazily: validating a config reads no checkpoint, and this import takes at least half as long as torch's
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from leeway.learner.model import is_value_head

    with _reading(checkpoint):
        found = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name: entry
        for name, entry in sorted(found.items())
        if isinstance(entry, TensorStorageMetadata)
        and not name.startswith(("optimizer.", "critic."))
        and not is_value_head(name)
        and not is_rng_state(name)
    }


def _shards(entries: Mapping[str, TensorStorageMetadata]) -> Iterator[dict[str, TensorStorageMetadata]]:
    shard: dict[str, TensorStorageMetadata] = {}
    size = 0
    for name, entry in entries.items():
        own = entry.size.numel() * entry.properties.dtype.itemsize
        if shard and size + own > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = entry
        size += own
    yield shard


def _read(checkpoint: Path, entries: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with _reading(checkpoint), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # expected, because of no_dist=True
        load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint if a verified file can no longer be read, because it was removed or its disk fails."""
    from torch.distributed.checkpoint.api import CheckpointException

    from leeway.learner.mesh import first_line

    try:
        yield
    except (OSError, CheckpointException) as error:
        raise DamagedCheckpoint(f"{checkpoint} cannot be read: {first_line(error)}") from error
