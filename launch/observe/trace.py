"""Trace: who did what and when, written as it happens, in the form that Perfetto and chrome://tracing open as it is.

The form is the JSON array of the Trace Event Format, one event per line; both programs take an array that has no end,
so the file of a run that lives or was killed opens too. `X` events are spans, `C` counters, `i` moments, `M` names.
Times are microseconds since the Unix epoch. A role is a process of the trace, and each kind of span that may overlap
another one of the role is a track of it. docs/reports.md lists the kinds and what each tells.

The file stays small: spans of one kind that lie within one grain become one span that keeps what they add up to, and
counters come no closer than the grain. The grain is a millisecond until the file has FULL_BYTES; from then on it begins
at a quarter of a second and doubles with every further GROWTH_BYTES. So the file of any week stays below 50 MB, and its
totals are exact. Memory is one open span per kind and role.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from actors.report import ActorReport
from common.files import private_file
from common.process import wall_time
from launch.observe.status import PollResult
from launch.observe.totals import Fresh
from launch.text import printable

log = logging.getLogger(__name__)

FULL_BYTES, GROWTH_BYTES = 8 * 2**20, 2 * 2**20
LEAST_GRAIN_S, FIRST_GRAIN_S = 0.001, 0.25
"""Of a file with all detail, and of the first that is too large for it: half of the time between two polls."""
LONGEST_OPEN_S = 20.0
"""Generation that goes on is cut here, so that a reader of a live or a killed run misses no more of it than this."""
LEAST_US = 1
"""Of a span: Perfetto does not show one without length."""
STEP_TIMES = ("reference", "forward", "loss", "backward", "optimizer", "publish")
SUMS = {"busy_s", "num_samples", "num_tokens", "load_s", "tokens", *STEP_TIMES}
"""Arguments that add up where spans become one; of the lag the greatest is kept, and of all others the last."""
TRACK_OF = {
    "phase": "phases",
    "evaluate": "evaluations",
    "step": "steps",
    "wait_for_batch": "steps",
    "generate": "generate",
    "update": "weight updates",
    "state": "state",
}
"""Name of the track of each kind of span."""
TRACKS = tuple(dict.fromkeys(TRACK_OF.values()))
NOTHING: Mapping[str, object] = {}
NAMES = {"wait_for_batch": "wait for batch", "update": "weight update"}
"""Of a kind that is not called as it is."""
NUMBERS = {"launch": 1, "evaluation": 2, "learner": 3, "buffer": 4, "actors": 5}
ROLES = ("buffer", "weights", "scorer", "ranker", "stage", "actor")
FIRST_NUMBERS = {role: 100_000 * place for place, role in enumerate(ROLES, 1)}
"""Of the processes of the trace, in the order in which they are shown; "stage-3" has 500003, under every command. No
role has so many that one of them had a number of the next."""
COUNTERS = {
    "lag (versions)": {"mean": "lag/token_mean", "greatest": "lag/token_max"},
    "tokens per second": {"generated": "perf/generated_tokens_per_s", "trained": "perf/trained_tokens_per_s"},
    "reward": {"mean": "reward/mean"},
}
"""Of the learner, at the end of each step: name -> series -> metric."""


class Event(msgspec.Struct, omit_defaults=True):
    """A line of the file. Of spans and counters `who` and `what` say which they are of."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: int = 0
    cat: str = ""
    """Kind of the span: "step", "generate" and so on."""
    dur: int = 0
    s: str | None = None
    args: dict[str, Any] = {}
    who: str = ""

    @property
    def start_s(self) -> float:
        return self.ts / 1e6

    @property
    def end_s(self) -> float:
        return (self.ts + self.dur) / 1e6

    @property
    def count(self) -> int:
        return int(self.args.get("count", 1))


def read(path: Path) -> Iterator[Event]:
    """The events of a trace in the order in which they were written: each kind of each role in order of time.

    A line that is torn, or that somebody else has written, is left out.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    decode = msgspec.json.Decoder(Event).decode
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield decode(line.rstrip(b",\n"))
            except msgspec.MsgspecError:
                continue


def finish(source: Path, target: Path) -> tuple[int, int]:
    """Copy a trace so that it is whole JSON; returns how many spans and how many values of counters are in it.

    It appears whole, and only its owner can read it. Memory does not grow with it.

    Raises:
        OSError: one cannot be read, or the other not be written.
        ValueError: the trace is empty.
    """
    kinds: Counter[str] = Counter()
    with private_file(target) as file:
        for event in read(source):
            file.write((b",\n" if kinds else b"[\n") + msgspec.json.encode(event))
            kinds[event.ph] += 1
        if not kinds:
            raise ValueError(f"{source} has no line: the run has not begun, or it ended before it did")
        file.write(b"\n]\n")
    return kinds["X"], kinds["C"]


class Trace:
    """Writes the file; a context manager. Every line is handed to the system as it is written.

    A disk that takes no more costs lines of the file, and never the run.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = wall_time) -> None:
        """Append to the file; a line that a crash cut off is removed first. `wall` is seconds since the epoch.

        Raises:
            OSError: it cannot be opened.
        """
        self._wall = wall
        self._file = path.open("ab", buffering=0)
        self._size = _whole_lines(path)
        self._open: dict[tuple[str, str], Event] = {}
        self._ended_us: dict[tuple[int, int], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._counted_s: dict[tuple[str, str], float] = {}
        self._fresh = Fresh()
        self._lasting: dict[tuple[str, str], tuple[str, float]] = {}
        """By role and kind: the phase or state that it is in, and since when."""
        self._complained = ""
        if not self._size:
            self._hand_over(b"[\n")

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def grain_s(self) -> float:
        """What is shorter than this is not told apart."""
        beyond = self._size - FULL_BYTES
        return LEAST_GRAIN_S if beyond < 0 else FIRST_GRAIN_S * 2.0 ** (beyond // GROWTH_BYTES)

    def take_in(self, news: PollResult, rows: list[dict[str, Any]]) -> None:
        """Write what a poll of the roles brought, and the metrics of the steps that it reported."""
        for row in rows:
            self._step(row)
        for report in news.actors:
            self._actor(report)
        there = {f"{process.role}-{process.number}": process.state for process in news.processes}
        gone = [who for who, what in self._lasting if what == "state" and who not in there] if there else []
        for who, state in {**there, **dict.fromkeys(gone, "")}.items():
            self._switch(who, "state", state)
        self._sample(news)
        self._cut()

    def phase(self, text: str) -> None:
        self._switch("launch", "phase", text)

    def evaluating(self) -> None:
        self._switch("evaluation", "evaluate", "evaluate")

    def evaluated(self, versions: str) -> None:
        self._switch("evaluation", "evaluate", "", {"version": versions})

    def event(self, kind: str, text: str) -> None:
        name, pid = printable(f"{kind}: {text}", 200), self._process("launch")
        self._write(Event(ph="i", s="g", name=name, cat=kind, pid=pid, tid=0, ts=round(1e6 * self._wall())))

    def close(self) -> None:
        """Write what is open. May be called twice."""
        if self._file.closed:
            return
        for who, what in list(self._lasting):
            self._switch(who, what, "")
        for span in self._open.values():
            self._write(span)
        self._open.clear()
        self._file.close()

    # --- what is reported, as events --------------------------------------------------------------

    def _step(self, row: Mapping[str, Any]) -> None:
        start_s, end_s, wait_s = row["started_s"], row["finished_s"], row.get("time/wait_for_batch") or 0.0
        if wait_s > 0:
            waited = {"step": row["step"], "busy_s": wait_s}
            self._add(self._span("learner", "wait_for_batch", start_s - wait_s, start_s, waited))
        args = {name: row.get(f"time/{name}") for name in STEP_TIMES}
        args |= {name: row.get(name) or None for name in ("skipped", "restarts")}
        args |= {"step": row["step"], "version": row["version"], "busy_s": end_s - start_s}
        args |= {"lag_mean": row.get("lag/token_mean"), "lag_max": row.get("lag/token_max")}
        args["tokens"] = 0 if row.get("skipped") else row.get("batch/completion_tokens")
        self._add(self._span("learner", "step", start_s, end_s, args, f"step {row['step']}"))
        for name, series in COUNTERS.items():
            self._count("learner", name, end_s, {key: row.get(metric) for key, metric in series.items()})

    def _actor(self, report: ActorReport) -> None:
        samples, tokens = self._fresh.of(report.name, report.num_samples, report.num_tokens)
        counts = {"num_samples": samples, "num_tokens": tokens}
        for start_s, end_s in report.busy_intervals:
            args = {"pool": report.pool, "busy_s": end_s - start_s, **counts}
            self._add(self._span(report.name, "generate", start_s, end_s, args))
            counts = {"num_samples": 0, "num_tokens": 0}
        for update in report.updates:
            start, number = update.version
            args = {"pool": report.pool, "version": number, "start": start}
            args |= {"busy_s": update.pause_s, "load_s": update.load_s}
            self._add(self._span(report.name, "update", update.start_s, update.end_s, args))

    def _switch(self, who: str, what: str, name: str, args: Mapping[str, object] = NOTHING) -> None:
        """From now on a role is in another phase or state, or in none; write how long it was in the one before."""
        now_s = self._wall()
        before, since_s = self._lasting.get((who, what), ("", now_s))
        if name == before:
            return
        if before not in ("", "working"):  # that a process works is what the other spans say
            self._write(self._span(who, what, since_s, now_s, args, before))
        self._lasting[who, what] = name, now_s
        if not name:
            del self._lasting[who, what]

    def _sample(self, news: PollResult) -> None:
        now_s, status = self._wall(), news.status
        if status is not None:
            self._count("buffer", "groups ready", now_s, {"ready": status.num_ready_groups})
            samples = {name.replace("_", " "): status.ledger.get(name) for name in ("in_flight", "waiting")}
            self._count("buffer", "samples", now_s, samples)
        self._count("actors", "samples running", now_s, {report.name: report.num_running for report in news.actors})

    # --- events -----------------------------------------------------------------------------------

    def _process(self, who: str) -> int:
        """Its number in the trace; one that is new is named."""
        role, _, number = who.rpartition("-")
        pid = FIRST_NUMBERS[role] + int(number) if role else NUMBERS[who]
        self._name("process_name", pid, 0, who)
        return pid

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._write(Event(ph="M", name=what, pid=pid, tid=tid, args={"name": name}))
            if not tid:
                self._write(Event(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": pid}))

    def _span(
        self, who: str, what: str, start_s: float, end_s: float, args: Mapping[str, object] = NOTHING, name: str = ""
    ) -> Event:
        pid, track = self._process(who), TRACK_OF[what]
        tid = TRACKS.index(track) + 1
        self._name("thread_name", pid, tid, track)
        known = {key: round(value, 4) if isinstance(value, float) else value for key, value in args.items()}
        return Event(
            ph="X",
            name=printable(name, 200) or NAMES.get(what, what),
            pid=pid,
            ts=round(1e6 * start_s),
            cat=what,
            tid=tid,
            dur=max(LEAST_US, round(1e6 * (end_s - start_s))),
            args={key: value for key, value in known.items() if value is not None},
            who=who,
        )

    def _count(self, who: str, name: str, moment_s: float, values: Mapping[str, object]) -> None:
        known = {key: each for key, each in values.items() if isinstance(each, int | float) and math.isfinite(each)}
        if known and moment_s - self._counted_s.get((who, name), 0.0) >= self.grain_s:
            self._counted_s[who, name] = moment_s
            ts = round(1e6 * moment_s)
            self._write(Event(ph="C", name=name, pid=self._process(who), tid=0, ts=ts, args=known, who=who))

    # --- the grain --------------------------------------------------------------------------------

    def _add(self, span: Event) -> None:
        """Keep a span open for what may come to it, and write the one before it of its kind.

        Intervals of generation become one where the gap between them is small; other spans where both are, together.
        """
        key, is_generation = (span.who, span.cat), span.cat == "generate"
        before = self._open.get(key)
        if before is not None:
            between_s = span.start_s - before.end_s if is_generation else span.end_s - before.start_s
            is_long = is_generation and before.dur > 1e6 * max(LONGEST_OPEN_S, 10 * self.grain_s)
            # a step that a restarted learner takes again is not one with those that it takes back
            goes_on = span.args.get("step", 1) > before.args.get("step", 0)
            if between_s <= self.grain_s + 1e-6 and not is_long and span.ts >= before.ts and goes_on:
                span = _together(before, span)
            else:
                self._write(before)
        self._open[key] = span

    def _cut(self) -> None:
        """Write what nothing can come to any more."""
        now_s = self._wall()
        for key, span in list(self._open.items()):
            if now_s - span.end_s > max(self.grain_s, 1.0):
                self._write(self._open.pop(key))

    def _write(self, event: Event) -> None:
        if event.ph == "X":
            # clocks of two hosts may let a span begin before the one before it ends: it is shown after it
            track = event.pid, event.tid
            start = max(event.ts, self._ended_us.get(track, 0))
            event.dur = max(LEAST_US, event.ts + event.dur - start)
            event.ts = start
            self._ended_us[track] = start + event.dur
        self._hand_over(msgspec.json.encode(event) + b",\n")

    def _hand_over(self, line: bytes) -> None:
        try:
            self._size += self._file.write(line)
        except (OSError, ValueError) as error:  # of what is told after the end: the file is closed
            if str(error) != self._complained:
                log.warning("%s cannot be written, so the trace has a hole: %s", self._file.name, error)
            self._complained = str(error)


def _together(before: Event, later: Event) -> Event:
    """One span for two of a kind."""
    args = before.args | later.args
    for key in SUMS & args.keys():
        args[key] = round(before.args.get(key, 0) + later.args.get(key, 0), 4)
    args["count"] = before.count + later.count
    if "lag_max" in args:
        args["lag_max"] = max(each.args.get("lag_max", 0) for each in (before, later))
    end = max(before.ts + before.dur, later.ts + later.dur)
    return msgspec.structs.replace(later, ts=before.ts, dur=end - before.ts, args=args)


def _whole_lines(path: Path) -> int:
    """Cut off a last line without an end; returns the size of the file then."""
    if not path.is_file():  # a device, say
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - 2**20))
        return file.truncate(start + file.read().rfind(b"\n") + 1)
