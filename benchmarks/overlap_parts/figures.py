"""What is computed from the runs. Times are in seconds, lengths in completion tokens."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.runs import FinishedRun, MeasurementFailed, Row, Samples
from launch.observe.totals import Interval

Figures = dict[str, Any]


class Batches(NamedTuple):
    """The samples of a step, mean over steps."""

    longest_over_mean: float
    """U: completion lengths."""
    generation_s: float
    """From the first of its samples that started to the last that was finished."""


def batches(samples: Samples, steps: Sequence[int]) -> Batches:
    """What was generated for these steps.

    Args:
        samples: trained.
        steps: that count.
    """
    ratios, spans = [], []
    for step in steps:
        mine = samples.step == step
        lengths = samples.length[mine]
        ratios.append(float(lengths.max() / lengths.mean()))
        spans.append(float(samples.finished_s[mine].max() - samples.started_s[mine].min()))
    return Batches(fmean(ratios), fmean(spans))


def running(samples: Samples, window: Interval) -> float:
    """How many of these samples were being generated, mean over a window of time."""
    inside = np.minimum(samples.finished_s, window[1]) - np.maximum(samples.started_s, window[0])
    return float(inside.clip(min=0).sum() / (window[1] - window[0]))


def figures_of(run: FinishedRun, num_warmup: int) -> Figures:
    """Of one run.

    Args:
        run: ended well.
        num_warmup: steps at the beginning that do not count.

    Returns:
        `samples_per_s`: trained, over the wall time from the last step of the warm-up to the last step of all.
        `learner_idle_frac`: share of it that the learner waited for a batch; `actor_idle_frac`: that the actor had no
        training request running; `running`: how many it had, mean over time; `step_s`, `wait_s`, `generation_s`: per
        step, training, waiting and generation; `U`; `lag_mean`; `dropped_stale`: share of the committed samples.

    Raises:
        MeasurementFailed: it is too short.
    """
    rows = run.updates
    if len(rows) < num_warmup + 2:
        raise MeasurementFailed(f"{run.folder.name} has {len(rows)} steps, of which {num_warmup} warm up: too few")
    counted = rows[num_warmup:]
    window = float(rows[num_warmup - 1]["finished_s"]), float(counted[-1]["finished_s"])
    seconds = window[1] - window[0]
    samples = run.samples()
    found = batches(samples, [int(row["step"]) for row in counted])
    busy_s = sum(actor.busy_s for actor in run.generated(window).values())
    ledger = run.summary["ledger"]
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in counted) / seconds,
        "tokens_per_s": sum(row["batch/completion_tokens"] for row in counted) / seconds,
        "learner_idle_frac": _mean(counted, "time/wait_for_batch") * len(counted) / seconds,
        "actor_idle_frac": 1 - busy_s / seconds,
        "running": running(samples, window),
        "step_s": _mean(counted, "time/step"),
        "wait_s": _mean(counted, "time/wait_for_batch"),
        "generation_s": found.generation_s,
        "U": found.longest_over_mean,
        "lag_mean": _mean(counted, "lag/token_mean"),
        "lag_max": max(row["lag/token_max"] for row in counted),
        "dropped_stale": ledger["dropped_stale"] / ledger["committed"],
        "num_steps": len(counted),
        "seconds": seconds,
    }


def compared(rounds: Sequence[tuple[Figures, Figures]]) -> Figures:
    """The figures of the JSON line.

    Args:
        rounds: of a synchronous run and the asynchronous one after it.

    Returns:
        `async_over_sync`: median of the rounds' ratios, with `async_over_sync_rounds` and their `spread`: greatest
        over smallest, less 1. `U` and `r` of the synchronous runs, r as time to train a step over time to generate
        it; `limit`: (U + r) / (1 + r); `ceiling`: see `ceiling`. Idle shares and `sync`, `async`: means over rounds.
    """
    ratios = [other["samples_per_s"] / sync["samples_per_s"] for sync, other in rounds]
    sync, other = (_means([pair[side] for pair in rounds]) for side in (0, 1))
    longest_over_mean, r = sync["U"], sync["step_s"] / sync["generation_s"]
    return {
        "async_over_sync": median(ratios),
        "async_over_sync_rounds": ratios,
        "spread": max(ratios) / min(ratios) - 1,
        "U": longest_over_mean,
        "r": r,
        "limit": limit(longest_over_mean, r),
        "ceiling": ceiling(longest_over_mean, r),
        "learner_idle_frac": other["learner_idle_frac"],
        "actor_idle_frac": other["actor_idle_frac"],
        "learner_idle_frac_sync": sync["learner_idle_frac"],
        "actor_idle_frac_sync": sync["actor_idle_frac"],
        "sync": sync,
        "async": other,
    }


def limit(longest_over_mean: float, r: float) -> float:
    """(U + r) / (1 + r): work that any machine may do, against waiting for the longest before training."""
    return (longest_over_mean + r) / (1 + r)


def ceiling(longest_over_mean: float, r: float) -> float:
    """What a core for generation and one for training allow, with the generation time of a step as the unit.

    Synchronous, a step takes 1 + r. Asynchronous, it takes what the slower core needs: training r; generation 1 / U at
    best, where the engine is always full and a step of it takes as long whatever is in it.
    """
    return (1 + r) / max(r, 1 / longest_over_mean)


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(row[key] or 0.0 for row in rows)


def _means(found: Sequence[Figures]) -> Figures:
    return {key: float(np.mean([each[key] for each in found])) for key in found[0]}
