"""Measure the effect of config keys in sweeps on the demo, one key at a time. Prints one JSON line last.

    python benchmarks/tuning.py [--quick] [--only KEY ...] [--seeds 0] [--steps 60] [--work FOLDER] [--page [FILE]]

Each run is `leeway train examples/demo.toml`; runs are sequential on one machine. SWEEPS lists the keys and values.
`--work` stores the figures of finished runs; a later call runs only the missing runs. `--quick` is for development: it
runs only the ends of each sweep for a few steps, and its figures are meaningless. `--page` writes
docs/results/tuning.md and its charts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.lib.figure import drawn
from benchmarks.lib.machine import RESULTS, Machine, describe_machine
from benchmarks.lib.page import number, origin, table, write_page
from benchmarks.lib.processes import MeasurementFailed, end_at_sigterm
from benchmarks.lib.rounds import Figures, means
from benchmarks.lib.runs import FinishedRun, KeptResults, Row, by_token, train

PAGE = RESULTS / "tuning.md"
CONFIG = Path("examples/demo.toml")
QUICK_STEPS = 10
ENDS = 0.2
"""Fraction of the steps at each end of a run; the gain compares the mean rewards of these two parts."""
GROUP_SIZE = 8
GROUPS_PER_STEP = 32
SAMPLES_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
"""Group size, groups per step, and samples per step of the demo."""

Overrides = tuple[str, ...]
EVERY_RUN: Overrides = ("--tracking.to", "[]", "--actors.cpus", "0.25")
"""Overrides of every run. With the default CPU reservations, Ray would not place a third actor on two cores."""

Results = Mapping[str, Mapping[int, Figures]]
"""Key of a sweep -> value of the key -> figures."""


@dataclass(frozen=True)
class Sweep:
    """Values of one config key."""

    key: str
    values: tuple[int, ...]
    default: int
    """Value in examples/demo.toml, or the default of the config schema."""

    @property
    def name(self) -> str:
        """Stem of the file names of this sweep."""
        return self.key.rpartition(".")[2]

    def overrides(self, value: int) -> Overrides:
        """Return the arguments of `leeway train` for a value; the default needs no arguments."""
        if value == self.default:
            return ()
        found: Overrides = (f"--{self.key}", str(value))
        if self.key == "actors.group_size":  # keep the number of samples per step
            found += ("--learner.groups_per_step", str(SAMPLES_PER_STEP // value))
        return found


SWEEPS = (
    Sweep("weight_sync.max_lag", (0, 1, 2, 4, 8), default=4),
    Sweep("actors.num_actors", (1, 2, 3), default=1),
    Sweep("actors.group_size", (4, 8, 16), default=GROUP_SIZE),
    Sweep("weight_sync.publish_every", (1, 2, 4), default=1),
)


def runs_of(sweeps: tuple[Sweep, ...]) -> list[Overrides]:
    """Return all distinct runs in order. The run with defaults, which every sweep has, appears once."""
    return list(dict.fromkeys(sweep.overrides(value) for sweep in sweeps for value in sweep.values))


def main() -> None:
    """Run the missing cells, print the result, and write the page and the charts."""
    keys = [sweep.key for sweep in SWEEPS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only ends of sweeps, few steps, for development")
    parser.add_argument("--only", nargs="+", choices=keys, metavar="KEY", help=" ".join(keys))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of the runs")
    parser.add_argument("--steps", type=int, default=60, help="learner.num_steps of every run")
    parser.add_argument("--work", type=Path, help="store results in this folder (default: discard)")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=PAGE, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and (args.quick or args.only):
        parser.error("--page needs all sweeps at full size: omit --quick and --only, or omit --page")
    end_at_sigterm()
    sweeps = tuple(sweep for sweep in SWEEPS if args.only is None or sweep.key in args.only)
    if args.quick:
        sweeps = tuple(Sweep(each.key, (each.values[0], each.values[-1]), each.default) for each in sweeps)
    num_steps = QUICK_STEPS if args.quick else args.steps
    machine = describe_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-tuning-") as fresh:
        kept = KeptResults(args.work or Path(fresh), "runs.json", {"num_steps": num_steps, "commit": machine["commit"]})
        try:
            results = measure(kept, num_steps, sweeps, args.seeds)
        except MeasurementFailed as error:
            sys.exit(f"benchmarks/tuning.py: {error}")
    if args.page:
        seeds = " ".join(map(str, args.seeds))
        command = f"python benchmarks/tuning.py --seeds {seeds} --steps {num_steps} --page"
        write_results(args.page, results, machine, command, args.seeds)
    print(json.dumps({"quick": args.quick, "num_steps": num_steps, "machine": machine, "sweeps": results}))


def measure(kept: KeptResults, num_steps: int, sweeps: tuple[Sweep, ...], seeds: list[int]) -> Results:
    """Return the figures of every value of every sweep, as means over seeds.

    Raises:
        MeasurementFailed: a run failed.
    """
    found: dict[Overrides, Figures] = {}
    runs = runs_of(sweeps)
    for place, overrides in enumerate(runs, 1):
        found[overrides] = over_seeds([one(kept, num_steps, overrides, seed) for seed in seeds])
        shown = {key: round(value, 3) for key, value in found[overrides].items() if value is not None}
        print(f"{place} of {len(runs)}, {' '.join(overrides) or 'the demo'}: {json.dumps(shown)}", file=sys.stderr)
    return {sweep.key: {value: found[sweep.overrides(value)] for value in sweep.values} for sweep in sweeps}


def one(kept: KeptResults, num_steps: int, overrides: Overrides, seed: int) -> Figures:
    """Return the figures of a run from the stored result, or from a new run if no result is stored.

    Raises:
        MeasurementFailed: the run failed.
    """
    name = "-".join([*(word.removeprefix("--") for word in overrides or ["demo"]), f"seed{seed}"])
    arguments = ["--learner.num_steps", str(num_steps), "--run.seed", str(seed), *EVERY_RUN, *overrides]
    log = kept.folder / f"{name}.log"
    found: Figures = kept.result(name, lambda folder: figures_of(train(CONFIG, folder, arguments, log=log)))
    return found


# --- figures of a run ----------------------------------------------------------------------------


def figures_of(run: FinishedRun) -> dict[str, float | None]:
    """Return the figures of one run.

    Returns:
        Rates are per second of wall time from the first step to the last: `samples_per_s` and `trained_tokens_per_s`
        of training, and `generated_tokens_per_s` of generation. `reward_per_min` is the gain of the mean reward per
        minute. `accuracy` is the greedy held-out accuracy after the last step. Lags are in policy versions.
        `learner_idle_frac` is the fraction of the time in which the learner waits for a batch. `actor_idle_frac` is the
        fraction in which an actor has no training request running, as a mean over actors. `dropped_stale` is a fraction
        of the committed samples.

    Raises:
        MeasurementFailed: the run is too short.
    """
    rows = run.updates
    if len(rows) < 5:
        raise MeasurementFailed(f"{run.folder.name} has {len(rows)} steps with an update, expected at least 5")
    window = float(rows[0]["finished_s"]), float(rows[-1]["finished_s"])
    seconds, counted = window[1] - window[0], rows[1:]
    actors = run.generated(window).values()
    ledger = run.summary["ledger"]
    return {
        "samples_per_s": sum(row["batch/trajectories"] for row in counted) / seconds,
        "trained_tokens_per_s": sum(row["batch/completion_tokens"] for row in counted) / seconds,
        "generated_tokens_per_s": sum(actor.num_tokens for actor in actors) / seconds,
        "reward_per_min": reward_per_min(rows),
        "accuracy": run.summary["accuracy_after"],
        "lag_mean": by_token(counted, "lag/token_mean"),
        "lag_p95": by_token(counted, "lag/token_p95"),
        "lag_max": float(max(row["lag/token_max"] for row in rows)),
        "learner_idle_frac": sum(row["time/wait_for_batch"] for row in counted) / seconds,
        "actor_idle_frac": 1 - fmean(actor.busy_s for actor in actors) / seconds if actors else None,
        "dropped_stale": ledger["dropped_stale"] / ledger["committed"],
        "step_s": fmean(row["time/step"] for row in counted),
        "seconds": seconds,
        "num_steps": float(len(rows)),
    }


def reward_per_min(rows: Sequence[Row]) -> float:
    """Return the gain of the mean reward per minute of wall time, from the first part ENDS of the steps to the last."""
    num = max(1, round(ENDS * len(rows)))
    first, last = rows[:num], rows[-num:]
    gain = fmean(row["reward/mean"] for row in last) - fmean(row["reward/mean"] for row in first)
    seconds = fmean(row["finished_s"] for row in last) - fmean(row["finished_s"] for row in first)
    return float(60 * gain / seconds)


def over_seeds(found: Sequence[Figures]) -> dict[str, float | None]:
    """Return means over the seeds of a run, and the maximum of `lag_max`."""
    return {**means(found), "lag_max": max(each["lag_max"] or 0.0 for each in found)}


# --- the page ------------------------------------------------------------------------------------


COLUMNS = {
    "samples/s": ("samples_per_s", "{:.0f}"),
    "tokens/s generated": ("generated_tokens_per_s", "{:.0f}"),
    "tokens/s trained": ("trained_tokens_per_s", "{:.0f}"),
    "reward per minute": ("reward_per_min", "{:+.2f}"),
    "held-out accuracy": ("accuracy", "{:.3f}"),
    "lag mean": ("lag_mean", "{:.2f}"),
    "p95": ("lag_p95", "{:.1f}"),
    "max": ("lag_max", "{:.0f}"),
    "learner idle": ("learner_idle_frac", "{:.0%}"),
    "actors idle": ("actor_idle_frac", "{:.0%}"),
    "dropped as stale": ("dropped_stale", "{:.1%}"),
}
"""Column of the table -> figure of a run, and the format of this figure."""
READING = (
    "Rates are per second of wall time between the first step and the last, so that start-up and evaluations "
    f"do not count. Reward per minute is the mean reward of the last {ENDS:.0%} of the steps minus that of the first "
    f"{ENDS:.0%}, over the minutes between them. Accuracy is greedy, on the held-out problems, after the last step, "
    "when all runs have trained the same number of samples. Lag is in policy versions, over trained tokens. The "
    "learner is idle while it waits for a batch. An actor is idle while it has no training request running.\n\n"
    "Limits: all processes share the cores of this machine, so actors and learner slow each other down, and a third "
    "actor takes processor time from the learner. On separate machines, lags and idle fractions change in the same "
    f"way, but rates change differently. The demo has groups of {GROUP_SIZE}, {GROUPS_PER_STEP} of them per step, and "
    "completions of three or four tokens; the effect of a long tail of lengths is measured in "
    "[overlap.md](overlap.md)."
)

PANELS = (
    ("completion tokens per second", (("generated_tokens_per_s", "generated"), ("trained_tokens_per_s", "trained"))),
    ("gain of reward per minute", (("reward_per_min", ""),)),
    ("lag, versions", (("lag_mean", "mean"), ("lag_p95", "p95"), ("lag_max", "max"))),
    ("idle fraction", (("learner_idle_frac", "learner"), ("actor_idle_frac", "actors"))),
)
COLOURS = ("#0072B2", "#D55E00", "#009E73")
"""Colour-blind-safe palette."""
MARKERS = ("o", "s", "^")
INK = "#767676"
"""Colour of axes and text, readable on white and on black."""


def write_results(path: Path, results: Results, machine: Machine, command: str, seeds: list[int]) -> None:
    """Write the page and, next to it, the chart of every measured sweep."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = ["# Effect of config keys", _head(results, machine, command, seeds)]
    for sweep in (sweep for sweep in SWEEPS if sweep.key in results):
        chart = path.with_name(f"{path.stem}_{sweep.name}.svg")
        draw(sweep, results[sweep.key], chart)
        parts += _section(sweep, results[sweep.key], chart.name)
    write_page(path, [*parts, READING])


def _head(results: Results, machine: Machine, command: str, seeds: list[int]) -> str:
    runs = [figures for found in results.values() for figures in found.values()]
    num_steps = max(int(figures["num_steps"] or 0) for figures in runs)
    over = f"Means over seeds {', '.join(map(str, seeds))}." if len(seeds) > 1 else f"One seed ({seeds[0]})."
    return (
        f"{origin(command, machine, machine['commit'])} Runs of `examples/demo.toml` are sequential and have "
        f"{num_steps} steps of {SAMPLES_PER_STEP} samples. A run differs from the demo in the key of its row and in "
        f"`{' '.join(EVERY_RUN)}`, which do not affect speed. {over} For recommendations, see "
        "[tuning.md](../tuning.md)."
    )


def _section(sweep: Sweep, found: Mapping[int, Figures], figure: str) -> list[str]:
    name = f"`{sweep.key}`"
    if sweep.name == "group_size":
        name += f", with `learner.groups_per_step` = {SAMPLES_PER_STEP} / `group_size`"
    rows = []
    for value, figures in sorted(found.items()):
        cells = [number(figures[key], form) for key, form in COLUMNS.values()]
        rows.append([f"**{value}** (the demo)" if value == sweep.default else str(value), *cells])
    return [f"## {name}", f"![Rates, lag and idle fractions over {sweep.key}]({figure})", table([name, *COLUMNS], rows)]


def draw(sweep: Sweep, found: Mapping[int, Figures], path: Path) -> None:
    """Write the chart of a sweep, which shows figures over the values of the key."""
    inks = {f"{part}_color": INK for part in ("text", "xtick", "ytick")}
    inks |= {f"axes_{part}": INK for part in ("edgecolor", "labelcolor", "titlecolor")}
    with drawn(path, 11, 2.5, font_size=9, **inks) as figure:
        figure.patch.set_alpha(0)
        axes = figure.subplots(1, len(PANELS))
        for axis, (title, lines) in zip(axes, PANELS, strict=True):
            _panel(axis, title, lines, found)
            axis.set_xlabel(sweep.key)


def _panel(axis: Any, title: str, lines: tuple[tuple[str, str], ...], found: Mapping[int, Figures]) -> None:  # noqa: ANN401 -- matplotlib API
    values = sorted(found)
    for (name, label), colour, marker in zip(lines, COLOURS, MARKERS, strict=False):
        known = [(place, y) for place, value in enumerate(values) if (y := found[value][name]) is not None]
        axis.plot(
            *zip(*known, strict=True), color=colour, marker=marker, markersize=4, linewidth=1.5, label=label or None
        )
    axis.patch.set_alpha(0)
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(len(values)), [str(value) for value in values])
    lowest = min(y for name, _ in lines for value in values if (y := found[value][name]) is not None)
    axis.set_ylim(bottom=0.0 if lowest >= 0 else None)
    axis.grid(axis="y", color=INK, alpha=0.2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if len(lines) > 1:
        axis.legend(fontsize=7, frameon=False)


if __name__ == "__main__":
    main()
