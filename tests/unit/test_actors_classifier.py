"""Reward classifiers: the reward is the model output for prompt and completion. Unsuitable folders are rejected."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from leeway.actors.tasks import Problem, TaskError, check_task, load_reward, load_task
from leeway.actors.tasks.config import ReasoningGymTask
from leeway.actors.tasks.task import NoScore

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
CHAT = "{% for turn in messages %}{{ '+' if turn['role'] == 'user' else '=' }}{{ turn['content'] }}{% endfor %}"


def make(folder, kind=LlamaForSequenceClassification, *, pads=True, chat=False, **changes):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    values = {"vocab_size": len(tokenizer), "max_position_embeddings": 24, "num_labels": 1, "initializer_range": 0.5}
    model = kind(LlamaConfig(**{**sizes, **values, **changes}))
    model.save_pretrained(folder)
    if not pads:
        tokenizer.pad_token = None
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


def task(folder, **changes):
    model = {"type": "classifier", "path": str(folder), **changes}
    return ReasoningGymTask(
        type="reasoning_gym",
        name="chain_sum",
        num_train=8,
        num_heldout=2,
        rewards=("helpful",),
        reward_models={"helpful": model},
    )


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_the_reward_equals_the_model_output_for_each_text_alone(tmp_path, pads, chat):
    model, tokenizer = make(tmp_path, pads=pads, chat=chat)
    (function,) = load_task(task(tmp_path, chat=chat)).rewards
    prompts, completions = ["42+17", "1+1", "42+17"], ["59", "12345678", "5"]
    values = load_reward(function)([Problem(text, text, {}) for text in prompts], completions)
    for value, prompt, completion in zip(values, prompts, completions, strict=True):
        text = f"+{prompt}={completion}" if chat else prompt + completion
        with torch.no_grad():
            alone = model(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()
        assert value == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 4) for value in values}) == 3


def test_a_text_that_is_too_long_gets_no_score_and_others_keep_theirs(tmp_path):
    make(tmp_path)
    (function,) = load_task(task(tmp_path)).rewards
    problem = Problem("1+1=", "1+1=", {})
    long, short = load_reward(function)([problem, problem], ["1" * 30, "2"])
    assert long == NoScore("too long for the reward model", "34 tokens, its limit is 24")
    assert isinstance(short, float)


def test_a_text_without_tokens_gets_no_score_and_its_own_reason(tmp_path):
    make(tmp_path)
    (function,) = load_task(task(tmp_path)).rewards
    nothing, short = load_reward(function)([Problem("", "", {}), Problem("1+1=", "1+1=", {})], ["", "2"])
    assert nothing == NoScore("the reward model's tokenizer returns no token for the text")
    assert isinstance(short, float)


def test_positions_reserved_for_padding_reduce_the_length_limit(tmp_path):
    _, tokenizer = make(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"vocab_size": len(tokenizer), "max_position_embeddings": 20, "num_labels": 1, "pad_token_id": 1}
    RobertaForSequenceClassification(RobertaConfig(**sizes, **values)).save_pretrained(tmp_path)
    (function,) = load_task(task(tmp_path)).rewards
    longest = 20 - 2
    problems = [Problem("1" * number, "1" * number, {}) for number in (longest - 1, longest, longest + 1, 20)]
    values = [load_reward(function)([problem], [""])[0] for problem in problems]
    assert [isinstance(value, float) for value in values] == [True, True, False, False]
    assert values[2] == NoScore("too long for the reward model", f"{longest + 1} tokens, its limit is {longest}")


def test_a_gpu_error_ends_the_reward_process_because_later_calls_would_fail(tmp_path, monkeypatch):
    make(tmp_path)
    (function,) = load_task(task(tmp_path)).rewards
    call, statuses = load_reward(function), []

    def fail(*_, **__):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def exit_with(status):
        statuses.append(status)
        raise SystemExit

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", fail)
    monkeypatch.setattr("os._exit", exit_with)
    with pytest.raises(SystemExit):
        call([Problem("1", "1", {})], ["2"])
    assert statuses == [1]


def rejection(folder, **changes):
    with pytest.raises(TaskError) as error:
        check_task(task(folder, **changes), model_folder=DEMO, max_prompt_tokens=512, vocab_size=18)
    return str(error.value)


def test_a_folder_without_a_reward_model_is_rejected_before_start(tmp_path):
    make(tmp_path / "good", vocab_size=64)
    check_task(task(tmp_path / "good"), model_folder=DEMO, max_prompt_tokens=512, vocab_size=18)
    assert "this folder has no model (config.json)" in rejection(tmp_path / "nothing")
    make(tmp_path / "policy", LlamaForCausalLM)
    assert "is of type LlamaForCausalLM; use a ...ForSequenceClassification model" in rejection(tmp_path / "policy")
    make(tmp_path / "two", num_labels=2)
    assert "has 2 outputs, but a reward is one number" in rejection(tmp_path / "two")
    make(tmp_path / "other", vocab_size=7)
    assert "tokens, but the model a vocabulary of 7: the tokenizer is of another model" in rejection(tmp_path / "other")
    assert "the tokenizer has no chat template; set chat = false" in rejection(tmp_path / "good", chat=True)
    shutil.copytree(tmp_path / "good", tmp_path / "bare")
    for file in (tmp_path / "bare").glob("tokenizer*"):
        file.unlink()
    assert "has no loadable tokenizer" in rejection(tmp_path / "bare")


def test_weights_without_a_head_are_rejected_at_load_time(tmp_path):
    make(tmp_path, LlamaForCausalLM)
    config = json.loads((tmp_path / "config.json").read_text())
    values = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **values, "num_labels": 1}))
    (function,) = load_task(task(tmp_path)).rewards
    with pytest.raises(TaskError, match=r"lacks weight score\.weight, so rewards would be random"):
        load_reward(function)
