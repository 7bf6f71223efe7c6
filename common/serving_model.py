"""Folder from which engines load the model: the model's own folder or, if its head is tied, a copy with an untied head.

An in-flight update does not reach a head that is tied to the embedding: vLLM's reload on CPU keeps the old head, and
only logs a message. vLLM caches compiled code by the path of a model, so the copy has the same path in all runs:

    ~/.cache/leeway/serving_models/     or XDG_CACHE_HOME/leeway/serving_models
      making.lock                       held by the process that creates a copy
      llama-0123456789abcdef/           copy of one model: one path, config and embedding
        config.json                     declares that the head is not tied
        lm_head.safetensors             a second copy of the embedding
        model.safetensors.index.json    maps tensors to files
        ...                             links to all other files of the model

Every host creates its own copies. A copy takes as much disk space as the head, and is never removed. If the cache
folder is not writable, the copy is created in the run folder.
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

from leeway.common.files import discard, replace_durably, sync, try_lock
from leeway.common.hf_folder import (
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
"""Timeout of the wait for another process that creates a copy; creation takes seconds."""
_BODY_NAME = "model_body.safetensors"
"""Name of model.safetensors in a copy. Readers would prefer a file with the original name to the index."""
_HEAD_NAME = "lm_head.safetensors"

_log = logging.getLogger(__name__)


def serving_models() -> Path:
    """Return the folder of this user's copies; raise RuntimeError if the user has no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "leeway" / "serving_models"


def prepare_serving_model(model_path: Path, spare: Path) -> Path:
    """Return the folder that actors serve: `model_path` itself, or an untied copy if its head is tied.

    An existing copy is compared with the model, and replaced if it is damaged. If the folder `serving_models` is not
    usable, the copy is created in `spare`.

    Raises:
        ModelFolderError: the checkpoint is incomplete, has no embedding, or has a tied head unlike the embedding.
        OSError: the copy cannot be created in `spare` either.
    """
    if not check_model_folder(model_path).tied:
        return model_path
    model = _TiedModel.read(model_path.resolve())
    try:
        return _copy_in(serving_models(), model)
    except (OSError, RuntimeError) as error:
        _log.warning(
            f"cannot cache an untied copy of {model_path} for later runs ({error}). This run has its copy in {spare}, "
            "so engines cannot reuse code compiled in other runs. Set XDG_CACHE_HOME to a writable folder"
        )
    return _copy_in(spare, model, may_copy=True)


def _copy_in(copies: Path, model: _TiedModel, *, may_copy: bool = False) -> Path:
    """Find or create a copy. With `may_copy`, copy files if links fail; copied files miss changes of the model."""
    copy = copies / model.identity
    if model.is_copied_in(copy):
        return copy
    copies.mkdir(parents=True, exist_ok=True)
    with (copies / "making.lock").open("ab") as lock:
        if not try_lock(lock, limit_s=MAKING_LIMIT_S):
            raise TimeoutError(f"another process has held {lock.name} for {MAKING_LIMIT_S:g} s")
        for unfinished in copies.glob(".*.unfinished"):
            discard(unfinished)
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
        """Read a model's config, tensors and embedding; raise ModelFolderError if head and embedding differ."""
        files = tensors_by_file(folder)
        files_by_name = {name: path for path, tensors in files.items() for name in tensors}
        embeddings = [name for name in files_by_name if name.endswith((EMBEDDING_SUFFIX, "wte.weight"))]
        if len(embeddings) != 1:
            raise ModelFolderError(f"expected one input embedding (…{EMBEDDING_SUFFIX}), found {embeddings or 'none'}")
        (embedding,) = embeddings
        stored, content = tensor_in(files_by_name[embedding], embedding)
        digest = xxhash.xxh3_128_hexdigest(content)
        if HEAD in files_by_name:
            head, head_content = tensor_in(files_by_name[HEAD], HEAD)
            is_same = (head.code, head.shape) == (stored.code, stored.shape)
            if not is_same or xxhash.xxh3_128_hexdigest(head_content) != digest:
                raise ModelFolderError(
                    f"{folder / CONFIG_NAME} ties the head to the embedding, but {HEAD} in {files_by_name[HEAD]} "
                    f"differs from {embedding}: engines would serve this head, but the learner trains only the "
                    "embedding. Set tie_word_embeddings = false to use the head, or remove the head from the checkpoint"
                )
        return cls(folder, read_object(folder / CONFIG_NAME), files, embedding, digest)

    @property
    def identity(self) -> str:
        """Model type, and a digest of the model's path, config, file layout and embedding."""
        headers = {path.name: tensors for path, tensors in self.files.items()}
        content = json.dumps([self._linked, self.config, headers, self.digest], sort_keys=True, default=str)
        return f"{self.config.get('model_type', 'model')}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    @property
    def _linked(self) -> list[Path]:
        """Files that a copy links to; excludes weights that no index lists."""
        used = [path for path in sorted(self.folder.iterdir()) if path.suffix != ".safetensors" or path in self.files]
        return [path for path in used if path.name not in (CONFIG_NAME, INDEX_NAME) and not path.name.startswith(".")]

    @property
    def _untied(self) -> dict[str, Any]:
        return self.config | {"tie_word_embeddings": False, UNTIED_MARK: True}

    def is_copied_in(self, copy: Path) -> bool:
        try:
            if read_object(copy / CONFIG_NAME) != self._untied:
                return False
            expected = {name for tensors in self.files.values() for name in tensors} | {HEAD}
            index = read_object(copy / INDEX_NAME)["weight_map"]
            if not expected == index.keys() == tensors_in(copy).keys():
                return False
            return xxhash.xxh3_128_hexdigest(tensor_in(copy / index[HEAD], HEAD)[1]) == self.digest
        except (OSError, ModelFolderError, KeyError, ValueError, TypeError, AttributeError):  # damaged or missing
            return False

    def copy_to(self, copy: Path, may_copy: bool) -> None:
        """Create a copy that is complete or absent after a power cut. The caller holds the parent folder's lock."""
        unfinished = copy.with_name(f".{copy.name}.unfinished")
        unfinished.mkdir()
        try:
            for file in self._linked:
                _link(unfinished / (_BODY_NAME if file.name == SINGLE_NAME else file.name), file, may_copy)
            if HEAD not in {name for tensors in self.files.values() for name in tensors}:
                where = next(path for path, tensors in self.files.items() if self.embedding in tensors)
                stored, content = tensor_in(where, self.embedding)
                with (unfinished / _HEAD_NAME).open("xb") as head:  # "x": never write through a link into the model
                    head.write(pack_header({HEAD: stored._replace(start=0, end=stored.end - stored.start)}))
                    head.write(content)
                sync(unfinished / _HEAD_NAME)
            write_index(unfinished, sorted(unfinished.glob("*.safetensors")))
            write_config(unfinished, self._untied)
            for name in (INDEX_NAME, CONFIG_NAME):
                sync(unfinished / name)
            shutil.rmtree(copy, ignore_errors=True)  # an existing copy is damaged
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
