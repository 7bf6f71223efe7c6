"""What asynchrony buys: samples trained per second, asynchronous over synchronous. Prints one JSON line last.

    python benchmarks/overlap.py [--quick] [--rounds 3] [--steps 40] [--groups N] [--keep FOLDER] [--page [FILE]]

Real runs of `leeway train`, one after the other on the same machine: `weight_sync.max_lag = 0`, then the default. The
only actor has a core of its own, everything else shares another, and both runs train the same number of samples with
the same seed. Completions end at random with a long tail of lengths (`overlap_parts/long_tail.py`). Rates are taken
from the last step of a warm-up to the last step of all, so that start-up does not count. `--groups` says how many
prompts a step has, and so how long training takes beside generation: `r` of the JSON line should be about 1.

`--quick` is for development: one short round, and its figures mean nothing. `--page` writes docs/results/overlap.md.
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
from launch.observe.status import StatusError, read_status
from launch.observe.totals import Interval

PAGE = RESULTS / "overlap.md"
SIDES = {"sync": ("--weight_sync.max_lag", "0"), "async": ()}
"""Name -> what is other than the default."""
GROUPS_PER_STEP = 12
NUM_WARMUP = 5
BAR = 1.6
EQUAL = (0.8, 1.25)
"""Between these r counts as about 1."""

Figures = dict[str, Any]


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, for development")
    parser.add_argument("--rounds", type=int, default=3, help="of a synchronous and an asynchronous run")
    parser.add_argument("--steps", type=int, default=40, help="of each run that count")
    parser.add_argument("--groups", type=int, default=GROUPS_PER_STEP, help="prompts of a step")
    parser.add_argument("--keep", type=Path, help="keeps the folders of the runs (default: keeps none)")
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
    """One run of each side.

    Raises:
        MeasurementFailed: one did not end well.
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
    """The wanted bar and whether it is met; None where it was not measured at full size, or r is not about 1."""
    is_equal = EQUAL[0] <= result["r"] <= EQUAL[1]
    met = None if result["quick"] or not is_equal else bool(result["async_over_sync"] >= BAR)
    return {"async_over_sync": {"at least": BAR, "where": "r is about 1", "met": met}}


# --- the actor on one core, everything else of a run on another ----------------------------------


@dataclass
class Cores:
    """Two cores, and who is where.

    Everything starts on the second core, because it inherits that from the command; `look` moves each actor, with its
    engine and all of their threads, as soon as it is seen.
    """

    actors: int
    others: int
    only: str = ""
    """The actor that is moved, by its name; empty: all of them."""
    moved: set[int] = field(default_factory=set)
    """Process ids of actors and their engines."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that puts whatever follows on the second core."""
        return "taskset", "--cpu-list", str(self.others)

    def look(self, folder: Path) -> None:
        """Move the actors that a run's status.json names, and their engines."""
        try:
            snapshot = read_status(folder / "status.json")
        except StatusError:
            return  # it is still being started
        for process in snapshot.actors:
            if process.pid and self.only in ("", process.name):
                self._move(process.pid)

    def check(self) -> None:
        """Was every actor moved, with its engine?

        Raises:
            MeasurementFailed: no; the figures would mean something else.
        """
        if len(self.moved) < 2:
            raise MeasurementFailed(
                f"{len(self.moved)} processes of the actor were seen, not two (itself and its engine), so it was not "
                "put on a core of its own"
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
    """The first two that this process may use.

    Raises:
        MeasurementFailed: there is only one.
    """
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        raise MeasurementFailed(f"two cores are needed, and this process may use {len(mine)}; see `taskset -p $$`")
    return Cores(actors=mine[0], others=mine[1])


def train_on_cores(
    config: Path, log: Path, overrides: Sequence[str], *, only: str = "", module: str = "launch.cli"
) -> FinishedRun:
    """A run whose actors have a core to themselves; its folder lies beside its log.

    Args:
        config: TOML file.
        log: what it prints goes there.
        overrides: arguments of `leeway train`.
        only: the one actor that is moved, by its name; empty: all of them.
        module: whose command it is.

    Raises:
        MeasurementFailed: it did not end well, or there are no two cores.
    """
    cores = replace(two_cores(), only=only)
    folder = log.with_suffix("")
    run = train(config, folder, overrides, log=log, prefix=cores.prefix, look=cores.look, module=module)
    cores.check()
    return run


def _move_threads(pid: int, core: int) -> bool:
    """Every thread of a process; a new one inherits the core of the thread that makes it."""
    try:
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return False
    for thread in threads:
        try:
            if os.sched_getaffinity(thread) != {core}:
                os.sched_setaffinity(thread, {core})
        except ProcessLookupError:
            continue  # it has ended
    return True


# --- what is computed from the runs; times in seconds, lengths in completion tokens --------------


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


# --- the page ------------------------------------------------------------------------------------


READING = (
    "U is the longest over the mean completion length of a step's batch, mean over steps; r the time to train a step "
    "over the time to generate it, both of the synchronous runs. The limit counts work that any machine may do: it "
    "compares a system whose machines all generate until the longest answer is there, and then all train, with one "
    "that is never idle. Here each core has its own work. A synchronous step takes 1 + r times its generation; an "
    "asynchronous one as long as the busier core needs, which is training where r is above 1 / U: hence "
    "(1 + r) / max(r, 1 / U), and 2 at r = 1.\n\n"
    "What can lift a ratio above that: a synchronous learner also waits for all that lies between, from publishing its "
    "weights to the first request under them and from the last sample to the batch (in the table: waiting less "
    "generation), and asynchrony hides it. What keeps it below: the learner shares its core with the buffer service "
    "and the command, which in a synchronous run work while it waits; an engine step takes longer with more in it, so "
    "a full engine gains less than U. `learner idle` is what admission and the way of a batch cost. An actor is idle "
    "while it has no request running; asynchronous, that is where admission is closed, as the bound allows no more "
    "to be generated."
)


def page(result: Figures, setting: Setting) -> list[str]:
    """The paragraphs of the page."""
    return ["# What asynchrony buys, measured", _head(result, setting), _ratio(result), _table(result), READING]


def _head(result: Figures, setting: Setting) -> str:
    num_rounds = len(result["async_over_sync_rounds"])
    command = (
        f"python benchmarks/overlap.py --rounds {num_rounds} --steps {setting.num_steps - setting.num_warmup} "
        f"--groups {setting.groups_per_step} --page"
    )
    return (
        f"{origin(command, result['machine'], result['machine']['commit'])} Real runs of "
        "`leeway train`, one after the other: `weight_sync.max_lag = 0`, which is synchronous training, then the "
        "default, asynchronous setting. One actor has a core of its own; the learner (one stage), the buffer service, "
        "Ray and the command share the other. "
        f"A step trains {setting.groups_per_step} prompts of {GROUP_SIZE} samples; the actor keeps as many in flight "
        "on both sides. The model is a Llama of 1.7 million parameters whose completions end at random: the mean "
        f"lengths of its 16 kinds of prompts are log-normal (median {MEDIAN_LENGTH:g} tokens, sigma {SIGMA:g}), the "
        f"length around each is geometric, and {MAX_NEW_TOKENS} tokens are the longest. Each run has "
        f"{setting.num_warmup} steps to warm up and {setting.num_steps - setting.num_warmup} that count; start-up and "
        f"evaluations are left out. Rounds: {num_rounds}."
    )


def _ratio(result: Figures) -> str:
    rounds = ", ".join(f"{ratio:.2f}" for ratio in result["async_over_sync_rounds"])
    met = {True: "met", False: "**missed**", None: "not judged, for r is not about 1"}
    return (
        f"`async_over_sync` **{result['async_over_sync']:.2f}** (rounds: {rounds}; greatest over smallest "
        f"{1 + result['spread']:.3f}), wanted: at least {BAR:g} where generation and training take equal time: "
        f"{met[result['wanted']['async_over_sync']['met']]}. U {result['U']:.2f}, r {result['r']:.2f}: the limit "
        f"(U + r) / (1 + r) is {result['limit']:.2f}, and what a core each for generation and training allow is "
        f"{result['ceiling']:.2f}."
    )


def _table(result: Figures) -> str:
    sides = (result["sync"], result["async"])
    lines = [
        ("samples trained per second", "samples_per_s", "{:.1f}"),
        ("completion tokens trained per second", "tokens_per_s", "{:.0f}"),
        ("seconds to train a step", "step_s", "{:.2f}"),
        ("seconds that it waits for its batch", "wait_s", "{:.2f}"),
        ("from the first to the last of its samples, seconds", "generation_s", "{:.2f}"),
        ("trained samples in flight, mean over time", "running", "{:.1f}"),
        ("longest over mean completion of a step (U)", "U", "{:.2f}"),
        ("lag, mean", "lag_mean", "{:.2f}"),
        ("lag, greatest", "lag_max", "{:.0f}"),
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
