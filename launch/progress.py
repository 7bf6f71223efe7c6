"""What is known of a run so far: the figures behind the display, the metrics and the summary."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from actors.evaluate import EvalCounts, EvalResult
from actors.report import ActorReport
from buffer.protocol import Status
from launch.config import Config
from launch.overlap import OverlapMeter


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy at one version (or a few, where actors differed)."""

    num_problems: int
    greedy: float | None
    sampled: float | None
    num_failed: int
    """Answers that could not be generated or scored: neither right nor wrong."""
    versions: tuple[str, ...]

    @classmethod
    def of(cls, results: Sequence[EvalResult]) -> Accuracy:
        """Add up the shards."""
        greedy = sum((result.greedy for result in results), start=EvalCounts())
        sampled = sum((result.sampled for result in results), start=EvalCounts())
        return cls(
            num_problems=sum(result.num_problems for result in results),
            greedy=greedy.accuracy,
            sampled=sampled.accuracy,
            num_failed=greedy.num_failed + sampled.num_failed,
            versions=tuple(sorted({str(result.version) for result in results})),
        )

    def row(self) -> dict[str, Any]:
        """As metrics."""
        return {
            "eval/accuracy_greedy": self.greedy,
            "eval/accuracy_sampled": self.sampled,
            "eval/num_problems": self.num_problems,
            "eval/num_failed": self.num_failed,
            "eval/version": ",".join(self.versions),
        }

    def describe(self) -> str:
        """One line."""
        failed = f", {self.num_failed} answers failed" if self.num_failed else ""
        return (
            f"held-out accuracy at version {', '.join(self.versions)}: greedy {number(self.greedy)}, "
            f"sampled {number(self.sampled)} ({self.num_problems} problems{failed})"
        )


def number(value: float | None) -> str:
    """A figure for people; a dash where it does not apply."""
    if value is None:
        return "-"
    return f"{value:.2e}" if value and abs(value) < 1e-2 else f"{value:.3f}"


@dataclass
class PollResult:
    """What the roles reported at one poll."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    learner_waits_for: str = ""
    resumed_at: int | None = None
    """The learner was started again and goes on after this step; later steps are taken again."""
    resumed_version: int = 0
    """The version that it goes on from."""
    actors: list[ActorReport] = field(default_factory=list)
    status: Status | None = None


class _Step(NamedTuple):
    num_tokens: int
    lag_total: float


class StepTotals:
    """What counts of each step, so that one that is taken again counts once: as it was taken last."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._num_tokens = 0
        self._lag_total = 0.0
        self.num_redone = 0
        """Steps taken once more, because a learner was lost before a checkpoint held them."""

    def add(self, step: int, num_tokens: int, lag_mean: float) -> None:
        """A step trained so many tokens at that mean lag; 0 tokens where it was skipped."""
        self.go_back(step - 1)
        self._steps[step] = _Step(num_tokens, num_tokens * lag_mean)
        self._num_tokens += num_tokens
        self._lag_total += num_tokens * lag_mean

    def go_back(self, step: int) -> None:
        """Whatever came after this step is taken again."""
        while self._steps and next(reversed(self._steps)) > step:  # they are in order
            _, undone = self._steps.popitem()
            self._num_tokens -= undone.num_tokens
            self._lag_total -= undone.lag_total
            self.num_redone += 1

    def num_without_report(self, last: int) -> int:
        """Steps up to the last of which no report came: their process died before it was asked for them."""
        return last - len(self._steps)

    @property
    def lag_mean(self) -> float | None:
        """Over all tokens, versions; None before there are any."""
        return self._lag_total / self._num_tokens if self._num_tokens else None


class Rate:
    """Events per second over the last few seconds, from a running total."""

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._points: list[tuple[float, float]] = []

    def update(self, now_s: float, total: float) -> None:
        """The total was `total` at `now_s`."""
        self._points.append((now_s, total))
        while len(self._points) > 2 and self._points[1][0] < now_s - self._window_s:
            self._points.pop(0)

    def value(self) -> float:
        """Per second; 0 before two points are known."""
        if len(self._points) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._points[0], self._points[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0


class Progress:
    """Takes in what the roles report, poll by poll."""

    def __init__(self, config: Config, started_s: float) -> None:
        """Nothing has happened yet.

        Args:
            config: the run's config.
            started_s: `time.monotonic()` at the start of the command.
        """
        self.config = config
        self._started_s = started_s
        self.overlap = OverlapMeter()
        self.step = 0
        self.version = 0
        self.last_row: Mapping[str, Any] = {}
        self.first_row: Mapping[str, Any] = {}
        self.learner_waits_for = ""
        self.actors: dict[str, ActorReport] = {}
        self.status: Status | None = None
        self.lag_max = 0
        self.largest_gap = 0
        self.totals = StepTotals()
        self.num_restarts = 0
        """Of the learner, after which it trained on."""
        self.generated = Rate()
        self.trained = Rate()
        self.num_generated_tokens = 0
        self._tokens_by_actor: dict[str, int] = {}
        self._pauses_s: list[float] = []
        self._trained_tokens = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command started."""
        return time.monotonic() - self._started_s

    def update(self, news: PollResult) -> list[tuple[int, dict[str, Any]]]:
        """Take in one poll; returns (step, row) for every step that finished."""
        now = time.monotonic()
        self.learner_waits_for = news.learner_waits_for
        if news.resumed_at is not None:
            self.num_restarts += 1
            self.totals.go_back(news.resumed_at)
            # later than the last report, where those of the steps in the checkpoint died with the lead
            self.step, self.version = news.resumed_at, news.resumed_version
        self.status = news.status or self.status
        for report in news.actors:
            self.actors[report.name] = report
            self.overlap.add_busy(report.name, report.busy_intervals)
            before = self._tokens_by_actor.get(report.name, 0)
            # a restarted actor counts from 0 again
            self.num_generated_tokens += report.num_tokens - (before if report.num_tokens >= before else 0)
            self._tokens_by_actor[report.name] = report.num_tokens
            self._pauses_s += report.pause_s
        self.generated.update(now, self.num_generated_tokens)
        rows = list(self._step_rows(news))
        self.trained.update(now, self._trained_tokens)
        if self.status is not None:
            self.largest_gap = max(self.largest_gap, abs(self.status.ledger["gap"]))
        return rows

    def _step_rows(self, news: PollResult) -> Iterator[tuple[int, dict[str, Any]]]:
        for report in news.steps:
            self.overlap.add_step(report["started_s"], report["finished_s"])
        overlap_frac = self.overlap.fraction() if news.steps else None  # looks at the whole run: once a poll
        for report in news.steps:
            row = dict(report)
            self.step = int(row["step"])
            self.version = int(row["version"])
            num_tokens = 0 if row["skipped"] else int(row["batch/completion_tokens"])
            self.totals.add(self.step, num_tokens, row["lag/token_mean"] or 0.0)
            self._trained_tokens += num_tokens
            if num_tokens:
                self.lag_max = max(self.lag_max, int(row["lag/token_max"]))
            self.largest_gap = max(self.largest_gap, abs(int(row["buffer/ledger_gap"])))
            row["perf/trained_tokens_per_s"] = self.trained.value()
            row["perf/generated_tokens_per_s"] = self.generated.value()
            row["overlap/frac"] = overlap_frac
            row |= self._actor_row()
            self.first_row = self.first_row or row
            self.last_row = row
            yield self.step, row

    def _actor_row(self) -> dict[str, Any]:
        pauses, self._pauses_s = self._pauses_s, []
        return {
            "time/weight_pause": sum(pauses) / len(pauses) if pauses else None,
            "actors/running_samples": sum(report.num_running for report in self.actors.values()),
        }

    @property
    def lag_mean(self) -> float | None:
        """Mean lag over all trained tokens so far, in versions."""
        return self.totals.lag_mean

    def summary(self, before: Accuracy, after: Accuracy | None, status: Status) -> dict[str, Any]:
        """The values of summary.json."""
        return {
            "accuracy_before": before.greedy,
            "accuracy_after": after.greedy if after else None,
            "accuracy_before_sampled": before.sampled,
            "accuracy_after_sampled": after.sampled if after else None,
            "num_heldout": before.num_problems,
            "wall_s": round(self.elapsed_s, 1),
            "num_steps": self.step,
            "version": self.version,
            "learner_restarts": self.num_restarts,
            "steps_redone": self.totals.num_redone,
            "steps_without_report": self.totals.num_without_report(self.step),
            "trained_trajectories": status.ledger["trained"],
            "lag_mean": self.lag_mean,
            "lag_max": self.lag_max,
            "max_lag": self.config.weight_sync.max_lag,
            "overlap_frac": self.overlap.fraction(),
            "overlap_frac_by_actor": self.overlap.fraction_by_actor(),
            "ledger_gap": max(self.largest_gap, abs(status.ledger["gap"])),
            "ledger": status.ledger,
            "fidelity_ks": status.fidelity_ks,
            "damaged_records": status.num_damaged,
            "failed_by_reason": status.failed_by_reason,
            "quarantined_by_reason": status.quarantined_by_reason,
            "mismatch_lag0_abs": self.first_row.get("mismatch/lag0_abs"),
        }
