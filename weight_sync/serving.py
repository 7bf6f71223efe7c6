"""The checkpoint folder that actors serve: checked before any process starts, and never with a tied head.

A head tied to the embedding does not survive an update in flight: vLLM's reload on CPU leaves the
old head in place and says so only in its log. So a tied checkpoint is served from an untied copy.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CONFIG_NAME = "config.json"
HEAD = "lm_head.weight"
UNTIED_MARK = "leeway_untied"
"""Key in the config.json of an untied copy: its source ties the head to the embedding."""
_TIED_UNLESS_SAID = "gemma"
"""Transformers ties the head of these families where config.json does not say, and of no other that we train."""
_INDEX_NAME = "model.safetensors.index.json"
_WHOLE_NAME = "model.safetensors"
_BODY_NAME = "model_body.safetensors"
_HEAD_FILE = "lm_head.safetensors"


class ModelFolderError(ValueError):
    """A model folder lacks something that serving or training needs."""


@dataclass(frozen=True)
class ModelFacts:
    """What the rest of a run needs to know of a checkpoint."""

    vocab_size: int
    num_layers: int
    tied: bool
    """Does the output head share the embedding's weights?"""
    model_type: str
    """As in config.json, for example 'llama'."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence."""
    max_position: int
    """Longest sequence in tokens."""


def check_model_folder(path: Path) -> ModelFacts:
    """Read the facts of a Hugging Face checkpoint folder. Imports neither vllm nor transformers.

    Raises:
        ModelFolderError: says what is missing and what to try.
    """
    if not path.is_dir():
        raise ModelFolderError(f"model {path}: no such folder; give the path of a Hugging Face checkpoint on disk")
    config = _read_json(path / CONFIG_NAME)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(
            f"model {path}: holds no *.safetensors file; convert it with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    for file in files:
        _check_header(file)
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").exists() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()
    if not eos_token_ids:
        raise ModelFolderError(
            f"model {path}: neither {CONFIG_NAME} nor generation_config.json names an eos_token_id, "
            "so no completion could end; add it"
        )
    model_type = str(config.get("model_type", "unknown"))
    return ModelFacts(
        vocab_size=_integer(path, config, "vocab_size"),
        num_layers=_integer(path, config, "num_hidden_layers"),
        tied=bool(config.get("tie_word_embeddings", model_type.startswith(_TIED_UNLESS_SAID))),
        model_type=model_type,
        eos_token_ids=eos_token_ids,
        max_position=_integer(path, config, "max_position_embeddings"),
    )


def prepare_serving_model(model_path: Path, out_folder: Path) -> Path:
    """The folder that actors serve: `model_path` itself, or an untied copy where its head is tied.

    Args:
        model_path: a Hugging Face checkpoint.
        out_folder: where the copy goes; one that is complete already is used as it is.

    Returns:
        `model_path` or `out_folder`.

    Raises:
        ModelFolderError: the checkpoint is incomplete, or its embedding cannot be found.
    """
    if not check_model_folder(model_path).tied:
        return model_path
    if (out_folder / CONFIG_NAME).exists():
        return out_folder
    temporary = out_folder.with_name(f".{out_folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model_path, temporary)
    _add_head(temporary)
    config = _read_json(temporary / CONFIG_NAME) | {"tie_word_embeddings": False, UNTIED_MARK: True}
    (temporary / CONFIG_NAME).write_text(json.dumps(config, indent=2))
    temporary.replace(out_folder)
    return out_folder


def embedding_of(names: Iterable[str]) -> str:
    """The name of the input embedding among the tensors of a checkpoint.

    Raises:
        ModelFolderError: there is none, or more than one.
    """
    found = [name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if len(found) != 1:
        raise ModelFolderError(f"expected one input embedding (…embed_tokens.weight), found {found or 'none'}")
    return found[0]


def _add_head(folder: Path) -> None:
    """Write the embedding once more, as the head, in a file of its own."""
    weight_map: dict[str, str] = {}
    if (folder / _WHOLE_NAME).exists():
        # readers prefer this name to the index, and would not find the head
        (folder / _WHOLE_NAME).rename(folder / _BODY_NAME)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                weight_map |= dict.fromkeys(file.keys(), path.name)
        except SafetensorError as error:
            raise ModelFolderError(f"{path}: not a readable safetensors file: {error}") from error
    if HEAD in weight_map:
        return
    embedding = embedding_of(weight_map)
    with safe_open(folder / weight_map[embedding], framework="pt") as file:
        save_file({HEAD: file.get_tensor(embedding)}, folder / _HEAD_FILE, metadata={"format": "pt"})
    weight_map[HEAD] = _HEAD_FILE
    (folder / _INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))


def _check_header(file: Path) -> None:
    """A file that is cut short, or a Git-LFS pointer, is noticed before anything starts."""
    try:
        with safe_open(file, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        raise ModelFolderError(
            f"{file}: not a readable safetensors file: {error}; it is damaged or only a pointer, so fetch it again"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"model {path.parent}: holds no {path.name}; is it a Hugging Face checkpoint?"
        ) from error
    except json.JSONDecodeError as error:
        raise ModelFolderError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{path}: holds a {type(content).__name__} where an object is expected")
    return content


def _integer(path: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ModelFolderError(f"model {path}: {CONFIG_NAME} names no {key} (found {value!r})")
    return value
