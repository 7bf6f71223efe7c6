"""Evaluate the demo's exported model with plain Transformers, without importing Leeway.

python examples/check_export.py runs/NAME/model

The script creates the held-out problems with reasoning-gym only: the first 1,024 distinct questions whose hash is in
the held-out eighth, written as `42-25=`. The model answers greedily.
"""

from __future__ import annotations

import sys
from hashlib import blake2b
from itertools import count

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_PROBLEMS = 1024
HELD_OUT_SHARE = 0.125


def held_out_problems() -> list[tuple[str, str]]:
    """Return pairs of prompt and answer."""
    size = 1_000_000
    dataset = reasoning_gym.create_dataset(
        "chain_sum", size=size, seed=0, min_terms=2, max_terms=2, min_digits=2, max_digits=2
    )
    seen: set[str] = set()
    problems: list[tuple[str, str]] = []
    for index in count():
        item = dataset[index]
        question = item["question"]
        value = int.from_bytes(blake2b(question.encode(), digest_size=8).digest(), "big")
        if question not in seen and value / 2**64 < HELD_OUT_SHARE:
            problems.append(("".join(item["metadata"]["expression"].split()) + "=", item["answer"]))
        seen.add(question)
        if len(problems) == NUM_PROBLEMS:
            break
    return problems


def main(folder: str) -> None:
    """Print the greedy accuracy."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    problems = held_out_problems()
    prompts = tokenizer([prompt for prompt, _ in problems], return_tensors="pt")  # all prompts have the same length
    with torch.no_grad():
        output = model.generate(**prompts, max_new_tokens=8, do_sample=False)
    answers = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    correct = sum(given.strip() == answer for given, (_, answer) in zip(answers, problems, strict=True))
    print(f"greedy accuracy {correct / len(problems):.3f} over {len(problems)} held-out problems")


if __name__ == "__main__":
    main(sys.argv[1])
