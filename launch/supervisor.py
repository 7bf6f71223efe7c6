"""The processes of a run: started together, watched, restarted where that loses nothing, ended together."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import ray

from actors.report import ActorReport
from buffer.protocol import Status
from launch.buffers import STARTUP_KEY, Buffers
from launch.checks import Plan
from launch.evaluation import Evaluation
from launch.progress import PollResult
from launch.role_process import RoleProcess, RunFailed, all_results, done, outcome
from launch.roles import ActorRole
from launch.spawn import actor_spec, end_ray, spawn, start_ray
from launch.stages import Stages
from weight_sync.serving import ModelFacts
from weight_sync.staleness import PolicyVersion

GOODBYE_S = 15.0
"""How long the roles may take to end by themselves before they are killed."""


class Supervisor:
    """Starts, watches and ends every process of a run.

    States of a process: started -> running -> finished, or running -> died -> started again
    (actors up to actors.max_restarts times, the buffer services a few times, the learner as a whole), or given up.
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
        self._stages = Stages(plan, model_path, notify)
        self._actors: list[RoleProcess] = []
        self._drained = False

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start Ray and every role; returns when all are ready.

        Raises:
            RunFailed: a role failed to start, or did not within launch.startup_timeout_s.
        """
        start_ray(self._config, namespace=f"leeway-{self._plan.run_id}")
        deadline = time.monotonic() + self._config.launch.startup_timeout_s
        self._buffers.start(deadline)
        stages = self._stages.start(self._buffers.addresses, deadline)
        self._actors = [self._start_actor(number) for number in range(self._config.actors.num_actors)]
        calls = [*stages, *[(actor, actor.starting) for actor in self._actors]]
        all_results(calls, "to be ready", deadline, STARTUP_KEY)

    def begin(self) -> None:
        """Begin to learn and to generate."""
        self._stages.begin()
        for actor in self._actors:
            if actor.running is None:  # one that was started again works already
                actor.running = actor.handle.run.remote()

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
        self._stages.watch()
        told = self._stages.poll(patience_s)
        if told.resumed_at is not None:
            self._drain_again()
        news = PollResult(told.rows, told.waits_for, told.resumed_at, told.resumed_version)
        silence_s = self._config.launch.silence_timeout_s
        for actor in self._watch_actors():
            report = actor.ask("report", patience_s, silence_s, self._notify)
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
        return self._stages.are_finished

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
        self._stages.request_stop()
        self.drain()

    def drain(self) -> None:
        """Grant no further leases, whatever happens to the learner from now on."""
        self._drained = True
        self._drain_again()

    def _drain_again(self) -> None:
        """A learner that is started again opens admission, also where the run was over."""
        if self._drained:
            self._buffers.ask(lambda client: client.drain())

    def status(self) -> Status:
        """The ledger and what is in flight."""
        return self._buffers.ask(lambda client: client.status())

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder; all stages take part."""
        self._stages.export(folder)
        self._drain_again()

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
        for actor in self._actors:
            ray.kill(actor.handle, no_restart=True)
        self._stages.kill()
        self._buffers.kill()
        self._actors = []
        end_ray()
