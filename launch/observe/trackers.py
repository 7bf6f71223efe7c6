"""The process of one external tracker of a run, so that a tracker that fails, hangs or crashes never affects the run.

The launcher (`sinks`) appends calls to a file, which the process follows: first the run, then [method, arguments]. The
process prints `READY`, or one line about a fault. SIGALRM ends the process if a call takes too long.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from leeway.buffer.errors import BufferError
from leeway.common.process import wall_time
from leeway.launch.text import TextOf, printable

READY = "ready"
CALL_TIMEOUT_S = 60
"""Time limit of a call, in whole seconds, and of the final upload; unsent rows of W&B stay on disk for `wandb sync`."""
SAMPLES_S = 60.0
"""Minimum seconds between two tables of samples."""
NUM_SAMPLES = 8
PROJECT = "leeway"
_POLL_S = 0.2

Samples = Sequence[Mapping[str, Any]]


class TrackedRun(msgspec.Struct, frozen=True):
    name: str
    folder: str
    run_id: str
    """Id of the run, the same after a resume; empty in tests."""
    config: dict[str, Any]


class Client(Protocol):
    """A client of an external tracker. The steps of the calls never decrease."""

    def log(self, row: dict[str, float], step: int) -> None: ...
    def table(self, rows: Samples, step: int) -> None: ...
    def finish(self) -> None: ...
    def summary(self, values: dict[str, Any]) -> None:
        """Store the summary of the run, if the tracker has a place for it."""


class WeightsAndBiases(Client):
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        self._new_table, self._run = (
            wandb.Table,
            wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                dir=run.folder,
                mode=mode,
                id=run.run_id or None,
                resume="allow" if run.run_id and mode == "online" else None,  # offline runs cannot be resumed
                config=run.config,
                settings=wandb.Settings(silent=True, console="off", init_timeout=30.0, x_disable_stats=True),
            ),
        )

    def log(self, row: dict[str, Any], step: int) -> None:
        self._run.log(row, step=step)

    def table(self, rows: Samples, step: int) -> None:
        table = self._new_table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.log({"samples": table}, step)

    def summary(self, values: dict[str, Any]) -> None:
        self._run.summary.update(values)

    def finish(self) -> None:
        self._run.finish()


class Trackio(WeightsAndBiases):
    """Trackio has the API of Weights & Biases, without a summary."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        off = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._new_table = trackio.Table
        self._run = trackio.init(project, name=run.name, config=run.config, resume="allow", **off)

    def summary(self, values: dict[str, Any]) -> None: ...


class TensorBoard(Client):
    """Writer of event files; imports neither torch nor TensorFlow."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(Path(run.folder) / "tensorboard"))
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, text_pb

    def log(self, row: dict[str, float], step: int) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._add(self._summary(value=values), step)

    def table(self, rows: Samples, step: int) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
        cells = [[printable(str(cell)).replace("|", r"\|") for cell in line] for line in lines]
        self._add(self._text("samples", "\n".join(f"| {' | '.join(line)} |" for line in cells)), step)

    def summary(self, values: dict[str, Any]) -> None: ...

    def finish(self) -> None:
        self._writer.close()

    def _add(self, summary: object, step: int) -> None:
        self._writer.add_event(self._event(wall_time=wall_time(), step=step, summary=summary))
        self._writer.flush()


class MLflow(Client):
    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        which = f"tags.`leeway.run_id` = '{run.run_id}'"
        earlier = [each.info.run_id for each in mlflow.search_runs(filter_string=which, output_format="list")]
        mlflow.start_run(earlier[0] if earlier else None, run_name=run.name, tags={"leeway.run_id": run.run_id})
        mlflow.log_dict(run.config, "config.json")

    def log(self, row: dict[str, float], step: int) -> None:
        # MLflow rejects other characters in names
        named = {re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII): value for name, value in row.items()}
        self._mlflow.log_metrics(named, step=step)

    def table(self, rows: Samples, step: int) -> None:
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self._mlflow.log_dict(table, f"samples/{step}.json")

    def summary(self, values: dict[str, Any]) -> None:
        self._mlflow.log_dict(values, "summary.json")

    def finish(self) -> None:
        self._mlflow.end_run()


CLIENTS: dict[str, type[Any]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def main(words: Sequence[str]) -> int:
    """Run the tracker `words[0]` with the calls of the file `words[1]`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the launcher ends this process
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to the log
    try:
        calls = _calls(Path(words[1]), os.getppid())
        run = msgspec.convert(next(calls), TrackedRun)
        client = CLIENTS[words[0]](run)
        print(READY, file=replies, flush=True)
        _serve(client, calls, Path(run.folder))
    except BaseException as error:  # libraries also raise SystemExit
        text = next(iter(str(error).splitlines()), "").rstrip(".")
        print(f"{type(error).__name__}: {text}", file=replies, flush=True)
        os._exit(1)  # without exit hooks of the library, which may wait for its dead server
    return 0


def _calls(path: Path, launcher: int) -> Iterator[Any]:
    """Yield the lines of the file until `finish`, or until the launcher has exited."""
    text, is_last = b"", False
    with path.open("rb") as file:
        while not is_last:
            text += file.readline()
            if text.endswith(b"\n"):
                yield (call := msgspec.json.decode(text))
                text, is_last = b"", call == ["finish"]
            elif os.getppid() != launcher:
                yield ["finish"]
                return
            else:
                time.sleep(_POLL_S)


def _serve(client: Client, calls: Iterator[Any], folder: Path) -> None:
    shown_s, shown = -SAMPLES_S, None
    for method, *arguments in calls:
        signal.alarm(CALL_TIMEOUT_S)
        getattr(client, method)(*arguments)
        is_evaluated = method == "log" and "eval/policy_version" in arguments[0]
        if method == "log" and (is_evaluated or time.monotonic() - shown_s >= SAMPLES_S):
            rows = _samples(folder)
            if rows and rows != shown:
                client.table(rows, arguments[1])
                shown, shown_s = rows, time.monotonic()
        if method != "finish":  # the limit also ends exit hooks
            signal.alarm(0)


def _samples(folder: Path) -> Samples:
    """Return samples of the newest step, with text; empty before the first step, or if the buffer is unreadable."""
    from leeway.buffer.offline.inspect import Inspection, newest_trained

    with suppress(BufferError, OSError), Inspection.open(folder) as inspection:
        return newest_trained(inspection, NUM_SAMPLES, TextOf(inspection.folder))
    return []
