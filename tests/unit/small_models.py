"""Helpers for tests of the learner's stages: small models of every family, and a packed batch."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from leeway.learner.model import DeviceBatch, StageModule, load_stage
from leeway.learner.packing import PackedBatch, PackingRule, pack

CPU = torch.device("cpu")
TEMPERATURE = 0.7
VOCABULARY = 48
LENGTHS, PROMPTS = [5, 17, 3, 20, 9, 30, 2], [2, 5, 1, 9, 3, 1, 1]
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Model:
    """Model that the tests split into stages."""

    family: str
    tied: bool
    changes: dict[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.family}-{'tied' if self.tied else 'untied'}" + "".join(f"-{key}" for key in self.changes)

    def save(self, folder: Path, **changes: object) -> Path:
        """Save the model with noise on all weights: norm weights of 1 and biases of 0 would hide errors."""
        config = transformers.CONFIG_MAPPING[self.family](
            **{**TINY, "tie_word_embeddings": self.tied, **self.changes, **changes}
        )
        torch.manual_seed(0)
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        whole.save_pretrained(folder)
        return folder


LOCAL = {"sliding_window": 6}


def sequences(lengths=LENGTHS, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length) for length in lengths]


def packed_batch(budget=40, **rule) -> PackedBatch:
    return pack(sequences(), PROMPTS, PackingRule(budget, **rule))


def load(folder, index=0, total=1, **changes):
    options = {"temperature": TEMPERATURE, "device": CPU, "dtype": torch.float64, **changes}
    return load_stage(folder, index, total, **options)


def run(stages: list[StageModule], packed: PackedBatch) -> torch.Tensor:
    """Return the output of the last stage for all micro-batches."""
    batch = DeviceBatch(packed, CPU)
    outputs = []
    for stage in stages:
        stage.batch = batch
    for m in range(packed.num_micro_batches):
        states = batch.tokens_ML[m : m + 1]
        for stage in stages:
            states = stage(states, torch.tensor([m]))
            assert states.shape[1] == packed.width
        outputs.append(states)
    for stage in stages:
        stage.batch = None
    return torch.cat(outputs)


def config_of(family="llama", **changes):
    return transformers.CONFIG_MAPPING[family](**{**TINY, **changes})


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    """Check that no entry differs by more than 1e-12 * max(1, largest expected entry)."""
    assert float((found - expected).detach().abs().max()) <= 1e-12 * max(1.0, float(expected.detach().abs().max())), (
        name
    )


def tiny_checkpoint(folder: Path, *, tied: bool) -> LlamaForCausalLM:
    """Save a minimal model in a folder and return it."""
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
