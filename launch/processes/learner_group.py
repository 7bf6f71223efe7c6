"""LearnerGroup: the processes of the learner, one per rank, restarted as a group if one of them dies or hangs."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, cast

import msgspec
import ray
from ray.exceptions import RayTaskError

from leeway.common.files import leftovers
from leeway.common.process import UNUSED, fast_imports
from leeway.common.rpc.auth import LOOPBACK
from leeway.common.run import STARTUP_S, RunContext
from leeway.launch.checks import Plan
from leeway.launch.observe.metrics import Rows
from leeway.launch.observe.status import PollResult, ProcessStatus
from leeway.launch.pools import stage_pools
from leeway.launch.processes.placement import ON_GPU, PLACEMENT_S, PlacementGroup, spawn
from leeway.launch.processes.role_process import (
    MAX_RESTARTS,
    Check,
    Notify,
    Restarts,
    Role,
    RoleProcess,
    RunFailed,
    address_here,
    done,
    failure,
    reason,
    results,
)
from leeway.learner.checkpoint_files import TrainingProgress, newest_progress, steps_in
from leeway.learner.config import LearnerSections
from leeway.learner.coordinator import CoordinatorFailed
from leeway.learner.mesh import GpuFailed, StageLost

GRACE_S = 3.0
"""Seconds to wait for more failures after the first one: a neighbour of a dead rank often fails before the death of
that rank is detected."""


@dataclass(frozen=True)
class StagePoll:
    """The reply of a stage to a poll."""

    waiting_for: str
    """Reason that training waits; empty while training computes."""
    publishing: str
    """Reason for a delayed publication of weights; empty if nothing delays it."""
    leftovers: Sequence[str] = ()  # one sentence per file that cannot be removed


class StageRole(Role):
    """Hosts one pipeline stage."""

    def __init__(self, log: Path) -> None:
        """Load the compute libraries. The import takes seconds, in which the services start."""
        super().__init__(log)
        with fast_imports(*UNUSED):
            import leeway.learner.stage  # noqa: F401 -- for `setup`

    def rendezvous(self, host: str | None) -> str:
        """Return a free TCP address of this machine; `host` defaults to this machine's address in the Ray cluster."""
        host = address_here() if host is None else host
        is_v6 = ":" in host
        with socket.create_server((host, 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET) as probe:
            return f"tcp://{f'[{host}]' if is_v6 else host}:{probe.getsockname()[1]}"

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Build the stage. The call is collective: all stages must make it at the same time."""
        from leeway.learner.stage import Stage

        self._stage = Stage(context, rank, rendezvous)
        self._stage.setup()

    def run(self) -> None:
        self._stage.run()

    def poll(self) -> StagePoll:
        return StagePoll(self._stage.waiting_for, self._stage.publishing, [*leftovers.values()])

    def request_stop(self) -> None:
        self._stage.request_stop()

    def export(self, folder: Path) -> None:
        self._stage.export(folder)


class Phase(Enum):
    """Phase of the group: the call that all ranks execute or have completed."""

    RENDEZVOUS = auto()
    SETTING_UP = auto()
    READY = auto()
    RUNNING = auto()
    FINISHED = auto()
    EXPORTING = auto()
    EXPORTED = auto()


@dataclass(frozen=True)
class _Loss:
    stages: tuple[RoleProcess, ...]
    why: str

    @property
    def names(self) -> str:
        return ", ".join(stage.name for stage in self.stages)

    @property
    def logs(self) -> str:
        return ", ".join(str(stage.log) for stage in self.stages)


class LearnerGroup:
    """Starts the ranks, monitors them, and restarts all ranks from the newest checkpoint if a rank is lost.

        rendezvous -> setting up -> ready -> running -> finished -> exporting -> exported
           ^--------------- lost: all are killed and restarted ----------'

    A rank is lost if its process died, its GPU failed, it timed out in a collective, or it was not ready in time after
    a restart. Any other error is permanent and ends the run. More than `MAX_RESTARTS` restarts in a row without a new
    checkpoint also end the run.
    """

    def __init__(self, plan: Plan, notify: Notify, check: Check = lambda: None) -> None:
        self._plan = plan
        self._config = plan.config.learner
        self._notify = notify
        self._check = check
        self._context: RunContext[LearnerSections] | None = None
        self._stages: list[RoleProcess] = []
        self._state = Phase.RENDEZVOUS
        self._calls: list[tuple[RoleProcess, Any]] = []
        self._entered_s = 0.0
        self._failed_s: float | None = None
        self._stop_requested = False
        self._rows: Rows | None = None
        self._reported: set[str] = set()
        self._resumed: TrainingProgress | None = None
        self._restarts = Restarts(MAX_RESTARTS)
        self._checkpoint_at_loss = -1
        self._pools = stage_pools(plan.config)
        self._reserved = [pool.bundle for pool in self._pools for _ in range(pool.count)]
        """Resources of each rank."""

    # --- life -------------------------------------------------------------------------------------

    def request_placement(self) -> None:
        """Request resources for all ranks, without blocking; restarts keep the resources."""
        self.placement = PlacementGroup(self._reserved, " and ".join(pool.describe() for pool in self._pools))

    def facts(self) -> list[ProcessStatus]:
        """Return the status of each rank, without blocking."""
        state = self._state.name.lower().replace("_", " ")
        shown = {Phase.RUNNING: "working", Phase.EXPORTED: "finished"}.get(self._state, state)
        return [msgspec.structs.replace(stage.facts(), state=shown) for stage in self._stages]

    def spawn(self) -> None:
        """Start the processes of all ranks, which load their libraries."""
        for rank, reserved in enumerate(self._reserved):
            log, on = self._plan.folder.log("stage", rank), self.placement.reservation(rank)
            variables = {**(ON_GPU if reserved.get("GPU") else {}), **self._plan.config.launch.env}
            handle = spawn(StageRole, log, on=on, concurrency=4, variables=variables)
            self._stages.append(RoleProcess("stage", rank, handle, log, self._restarts))
        first, host = self._stages[0], None if self._plan.is_cluster else LOOPBACK
        self._enter(Phase.RENDEZVOUS, [(first, first.handle.rendezvous.remote(host))])

    def start(self, context: RunContext[LearnerSections], deadline: float) -> list[tuple[RoleProcess, Any]]:
        """Set up all ranks; return the calls that end when the ranks are ready. Raise RunFailed if rank 0 fails."""
        self._context = context
        (rendezvous,) = results(self._calls, "to return the rendezvous address", deadline)
        self._set_up(rendezvous)
        return list(self._calls)

    def begin(self) -> None:
        if self._stop_requested:
            self._send_stop()
        self._rows = Rows(self._plan.folder.metrics, at_end=True)  # `setup` removed the rows of steps to repeat
        self._enter(Phase.RUNNING, [(stage, stage.handle.run.remote()) for stage in self._stages])

    def watch(self) -> None:
        """Enter the next phase when all ranks have completed the current one; restart all ranks if a rank is lost.

        Blocks only briefly. Raise RunFailed if a rank failed with a permanent error, or if ranks were lost too often.
        """
        self._check()
        self._check_placement()
        loss = self._find_loss()
        if loss is not None:
            self._restart(loss)
        elif self._calls and all(done(call) for _, call in self._calls):
            self._advance()

    def poll(self, timeout_s: float) -> PollResult:
        """Return new metric rows and the state of the learner; the next poll returns a late reply."""
        rows = [] if self._rows is None else list(self._rows.read())
        if self._state in (Phase.RENDEZVOUS, Phase.SETTING_UP, Phase.READY):
            return PollResult(rows, learner_waits_for="the restart of its stages", publishing="")
        resumed, self._resumed = self._resumed, None
        result = PollResult(rows)
        coordinator = self._stages[self._config.num_stages - 1]
        reply: StagePoll | None = coordinator.ask("poll", timeout_s, self._notify)
        if reply is not None:
            result = PollResult(rows, reply.waiting_for, reply.publishing)
            for text in set(reply.leftovers) - self._reported:
                self._reported.add(text)
                self._notify("leftover", text)
        return result if resumed is None else replace(result, resumed_at=resumed.step, resumed_version=resumed.version)

    @property
    def num_restarts(self) -> int:
        return self._restarts.total

    @property
    def are_finished(self) -> bool:
        return self._state in (Phase.FINISHED, Phase.EXPORTING, Phase.EXPORTED)

    def request_stop(self) -> None:
        """Let the learner write a checkpoint and stop after its current step, or before the first step of a restart."""
        self._stop_requested = True
        if self._state is Phase.RUNNING:
            self._send_stop()

    def export(self, folder: Path) -> None:
        """Let all ranks export a Hugging Face model folder after their last step; raise RunFailed as `watch` does."""
        while self._state is not Phase.EXPORTED:
            if self._state is Phase.FINISHED:
                self._enter(Phase.EXPORTING, [(stage, stage.handle.export.remote(folder)) for stage in self._stages])
            self.watch()
            time.sleep(0.05)

    def kill(self) -> None:
        for stage in self._stages:
            stage.kill()
        self._stages, self._calls = [], []

    # --- states -----------------------------------------------------------------------------------

    def _enter(self, state: Phase, calls: list[tuple[RoleProcess, Any]]) -> None:
        self._state, self._calls = state, calls
        self._entered_s = time.monotonic()
        self._failed_s = None

    def _advance(self) -> None:
        if self._state is Phase.RENDEZVOUS:
            self._set_up(ray.get(self._calls[0][1]))
        elif self._state is Phase.SETTING_UP:
            self._enter(Phase.READY, [])
            if self.num_restarts:
                # the learner renamed damaged checkpoints, and loaded the newest of the other checkpoints
                resumed = newest_progress(self._plan.folder.checkpoints)
                self._resumed = resumed or TrainingProgress(step=0, version=0, incarnation=0)
                self._notify("resumed", f"the learner resumes from step {self._resumed.step}")
                self.begin()
        else:
            self._enter(Phase.FINISHED if self._state is Phase.RUNNING else Phase.EXPORTED, [])

    def _check_placement(self) -> None:
        """Raise RunFailed if restarting ranks have waited too long for a replacement of a lost host."""
        is_starting, placement = self._state in (Phase.RENDEZVOUS, Phase.SETTING_UP), self.placement
        if is_starting and not placement.is_placed and placement.missing_s > PLACEMENT_S:
            raise RunFailed(f"the learner cannot restart: {placement.shortage()}")

    def _set_up(self, rendezvous: str) -> None:
        calls = [
            (stage, stage.handle.setup.remote(self._context_of(stage.number), stage.number, rendezvous))
            for stage in self._stages
        ]
        self._enter(Phase.SETTING_UP, calls)

    def _context_of(self, rank: int) -> RunContext[LearnerSections]:
        assert self._context is not None, "start() comes first"
        reserved, config = self._reserved[rank], cast("Any", self._context.config)
        own = {"cpus": reserved.get("CPU", 0.0), "gpus": reserved.get("GPU", 0.0)}
        learner = self._config.model_copy(update=own)
        return replace(self._context, config=config.model_copy(update={"learner": learner}))

    def _send_stop(self) -> None:
        for stage in self._stages:
            stage.handle.request_stop.remote()

    # --- loss -------------------------------------------------------------------------------------

    def _find_loss(self) -> _Loss | None:
        """Return the lost ranks and the reason; None if no loss is known yet. Raise RunFailed as `watch` does."""
        ended = [(stage, call) for stage, call in self._calls if done(call)]
        failures = [(stage, error) for stage, call in ended if (error := failure(call)) is not None]
        pending = [stage for stage, call in self._calls if not any(stage is each for each, _ in ended)]
        now = time.monotonic()
        if not failures:
            is_late = self._state is not Phase.RUNNING and now - self._entered_s > STARTUP_S
            return self._timed_out(pending) if pending and is_late else None
        self._failed_s = now if self._failed_s is None else self._failed_s
        dead = [(stage, error) for stage, error in failures if not isinstance(error, RayTaskError)]
        if dead:
            return _Loss(tuple(stage for stage, _ in dead), f"died ({reason(dead[0][1])})")
        faulty = [(stage, error) for stage, error in failures if _is_a(error, GpuFailed)]
        if faulty:  # the failed GPUs caused the failures of other ranks
            return _Loss(tuple(stage for stage, _ in faulty), f"lost its GPU ({reason(faulty[0][1])})")
        if pending and now - self._failed_s < GRACE_S:
            return None
        own = [(stage, error) for stage, error in failures if not _is_a(error, StageLost)]
        if own:
            # prefer the coordinator's own error, because CoordinatorFailed on other ranks lacks the coordinator's log
            stage, error = min(own, key=lambda each: _is_a(each[1], CoordinatorFailed))
            raise RunFailed(f"{stage.name} failed: {reason(error)}; {stage.log_hint}")
        stage, error = failures[0]
        if pending:
            return _Loss(tuple(pending), f"did not respond to the other ranks ({reason(error)})")
        return _Loss((stage,), f"lost the connection to the other ranks ({reason(error)})")

    def _timed_out(self, pending: Sequence[RoleProcess]) -> _Loss:
        """Return the ranks that timed out while they restarted as a loss; raise RunFailed for any other timeout."""
        loss = _Loss(tuple(pending), f"did not become ready again within {STARTUP_S:g} s")
        if self.num_restarts and self._state in (Phase.RENDEZVOUS, Phase.SETTING_UP):
            return loss
        raise RunFailed(f"timed out after {STARTUP_S:g} s waiting for {loss.names}; see {loss.logs}")

    def _restart(self, loss: _Loss) -> None:
        newest = max(steps_in(self._plan.folder.checkpoints), default=-1)
        if newest > self._checkpoint_at_loss:
            self._checkpoint_at_loss = newest
            self._restarts.reset()
        if self._restarts.are_exhausted:
            times = self._restarts.in_a_row
            tried = f", and {times} restarts in a row led to no new checkpoint" if times else ""
            raise RunFailed(f"{loss.names} {loss.why}{tried}; see {loss.logs}")
        start = f"checkpoint of step {newest}" if newest >= 0 else "beginning (no checkpoint exists)"
        self._notify("restart", f"{loss.names} {loss.why}: all stages restart from the {start}; see {loss.logs}")
        self._restarts.count()
        self.kill()
        self.spawn()


def _is_a(error: Exception, kind: type[Exception]) -> bool:
    return isinstance(getattr(error, "cause", None), kind)
