"""The folder that engines load: that of the model, or an untied copy of it, kept for all runs, if its head is tied.

A head tied to the embedding does not survive an update in flight: vLLM's reload on CPU keeps the old head, and only
logs it. vLLM caches compiled code by the path of a model, so the copy has one path for all runs:

    ~/.cache/leeway/serving_models/     or XDG_CACHE_HOME/leeway/serving_models
      making.lock                       held by the process that makes one
      llama-0123456789abcdef/           of the model at one path, with one embedding
        config.json                     says that the head is not tied
        lm_head.safetensors             the embedding once more
        model.safetensors.index.json    which file holds which tensor
        ...                             all else: links to the files of the model

Every host makes its own; each takes as much as a head, and none is removed. If none can be kept there, the folder of
the run has one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from common.files import discard, replace_durably, sync, try_lock
from common.hf_folder import (
    CONFIG_NAME,
    EMBEDDING_SUFFIX,
    HEAD,
    INDEX_NAME,
    SINGLE_NAME,
    UNTIED_MARK,
    ModelFolderError,
    StoredTensor,
    check_model_folder,
    pack_header,
    read_object,
    tensor_in,
    tensors_by_file,
    tensors_in,
    write_config,
    write_index,
)

MAKING_LIMIT_S = 120.0
"""Timeout for another process that makes a copy, which takes seconds."""
_BODY_NAME = "model_body.safetensors"
"""What model.safetensors is called in a copy: readers prefer that name to the index."""
_HEAD_NAME = "lm_head.safetensors"

_log = logging.getLogger(__name__)


def serving_models() -> Path:
    """Return where the copies of this user lie; RuntimeError if this user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "leeway" / "serving_models"


def prepare_serving_model(model_path: Path, spare: Path) -> Path:
    """Return the folder that actors serve: `model_path` itself, or an untied copy if its head is tied.

    A copy is compared with the model, and made anew if it is damaged. If none can be kept in `serving_models`, one is
    made in `spare`.

    Raises:
        ModelFolderError: the checkpoint is incomplete, has no embedding, or is tied and holds another head.
        OSError: the copy cannot be made in `spare` either.
    """
    if not check_model_folder(model_path).tied:
        return model_path
    model = _TiedModel.read(model_path.resolve())
    try:
        return _copy_in(serving_models(), model)
    except (OSError, RuntimeError) as error:
        _log.warning(
            f"an untied copy of {model_path} cannot be kept for later runs ({error}): this run has its own in {spare}, "
            "and its engines find nothing that others have compiled; set XDG_CACHE_HOME to a folder that can be written"
        )
    return _copy_in(spare, model, may_copy=True)


def _copy_in(copies: Path, model: _TiedModel, *, may_copy: bool = False) -> Path:
    """Find or make it; where links cannot be made the files are copied, if they may be: a copy does not follow them."""
    copy = copies / model.identity
    if model.is_copied_in(copy):
        return copy
    copies.mkdir(parents=True, exist_ok=True)
    with (copies / "making.lock").open("ab") as lock:
        if not try_lock(lock, limit_s=MAKING_LIMIT_S):
            raise TimeoutError(f"another process has held {lock.name} for {MAKING_LIMIT_S:g} s")
        for killed in copies.glob(".*.unfinished"):
            discard(killed)
        if not model.is_copied_in(copy):
            model.copy_to(copy, may_copy)
    return copy


@dataclass(frozen=True)
class _TiedModel:
    folder: Path
    config: dict[str, Any]
    files: dict[Path, dict[str, StoredTensor]]
    embedding: str
    digest: str

    @classmethod
    def read(cls, folder: Path) -> _TiedModel:
        """Read what a copy is made of; ModelFolderError where the model holds another head than its embedding."""
        files = tensors_by_file(folder)
        where = {name: path for path, tensors in files.items() for name in tensors}
        embeddings = [name for name in where if name.endswith((EMBEDDING_SUFFIX, "wte.weight"))]
        if len(embeddings) != 1:
            raise ModelFolderError(f"expected one input embedding (…{EMBEDDING_SUFFIX}), found {embeddings or 'none'}")
        (embedding,) = embeddings
        stored, content = tensor_in(where[embedding], embedding)
        digest = xxhash.xxh3_128_hexdigest(content)
        if HEAD in where:
            head, head_content = tensor_in(where[HEAD], HEAD)
            is_same = (head.code, head.shape) == (stored.code, stored.shape)
            if not is_same or xxhash.xxh3_128_hexdigest(head_content) != digest:
                raise ModelFolderError(
                    f"{folder / CONFIG_NAME} ties the head to the embedding, but {where[HEAD]} holds another {HEAD} "
                    f"than {embedding}: engines would serve it, and the learner trains the embedding alone. Set "
                    "tie_word_embeddings = false if the head is meant, or take the tensor out of the checkpoint"
                )
        return cls(folder, read_object(folder / CONFIG_NAME), files, embedding, digest)

    @property
    def identity(self) -> str:
        """Type and digest: another path, config, layout of the files or embedding gives another one."""
        headers = {path.name: tensors for path, tensors in self.files.items()}
        telling = json.dumps([self._linked, self.config, headers, self.digest], sort_keys=True, default=str)
        return f"{self.config.get('model_type', 'model')}-{hashlib.sha256(telling.encode()).hexdigest()[:16]}"

    @property
    def _linked(self) -> list[Path]:
        """What a copy has links to; not to weights that no index names."""
        seen = [path for path in sorted(self.folder.iterdir()) if path.suffix != ".safetensors" or path in self.files]
        return [path for path in seen if path.name not in (CONFIG_NAME, INDEX_NAME) and not path.name.startswith(".")]

    @property
    def _untied(self) -> dict[str, Any]:
        return self.config | {"tie_word_embeddings": False, UNTIED_MARK: True}

    def is_copied_in(self, copy: Path) -> bool:
        try:
            if read_object(copy / CONFIG_NAME) != self._untied:
                return False
            wanted = {name for tensors in self.files.values() for name in tensors} | {HEAD}
            index = read_object(copy / INDEX_NAME)["weight_map"]
            if not wanted == index.keys() == tensors_in(copy).keys():
                return False
            return xxhash.xxh3_128_hexdigest(tensor_in(copy / index[HEAD], HEAD)[1]) == self.digest
        except (OSError, ModelFolderError, KeyError, ValueError, TypeError, AttributeError):  # damaged, or not there
            return False

    def copy_to(self, copy: Path, may_copy: bool) -> None:
        """Make it; the folder appears whole or not at all, also after a power cut. Its parent's lock is held."""
        unfinished = copy.with_name(f".{copy.name}.unfinished")
        unfinished.mkdir()
        try:
            for file in self._linked:
                _link(unfinished / (_BODY_NAME if file.name == SINGLE_NAME else file.name), file, may_copy)
            if HEAD not in {name for tensors in self.files.values() for name in tensors}:
                where = next(path for path, tensors in self.files.items() if self.embedding in tensors)
                stored, content = tensor_in(where, self.embedding)
                with (unfinished / _HEAD_NAME).open("xb") as head:  # never through a link into the model
                    head.write(pack_header({HEAD: stored._replace(start=0, end=stored.end - stored.start)}))
                    head.write(content)
                sync(unfinished / _HEAD_NAME)
            write_index(unfinished, sorted(unfinished.glob("*.safetensors")))
            write_config(unfinished, self._untied)
            for name in (INDEX_NAME, CONFIG_NAME):
                sync(unfinished / name)
            shutil.rmtree(copy, ignore_errors=True)  # a damaged one
            replace_durably(unfinished, copy)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _link(link: Path, file: Path, may_copy: bool) -> None:
    try:
        link.symlink_to(file, target_is_directory=file.is_dir())
    except OSError:
        if not may_copy:
            raise
        (shutil.copytree if file.is_dir() else shutil.copyfile)(file, link)
