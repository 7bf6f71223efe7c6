"""Prometheus: serves the metrics of a run, as its newest poll has them, at tracking.prometheus_port.

A metric of the registry `lag/token_mean` is the gauge `leeway_lag_token_mean`; `pool/NAME/lag_mean` is
`leeway_pool_lag_mean{pool="NAME"}`. `OF_ACTORS` and `OF_RUN` are further ones. All are gauges, also what counts up: a
step that is taken again takes its counts back first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from launch.config import TrackingConfig
from launch.errors import ConfigError
from launch.outlets.metrics import METRICS, POOL_PREFIX, registered
from launch.state.snapshot import Actor, Snapshot
from learner.ledger_metrics import LEDGER_METRICS

CLOSE_S = 5.0

OF_ACTORS: dict[str, tuple[str, Callable[[Actor], float | None]]] = {
    "leeway_actor_working": ("1 where the actor works, else 0.", lambda actor: float(actor.state == "working")),
    "leeway_actor_tokens_per_s": ("Completion tokens that it generates per second.", lambda actor: actor.tokens_per_s),
    "leeway_actor_running_samples": ("Samples that it has in flight.", lambda actor: actor.running),
    "leeway_actor_behind": ("Versions that it is behind the newest published one.", lambda actor: actor.behind),
    "leeway_actor_waiting": (
        "1 where something keeps it from running more.",
        lambda actor: float(bool(actor.waits_for)),
    ),
    "leeway_actor_restarts": ("How often it was started again.", lambda actor: actor.restarts),
    "leeway_actor_mismatch_lag0_abs": (METRICS["mismatch/lag0_abs"], lambda actor: actor.mismatch_lag0_abs),
}
"""With the labels actor and pool."""

OF_RUN: dict[str, tuple[str, Callable[[Snapshot], float | None]]] = {
    "leeway_polled_timestamp_seconds": ("When the roles were last asked for news.", lambda run: run.polled_s),
    "leeway_learner_waiting": (
        "1 where the learner waits for a batch.",
        lambda run: float(bool(run.learner.waits_for)),
    ),
    "leeway_learner_busy_frac": (
        "Share of its last step in which the learner computed.",
        lambda run: run.learner.busy_frac,
    ),
    "leeway_waiting": ("How many sentences there are of who waits for whom.", lambda run: len(run.waits)),
    "leeway_tripped": ("How many tripwires stand.", lambda run: len(run.tripped)),
    "leeway_buffer_ready_groups": (
        "Groups that wait for a step.",
        lambda run: None if run.buffer is None else run.buffer.ready_groups,
    ),
}
"""Of the run as a whole."""


class Exporter(Collector):
    """Serves what it was shown last; a context manager. Without a port it does nothing."""

    def __init__(self, config: TrackingConfig) -> None:
        """Bind the port.

        Raises:
            ConfigError: it is in use, or not ours to bind.
        """
        self._shown: tuple[Snapshot, Mapping[str, Any]] | None = None
        self._server: Any = None
        if config.prometheus_port is None:
            return
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(config.prometheus_port, config.prometheus_host, registry)
        except OSError as error:
            raise ConfigError(
                f"tracking.prometheus_port = {config.prometheus_port} cannot be bound at tracking.prometheus_host = "
                f"'{config.prometheus_host}': {error.strerror or error}; choose another, or leave it out"
            ) from None

    def show(self, snapshot: Snapshot, row: Mapping[str, Any]) -> None:
        """From now on serve this.

        Args:
            snapshot: of the run.
            row: the metrics of the newest step; empty before the first.
        """
        self._shown = snapshot, row

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What is served; called for every request, by its thread."""
        if self._shown is None:
            return
        snapshot, row = self._shown
        labels = {"run": snapshot.run, "run_id": snapshot.run_id, "phase": snapshot.phase}
        info = GaugeMetricFamily("leeway_run", "1; its labels say which run this is.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        yield info
        yield from _of_row({**row, **_ledger(snapshot)})
        for name, (meaning, of_run) in OF_RUN.items():
            if (value := of_run(snapshot)) is not None:
                yield GaugeMetricFamily(name, meaning, value=value)
        for name, (meaning, of_actor) in OF_ACTORS.items():
            family = GaugeMetricFamily(name, meaning, labels=["actor", "pool"])
            for actor in snapshot.actors:
                if (value := of_actor(actor)) is not None:
                    family.add_metric([actor.name, actor.pool], value)
            yield family
        tokens = GaugeMetricFamily("leeway_trained_tokens", "Trained tokens by their lag.", labels=["pool", "lag"])
        for pool, counts in snapshot.lags.items():
            for lag, count in counts.items():
                tokens.add_metric([pool, str(lag)], count)
        yield tokens

    def close(self) -> None:
        """Let go of the port. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(CLOSE_S)

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ledger(snapshot: Snapshot) -> dict[str, float]:
    """The counts of the ledger now; a row has those of its draw."""
    if snapshot.buffer is None:
        return {}
    ledger = snapshot.buffer.ledger
    return {metric: ledger[name] for metric, name in LEDGER_METRICS.items() if name in ledger}


def _of_row(row: Mapping[str, Any]) -> Iterator[GaugeMetricFamily]:
    of_pools: dict[str, GaugeMetricFamily] = {}
    for name, value in row.items():
        if registered(name) not in METRICS or not isinstance(value, int | float):
            continue
        gauge = f"leeway_{registered(name).replace('/NAME/', '/').replace('/', '_')}"
        if not name.startswith(POOL_PREFIX):
            yield GaugeMetricFamily(gauge, METRICS[name], value=float(value))
            continue
        if gauge not in of_pools:
            of_pools[gauge] = GaugeMetricFamily(gauge, METRICS[registered(name)], labels=["pool"])
        pool = name.removeprefix(POOL_PREFIX).rsplit("/", 1)[0]
        of_pools[gauge].add_metric([pool], float(value))
    yield from of_pools.values()
