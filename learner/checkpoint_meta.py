"""CheckpointMeta: `meta.json`, which completes a checkpoint, seals its files, and records the progress of training."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

logger = logging.getLogger(__name__)

META_NAME = "meta.json"
KEPT_CHECKPOINTS = 2
"""How many stay: the newest may turn out damaged. The buffer holds the draws since the oldest of them."""

_COMPLETE = re.compile(r"step-(\d{8})")

_READ_BYTES = 2**22


class DamagedCheckpoint(ValueError):
    """A file of a checkpoint is not what was written; the text names it."""


class TrainingProgress(msgspec.Struct, frozen=True):
    """Where training stands."""

    step: int
    """Steps finished, skipped ones included: the number of the last draw."""
    version: int
    """Optimizer steps taken: up to learner.num_minibatches * learner.num_epochs a step."""
    incarnation: int
    non_finite_steps: tuple[int, ...] = msgspec.field(default=(), name="sick_steps")
    """Steps in a row without a finite loss or gradient, as learner.report counts them."""


class Seal(msgspec.Struct, frozen=True):
    """Size and checksum of a file."""

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
    """Metadata of a checkpoint."""

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
    if not document["progress"].get("reports"):  # an older Leeway wrote this field, and did not seal it if empty
        document["progress"].pop("reports", None)
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
