"""Create the folder `sums_model`: a small Llama, trained on sums and stopped early.

The demo's model learned the right rule first and careless answers later. This model is half trained: about half of its
greedy answers are right, its errors are diverse, and its samples are right less often. Reinforcement learning must
improve the answers themselves, which exposes a learner that is unstable at high lag. The questions are reasoning-gym's
`basic_arithmetic` with one operator, written as `42+25=`.

Training excludes the held-out eighth, as split by `leeway.actors.tasks.prompts.held_out`.
Run the script once before `leeway train examples/sums.toml`. The script takes about a minute on one core.

    python examples/sums_model.py [FOLDER]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch
from demo_model.make_checkpoint import (
    IGNORED,
    PAD,
    encode_demonstration,
    imitate,
    make_model,
    make_tokenizer,
)
from torch import Tensor
from transformers import LlamaForCausalLM

from leeway.actors.tasks.prompts import held_out

LARGEST = 100
NUM_LAYERS = 4
SEED = 0
BATCH_SIZE = 128
WARMUP_STEPS = 50
LEARNING_RATE = 1e-3
STOP_AT = 0.5
"""Fraction of training questions with a right greedy answer at which training stops."""
CHECK_EVERY_STEPS = 10
NUM_CHECKED = 1024
MOST_STEPS = 2_000


def training_expressions() -> list[str]:
    """Return the expressions of the training split, such as `42+25`, in a fixed order."""
    sums = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    return [f"{a}+{b}" for a, b in sums if not held_out(f"Calculate {a} + {b}.")]


def encode(expressions: list[str]) -> tuple[Tensor, Tensor]:
    """Return token ids and labels of right answers, each of shape [N, L], padded at the end."""
    rows = [encode_demonstration(expression, careless=False) for expression in expressions]
    width = max(len(tokens) for tokens, _ in rows)
    tokens = [row + [PAD] * (width - len(row)) for row, _ in rows]
    labels = [row + [IGNORED] * (width - len(row)) for _, row in rows]
    return torch.tensor(tokens), torch.tensor(labels)


@torch.no_grad()
def share_right(model: LlamaForCausalLM, expressions: list[str]) -> float:
    """Return the share of expressions whose greedy answer is right.

    A greedy answer is right if every token is the most likely one given the right tokens before it.
    """
    tokens, labels = encode(expressions)
    guesses = model(tokens[:, :-1], use_cache=False).logits.argmax(-1)
    wrong = (guesses != labels[:, 1:]) & (labels[:, 1:] != IGNORED)
    return 1 - float(wrong.any(1).float().mean())


def train(model: LlamaForCausalLM, expressions: list[str]) -> None:
    """Train the model in place, supervised, until it answers `STOP_AT` of the questions right.

    Raises:
        RuntimeError: the model does not reach this fraction within MOST_STEPS.
    """
    rng = random.Random(SEED)
    checked = rng.sample(expressions, NUM_CHECKED)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, MOST_STEPS + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(step / WARMUP_STEPS, 1.0)
        tokens, labels = encode(rng.choices(expressions, k=BATCH_SIZE))
        loss = imitate(model, optimizer, tokens, labels)
        if step % CHECK_EVERY_STEPS == 0:
            right = share_right(model, checked)
            print(f"step {step}: loss {loss:.3f}, {right:.0%} right", flush=True)
            if right >= STOP_AT:
                return
    raise RuntimeError(f"the model is not right on {STOP_AT:.0%} after {MOST_STEPS} steps")


def main(folder: Path) -> None:
    """Train the model and write its checkpoint folder."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = make_model(NUM_LAYERS)
    train(model, training_expressions())
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)  # last, so that a folder with weights is complete


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_suffix(""))
