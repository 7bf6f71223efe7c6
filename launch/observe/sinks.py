"""Outputs besides metrics.jsonl: actors.jsonl, events.jsonl, eval.jsonl, Weights & Biases and Prometheus.

The metric `lag/token_mean` becomes the gauge `leeway_lag_token_mean`; `pool/NAME/lag_mean` becomes
`leeway_pool_lag_mean{pool="NAME"}`, and `reward/part/NAME` becomes `leeway_reward_part{function="NAME"}`.
`ACTOR_GAUGES` and `RUN_GAUGES` define more gauges. Counts are gauges too: a repeated step decreases its counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

import msgspec
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from leeway.buffer.ledger import LEDGER_METRICS
from leeway.common.process import wall_time
from leeway.launch.config import Config, TrackingConfig
from leeway.launch.errors import ConfigError
from leeway.launch.observe.metrics import METRICS, cut_torn_line, is_of_actors, labelled
from leeway.launch.observe.status import Accuracy, ActorStatus, RunStatus
from leeway.launch.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker(contextlib.AbstractContextManager["Tracker"]):
    """Writes events, evaluations and the columns of the actors. Flushes every line, so that a crash loses no line."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str = "", last_step: int = 0) -> None:
        """Open the files and, if configured, Weights & Biases, where the steps up to `last_step` are already logged.

        Raises:
            ConfigError: Weights & Biases is unreachable, or rejects the login.
        """
        paths = folder.actors, folder.events, folder.evaluations
        for path in paths:
            cut_torn_line(path)
        folder.metrics.touch()  # the learner's coordinator writes this file, possibly on another host
        self._stack = ExitStack()  # closes every file, even if closing one fails on a full disk
        self._actors, self._events, self._evaluations = (self._stack.enter_context(path.open("ab")) for path in paths)
        self._wandb: Any = None
        self._wandb_step = last_step
        if config.tracking.wandb != "disabled":
            self._wandb = start_wandb(config, folder, run_id)
            self._stack.callback(self._with_wandb, lambda run: run.finish())

    def step(self, row: Mapping[str, Any]) -> None:
        """Write the actor columns of a step to actors.jsonl, and the whole row to Weights & Biases."""
        _append(self._actors, {name: value for name, value in row.items() if name == "step" or is_of_actors(name)})
        if row["step"] >= self._wandb_step:
            # Weights & Biases only appends: if a restarted learner repeats a step, the first row of this step is kept
            self._log(row, row["step"])

    def evaluated(self, accuracy: Accuracy, step: int, wall_s: float) -> None:
        """Write the row of an evaluation at `step`; in Weights & Biases, at the newest logged step if that is later."""
        row = accuracy.row()
        values = {name.removeprefix("eval/"): value for name, value in row.items()}
        _append(self._evaluations, {"time_s": wall_time(), "wall_s": wall_s, "step": step, **values})
        self._log(row, max(step, self._wandb_step))

    def event(self, kind: str, text: str, **details: object) -> None:
        """Write an event of the run, such as a restart, an evaluation or an error."""
        log.info("%s: %s", kind, text)
        _append(self._events, {"time_s": wall_time(), "kind": kind, "text": text, **details})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._with_wandb(lambda run: run.summary.update(dict(values)))

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        self._wandb_step = step
        known = {key: value for key, value in row.items() if value is not None}
        self._with_wandb(lambda run: run.log(known, step=step))

    def _with_wandb(self, call: Callable[[Any], object]) -> None:
        """Call Weights & Biases if enabled; after a failure, disable Weights & Biases, as the files have all data."""
        if self._wandb is None:
            return
        try:
            call(self._wandb)
        except Exception as error:  # wandb raises errors of many types, mostly because its process died
            self._wandb = None
            import wandb

            with contextlib.suppress(Exception, SystemExit):  # otherwise wandb's exit hook calls the dead process
                wandb.teardown()
            self.event(
                "wandb",
                f"Weights & Biases does not respond ({type(error).__name__}: {error}): logging to it stops, "
                "but metrics.jsonl continues",
            )

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _append(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """Append a row; msgspec encodes NaN and infinity as null."""
    file.write(msgspec.json.encode(row) + b"\n")
    file.flush()


INIT_TIMEOUT_S = 30.0
"""Timeout of the first connection to the server."""
FINISH_TIMEOUT_S = 60.0
"""Timeout of the final upload; unsent rows stay on disk for `wandb sync`."""


def start_wandb(config: Config, folder: RunFolder, run_id: str) -> Any:  # noqa: ANN401 -- wandb's Run
    """Start a Weights & Biases run, or resume the run `run_id`; '' lets the server assign an id.

    Raises:
        ConfigError: the connection timed out, or the login was rejected. The wandb process has ended.
    """
    import wandb

    tracking = config.tracking
    settings = wandb.Settings(
        silent=True, console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, x_disable_stats=True
    )
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "leeway"),
            name=folder.name,
            dir=str(folder.root),
            mode=tracking.wandb,
            id=run_id or None,
            resume="allow" if run_id and tracking.wandb == "online" else None,  # offline runs cannot be resumed
            config=config.model_dump(mode="json"),
            settings=settings,
        )
    except wandb.errors.Error as error:
        wandb.teardown()
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ConfigError(
            f"tracking.wandb = 'online' failed: {reason}. Check the network and 'wandb login', or set "
            "tracking.wandb = 'offline' and run 'wandb sync' later"
        ) from error


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
