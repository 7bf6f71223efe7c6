"""Checkpoint, prompts and config of runs whose completions end at random, with a long tail of lengths.

The model is a Llama whose random weights have the cost of any model of this size. Only a few dimensions determine the
output. Every prompt ends with a letter, which is the class of the prompt. A token of class c is followed by one of the
WORDS tokens of class c or, with probability 1 / mean_length(c), by the end of the sequence. The length of a completion
of class c is therefore geometric with this mean. The means of the classes are the quantiles of a log-normal
distribution. The model is not trained.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import torch
from examples.demo_model.make_checkpoint import make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

NUM_CLASSES = 16
MEDIAN_LENGTH = 48.0
SIGMA = 0.6
"""Standard deviation of the logarithm of the mean lengths."""
WORDS = 3
"""Number of tokens of a class, including the letter of the class."""
DIGITS = "0123456789"
CLASSES = "abcdefghijklmnop"
OTHERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ!#$%&*"
VOCABULARY = ("<pad>", "<eos>", "<unk>", *DIGITS, *CLASSES, *OTHERS)
PAD, EOS = 0, 1
MAX_TOKENS = 256

WIDTH, LAYERS, INTERMEDIATE = 256, 2, 768
NEVER = -40.0
"""Logit of tokens that must not be generated."""
LOUD = 100.0
"""Norm of an embedding. The layers add vectors of norm about 1, which are too small to affect the output."""
SEED = 0

GROUP_SIZE = 4
MAX_NEW_TOKENS = 240
NUM_PROMPTS = 4096
PROMPT_TOKENS = 8


def mean_length(number: int) -> float:
    """Return the mean completion length of class `number`, including the end-of-sequence token."""
    quantile = (number + 0.5) / NUM_CLASSES
    return MEDIAN_LENGTH * math.exp(SIGMA * NormalDist().inv_cdf(quantile))


def words(number: int) -> list[int]:
    """Return the token ids of a class."""
    others = [VOCABULARY.index(OTHERS[number * (WORDS - 1) + k]) for k in range(WORDS - 1)]
    return [VOCABULARY.index(CLASSES[number]), *others]


def make_model(max_tokens: int = MAX_TOKENS) -> LlamaForCausalLM:
    """Make the model. Its first NUM_CLASSES dimensions hold the class; the layers write only to other dimensions."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=WIDTH,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=WIDTH // 32,
            num_key_value_heads=WIDTH // 32,
            head_dim=32,
            max_position_embeddings=max_tokens,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
            dtype="float32",
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:NUM_CLASSES] = 0
            layer.mlp.down_proj.weight[:NUM_CLASSES] = 0
        model.model.embed_tokens.weight[:, :NUM_CLASSES] = 0
        # after the last norm, a token of class c is the unit vector c times sqrt(WIDTH)
        loudness = math.sqrt(WIDTH)
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :NUM_CLASSES] = NEVER / loudness
        for number in range(NUM_CLASSES):
            p_end = 1 / mean_length(number)
            model.lm_head.weight[EOS, number] = math.log(WORDS * p_end / (1 - p_end)) / loudness
            for word in words(number):
                model.model.embed_tokens.weight[word] = 0
                model.model.embed_tokens.weight[word, number] = LOUD
                model.lm_head.weight[word, number] = 0
    return model


@dataclass(frozen=True)
class Setting:
    """Sizes of the synchronous and the asynchronous run."""

    num_steps: int
    num_warmup: int
    """Number of steps at the beginning that do not count."""
    groups_per_step: int
    """Number of prompts per step, each with GROUP_SIZE samples. More prompts lengthen training, hardly generation."""

    @property
    def samples_per_step(self) -> int:
        """Number of samples per step. Like a synchronous system, the actor keeps all samples in flight at once."""
        return self.groups_per_step * GROUP_SIZE


def questions(num_prompts: int) -> list[str]:
    """Return `num_prompts` prompts, each of which ends with the letter of its class."""
    chance = random.Random(SEED)
    return [f"{number:07d}{chance.choice(CLASSES)}" for number in range(num_prompts)]


def write_checkpoint(folder: Path, max_tokens: int = MAX_TOKENS) -> None:
    """Write model and tokenizer for samples of up to `max_tokens` tokens."""
    make_model(max_tokens).save_pretrained(folder)
    make_tokenizer(VOCABULARY, max_tokens).save_pretrained(folder)


def write_setting(folder: Path, setting: Setting, num_prompts: int = NUM_PROMPTS) -> Path:
    """Create a folder with model, prompts and config; return the path of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"question": question}) for question in questions(num_prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    write_checkpoint(folder / "long_tail_model")
    path = folder / "overlap.toml"
    path.write_text(_config(folder, setting))
    return path


def _config(folder: Path, setting: Setting) -> str:
    return f"""\
[model]
path = "{folder / "long_tail_model"}"

[task]
type = "file"
path = "{folder / "prompts.jsonl"}"
rewards = ["{Path(__file__).resolve().with_name("reward.py")}:even"]
num_heldout = 8

[algorithm]
type = "trajectory_balance"

[actors]
num_actors = 1
group_size = {GROUP_SIZE}
max_prompt_tokens = {PROMPT_TOKENS}
max_new_tokens = {MAX_NEW_TOKENS}
max_running_samples = {setting.samples_per_step}

[learner]
num_stages = 1
num_steps = {setting.num_steps}
groups_per_step = {setting.groups_per_step}
token_budget = 1024
learning_rate = 1e-8
checkpoint_every = 1000

[tracking]
to = []

[run]
seed = {SEED}
"""
