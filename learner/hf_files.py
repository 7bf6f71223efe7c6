"""Hugging Face checkpoint folders: read single tensors, write one shard per stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
COMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints hold these tables, which models compute."""
LARGEST_COPY_BYTES = 64 * 2**20
"""Files beside the weights (tokenizer, config) are copied on export up to this size."""


class _TensorFile(Protocol):
    """An opened safetensors file, as far as it is used here."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...  # noqa: ANN401, what the library gives has no type

    def get_tensor(self, name: str) -> Tensor: ...


def read_tensors(folder: Path, shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Tensor]]:
    """Read the named tensors of a checkpoint one by one; files without any of them are not opened.

    Args:
        folder: of the checkpoint.
        shapes: which tensors, and the shape that the model wants of each.

    Yields:
        Name and tensor, as stored. Keep the tensor no longer than needed: the next one is read after it.

    Raises:
        FileNotFoundError: the folder has no safetensors checkpoint.
        ValueError: a tensor is not in the checkpoint or has another shape, or a file is missing or damaged.
    """
    file_of = _file_of_each_tensor(folder)
    missing = sorted(shapes.keys() - file_of.keys())
    if missing:
        raise ValueError(
            f"checkpoint {folder} has no tensor {missing[0]} ({len(missing)} of {len(shapes)} are missing); its "
            "weights do not belong to its config.json. Fetch the checkpoint again, or give another model_path"
        )
    for file in sorted({file_of[name] for name in shapes}):
        with _opened(folder / file) as opened:
            for name in sorted(name for name in shapes if file_of[name] == file):
                yield name, _read(opened, folder / file, name, tuple(shapes[name]))


def check_names(folder: Path, known: Iterable[str]) -> None:
    """Refuse a checkpoint with weights that its model has no place for: left out, they would make another model of it.

    Args:
        folder: of the checkpoint.
        known: names of all tensors of the whole model.

    Raises:
        FileNotFoundError: the folder has no safetensors checkpoint.
        ValueError: there are others.
    """
    found = {name for name in _file_of_each_tensor(folder) if not name.endswith(COMPUTED_SUFFIX)}
    strange = sorted(found - set(known))
    if strange:
        raise ValueError(
            f"checkpoint {folder} holds {len(strange)} tensors that the model of its config.json does not have, the "
            f"first of them {strange[0]}; its weights do not belong to its config.json. Fetch the checkpoint again, or "
            "give another model_path"
        )


def _read(opened: _TensorFile, path: Path, name: str, wanted: tuple[int, ...]) -> Tensor:
    try:
        found = tuple(opened.get_slice(name).get_shape())
        if found == wanted:
            return opened.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(
            f"{path} does not hold the tensor {name} that its checkpoint says ({error}). Fetch the file again"
        ) from error
    raise ValueError(
        f"{path}: tensor {name} has shape {list(found)}, and the model of config.json wants {list(wanted)}; the "
        "weights are of another model. Fetch the checkpoint again, or give another model_path"
    )


@contextmanager
def _opened(path: Path) -> Iterator[_TensorFile]:
    """A safetensors file; only its header is read.

    Raises:
        ValueError: it is missing, cut short, or no safetensors file.
    """
    try:
        opened = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing, and the checkpoint says it is part of it. Fetch the file again"
        ) from error
    except (SafetensorError, OSError) as error:
        size_bytes = path.stat().st_size
        raise ValueError(
            f"{path} ({size_bytes} bytes) cannot be read as safetensors: {error}. It is cut short or damaged; fetch "
            "the file again"
        ) from error
    with opened as file:
        yield file


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    index = folder / INDEX_NAME
    if index.exists():
        return _read_index(index)
    single = folder / SINGLE_NAME
    if not single.exists():
        raise FileNotFoundError(
            f"no {SINGLE_NAME} and no {INDEX_NAME} in {folder}; model_path must be a folder that "
            "save_pretrained wrote with safetensors"
        )
    with _opened(single) as opened:
        return dict.fromkeys(opened.keys(), SINGLE_NAME)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index} is no index of a checkpoint: {type(error).__name__}: {error}. Fetch the file again"
        ) from error
    return {str(name): str(file) for name, file in weight_map.items()}


def shard_name(rank: int, num_stages: int) -> str:
    """File of a stage's weights in an exported folder."""
    return SINGLE_NAME if num_stages == 1 else f"model-{rank + 1:05d}-of-{num_stages:05d}.safetensors"


def write_shard(folder: Path, rank: int, num_stages: int, tensors: Mapping[str, Tensor]) -> int:
    """Write a stage's weights.

    Returns:
        Their size in bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / shard_name(rank, num_stages), metadata={"format": "pt"})
    return sum(tensor.numel() * tensor.element_size() for tensor in copies.values())


def write_folder(folder: Path, model_path: Path, num_stages: int, dtype: torch.dtype) -> None:
    """Complete an exported folder once every shard is written: index, config and tokenizer files.

    Args:
        folder: where the shards are.
        model_path: the checkpoint that training started from; all but its weights is copied.
        num_stages: how many shards there are.
        dtype: of the exported weights.
    """
    for file in sorted(model_path.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES) and file.stat().st_size <= LARGEST_COPY_BYTES:
            shutil.copyfile(file, folder / file.name)
    config: dict[str, Any] = json.loads((model_path / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if num_stages == 1:
        return
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for rank in range(num_stages):
        name = shard_name(rank, num_stages)
        with safe_open(folder / name, framework="pt") as opened:
            weight_map.update(dict.fromkeys(opened.keys(), name))
        size_bytes += (folder / name).stat().st_size
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
