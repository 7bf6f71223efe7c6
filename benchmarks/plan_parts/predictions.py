"""Measured rates of eight configs with vLLM on two cores, and predictions from a profile of two other configs.

The checkpoint and the cores are those of `benchmarks/overlap.py`: one actor has its own core, and all other processes
share a second core. All ten configs run in turn, `ROUNDS` times, because the speed of a shared machine varies. The
profile covers all runs of its two configs, and the rate of a config is the median of its runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.lib.runs import FinishedRun
from benchmarks.overlap import figures_of, train_on_cores
from benchmarks.overlap_parts.long_tail import Setting, write_setting

from leeway.launch.config import load_config
from leeway.launch.run_folder import RunFolder
from leeway.planning.plans import Prediction, predict, world_of
from leeway.planning.profile import Profile
from leeway.planning.profiling import profile_of

ROUNDS = 3
GROUPS = 12
WARM_UP = 5
SAMPLES = 1_000
"""Approximate number of samples that each run uses for training after the warm-up."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Changes of a case to the config of `benchmarks/overlap.py`."""

    slots: int
    budget: int = 1024
    groups: int = GROUPS
    max_lag: int = 4
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the case on the page."""
        more = "".join(f", {key.rpartition('.')[2]} {value}" for key, value in zip(*[iter(self.more)] * 2, strict=True))
        return f"{self.slots} slots, {self.groups} prompts, lag {self.max_lag}, budget {self.budget}{more}"

    @property
    def overrides(self) -> list[str]:
        """Overrides of `leeway train`."""
        values = {
            "actors.max_running_samples": self.slots,
            "learner.token_budget": self.budget,
            "learner.groups_per_step": self.groups,
            "weight_sync.max_lag": self.max_lag,
            "learner.num_steps": WARM_UP + max(12, SAMPLES // (4 * self.groups)),
        }
        return [*(word for key, value in values.items() for word in (f"--{key}", str(value))), *self.more]


PROFILED = (Case(48), Case(12, groups=GROUPS // 2), Case(48, 2048))
PREDICTED = (
    Case(24),
    Case(8),
    Case(48, max_lag=1),
    Case(48, max_lag=0),
    Case(32, 512, groups=8, max_lag=2),
    Case(48, 2048, groups=24),
    Case(16, max_lag=8, more=("--weight_sync.publish_every", "2")),
    Case(40, 1024, groups=6, max_lag=2, more=("--weight_sync.on_stale", "wait")),
)


def config_in(folder: Path) -> Path:
    """Create the config that all cases change; return its path."""
    return write_setting(folder / "setting", Setting(WARM_UP + 20, WARM_UP, GROUPS))


def measured(folder: Path, number: int, case: Case, more: Sequence[str] = ()) -> FinishedRun:
    """Run a case on the two cores.

    Raises:
        MeasurementFailed: the run failed.
    """
    return train_on_cores(config_in(folder), folder / f"case-{number}.log", [*case.overrides, *more])


class Runs(NamedTuple):
    """Results of all rounds: the profile, and the figures of each case."""

    profile: Profile
    """Profile of the runs of `PROFILED`, like the result of `leeway profile --from`."""
    figures: dict[Case, list[Figures]]
    """Figures of each case by round."""


def run_all(folder: Path, cases: Sequence[Case]) -> Runs:
    """Run the profiled configs and some cases in rounds.

    Raises:
        MeasurementFailed: a run failed.
    """
    profiled, figures = [], defaultdict(list)
    for each in range(ROUNDS):
        place = folder / f"round-{each}"
        place.mkdir(parents=True, exist_ok=True)
        profiled += [measured(place, number, case) for number, case in enumerate(PROFILED, 100)]
        for number, case in enumerate(cases):
            figures[case].append(figures_of(measured(place, number, case), WARM_UP))
    return Runs(profile_of([RunFolder(run.folder) for run in profiled]), figures)


def predicted(folder: Path, case: Case, profile: Profile) -> Prediction:
    """Return the prediction of a profile for a case."""
    return predict(world_of(load_config(config_in(folder), case.overrides), profile))


def compared(folder: Path, case: Case, runs: Runs) -> Figures:
    """Return the predicted and measured figures of a case."""
    prediction, rates = predicted(folder, case, runs.profile), [each["samples_per_s"] for each in runs.figures[case]]
    rate = median(rates)
    return {
        "case": case.name,
        "measured": rate,
        "least": min(rates),
        "most": max(rates),
        "predicted": prediction.samples_per_s,
        "error": prediction.samples_per_s / rate - 1.0,
        "binds": prediction.binds,
        "step_s": median(each["step_s"] for each in runs.figures[case]),
        "predicted_step_s": prediction.step_s,
    }


def errors(rows: Sequence[Figures]) -> Figures:
    """Return the median and the largest absolute error of all cases."""
    sizes = [abs(row["error"]) for row in rows]
    return {"error_median": median(sizes), "error_worst": max(sizes)}
