"""The processes of a run: started together, watched, restarted where that loses nothing, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from actors.report import ActorReport
from buffer.protocol import Status
from launch.buffers import STARTUP_KEY, Buffers
from launch.checks import Plan
from launch.evaluation import Evaluation
from launch.progress import PollResult
from launch.role_process import RoleProcess, RunFailed, all_results, done, outcome, reason
from launch.roles import ActorRole, StageRole
from launch.spawn import actor_spec, end_ray, spawn, stage_spec, start_ray
from weight_sync.serving import ModelFacts
from weight_sync.staleness import PolicyVersion

GOODBYE_S = 15.0
"""How long the roles may take to end by themselves before they are killed."""


class Supervisor:
    """Starts, watches and ends every process of a run.

    States of a process: started -> running -> finished, or running -> died -> started again
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
        self._serving_path = serving_path
        self._notify = notify
        self._buffers = Buffers(plan, model, notify)
        self._stages: list[RoleProcess] = []
        self._actors: list[RoleProcess] = []
        self._asked: dict[str, tuple[Any, float]] = {}

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and every role; returns when all are ready.

        Raises:
            RunFailed: a role failed to start, or did not within launch.startup_timeout_s.
        """
        start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        self._buffers.start(deadline)
        stages = self._start_stages(deadline)
        self._actors = [self._start_actor(number) for number in range(self._config.actors.num_actors)]
        calls = [*stages, *[(actor, actor.starting) for actor in self._actors]]
        all_results(calls, "to be ready", deadline, STARTUP_KEY)

    def begin(self) -> None:
        """Begin to learn and to generate."""
        for process in [*self._stages, *self._actors]:
            if process.running is None:  # an actor that was started again works already
                process.running = process.handle.run.remote()

    def _start_stages(self, deadline: float) -> list[tuple[RoleProcess, Any]]:
        config = self._config.learner
        for rank in range(config.num_stages):
            path = self._folder.log("stage", rank)
            handle = spawn(
                StageRole, path, cpus=config.cpus, gpus=config.gpus, threads=config.num_threads, concurrency=4
            )
            self._stages.append(RoleProcess("stage", rank, handle, path))
        first = self._stages[0]
        rendezvous = first.result(first.handle.rendezvous.remote(), "to name a meeting point", deadline, STARTUP_KEY)
        addresses = self._buffers.addresses
        specs = [
            stage_spec(self._plan, stage.number, self._model_path, addresses, rendezvous) for stage in self._stages
        ]
        return [(stage, stage.handle.setup.remote(spec)) for stage, spec in zip(self._stages, specs, strict=True)]

    def _start_actor(self, number: int) -> RoleProcess:
        config = self._config.actors
        path = self._folder.log("actor", number)
        spec = actor_spec(self._plan, number, self._serving_path, self._model_path, self._buffers.addresses)
        handle = spawn(
            ActorRole, path, spec, cpus=config.cpus, gpus=config.gpus, threads=config.num_threads, concurrency=16
        )
        return RoleProcess("actor", number, handle, path, starting=handle.start.remote())

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, patience_s: float = 0.2) -> PollResult:
        """Ask every role for news and restart what died.

        Args:
            patience_s: how long to wait for one answer; a later one is taken at the next poll.

        Raises:
            RunFailed: a role that the run cannot go on without is gone.
        """
        self._buffers.watch()
        news = PollResult()
        self._check_stages()
        answer = self._ask(self._stages[-1], "poll", patience_s)
        if answer is not None:
            news.steps, news.learner_waits_for = list(answer[0]), answer[1]
        for actor in self._watch_actors():
            report = self._ask(actor, "report", patience_s)
            if report is not None:
                self._check_task(actor, report)
                news.actors.append(report)
        news.status = self.status()
        return news

    def _check_task(self, actor: RoleProcess, report: ActorReport) -> None:
        if report.task_fingerprint != self._plan.task.fingerprint:
            raise RunFailed(
                f"{actor.name} sees other prompts than this command does, so its groups would be mixed up: "
                f"its files or its reasoning-gym differ from those here; see {actor.log}"
            )

    def last_poll(self) -> list[PollResult]:
        """What is left to tell once the learner is over: the answer still owed, and all since."""
        patience_s = self._config.launch.silence_timeout_s
        return [self.poll(patience_s), self.poll(patience_s)]

    def _ask(self, process: RoleProcess, method: str, patience_s: float) -> Any:  # noqa: ANN401
        """Call a method; a call that is not answered in time stays pending and is looked at next time."""
        pending, asked_at = self._asked.pop(process.name, (None, 0.0))
        if pending is None:
            pending, asked_at = getattr(process.handle, method).remote(), time.monotonic()
        ready, _ = ray.wait([pending], timeout=patience_s)
        if ready:
            try:
                return ray.get(ready[0])
            except (RayActorError, RayTaskError):
                return None  # the next look at its `running` call says why
        silence = time.monotonic() - asked_at
        if silence > self._config.launch.silence_timeout_s:
            self._notify("silent", f"{process.name} has not answered for {silence:.0f} s; see {process.log}")
            asked_at = time.monotonic()
        self._asked[process.name] = (pending, asked_at)
        return None

    def _check_stages(self) -> None:
        """End the run with the stage that failed; one that died goes first, for the others only miss it."""
        failures: list[tuple[bool, RoleProcess, Exception]] = []
        for stage in self._stages:
            if stage.running is not None and done(stage.running):
                try:
                    ray.get(stage.running)
                except (RayActorError, RayTaskError) as error:
                    failures.append((not isinstance(error, RayActorError), stage, error))
        if failures:
            _, stage, failure = min(failures, key=lambda each: each[0])
            raise RunFailed(f"{stage.name} failed: {reason(failure)}; see {stage.log}")

    def _watch_actors(self) -> list[RoleProcess]:
        """Those that work; what died is started again.

        Raises:
            RunFailed: no actor is left.
        """
        working = [actor for actor in list(self._actors) if not actor.lost and self._watch_actor(actor)]
        if all(actor.lost for actor in self._actors):
            last = self._actors[-1]
            raise RunFailed(f"no actor is left: {last.name} was given up: {last.lost}; see {last.log}")
        return working

    def _watch_actor(self, actor: RoleProcess) -> bool:
        """True where the actor works and can be asked for news; what died is started again."""
        pending = actor.starting if actor.running is None else actor.running
        limit_s = self._config.launch.startup_timeout_s
        if done(pending):
            why = outcome(pending)
        elif actor.running is None and time.monotonic() - actor.started_s > limit_s:
            why = f"it was not ready within {STARTUP_KEY} = {limit_s:g} s"
        else:
            return actor.running is not None
        if not why:
            if actor.running is None:
                actor.running = actor.handle.run.remote()
            return True  # else it finished, because the run drains
        self._asked.pop(actor.name, None)
        ray.kill(actor.handle, no_restart=True)  # it may have failed without dying
        if actor.restarts >= self._config.actors.max_restarts:
            actor.lost = why
            self._notify("given_up", f"{actor.name} is given up after {actor.restarts} restarts: {why}")
            return False
        self._notify("restart", f"{actor.name} died ({why}) and is started again; its leases are issued anew")
        fresh = self._start_actor(actor.number)
        fresh.restarts = actor.restarts + 1
        self._actors[self._actors.index(actor)] = fresh
        return False

    # --- evaluate, drain, end ---------------------------------------------------------------------

    def learning_is_over(self) -> bool:
        """True when every stage has returned from its last step."""
        return all(stage.running is not None and done(stage.running) for stage in self._stages)

    def evaluate(self, num_problems: int, min_version: PolicyVersion | None) -> Evaluation:
        """Begin a held-out evaluation on the actors; training goes on where it can.

        Args:
            num_problems: how many held-out problems.
            min_version: the version to evaluate at the earliest; None: whichever each actor has.
        """
        return Evaluation(
            self.ready_actors,
            num_problems,
            min_version,
            self._config.launch.eval_timeout_s,
            max_retries=self._config.actors.max_restarts,
        )

    def ready_actors(self) -> list[RoleProcess]:
        """Actors that are started; at least one.

        Raises:
            RunFailed: none is, and none became so within launch.startup_timeout_s.
        """
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        while True:
            if ready := [actor for actor in self._actors if actor.is_ready]:
                return ready
            self._watch_actors()
            if time.monotonic() > deadline:
                last = self._actors[-1]
                raise RunFailed(f"no actor became ready, the last is {last.name}; see {last.log}")
            time.sleep(0.2)

    def request_stop(self) -> None:
        """Ask the learner to end after the step at hand, with a checkpoint, and close admission."""
        for stage in self._stages:
            stage.handle.request_stop.remote()
        self.drain()

    def drain(self) -> None:
        """Grant no further leases."""
        self._buffers.ask(lambda client: client.drain())

    def status(self) -> Status:
        """The ledger and what is in flight."""
        return self._buffers.ask(lambda client: client.status())

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; all stages take part."""
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        calls = [(stage, stage.handle.export.remote(folder)) for stage in self._stages]
        all_results(calls, "to export", deadline, STARTUP_KEY)

    def stop(self) -> None:
        """End every process, politely where there is time. Safe to call at any moment, more than once."""
        self._buffers.close()
        if not ray.is_initialized():
            end_ray()  # it may have been stopped in the middle of its start
            return
        deadline = time.monotonic() + GOODBYE_S
        polite = [actor.handle.stop.remote() for actor in self._actors if not actor.lost]
        polite += self._buffers.ask_to_stop()
        ray.wait(polite, num_returns=len(polite), timeout=max(0.1, deadline - time.monotonic())) if polite else None
        for process in [*self._actors, *self._stages]:
            ray.kill(process.handle, no_restart=True)
        self._buffers.kill()
        self._actors, self._stages = [], []
        end_ray()
