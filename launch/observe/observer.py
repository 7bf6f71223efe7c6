"""Who waits for whom, as sentences: from what the roles say of themselves and the states of their processes."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from actors.evaluate import EvalCounts, EvalResult
from actors.report import ActorReport, actor_name
from buffer.config import BufferConfig
from buffer.protocol import Status
from common.staleness import PolicyVersion
from launch.checks import Plan
from launch.config import Config
from launch.exit_status import ExitStatus
from launch.observe import status as s
from launch.observe.status import (
    FORMAT,
    NUM_EVENTS,
    Ended,
    Evaluated,
    Event,
    ProcessFacts,
    RunStatus,
    write_status,
)
from launch.observe.totals import Acknowledged, Generated, Lags, OverlapMeter, Rate, StepTotals
from launch.pools import actor_pools
from launch.words import number

log = logging.getLogger(__name__)

LEASE = "waiting for a lease"
POLICY = "waiting for policy"
"""How an actor begins to say so; see `actors.loop`."""
NUM_NAMED = 3
"""Of so many that wait for the same, each is named."""


def waits(
    learner: str,
    publishing: str,
    actors: Mapping[str, ActorReport],
    processes: Iterable[ProcessFacts],
    seconds: Mapping[str, float],
    status: Status | None,
) -> list[str]:
    """Every role that waits, and for whom.

    Args:
        learner: whom the learner waits for; empty where it computes.
        publishing: what published weights wait for; empty for nothing.
        actors: the last report of each that works.
        processes: of the run.
        seconds: name of a process -> how long it has been in its state.
        status: of the buffer.
    """
    found = [f"the learner waits for {learner}"] if learner else []
    if publishing:
        found.append(f"published weights wait for {publishing}")
    if status is not None and status.silent_shards:
        found.append(f"everyone waits for shards {status.silent_shards} of the buffer, which do not answer")
    groups: dict[str, list[str]] = {}
    for name, report in sorted(actors.items()):
        if report.waiting:
            groups.setdefault(_of_actor(report, status), []).append(name)
    found += [f"{together(names)} {_verb(names)} {what}" for what, names in groups.items()]
    return [*found, *_of_processes(processes, seconds)]


def together(names: list[str]) -> str:
    """Names, or the number of them where there are many."""
    if len(names) <= NUM_NAMED:
        return ", ".join(names)
    return f"{len(names)} actors ({', '.join(names[:2])}, ...)"


def _verb(names: list[str]) -> str:
    return "waits for" if len(names) == 1 else "wait for"


def _of_actor(report: ActorReport, status: Status | None) -> str:
    """For whom, out of what it says itself."""
    said = report.waiting
    if said == "draining" or (said.startswith(LEASE) and status is not None and status.draining):
        return "nothing more: the run drains"
    if said.startswith(LEASE):
        further = ""
        if status is not None:
            further = f" than version {status.version} ({status.num_ready_groups} groups are ready for it)"
        return f"the learner: the bound on staleness grants no lease before it is further{further}"
    if said.startswith(POLICY):
        newest = f", and {PolicyVersion(*status.newest)} is the newest published" if status is not None else ""
        return f"{said.removeprefix('waiting for ')}{newest}"
    return said.removeprefix("waiting for ").removeprefix("training waits for ")


def _of_processes(processes: Iterable[ProcessFacts], seconds: Mapping[str, float]) -> Iterator[str]:
    for process in processes:
        for_s = f"for {seconds.get(process.name, 0.0):.0f} s"
        if process.state == "starting":
            yield f"{process.name} is starting, {for_s}; see {process.log}"
        elif process.state == "waiting for resources":
            yield f"{process.name} waits {for_s} for a host of the pool '{process.pool}' that has room for it"
        elif process.state == "leaving":
            yield f"{process.name} is leaving, {for_s}: it hands back what it has leased"


UNKNOWN_POOL = "unknown"
"""Of tokens whose actor has never reported to this command."""


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


def _newest(value: float | None, before: float | None) -> float | None:
    return before if value is None else value


def mean_of(weighted: Iterable[tuple[float, int]]) -> float | None:
    """Mean of (value, weight); None where nothing weighs."""
    pairs = list(weighted)
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None


@dataclass
class PollResult:
    """What the roles reported at one poll."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    learner_waits_for: str = ""
    publishing: str | None = None
    """What keeps published weights from being on disk; empty where nothing does, None where nobody said."""
    resumed_at: int | None = None
    """The learner was started again and goes on after this step; later steps are taken again."""
    resumed_version: int = 0
    """The version that it goes on from."""
    actors: list[ActorReport] = field(default_factory=list)
    working: frozenset[str] | None = None
    """Names of the actors that work; the others are being started, or out of the run. None: not known."""
    quarantined: tuple[str, ...] = ()
    """Names of the actors that were taken out of the run because of their weights."""
    wanted: Mapping[str, int] = field(default_factory=dict)
    """How many actors each pool is to have."""
    processes: tuple[ProcessFacts, ...] = ()
    """All of the run: buffer, weights, stages, actors."""
    status: Status | None = None


class Progress:
    """Takes in what the roles report, poll by poll."""

    def __init__(self, config: Config, started_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has happened yet.

        Args:
            config: the run's config.
            started_s: of the command, by the clock.
            clock: seconds, monotonic.
        """
        self.config = config
        self._clock = clock
        self._started_s = started_s
        self.overlap = OverlapMeter()
        self.step = 0
        self.version = 0
        self.last_row: Mapping[str, Any] = {}
        self.first_row: Mapping[str, Any] = {}
        self.learner_waits_for = ""
        self.publishing = ""
        """What keeps published weights from being on disk."""
        self.actors: dict[str, ActorReport] = {}
        """The last report of each that works."""
        self.mismatch_lag0_abs: float | None = None
        """Of the newest step that had tokens of lag 0."""
        self.lag0_by_actor: dict[str, float] = {}
        """The newest mean absolute log-probability difference at lag 0 of each that had such tokens."""
        self.lag0_by_pool: dict[str, float] = {}
        """The same of each pool."""
        self.quarantined: tuple[str, ...] = ()
        self.tripped: tuple[str, ...] = ()
        """What is wrong now, as sentences."""
        self.status: Status | None = None
        self.lag_max = 0
        self.largest_gap = 0
        self.totals = StepTotals()
        self.num_restarts = 0
        """Of the learner, after which it trained on."""
        self.generated = Generated()
        self.acknowledged = Acknowledged()
        self.trained = Rate()
        self.processes: tuple[ProcessFacts, ...] = ()
        self.wanted: Mapping[str, int] = {pool.name: pool.count for pool in actor_pools(config)}
        """How many actors each pool is to have."""
        self._pauses_s: list[float] = []
        self._polled_s = started_s
        self._policy_waits_s: list[float] = []
        """Since the last row, one for each actor of each poll."""
        self._trained_tokens = 0
        self._restarts_before = 0
        """Of the learner, under the commands that worked on the run before this one."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command started; in a run that is gone on with, those of the commands before as well."""
        return self._clock() - self._started_s

    def take_up(self, rows: Sequence[Mapping[str, Any]], step: int, version: int, wall_s: float) -> None:
        """Count on from what earlier commands reported of the run.

        Args:
            rows: of metrics.jsonl, in their order; those after `step` are taken again.
            step: at which the learner goes on.
            version: that it has there.
            wall_s: seconds that the earlier commands worked.
        """
        self._started_s -= wall_s
        self._restarts_before = 1 + max((int(row["restarts"]) for row in rows), default=0)
        every, last = self.config.tracking.log_every, 0
        for row in rows:
            num_tokens = 0 if row["skipped"] else int(row["batch/completion_tokens"])
            last = int(row["step"])
            for unlogged in range(max(1, last - every + 1), last):
                self.totals.add(unlogged, 0, 0.0)
            self.totals.add(last, num_tokens, row["lag/token_mean"] or 0.0)
            self.lag_max = max(self.lag_max, int(row["lag/token_max"]) if num_tokens else 0)
            self.largest_gap = max(self.largest_gap, abs(int(row["buffer/ledger_gap"])))
        self.first_row = self.first_row or (rows[0] if rows else {})
        for unlogged in (each for each in range(last + 1, step + 1) if each % every):
            self.totals.add(unlogged, 0, 0.0)
        self.totals.go_back(step)
        self.step, self.version = step, version

    def update(self, news: PollResult) -> list[tuple[int, dict[str, Any]]]:
        """Take in one poll; returns (step, row) for every step that finished."""
        now = self._clock()
        self.learner_waits_for = news.learner_waits_for
        self.publishing = self.publishing if news.publishing is None else news.publishing
        if news.resumed_at is not None:
            self.num_restarts += 1
            self.totals.go_back(news.resumed_at)
            # later than the last report, where those of the steps in the checkpoint died with the lead
            self.step, self.version = news.resumed_at, news.resumed_version
        self.status = news.status or self.status
        self.processes = news.processes or self.processes
        self.quarantined = news.quarantined or self.quarantined
        self.wanted = news.wanted or self.wanted
        if news.working is not None:
            self.actors = {name: report for name, report in self.actors.items() if name in news.working}
        for report in news.actors:
            self.actors[report.name] = report
            self.overlap.add_busy(report.name, report.busy_intervals)
            self._pauses_s += [update.pause_s for update in report.updates]
            self._policy_waits_s.append(now - self._polled_s if report.waiting.startswith(POLICY) else 0.0)
        self._polled_s = now
        self.generated.update(now, news.actors, self.actors)
        self.acknowledged.update(news.actors)
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
            by_actor = row.pop("lag0_by_actor", None) or {}
            self.mismatch_lag0_abs = _newest(row.get("mismatch/lag0_abs"), self.mismatch_lag0_abs)
            self.lag0_by_actor |= {name: mean for name, (mean, num_tokens) in by_actor.items() if num_tokens}
            lags = self._by_pool(row.pop("lag_by_actor", None) or {})
            self.step = int(row["step"])
            self.version = int(row["version"])
            num_tokens = 0 if row["skipped"] else int(row["batch/completion_tokens"])
            self.totals.add(self.step, num_tokens, row["lag/token_mean"] or 0.0, lags)
            self._trained_tokens += num_tokens
            if num_tokens:
                self.lag_max = max(self.lag_max, int(row["lag/token_max"]))
            self.largest_gap = max(self.largest_gap, abs(int(row["buffer/ledger_gap"])))
            row["perf/trained_tokens_per_s"] = self.trained.value()
            row["perf/generated_tokens_per_s"] = self.generated.all.value()
            row["overlap/frac"] = overlap_frac
            row["restarts"] = int(row.get("restarts", 0)) + self._restarts_before
            row |= self._actor_row() | self._weights_row() | self._pool_rows(lags, by_actor)
            self.first_row = self.first_row or row
            self.last_row = row
            yield self.step, row

    def _actor_row(self) -> dict[str, Any]:
        pauses, self._pauses_s = self._pauses_s, []
        waits, self._policy_waits_s = self._policy_waits_s, []
        reports = self.actors.values()
        return {
            "time/weight_pause": sum(pauses) / len(pauses) if pauses else None,
            "time/wait_for_policy": sum(waits) / len(reports) if reports else None,
            "actors/running_samples": sum(report.num_running for report in reports),
            "actors/waiting": sum(1 for report in reports if report.waiting),
        }

    def _by_pool(self, lag_by_actor: Mapping[str, Mapping[int, int]]) -> Lags:
        by_pool: dict[str, Counter[int]] = {}
        for actor, lags in lag_by_actor.items():
            by_pool.setdefault(self.generated.pool_of.get(actor, UNKNOWN_POOL), Counter()).update(lags)
        return by_pool

    def _pool_rows(self, lags: Lags, lag0_by_actor: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for pool in sorted(set(self.generated.pool_of.values())):
            counts = lags.get(pool, {})
            lag0 = [each for actor, each in lag0_by_actor.items() if self.generated.pool_of.get(actor) == pool]
            lag0_abs = mean_of(lag0)
            if lag0_abs is not None:
                self.lag0_by_pool[pool] = lag0_abs
            row |= {
                f"pool/{pool}/actors": sum(1 for report in self.actors.values() if report.pool == pool),
                f"pool/{pool}/tokens_per_s": self.generated.of_pool(pool),
                f"pool/{pool}/lag_mean": mean_of(counts.items()),
                f"pool/{pool}/mismatch_lag0_abs": lag0_abs,
            }
        return row

    def _weights_row(self) -> dict[str, Any]:
        newest = self.status.newest[1] if self.status is not None else None
        served = [report.version[1] for report in self.actors.values()]
        return {
            "weights/published": newest,
            "weights/behind": max(0, newest - min(served)) if served and newest is not None else None,
            "weights/refused": sum(1 for report in self.actors.values() if report.refused),
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
            "learner_restarts": self._restarts_before + self.num_restarts,
            "quarantined_actors": list(self.quarantined),
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
            "fidelity_ks": status.fidelity.ks,
            "damaged_records": status.num_damaged,
            "failed_by_reason": status.failed_by_reason,
            "quarantined_by_reason": status.quarantined_by_reason,
            "mismatch_lag0_abs": self.first_row.get("mismatch/lag0_abs"),
        }


class Since:
    """When each process was first seen in the state that it is in."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, int, float]] = {}

    def update(self, processes: tuple[ProcessFacts, ...], now_s: float) -> dict[str, float]:
        """Take in how they are now; returns name -> when that began, on the same clock."""
        before = self._seen
        self._seen = {}
        for process in processes:
            state, restarts, since_s = before.get(process.name, ("", -1, now_s))
            if (state, restarts) != (process.state, process.restarts):
                since_s = now_s
            self._seen[process.name] = process.state, process.restarts, since_s
        return {name: since_s for name, (_, _, since_s) in self._seen.items()}


@dataclass(frozen=True)
class Around:
    """What a snapshot has beside the progress."""

    now_s: float
    since_s: Mapping[str, float]
    """Of each process; see `Since`."""


def parts(progress: Progress, around: Around) -> dict[str, Any]:
    """The fields of a `RunStatus` that come of the progress of a run."""
    row, config, status = progress.last_row, progress.config, progress.status
    seconds = {name: around.now_s - since_s for name, since_s in around.since_s.items()}
    max_lag = config.weight_sync.max_lag
    return {
        "step": progress.step,
        "num_steps": config.learner.num_steps,
        "version": progress.version,
        "published": None if status is None else str(PolicyVersion(*status.newest)),
        "reward": row.get("reward/mean"),
        "loss": row.get("loss"),
        "lag_mean": progress.lag_mean,
        "lag_max": progress.lag_max,
        "max_lag": max_lag,
        "mismatch_lag0_abs": progress.mismatch_lag0_abs,
        "overlap_frac": row.get("overlap/frac"),
        "generated_tokens_per_s": progress.generated.all.value(),
        "learner": _learner(progress),
        "pools": _pools(progress),
        "actors": _actors(progress, around),
        "stages": [_process(each, around, _stage_waits(progress, each)) for each in _of(progress, "stage")],
        "services": [_process(each, around, "") for each in _of(progress, "buffer", "weights")],
        "buffer": _buffer(progress, config.buffer),
        "lags": progress.totals.lags,
        "waits": waits(
            progress.learner_waits_for,
            progress.publishing,
            progress.actors,
            progress.processes,
            seconds,
            status,
        ),
        "tripped": list(progress.tripped),
    }


def _of(progress: Progress, *roles: str) -> list[ProcessFacts]:
    return [process for process in progress.processes if process.role in roles]


def _learner(progress: Progress) -> s.LearnerStatus:
    row = progress.last_row
    step_s, wait_s = row.get("time/step"), row.get("time/wait_for_batch")
    total_s = (step_s or 0.0) + (wait_s or 0.0)
    return s.LearnerStatus(
        tokens_per_s=progress.trained.value(),
        busy_frac=step_s / total_s if step_s and total_s > 0 else None,
        step_s=step_s,
        waits_for=progress.learner_waits_for,
        publishing=progress.publishing,
        restarts=progress.num_restarts,
    )


def _pools(progress: Progress) -> list[s.PoolStatus]:
    reports, lags = progress.actors, progress.totals.lags
    return [
        s.PoolStatus(
            name=name,
            wanted=wanted,
            working=sum(1 for report in reports.values() if report.pool == name),
            running=sum(report.num_running for report in reports.values() if report.pool == name),
            tokens_per_s=progress.generated.of_pool(name),
            lag_mean=mean_of(lags.get(name, {}).items()),
            mismatch_lag0_abs=progress.lag0_by_pool.get(name),
        )
        for name, wanted in progress.wanted.items()
    ]


def _actors(progress: Progress, around: Around) -> list[s.ActorStatus]:
    found = []
    newest = None if progress.status is None else progress.status.newest[1]
    for process in _of(progress, "actor"):
        name = actor_name(process.number)
        report = progress.actors.get(name)
        found.append(
            s.ActorStatus(
                name=name,
                pool=process.pool,
                state=process.state,
                since_s=around.since_s.get(process.name, around.now_s),
                version=None if report is None else str(PolicyVersion(*report.version)),
                behind=None if report is None or newest is None else max(0, newest - report.version[1]),
                running=0 if report is None else report.num_running,
                tokens_per_s=progress.generated.of_actor(name),
                acknowledged=progress.acknowledged.by_actor[name],
                mismatch_lag0_abs=progress.lag0_by_actor.get(name),
                waits_for="" if report is None else report.waiting,
                refused="" if report is None else report.refused,
                restarts=process.restarts,
                host=process.host,
                pid=process.pid,
                log=process.log,
            )
        )
    return found


def _stage_waits(progress: Progress, process: ProcessFacts) -> str:
    """The lead says itself; the other stages follow it, step by step."""
    if not progress.learner_waits_for or process.state != "working":
        return ""
    lead = progress.config.learner.num_stages - 1
    return progress.learner_waits_for if process.number == lead else f"stage.{lead}, the lead"


def _process(process: ProcessFacts, around: Around, waits_for: str) -> s.ProcessStatus:
    return s.ProcessStatus(
        name=process.name,
        state=process.state,
        since_s=around.since_s.get(process.name, around.now_s),
        waits_for=waits_for,
        restarts=process.restarts,
        host=process.host,
        pid=process.pid,
        log=process.log,
    )


def _buffer(progress: Progress, config: BufferConfig) -> s.BufferStatus | None:
    status = progress.status
    if status is None:
        return None
    return s.BufferStatus(
        law=config.law,
        ready_groups=status.num_ready_groups,
        drawn_groups=status.num_drawn_groups,
        groups_per_step=progress.config.learner.groups_per_step,
        ledger=dict(status.ledger),
        failed_by_reason=dict(status.failed_by_reason),
        fidelity_ks=status.fidelity.ks,
        is_draining=status.draining,
        silent_shards=list(status.silent_shards),
    )


QUIET_S = 2.0
"""After so long without a poll the file is written all the same."""
CLOSE_S = 5.0


class Observer:
    """Follows a run from its command; a context manager. Any thread may call it."""

    def __init__(
        self,
        plan: Plan,
        progress: Progress,
        *,
        look: Callable[[], Sequence[ProcessFacts]] = tuple,
        on_quiet: Callable[[RunStatus], None] = lambda snapshot: None,
        on_news: Callable[[RunStatus, Mapping[str, Any]], None] = lambda snapshot, row: None,
        wall: Callable[[], float] = time.time,
        quiet_s: float = QUIET_S,
    ) -> None:
        """Nothing is written before the first phase.

        Args:
            plan: of the run.
            progress: which takes in the polls.
            look: the processes as they are now; waits for none of them.
            on_quiet: shown what is known while no poll comes, from the thread of the observer.
            on_news: shown every snapshot, and the metrics of the newest step.
            wall: seconds since the epoch.
            quiet_s: after so long.
        """
        self._plan = plan
        self._progress = progress
        self._look = look
        self._on_quiet = on_quiet
        self._on_news = on_news
        self._wall = wall
        self._quiet_s = quiet_s
        self._started_s = wall()
        self._polled_s: float | None = None
        self._written_s = 0.0
        self._phase = ("", self._started_s)
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self._evaluations: list[Evaluated] = []
        self._since = Since()
        self._complained = ""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._closed.is_set():
            self.end(f"{type(error).__name__}: {error}", ExitStatus.FAILED)
        self._closed.set()
        self._thread.join(CLOSE_S)

    def phase(self, text: str) -> RunStatus:
        """The run does something else now."""
        with self._lock:
            self._phase = text, self._wall()
            return self._write()

    def event(self, kind: str, text: str) -> None:
        """Something happened; the next snapshot has it."""
        with self._lock:
            self._events.append(Event(time_s=self._wall(), kind=kind, text=text))

    def evaluated(self, accuracy: Accuracy) -> None:
        """An evaluation is over; the next snapshot has it."""
        found = Evaluated(
            versions=", ".join(accuracy.versions),
            greedy=accuracy.greedy,
            sampled=accuracy.sampled,
            num_problems=accuracy.num_problems,
        )
        with self._lock:
            self._evaluations.append(found)

    def take_in(self, news: PollResult) -> list[tuple[int, dict[str, Any]]]:
        """Have the progress take in a poll; nobody looks at it meanwhile. See `Progress.update`."""
        with self._lock:
            self._polled_s = self._wall()
            return self._progress.update(news)

    def polled(self) -> RunStatus:
        """A poll has been taken in, and what there is to say of it is said."""
        with self._lock:
            return self._write()

    def end(self, text: str, exit_status: int) -> None:
        """The last snapshot: how the command ended."""
        with self._lock:
            self._closed.set()
            self._write(Ended(at_s=self._wall(), text=text, exit_status=exit_status))

    # --- parts ------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self._quiet_s / 4):
            try:
                self._write_if_quiet()
            except Exception as error:  # the thread must not end: the run would be taken for gone
                self._complain("what is known of the run cannot be told", error)

    def _write_if_quiet(self) -> None:
        with self._lock:
            is_quiet = self._phase[0] and self._wall() - self._written_s >= self._quiet_s
            if not is_quiet or self._closed.is_set():
                return
            self._look_at_processes()
            snapshot = self._write()
        self._on_quiet(snapshot)

    def _complain(self, what: str, error: Exception) -> None:
        """Once, while it stays the same."""
        text = f"{what}: {type(error).__name__}: {error}"
        if text != self._complained:
            log.warning("%s", text, exc_info=None if isinstance(error, OSError) else error)
        self._complained = text

    def _look_at_processes(self) -> None:
        try:
            self._progress.processes = tuple(self._look()) or self._progress.processes
        except Exception as error:  # one may be taken away under our eyes; the next look, or the next poll, is right
            log.info("the processes cannot be looked at just now: %s", error)

    def _write(self, ended: Ended | None = None) -> RunStatus:
        snapshot = self._snapshot(ended)
        self._written_s = snapshot.written_s
        try:
            write_status(self._plan.folder.status, snapshot)
        except OSError as error:
            # nobody can look in from outside then, and training goes on
            self._complain(f"{self._plan.folder.status} cannot be written", error)
        self._on_news(snapshot, self._progress.last_row)
        return snapshot

    def _snapshot(self, ended: Ended | None) -> RunStatus:
        now_s = self._wall()
        since_s = self._since.update(self._progress.processes, now_s)
        phase, phase_since_s = self._phase
        fields = parts(self._progress, Around(now_s, since_s))
        if ended is not None:
            fields["waits"] = []  # nobody is left
        return RunStatus(
            format=FORMAT,
            run=self._plan.folder.name,
            run_id=self._plan.run_id,
            folder=str(self._plan.folder.root),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=self._started_s,
            written_s=now_s,
            polled_s=self._polled_s,
            phase=phase,
            phase_since_s=phase_since_s,
            evaluations=list(self._evaluations),
            events=list(self._events),
            ended=ended,
            **fields,
        )
