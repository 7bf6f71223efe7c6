"""The timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The form is the Trace Event Format: `X` events are spans, `C` counters, `i` moments, `M` names; times are microseconds
since the run began. A role is a process of the trace, and each kind of span that may overlap another one of the role is
a thread of it, so that the spans of a track never cross.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.files import private_file
from launch.observe.trace import Line, read
from launch.report.series import read_json_lines
from launch.report.spans import number_of
from launch.run_folder import RunFolder

TRACKS = {
    "step": "steps",
    "wait_for_batch": "steps",
    "generate": "generate",
    "update": "weight updates",
    "evaluate": "evaluations",
    "state": "state",
    "phase": "phases",
}
"""Name of the track of each kind."""
NAMES = {"wait_for_batch": "wait for batch", "update": "weight update"}
DETAILS = ("step", "version", "tokens", "num_samples", "num_tokens", "busy_s", "load_s", "lag_mean", "pool")
"""Of a span, that the trace shows too."""
LEAST_US = 1.0
"""Of a span: Perfetto does not show one without length."""

Event = dict[str, Any]


class Written(NamedTuple):
    """What `write` wrote."""

    num_spans: int
    num_counters: int
    size_bytes: int


def write(folder: RunFolder, path: Path) -> Written:
    """Write the trace of a run; it appears whole, and only its owner can read it. Memory does not grow with the run.

    Raises:
        OSError: the timeline cannot be read, or the trace not be written.
        ValueError: the timeline is empty.
    """
    trace = _Trace(folder)
    num_spans = num_counters = 0
    with private_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in trace.events():
            file.write(separator + msgspec.json.encode(event))
            separator = b",\n"
            num_spans += event["ph"] == "X"
            num_counters += event["ph"] == "C"
        file.write(b"\n]}\n")
    return Written(num_spans, num_counters, path.stat().st_size)


class _Trace:
    """Names processes and tracks, and keeps the time of each."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        roles: dict[str, set[str]] = {}
        start_s = float("inf")
        for line in read(folder.timeline):
            start_s = min(start_s, line.start_s)
            if line.what in TRACKS:
                roles.setdefault(line.who, set()).add(TRACKS[line.what])
        if start_s == float("inf"):
            raise ValueError(f"{folder.timeline} has no line: the run has not begun, or it ended before it did")
        self._start_s = start_s
        order = {"launch": 0, "evaluation": 1, "learner": 2, "buffer": 3}
        names = sorted({"launch", "learner", "buffer", *roles}, key=lambda name: (order.get(name, 4), _kind(name)))
        self._processes = {name: number for number, name in enumerate(names, 1)}
        tracks = sorted(set(TRACKS.values()))
        self._tracks = {name: {track: tracks.index(track) + 1 for track in roles.get(name, ())} for name in names}
        self._ended_us: dict[tuple[int, int], float] = {}

    def events(self) -> Iterator[Event]:
        """All events: names first, then those of the timeline, of the metrics, and what happened."""
        for name, number in self._processes.items():
            yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
            for track, thread in self._tracks[name].items():
                yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": track}}
        for line in read(self._folder.timeline):
            if line.what in TRACKS:
                yield self._span(line)
            else:
                yield from self._samples(line)
        yield from self._metrics()
        yield from self._moments()

    def _us(self, moment_s: float) -> float:
        return round(1e6 * (moment_s - self._start_s), 1)

    def _span(self, line: Line) -> Event:
        process, thread = self._processes[line.who], self._tracks[line.who][TRACKS[line.what]]
        start, end = self._us(line.start_s), self._us(line.end_s)
        # clocks of two hosts, and rounding, may let a span begin before the one before it ends: it is shown after it
        start = max(start, self._ended_us.get((process, thread), 0.0))
        length = max(LEAST_US, round(end - start, 1))
        self._ended_us[process, thread] = round(start + length, 1)
        details = {name: value for name in DETAILS if (value := getattr(line, name)) is not None}
        if line.count > 1:
            details["count"] = line.count
        name = line.text or line.state or NAMES.get(line.what, line.what)
        if line.step is not None and line.what == "step":
            name = f"step {line.step}"
        return {
            "ph": "X",
            "name": name,
            "cat": line.what,
            "pid": process,
            "tid": thread,
            "ts": start,
            "dur": length,
            "args": details,
        }

    def _samples(self, line: Line) -> Iterator[Event]:
        if line.what == "queue":
            groups = {"ready": line.ready_groups or 0}
            yield self._counter("buffer", "groups ready", line.start_s, groups)
            samples = {"in flight": line.in_flight or 0, "waiting": line.waiting or 0}
            yield self._counter("buffer", "samples", line.start_s, samples)
        elif line.what == "running" and line.running is not None:
            for actor, number in line.running.items():
                if actor in self._processes:
                    yield self._counter(actor, "samples running", line.start_s, {"running": number})

    def _metrics(self) -> Iterator[Event]:
        """Lag and throughput, as of the end of each step."""
        torn: list[int] = []
        try:
            for row in read_json_lines(self._folder.metrics, torn):
                if isinstance(row.get("finished_s"), int | float):
                    yield from self._counters_of(row)
        except OSError:
            return  # a run without rows has no such counters

    def _counters_of(self, row: Event) -> Iterator[Event]:
        lags = {"mean": row.get("lag/token_mean"), "greatest": row.get("lag/token_max")}
        rates = {"generated": "perf/generated_tokens_per_s", "trained": "perf/trained_tokens_per_s"}
        for name, values in (
            ("lag (versions)", lags),
            ("tokens per second", {key: row.get(metric) for key, metric in rates.items()}),
            ("reward", {"mean": row.get("reward/mean")}),
        ):
            known = {key: value for key, value in values.items() if value is not None}
            if known:
                yield self._counter("learner", name, row["finished_s"], known)

    def _counter(self, who: str, name: str, moment_s: float, values: Event) -> Event:
        process = self._processes[who]
        return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": max(0.0, self._us(moment_s)), "args": values}

    def _moments(self) -> Iterator[Event]:
        torn: list[int] = []
        try:
            for event in read_json_lines(self._folder.events, torn):
                if isinstance(event.get("time_s"), int | float):
                    moment = max(0.0, self._us(event["time_s"]))
                    kind, text = str(event.get("kind", "event")), str(event.get("text", ""))
                    yield {
                        "ph": "i", "s": "g", "name": f"{kind}: {text}"[:200], "cat": kind,
                        "pid": self._processes["launch"], "tid": 0, "ts": moment,
                    }  # fmt: skip
        except OSError:
            return  # likewise


def _kind(name: str) -> tuple[str, int]:
    return name.rpartition("-")[0], number_of(name)[0]
