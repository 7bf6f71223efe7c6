"""Where the figures of a run go: metrics.jsonl, events.jsonl and Weights & Biases."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from launch.config import Config
from launch.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker:
    """Writes rows of metrics and events as they come; every line is flushed, so that a crash loses none."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config = config
        self._metrics: TextIO = folder.metrics.open("a", encoding="utf-8")
        self._events: TextIO = folder.events.open("a", encoding="utf-8")
        self._wandb: Any = None
        self.last_event = ""
        if config.tracking.wandb != "disabled":
            self._wandb = _start_wandb(config, folder)

    def metrics(self, row: Mapping[str, Any], step: int) -> None:
        """Write one row; None means that the metric does not apply here, and is kept as null."""
        if step % self._config.tracking.log_every:
            return
        self._metrics.write(json.dumps({"step": step, **row}, allow_nan=True) + "\n")
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in row.items() if value is not None}, step=step)

    def event(self, kind: str, text: str, **details: object) -> None:
        """Something happened that a reader of the run will want to find: a restart, an evaluation, an error."""
        self.last_event = text
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

    run = wandb.init(
        project=config.tracking.project,
        name=folder.name,
        dir=str(folder.root),
        mode=config.tracking.wandb,
        config=config.model_dump(mode="json"),
        settings=wandb.Settings(silent=True, console="off", init_timeout=60, x_disable_stats=True),
    )
    run.define_metric("*", step_metric="step")
    return run
