"""Measure the speedup of asynchronous over synchronous training in samples per second. Prints one JSON line last.

    python benchmarks/overlap.py [--quick] [--rounds 3] [--steps 40] [--groups N] [--keep FOLDER] [--page [FILE]]

The benchmark runs `leeway train` with `weight_sync.max_lag = 0`, and then with the default, on the same machine. The
only actor has its own core, and all other processes share a second core. Both runs train on the same number of samples
with the same seed. Completions end at random with a long tail of lengths (`overlap_parts/long_tail.py`). Rates are
measured from the end of the warm-up to the last step, so start-up does not count. `--groups` sets the number of prompts
per step. This number sets `r` in the JSON line, the ratio of training time to generation time, which should be about 1.

`--quick` is for development: it runs one short round, whose figures are meaningless. `--page` writes
docs/results/overlap.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.machine import RESULTS, describe_machine
from benchmarks.lib.page import origin, parsed, share, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import means
from benchmarks.lib.runs import FinishedRun, Row, Samples, train
from benchmarks.overlap_parts.long_tail import GROUP_SIZE, MAX_NEW_TOKENS, MEDIAN_LENGTH, SIGMA, Setting, write_setting

from leeway.launch.observe.status import StatusError, read_status
from leeway.launch.observe.totals import Interval

PAGE = RESULTS / "overlap.md"
SIDES = {"sync": ("--weight_sync.max_lag", "0"), "async": ()}
"""Name of the run in a round -> its overrides."""
GROUPS_PER_STEP = 12
NUM_WARMUP = 5
BAR = 1.6
EQUAL = (0.8, 1.25)
"""Range of r that counts as about 1."""

Figures = dict[str, Any]


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="number of pairs of synchronous and asynchronous runs")
    parser.add_argument("--steps", type=int, default=40, help="number of counted steps of each run")
    parser.add_argument("--groups", type=int, default=GROUPS_PER_STEP, help="number of prompts per step")
    parser.add_argument("--keep", type=Path, help="keep the run folders in this folder (default: remove them)")
    args = parsed(parser, PAGE)
    end_at_sigterm()
    num_rounds, num_steps = (1, 8) if args.quick else (args.rounds, args.steps)
    setting = Setting(num_steps + NUM_WARMUP, NUM_WARMUP, args.groups)
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-overlap-") as fresh:
        folder = (args.keep or Path(fresh)).resolve()
        try:
            rounds = [measure_round(folder, number, setting) for number in range(num_rounds)]
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/overlap.py: {error}")
    result = {"quick": args.quick, "groups_per_step": args.groups, **compared(rounds), "machine": machine}
    result["wanted"] = judged(result)
    if args.page:
        write_page(args.page, page(result, setting))
    print(json.dumps(result))


def measure_round(folder: Path, number: int, setting: Setting) -> tuple[Figures, Figures]:
    """Run once synchronously and once asynchronously.

    Raises:
        MeasurementFailed: a run failed.
    """
    config = write_setting(folder / "setting", setting)
    found = []
    for name, overrides in SIDES.items():
        run = train_on_cores(config, folder / f"{name}-{number}.log", overrides)
        found.append(figures_of(run, setting.num_warmup))
        shown = {key: round(value, 3) for key, value in found[-1].items()}
        print(f"round {number + 1}, {name}: {json.dumps(shown)}", file=sys.stderr, flush=True)
    return found[0], found[1]


def judged(result: Figures) -> Figures:
    """Compare the ratio with its target. `met` is None if the run is not at full size or r is not about 1."""
    is_equal = EQUAL[0] <= result["r"] <= EQUAL[1]
    met = None if result["quick"] or not is_equal else bool(result["async_over_sync"] >= BAR)
    return {"async_over_sync": {"at least": BAR, "where": "r is about 1", "met": met}}


# --- the actor on one core, all other processes of a run on another -------------------------------


@dataclass
class Cores:
    """Assignment of the processes of a run to two cores.

    All processes start on the second core, which they inherit from the command. `look` moves each new actor, its
    engine, and all threads of both to the first core.
    """

    actors: int
    others: int
    only: str = ""
    """Name of the only actor to move; "" moves all actors."""
    moved: set[int] = field(default_factory=set)
    """Process ids of moved actors and engines."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Prefix of a command that starts the command on the second core."""
        return "taskset", "--cpu-list", str(self.others)

    def look(self, folder: Path) -> None:
        """Move the actors listed in a run's status.json, and their engines."""
        try:
            snapshot = read_status(folder / "status.json")
        except StatusError:
            return  # the run is still starting
        for process in snapshot.actors:
            if process.pid and self.only in ("", process.name):
                self._move(process.pid)

    def check(self) -> None:
        """Check that an actor was moved with its engine.

        Raises:
            MeasurementFailed: actor and engine were not both moved, so the figures are invalid.
        """
        if len(self.moved) < 2:
            raise MeasurementFailed(
                f"{len(self.moved)} processes of the actor were found, expected 2 (actor and engine), so the actor did "
                "not have its own core"
            )

    def _move(self, pid: int) -> None:
        try:
            parent = psutil.Process(pid)
            family = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            if _move_threads(process.pid, self.actors):
                self.moved.add(process.pid)


def two_cores() -> Cores:
    """Return the two lowest-numbered cores that this process may use.

    Raises:
        MeasurementFailed: this process may use only one core.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise MeasurementFailed(f"needs two cores, but this process may use {len(usable)}: check `taskset -p $$`")
    return Cores(actors=usable[0], others=usable[1])


def train_on_cores(
    config: Path, log: Path, overrides: Sequence[str], *, only: str = "", module: str = "leeway.launch.cli"
) -> FinishedRun:
    """Train with the actors on their own core, in a run folder next to the log.

    Args:
        config: TOML file.
        log: file for the output of the run.
        overrides: arguments of `leeway train`.
        only: name of the only actor to move; "" moves all actors.
        module: module whose command line is run.

    Raises:
        MeasurementFailed: the run failed, or there is only one core.
    """
    cores = replace(two_cores(), only=only)
    folder = log.with_suffix("")
    run = train(config, folder, overrides, log=log, prefix=cores.prefix, look=cores.look, module=module)
    cores.check()
    return run


def _move_threads(pid: int, core: int) -> bool:
    """Move every thread of a process; new threads inherit the core of the thread that creates them."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return False
    for thread in threads:
        try:
            if os.sched_getaffinity(thread) != {core}:
                os.sched_setaffinity(thread, {core})
        except ProcessLookupError:
            continue  # the thread has ended
    return True


# --- figures of runs (times in seconds, lengths in completion tokens) -----------------------------


class Batches(NamedTuple):
    """Statistics of the samples of a step, averaged over steps."""

    longest_over_mean: float
    """U, the longest completion length over the mean completion length."""
    generation_s: float
    """Seconds from the start of the first sample of a step to the end of its last sample."""


def batches(samples: Samples, steps: Sequence[int]) -> Batches:
    """Return the statistics of some steps.

    Args:
        samples: samples used for training.
        steps: steps that count.
    """
    ratios, spans = [], []
    for step in steps:
        mine = samples.step == step
        lengths = samples.length[mine]
        ratios.append(float(lengths.max() / lengths.mean()))
        spans.append(float(samples.finished_s[mine].max() - samples.started_s[mine].min()))
    return Batches(fmean(ratios), fmean(spans))


def running(samples: Samples, window: Interval) -> float:
    """Return the mean number of `samples` that are being generated at a time within a window."""
    inside = np.minimum(samples.finished_s, window[1]) - np.maximum(samples.started_s, window[0])
    return float(inside.clip(min=0).sum() / (window[1] - window[0]))


def figures_of(run: FinishedRun, num_warmup: int) -> Figures:
    """Return the figures of one run.

    Args:
        run: finished run.
        num_warmup: steps at the beginning that do not count.

    Returns:
        `samples_per_s` is the number of samples used for training per second of wall time, from the end of the warm-up
        to the last step. `learner_idle_frac` is the fraction of this time in which the learner waits for a batch.
        `actor_idle_frac` is the fraction in which the actor has no training request running, and `running` is the mean
        number of running requests. `step_s`, `wait_s` and `generation_s` are the seconds of training, waiting and
        generation per step. `dropped_stale` is a fraction of the committed samples. `U` and `lag_mean` are means over
        steps.

    Raises:
        MeasurementFailed: the run is too short.
    """
    rows = run.updates
    if len(rows) < num_warmup + 2:
        raise MeasurementFailed(
            f"{run.folder.name} has {len(rows)} steps including {num_warmup} of warm-up: take more steps"
        )
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
    """Return the figures of the JSON line.

    Args:
        rounds: figures of the synchronous and of the asynchronous run of each round.

    Returns:
        `async_over_sync` is the median of `async_over_sync_rounds`, the ratios of the rounds. Their `spread` is the
        maximum over the minimum, minus 1. `U` and `r` are those of the synchronous runs; r is the time to train a step
        over the time to generate a step. `limit` and `ceiling` are results of the functions with these names. Idle
        fractions, `sync` and `async` are means over rounds.
    """
    ratios = [other["samples_per_s"] / sync["samples_per_s"] for sync, other in rounds]
    sync: Figures = means([pair[0] for pair in rounds])
    other: Figures = means([pair[1] for pair in rounds])
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
    """Return (U + r) / (1 + r): the speedup of never waiting over waiting for the longest sample of a step."""
    return (longest_over_mean + r) / (1 + r)


def ceiling(longest_over_mean: float, r: float) -> float:
    """Return the maximum speedup with one core for generation and one for training.

    With the generation time of a step as the unit, a synchronous step takes 1 + r. An asynchronous step takes as long
    as the slower core. Training takes r. Generation takes at least 1 / U, if the engine is always full and the duration
    of an engine step does not depend on the load.
    """
    return (1 + r) / max(r, 1 / longest_over_mean)


def _mean(rows: Sequence[Row], key: str) -> float:
    return fmean(row[key] or 0.0 for row in rows)


# --- the page ------------------------------------------------------------------------------------


READING = (
    "U is the longest over the mean completion length of a step's batch, averaged over steps. r is the time to train a "
    "step over the time to generate a step. U and r are measured in the synchronous runs. The limit assumes that any "
    "machine can do any work. The limit compares a system that is never idle with a system whose machines all generate "
    "until the longest completion is finished, and then all train. On this machine, each core has its own work. A "
    "synchronous step takes 1 + r times its generation time. An asynchronous step takes as long as the busier core, "
    "which is the training core if r is above 1 / U. The maximum speedup is therefore (1 + r) / max(r, 1 / U), which "
    "is 2 at r = 1.\n\n"
    "A measured ratio can exceed this maximum, because asynchronous training hides two waits of a synchronous learner. "
    "The first wait is from the publication of weights to the first request with these weights; the second is from the "
    "last sample to the batch. In the table, these waits are waiting minus generation. A measured ratio can be below "
    "the maximum for two reasons. The learner shares its core with the buffer service and the command, which in a "
    "synchronous run work while the learner waits. An engine step takes longer with more samples, so a full engine "
    "gains less than U. `learner idle` is the cost of admission and of the transfer of a batch. An actor is idle while "
    "it has no request running. In an asynchronous run, actors are idle while admission is closed, because the "
    "staleness bound permits no more generation."
)


def page(result: Figures, setting: Setting) -> list[str]:
    """Return the paragraphs of the page."""
    return ["# Speedup of asynchronous training", _head(result, setting), _ratio(result), _table(result), READING]


def _head(result: Figures, setting: Setting) -> str:
    num_rounds = len(result["async_over_sync_rounds"])
    command = (
        f"python benchmarks/overlap.py --rounds {num_rounds} --steps {setting.num_steps - setting.num_warmup} "
        f"--groups {setting.groups_per_step} --page"
    )
    return (
        f"{origin(command, result['machine'], result['machine']['commit'])} The benchmark runs `leeway train` with "
        "`weight_sync.max_lag = 0`, which is synchronous training, and then with the asynchronous default. One actor "
        "has its own core; the learner (one stage), the buffer service, Ray and the command share a second core. "
        f"A step trains {setting.groups_per_step} prompts of {GROUP_SIZE} samples, and the actor of both runs keeps "
        "this number of samples in flight. The model is a Llama of 1.7 million parameters whose completions end at "
        f"random. The mean lengths of its 16 classes of prompts are log-normal (median {MEDIAN_LENGTH:g} tokens, sigma "
        f"{SIGMA:g}). The length around each mean is geometric, and the maximum is {MAX_NEW_TOKENS} tokens. Each run "
        f"has {setting.num_warmup} warm-up steps and {setting.num_steps - setting.num_warmup} counted steps; start-up "
        f"and evaluations do not count. Rounds: {num_rounds}."
    )


def _ratio(result: Figures) -> str:
    rounds = ", ".join(f"{ratio:.2f}" for ratio in result["async_over_sync_rounds"])
    met = {True: "met", False: "**missed**", None: "not judged, because r is not about 1"}
    return (
        f"`async_over_sync` **{result['async_over_sync']:.2f}** (rounds: {rounds}; maximum over minimum "
        f"{1 + result['spread']:.3f}), target: at least {BAR:g} if generation and training take equal time: "
        f"{met[result['wanted']['async_over_sync']['met']]}. U {result['U']:.2f}, r {result['r']:.2f}: the limit "
        f"(U + r) / (1 + r) is {result['limit']:.2f}, and the maximum with one core for generation and one for "
        f"training is {result['ceiling']:.2f}."
    )


def _table(result: Figures) -> str:
    sides = (result["sync"], result["async"])
    lines = [
        ("samples trained per second", "samples_per_s", "{:.1f}"),
        ("completion tokens trained per second", "tokens_per_s", "{:.0f}"),
        ("training of a step, s", "step_s", "{:.2f}"),
        ("waiting for the batch of a step, s", "wait_s", "{:.2f}"),
        ("generation of a step, first start to last end, s", "generation_s", "{:.2f}"),
        ("trained samples in flight, mean over time", "running", "{:.1f}"),
        ("longest over mean completion of a step (U)", "U", "{:.2f}"),
        ("lag, mean", "lag_mean", "{:.2f}"),
        ("lag, maximum", "lag_max", "{:.0f}"),
    ]
    rows = [[name, *(form.format(side[key]) for side in sides)] for name, key, form in lines]
    for name, key in (
        ("learner idle", "learner_idle_frac"),
        ("actor idle", "actor_idle_frac"),
        ("samples dropped as stale", "dropped_stale"),
    ):
        rows.append([name, *(share(side[key]) for side in sides)])
    return table(["mean of the rounds", "max_lag = 0", "asynchronous"], rows)


if __name__ == "__main__":
    main()
