"""The processes of a run: started together, watched, restarted where that loses nothing, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.report import ActorReport
from buffer.client import BufferClient
from buffer.protocol import Status
from launch.checks import Plan
from launch.roles import ActorRole, BufferRole, StageRole
from launch.spawn import CrewError, actor_spec, spawn, stage_spec, start_ray
from weight_sync.serving import ModelFacts

MAX_BUFFER_RESTARTS = 3


@dataclass
class News:
    """What the roles reported at one poll."""

    steps: list[Mapping[str, Any]] = field(default_factory=list)
    learner_waits_for: str = ""
    actors: list[ActorReport] = field(default_factory=list)
    status: Status | None = None


@dataclass
class _Member:
    """A role's process."""

    role: str
    number: int
    handle: Any
    log: Path
    starting: Any = None
    """Of an actor: the call that ends when it is ready."""
    running: Any = None
    """The call that ends when the role's work does; None before the work begins."""
    restarts: int = 0
    lost: str = ""
    """Why it was given up, where it was."""

    @property
    def name(self) -> str:
        return f"{self.role}.{self.number}"


class Crew:
    """Starts, watches and ends every process of a run.

    States of a member: started -> running -> finished, or running -> died -> started again
    (actors up to actors.max_restarts times, the buffer service a few times), or given up.
    """

    def __init__(
        self, plan: Plan, model_path: Path, model: ModelFacts, serving_path: Path, notify: Callable[[str, str], None]
    ) -> None:
        """Nothing is started yet.

        Args:
            plan: the checked config and the run's folder.
            model_path: the checkpoint to train.
            model: facts of that checkpoint.
            serving_path: the folder that actors load, which is version 0.
            notify: called with (kind, text) whenever something worth an event happens.
        """
        self._plan = plan
        self._config = plan.config
        self._folder = plan.folder
        self._model_path = model_path
        self._model = model
        self._serving_path = serving_path
        self._notify = notify
        self._buffer: _Member | None = None
        self._client: BufferClient | None = None
        self._address = ""
        self._stages: list[_Member] = []
        self._actors: list[_Member] = []
        self._asked: dict[str, tuple[Any, float]] = {}

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and every role; returns when all are ready.

        Raises:
            CrewError: a role failed to start, or did not within launch.startup_timeout_s.
        """
        start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        self._start_buffer(deadline)
        stages = self._start_stages(deadline)
        self._actors = [self._start_actor(number) for number in range(self._config.actors.num_actors)]
        for member, pending in [*stages, *[(actor, actor.starting) for actor in self._actors]]:
            self._await(pending, member, deadline, "to be ready")

    def begin(self) -> None:
        """Begin to learn and to generate."""
        self.begin_learning()
        for actor in self._actors:
            actor.running = actor.handle.run.remote()

    def begin_learning(self) -> None:
        """Let the stages publish version 0 and ask for the first batch."""
        for stage in self._stages:
            if stage.running is None:
                stage.running = stage.handle.run.remote()

    def _start_buffer(self, deadline: float) -> None:
        handle = spawn(
            BufferRole,
            self._folder.log("buffer", 0),
            self._config.buffer,
            self._plan.run_facts(self._model),
            self._folder.buffer,
            cpus=0.0,
            gpus=0.0,
            threads=1,
            concurrency=3,
        )
        restarts = self._buffer.restarts if self._buffer is not None else 0
        member = _Member("buffer", 0, handle, self._folder.log("buffer", 0), restarts=restarts)
        self._address = self._await(handle.bind.remote(), member, deadline, "to open its store")
        member.running = handle.serve.remote()
        self._buffer = member
        if self._client is None:
            self._client = BufferClient(
                self._address, run_id=self._plan.run_id, role="launch", name="launch", config=self._config.buffer
            )
            self._client.connect()

    def _start_stages(self, deadline: float) -> list[tuple[_Member, Any]]:
        config = self._config.learner
        for rank in range(config.num_stages):
            path = self._folder.log("stage", rank)
            handle = spawn(
                StageRole, path, cpus=config.cpus, gpus=config.gpus, threads=config.num_threads, concurrency=4
            )
            self._stages.append(_Member("stage", rank, handle, path))
        first = self._stages[0]
        rendezvous = self._await(first.handle.rendezvous.remote(), first, deadline, "to name a meeting point")
        specs = [
            stage_spec(self._plan, stage.number, self._model_path, self._address, rendezvous) for stage in self._stages
        ]
        return [(stage, stage.handle.setup.remote(spec)) for stage, spec in zip(self._stages, specs, strict=True)]

    def _start_actor(self, number: int) -> _Member:
        config = self._config.actors
        path = self._folder.log("actor", number)
        spec = actor_spec(self._plan, number, self._serving_path, self._model_path, self._address)
        handle = spawn(
            ActorRole, path, spec, cpus=config.cpus, gpus=config.gpus, threads=config.num_threads, concurrency=16
        )
        return _Member("actor", number, handle, path, starting=handle.start.remote())

    def _await(self, pending: object, member: _Member, deadline: float, what: str) -> Any:  # noqa: ANN401
        limit = self._config.launch.startup_timeout_s
        try:
            return ray.get(pending, timeout=max(0.1, deadline - time.monotonic()))
        except GetTimeoutError:
            raise CrewError(
                f"waited {limit:g} s for {member.name} {what}; see {member.log}, or raise launch.startup_timeout_s"
            ) from None
        except (RayActorError, RayTaskError) as error:
            raise CrewError(f"{member.name} failed: {_reason(error)}; see {member.log}") from None

    # --- watch ------------------------------------------------------------------------------------

    def poll(self) -> News:
        """Ask every role for news and restart what died.

        Raises:
            CrewError: a role that the run cannot go on without is gone.
        """
        self._watch_buffer()
        news = News()
        for stage in self._stages:
            self._check_alive(stage)
        answer = self._ask(self._stages[-1], "poll")
        if answer is not None:
            news.steps, news.learner_waits_for = list(answer[0]), answer[1]
        for actor in list(self._actors):
            if not actor.lost and self._watch_actor(actor):
                report = self._ask(actor, "report")
                if report is not None:
                    self._check_task(actor, report)
                    news.actors.append(report)
        if all(actor.lost for actor in self._actors):
            last = self._actors[-1]
            raise CrewError(f"no actor is left: {last.name} was given up: {last.lost}; see {last.log}")
        if self._client is not None:
            status = self._client.status()
            try:
                news.status = status.result(timeout=self._config.launch.silence_timeout_s)
            except TimeoutError:
                self._notify("silent", f"the buffer service at {self._address} does not answer")
        return news

    def _check_task(self, actor: _Member, report: ActorReport) -> None:
        if report.task_fingerprint != self._plan.task.fingerprint:
            raise CrewError(
                f"{actor.name} sees other prompts than this command does, so its groups would be mixed up: "
                f"its files or its reasoning-gym differ from those here; see {actor.log}"
            )

    def _ask(self, member: _Member, method: str) -> Any:  # noqa: ANN401
        """Call a method without waiting long: an unanswered call stays pending and is looked at next time."""
        pending, asked_at = self._asked.pop(member.name, (None, 0.0))
        if pending is None:
            pending, asked_at = getattr(member.handle, method).remote(), time.monotonic()
        ready, _ = ray.wait([pending], timeout=0.2)
        if ready:
            try:
                return ray.get(ready[0])
            except RayActorError:
                return None  # the next look at its `running` call says why
        silence = time.monotonic() - asked_at
        if silence > self._config.launch.silence_timeout_s:
            self._notify("silent", f"{member.name} has not answered for {silence:.0f} s; see {member.log}")
            asked_at = time.monotonic()
        self._asked[member.name] = (pending, asked_at)
        return None

    def _check_alive(self, stage: _Member) -> None:
        if stage.running is None or not _done(stage.running):
            return
        try:
            ray.get(stage.running)
        except (RayActorError, RayTaskError) as error:
            raise CrewError(f"{stage.name} failed: {_reason(error)}; see {stage.log}") from None

    def _watch_buffer(self) -> None:
        buffer = self._buffer
        if buffer is None or not _done(buffer.running):
            return
        reason = _outcome(buffer.running)
        if buffer.restarts >= MAX_BUFFER_RESTARTS:
            raise CrewError(f"the buffer service ended {buffer.restarts + 1} times, last: {reason}; see {buffer.log}")
        buffer.restarts += 1
        self._notify("restart", f"the buffer service ended ({reason}) and is started again on the same store")
        self._start_buffer(time.monotonic() + self._config.launch.startup_timeout_s)

    def _watch_actor(self, actor: _Member) -> bool:
        """True where the actor works and can be asked for news; what died is started again."""
        pending = actor.starting if actor.running is None else actor.running
        if not _done(pending):
            return actor.running is not None
        reason = _outcome(pending)
        if not reason:
            if actor.running is None:
                actor.running = actor.handle.run.remote()
            return True  # else it finished, because the run drains
        if actor.restarts >= self._config.actors.max_restarts:
            actor.lost = reason
            self._notify("given_up", f"{actor.name} is given up after {actor.restarts} restarts: {reason}")
            return False
        self._notify("restart", f"{actor.name} died ({reason}) and is started again; its leases are issued anew")
        self._asked.pop(actor.name, None)
        ray.kill(actor.handle, no_restart=True)  # it may have failed without dying
        fresh = self._start_actor(actor.number)
        fresh.restarts = actor.restarts + 1
        self._actors[self._actors.index(actor)] = fresh
        return False

    # --- evaluate, drain, end ---------------------------------------------------------------------

    def learning_is_over(self) -> bool:
        """True when every stage has returned from its last step."""
        return all(stage.running is not None and _done(stage.running) for stage in self._stages)

    def on_actors(self, method: str, arguments: Sequence[object], timeout_s: float) -> list[Any]:
        """Call a method of the first len(arguments) ready actors, one argument each, at the same time.

        Raises:
            CrewError: an actor failed or took too long.
        """
        calls = [
            (actor, getattr(actor.handle, method).remote(argument))
            for actor, argument in zip(self.ready_actors(), arguments, strict=False)
        ]
        deadline = time.monotonic() + timeout_s
        return [self._await(call, actor, deadline, f"to {method}") for actor, call in calls]

    def ready_actors(self) -> list[_Member]:
        """Actors that are started; at least one.

        Raises:
            CrewError: none is, and none became so within launch.startup_timeout_s.
        """
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        while True:
            alive = [actor for actor in self._actors if not actor.lost]
            ready = [actor for actor in alive if _done(actor.starting) and not _outcome(actor.starting)]
            if ready:
                return ready
            if not alive or time.monotonic() > deadline:
                last = self._actors[-1]
                raise CrewError(f"no actor is ready, the last is {last.name}; see {last.log}")
            time.sleep(0.2)

    def request_stop(self) -> None:
        """Ask the learner to end after the step at hand, with a checkpoint, and close admission."""
        for stage in self._stages:
            stage.handle.request_stop.remote()
        self.drain()

    def drain(self) -> None:
        """Grant no further leases."""
        if self._client is not None:
            self._client.drain().result(timeout=self._config.buffer.give_up_after_s)

    def status(self) -> Status:
        """The ledger and what is in flight."""
        if self._client is None:
            raise CrewError("the buffer service was not started")
        return self._client.status().result(timeout=self._config.buffer.give_up_after_s)

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; all stages take part."""
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        for stage, pending in [(stage, stage.handle.export.remote(folder)) for stage in self._stages]:
            self._await(pending, stage, deadline, "to export")

    def stop(self) -> None:
        """End every process, politely where there is time. Safe to call at any moment, more than once."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if not ray.is_initialized():
            return
        deadline = time.monotonic() + min(15.0, self._config.launch.shutdown_timeout_s)
        polite = [actor.handle.stop.remote() for actor in self._actors if not actor.lost]
        if self._buffer is not None:
            polite += [self._buffer.handle.stop.remote(), self._buffer.running]
        ray.wait(polite, num_returns=len(polite), timeout=max(0.1, deadline - time.monotonic())) if polite else None
        for member in [*self._actors, *self._stages, *([self._buffer] if self._buffer else [])]:
            ray.kill(member.handle, no_restart=True)
        self._actors, self._stages, self._buffer = [], [], None
        ray.shutdown()


def _done(pending: object) -> bool:
    ready, _ = ray.wait([pending], timeout=0)
    return bool(ready)


def _outcome(pending: object) -> str:
    """Why a call ended badly; empty where it ended well."""
    try:
        ray.get(pending)
    except (RayActorError, RayTaskError) as error:
        return _reason(error)
    return ""


def _reason(error: Exception) -> str:
    """The last line of a Ray error: the sentence of the error that was raised in the role."""
    cause = error.cause if isinstance(error, RayTaskError) and error.cause is not None else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not lines:
        return type(cause).__name__
    return f"{type(cause).__name__}: {lines[-1] if isinstance(error, RayTaskError) else lines[0]}"
