"""Outputs besides metrics.jsonl: actors.jsonl, events.jsonl, eval.jsonl, external trackers and Prometheus.

The metric `lag/token_mean` becomes the gauge `leeway_lag_token_mean`; `pool/NAME/lag_mean` becomes
`leeway_pool_lag_mean{pool="NAME"}`, and `reward/part/NAME` becomes `leeway_reward_part{function="NAME"}`.
`ACTOR_GAUGES` and `RUN_GAUGES` define more gauges. Counts are gauges too: a repeated step decreases its counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from leeway.buffer.ledger import LEDGER_METRICS
from leeway.common.process import wall_time
from leeway.launch.config import Config, TrackingConfig
from leeway.launch.errors import ConfigError
from leeway.launch.host import leeway_command
from leeway.launch.observe.metrics import METRICS, cut_torn_line, is_of_actors, labelled
from leeway.launch.observe.status import Accuracy, ActorStatus, RunStatus
from leeway.launch.observe.trackers import CALL_TIMEOUT_S, READY, TrackedRun
from leeway.launch.run_folder import RunFolder

log = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Time limit of the start of a tracker; the first start of MLflow creates a database."""
FINISH_TIMEOUT_S = CALL_TIMEOUT_S + 5.0
"""Time limit of the final upload of all trackers together."""
START_HINT = "Fix the cause, or remove it from tracking.to"
START_HINTS = {
    "wandb": "Check the network and 'wandb login', or set WANDB_MODE=offline and run 'wandb sync' later",
    "mlflow": "Check MLFLOW_TRACKING_URI, or remove it from tracking.to",
}


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes events, evaluations and the columns of the actors. Flushes every line, so that a crash loses no line."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str = "", last_step: int = 0) -> None:
        """Open the files and the trackers of `tracking.to`, which already have the steps up to `last_step`.

        Raises:
            ConfigError: a tracker does not start, for example because its server is unreachable or rejects the login.
        """
        paths = folder.actors, folder.events, folder.evaluations
        for path in paths:
            cut_torn_line(path)
        folder.metrics.touch()  # the learner's coordinator writes this file, possibly on another host
        self._stack = ExitStack()  # closes every file, even if closing one fails on a full disk
        self._actors, self._events, self._evaluations = (self._stack.enter_context(path.open("ab")) for path in paths)
        self._logged_step = last_step
        self._trackers: list[TrackerProcess] = []
        self._stack.callback(folder.calls.unlink, missing_ok=True)
        self._calls = self._stack.enter_context(folder.calls.open("wb"))
        _append(self._calls, TrackedRun(folder.name, str(folder.root), run_id, config.model_dump(mode="json")))
        try:
            for name in dict.fromkeys(config.tracking.to):
                self._trackers.append(TrackerProcess(name, folder.calls, folder.log(name, 0)))
            for each in self._trackers:
                each.wait_until_ready()
        except BaseException:
            for each in self._trackers:
                each.kill()
            self._stack.close()
            raise

    def step(self, row: Mapping[str, Any]) -> None:
        """Write the actor columns of a step to actors.jsonl, and the whole row to the trackers."""
        _append(self._actors, {name: value for name, value in row.items() if name == "step" or is_of_actors(name)})
        if row["step"] >= self._logged_step:
            # trackers only append: if a restarted learner repeats a step, the first row of this step is kept
            self._log(row, row["step"])

    def evaluated(self, accuracy: Accuracy, step: int, wall_s: float) -> None:
        """Write the row of an evaluation at `step`; in trackers, at the newest logged step if that is later."""
        row = accuracy.row()
        values = {name.removeprefix("eval/"): value for name, value in row.items()}
        _append(self._evaluations, {"time_s": wall_time(), "wall_s": wall_s, "step": step, **values})
        self._log(row, max(step, self._logged_step))

    def event(self, kind: str, text: str, **details: object) -> None:
        """Write an event of the run, such as a restart, an evaluation or an error."""
        log.info("%s: %s", kind, text)
        _append(self._events, {"time_s": wall_time(), "kind": kind, "text": text, **details})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._send("summary", values)

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        self._logged_step = step
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and isfinite(value)}
        numbers.pop("step", None)  # the axis, and a reserved name in trackio
        self._send("log", numbers, step)

    def _send(self, *call: object, deadline: float | None = None) -> None:
        """Append a call for the trackers, and drop the trackers that failed, as the files have all data."""
        if self._trackers:
            _append(self._calls, call)
        for each in [*self._trackers]:
            if why := each.failure(deadline):
                self._trackers.remove(each)
                each.kill()
                text = f"{each.name} does not respond ({why}): logging to it stops, but metrics.jsonl continues"
                self.event("tracker", text)

    def __exit__(self, *error: object) -> None:
        with self._stack:
            self._send("finish", deadline=time.monotonic() + FINISH_TIMEOUT_S)
            for each in self._trackers:
                each.kill()


class TrackerProcess:
    """The launcher's end of a tracker, whose process is `leeway.launch.observe.trackers`."""

    def __init__(self, name: str, calls: Path, output: Path) -> None:
        self.name = name
        command = leeway_command(name, str(calls), module="leeway.launch.observe.trackers")
        with output.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, start_new_session=True)
        assert self._process.stdout is not None
        self._replies = self._process.stdout

    def wait_until_ready(self) -> None:
        is_readable, *_ = select.select([self._replies], [], [], START_TIMEOUT_S)
        reply = self._replies.readline().decode().strip() if is_readable else f"no answer within {START_TIMEOUT_S:g} s"
        if reply != READY:
            raise ConfigError(
                f"tracking.to: {self.name} cannot start: {reply}. {START_HINTS.get(self.name, START_HINT)}"
            )

    def failure(self, deadline: float | None = None) -> str:
        """Return why the process ended, or "" if it works; with a deadline, wait until it has sent all rows."""
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic())) if deadline else self._process.poll()
        except subprocess.TimeoutExpired:
            return f"rows are unsent after {FINISH_TIMEOUT_S:g} s"
        if status == -signal.SIGALRM:
            return f"a call took over {CALL_TIMEOUT_S} s"
        reply = self._replies.readline().decode().strip() if status else ""
        return reply or (f"its process exited with status {status}" if status else "")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also ends the service of wandb
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._replies.close()


def _append(file: BinaryIO, row: object) -> None:
    """Append a row; msgspec encodes NaN and infinity as null."""
    file.write(msgspec.json.encode(row) + b"\n")
    file.flush()


PROMETHEUS_HOST = "127.0.0.1"
"""Address of the endpoint: loopback only, because the metrics have no authentication; other hosts need a tunnel."""
CLOSE_S = 5.0

ACTOR_GAUGES: dict[str, tuple[str, Callable[[ActorStatus], float | None]]] = {
    "leeway_actor_working": ("1 if the actor is working, else 0.", lambda actor: actor.state == "working"),
    "leeway_actor_tokens_per_s": ("Completion tokens generated per second.", lambda actor: actor.tokens_per_s),
    "leeway_actor_running_samples": ("Number of samples in flight.", lambda actor: actor.running),
    "leeway_actor_behind": ("Number of versions behind the newest published version.", lambda actor: actor.behind),
    "leeway_actor_waiting": ("1 if the actor waits, else 0.", lambda actor: bool(actor.waits_for)),
    "leeway_actor_restarts": ("Restarts of the actor.", lambda actor: actor.restarts),
    "leeway_actor_mismatch_lag0_abs": (METRICS["mismatch/lag0_abs"], lambda actor: actor.mismatch_lag0_abs),
}

RUN_GAUGES: dict[str, tuple[str, Callable[[RunStatus], float | None]]] = {
    "leeway_polled_timestamp_seconds": ("Time of the last poll of the roles.", lambda run: run.polled_s),
    "leeway_learner_waiting": ("1 if the learner waits for a batch, else 0.", lambda run: bool(run.learner.waits_for)),
    "leeway_learner_busy_frac": ("Fraction of the last step spent computing.", lambda run: run.learner_busy_frac),
    "leeway_waiting": ("Number of current waits.", lambda run: len(run.waits)),
    "leeway_alerts": ("Number of active alerts.", lambda run: len(run.alerts)),
    "leeway_buffer_ready_groups": (
        "Number of groups in the buffer that are ready for a step.",
        lambda run: run.buffer.ready_groups if run.buffer else None,
    ),
}


class Exporter(Collector, contextlib.AbstractContextManager["Exporter"]):
    """Context manager that serves the latest status to Prometheus. Does nothing if no port is configured."""

    def __init__(self, config: TrackingConfig) -> None:
        """Bind the port.

        Raises:
            ConfigError: the port is in use, or binding it is not permitted.
        """
        self._shown: RunStatus | None = None
        self._server: Any = None
        if config.prometheus_port is None:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.prometheus_port, PROMETHEUS_HOST, registry)
        except OSError as error:
            raise ConfigError(
                f"tracking.prometheus_port = {config.prometheus_port} cannot be bound at {PROMETHEUS_HOST}: "
                f"{error.strerror or error}. Choose another port, or unset the key"
            ) from None

    def show(self, status: RunStatus) -> None:
        self._shown = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; called for every request, in the server's thread."""
        status, families = self._shown, dict[str, GaugeMetricFamily]()
        if status is None:
            return

        def add(name: str, meaning: str, value: float | None, **labels: str) -> None:
            if value is not None:
                family = families.setdefault(name, GaugeMetricFamily(name, meaning, labels=list(labels)))
                family.add_metric(list(labels.values()), float(value))

        facts = {"run": status.run, "run_id": status.run_id, "phase": status.phase}
        add("leeway_run", "Always 1; the labels identify the run.", 1.0, **facts)
        # the row has the ledger of its step; replace these counts with the current ones
        ledger = status.buffer.ledger if status.buffer is not None else {}
        now = {name: ledger[key] for name, key in LEDGER_METRICS.items() if key in ledger}
        for name, value in {**status.row, **now}.items():
            registered, label, which = labelled(name)
            if registered in METRICS and isinstance(value, int | float):
                gauge = f"leeway_{registered.replace('/NAME', '').replace('/', '_')}"
                add(gauge, METRICS[registered], value, **({label: which} if label else {}))
        for name, (meaning, of_run) in RUN_GAUGES.items():
            add(name, meaning, of_run(status))
        for name, (meaning, of_actor) in ACTOR_GAUGES.items():
            for actor in status.actors:
                add(name, meaning, of_actor(actor), actor=actor.name, pool=actor.pool)
        for pool, lags in status.lags.items():
            for lag, num in lags.items():
                add("leeway_trained_tokens", "Number of tokens trained on, by lag.", num, pool=pool, lag=str(lag))
        yield from families.values()

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(CLOSE_S)
