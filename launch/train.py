"""The run itself: evaluate, train, evaluate, export, summarise."""

from __future__ import annotations

import json
import logging
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

from actors.evaluate import EvalRequest
from launch.checks import Plan, check_model
from launch.crew import Crew, News
from launch.display import Display
from launch.load import ConfigError
from launch.progress import Accuracy, Progress
from launch.spawn import CrewError
from launch.tracking import Tracker
from weight_sync.serving import prepare_serving_model
from weight_sync.staleness import PolicyVersion

OK, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

RECIPE_TIMEOUT_S = 1800.0

log = logging.getLogger(__name__)


def train(plan: Plan) -> int:
    """Run a plan to its end and return an exit status; no process is left behind whatever happens."""
    started = time.monotonic()
    config, folder = plan.config, plan.folder
    try:
        folder.create(config)
        logging.basicConfig(
            filename=folder.log("launch", 0), format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO"
        )
        model_path = _fetch_model(plan)
        model = plan.model or check_model(config, model_path, "model.hub")
    except ConfigError as error:
        print(f"leeway: {error}", file=sys.stderr)
        return WRONG_INPUT
    with ExitStack() as stack:
        tracker = stack.enter_context(Tracker(config, folder))
        display = stack.enter_context(Display(config, folder))

        def notify(kind: str, text: str) -> None:
            tracker.event(kind, text)
            display.event(text)

        serving_path = prepare_serving_model(model_path, folder.serving)
        crew = Crew(plan, model_path, model, serving_path, notify)
        stack.callback(crew.stop)
        interrupts = stack.enter_context(_Interrupts(notify))
        run = _Run(plan, crew, tracker, display, interrupts, Progress(config, started))
        try:
            return run.go()
        except CrewError as error:
            tracker.event("failed", str(error))
            display.fail(str(error))
            return FAILED
        except _Stopped:
            display.fail(f"stopped; what was trained lies in {folder.root}")
            return INTERRUPTED


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
    """Counts Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends now."""

    def __init__(self, notify: Any) -> None:  # noqa: ANN401 -- a callable of kind and text
        self.count = 0
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self.training:
            raise _Stopped
        self._notify("interrupt", "finishing the step and writing a checkpoint; once more stops now")

    training = False
    """While true, the first signal asks for an orderly end; before and after, it ends at once."""


class _Run:
    """One run, from version 0 to the summary."""

    def __init__(
        self,
        plan: Plan,
        crew: Crew,
        tracker: Tracker,
        display: Display,
        interrupts: _Interrupts,
        progress: Progress,
    ) -> None:
        self._plan = plan
        self._config = plan.config
        self._crew = crew
        self._tracker = tracker
        self._display = display
        self._interrupts = interrupts
        self._progress = progress
        self._evaluated_at = 0

    def go(self) -> int:
        self._display.phase("starting Ray, the buffer, the stages and the actors (about half a minute)")
        self._crew.start()
        self._display.phase("evaluating version 0")
        self._crew.begin_learning()  # loads and publishes version 0 while the actors evaluate
        before = self._evaluate(self._plan.task.num_heldout, PolicyVersion(0, 0))
        self._display.phase("training")
        self._crew.begin()
        interrupted = self._train()
        self._crew.drain()
        self._display.phase("exporting the model")
        self._crew.export(self._plan.folder.export)
        after = None
        if not interrupted:
            final = PolicyVersion(*self._crew.status().newest)
            self._display.phase(f"evaluating version {final}")
            after = self._evaluate(self._plan.task.num_heldout, final)
        self._finish(before, after)
        return INTERRUPTED if interrupted else OK

    def _train(self) -> bool:
        """Watch until the learner is done; returns whether that was because of an interrupt."""
        asked_at: float | None = None
        self._interrupts.training = True
        while not self._crew.learning_is_over():
            time.sleep(self._config.launch.poll_interval_s)
            self._digest(self._crew.poll())
            if self._interrupts.count and asked_at is None:
                asked_at = time.monotonic()
                self._crew.request_stop()
            limit = self._config.launch.shutdown_timeout_s
            if asked_at is not None and time.monotonic() - asked_at > limit:
                raise CrewError(f"the learner did not finish its step within launch.shutdown_timeout_s = {limit:g} s")
            self._maybe_evaluate()
        self._interrupts.training = False
        self._digest(self._crew.poll())
        return asked_at is not None

    def _digest(self, news: News) -> None:
        rows = self._progress.update(news)
        for step, row in rows:
            self._tracker.metrics(row, step)
        self._display.update(self._progress)

    def _maybe_evaluate(self) -> None:
        every = self._config.actors.eval_every
        version = self._progress.version
        if not every or version < self._evaluated_at + every or version >= self._config.learner.num_steps:
            return
        self._evaluated_at = version - version % every
        accuracy = self._evaluate(self._config.actors.eval_problems, None)
        self._tracker.metrics(accuracy.row(), self._progress.step)

    def _evaluate(self, num_problems: int, version: PolicyVersion | None) -> Accuracy:
        """Spread held-out problems over the living actors.

        Args:
            num_problems: how many.
            version: the version to evaluate at the earliest; None: whichever each actor has.
        """
        num_shards = len(self._crew.ready_actors())
        requests = [
            EvalRequest(num_problems=num_problems, shard=shard, num_shards=num_shards, min_version=version)
            for shard in range(num_shards)
        ]
        results = self._crew.on_actors("evaluate", requests, self._config.launch.eval_timeout_s)
        accuracy = Accuracy.of(results)
        self._tracker.event("evaluated", accuracy.describe(), **accuracy.row())
        self._display.event(accuracy.describe())
        return accuracy

    def _finish(self, before: Accuracy, after: Accuracy | None) -> None:
        status = self._crew.status()
        values = self._progress.summary(before, after, status)
        text = json.dumps(values, indent=2)
        temporary = self._plan.folder.summary.with_suffix(".tmp")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self._plan.folder.summary)
        self._tracker.summary(values)
        self._display.finish(before, after, values)
