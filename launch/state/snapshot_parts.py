"""What `Progress` knows, as the parts of a `Snapshot`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from buffer.config import BufferConfig
from common.staleness import PolicyVersion
from launch.state import snapshot as s
from launch.state.process_facts import ProcessFacts, actor_name
from launch.state.progress import Progress, mean_of
from launch.state.waits import waits


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
    """The fields of a `Snapshot` that come of the progress of a run."""
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


def _learner(progress: Progress) -> s.Learner:
    row = progress.last_row
    step_s, wait_s = row.get("time/step"), row.get("time/wait_for_batch")
    total_s = (step_s or 0.0) + (wait_s or 0.0)
    return s.Learner(
        tokens_per_s=progress.trained.value(),
        busy_frac=step_s / total_s if step_s and total_s > 0 else None,
        step_s=step_s,
        waits_for=progress.learner_waits_for,
        publishing=progress.publishing,
        restarts=progress.num_restarts,
    )


def _pools(progress: Progress) -> list[s.Pool]:
    reports, lags = progress.actors, progress.totals.lags
    return [
        s.Pool(
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


def _actors(progress: Progress, around: Around) -> list[s.Actor]:
    found = []
    newest = None if progress.status is None else progress.status.newest[1]
    for process in _of(progress, "actor"):
        name = actor_name(process.number)
        report = progress.actors.get(name)
        found.append(
            s.Actor(
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


def _process(process: ProcessFacts, around: Around, waits_for: str) -> s.Process:
    return s.Process(
        name=process.name,
        state=process.state,
        since_s=around.since_s.get(process.name, around.now_s),
        waits_for=waits_for,
        restarts=process.restarts,
        host=process.host,
        pid=process.pid,
        log=process.log,
    )


def _buffer(progress: Progress, config: BufferConfig) -> s.Buffer | None:
    status = progress.status
    if status is None:
        return None
    return s.Buffer(
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
