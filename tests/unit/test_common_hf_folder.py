"""The folder that actors serve: checked without an engine, untied where its head is tied."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from common.hf_folder import HEAD, UNTIED_MARK, ModelFolderError, check_model_folder, prepare_serving_model, tensors_in
from learner.decoders import FAMILIES


def checkpoint(folder: Path, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        eos_token_id=[2, 5],
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def test_the_facts_of_a_checkpoint_are_read(tmp_path: Path):
    checkpoint(tmp_path, tied=True)
    facts = check_model_folder(tmp_path)
    assert (facts.vocab_size, facts.num_layers, facts.max_position) == (16, 3, 32)
    assert facts.tied
    assert facts.model_type == "llama"
    assert facts.eos_token_ids == (2, 5)


@pytest.mark.parametrize("model_type", [family for family in FAMILIES if family != "llama"])
def test_a_checkpoint_that_does_not_say_whether_its_head_is_tied_is_taken_as_transformers_takes_it(
    tmp_path: Path, model_type: str
):
    checkpoint(tmp_path, tied=True)
    said = json.loads((tmp_path / "config.json").read_text()) | {"model_type": model_type}
    del said["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert check_model_folder(tmp_path).tied is AutoConfig.from_pretrained(tmp_path).tie_word_embeddings


def test_a_tied_checkpoint_is_served_untied_and_computes_the_same(tmp_path: Path):
    model = checkpoint(tmp_path / "model", tied=True)
    served = prepare_serving_model(tmp_path / "model", tmp_path / "served")
    assert served == tmp_path / "served"
    assert not check_model_folder(served).tied
    assert json.loads((served / "config.json").read_text())[UNTIED_MARK] is True
    untied = LlamaForCausalLM.from_pretrained(served).eval()
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(untied(tokens).logits, model(tokens).logits)


def test_an_untied_checkpoint_is_served_as_it_is(tmp_path: Path):
    checkpoint(tmp_path / "model", tied=False)
    assert prepare_serving_model(tmp_path / "model", tmp_path / "served") == tmp_path / "model"
    assert not (tmp_path / "served").exists()


def test_preparing_twice_gives_the_same_folder(tmp_path: Path):
    checkpoint(tmp_path / "model", tied=True)
    first = prepare_serving_model(tmp_path / "model", tmp_path / "served")
    assert prepare_serving_model(tmp_path / "model", tmp_path / "served") == first
    assert list(tmp_path.glob(".*.tmp")) == []


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text('{"eos_token_id": 1}'), "names no vocab_size"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 40), "cannot be read as safetensors"),
        (lambda folder: save_file({"w": torch.ones(1)}, folder / "model.safetensors"), "expected one input embedding"),
    ],
)
def test_a_folder_that_cannot_be_served_says_why(tmp_path: Path, spoil, complaint: str):
    checkpoint(tmp_path / "model", tied=True)
    (tmp_path / "model" / "generation_config.json").unlink()
    spoil(tmp_path / "model")
    with pytest.raises(ModelFolderError, match=complaint):
        prepare_serving_model(tmp_path / "model", tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_a_missing_folder_says_what_to_give(tmp_path: Path):
    with pytest.raises(ModelFolderError, match="no such folder; give the path"):
        check_model_folder(tmp_path / "nothing")


def test_a_model_that_could_never_stop_is_refused(tmp_path: Path):
    checkpoint(tmp_path, tied=False)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(ModelFolderError, match="eos_token_id"):
        check_model_folder(tmp_path)


def test_the_copy_holds_the_head_beside_the_other_tensors(tmp_path: Path):
    checkpoint(tmp_path / "model", tied=True)
    served = prepare_serving_model(tmp_path / "model", tmp_path / "served")
    index = json.loads((served / "model.safetensors.index.json").read_text())
    assert index["weight_map"][HEAD] == "lm_head.safetensors"
    assert "model.embed_tokens.weight" in index["weight_map"]


def rewritten(file: Path, change) -> None:
    """Change the header of a safetensors file, which keeps its data."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda tensors: tensors["a"].update(shape=[3]), "'a' has another size than its shape"),
        (lambda tensors: tensors["b"].update(data_offsets=[16, 32]), "'b' lies outside of it"),
        (lambda tensors: tensors.pop("a"), "do not follow on each other at byte 0"),
        (lambda tensors: tensors.pop("b"), "end at byte 8 of 24"),
        (lambda tensors: tensors.update(b=None), "cannot be read"),
    ],
)
def test_a_header_that_does_not_describe_its_data_is_refused(tmp_path: Path, change, complaint: str):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(4)}, file)
    assert tensors_in(tmp_path)["b"].shape == (4,)
    rewritten(file, change)
    with pytest.raises(ModelFolderError, match=complaint):
        tensors_in(tmp_path)


def test_a_copied_head_is_the_embedding_byte_for_byte(tmp_path: Path):
    model = checkpoint(tmp_path / "model", tied=True).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    served = prepare_serving_model(tmp_path / "model", tmp_path / "served")
    assert torch.equal(load_file(served / "lm_head.safetensors")[HEAD], model.model.embed_tokens.weight)


def add_head(folder: Path, scale: float) -> None:
    """Store a head in a tied checkpoint besides."""
    tensors = load_file(folder / "model.safetensors")
    head = scale * tensors["model.embed_tokens.weight"]
    save_file({**tensors, HEAD: head}, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_checkpoint_that_holds_another_head_is_refused(tmp_path: Path):
    checkpoint(tmp_path / "model", tied=True)
    add_head(tmp_path / "model", scale=2.0)
    with pytest.raises(ModelFolderError, match=r"ties the head.*model.safetensors holds another lm_head.weight"):
        prepare_serving_model(tmp_path / "model", tmp_path / "served")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tied_checkpoint_that_holds_its_embedding_as_the_head_too_is_served(tmp_path: Path):
    model = checkpoint(tmp_path / "model", tied=True)
    add_head(tmp_path / "model", scale=1.0)
    served = prepare_serving_model(tmp_path / "model", tmp_path / "served")
    untied = LlamaForCausalLM.from_pretrained(served).eval()
    assert torch.equal(untied.lm_head.weight, model.model.embed_tokens.weight)
