"""Lengths of completions of SmolLM2-135M on four tasks of reasoning-gym; half of the prompts are seen once."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.lengths_parts.made_up import LONG, recall
from benchmarks.lib.machine import smollm2

from leeway.actors.config import ActorsConfig
from leeway.actors.engine import Engine
from leeway.actors.tasks.chat import PromptCodec
from leeway.actors.tasks.task import Problem
from leeway.common.serving_model import prepare_serving_model
from leeway.common.staleness import PolicyVersion
from leeway.planning.lengths import LengthModel
from leeway.planning.ranking import Features, fit_prior

TASKS = ("chain_sum", "spell_backward", "letter_counting", "word_sorting")
K, LONGEST, MOST_PROMPT = 8, 128, 320
SEED = 11

Figures = dict[str, Any]


def problems_of(num_prompts: int, model: Path) -> list[Problem]:
    """Return chat-encoded prompts of the tasks in turn. The column `task` is not numeric, so it is not a feature."""
    import reasoning_gym

    codec = PromptCodec(model, chat=True, system_prompt=None)
    data = [reasoning_gym.create_dataset(name, size=num_prompts // len(TASKS), seed=SEED) for name in TASKS]
    found = []
    for item in range(num_prompts // len(TASKS)):
        for name, items in zip(TASKS, data, strict=True):
            text = items[item]["question"]
            found.append(Problem(text, text, {"task": name}, token_ids=codec.encode([text])[0][:MOST_PROMPT]))
    return found


async def generated(problems: list[Problem], folder: Path, model: Path) -> npt.NDArray[np.int64]:
    """Generate completions of at most LONGEST tokens; return their lengths in tokens, [prompts, K]."""
    config = ActorsConfig(
        group_size=K, max_new_tokens=LONGEST, max_prompt_tokens=MOST_PROMPT, max_running_samples=64, dtype="bfloat16",
        kv_cache_gib=1.0, cpus=2,
    )  # fmt: skip
    served = prepare_serving_model(model, folder)
    engine = await Engine.start(served, config, version=PolicyVersion(0, 0), seed=SEED)
    slots, done = asyncio.Semaphore(config.max_running_samples), 0

    async def one(problem: Problem, seed: int) -> int:
        nonlocal done
        async with slots:
            made = await engine.generate(problem.token_ids, seed=seed)
        done += 1
        if done % 500 == 0:
            print(f"{done} of {K * len(problems)} completions", file=sys.stderr, flush=True)
        return len(made.token_ids)

    try:
        lengths = await asyncio.gather(
            *[one(problem, K * i + sample) for i, problem in enumerate(problems) for sample in range(K)]
        )
    finally:
        await engine.stop()
    return np.array(lengths).reshape(len(problems), K)


def smollm2_tasks(num_prompts: int, folder: Path) -> Figures:
    """Measure recall of the longest fifth of unseen prompts, by their tokens, by their length and by their task."""
    model_folder = smollm2()
    problems = problems_of(num_prompts, model_folder)
    groups = asyncio.run(generated(problems, folder, model_folder))
    model, half = LengthModel(num_prompts), num_prompts // 2
    order = np.random.default_rng(SEED).permutation(num_prompts)
    seen, new = np.sort(order[:half]), np.sort(order[half:])
    for prompt in seen.tolist():
        lengths = groups[prompt].tolist()
        model.update(prompt, lengths, [length >= LONGEST for length in lengths], 0)
    known, means, variances = model.recent()
    expected = fit_prior(Features(problems), known, means.astype(np.float64), variances.astype(np.float64))
    if expected is not None:
        model.set_prior(0, *expected)
    predicted = model.longest_of(new, K, 0)
    of_task = defaultdict(list)
    for prompt in seen.tolist():
        of_task[problems[prompt].columns["task"]].append(groups[prompt].mean())
    chance = np.random.default_rng(SEED).random(num_prompts) * 1e-6
    by_task = np.array([np.mean(of_task[problem.columns["task"]]) for problem in problems]) + chance
    by_length = np.array([len(problem.token_ids) for problem in problems], np.float64) + chance
    totals, longest = groups.sum(axis=1).astype(np.float64) + chance, groups.max(axis=1)
    shorter = predicted < LONGEST  # truncation hides whether a longer prediction was right
    return {
        "num_prompts": num_prompts,
        "mean_tokens": float(groups.mean()),
        "cut": float((groups >= LONGEST).mean()),
        "smollm2_recall": recall(predicted + chance[new], totals[new]),
        "recall_by_task": recall(by_task[new], totals[new]),
        "recall_by_prompt_length": recall(by_length[new], totals[new]),
        "num_shorter": int(shorter.sum()),
        "smollm2_covered": float(np.mean(longest[new][shorter] <= predicted[shorter])) if shorter.any() else None,
        "by_chance": LONG,
    }
