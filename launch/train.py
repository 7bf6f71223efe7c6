"""The run itself, from a checked plan to the summary: evaluate, train, evaluate, export, summarise."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from msgspec.structs import replace
from safetensors import SafetensorError

from actors.report import EvalResult
from common.files import FULL, write_whole
from common.hf_folder import ModelFolderError
from common.run import RunContext
from common.serving_model import prepare_serving_model
from common.staleness import PolicyVersion, StalenessContract
from launch.checks import Plan, check_fetched
from launch.config import Config
from launch.errors import ConfigError, ExitStatus, Interrupts, Stopped, refuse
from launch.host import configure_logging, ourselves, private_files
from launch.model_folder import fetch_model
from launch.observe.observer import Observer
from launch.observe.sinks import Exporter, Tracker
from launch.observe.status import Accuracy, PollResult, RunStatus
from launch.observe.trace import Trace
from launch.observe.tripwires import Trip, Tripwires
from launch.observe.view import Display
from launch.offline import fill_buffer
from launch.processes.actor_pools import Evaluation, accuracy_of
from launch.processes.ray_cluster import leave, was_abandoned
from launch.processes.role_process import SILENCE_S, RunFailed, WrongInput
from launch.processes.supervisor import HURRIED_GOODBYE_S, Supervisor
from launch.resume import History, identity_of
from launch.run_folder import Control, RunFolder, claimed, claimed_weights
from learner.checkpoint_files import TrainingProgress, newest_progress

AUTOSCALE = "planning.autoscale:Autoscale"  # loaded if launch.autoscale is not "off"
POLL_S = 0.5
"""How often the roles are asked for news: a death is seen this late, and an answer takes milliseconds."""
SHUTDOWN_TIMEOUT_S = 600.0
"""Seconds for the learner to finish its step after Ctrl-C, of long samples too; a second Ctrl-C ends it at once."""
EVAL_PROBLEMS = 256
"""Held-out problems of an evaluation during the run: the standard error is 3 % at most."""
EVALUATION_POLL_S = 0.1
REPORT_S = 60.0
"""A page that takes longer is given up."""
_NOT_WRITTEN = FULL | {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG}
"""What a disk says that is full, broken, or not ours to write, and a limit on the size of files (`ulimit -f`)."""


def train(plan: Plan, earlier: History | None = None) -> ExitStatus:
    """Run a plan to its end; no process is left behind whatever happens.

    `earlier` is of a run that is resumed, whose folder the caller has claimed.
    """
    try:
        status = _train(plan, earlier)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        root = plan.folder.root
        hint = "free some space, then go on" if error.errno in FULL else "once it can be written, go on"
        status = refuse(f"the run folder {root} cannot be written: {error.strerror}; {hint}: leeway resume {root}")
    except BaseException:
        if was_abandoned():
            traceback.print_exc()
            leave(ExitStatus.FAILED)
        raise
    leave(status)
    return status


def _train(plan: Plan, earlier: History | None) -> ExitStatus:
    started = time.monotonic()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        try:
            ready = _prepare(plan, earlier, stack)
        except (ConfigError, ModelFolderError) as error:
            interrupts.end()  # from here on signals are only counted
            return refuse(error, ExitStatus.WRONG_INPUT)
        except (OSError, SafetensorError) as error:  # a full disk, mostly
            interrupts.end()
            return refuse(f"the run folder {plan.folder.root} cannot be prepared: {error}", ExitStatus.WRONG_INPUT)
        except Stopped:
            interrupts.end()
            return refuse("stopped before anything was started", ExitStatus.INTERRUPTED)
        try:
            status = _follow(ready, earlier, interrupts, stack, started)
        except Stopped:  # before the run could hear of it
            interrupts.end()
            return refuse(f"stopped; what there is lies in {plan.folder.root}", ExitStatus.INTERRUPTED)
    if status is ExitStatus.WRONG_INPUT:  # all that wrote there has ended
        shutil.rmtree(plan.folder.root, ignore_errors=True)
    return status


_Ready = tuple[Plan, RunContext[Config], Exporter, Tracker]


def _prepare(plan: Plan, earlier: History | None, stack: ExitStack) -> _Ready:
    """Prepare the model, the folder and the trackers; if one of them fails, the name of the run is free again."""
    config, folder = plan.config, plan.folder
    if plan.lacking:
        raise ConfigError(plan.lacking)
    with ExitStack() as half_made:
        # before the model is fetched, which may take long
        exporter = stack.enter_context(Exporter(config.tracking))
        # before the folder is made: a typo leaves nothing behind
        model_path = fetch_model(config.model, was_here=earlier is not None)
        if plan.model is None:
            plan = check_fetched(plan, model_path)
            config = plan.config
        assert plan.model is not None, "it was checked"
        stack.enter_context(private_files())
        if config.weight_sync.folder is not None:
            stack.enter_context(claimed_weights(plan.weights_folder, folder.root))
        context = plan.context(model_path, plan.model)
        if earlier is None:
            folder.create(config)
            half_made.callback(shutil.rmtree, folder.root, ignore_errors=True)  # it would be in the next try's way
            stack.enter_context(claimed(folder))
            if plan.recorded is not None:
                fill_buffer(config, context.facts, folder, plan.recorded)
        else:
            folder.make_parts(config)
        identity = identity_of(plan, model_path, earlier)
        if earlier is None:
            folder.write_identity(identity)
        last_step = 0 if earlier is None else earlier.last_step
        tracker = stack.enter_context(Tracker(config, folder, plan.run_id, last_step))
        # each actor looks for it on its own host, and finds it made where that is this one
        prepare_serving_model(model_path, folder.serving_models)
        if earlier is not None:
            folder.write_config(config)  # not before: a run that is not gone on with stays as it was
            folder.write_identity(identity)
        half_made.pop_all()
    return plan, context, exporter, tracker


@dataclass(frozen=True)
class Sinks:
    """The receivers of the news of a run: files and W&B, the terminal, the trace, and `status.json` with its views."""

    tracker: Tracker
    display: Display
    trace: Trace
    observer: Observer

    def event(self, kind: str, text: str, **details: object) -> None:
        self.tracker.event(kind, text, **details)
        self.display.say(text)
        self.observer.event(kind, text)
        self.trace.event(kind, text)

    def phase(self, text: str) -> None:
        self.display.say(text)
        self.observer.phase(text)
        self.trace.phase(text)

    def fail(self, text: str) -> None:
        self.tracker.event("failed", text)
        self.observer.event("failed", text)
        self.trace.event("failed", text)
        self.observer.end(text, ExitStatus.FAILED)
        self.display.fail(text)


def _follow(
    ready: _Ready, earlier: History | None, interrupts: Interrupts, stack: ExitStack, started: float
) -> ExitStatus:
    """Start the processes of the run, and follow it to its end."""
    plan, context, exporter, tracker = ready
    folder = plan.folder
    configure_logging(folder.log("launch", 0))
    display = stack.enter_context(Display(folder))
    at_end = stack.enter_context(ExitStack())
    at_end.callback(report_at_end, folder, tracker.event, display.last_line)
    trace = stack.enter_context(Trace(folder.timeline))

    def show(status: RunStatus) -> None:
        exporter.show(status)
        display.update(status)

    observer = Observer(
        plan,
        started_s=started,
        earlier=earlier,
        look=lambda: supervisor.processes(),
        on_news=show,
    )
    sinks = Sinks(tracker, display, trace, observer)
    stack.push(interrupts)  # until the last process has ended a signal must not cut that off; then it is as usual
    supervisor = Supervisor(plan, context, sinks.event)
    stack.callback(supervisor.stop)
    stack.enter_context(observer)  # after the supervisor, for it looks at its processes
    stack.callback(interrupts.end)
    run = _Run(plan, context.facts.contract, earlier, supervisor, sinks, interrupts)
    try:
        return run.go()
    except RunFailed as error:
        may_go_on = run.has_begun or earlier is not None
        why = str(error)
        if may_go_on and "leeway resume" not in why:
            why += f". Once that is mended, `leeway resume {folder.root}` goes on"
        sinks.fail(why)
        if may_go_on or not isinstance(error, WrongInput):
            return ExitStatus.FAILED
        at_end.pop_all()  # of a run that never was there is nothing to report
        return ExitStatus.WRONG_INPUT
    except (Stopped, SystemError) as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, Stopped):
            raise  # a signal in the middle of Ray's C code arrives wrapped; nothing else is ours
        supervisor.goodbye_s = HURRIED_GOODBYE_S
        observer.end("stopped", ExitStatus.INTERRUPTED)
        display.fail(f"stopped; what was trained lies in {folder.root}")
        return ExitStatus.INTERRUPTED


def report_at_end(folder: RunFolder, event: Callable[[str, str], None], say: Callable[[str], None]) -> None:
    """Write the page of a run that is over, and say where it is; why there is none is an event too. Never raises.

    In a process of its own, so that nothing about it can hurt the run: a damaged buffer that kills its reader, a page
    that takes too long or too much memory.
    """
    command = ourselves("report", str(folder.root), "--out", str(folder.report))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_S, check=False)
        said = done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"]
        why = said[-1].removeprefix("leeway: ") if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it was not written within {REPORT_S:g} s"
    except OSError as error:
        why = f"its process does not start: {error}"
    except KeyboardInterrupt:
        why = "interrupted"
    if not why:
        say(f"report: {folder.report}")
        return
    text = f"no report: {why}; `leeway report {folder.root}` tries again"
    event("report", text)
    say(text)


@dataclass
class _Run:
    """One run, from version 0 to the summary."""

    plan: Plan
    contract: StalenessContract
    earlier: History | None
    supervisor: Supervisor
    sinks: Sinks
    interrupts: Interrupts

    def __post_init__(self) -> None:
        self._config = self.plan.config
        self._observer = self.sinks.observer
        self._control = Control(self.plan.folder.control)
        self._tripwires = Tripwires(self.plan.config, self.contract)
        self._autoscale = None if self._config.launch.autoscale == "off" else resolve_name(AUTOSCALE)(self._config)
        self._evaluation: Evaluation | None = None
        self._evaluated_at = 0
        self.has_begun = False
        """Were all its processes ready once? Before, nothing was trained or generated."""

    def go(self) -> ExitStatus:
        self.sinks.display.say(f"rows: {self.plan.task.rows}")
        self.supervisor.start(self.sinks.phase)
        self.has_begun = True
        self.interrupts.go_on()
        if self.earlier is not None:
            self._take_up(self.earlier)
        before = self._first_evaluation()
        self.interrupts.go_on()
        if self._tripwires.foreseen:
            self.sinks.event("unweighted", self._tripwires.foreseen)
        for note in self.plan.notes:
            self.sinks.event("note", note)
        self.sinks.phase("training")
        self.supervisor.begin()
        interrupted = self._train()
        self.supervisor.drain()
        self.sinks.phase("exporting the model")
        # that of an earlier command may have other files; it stays until now, should this one not come so far
        shutil.rmtree(self.plan.folder.export, ignore_errors=True)
        self.supervisor.export(self.plan.folder.export)
        self._digest(self.supervisor.poll())  # a restart in the export counts too
        after = None
        if not interrupted and self._has_actors:
            final = PolicyVersion(*self.supervisor.status().newest)
            self.sinks.phase(f"evaluating version {final}")
            after = self._evaluated_alone(self._evaluate(self.plan.task.num_heldout, final))
        self._finish(before, after)
        status = ExitStatus.INTERRUPTED if interrupted else ExitStatus.OK
        self._observer.end("interrupted, and ended with a checkpoint" if interrupted else "done", status)
        return status

    def _take_up(self, earlier: History) -> None:
        """Count on from where the learner stands, which is its newest checkpoint that is whole."""
        reached = newest_progress(self.plan.folder.checkpoints) or TrainingProgress(0, 0, 0)
        step, version = reached.step, reached.version
        self._observer.take_up(step, version, max(0, earlier.last_step - step))
        every = self._config.actors.eval_every
        self._evaluated_at = version - version % every if every else version
        self.sinks.event("resumed", f"the run goes on from {earlier.start(step)}")

    @property
    def _has_actors(self) -> bool:
        """A run on recorded samples can do without, and is then not evaluated."""
        return bool(self.supervisor.actors.actors)

    def _first_evaluation(self) -> Accuracy | None:
        if self.earlier is not None and self.earlier.before is not None:
            return self.earlier.before
        if not self._has_actors or self._observer.status.version > 0:  # it is too late for one
            return None
        version = PolicyVersion(*self.supervisor.status().newest)
        self.sinks.phase(f"evaluating version {version.version}")
        return self._evaluated_alone(self._evaluate(self.plan.task.num_heldout, version))

    def _train(self) -> bool:
        """Watch until the learner is done; returns whether that was because of an interrupt."""
        asked_at: float | None = None
        self.interrupts.training = True
        while not self.supervisor.learner.are_finished:
            time.sleep(POLL_S)
            self._digest(self.supervisor.poll())
            if self.interrupts.count and asked_at is None:
                asked_at = time.monotonic()
                self.sinks.event("interrupt", "finishing the step and writing a checkpoint; once more stops now")
                self.supervisor.request_stop()
            if asked_at is not None and time.monotonic() - asked_at > SHUTDOWN_TIMEOUT_S:
                raise RunFailed(
                    f"the learner did not finish its step within {SHUTDOWN_TIMEOUT_S:g} s of the interrupt; the newest "
                    f"checkpoint is in {self.plan.folder.checkpoints}"
                )
            self._control.answer({"scale": lambda asked: self.supervisor.actors.scale(asked["pool"], asked["count"])})
            if asked_at is None:  # else nobody waits for actors, which may have got the signal too and left
                self._evaluate_now_and_then()
        self.interrupts.training = False
        for _ in range(2):  # the answer still owed, and all since
            self._digest(self.supervisor.poll(SILENCE_S))
        if self._evaluation is not None and asked_at is None:
            self._evaluated_alone(self._evaluation)
        return asked_at is not None

    def _digest(self, news: PollResult) -> None:
        rows = self._observer.take_in(news)
        self.sinks.trace.take_in(news, rows)
        for row in rows:
            self.sinks.tracker.step(row)
        trips = self._tripwires.look(news, evaluating=self._evaluation is not None)
        self._observer.status.tripped = [trip.text for trip in self._tripwires.standing]
        self._observer.polled()
        for trip in trips:
            self._act(trip)
        if self._autoscale is not None and self._evaluation is None and self.interrupts.training:
            self._scale(rows, self._autoscale)

    def _scale(self, rows: Sequence[Mapping[str, Any]], autoscale: Any) -> None:  # noqa: ANN401 -- it is loaded
        """Report how many actors would do, or scale the pools to it."""
        actors = self.supervisor.actors
        for row in rows:
            pools = [replace(pool, wanted=len(actors.staying(pool.name))) for pool in self._observer.status.pools]
            advice = autoscale.look(row, pools, actors.room)
            if advice is None:
                continue
            self.sinks.event("advice", advice.text, pool=advice.pool, count=advice.count)
            if advice.pool and self._config.launch.autoscale == "on":
                try:
                    actors.scale(advice.pool, advice.count)
                except ValueError as error:  # nobody waits for it
                    self.sinks.event("not_scaled", f"pool '{advice.pool}' stays as it is: {error}")

    def _act(self, trip: Trip) -> None:
        """Report an alert and act on it; RunFailed if the run is to stop, or no actor is left."""
        self.sinks.event(trip.kind, trip.text, who=trip.who, action=trip.action)
        if trip.action == "quarantine":
            self.supervisor.actors.quarantine(trip.who, trip.text)
        if trip.action == "stop":
            raise RunFailed(trip.text)

    def _evaluate_now_and_then(self) -> None:
        """Begin an evaluation every actors.eval_every versions, and take in the one that goes on."""
        if self._evaluation is not None:
            results = self._evaluation.poll()
            if results is not None:
                self._evaluation = None
                self._evaluated(results)
            return
        every, version = self._config.actors.eval_every, self._observer.status.version
        learner = self._config.learner
        is_due = every and self._evaluated_at + every <= version < learner.num_steps * learner.updates_per_step
        if is_due and self.supervisor.actors.ready():  # else the run goes on, and begins it once an actor is there
            self._evaluated_at = version - version % every
            self._evaluation = self._evaluate(min(EVAL_PROBLEMS, self.plan.task.num_heldout), None)

    def _evaluate(self, num_problems: int, version: PolicyVersion | None) -> Evaluation:
        self.sinks.trace.evaluating()
        return self.supervisor.evaluate(num_problems, version)

    def _evaluated_alone(self, evaluation: Evaluation) -> Accuracy:
        """Wait for it while nothing else goes on, and tell what the actors wait for."""
        heard_s = time.monotonic()
        while (results := evaluation.poll()) is None:
            time.sleep(EVALUATION_POLL_S)
            self.supervisor.actors.wait_until_ready()  # nobody else starts again what died
            if time.monotonic() - heard_s >= POLL_S:
                news = self.supervisor.hear_actors()
                self.sinks.trace.take_in(news, self._observer.take_in(news))
                self._observer.polled()
                for trip in self._tripwires.look(news, evaluating=True):
                    self._act(trip)
                heard_s = time.monotonic()
        return self._evaluated(results)

    def _evaluated(self, results: list[EvalResult]) -> Accuracy:
        accuracy = accuracy_of(results)
        self._observer.evaluated(accuracy)
        self.sinks.trace.evaluated(accuracy.versions)
        self.sinks.event("evaluated", accuracy.describe())
        status = self._observer.status
        self.sinks.tracker.evaluated(accuracy, status.step, status.wall_s)
        return accuracy

    def _finish(self, before: Accuracy | None, after: Accuracy | None) -> None:
        status = self.supervisor.status()
        self._observer.take_in(PollResult(status=status))
        values = self._observer.summary(before, after, status)
        write_whole(self.plan.folder.summary, [f"{json.dumps(values, indent=2)}\n".encode()])
        self.sinks.tracker.summary(values)
        self.sinks.display.finish(before, after, values)
