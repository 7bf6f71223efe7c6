"""Small partly trained models, each in a folder with its task's rows and a config.

    sorting   five digits, `40315>` -> `01345`: 6 tokens
    adding    two numbers of 2 to 5 digits with the work shown, `58+967=` -> `8+7+0=15,5+6+1=12,0+9+1=10;1025`:
              20 to 52 tokens

The model is a Llama of 0.9 million parameters, trained by next-token prediction until about half of its greedy answers
are correct.

    python benchmarks/lib/small_tasks.py TASK FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo_model.make_checkpoint import EOS, IGNORED, PAD, imitate, make_model, make_tokenizer

VOCABULARY = ("<pad>", "<eos>", "<unk>", *"0123456789>+=,;")
IDS = {token: index for index, token in enumerate(VOCABULARY)}
MAX_TOKENS = 128
STOP_AT = 0.48
"""Greedy accuracy on NUM_CHECKED held-out rows at which supervised training stops."""
NUM_HELDOUT, NUM_TRAIN, NUM_CHECKED = 512, 12_000, 256
MOST_STEPS = 4_000
CHECK_EVERY = 20
BATCH_SIZE = 64


class SmallTask(NamedTuple):
    """A task's questions and answers, and the token limits of its config."""

    question: Callable[[random.Random], str]
    answer: Callable[[str], str]
    max_prompt_tokens: int
    max_new_tokens: int


def _digits(rng: random.Random) -> str:
    return f"{rng.randrange(10**5):05d}>"


def _sorted(question: str) -> str:
    return "".join(sorted(question[:-1]))


def _sum(rng: random.Random) -> str:
    first, second = (rng.randrange(10 ** (size - 1), 10**size) for size in (rng.randint(2, 5), rng.randint(2, 5)))
    return f"{first}+{second}="


def _worked(question: str) -> str:
    """Return the sum worked column by column from the right as a+b+carry=total, then the result."""
    first, second = question[:-1].split("+")
    size, carry, columns = max(len(first), len(second)), 0, []
    for a, b in zip(reversed(first.zfill(size)), reversed(second.zfill(size)), strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}+{carry}={total}")
        carry = total // 10
    return f"{','.join(columns)};{int(first) + int(second)}"


TASKS = {
    "sorting": SmallTask(_digits, _sorted, max_prompt_tokens=8, max_new_tokens=8),
    "adding": SmallTask(_sum, _worked, max_prompt_tokens=16, max_new_tokens=64),
}


def make(name: str, folder: Path) -> Path:
    """Write model, rows and config of a task, unless the config exists; return the path of the config."""
    config = folder / "run.toml"
    if config.exists():
        return config
    task, rng = TASKS[name], random.Random(11)
    torch.manual_seed(11)
    folder.mkdir(parents=True, exist_ok=True)
    questions = list(dict.fromkeys(task.question(rng) for _ in range(2 * (NUM_TRAIN + NUM_HELDOUT))))
    held, train = questions[:NUM_HELDOUT], questions[NUM_HELDOUT : NUM_HELDOUT + NUM_TRAIN]
    for file, rows in (("held.jsonl", held), ("train.jsonl", train)):
        lines = (json.dumps({"question": each, "answer": task.answer(each)}) for each in rows)
        (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    model = make_model(4, len(VOCABULARY), MAX_TOKENS)
    half_teach(model, task, train, held[:NUM_CHECKED], rng)
    make_tokenizer(VOCABULARY, MAX_TOKENS).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    config.write_text(
        '[model]\npath = "model"\n\n[task]\ntype = "file"\npath = "train.jsonl"\nheldout_path = "held.jsonl"\n'
        'template = "{question}"\nrewards = ["exact"]\n\n[algorithm]\ntype = "trajectory_balance"\n\n'
        f"[actors]\nnum_actors = 2\ngroup_size = 8\nmax_prompt_tokens = {task.max_prompt_tokens}\n"
        f"max_new_tokens = {task.max_new_tokens}\n\n"
        "[learner]\nnum_steps = 200\ngroups_per_step = 16\nlearning_rate = 1e-4\n",
        encoding="utf-8",
    )  # the config is written last, so that its existence marks a complete folder
    return config


def half_teach(
    model: LlamaForCausalLM, task: SmallTask, train: list[str], checked: list[str], rng: random.Random
) -> None:
    """Train in place with supervision until the accuracy is STOP_AT; raise RuntimeError after MOST_STEPS."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, MOST_STEPS + 1):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, step / 50)
        imitate(model, optimizer, *encode(task, rng.choices(train, k=BATCH_SIZE)))
        if step % CHECK_EVERY == 0:
            tokens, labels = encode(task, checked)
            with torch.no_grad():
                guesses = model(tokens[:, :-1], use_cache=False).logits.argmax(-1)
            # a greedy answer is correct if each of its tokens is the most likely one after the correct earlier tokens
            right = 1 - float(((guesses != labels[:, 1:]) & (labels[:, 1:] != IGNORED)).any(1).float().mean())
            if right >= STOP_AT:
                print(f"{step} steps, accuracy {right:.3f}", flush=True)
                return
    raise RuntimeError(f"the model's accuracy is below {STOP_AT:.0%} after {MOST_STEPS} steps: raise MOST_STEPS")


def encode(task: SmallTask, questions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, each [rows, length], padded at the end. Labels of question tokens are ignored."""
    rows = []
    for question in questions:
        prompt, completion = ([IDS[each] for each in text] for text in (question, task.answer(question)))
        rows.append(([*prompt, *completion, EOS], [IGNORED] * len(prompt) + [*completion, EOS]))
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([tokens + [PAD] * (width - len(tokens)) for tokens, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])
    return tokens, labels


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
