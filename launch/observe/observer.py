"""Observer: merges the reports of the roles into the status of the run, and writes status.json.

The observer writes the file at every poll. Between polls, for example while processes start, the observer's thread
writes the file every two seconds. If the file is no longer updated, the launcher has died.
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
from typing import TYPE_CHECKING, Any

import msgspec

from leeway.actors.report import ActorReport, actor_name
from leeway.buffer.protocol import Status
from leeway.common.process import wall_time
from leeway.common.staleness import PolicyVersion
from leeway.launch.checks import Plan
from leeway.launch.errors import ExitStatus
from leeway.launch.observe.learning import verdict
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.status import (
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
from leeway.launch.observe.totals import ActorTotals, OverlapMeter, TrainedTotals, by_pool, lags_of
from leeway.launch.pools import actor_pools

if TYPE_CHECKING:
    from leeway.launch.resume import History

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""Seconds without a write after which the observer's thread writes status.json."""
CLOSE_S = 5.0


class Observer:
    """Context manager that tracks a run inside its launcher. Thread-safe."""

    def __init__(
        self,
        plan: Plan,
        *,
        started_s: float | None = None,
        earlier: History | None = None,
        list_processes: Callable[[], Sequence[ProcessStatus]] = tuple,
        on_write: Callable[[RunStatus], None] = lambda status: None,
        wall: Callable[[], float] = wall_time,
        clock: Callable[[], float] = time.monotonic,
        quiet_s: float = QUIET_S,
    ) -> None:
        """Create an observer that writes nothing before the first phase.

        `started_s` is a time of `clock`; `earlier` is the history of a resumed run. `list_processes` must not block.
        `on_write` is called in any thread with every written status; exceptions of `on_write` are logged.
        """
        config = plan.config
        self._path, self._metrics, self._config = plan.folder.status, plan.folder.metrics, config
        self._list_processes, self._on_write = list_processes, on_write
        self._wall, self._clock, self._quiet_s = wall, clock, quiet_s
        self._started_s = (clock() if started_s is None else started_s) - (earlier.wall_s if earlier else 0.0)
        self.status = RunStatus(
            run=plan.folder.name,
            run_id=plan.run_id,
            folder=str(plan.folder.root),
            pid=os.getpid(),
            host=socket.gethostname(),
            started_s=wall(),
            num_steps=config.learner.num_steps,
            max_lag=config.weight_sync.max_lag,
            evaluations=list(earlier.evaluations) if earlier else [],
            steps_redone=earlier.num_redone if earlier else 0,
        )
        self.trained, self.actor_totals = TrainedTotals(), ActorTotals()
        self._overlap, self._stepped_s = OverlapMeter(), 0.0
        self._reports: dict[str, ActorReport] = {}  # newest report of each working actor
        self._known = PollResult(publishing="", desired={pool.name: pool.count for pool in actor_pools(config)})
        self._lag0: dict[str, float] = {}
        """Maps an actor to its newest `mismatch/lag0_abs`; `_lag0_of_pool` maps a pool."""
        self._lag0_of_pool: dict[str, float] = {}
        self._num_restarts, self._restarts_before = 0, 0
        """Number of learner restarts in this launch, and in earlier launches."""
        self._pauses_s: list[float] = []
        self._policy_waits_s = 0.0
        """Seconds that all actors together waited for weights since the last row; `_pauses_s` has the same period."""
        self._polled_s: float | None = None
        self._last_warning = ""
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not self._closed.is_set():
            self.end(f"{type(error).__name__}: {error}", ExitStatus.FAILED)
        self._closed.set()
        self._thread.join(CLOSE_S)

    # --- updates ----------------------------------------------------------------------------------

    def phase(self, text: str) -> None:
        with self._lock:
            self.status.phase, self.status.phase_since_s = text, self._wall()
            self._write()

    def event(self, kind: str, text: str) -> None:
        with self._lock:
            event = RunEvent(time_s=self._wall(), kind=kind, text=text)
            self.status.events = [*self.status.events, event][-NUM_EVENTS:]

    def evaluated(self, accuracy: Accuracy) -> None:
        """Add the result of an evaluation to the status."""
        with self._lock:
            self.status.evaluations = [*self.status.evaluations, accuracy]

    def polled(self) -> RunStatus:
        """Write and return the status; called after `ingest`."""
        with self._lock:
            return self._write()

    def end(self, text: str, exit_status: int) -> None:
        """Write the final status, with the exit status of the launcher."""
        with self._lock:
            self._closed.set()
            self.status.ended = Ended(at_s=self._wall(), text=text, exit_status=exit_status)
            self._write()

    def resume_at(self, step: int, version: int, num_redone: int) -> None:
        """Continue the totals of earlier launches; the learner resumes at `step`, the last step in metrics.jsonl."""
        self._rewind(step, version)
        self._restarts_before = self.trained.restarts + 1
        self.status.steps_redone += num_redone

    def ingest(self, poll: PollResult) -> list[dict[str, Any]]:
        """Process one poll; return the row of every finished step, with the columns of the actors."""
        with self._lock:
            now, status, known = self._clock(), self.status, self._known
            status.polled_s = self._wall()
            known.learner_waits_for = poll.learner_waits_for
            known.publishing = known.publishing if poll.publishing is None else poll.publishing
            for name in ("status", "processes", "quarantined", "desired"):
                setattr(known, name, getattr(poll, name) or getattr(known, name))
            if poll.resumed_at is not None:
                self._num_restarts += 1
                status.steps_redone += max(0, status.step - poll.resumed_at)
                self._rewind(poll.resumed_at, poll.resumed_version)
            self._ingest_actors(poll, now)
            rows = list(self._rows(poll.steps))
            if known.status is not None:
                status.ledger_gap = max(status.ledger_gap, abs(known.status.ledger["gap"]))
            return rows

    def summary(self, before: Accuracy | None, after: Accuracy | None, buffer: Status) -> dict[str, Any]:
        """Return the values of summary.json; an accuracy is None if there was no such evaluation."""
        status, trained, evaluated = self.status, self.trained, before or after
        return {
            "verdict": verdict(status, trained.rewards),
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
            "trained_tokens": trained.num_tokens,
            "generated_tokens": self.actor_totals.total("tokens"),
            "lag_mean": trained.lag_mean,
            "lag_max": trained.lag_max,
            "max_lag": status.max_lag,
            "overlap_frac": self._overlap.fraction(),
            "ledger_gap": max(status.ledger_gap, abs(buffer.ledger["gap"])),
            "ledger": buffer.ledger,
            "fidelity_ks": buffer.fidelity.ks,
            "damaged_records": buffer.num_damaged,
            "failed_by_reason": buffer.failed_by_reason,
            "quarantined_by_reason": buffer.quarantined_by_reason,
            "mismatch_lag0_abs": trained.first_mismatch,
        }

    # --- a poll -----------------------------------------------------------------------------------

    def _rewind(self, step: int, version: int) -> None:
        """Recompute the totals from the rows of metrics.jsonl up to a step."""
        self.trained, self.status.step, self.status.version = TrainedTotals(), step, version
        for row in Rows(self._metrics).read():
            if row["step"] <= step:
                self._count(row)

    def _count(self, row: Mapping[str, Any]) -> None:
        self.status.ledger_gap = max(self.status.ledger_gap, abs(int(row["buffer/ledger_gap"])))
        self.trained.add(row)

    def _ingest_actors(self, poll: PollResult, now: float) -> None:
        since_s = 0.0 if self._polled_s is None else now - self._polled_s
        if poll.working is not None:
            self._reports = {name: report for name, report in self._reports.items() if name in poll.working}
        for report in poll.actors:
            self._reports[report.name] = report
            self._overlap.add_busy(report.busy_intervals)
            self._pauses_s += [update.pause_s for update in report.updates]
            self._policy_waits_s += since_s * report.waiting.startswith(POLICY)
        self._polled_s = now
        self.actor_totals.update(now, poll.actors, self._reports)

    def _rows(self, steps: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for step in steps:
            self._overlap.add_step(step["started_s"], step["finished_s"])
        for step in steps:
            self._count(step)
            self._stepped_s = self._clock()
            self.status.step, self.status.version = int(step["step"]), int(step["version"])
            if step.get("mismatch/lag0_abs") is not None:
                self.status.mismatch_lag0_abs = step["mismatch/lag0_abs"]
            metrics = {name: value for name, value in step.items() if not isinstance(value, dict)}
            self.status.row = metrics | self._actor_columns() | self._pool_columns(step)
            self.status.note_lags(step)
            yield self.status.row

    def _actor_columns(self) -> dict[str, Any]:
        """Return the columns about all actors and their weights, which cover the time since the last row."""
        pauses, self._pauses_s = self._pauses_s, []
        policy_waits_s, self._policy_waits_s = self._policy_waits_s, 0.0
        reports = self._reports.values()
        newest = self._known.status.newest[1] if self._known.status is not None else None
        oldest = min((report.version[1] for report in reports), default=None)
        return {
            "perf/generated_tokens_per_s": self.actor_totals.per_s("tokens"),
            "overlap/frac": self._overlap.fraction(),
            "time/weight_pause": fmean(pauses) if pauses else None,
            "time/wait_for_policy": policy_waits_s / len(reports) if reports else None,
            "actors/running_samples": sum(report.num_running for report in reports),
            "actors/waiting": sum(1 for report in reports if report.waiting),
            "weights/published": newest,
            "weights/behind": None if newest is None or oldest is None else max(0, newest - oldest),
            "weights/refused": sum(1 for report in reports if report.refused),
        }

    def _pool_columns(self, step: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of every pool, aggregated from the tables of a step, which have one entry per actor."""
        columns: dict[str, Any] = {}
        pool_of = self.actor_totals.pool_of
        lags, lag0 = by_pool(lags_of(step), pool_of), step.get("lag0_by_actor") or {}
        self._lag0 |= {actor: mean for actor, (mean, num_tokens) in lag0.items() if num_tokens}
        for pool in sorted(set(pool_of.values())):
            lag0_abs = _mean_of(each for actor, each in lag0.items() if pool_of.get(actor) == pool)
            if lag0_abs is not None:
                self._lag0_of_pool[pool] = lag0_abs
            of_pool = {
                **self.actor_totals.engines(pool, self._reports.values()).metrics(),
                "actors": sum(1 for report in self._reports.values() if report.pool == pool),
                "tokens_per_s": self.actor_totals.per_s("tokens", "pool", pool),
                "lag_mean": _mean_of(lags.get(pool, {}).items()),
                "mismatch_lag0_abs": lag0_abs,
            }
            columns |= {f"pool/{pool}/{what}": value for what, value in of_pool.items()}
        return columns

    # --- the status -------------------------------------------------------------------------------

    def _describe(self) -> None:
        """Update the parts of the status that change between steps."""
        status, known = self.status, self._known
        status.lag_mean, status.lag_max = self.trained.lag_mean, self.trained.lag_max
        status.lags, status.trained_tokens = self.trained.lags(self.actor_totals.pool_of), self.trained.num_tokens
        status.published = None if known.status is None else str(PolicyVersion(*known.status.newest))
        status.generated_tokens_per_s = self.actor_totals.per_s("tokens")
        status.learner = LearnerStatus(
            tokens_per_s=self._trained_per_s(),
            waits_for=known.learner_waits_for,
            publishing=known.publishing or "",
            restarts=self._num_restarts,
        )
        status.buffer = None if known.status is None else self._buffer(known.status)
        status.pools = [self._pool(name, desired) for name, desired in known.desired.items()]
        processes = list(self._dated(known.processes))
        status.actors = [self._actor(each) for each in processes if each.role == "actor"]
        status.stages = [each for each in processes if each.role == "stage"]
        status.services = [each for each in processes if each.role not in ("actor", "stage")]
        status.waits = [] if status.ended is not None else waits(status, self._wall())

    def _trained_per_s(self) -> float:
        """Return the throughput of the newest step; the value decays if the next step takes longer."""
        row = self.status.row
        step_s = (row.get("time/step") or 0.0) + (row.get("time/wait_for_batch") or 0.0)
        rate, since_s = row.get("perf/trained_tokens_per_s") or 0.0, self._clock() - self._stepped_s
        return rate * step_s / since_s if since_s > step_s else rate

    def _dated(self, processes: Iterable[ProcessStatus]) -> Iterator[ProcessStatus]:
        """Yield the processes with the time at which each process was first observed in its state."""
        seen = (*self.status.actors, *self.status.stages, *self.status.services)
        before = {(each.role, each.number): each for each in seen}
        for each in processes:
            then = before.get((each.role, each.number))
            is_same = then is not None and (then.state, then.restarts) == (each.state, each.restarts)
            yield msgspec.structs.replace(each, since_s=then.since_s if then and is_same else self._wall())

    def _pool(self, name: str, desired: int) -> PoolStatus:
        reports = [report for report in self._reports.values() if report.pool == name]
        return PoolStatus(
            name=name,
            wanted=desired,
            working=len(reports),
            running=sum(report.num_running for report in reports),
            tokens_per_s=self.actor_totals.per_s("tokens", "pool", name),
            lag_mean=_mean_of(self.status.lags.get(name, {}).items()),
            mismatch_lag0_abs=self._lag0_of_pool.get(name),
            engines=self.actor_totals.engines(name, reports),
        )

    def _actor(self, process: ProcessStatus) -> ActorStatus:
        name = actor_name(process.number)
        facts = msgspec.structs.asdict(process) | {"name": name}
        acknowledged = self.actor_totals.total("acknowledged", "actor", name)
        facts |= {"acknowledged": acknowledged, "mismatch_lag0_abs": self._lag0.get(name)}
        report, buffer = self._reports.get(name), self._known.status
        if report is None:
            return ActorStatus(**facts)
        return ActorStatus(
            **facts,
            waits_for=report.waiting,
            waits_s=report.waiting_s,
            refused=report.refused,
            running=report.num_running,
            version=str(PolicyVersion(*report.version)),
            behind=None if buffer is None else max(0, buffer.newest[1] - report.version[1]),
            tokens_per_s=self.actor_totals.per_s("tokens", "actor", name),
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
            invalid_by_sender={sender: each.count for sender, each in status.invalid_messages.items()},
            fidelity_ks=status.fidelity.ks,
            is_draining=status.draining,
        )

    # --- the file ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(self._quiet_s / 4):
            try:
                self._write_if_quiet()
            except Exception as error:  # if this thread ended, the run would count as dead
                self._warn_once("the status of the run cannot be computed", error)

    def _write_if_quiet(self) -> None:
        with self._lock:
            is_quiet = self.status.phase and self._wall() - self.status.written_s >= self._quiet_s
            if not is_quiet or self._closed.is_set():
                return
            try:
                self._known.processes = tuple(self._list_processes()) or self._known.processes
            except Exception as error:  # a process may be removed during the call; the next write retries
                log.info("cannot read the states of the processes: %s; retrying", error)
            self._write()

    def _write(self) -> RunStatus:
        self._describe()
        self.status.written_s, self.status.wall_s = self._wall(), round(self._clock() - self._started_s, 1)
        status = copy.copy(self.status)  # a display may use the copy while the next poll changes the status
        try:
            write_status(self._path, status)
        except OSError as error:  # other processes then read an old status; training continues
            self._warn_once(f"{self._path} cannot be written", error)
        try:
            self._on_write(status)
        except Exception as error:  # an error of a display must not end the run or hide another error
            self._warn_once("the status of the run cannot be shown", error)
        return status

    def _warn_once(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__}: {error}"
        if text != self._last_warning:
            log.warning("%s", text, exc_info=None if isinstance(error, OSError) else error)
        self._last_warning = text


def _mean_of(weighted: Iterable[tuple[float, int]]) -> float | None:
    """Return the weighted mean of (value, weight) pairs; None if the weights add up to 0."""
    pairs = list(weighted)
    weight = sum(each for _, each in pairs)
    return sum(value * each for value, each in pairs) / weight if weight else None
