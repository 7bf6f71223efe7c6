"""A checkpoint's files: `meta.json`, which completes and seals it; the policy in it as a Hugging Face folder."""

from __future__ import annotations

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

from common.files import replace_durably
from common.hf_folder import complete_folder, model_identity, shard_name
from learner.lag_control import LagState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

logger = logging.getLogger(__name__)

META_NAME = "meta.json"
KEPT_CHECKPOINTS = 2
"""How many stay: the newest may turn out damaged. The buffer holds the draws since the oldest of them."""

_COMPLETE = re.compile(r"step-(\d{8})")

_READ_BYTES = 2**22

SHARD_BYTES = 4 * 2**30
"""Size of an exported file of weights, and memory taken at a time, unless a single tensor is larger."""
RNG, RNG_CUDA = "rng", "rng_cuda"
"""Beginnings of the names of random generators' states."""


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is not what was written; the text names it."""


class TrainingProgress(msgspec.Struct, frozen=True):
    """Position of training, as a checkpoint records it."""

    step: int
    """Steps finished, skipped ones included: the number of the last draw."""
    version: int
    """Optimizer steps taken: up to learner.num_minibatches * learner.num_epochs a step."""
    incarnation: int
    non_finite_steps: tuple[int, ...] = msgspec.field(default=(), name="sick_steps")
    """Steps in a row without a finite loss or gradient, as learner.report counts them."""
    lag_control: LagState | None = None
    """None where lag is not controlled, or before the first update."""
    learning_rate: float | None = None
    """`Networks.rate`; None in a checkpoint that was written before it was kept."""


class Seal(msgspec.Struct, frozen=True):
    size_bytes: int
    xxh3: str

    @classmethod
    def of(cls, path: Path) -> Seal:
        digest, size_bytes = xxhash.xxh3_64(), 0
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
                size_bytes += len(chunk)
        return cls(size_bytes, digest.hexdigest())


class CheckpointMeta(msgspec.Struct, frozen=True):
    progress: TrainingProgress
    num_stages: int
    num_replicas: int
    model: str
    """`common.hf_folder.model_identity` of what was trained; '' if unknown."""
    files: dict[str, Seal]
    xxh3: str = ""

    def encode(self) -> bytes:
        document = msgspec.to_builtins(self)
        return json.dumps(document | {"xxh3": _seal(document)}).encode() + b"\n"

    @staticmethod
    def read(folder: Path) -> CheckpointMeta:
        """Read a checkpoint's document; DamagedCheckpoint if it is not what was written."""
        path = folder / META_NAME
        try:
            data = path.read_bytes()
            meta, document = _DECODER.decode(data), json.loads(data)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if meta.xxh3 != _seal(document):
            raise DamagedCheckpoint(f"{path} does not have the checksum that it was written with")
        return meta

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Compare these files of a checkpoint with their seals; DamagedCheckpoint names the first that differs."""
        for name in names:
            told = self.files[name]
            try:
                found = Seal.of(folder / name)
            except OSError as error:
                raise DamagedCheckpoint(f"{folder / name} cannot be read: {error.strerror or error}") from error
            if found.size_bytes != told.size_bytes:
                raise DamagedCheckpoint(
                    f"{folder / name} has {found.size_bytes} bytes, but was written with {told.size_bytes}"
                )
            if found.xxh3 != told.xxh3:
                raise DamagedCheckpoint(f"{folder / name} does not have the checksum that it was written with")


def _seal(document: dict[str, Any]) -> str:
    """Return the checksum of a document as it stands in the file, whatever fields another version gave it."""
    document = {name: value for name, value in document.items() if name != "xxh3"}
    return xxhash.xxh3_64_hexdigest(json.dumps(document, sort_keys=True).encode())


# made here, for msgspec is not safe against threads that each use a type for the first time
_DECODER = msgspec.json.Decoder(CheckpointMeta)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a run's folder of them, ascending."""
    found = (_COMPLETE.fullmatch(path.name) for path in folder.iterdir() if (path / META_NAME).exists())
    return sorted(int(match[1]) for match in found if match)


def newest_progress(folder: Path) -> TrainingProgress | None:
    """Return where training stood at the newest checkpoint whose document is whole; None without one."""
    for step in reversed(steps_in(folder)):
        try:
            return CheckpointMeta.read(folder / f"step-{step:08d}").progress
        except DamagedCheckpoint as error:
            logger.warning("%s; the checkpoint before it counts", error)
    return None


def is_of_a_rank(name: str) -> bool:
    """Return whether this is a random generator's state, and not a tensor of the model."""
    return name.startswith((f"{RNG}.", f"{RNG_CUDA}."))


# --- the policy as a Hugging Face folder ----------------------------------------------------------


def export_checkpoint(checkpoint: Path, model_path: Path, out: Path) -> tuple[TrainingProgress, int]:
    """Write the policy in a checkpoint as a folder for `from_pretrained`; it appears whole or not at all.

    Return the checkpoint's progress, and the size of the weights in bytes. `model_path` is the model that training
    started from: its config and tokenizer are copied. `out` does not exist yet.

    DamagedCheckpoint if a file of the checkpoint is not what was written, ValueError if it is of another model.
    """
    meta = CheckpointMeta.read(checkpoint)
    meta.check(checkpoint, sorted(meta.files))
    if meta.model and meta.model != model_identity(model_path):
        raise ValueError(
            f"the checkpoint {checkpoint} was written for the model {meta.model}, and the config.json in {model_path} "
            f"is of {model_identity(model_path)}; put back the model that the run started from"
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
    """Write a share of the weights, as the file that `complete_folder` looks for; return their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / shard_name(number, num_shards), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in copies.values())


def _policy(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return the policy's own weights by name: neither optimizer nor critic, nor a tied head."""
    # imported here: checking a config reads no checkpoint, and these take half as long to import as torch, or longer
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from learner.model import is_value_head

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
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is meant to be
        load(tensors, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return tensors


@contextmanager
def _reading(checkpoint: Path) -> Iterator[None]:
    """Raise DamagedCheckpoint if a file, whole a moment ago, cannot be read: it was removed, or its disk fails."""
    from torch.distributed.checkpoint.api import CheckpointException

    from learner.mesh import first_line

    try:
        yield
    except (OSError, CheckpointException) as error:
        raise DamagedCheckpoint(f"{checkpoint} cannot be read: {first_line(error)}") from error
