"""The stages of a run, from a checked plan to the summary: evaluate, train, export, evaluate, summarise."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from msgspec.structs import replace
from safetensors import SafetensorError

from leeway.actors.report import EvalResult
from leeway.common.files import FULL, write_whole
from leeway.common.hf_folder import ModelFolderError
from leeway.common.run import RunContext
from leeway.common.serving_model import prepare_serving_model
from leeway.common.staleness import PolicyVersion, StalenessContract
from leeway.launch.checks import Plan, check_fetched
from leeway.launch.config import Config
from leeway.launch.errors import ConfigError, ExitStatus, Interrupts, Stopped, print_error
from leeway.launch.host import configure_logging, leeway_command, private_files
from leeway.launch.model_folder import fetch_model
from leeway.launch.observe.alerts import Alert, Alerts
from leeway.launch.observe.display import Display
from leeway.launch.observe.learning import verdict
from leeway.launch.observe.observer import Observer
from leeway.launch.observe.sinks import Exporter, Tracker
from leeway.launch.observe.status import Accuracy, PollResult, RunStatus
from leeway.launch.observe.trace import Trace
from leeway.launch.offline import fill_buffer
from leeway.launch.processes.actor_pools import Evaluation, accuracy_of
from leeway.launch.processes.ray_cluster import exit_if_abandoned
from leeway.launch.processes.role_process import SILENCE_S, RunFailed, WrongInput
from leeway.launch.processes.supervisor import SHORT_GRACE_S, Supervisor
from leeway.launch.resume import History, identity_of
from leeway.launch.run_folder import Control, RunFolder, claimed, claimed_weights
from leeway.learner.checkpoint_files import TrainingProgress, newest_progress

AUTOSCALE = "leeway.planning.autoscale:Autoscale"  # loaded if launch.autoscale is not "off"
POLL_S = 0.5
"""Seconds between polls of the processes; an exited process is detected within this time. A poll takes milliseconds."""
SHUTDOWN_TIMEOUT_S = 600.0
"""Time limit in seconds for the learner to finish its step after Ctrl-C. A second Ctrl-C ends the run at once."""
EVAL_PROBLEMS = 512
"""Maximum number of held-out problems of an evaluation during training; its standard error is at most 2.2 %."""
EVALUATION_POLL_S = 0.1
REPORT_S = 60.0
"""Timeout of the report, in seconds."""
_NOT_WRITTEN = FULL | {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG}
"""Error numbers of a full, broken or read-only disk, of missing permissions, and of the file size limit."""


def train(plan: Plan, earlier: History | None = None) -> ExitStatus:
    """Run a plan to its end; leave no process behind, even after errors.

    `earlier` is the history of a resumed run, whose folder the caller has claimed.
    """
    try:
        status = _train(plan, earlier)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        root = plan.folder.root
        hint = "free some space, then resume" if error.errno in FULL else "make it writable, then resume"
        status = print_error(f"the run folder {root} cannot be written: {error.strerror}; {hint}: leeway resume {root}")
    except BaseException:
        exit_if_abandoned(ExitStatus.FAILED)
        raise
    exit_if_abandoned(status)
    return status


def _train(plan: Plan, earlier: History | None) -> ExitStatus:
    started = time.monotonic()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        try:
            prepared = _prepare(plan, earlier, stack)
        except (ConfigError, ModelFolderError) as error:
            interrupts.end()  # from now on, signals are only counted
            return print_error(error, ExitStatus.WRONG_INPUT)
        except (OSError, SafetensorError) as error:  # usually a full disk
            interrupts.end()
            return print_error(f"the run folder {plan.folder.root} cannot be prepared: {error}", ExitStatus.WRONG_INPUT)
        except Stopped:
            interrupts.end()
            return print_error("stopped before any process was started", ExitStatus.INTERRUPTED)
        try:
            status = _supervise(prepared, earlier, interrupts, stack, started)
        except Stopped:  # raised outside the handlers of `_supervise`
            interrupts.end()
            return print_error(f"stopped; the results are in {plan.folder.root}", ExitStatus.INTERRUPTED)
    if status is ExitStatus.WRONG_INPUT:  # every process that wrote to the folder has exited
        shutil.rmtree(plan.folder.root, ignore_errors=True)
    return status


_Prepared = tuple[Plan, RunContext[Config], Exporter, Tracker]


def _prepare(plan: Plan, earlier: History | None, stack: ExitStack) -> _Prepared:
    """Prepare the model, the folder and the sinks; if one of them fails, remove the folder of a new run."""
    config, folder = plan.config, plan.folder
    if plan.lacking:
        raise ConfigError(plan.lacking)
    with ExitStack() as undo:
        # opened before the long download, so that a port in use is reported at once
        exporter = stack.enter_context(Exporter(config.tracking))
        # downloaded before the folder is created, so that a misspelt model name leaves no folder
        model_path = fetch_model(config.model, was_here=earlier is not None)
        if plan.model is None:
            plan = check_fetched(plan, model_path)
            config = plan.config
        assert plan.model is not None, "the model is checked"
        stack.enter_context(private_files())
        if config.weight_sync.folder is not None:
            stack.enter_context(claimed_weights(plan.weights_folder, folder.root))
        context = plan.context(model_path, plan.model)
        if earlier is None:
            folder.create(config)
            undo.callback(shutil.rmtree, folder.root, ignore_errors=True)  # a partial folder would block a retry
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
        # actors on this host use this copy; each actor looks for the copy on its own host
        prepare_serving_model(model_path, folder.serving_models)
        if earlier is not None:
            folder.write_config(config)  # written last, so that a run that cannot be resumed stays unchanged
            folder.write_identity(identity)
        undo.pop_all()
    return plan, context, exporter, tracker


@dataclass(frozen=True)
class Sinks:
    """The sinks of the events of a run: files, trackers, terminal, trace, and `status.json` with its views."""

    tracker: Tracker
    display: Display
    trace: Trace
    observer: Observer

    def event(self, kind: str, text: str, **details: object) -> None:
        self.tracker.event(kind, text, **details)
        self.display.log(text)
        self.observer.event(kind, text)
        self.trace.event(kind, text)

    def phase(self, text: str) -> None:
        self.display.log(text)
        self.observer.phase(text)
        self.trace.phase(text)

    def fail(self, text: str) -> None:
        self.tracker.event("failed", text)
        self.observer.event("failed", text)
        self.trace.event("failed", text)
        self.observer.end(text, ExitStatus.FAILED)
        self.display.fail(text)


def _supervise(
    prepared: _Prepared, earlier: History | None, interrupts: Interrupts, stack: ExitStack, started: float
) -> ExitStatus:
    """Start the processes of the run, and supervise it to its end."""
    plan, context, exporter, tracker = prepared
    folder = plan.folder
    configure_logging(folder.log("launch", 0))
    display = stack.enter_context(Display(folder))
    at_end = stack.enter_context(ExitStack())
    trace = stack.enter_context(Trace(folder.timeline))

    def show(status: RunStatus) -> None:
        exporter.show(status)
        display.update(status)

    observer = Observer(
        plan, started_s=started, earlier=earlier, list_processes=lambda: supervisor.processes(), on_write=show
    )
    at_end.callback(lambda: display.last_line(verdict(observer.status, observer.trained.rewards)))
    # runs first: the last line is the verdict
    at_end.callback(report_at_end, folder, tracker.event, display.last_line)
    sinks = Sinks(tracker, display, trace, observer)
    stack.push(interrupts)  # closed after the last process, so that no signal interrupts the shutdown
    supervisor = Supervisor(plan, context, sinks.event)
    stack.callback(supervisor.stop)
    stack.enter_context(observer)  # closed before the supervisor, because the observer reads its processes
    stack.callback(interrupts.end)
    run = _Run(plan, context.facts.contract, earlier, supervisor, sinks, interrupts)
    try:
        return run.go()
    except RunFailed as error:
        is_resumable = run.has_begun or earlier is not None
        why = str(error)
        if is_resumable and "leeway resume" not in why:
            why += f". Fix the cause, then resume: `leeway resume {folder.root}`"
        sinks.fail(why)
        if is_resumable or not isinstance(error, WrongInput):
            return ExitStatus.FAILED
        at_end.pop_all()  # a run that never began has no report
        return ExitStatus.WRONG_INPUT
    except (Stopped, SystemError) as error:
        if isinstance(error, SystemError) and not isinstance(error.__cause__, Stopped):
            raise  # a signal in Ray's C code surfaces as a SystemError caused by Stopped; other SystemErrors are bugs
        supervisor.shutdown_grace_s = SHORT_GRACE_S
        observer.end("stopped", ExitStatus.INTERRUPTED)
        display.fail(f"stopped; the results are in {folder.root}")
        return ExitStatus.INTERRUPTED


def report_at_end(folder: RunFolder, event: Callable[[str, str], None], log: Callable[[str], None]) -> None:
    """Write the report of an ended run and log its path; a failure is logged and stored as an event. Never raises.

    The report is written in a separate process, so that it cannot affect the run: a damaged buffer can crash its
    reader, and a report can take too long or use too much memory.
    """
    command = leeway_command("report", str(folder.root), "--out", str(folder.report))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REPORT_S, check=False)
        errors = done.stderr.strip().splitlines() or [f"its process exited with status {done.returncode}"]
        why = errors[-1].removeprefix("leeway: ") if done.returncode else ""
    except subprocess.TimeoutExpired:
        why = f"it timed out after {REPORT_S:g} s"
    except OSError as error:
        why = f"its process did not start: {error}"
    except KeyboardInterrupt:
        why = "interrupted"
    if not why:
        log(f"report: {folder.report}")
        return
    text = f"no report: {why}; to retry, run `leeway report {folder.root}`"
    event("report", text)
    log(text)


@dataclass
class _Run:
    """One run, from the start of its processes to the summary."""

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
        self._alerts = Alerts(self.plan.config, self.contract, run=str(self.plan.folder.root))
        self._autoscale = None if self._config.launch.autoscale == "off" else resolve_name(AUTOSCALE)(self._config)
        self._evaluation: Evaluation | None = None
        self._evaluated_at = 0
        self.has_begun = False
        """Whether all processes have been ready; before that, the run has neither generated samples nor trained."""

    def go(self) -> ExitStatus:
        self.sinks.display.log(f"rows: {self.plan.task.rows}")
        self.supervisor.start(self.sinks.phase)
        self.has_begun = True
        self.interrupts.raise_if_stopped()
        if self.earlier is not None:
            self._restore(self.earlier)
        before = self._first_evaluation()
        self.interrupts.raise_if_stopped()
        if self._alerts.startup_warning:
            self.sinks.event("unweighted", self._alerts.startup_warning)
        for note in self.plan.notes:
            self.sinks.event("note", note)
        self.sinks.phase("training")
        self.supervisor.begin()
        interrupted = self._train()
        self.supervisor.drain()
        self.sinks.phase("exporting the model")
        # the export of an earlier launch may have other files; it is kept until the new export replaces it
        shutil.rmtree(self.plan.folder.export, ignore_errors=True)
        self.supervisor.export(self.plan.folder.export)
        self._handle_poll(self.supervisor.poll())  # the poll includes restarts during the export
        after = None
        if not interrupted and self._has_actors:
            final = PolicyVersion(*self.supervisor.status().newest)
            self.sinks.phase(f"evaluating version {final}")
            after = self._wait_for_evaluation(self._evaluate(self.plan.task.num_heldout, final))
        self._finish(before, after)
        status = ExitStatus.INTERRUPTED if interrupted else ExitStatus.OK
        self._observer.end("interrupted; ended with a checkpoint" if interrupted else "done", status)
        return status

    def _restore(self, earlier: History) -> None:
        """Restore the counters to the state of the learner, which is its newest intact checkpoint."""
        reached = newest_progress(self.plan.folder.checkpoints) or TrainingProgress(0, 0, 0)
        step, version = reached.step, reached.version
        self._observer.resume_at(step, version, max(0, earlier.last_step - step))
        self._evaluated_at = version - version % (self._config.actors.eval_every or 1)
        self.sinks.event("resumed", f"the run resumes from {earlier.start(step)}")

    @property
    def _has_actors(self) -> bool:
        """Return whether the run has actors; a run on recorded samples is not evaluated if it has no actors."""
        return bool(self.supervisor.actors.actors)

    def _first_evaluation(self) -> Accuracy | None:
        if self.earlier is not None and self.earlier.before is not None:
            return self.earlier.before
        if not self._has_actors or self._observer.status.version > 0:  # the model is already trained
            return None
        version = PolicyVersion(*self.supervisor.status().newest)
        self.sinks.phase(f"evaluating version {version.version}")
        return self._wait_for_evaluation(self._evaluate(self.plan.task.num_heldout, version))

    def _train(self) -> bool:
        """Poll until the learner is done; return whether an interrupt ended the training."""
        requested_at: float | None = None
        self.interrupts.training = True
        while not self.supervisor.learner.are_finished:
            time.sleep(POLL_S)
            self._handle_poll(self.supervisor.poll())
            if self.interrupts.count and requested_at is None:
                requested_at = time.monotonic()
                self.sinks.event("interrupt", "finishing the step and writing a checkpoint; interrupt again to stop")
                self.supervisor.request_stop()
            if requested_at is not None and time.monotonic() - requested_at > SHUTDOWN_TIMEOUT_S:
                raise RunFailed(
                    f"the learner did not finish its step within {SHUTDOWN_TIMEOUT_S:g} s of the interrupt; the newest "
                    f"checkpoint is in {self.plan.folder.checkpoints}"
                )
            self._control.answer({"scale": lambda each: self.supervisor.actors.scale(each["pool"], each["count"])})
            if requested_at is None:  # after an interrupt, actors may have exited because of the same signal
                self._evaluate_periodically()
        self.interrupts.training = False
        for _ in range(2):  # the first poll returns late replies, the second poll returns later reports
            self._handle_poll(self.supervisor.poll(SILENCE_S))
        if self._evaluation is not None and requested_at is None:
            self._wait_for_evaluation(self._evaluation)
        return requested_at is not None

    def _handle_poll(self, result: PollResult) -> None:
        rows = self._observer.ingest(result)
        self.sinks.trace.ingest(result, rows)
        for row in rows:
            self.sinks.tracker.step(row)
        self._report(self._alerts.check(result, evaluating=self._evaluation is not None))
        if self._autoscale is not None and self._evaluation is None and self.interrupts.training:
            self._scale(rows, self._autoscale)

    def _scale(self, rows: Sequence[Mapping[str, Any]], autoscale: Any) -> None:  # noqa: ANN401 -- loaded by name
        """Report the required number of actors, or scale the pools to it."""
        actors = self.supervisor.actors
        for row in rows:
            pools = [replace(pool, wanted=len(actors.staying(pool.name))) for pool in self._observer.status.pools]
            advice = autoscale.observe(row, pools, actors.room)
            if advice is None:
                continue
            self.sinks.event("advice", advice.text, pool=advice.pool, count=advice.count)
            if advice.pool and self._config.launch.autoscale == "on":
                try:
                    actors.scale(advice.pool, advice.count)
                except ValueError as error:  # the run continues without scaling
                    self.sinks.event("not_scaled", f"pool '{advice.pool}' is not scaled: {error}")

    def _report(self, alerts: Sequence[Alert]) -> None:
        """Write the status with the active alerts, and act on the alerts that start or end."""
        self._observer.status.alerts = [alert.text for alert in self._alerts.active]
        self._observer.status.alert_kinds = [alert.kind for alert in self._alerts.active]
        self._observer.polled()
        for alert in alerts:
            self._act_on(alert)

    def _act_on(self, alert: Alert) -> None:
        """Report an alert and run its action; raise RunFailed if the action is "stop" or no actor is left."""
        self.sinks.event(alert.kind, alert.text, who=alert.source, action=alert.action)
        if alert.action == "quarantine":
            self.supervisor.actors.quarantine(alert.source, alert.text)
        if alert.action == "stop":
            raise RunFailed(alert.text)

    def _evaluate_periodically(self) -> None:
        """Poll the current evaluation; if there is none, start an evaluation every actors.eval_every versions."""
        if self._evaluation is not None:
            if (results := self._evaluation.poll()) is not None:
                self._evaluation = None
                self._record_evaluation(results)
            return
        every, version = self._config.actors.eval_every, self._observer.status.version
        learner = self._config.learner
        is_due = every and self._evaluated_at + every <= version < learner.num_steps * learner.updates_per_step
        if is_due and self.supervisor.actors.ready():  # without a ready actor, a later call starts the evaluation
            self._evaluated_at = version - version % every
            self._evaluation = self._evaluate(min(EVAL_PROBLEMS, self.plan.task.num_heldout), None)

    def _evaluate(self, num_problems: int, version: PolicyVersion | None) -> Evaluation:
        self.sinks.trace.evaluating()
        return self.supervisor.evaluate(num_problems, version)

    def _wait_for_evaluation(self, evaluation: Evaluation) -> Accuracy:
        """Block until an evaluation ends, and report what the actors wait for."""
        polled_s = time.monotonic()
        while (results := evaluation.poll()) is None:
            time.sleep(EVALUATION_POLL_S)
            self.supervisor.actors.wait_until_ready()  # also restarts actors that exited
            if time.monotonic() - polled_s >= POLL_S:
                self._poll_actors()
                polled_s = time.monotonic()
        self._poll_actors()  # the last reports have answers of the evaluation, which alerts show
        return self._record_evaluation(results)

    def _poll_actors(self) -> None:
        result = self.supervisor.poll_actors()
        self.sinks.trace.ingest(result, self._observer.ingest(result))
        self._report(self._alerts.check(result, evaluating=True))

    def _record_evaluation(self, results: list[EvalResult]) -> Accuracy:
        accuracy = accuracy_of(results)
        self._observer.evaluated(accuracy)
        self.sinks.trace.evaluated(accuracy.versions)
        self.sinks.event("evaluated", accuracy.describe())
        status = self._observer.status
        self.sinks.tracker.evaluated(accuracy, status.step, status.wall_s)
        self._report(self._alerts.evaluated(status.evaluations))
        return accuracy

    def _finish(self, before: Accuracy | None, after: Accuracy | None) -> None:
        status = self.supervisor.status()
        self._observer.ingest(PollResult(status=status))
        values = self._observer.summary(before, after, status)
        write_whole(self.plan.folder.summary, [f"{json.dumps(values, indent=2)}\n".encode()])
        self.sinks.tracker.summary(values)
        self.sinks.display.finish(values)
