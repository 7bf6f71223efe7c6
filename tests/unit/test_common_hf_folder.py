"""Checkpoint folders: the facts that are read, and the folders that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from leeway.common.hf_folder import ModelFolderError, check_model_folder, tensors_in
from leeway.learner.decoders import FAMILIES
from tests.unit.small_models import tiny_checkpoint


def test_the_facts_of_a_checkpoint_are_read(tmp_path: Path):
    tiny_checkpoint(tmp_path, tied=True)
    facts = check_model_folder(tmp_path)
    assert (facts.vocab_size, facts.num_layers, facts.max_position) == (16, 3, 32)
    assert facts.tied
    assert facts.model_type == "llama"
    assert facts.eos_token_ids == (2, 5)


@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family != "llama"])
def test_an_unset_tie_word_embeddings_has_the_default_of_transformers(tmp_path: Path, model_type: str):
    tiny_checkpoint(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": model_type}
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_model_folder(tmp_path).tied is AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_a_missing_folder_is_reported_with_the_expected_path(tmp_path: Path):
    with pytest.raises(ModelFolderError, match="no such folder; give the path"):
        check_model_folder(tmp_path / "nothing")


def test_a_model_without_an_end_of_sequence_token_is_refused(tmp_path: Path):
    tiny_checkpoint(tmp_path, tied=False)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(ModelFolderError, match="eos_token_id"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": []}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": [None]}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [None, 7]}, {"eos_token_id": 3}, (7,)),
        ({}, {"eos_token_id": None, "text_config": {"eos_token_id": [6]}}, (6,)),
        ({"eos_token_id": 5}, {"eos_token_id": None, "text_config": "none"}, (5,)),
        (None, {"eos_token_id": [None, 2]}, (2,)),
    ],
)
def test_the_first_file_with_an_end_of_sequence_token_applies(tmp_path: Path, generation, model, ids):
    tiny_checkpoint(tmp_path, tied=False)
    (tmp_path / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | model))
    assert check_model_folder(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize("value", ["</s>", True, 2.5, {"id": 2}, [2, "</s>"], [[2]], 16, -1])
def test_an_invalid_end_of_sequence_token_is_refused_with_its_value(tmp_path: Path, value):
    tiny_checkpoint(tmp_path, tied=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelFolderError, match=r"eos_token_id = .* the vocabulary of 16 tokens; correct eos_token_id"):
        check_model_folder(tmp_path)


def rewrite_header(file: Path, change) -> None:
    """Change the header of a safetensors file and keep its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["a"].update(shape=[3]), "the size of tensor 'a' does not match its shape"),
        (lambda tensors: tensors["b"].update(data_offsets=[16, 32]), "'b' is outside the file"),
        (lambda tensors: tensors.pop("a"), "are not contiguous at byte 0"),
        (lambda tensors: tensors.pop("b"), "end at byte 8 of 24"),
        (lambda tensors: tensors.update(b=None), "cannot read"),
    ],
)
def test_a_header_that_does_not_describe_its_data_is_refused(tmp_path: Path, change, message: str):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(4)}, file)
    assert tensors_in(tmp_path)["b"].shape == (4,)
    rewrite_header(file, change)
    with pytest.raises(ModelFolderError, match=message):
        tensors_in(tmp_path)


def test_an_invalid_checkpoint_index_is_refused_by_name(tmp_path: Path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(ModelFolderError, match=r"index\.json is not a valid checkpoint index: .* Download"):
        tensors_in(tmp_path)
