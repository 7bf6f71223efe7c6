"""Measurements on lengths from known distributions, whose best possible prediction is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from leeway.actors.tasks.task import Problem
from leeway.buffer.tables import Waiting
from leeway.planning.dispatch import ByDeadline, Speeds
from leeway.planning.lengths import LengthModel
from leeway.planning.prompts import WINDOW_STEPS, Window
from leeway.planning.ranking import Features, fit_prior

Floats = npt.NDArray[np.float64]
Figures = dict[str, Any]

K = 8
LEVEL, VARIANCE, EXPLAINED = np.log(400.0), 0.8, 0.65
NUM_PROMPTS, NUM_CLASSES = 4_000, 16
DRAWS = 10
"""Number of groups of every prompt with which predictions are compared."""
LONG = 0.2


def recall(scores: Floats, lengths: Floats) -> float:
    """Return the fraction of the longest fifth of lengths that is in the fifth with the highest scores."""
    many = round(LONG * len(lengths))
    return len({*np.argsort(scores)[-many:].tolist()} & {*np.argsort(lengths)[-many:].tolist()}) / many


class Prompts:
    """Prompts with normally distributed log lengths; each prompt has its own mean."""

    def __init__(self, own: Floats, seed: int) -> None:
        """Initialize prompts with their means, relative to LEVEL."""
        self.own, self._random = own, np.random.default_rng(seed)

    def groups(self) -> npt.NDArray[np.int64]:
        """Draw one group of each prompt: [prompts, K] lengths in tokens."""
        noise = self._random.normal(0.0, np.sqrt(VARIANCE * (1 - EXPLAINED)), (len(self.own), K))
        return np.maximum(1, np.rint(np.exp(LEVEL + self.own[:, None] + noise))).astype(np.int64)

    def recalls(self, *scores: Floats) -> list[float]:
        """Return the recall of each score as a mean over draws. The length of a group is the sum over its samples."""
        totals = [self.groups().sum(axis=1).astype(np.float64) for _ in range(DRAWS)]
        return [float(np.mean([recall(score, total) for total in totals])) for score in scores]

    def covered(self, predicted: Floats) -> float:
        """Return the fraction of groups whose longest sample is at most as long as predicted."""
        return float(np.mean([self.groups().max(axis=1) <= predicted for _ in range(DRAWS)]))


def history() -> Figures:
    """Measure repeated prompts after one and two epochs, compared with the posterior and with Bayes."""
    random = np.random.default_rng(0)
    prompts = Prompts(random.normal(0.0, np.sqrt(VARIANCE * EXPLAINED), NUM_PROMPTS), 1)
    model, seen, found = LengthModel(NUM_PROMPTS), np.zeros(NUM_PROMPTS), {}
    for epoch in (1, 2):
        groups = prompts.groups()
        seen += np.log(groups).mean(axis=1)
        for prompt in random.permutation(NUM_PROMPTS).tolist():
            model.update(prompt, groups[prompt].tolist(), [False] * K, 0)
        predicted = model.longest_of(np.arange(NUM_PROMPTS), K, 0)
        ours, posterior, bayes = prompts.recalls(predicted, seen, prompts.own)
        found[f"epochs_{epoch}"] = {
            "recall": ours,
            "recall_of_posterior": posterior,
            "recall_of_bayes": bayes,
            "covered": prompts.covered(predicted),
        }
    last = found["epochs_2"]
    return {
        **found,
        "recall_over_posterior": last["recall"] / last["recall_of_posterior"],
        "recall_over_bayes_history": last["recall"] / last["recall_of_bayes"],
        "history_covered": last["covered"],
    }


def features() -> Figures:
    """Measure prompts of 16 classes that two tokens encode. Half of the prompts are seen once, the other half never."""
    random = np.random.default_rng(2)
    kinds = random.integers(0, NUM_CLASSES, NUM_PROMPTS)
    of_class = random.normal(0.0, np.sqrt(VARIANCE * EXPLAINED), NUM_CLASSES)
    problems = []
    for kind in kinds.tolist():
        others = random.integers(100, 1000, random.integers(8, 40)).tolist()
        at = int(random.integers(0, len(others)))
        problems.append(Problem("", "", {}, token_ids=[*others[:at], 10 + kind % 4, 20 + kind // 4, *others[at:]]))
    prompts, model, half = Prompts(of_class[kinds], 3), LengthModel(NUM_PROMPTS), NUM_PROMPTS // 2
    for prompt, group in enumerate(prompts.groups()[:half].tolist()):
        model.update(prompt, group, [False] * K, 0)
    known, means, variances = model.recent()
    expected = fit_prior(Features(problems), known, means.astype(np.float64), variances.astype(np.float64))
    assert expected is not None, "the tokens determine the class"
    model.set_prior(0, *expected)
    new = np.arange(half, NUM_PROMPTS)
    unseen = Prompts(prompts.own[new] + 1e-9 * random.standard_normal(half), 4)
    predicted = model.longest_of(new, K, 0)
    ours, bayes = unseen.recalls(predicted, unseen.own)
    return {
        "recall_over_bayes_features": ours / bayes,
        "features_recall": ours,
        "features_recall_of_bayes": bayes,
        "features_covered": unseen.covered(predicted),
    }


def costs() -> Figures:
    """Measure seconds to predict a million prompts from their tokens, and microseconds added to a lease."""
    random, many = np.random.default_rng(5), 1_000_000
    tokens, lengths = random.integers(0, 50_000, (many, 64)), random.integers(32, 65, many).tolist()
    problems = [
        Problem("", "", {}, token_ids=each[:length]) for each, length in zip(tokens.tolist(), lengths, strict=True)
    ]
    all_of_them, known = Features(problems), np.arange(20_000)
    began_s = time.perf_counter()
    fit_prior(
        all_of_them,
        known,
        random.normal(0.0, 0.7, len(known)) + all_of_them.numbers[known, 0],
        np.full(len(known), 0.05),
    )
    expect_s = time.perf_counter() - began_s
    model, groups_per_step = LengthModel(many), 64
    speeds, policy, size = Speeds(0.02, (0.01, 0.02), 10.0), ByDeadline(), WINDOW_STEPS * groups_per_step
    prompts = random.integers(0, many, size)

    def a_window() -> None:
        longest = model.longest_of(prompts, K, 0).tolist()
        window = Window()
        for order, (prompt, most) in enumerate(zip(prompts.tolist(), longest, strict=True)):
            window.put(Waiting(order, prompt, most))
        while len(window):
            window.take(policy.choose(window, speeds))

    return {"million_s": expect_s, "choice_us": _seconds_of(a_window) / size * 1e6}


def _seconds_of(call: Callable[[], None], times: int = 20) -> float:
    call()
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began_s) / times
