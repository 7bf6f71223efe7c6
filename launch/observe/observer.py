"""Observer: takes in what the roles report, keeps the status of the run new in place, and writes it as status.json.

It writes at every poll; while none comes (processes start, an evaluation goes on) about every two seconds, from a
thread of its own. So a file that is not written any more is that of a command that is gone.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from types import TracebackType
from typing import Any

import msgspec

from actors.report import ActorReport, actor_name
from actors.sample import EvalCounts, EvalResult
from buffer.protocol import Status
from common.process import wall_time
from common.staleness import PolicyVersion
from launch.checks import Plan
from launch.errors import ExitStatus
from launch.observe.history import Rows
from launch.observe.status import (
    NUM_EVENTS,
    POLICY,
    Accuracy,
    ActorStatus,
    BufferStatus,
    Ended,
    LearnerStatus,
    PollResult,
    PoolStatus,
    ProcessStatus,
    RunEvent,
    RunStatus,
    waits,
    write_status,
)
from launch.observe.totals import ALL, ActorTotals, OverlapMeter, Rate, TrainedTotals, by_pool, lags_of
from launch.pools import actor_pools

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""After so long without a poll the file is written all the same."""
CLOSE_S = 5.0


class Observer:
    """Follows a run from its command; a context manager. Any thread may call it."""

    def __init__(
        self,
        plan: Plan,
        *,
        started_s: float | None = None,
        look: Callable[[], Sequence[ProcessStatus]] = tuple,
        on_quiet: Callable[[RunStatus], None] = lambda status: None,
        on_news: Callable[[RunStatus], None] = lambda status: None,
        wall: Callable[[], float] = wall_time,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        """Nothing is written before the first phase.

        `started_s` is by `clock`, as if one command had done all the work on the run. `look` says how the processes
        are now, and waits for none of them. `on_quiet` is shown what is known while no poll comes, from a thread of
        the observer; `on_news` is shown every status that is written.
        """
        config = plan.config
        self._path, self._metrics, self._config = plan.folder.status, plan.folder.metrics, config
        self._look, self._on_quiet, self._on_news = look, on_quiet, on_news
        self._wall, self._clock, self._quiet_s = wall, clock, quiet_s
        self._started_s = clock() if started_s is None else started_s
        self.status = RunStatus(
            run=plan.folder.name,
            run_id=plan.run_id,
            folder=str(plan.folder.root),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=wall(),
            num_steps=config.learner.num_steps,
            max_lag=config.weight_sync.max_lag,
        )
        self.trained, self.actor_totals = TrainedTotals(), ActorTotals()
        self._overlap, self._trained_rate = OverlapMeter(), Rate()
        self._reports: dict[str, ActorReport] = {}
        """The last of each actor that works."""
        self._known = PollResult(publishing="", wanted={pool.name: pool.count for pool in actor_pools(config)})
        """Of everything the newest that was told."""
        self._lag0: dict[str, float] = {}
        """Of each actor: mean absolute log-probability difference of its newest tokens at lag 0."""
        self._lag0_of_pool: dict[str, float] = {}
        self._num_restarts, self._restarts_before = 0, 0
        """Of the learner: under this command, and under those that worked on the run before it."""
        self._trained_tokens = 0
        self._pauses_s: list[float] = []
        self._policy_waits_s = 0.0
        """Of all actors. Both since the last row."""
        self._polled_s: float | None = None
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

    # --- what happens -----------------------------------------------------------------------------

    def phase(self, text: str) -> None:
        with self._lock:
            self.status.phase, self.status.phase_since_s = text, self._wall()
            self._write()

    def event(self, kind: str, text: str) -> None:
        """Something happened; the next file has it."""
        with self._lock:
            event = RunEvent(time_s=self._wall(), kind=kind, text=text)
            self.status.events = [*self.status.events, event][-NUM_EVENTS:]

    def evaluated(self, accuracy: Accuracy) -> None:
        """An evaluation is over; the next file has it."""
        with self._lock:
            self.status.evaluations = [*self.status.evaluations, accuracy]

    def polled(self) -> RunStatus:
        """A poll has been taken in, and what there is to say of it is said; returns what was written."""
        with self._lock:
            return self._write()

    def end(self, text: str, exit_status: int) -> None:
        """The last file: how the command ended."""
        with self._lock:
            self._closed.set()
            self.status.ended = Ended(at_s=self._wall(), text=text, exit_status=exit_status)
            self._write()

    def take_up(self, step: int, version: int, num_redone: int = 0) -> None:
        """Count on from what earlier commands did; the learner goes on at this step, the last of metrics.jsonl."""
        self._go_back(step, version)
        self._restarts_before = self.trained.restarts + 1
        self.status.steps_redone = num_redone

    def _go_back(self, step: int, version: int) -> None:
        """Sum up anew what metrics.jsonl has up to a step."""
        self.trained, self.status.step, self.status.version = TrainedTotals(), step, version
        for row in Rows(self._metrics).read():
            if row["step"] <= step:
                self._count(row)

    def take_in(self, news: PollResult) -> list[dict[str, Any]]:
        """Take in one poll; returns the metrics of every step that finished."""
        with self._lock:
            now, status, known = self._clock(), self.status, self._known
            status.polled_s = self._wall()
            known.learner_waits_for = news.learner_waits_for
            known.publishing = known.publishing if news.publishing is None else news.publishing
            for name in ("status", "processes", "quarantined", "wanted"):
                setattr(known, name, getattr(news, name) or getattr(known, name))
            if news.resumed_at is not None:
                self._num_restarts += 1
                status.steps_redone += max(0, status.step - news.resumed_at)
                self._go_back(news.resumed_at, news.resumed_version)
            self._take_in_actors(news, now)
            rows = list(self._rows(news))
            if known.status is not None:
                status.ledger_gap = max(status.ledger_gap, abs(known.status.ledger["gap"]))
            return rows

    def summary(self, before: Accuracy | None, after: Accuracy | None, buffer: Status) -> dict[str, Any]:
        """The values of summary.json; accuracies are None where nobody evaluated."""
        status, evaluated = self.status, before or after
        return {
            "accuracy_before": before.greedy if before else None,
            "accuracy_after": after.greedy if after else None,
            "accuracy_before_sampled": before.sampled if before else None,
            "accuracy_after_sampled": after.sampled if after else None,
            "num_heldout": evaluated.num_problems if evaluated else 0,
            "wall_s": round(self._clock() - self._started_s, 1),
            "num_steps": status.step,
            "version": status.version,
            "learner_restarts": self._restarts_before + self._num_restarts,
            "quarantined_actors": list(self._known.quarantined),
            "steps_redone": status.steps_redone,
            "trained_trajectories": buffer.ledger["trained"],
            "trained_tokens": self.trained.num_tokens,
            "generated_tokens": self.actor_totals.num_tokens[ALL],
            "lag_mean": self.trained.lag_mean,
            "lag_max": self.trained.lag_max,
            "max_lag": status.max_lag,
            "overlap_frac": self._overlap.fraction(),
            "ledger_gap": max(status.ledger_gap, abs(buffer.ledger["gap"])),
            "ledger": buffer.ledger,
            "fidelity_ks": buffer.fidelity.ks,
            "damaged_records": buffer.num_damaged,
            "failed_by_reason": buffer.failed_by_reason,
            "quarantined_by_reason": buffer.quarantined_by_reason,
            "mismatch_lag0_abs": self.trained.first_mismatch,
        }

    # --- a poll -----------------------------------------------------------------------------------

    def _take_in_actors(self, news: PollResult, now: float) -> None:
        since_s = 0.0 if self._polled_s is None else now - self._polled_s
        if news.working is not None:
            self._reports = {name: report for name, report in self._reports.items() if name in news.working}
        for report in news.actors:
            self._reports[report.name] = report
            self._overlap.add_busy(report.busy_intervals)
            self._pauses_s += [update.pause_s for update in report.updates]
            self._policy_waits_s += since_s * report.waiting.startswith(POLICY)
        self._polled_s = now
        self.actor_totals.update(now, news.actors, self._reports)

    def _rows(self, news: PollResult) -> Iterator[dict[str, Any]]:
        for report in news.steps:
            self._overlap.add_step(report["started_s"], report["finished_s"])
        for report in news.steps:
            self._trained_tokens += self._count(report)
            self.status.step, self.status.version = int(report["step"]), int(report["version"])
            if report.get("mismatch/lag0_abs") is not None:
                self.status.mismatch_lag0_abs = report["mismatch/lag0_abs"]
            lag0_by_actor = report.get("lag0_by_actor") or {}
            self._lag0 |= {name: mean for name, (mean, num_tokens) in lag0_by_actor.items() if num_tokens}
            self._trained_rate.begin(report["started_s"] - (report.get("time/wait_for_batch") or 0.0))
            self._trained_rate.update(report["finished_s"], self._trained_tokens)
            metrics = {name: value for name, value in report.items() if not isinstance(value, dict)}
            lags = by_pool(lags_of(report), self.actor_totals.pool_of)
            row = metrics | self._actor_row() | self._pool_rows(lags, lag0_by_actor)
            self.status.row = row
            yield row

    def _count(self, row: Mapping[str, Any]) -> int:
        """Enter a step into the totals; returns the completion tokens that it trained."""
        self.status.ledger_gap = max(self.status.ledger_gap, abs(int(row["buffer/ledger_gap"])))
        return self.trained.add(row)

    def _actor_row(self) -> dict[str, Any]:
        """Of all actors and of the weights that they serve, since the row before."""
        pauses, self._pauses_s = self._pauses_s, []
        policy_waits_s, self._policy_waits_s = self._policy_waits_s, 0.0
        reports = self._reports.values()
        newest = self._known.status.newest[1] if self._known.status is not None else None
        oldest = min((report.version[1] for report in reports), default=None)
        return {
            "perf/generated_tokens_per_s": self.actor_totals.tokens_per_s(),
            "overlap/frac": self._overlap.fraction(),
            "time/weight_pause": fmean(pauses) if pauses else None,
            "time/wait_for_policy": policy_waits_s / len(reports) if reports else None,
            "actors/running_samples": sum(report.num_running for report in reports),
            "actors/waiting": sum(1 for report in reports if report.waiting),
            "weights/published": newest,
            "weights/behind": None if newest is None or oldest is None else max(0, newest - oldest),
            "weights/refused": sum(1 for report in reports if report.refused),
        }

    def _pool_rows(
        self, lags: Mapping[str, Mapping[int, int]], lag0_by_actor: Mapping[str, tuple[float, int]]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {}
        pool_of = self.actor_totals.pool_of
        for pool in sorted(set(pool_of.values())):
            lag0_abs = _mean_of(each for actor, each in lag0_by_actor.items() if pool_of.get(actor) == pool)
            if lag0_abs is not None:
                self._lag0_of_pool[pool] = lag0_abs
            engines = self.actor_totals.engines(pool, self._reports.values()).metrics()
            row |= {f"pool/{pool}/{what}": value for what, value in engines.items()}
            row |= {
                f"pool/{pool}/actors": sum(1 for report in self._reports.values() if report.pool == pool),
                f"pool/{pool}/tokens_per_s": self.actor_totals.tokens_per_s("pool", pool),
                f"pool/{pool}/lag_mean": _mean_of(lags.get(pool, {}).items()),
                f"pool/{pool}/mismatch_lag0_abs": lag0_abs,
            }
        return row

    # --- the status -------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Make the parts of the status that change without a step."""
        status, known = self.status, self._known
        status.lag_mean, status.lag_max = self.trained.lag_mean, self.trained.lag_max
        status.lags, status.trained_tokens = self.trained.lags(self.actor_totals.pool_of), self.trained.num_tokens
        status.published = None if known.status is None else str(PolicyVersion(*known.status.newest))
        status.generated_tokens_per_s = self.actor_totals.tokens_per_s()
        status.learner = LearnerStatus(
            tokens_per_s=self._trained_rate.value(self._wall()),
            waits_for=known.learner_waits_for,
            publishing=known.publishing or "",
            restarts=self._num_restarts,
        )
        status.buffer = None if known.status is None else self._buffer(known.status)
        status.pools = [self._pool(name, wanted) for name, wanted in known.wanted.items()]
        processes = list(self._dated(known.processes))
        status.actors = [self._actor(each) for each in processes if each.role == "actor"]
        status.stages = [self._stage(each) for each in processes if each.role == "stage"]
        status.services = [each for each in processes if each.role in ("buffer", "weights", "ranker")]
        status.waits = [] if status.ended is not None else waits(status, self._wall())

    def _dated(self, processes: Iterable[ProcessStatus]) -> Iterator[ProcessStatus]:
        """With when each was first seen in the state that it is in."""
        seen = (*self.status.actors, *self.status.stages, *self.status.services)
        before = {(each.role, each.number): (each.state, each.restarts, each.since_s) for each in seen}
        for each in processes:
            state, restarts, since_s = before.get((each.role, each.number), ("", 0, 0.0))
            is_same = (state, restarts) == (each.state, each.restarts)
            yield msgspec.structs.replace(each, since_s=since_s if is_same else self._wall())

    def _pool(self, name: str, wanted: int) -> PoolStatus:
        reports = [report for report in self._reports.values() if report.pool == name]
        return PoolStatus(
            name=name,
            wanted=wanted,
            working=len(reports),
            running=sum(report.num_running for report in reports),
            tokens_per_s=self.actor_totals.tokens_per_s("pool", name),
            lag_mean=_mean_of(self.status.lags.get(name, {}).items()),
            mismatch_lag0_abs=self._lag0_of_pool.get(name),
            engines=self.actor_totals.engines(name, self._reports.values()),
        )

    def _actor(self, process: ProcessStatus) -> ActorStatus:
        name = actor_name(process.number)
        facts = msgspec.structs.asdict(process) | {"name": name}
        facts |= {"acknowledged": self.actor_totals.acknowledged[name], "mismatch_lag0_abs": self._lag0.get(name)}
        report, buffer = self._reports.get(name), self._known.status
        if report is None:
            return ActorStatus(**facts)
        facts |= {
            "waits_for": report.waiting,
            "waits_s": report.waiting_s,
            "refused": report.refused,
            "running": report.num_running,
        }
        return ActorStatus(
            **facts,
            version=str(PolicyVersion(*report.version)),
            behind=None if buffer is None else max(0, buffer.newest[1] - report.version[1]),
            tokens_per_s=self.actor_totals.tokens_per_s("actor", name),
        )

    def _stage(self, process: ProcessStatus) -> ProcessStatus:
        """The coordinator says itself for whom it waits; the other stages follow it, step by step."""
        whom = self._known.learner_waits_for
        if not whom or process.state != "working":
            return process
        lead = self._config.learner.num_stages - 1
        return msgspec.structs.replace(
            process, waits_for=whom if process.number == lead else f"stage.{lead}, the coordinator"
        )

    def _buffer(self, status: Status) -> BufferStatus:
        return BufferStatus(
            sampler=self._config.buffer.sampler,
            ready_groups=status.num_ready_groups,
            drawn_groups=status.num_drawn_groups,
            groups_per_step=self._config.learner.groups_per_step,
            ledger=dict(status.ledger),
            failed_by_reason=dict(status.failed_by_reason),
            quarantined_by_reason=dict(status.quarantined_by_reason),
            nonsense_by_sender={sender: told.count for sender, told in status.nonsense.items()},
            fidelity_ks=status.fidelity.ks,
            is_draining=status.draining,
        )

    # --- the file ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self._quiet_s / 4):
            try:
                self._write_if_quiet()
            except Exception as error:  # the thread must not end: the run would be taken for gone
                self._complain("what is known of the run cannot be told", error)

    def _write_if_quiet(self) -> None:
        with self._lock:
            is_quiet = self.status.phase and self._wall() - self.status.written_s >= self._quiet_s
            if not is_quiet or self._closed.is_set():
                return
            try:
                self._known.processes = tuple(self._look()) or self._known.processes
            except Exception as error:  # one may be taken away under our eyes; the next look, or poll, is right
                log.info("the processes cannot be looked at just now: %s", error)
            status = self._write()
        self._on_quiet(status)

    def _write(self) -> RunStatus:
        self._describe()
        self.status.written_s, self.status.wall_s = self._wall(), round(self._clock() - self._started_s, 1)
        status = copy.copy(self.status)  # a screen may show it while the next poll is taken in
        try:
            write_status(self._path, status)
        except OSError as error:  # views from outside are blind then; training continues
            self._complain(f"{self._path} cannot be written", error)
        self._on_news(status)
        return status

    def _complain(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text != self._complained:
            log.warning("%s", text, exc_info=None if isinstance(error, OSError) else error)
        self._complained = text


def accuracy_of(results: Sequence[EvalResult]) -> Accuracy:
    """What the parts of an evaluation add up to."""
    greedy = sum((result.greedy for result in results), start=EvalCounts())
    sampled = sum((result.sampled for result in results), start=EvalCounts())
    versions = sorted({result.version for result in results})
    newest = max(versions, default=PolicyVersion(0, 0))
    return Accuracy(
        versions=", ".join(map(str, versions)),
        policy_version=newest.version,
        start=newest.incarnation,
        greedy=greedy.accuracy,
        sampled=sampled.accuracy,
        num_problems=sum(result.num_problems for result in results),
        num_failed=greedy.num_failed + sampled.num_failed,
    )


def _mean_of(weighted: Iterable[tuple[float, int]]) -> float | None:
    """Mean of (value, weight); None where nothing weighs."""
    pairs = list(weighted)
    weight = sum(each for _, each in pairs)
    return sum(value * each for value, each in pairs) / weight if weight else None
