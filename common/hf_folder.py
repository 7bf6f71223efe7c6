"""Hugging Face checkpoint folders, read and written without torch or safetensors.

config.json                        model type and hyperparameters
generation_config.json             end-of-sequence tokens, which take precedence over the tokens in config.json
model.safetensors                  the weights, if they are in one file
model.safetensors.index.json       maps each tensor to its file, if there are several weight files
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from leeway.common.errors import LeewayError
from leeway.common.files import mapped

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

EMBEDDING_SUFFIX = "embed_tokens.weight"
HEAD = "lm_head.weight"
UNTIED_MARK = "leeway_untied"
"""Key in config.json that marks an untied copy of a model whose head is tied to the embedding."""

_TIED_BY_DEFAULT = "gemma"
"""Prefix of model types whose head Transformers ties unless config.json sets tie_word_embeddings = false."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_LARGEST_COPY_BYTES = 64 * 2**20
"""Maximum size in bytes of the files besides weights, such as the tokenizer, that an export copies."""
_NAMES_ONLY = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Keys of a config.json that do not affect the meaning of the weights."""
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes per value, by dtype code in a safetensors header; tensors of other dtypes are not checked for size."""
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 * 2**20


class ModelFolderError(LeewayError, ValueError):
    """A model folder lacks a file or value needed for serving or training, or one of its files is damaged."""


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a checkpoint that a run uses."""

    vocab_size: int
    num_layers: int
    tied: bool
    """Whether the output head shares the weights of the embedding."""
    model_type: str
    eos_token_ids: tuple[int, ...]
    max_position: int
    unread_keys: tuple[str, ...] = ()
    """Keys of the checkpoint's config.json that the learner does not read."""


# --- config.json --------------------------------------------------------------------------------------


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")


def model_identity(folder: Path) -> str:
    """Return the model type and a digest of config.json; raise ModelFolderError if the file is missing."""
    config = read_object(folder / CONFIG_NAME)
    relevant = {key: value for key, value in config.items() if key not in _NAMES_ONLY}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()
    return f"{config.get('model_type', 'model')}-{digest[:12]}"


def check_model_folder(path: Path) -> ModelFacts:
    """Read the properties of a checkpoint folder; raise ModelFolderError if anything is missing or damaged."""
    if not path.is_dir():
        raise ModelFolderError(f"model {path}: no such folder; give the path of a Hugging Face checkpoint on disk")
    config = read_object(path / CONFIG_NAME)
    if not tensors_by_file(path):
        raise ModelFolderError(
            f"model {path}: contains no *.safetensors file; convert it with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    generation_path = path / "generation_config.json"
    generation = read_object(generation_path) if generation_path.exists() else {}
    eos_token_ids = next(filter(None, map(_eos_token_ids, (generation, config, config.get("text_config")))), ())
    vocab_size = _integer(path, config, "vocab_size")
    in_vocabulary = [0 <= each < vocab_size for each in eos_token_ids if type(each) is int]
    if eos_token_ids and (len(in_vocabulary) < len(eos_token_ids) or not any(in_vocabulary)):
        raise ModelFolderError(
            f"model {path}: eos_token_id = {', '.join(map(str, eos_token_ids))} is not in the vocabulary of "
            f"{vocab_size} tokens; correct eos_token_id or vocab_size"
        )
    if not eos_token_ids:
        raise ModelFolderError(
            f"model {path}: neither {CONFIG_NAME} nor generation_config.json sets eos_token_id, "
            "so completions would never end; add eos_token_id to one of the files"
        )
    return ModelFacts(
        vocab_size=vocab_size,
        num_layers=_integer(path, config, "num_hidden_layers"),
        tied=bool(config.get("tie_word_embeddings", _model_type(config).startswith(_TIED_BY_DEFAULT))),
        model_type=_model_type(config),
        eos_token_ids=eos_token_ids,
        max_position=_integer(path, config, "max_position_embeddings"),
    )


def _eos_token_ids(table: object) -> tuple[int, ...]:
    value = table.get("eos_token_id") if isinstance(table, Mapping) else None
    return tuple(each for each in (value if isinstance(value, list) else [value]) if each is not None)


def _model_type(config: Mapping[str, Any]) -> str:
    return str(config.get("model_type", "unknown"))


def _integer(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelFolderError(
            f"model {path}: {CONFIG_NAME} has no {key} above 0 (found {value!r}); use a causal language model"
        )
    return value


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"model {path.parent}: contains no {path.name}; use a Hugging Face checkpoint"
        ) from error
    except OSError as error:
        raise ModelFolderError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not valid JSON: {error}; download the file again") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: expected a JSON object, got {type(content).__name__}; download the file again")
    return content


# --- weights ------------------------------------------------------------------------------------------


class StoredTensor(NamedTuple):
    """Entry of one tensor in the header of a safetensors file."""

    code: str
    shape: tuple[int, ...]
    start: int
    """Byte offset from the start of the data."""
    end: int


def pack_header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the header of a safetensors file: 8 bytes of length, then JSON padded to a multiple of 8."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.code, "shape": tensor.shape, "data_offsets": [tensor.start, tensor.end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def parse_header(data: memoryview) -> tuple[int, dict[str, StoredTensor]]:
    """Return the offset of the data and the entry of each tensor; raise ValueError if the file is damaged."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > min(_MAX_HEADER_BYTES, len(data) - _LENGTH.size):
            raise ValueError(f"the header of {length} bytes is longer than the file")  # noqa: TRY301 -- handled below
        start = _LENGTH.size + length
        header = json.loads(bytes(data[_LENGTH.size : start]))
        header.pop("__metadata__", None)
        found = {name: _stored(name, entry, len(data) - start) for name, entry in header.items()}
        _check_no_gaps(found.values(), len(data) - start)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{error}") from error
    return start, found


def _stored(name: str, entry: Mapping[str, Any], data_bytes: int) -> StoredTensor:
    shape = tuple(int(extent) for extent in entry["shape"])
    start, end = (int(offset) for offset in entry["data_offsets"])
    if min(shape, default=0) < 0 or not 0 <= start <= end <= data_bytes:
        raise ValueError(f"tensor '{name}' is outside the file")
    code = str(entry["dtype"])
    if code in _ITEM_BYTES and end - start != _ITEM_BYTES[code] * math.prod(shape):
        raise ValueError(f"the size of tensor '{name}' does not match its shape")
    return StoredTensor(code, shape, start, end)


def _check_no_gaps(tensors: Iterable[StoredTensor], data_bytes: int) -> None:
    at = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        if tensor.start != at:
            raise ValueError(f"the tensors are not contiguous at byte {at}")
        at = tensor.end
    if at != data_bytes:
        raise ValueError(f"the tensors end at byte {at} of {data_bytes}")


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in a safetensors file's header; raise ModelFolderError if the file is missing or damaged."""
    try:
        return parse_header(mapped(path))[1]
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"{path} is missing, but the checkpoint's index lists it. Download the file again"
        ) from error
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> ModelFolderError:
    return ModelFolderError(
        f"cannot read {path} ({path.stat().st_size} bytes) as safetensors: {error}. The file is truncated, damaged, "
        "or only a Git LFS pointer; download the file again"
    )


def tensors_by_file(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """Return the tensors of every *.safetensors file in a folder, or only of the files that an index lists.

    Some folders hold the weights twice; Transformers uses the index. Raises ModelFolderError if a file is damaged.
    """
    paths = set(folder.glob("*.safetensors"))
    if (folder / INDEX_NAME).exists():
        paths = {folder / name for name in file_of_each_tensor(folder).values()}
    return {path: stored_tensors(path) for path in sorted(paths)}


def tensors_in(folder: Path) -> dict[str, StoredTensor]:
    return {name: tensor for tensors in tensors_by_file(folder).values() for name, tensor in tensors.items()}


def tensor_in(path: Path, name: str) -> tuple[StoredTensor, memoryview]:
    """Return the header entry and the memory-mapped bytes of a tensor."""
    data = mapped(path)
    start, tensors = parse_header(data)
    found = tensors[name]
    return found, data[start + found.start : start + found.end]


def file_of_each_tensor(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor in a checkpoint.

    Raises:
        FileNotFoundError: the folder has no safetensors checkpoint.
        ModelFolderError: the index or the only file is damaged.
    """
    index = folder / INDEX_NAME
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(
                f"{index} is not a valid checkpoint index: {type(error).__name__}: {error}. Download the file again"
            ) from error
        return {str(name): str(file) for name, file in weight_map}
    if not (folder / SINGLE_NAME).exists():
        raise FileNotFoundError(
            f"neither {SINGLE_NAME} nor {INDEX_NAME} is in {folder}; model_path must be a folder that "
            "save_pretrained wrote with safetensors"
        )
    return dict.fromkeys(stored_tensors(folder / SINGLE_NAME), SINGLE_NAME)


# --- writing ------------------------------------------------------------------------------------------


def shard_name(number: int, num_shards: int) -> str:
    return SINGLE_NAME if num_shards == 1 else f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def complete_folder(folder: Path, model_path: Path, num_shards: int, dtype: str) -> None:
    """Write the index, config and tokenizer files of an exported folder, after all shards have been written.

    All files except weights are copied from the checkpoint from which training started.
    """
    for file in sorted(model_path.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.stat().st_size <= _LARGEST_COPY_BYTES:
            shutil.copyfile(file, folder / file.name)
    config = read_object(model_path / CONFIG_NAME)
    config.pop("torch_dtype", None)
    write_config(folder, config | {"dtype": dtype})
    if num_shards > 1:
        write_index(folder, [folder / shard_name(number, num_shards) for number in range(num_shards)])


def write_index(folder: Path, files: Iterable[Path]) -> None:
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for path in files:
        tensors = stored_tensors(path)
        weight_map |= dict.fromkeys(tensors, path.name)
        size_bytes += sum(tensor.end - tensor.start for tensor in tensors.values())
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
