"""Where the figures of a run go: metrics.jsonl, events.jsonl and Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from launch.config import Config
from launch.outlets.wandb_run import forget_wandb, start_wandb
from launch.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker:
    """Writes rows of metrics and events as they come; every line is flushed, so that a crash loses none."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str = "", last_step: int = 0) -> None:
        """Open the files, and Weights & Biases where it is wanted.

        Args:
            config: of the run.
            folder: where the files go; what is in them stays.
            run_id: by which Weights & Biases knows a run that is gone on with; '': it chooses one.
            last_step: that was written before.

        Raises:
            ConfigError: Weights & Biases cannot be reached with the login at hand.
        """
        self._config = config
        self._metrics: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._events: TextIO = folder.events.open("a", encoding="utf-8")
        self._wandb: Any = None
        self._wandb_step = last_step
        if config.tracking.wandb != "disabled":
            self._wandb = start_wandb(config, folder, run_id)

    def step(self, row: Mapping[str, Any], step: int) -> None:
        """Write the row of a step, if it is one of every tracking.log_every."""
        if step % self._config.tracking.log_every:
            return
        finite = self._write(row, step)
        if step >= self._wandb_step:
            # its history only grows: a step that a restarted learner takes again stays as it was taken first
            self._log(finite, step)

    def metrics(self, row: Mapping[str, Any], step: int) -> None:
        """Write a row that belongs to no step, such as an evaluation; none is left out.

        Weights & Biases has it at the newest step that it knows, where a restarted learner is behind that one.
        """
        self._log(self._write(row, step), max(step, self._wandb_step))

    def _write(self, row: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Append a row to the file; null stands for what does not apply here, or is not finite. Returns the row."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._metrics.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._metrics.flush()
        return finite

    def _log(self, finite: Mapping[str, Any], step: int) -> None:
        self._wandb_step = step
        known = {key: value for key, value in finite.items() if value is not None}
        self._with_wandb(lambda run: run.log(known, step=step))

    def _with_wandb(self, tell: Callable[[Any], object]) -> None:
        """Tell Weights & Biases, where it is wanted and lives; the run goes on without it, for the files have all."""
        if self._wandb is None:
            return
        try:
            tell(self._wandb)
        except Exception as error:  # of many kinds, mostly because its process died
            self._wandb = None
            forget_wandb()
            self.event(
                "wandb",
                f"Weights & Biases does not answer any more ({type(error).__name__}: {error}) and is told nothing from "
                f"here on; {Path(self._metrics.name).name} goes on",
            )

    def event(self, kind: str, text: str, **details: object) -> None:
        """Something happened that a reader of the run will want to find: a restart, an evaluation, an error."""
        log.info("%s: %s", kind, text)
        self._events.write(json.dumps({"time_s": time.time(), "kind": kind, "text": text, **details}) + "\n")
        self._events.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final figures for Weights & Biases."""
        self._with_wandb(lambda run: run.summary.update(dict(values)))

    def close(self) -> None:
        """Flush everything; no process of Weights & Biases is left behind."""
        if self._events.closed:
            return
        with ExitStack() as stack:  # a full disk fails each, and none may keep the next from its end
            stack.callback(self._events.close)
            stack.callback(self._metrics.close)
            self._with_wandb(lambda run: run.finish())
            self._wandb = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
