"""Where the figures of a run go: metrics.jsonl, events.jsonl and Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from launch.config import Config
from launch.load import ConfigError
from launch.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker:
    """Writes rows of metrics and events as they come; every line is flushed, so that a crash loses none."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        """Open the files, and Weights & Biases where it is wanted.

        Raises:
            ConfigError: Weights & Biases cannot be reached with the login at hand.
        """
        self._config = config
        self._metrics: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._events: TextIO = folder.events.open("a", encoding="utf-8")
        self._wandb: Any = None
        self._wandb_step = 0
        if config.tracking.wandb != "disabled":
            self._wandb = _start_wandb(config, folder)

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
        if self._wandb is not None:
            self._wandb_step = step
            self._wandb.log({key: value for key, value in finite.items() if value is not None}, step=step)

    def event(self, kind: str, text: str, **details: object) -> None:
        """Something happened that a reader of the run will want to find: a restart, an evaluation, an error."""
        log.info("%s: %s", kind, text)
        self._events.write(json.dumps({"time_s": time.time(), "kind": kind, "text": text, **details}) + "\n")
        self._events.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Final figures for Weights & Biases."""
        if self._wandb is not None:
            self._wandb.summary.update(dict(values))

    def close(self) -> None:
        """Flush everything; no process of Weights & Biases is left behind."""
        self._metrics.close()
        self._events.close()
        if self._wandb is not None:
            self._wandb.finish()
            self._wandb = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_wandb(config: Config, folder: RunFolder) -> Any:  # noqa: ANN401 -- wandb's Run
    import wandb

    try:
        run = wandb.init(
            project=config.tracking.project,
            name=folder.name,
            dir=str(folder.root),
            mode=config.tracking.wandb,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60, x_disable_stats=True),
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            f"tracking.wandb = '{config.tracking.wandb}': {str(error).splitlines()[0]}; "
            f"run 'wandb login', or use tracking.wandb = 'offline'"
        ) from error
    run.define_metric("*", step_metric="step")
    return run
