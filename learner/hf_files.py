"""Hugging Face checkpoint folders: read single tensors, write one shard per stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
LARGEST_COPY_BYTES = 64 * 2**20
"""Files beside the weights (tokenizer, config) are copied on export up to this size."""


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint; files without any of them are not opened.

    Raises:
        FileNotFoundError: the folder has no safetensors checkpoint.
        ValueError: a name is not in the checkpoint.
    """
    wanted = set(names)
    file_of = _file_of_each_tensor(folder)
    missing = sorted(wanted - file_of.keys())
    if missing:
        raise ValueError(
            f"checkpoint {folder} has no tensor {missing[0]} ({len(missing)} of {len(wanted)} are missing); "
            "its weights do not belong to its config.json"
        )
    tensors: dict[str, Tensor] = {}
    for file in sorted({file_of[name] for name in wanted}):
        with safe_open(folder / file, framework="pt") as opened:
            for name in sorted(wanted):
                if file_of[name] == file:
                    tensors[name] = opened.get_tensor(name)
    return tensors


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors of a checkpoint."""
    return set(_file_of_each_tensor(folder))


def _file_of_each_tensor(folder: Path) -> dict[str, str]:
    index = folder / INDEX_NAME
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map
    single = folder / SINGLE_NAME
    if not single.exists():
        raise FileNotFoundError(
            f"no {SINGLE_NAME} and no {INDEX_NAME} in {folder}; model_path must be a folder that "
            "save_pretrained wrote with safetensors"
        )
    with safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), SINGLE_NAME)


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
