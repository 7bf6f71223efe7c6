"""Loading a stage: reads only its own tensors; rejects damaged and mismatched checkpoints by file name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from leeway.common.hf_folder import HEAD, INDEX_NAME, SINGLE_NAME
from leeway.learner.model import EMBEDDING, check_checkpoint
from tests.unit.small_models import Model, config_of, load


def shard(folder: Path, share_of_name) -> dict[str, str]:
    """Split the single file of a checkpoint into shards; return the weight map of the index."""
    tensors = load_file(folder / SINGLE_NAME)
    weight_map = {name: share_of_name(name) for name in tensors}
    for file in set(weight_map.values()):
        save_file({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / SINGLE_NAME).unlink()
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def by_layer(name: str) -> str:
    return f"layer-{name.split('.')[2]}.safetensors" if ".layers." in name else f"{name.split('.')[1]}.safetensors"


def test_a_stage_opens_only_the_files_of_its_own_tensors(tmp_path):
    # The model has 48 layers of 4.7 million weights (900 MB); the stage in the middle reads one layer.
    config = config_of(num_hidden_layers=48, hidden_size=512, intermediate_size=2048, vocab_size=64)
    config.save_pretrained(tmp_path)
    one = config_of(num_hidden_layers=1, hidden_size=512, intermediate_size=2048, vocab_size=64)
    tensors = AutoModelForCausalLM.from_config(one).state_dict()
    layer = {name.replace(".0.", ".20."): tensor for name, tensor in tensors.items() if ".layers." in name}
    save_file(layer, tmp_path / "layer-20.safetensors")
    names = [name.replace(".20.", f".{i}.") for i in range(48) for name in layer] + [
        EMBEDDING,
        HEAD,
        "model.norm.weight",
    ]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {name: by_layer(name) for name in names}}))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
    before = status_kib("VmRSS")
    stage = load(tmp_path, 20, 48, dtype=torch.float32)
    size_kib = sum(parameter.numel() for parameter in stage.parameters()) * 4 // 1024
    assert status_kib("VmHWM") - before < 4 * size_kib + 20_000
    assert torch.equal(stage.model.layers["20"].mlp.up_proj.weight, layer["model.layers.20.mlp.up_proj.weight"])


def status_kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_tied_head_is_the_embedding_even_if_the_checkpoint_has_a_head(tmp_path, num_stages):
    Model("llama", True).save(tmp_path)
    tensors = load_file(tmp_path / SINGLE_NAME)
    save_file({**tensors, HEAD: torch.zeros_like(tensors[EMBEDDING])}, tmp_path / SINGLE_NAME)
    stages = [load(tmp_path, index, num_stages) for index in range(num_stages)]
    assert torch.equal(stages[-1].lm_head.weight, tensors[EMBEDDING])
    assert torch.equal(stages[0].model.embed_tokens.weight, tensors[EMBEDDING])
    assert (stages[-1].lm_head.weight is stages[0].model.embed_tokens.weight) == (num_stages == 1)


def test_a_bfloat16_checkpoint_becomes_float32_master_weights(tmp_path):
    folder = Model("qwen2", False).save(tmp_path)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    stage = load(folder, dtype=torch.float32)
    stored = load_file(folder / SINGLE_NAME)
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
    assert all(torch.equal(p, stored[name].float()) for name, p in stage.named_parameters())
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_a_model_that_cannot_be_computed_exactly_is_rejected(tmp_path):
    small = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 16, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**small)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"type 'gpt2'.*supports gemma, .*llama"):
        load(tmp_path / "gpt2")
    rejected = {
        "attention_dropout = 0.1": Model("llama", True, {"attention_dropout": 0.1}),
        "'dynamic'": Model(
            "llama", True, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
        ),
        "use_bidirectional_attention": Model("gemma3_text", True, {"head_dim": 8, "use_bidirectional_attention": True}),
    }
    for i, (message, model) in enumerate(rejected.items()):
        with pytest.raises(ValueError, match=message):
            load(model.save(tmp_path / str(i)))
        with pytest.raises(ValueError, match=message):
            check_checkpoint(tmp_path / str(i))


def test_a_damaged_checkpoint_is_reported_with_its_file(tmp_path):
    whole = Model("llama", False).save(tmp_path / "whole")
    sharded = shutil.copytree(whole, tmp_path / "sharded")
    shard(sharded, by_layer)
    single, one = whole / SINGLE_NAME, sharded / "layer-1.safetensors"
    for file, folder in ((single, whole), (one, sharded)):
        good = file.read_bytes()
        for bad in (
            good[: len(good) // 2],
            good[:5],
            b"",
            b"\xff" * len(good),
            b"\x10" + bytes(7) + b"{not json at all",
        ):
            file.write_bytes(bad)
            with pytest.raises(ValueError, match=rf"cannot read {file} \({len(bad)} bytes\).*[Dd]ownload"):
                load(folder)
        file.write_bytes(good)
        load(folder)
    # a missing file affects only the stages whose tensors are in that file
    one.unlink()
    load(sharded, 0, 3)
    with pytest.raises(ValueError, match=rf"{one} is missing.*Download"):
        load(sharded, 1, 3)
    for text in ("{", "[]", '{"metadata": {}}'):
        (sharded / INDEX_NAME).write_text(text)
        with pytest.raises(ValueError, match=rf"{sharded / INDEX_NAME} is not a valid checkpoint index.*Download"):
            load(sharded)


def test_the_weights_of_another_model_are_rejected(tmp_path):
    folder = Model("llama", False).save(tmp_path / "model")
    Model("llama", False).save(tmp_path / "wider", intermediate_size=28)
    shutil.copyfile(tmp_path / "wider" / SINGLE_NAME, folder / SINGLE_NAME)
    for check in (load, check_checkpoint):
        with pytest.raises(ValueError, match=r"safetensors: tensor model.layers.0.mlp.\w+.weight has shape .*28.*20"):
            check(folder)
    Model("qwen3", False, {"head_dim": 6}).save(tmp_path / "qwen3")
    shutil.copyfile(tmp_path / "model" / SINGLE_NAME, tmp_path / "qwen3" / SINGLE_NAME)
    with pytest.raises(ValueError, match=r"has no tensor model.layers.0.self_attn.k_norm.weight \(6 of"):
        load(tmp_path / "qwen3")
    Model("qwen2", False).save(tmp_path / "qwen2")
    shutil.copyfile(tmp_path / "qwen2" / SINGLE_NAME, folder / SINGLE_NAME)
    with pytest.raises(ValueError, match=r"has 9 tensors that the .* lacks, .*model.layers.0.self_attn.k_proj.bias"):
        load(folder)
    (folder / SINGLE_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        load(folder)
