"""The run itself: evaluate, train, evaluate, export, summarise."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from actors.evaluate import EvalResult
from buffer.protocol import Status
from launch.checks import Plan, check_model
from launch.display import Display
from launch.evaluation import Evaluation
from launch.exit_status import ExitStatus
from launch.load import ConfigError
from launch.logs import configure_logging
from launch.progress import Accuracy, PollResult, Progress
from launch.role_process import RunFailed
from launch.supervisor import Supervisor
from launch.tracking import Tracker
from weight_sync.serving import ModelFolderError, prepare_serving_model
from weight_sync.staleness import PolicyVersion

RECIPE_TIMEOUT_S = 1800.0


def train(plan: Plan) -> ExitStatus:
    """Run a plan to its end; no process is left behind whatever happens."""
    started = time.monotonic()
    config, folder = plan.config, plan.folder
    with ExitStack() as stack:
        try:
            model_path = _fetch_model(plan)  # before the folder is made: a typo leaves nothing behind
            model = plan.model or check_model(config, model_path, "model.hub")
            folder.create(config)
            tracker = stack.enter_context(Tracker(config, folder))
            serving_path = prepare_serving_model(model_path, folder.serving)
        except (ConfigError, ModelFolderError, OSError) as error:
            print(f"leeway: {error}", file=sys.stderr)
            return ExitStatus.WRONG_INPUT
        configure_logging(folder.log("launch", 0))
        display = stack.enter_context(Display(config, folder))

        def notify(kind: str, text: str) -> None:
            tracker.event(kind, text)
            display.event(text)

        supervisor = Supervisor(plan, model_path, model, serving_path, notify)
        stack.callback(supervisor.stop)
        interrupts = stack.enter_context(_Interrupts())
        run = _Run(plan, supervisor, tracker, display, interrupts, Progress(config, started))
        try:
            return run.go()
        except RunFailed as error:
            tracker.event("failed", str(error))
            display.fail(str(error))
            return ExitStatus.FAILED
        except (_Stopped, SystemError) as error:
            if isinstance(error, SystemError) and not isinstance(error.__cause__, _Stopped):
                raise  # a signal in the middle of Ray's C code arrives wrapped; nothing else is ours
            display.fail(f"stopped; what was trained lies in {folder.root}")
            return ExitStatus.INTERRUPTED


def _fetch_model(plan: Plan) -> Path:
    model = plan.config.model
    if model.path is not None:
        if plan.model is None:
            _make_model(Path(str(model.recipe)), Path(model.path))
        return Path(model.path)
    assert model.hub is not None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.hub, revision=model.revision))
    except Exception as error:  # the Hub client raises many kinds; each means that there is no model
        raise ConfigError(
            f"model.hub = '{model.hub}' cannot be fetched: {type(error).__name__}: {error}; "
            f"download it elsewhere and give its folder as model.path"
        ) from error


def _make_model(recipe: Path, folder: Path) -> None:
    """Run model.recipe; the folder appears whole or not at all."""
    print(f"making {folder} with {recipe.name} (once)", flush=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        subprocess.run([sys.executable, str(recipe), str(unfinished)], check=True, timeout=RECIPE_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"model.recipe: {error}; run it by hand to see why") from None
    unfinished.rename(folder)


class _Stopped(Exception):
    """Ctrl-C came twice."""


class _Interrupts:
    """Counts Ctrl-C and SIGTERM. While training, the first asks for an orderly end; any other ends now."""

    def __init__(self) -> None:
        self.count = 0
        self.training = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.install()
        return self

    def install(self) -> None:
        """Put the handlers in place."""
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1  # nothing else: a handler may come in the middle of a write
        if self.count > 1 or not self.training:
            raise _Stopped


class _Run:
    """One run, from version 0 to the summary."""

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        tracker: Tracker,
        display: Display,
        interrupts: _Interrupts,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._supervisor = supervisor
        self._tracker = tracker
        self._display = display
        self._interrupts = interrupts
        self._progress = progress
        self._evaluated_at = 0
        self._alarms: frozenset[str] = frozenset()
        """What was complained about and still holds."""
        self._evaluation: Evaluation | None = None

    def go(self) -> ExitStatus:
        self._display.phase("starting Ray, the buffer, the stages and the actors (about half a minute)")
        self._supervisor.start()
        self._interrupts.install()  # again, for Ray puts its own handler of SIGTERM in place
        self._display.phase("evaluating version 0")
        before = self._evaluated(self._supervisor.evaluate(self._plan.task.num_heldout, PolicyVersion(0, 0)).wait())
        self._display.phase("training")
        self._supervisor.begin()
        interrupted = self._train()
        self._supervisor.drain()
        self._display.phase("exporting the model")
        self._supervisor.export(self._plan.folder.export)
        self._digest(self._supervisor.poll())  # a restart in the export counts too
        after = None
        if not interrupted:
            final = PolicyVersion(*self._supervisor.status().newest)
            self._display.phase(f"evaluating version {final}")
            after = self._evaluated(self._supervisor.evaluate(self._plan.task.num_heldout, final).wait())
        self._finish(before, after)
        return ExitStatus.INTERRUPTED if interrupted else ExitStatus.OK

    def _train(self) -> bool:
        """Watch until the learner is done; returns whether that was because of an interrupt."""
        asked_at: float | None = None
        limit_s = self._config.launch.shutdown_timeout_s
        self._interrupts.training = True
        while not self._supervisor.learning_is_over():
            time.sleep(self._config.launch.poll_interval_s)
            self._digest(self._supervisor.poll())
            if self._interrupts.count and asked_at is None:
                asked_at = time.monotonic()
                self._notify("interrupt", "finishing the step and writing a checkpoint; once more stops now")
                self._supervisor.request_stop()
            if asked_at is not None and time.monotonic() - asked_at > limit_s:
                raise RunFailed(
                    f"the learner did not finish its step within launch.shutdown_timeout_s = {limit_s:g} s of the "
                    f"interrupt; the newest checkpoint is in {self._plan.folder.checkpoints}"
                )
            self._evaluate_now_and_then()
        self._interrupts.training = False
        for news in self._supervisor.last_poll():
            self._digest(news)
        if self._evaluation is not None and asked_at is None:
            self._tracker.metrics(self._evaluated(self._evaluation.wait()).row(), self._progress.step)
        return asked_at is not None

    def _digest(self, news: PollResult) -> None:
        for step, row in self._progress.update(news):
            self._tracker.step(row, step)
        self._display.update(self._progress)
        self._warn_of_buffer(news.status)

    def _warn_of_buffer(self, status: Status | None) -> None:
        """Say once what somebody should look at."""
        if status is None:
            return
        alarms = {
            "fidelity": f"the lengths trained are not those generated (distance {status.fidelity_ks:.2f}, alarm at "
            f"{self._config.buffer.fidelity_alarm:g}); see buffer.length_correction"
            if status.fidelity_alarm
            else "",
            "damage": f"{status.num_damaged} records of the buffer are damaged; see `leeway buffer verify`"
            if status.num_damaged
            else "",
        }
        for kind, text in alarms.items():
            if text and kind not in self._alarms:
                self._notify(kind, text)
            self._alarms = self._alarms | {kind} if text else self._alarms - {kind}

    def _evaluate_now_and_then(self) -> None:
        """Begin an evaluation every actors.eval_every versions, and take in the one that goes on."""
        if self._evaluation is not None:
            results = self._evaluation.poll()
            if results is not None:
                self._evaluation = None
                self._tracker.metrics(self._evaluated(results).row(), self._progress.step)
            return
        every, version = self._config.actors.eval_every, self._progress.version
        learner = self._config.learner
        if every and self._evaluated_at + every <= version < learner.num_steps * learner.updates_per_step:
            self._evaluated_at = version - version % every
            self._evaluation = self._supervisor.evaluate(self._config.actors.eval_problems, None)

    def _evaluated(self, results: list[EvalResult]) -> Accuracy:
        accuracy = Accuracy.of(results)
        self._tracker.event("evaluated", accuracy.describe(), **accuracy.row())
        self._display.event(accuracy.describe())
        return accuracy

    def _notify(self, kind: str, text: str) -> None:
        self._tracker.event(kind, text)
        self._display.event(text)

    def _finish(self, before: Accuracy, after: Accuracy | None) -> None:
        status = self._supervisor.status()
        values = self._progress.summary(before, after, status)
        text = json.dumps(values, indent=2)
        temporary = self._plan.folder.summary.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self._plan.folder.summary)
        self._tracker.summary(values)
        self._display.finish(before, after, values)
