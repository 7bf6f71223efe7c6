"""LearnerGroup: the processes of the learner, one per rank, started again as a whole where one dies or hangs."""

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

from common.files import leftovers
from common.process import uncollected
from common.run import STARTUP_S, RunContext
from launch.checks import Plan
from launch.observe.metrics import Rows
from launch.observe.status import PollResult, ProcessStatus
from launch.pools import stage_pools
from launch.processes.placement import ON_GPU, PLACEMENT_S, PlacementGroup, spawn
from launch.processes.role_process import (
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
from learner.checkpoint_files import TrainingProgress, newest_progress, steps_in
from learner.config import LearnerSections
from learner.coordinator import CoordinatorFailed
from learner.mesh import GpuFailed, StageLost

GRACE_S = 3.0
"""Time after the first failure for the others to report, or be seen dead: the first to notice a death is often a
neighbour."""


@dataclass(frozen=True)
class StagePoll:
    """What a stage reports when it is polled."""

    waiting_for: str
    """Whom training waits for now; empty while it computes."""
    publishing: str
    """What keeps published weights from being on disk; empty where nothing does."""
    leftovers: Sequence[str] = ()  # what cannot be removed, a sentence each


class StageRole(Role):
    """Hosts one pipeline stage."""

    def __init__(self, log: Path) -> None:
        """Load what computes, which takes seconds: meanwhile the services start."""
        super().__init__(log)
        with uncollected():
            import learner.stage  # noqa: F401 -- for `setup`

    def rendezvous(self, host: str | None) -> str:
        """Return a free address on this machine, by default as the Ray cluster knows it."""
        host = address_here() if host is None else host
        is_v6 = ":" in host
        with socket.create_server((host, 0), family=socket.AF_INET6 if is_v6 else socket.AF_INET) as probe:
            return f"tcp://{f'[{host}]' if is_v6 else host}:{probe.getsockname()[1]}"

    def setup(self, context: RunContext[LearnerSections], rank: int, rendezvous: str) -> None:
        """Build the stage; every stage must be in this call at the same time."""
        from learner.stage import Stage

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
    """Of all ranks together; each names the call that they are in, or have ended."""

    MEETING = auto()
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
    def who(self) -> str:
        return ", ".join(stage.name for stage in self.stages)

    @property
    def logs(self) -> str:
        return ", ".join(str(stage.log) for stage in self.stages)


class LearnerGroup:
    """Starts the ranks, watches them, and restarts all from the newest checkpoint if one is lost.

        meeting -> setting up -> ready -> running -> finished -> exporting -> exported
           ^------------- lost: killed, and started again ------------'

    Lost is a process that died, one whose GPU failed, a rank that timed out in a collective, and one that is not ready
    again in time. Every other error would come again and ends the run. At most `MAX_RESTARTS` restarts in a row
    lead to no new checkpoint.
    """

    def __init__(self, plan: Plan, notify: Notify, check: Check = lambda: None) -> None:
        self._plan = plan
        self._config = plan.config.learner
        self._notify = notify
        self._check = check
        self._context: RunContext[LearnerSections] | None = None
        self._stages: list[RoleProcess] = []
        self._state = Phase.MEETING
        self._calls: list[tuple[RoleProcess, Any]] = []
        self._entered_s = 0.0
        self._failed_s: float | None = None
        self._stop_requested = False
        self._rows: Rows | None = None
        self._told_of: set[str] = set()
        self._resumed: TrainingProgress | None = None
        self._restarts = Restarts(MAX_RESTARTS)
        self._checkpoint_at_loss = -1
        self._pools = stage_pools(plan.config)
        self._reserved = [pool.bundle for pool in self._pools for _ in range(pool.count)]
        """By each rank."""

    # --- life -------------------------------------------------------------------------------------

    def ask_for_places(self) -> None:
        """Reserve the places of all ranks, which they keep over restarts; returns at once."""
        self.placement = PlacementGroup(self._reserved, " and ".join(pool.describe() for pool in self._pools))

    def facts(self) -> list[ProcessStatus]:
        """Return the status of each rank; never blocks."""
        state = self._state.name.lower().replace("_", " ")
        shown = {Phase.RUNNING: "working", Phase.EXPORTED: "finished"}.get(self._state, state)
        return [msgspec.structs.replace(stage.facts(), state=shown) for stage in self._stages]

    def spawn(self) -> None:
        """Start the processes of all ranks; they load what they need."""
        for rank, reserved in enumerate(self._reserved):
            log, on = self._plan.folder.log("stage", rank), self.placement.reservation(rank)
            variables = {**(ON_GPU if reserved.get("GPU") else {}), **self._plan.config.launch.env}
            handle = spawn(StageRole, log, on=on, concurrency=4, variables=variables)
            self._stages.append(RoleProcess("stage", rank, handle, log, self._restarts))
        first = self._stages[0]
        self._enter(Phase.MEETING, [(first, first.handle.rendezvous.remote(self._plan.host_here))])

    def start(self, context: RunContext[LearnerSections], deadline: float) -> list[tuple[RoleProcess, Any]]:
        """Set up all ranks; return the calls that end then. RunFailed if the first rank did not start."""
        self._context = context
        (rendezvous,) = results(self._calls, "to name a meeting point", deadline)
        self._set_up(rendezvous)
        return list(self._calls)

    def begin(self) -> None:
        if self._stop_requested:
            self._tell_to_stop()
        self._rows = Rows(self._plan.folder.metrics, at_end=True)  # which the coordinator has cut to where it stands
        self._enter(Phase.RUNNING, [(stage, stage.handle.run.remote()) for stage in self._stages])

    def watch(self) -> None:
        """Enter the next state once all ranks have ended this one; restart what is lost. Never blocks for long.

        RunFailed if a rank failed with an error that would come again, or was lost too often.
        """
        self._check()
        self._check_place()
        loss = self._find_loss()
        if loss is not None:
            self._start_again(loss)
        elif self._calls and all(done(call) for _, call in self._calls):
            self._advance()

    def poll(self, patience_s: float) -> PollResult:
        """Return the learner's news; a late answer is taken at the next poll."""
        rows = [] if self._rows is None else list(self._rows.read())
        if self._state in (Phase.MEETING, Phase.SETTING_UP, Phase.READY):
            return PollResult(rows, learner_waits_for="its stages, which are started again", publishing="")
        resumed, self._resumed = self._resumed, None
        news = PollResult(rows)
        coordinator = self._stages[self._config.num_stages - 1]
        answer: StagePoll | None = coordinator.ask("poll", patience_s, self._notify)
        if answer is not None:
            news = PollResult(rows, answer.waiting_for, answer.publishing)
            for text in set(answer.leftovers) - self._told_of:
                self._told_of.add(text)
                self._notify("leftover", text)
        return news if resumed is None else replace(news, resumed_at=resumed.step, resumed_version=resumed.version)

    @property
    def num_restarts(self) -> int:
        return self._restarts.total

    @property
    def are_finished(self) -> bool:
        return self._state in (Phase.FINISHED, Phase.EXPORTING, Phase.EXPORTED)

    def request_stop(self) -> None:
        """End after the step at hand, with a checkpoint; a learner that is being restarted, before its first."""
        self._stop_requested = True
        if self._state is Phase.RUNNING:
            self._tell_to_stop()

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, all ranks together after their last step; RunFailed as `watch`."""
        while self._state is not Phase.EXPORTED:
            if self._state is Phase.FINISHED:
                self._enter(Phase.EXPORTING, [(stage, stage.handle.export.remote(folder)) for stage in self._stages])
            self.watch()
            time.sleep(0.05)

    def kill(self) -> None:
        for stage in self._stages:
            ray.kill(stage.handle, no_restart=True)
        self._stages, self._calls = [], []

    # --- states -----------------------------------------------------------------------------------

    def _enter(self, state: Phase, calls: list[tuple[RoleProcess, Any]]) -> None:
        self._state, self._calls = state, calls
        self._entered_s = time.monotonic()
        self._failed_s = None

    def _advance(self) -> None:
        if self._state is Phase.MEETING:
            self._set_up(ray.get(self._calls[0][1]))
        elif self._state is Phase.SETTING_UP:
            self._enter(Phase.READY, [])
            if self.num_restarts:
                # the learner has set aside what it could not read, so this is where it stands
                resumed = newest_progress(self._plan.folder.checkpoints)
                self._resumed = resumed or TrainingProgress(step=0, version=0, incarnation=0)
                self._notify("resumed", f"the learner trains on from step {self._resumed.step}")
                self.begin()
        else:
            self._enter(Phase.FINISHED if self._state is Phase.RUNNING else Phase.EXPORTED, [])

    def _check_place(self) -> None:
        """RunFailed if restarted ranks have waited too long for a host in place of a lost one."""
        is_starting, place = self._state in (Phase.MEETING, Phase.SETTING_UP), self.placement
        if is_starting and not place.is_placed and place.missing_s > PLACEMENT_S:
            raise RunFailed(f"the learner cannot start again: {place.shortage()}")

    def _set_up(self, rendezvous: str) -> None:
        told = [
            (stage, stage.handle.setup.remote(self._context_of(stage.number), stage.number, rendezvous))
            for stage in self._stages
        ]
        self._enter(Phase.SETTING_UP, told)

    def _context_of(self, rank: int) -> RunContext[LearnerSections]:
        assert self._context is not None, "start() comes first"
        reserved, config = self._reserved[rank], cast("Any", self._context.config)
        own = {"cpus": reserved.get("CPU", 0.0), "gpus": reserved.get("GPU", 0.0)}
        learner = self._config.model_copy(update=own)
        return replace(self._context, config=config.model_copy(update={"learner": learner}))

    def _tell_to_stop(self) -> None:
        for stage in self._stages:
            stage.handle.request_stop.remote()

    # --- loss -------------------------------------------------------------------------------------

    def _find_loss(self) -> _Loss | None:
        """Return the lost ranks, and why; None if none is, or it is too early to say. RunFailed as `watch`."""
        ended = [(stage, call) for stage, call in self._calls if done(call)]
        failures = [(stage, error) for stage, call in ended if (error := failure(call)) is not None]
        silent = [stage for stage, call in self._calls if not any(stage is each for each, _ in ended)]
        now = time.monotonic()
        if not failures:
            is_late = self._state is not Phase.RUNNING and now - self._entered_s > STARTUP_S
            return self._late(silent) if silent and is_late else None
        self._failed_s = now if self._failed_s is None else self._failed_s
        dead = [(stage, error) for stage, error in failures if not isinstance(error, RayTaskError)]
        if dead:
            return _Loss(tuple(stage for stage, _ in dead), f"died ({reason(dead[0][1])})")
        faulty = [(stage, error) for stage, error in failures if _is_a(error, GpuFailed)]
        if faulty:  # what the others make of it, or still wait for, is no better reason
            return _Loss(tuple(stage for stage, _ in faulty), f"lost its GPU ({reason(faulty[0][1])})")
        if silent and now - self._failed_s < GRACE_S:
            return None
        own = [(stage, error) for stage, error in failures if not _is_a(error, StageLost)]
        if own:
            # a rank that only heard that the coordinator gave up has its words, but neither its error nor its log
            stage, error = min(own, key=lambda each: _is_a(each[1], CoordinatorFailed))
            raise RunFailed(f"{stage.name} failed: {reason(error)}; {stage.see}")
        stage, error = failures[0]
        if silent:
            return _Loss(tuple(silent), f"did not answer the others ({reason(error)})")
        return _Loss((stage,), f"lost the others ({reason(error)})")

    def _late(self, silent: Sequence[RoleProcess]) -> _Loss:
        """Return the loss of ranks that have not ended a call in time; RunFailed if it is none of a restart."""
        late = _Loss(tuple(silent), f"did not get ready again within {STARTUP_S:g} s")
        if self.num_restarts and self._state in (Phase.MEETING, Phase.SETTING_UP):
            return late
        raise RunFailed(f"waited {STARTUP_S:g} s for {late.who} and gave up; see {late.logs}")

    def _start_again(self, loss: _Loss) -> None:
        newest = max(steps_in(self._plan.folder.checkpoints), default=-1)
        if newest > self._checkpoint_at_loss:
            self._checkpoint_at_loss = newest
            self._restarts.prove()
        if self._restarts.are_spent:
            times = self._restarts.in_a_row
            tried = f", and {times} restarts in a row led to no new checkpoint" if times else ""
            raise RunFailed(f"{loss.who} {loss.why}{tried}; see {loss.logs}")
        start = f"checkpoint of step {newest}" if newest >= 0 else "beginning, for there is no checkpoint"
        self._notify(
            "restart", f"{loss.who} {loss.why}: all stages are started again from the {start}; see {loss.logs}"
        )
        self._restarts.count()
        self.kill()
        self.spawn()


def _is_a(error: Exception, kind: type[Exception]) -> bool:
    return isinstance(getattr(error, "cause", None), kind)
