"""Where the figures of a run go beside metrics.jsonl: actors.jsonl, events.jsonl, Weights & Biases, and Prometheus.

A metric of the registry `lag/token_mean` is the gauge `leeway_lag_token_mean`; `pool/NAME/lag_mean` is
`leeway_pool_lag_mean{pool="NAME"}`, and `reward/part/NAME` is `leeway_reward_part{function="NAME"}`. `ACTOR_GAUGES`
and `RUN_GAUGES` are further ones. Counts are gauges too: a step that is taken again takes its counts back first.
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

from buffer.ledger import LEDGER_METRICS
from common.process import wall_time
from launch.config import Config, TrackingConfig
from launch.errors import ConfigError
from launch.observe.metrics import METRICS, cut_torn_line, is_of_actors, labelled
from launch.observe.status import Accuracy, ActorStatus, RunStatus
from launch.run_folder import RunFolder

log = logging.getLogger(__name__)


class Tracker:
    """Writes events, evaluations and the columns of the actors; every line is flushed, so that a crash loses none."""

    def __init__(self, config: Config, folder: RunFolder, run_id: str = "", last_step: int = 0) -> None:
        """Append to the files, and start Weights & Biases if configured, which has the steps up to the last.

        Raises:
            ConfigError: Weights & Biases cannot be reached with the login at hand.
        """
        paths = folder.actors, folder.events, folder.evaluations
        for path in paths:
            cut_torn_line(path)
        folder.metrics.touch()  # the learner's coordinator writes it, and finds it if its host shares the folder
        self._stack = ExitStack()  # closes every file, also if a full disk fails another
        self._actors, self._events, self._evaluations = (self._stack.enter_context(path.open("ab")) for path in paths)
        self._wandb: Any = None
        self._wandb_step = last_step
        if config.tracking.wandb != "disabled":
            self._wandb = start_wandb(config, folder, run_id)
            self._stack.callback(self._with_wandb, lambda run: run.finish())

    def step(self, row: Mapping[str, Any]) -> None:
        """Take the row of a step: its columns of the actors go to actors.jsonl, all of it to Weights & Biases."""
        _append(self._actors, {name: value for name, value in row.items() if name == "step" or is_of_actors(name)})
        if row["step"] >= self._wandb_step:
            # its history only grows: a step that a restarted learner takes again stays as it was taken first
            self._log(row, row["step"])

    def evaluated(self, accuracy: Accuracy, step: int, wall_s: float) -> None:
        """Write the row of an evaluation at a step; Weights & Biases gets it at the newest step that it has."""
        row = accuracy.row()
        values = {name.removeprefix("eval/"): value for name, value in row.items()}
        _append(self._evaluations, {"time_s": wall_time(), "wall_s": wall_s, "step": step, **values})
        self._log(row, max(step, self._wandb_step))

    def event(self, kind: str, text: str, **details: object) -> None:
        """Write what a reader of the run will look for: a restart, an evaluation, an error."""
        log.info("%s: %s", kind, text)
        _append(self._events, {"time_s": wall_time(), "kind": kind, "text": text, **details})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._with_wandb(lambda run: run.summary.update(dict(values)))

    def _log(self, row: Mapping[str, Any], step: int) -> None:
        self._wandb_step = step
        known = {key: value for key, value in row.items() if value is not None}
        self._with_wandb(lambda run: run.log(known, step=step))

    def _with_wandb(self, tell: Callable[[Any], object]) -> None:
        """Call Weights & Biases, if it is there; without it the run goes on, for the files have all."""
        if self._wandb is None:
            return
        try:
            tell(self._wandb)
        except Exception as error:  # of many kinds, mostly because its process died
            self._wandb = None
            import wandb

            with contextlib.suppress(Exception, SystemExit):  # else its client is called again when this process ends
                wandb.teardown()
            self.event(
                "wandb",
                f"Weights & Biases does not answer ({type(error).__name__}: {error}) and gets no more rows; "
                "metrics.jsonl goes on",
            )

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _append(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """Append a row; null stands for what does not apply here, or is not finite."""
    file.write(msgspec.json.encode(row) + b"\n")
    file.flush()


INIT_TIMEOUT_S = 30.0
"""Seconds in which the server has to answer at the start."""
FINISH_TIMEOUT_S = 60.0
"""Seconds in which the last rows have to arrive there at the end; they are on disk for `wandb sync` in any case."""


def start_wandb(config: Config, folder: RunFolder, run_id: str) -> Any:  # noqa: ANN401 -- wandb's Run
    """Start the run at Weights & Biases, or resume the one with this id ('': it chooses one).

    Raises:
        ConfigError: the server does not answer in time, or refuses the login. No process is left behind.
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
            resume="allow" if run_id and tracking.wandb == "online" else None,  # offline knows no earlier part
            config=config.model_dump(mode="json"),
            settings=settings,
        )
    except wandb.errors.Error as error:
        wandb.teardown()
        said = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise ConfigError(
            f"tracking.wandb = 'online' does not work: {said}; check the network and 'wandb login', or use "
            "tracking.wandb = 'offline' and 'wandb sync' later"
        ) from error


PROMETHEUS_HOST = "127.0.0.1"
"""The metrics need no password, so a scraper on another host needs a tunnel."""
CLOSE_S = 5.0

ACTOR_GAUGES: dict[str, tuple[str, Callable[[ActorStatus], float | None]]] = {
    "leeway_actor_working": ("1 where the actor works, else 0.", lambda actor: actor.state == "working"),
    "leeway_actor_tokens_per_s": ("Completion tokens that it generates per second.", lambda actor: actor.tokens_per_s),
    "leeway_actor_running_samples": ("Samples that it has in flight.", lambda actor: actor.running),
    "leeway_actor_behind": ("Versions that it is behind the newest published one.", lambda actor: actor.behind),
    "leeway_actor_waiting": ("1 where something keeps it from running more.", lambda actor: bool(actor.waits_for)),
    "leeway_actor_restarts": ("How often it was started again.", lambda actor: actor.restarts),
    "leeway_actor_mismatch_lag0_abs": (METRICS["mismatch/lag0_abs"], lambda actor: actor.mismatch_lag0_abs),
}

RUN_GAUGES: dict[str, tuple[str, Callable[[RunStatus], float | None]]] = {
    "leeway_polled_timestamp_seconds": ("When the roles were last asked for news.", lambda run: run.polled_s),
    "leeway_learner_waiting": ("1 where the learner waits for a batch.", lambda run: bool(run.learner.waits_for)),
    "leeway_learner_busy_frac": ("Share of its last step in which it computed.", lambda run: run.learner_busy_frac),
    "leeway_waiting": ("How many sentences there are of who waits for whom.", lambda run: len(run.waits)),
    "leeway_tripped": ("How many tripwires stand.", lambda run: len(run.tripped)),
    "leeway_buffer_ready_groups": (
        "Groups that wait for a step.",
        lambda run: run.buffer.ready_groups if run.buffer else None,
    ),
}


class Exporter(Collector):
    """Serves what it was shown last; a context manager. Without a port it does nothing."""

    def __init__(self, config: TrackingConfig) -> None:
        """Bind the port.

        Raises:
            ConfigError: it is in use, or not ours to bind.
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
                f"{error.strerror or error}; choose another, or leave it out"
            ) from None

    def show(self, status: RunStatus) -> None:
        self._shown = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield what is served; called for every request, in its thread."""
        status, families = self._shown, dict[str, GaugeMetricFamily]()
        if status is None:
            return

        def add(name: str, meaning: str, value: float | None, **labels: str) -> None:
            if value is not None:
                family = families.setdefault(name, GaugeMetricFamily(name, meaning, labels=list(labels)))
                family.add_metric(list(labels.values()), float(value))

        facts = {"run": status.run, "run_id": status.run_id, "phase": status.phase}
        add("leeway_run", "1; its labels say which run this is.", 1.0, **facts)
        # a row has the ledger of its draw; this is that of now
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
                add("leeway_trained_tokens", "Trained tokens by their lag.", num, pool=pool, lag=str(lag))
        yield from families.values()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(CLOSE_S)
