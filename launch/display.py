"""The live view: reward, lag, tokens per second, and who waits for whom."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from launch.config import Config
from launch.progress import Accuracy, Progress, number
from launch.run_folder import RunFolder
from weight_sync.staleness import PolicyVersion


class Display:
    """A live table on a terminal; otherwise a line now and then. Never raises because of a narrow screen."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._folder = folder
        wish = config.tracking.display
        self._is_live = wish == "live" or (wish == "auto" and sys.stdout.isatty())
        self._is_off = wish == "off"
        self._console = Console(highlight=False, markup=False)
        self._live: Live | None = None
        self._phase = ""
        self._event = ""
        self._last_line_s = 0.0
        self._last_step = -1

    def __enter__(self) -> Display:
        self._say(f"run {self._folder.root}")
        if self._is_live:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """What the run does now."""
        self._phase = text
        self._say(text)

    def event(self, text: str) -> None:
        """Something happened."""
        self._event = text
        self._say(text)

    def update(self, progress: Progress) -> None:
        """Show the newest figures."""
        if self._live is not None:
            self._live.update(self._table(progress))
        elif time.monotonic() - self._last_line_s >= self._config.tracking.plain_interval_s:
            if progress.step != self._last_step or progress.learner_waits_for:
                self._say(_line(progress))
            self._last_line_s = time.monotonic()
            self._last_step = progress.step

    def fail(self, text: str) -> None:
        """The run ends here, and this is why."""
        self.__exit__()
        print(f"leeway: {text}", file=sys.stderr)

    def finish(self, before: Accuracy, after: Accuracy | None, summary: Mapping[str, Any]) -> None:
        """The last words of a run."""
        self.__exit__()

        def say(text: str) -> None:
            self._console.print(text, soft_wrap=True)

        if after is not None:
            say(f"held-out accuracy over {before.num_problems} problems   before     after      gain")
            for name, first, last in (
                ("greedy", before.greedy, after.greedy),
                ("sampled", before.sampled, after.sampled),
            ):
                gain = last - first if first is not None and last is not None else None
                say(f"  {name:<37}{number(first):>11}{number(last):>10}{number(gain):>10}")
        lag = summary["lag_mean"]
        overlap = summary["overlap_frac"]
        say(
            f"{summary['trained_trajectories']} trajectories in {summary['num_steps']} steps; "
            f"lag mean {number(lag)}, max {summary['lag_max']} of {summary['max_lag']}; "
            f"generating during {number(overlap)} of step time; ledger gap {summary['ledger_gap']}"
        )
        say(f"{summary['wall_s']:.0f} s in all; model, metrics and summary.json in {self._folder.root}")

    def _say(self, text: str) -> None:
        if not self._is_off:
            console = self._live.console if self._live is not None else self._console
            console.print(text, soft_wrap=True)

    def _table(self, progress: Progress) -> Group:
        row, config = progress.last_row, self._config
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        grid.add_row("step", _bar(progress.step, config.learner.num_steps))
        grid.add_row("reward", f"{number(row.get('reward/mean'))}   loss {number(row.get('loss'))}")
        grid.add_row(
            "lag",
            f"mean {number(progress.lag_mean)}   max {progress.lag_max} of {config.weight_sync.max_lag}   "
            f"mismatch at lag 0 {number(row.get('mismatch/lag0_abs'))}",
        )
        grid.add_row(
            "tokens/s", f"generated {progress.generated.value():,.0f}   trained {progress.trained.value():,.0f}"
        )
        waits = progress.learner_waits_for
        grid.add_row("learner", Text(f"waits for {waits}" if waits else "training"))
        for name, report in sorted(progress.actors.items()):
            state = report.waiting or f"{report.num_running} samples running"
            grid.add_row(name, Text(f"version {PolicyVersion(*report.version)}   {state}"))
        if progress.status is not None:
            grid.add_row("ledger", _ledger(progress.status.ledger))
            starved = "   long or short answers are starved" if progress.status.fidelity_alarm else ""
            if progress.status.silent_shards:
                grid.add_row("buffer", f"no answer from shards {progress.status.silent_shards}")
            grid.add_row("lengths", f"trained against generated: {progress.status.fidelity_ks:.3f}{starved}")
        grid.add_row("last", Text(self._event))
        return Group(Text(f"{self._folder.name}: {self._phase}   {progress.elapsed_s:.0f} s"), grid)


def _bar(step: int, num_steps: int) -> Table:
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=num_steps, completed=step, width=40), f"{step}/{num_steps}")
    return bar


def _line(progress: Progress) -> str:
    row = progress.last_row
    waits = f"; learner waits for {progress.learner_waits_for}" if progress.learner_waits_for else ""
    return (
        f"{progress.elapsed_s:5.0f} s  step {progress.step}/{progress.config.learner.num_steps}  "
        f"reward {number(row.get('reward/mean'))}  lag {number(row.get('lag/token_mean'))} "
        f"(max {progress.lag_max} of {progress.config.weight_sync.max_lag})  "
        f"tokens/s generated {progress.generated.value():.0f} trained {progress.trained.value():.0f}{waits}"
    )


def _ledger(ledger: Mapping[str, int]) -> str:
    shown = ("issued", "in_flight", "waiting", "drawn", "trained", "failed", "dropped_stale", "gap")
    return "  ".join(f"{name} {ledger.get(name, 0)}" for name in shown)
