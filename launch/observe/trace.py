"""Trace: an append-only Chrome trace of a run, written while it runs (docs/reports.md lists the spans).

The file is a JSON array in the Trace Event Format, with one event per line. The array is never closed; Perfetto and
chrome://tracing accept an open array. Events are spans (`X`), counters (`C`), instants (`i`) or names (`M`), and times
are microseconds since the Unix epoch. Each role is a process of the trace, and each kind of span is a track. A file
of ROTATE_BYTES is renamed to `timeline.json.1`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec

from leeway.actors.report import ActorReport
from leeway.common.process import wall_time
from leeway.launch.observe.metrics import cut_torn_line
from leeway.launch.observe.status import PollResult
from leeway.launch.observe.totals import CounterDelta
from leeway.launch.text import printable

log = logging.getLogger(__name__)

ROTATE_BYTES = 64 * 2**20
GAP_US, LONGEST_US = 1_000, 20_000_000
"""Generation intervals less than GAP_US apart form one span of up to LONGEST_US; a killed run loses its open span."""
TRACKS = {"phase": 1, "evaluate": 2, "step": 3, "wait_for_batch": 3, "generate": 4, "update": 5, "state": 6}
TRACK_NAMES = ("", "phases", "evaluations", "steps", "generate", "weight updates", "state")
ROLES = ("launch", "evaluation", "learner", "buffer", "weights", "ranker", "stage", "actor")
"""Roles in the order of their trace pids: "stage-3" has pid 700003, because "stage" is the seventh role."""


class Event(msgspec.Struct, omit_defaults=True):
    """One line of the file; `who` is the role and `cat` is the kind of a span."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: int = 0
    cat: str = ""
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


def rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def read(path: Path) -> Iterator[Event]:
    """Yield the events of a trace, starting with the rotated file; invalid lines are skipped.

    Raises:
        OSError: the file is missing or unreadable.
    """
    decode = msgspec.json.Decoder(Event).decode
    for part in (rotated(path), path):
        if part != path and not part.exists():
            continue
        with part.open("rb") as lines:
            for line in lines:
                with suppress(msgspec.MsgspecError):
                    yield decode(line.rstrip(b",\n"))


class Trace(AbstractContextManager["Trace"]):
    """Context manager that appends events to the file. A full disk loses events but never stops the run."""

    def __init__(self, path: Path, wall: Callable[[], float] = wall_time) -> None:
        """Open the file and remove an incomplete last line. `wall` returns seconds since the Unix epoch.

        Raises:
            OSError: the file cannot be opened.
        """
        self._path, self._wall = path, wall
        self._file = path.open("ab", buffering=0)
        self._size = cut_torn_line(path)
        self._generating: dict[str, Event] = {}
        self._ended_us: dict[tuple[int, int], int] = {}
        self._named: set[tuple[int, int]] = set()
        self._num_ready = -1
        self._open: dict[tuple[str, str], tuple[str, float]] = {}  # (role, kind) -> phase or state, and its start
        self._deltas = CounterDelta()
        self._last_error = ""
        if not self._size:
            self._append(b"[\n")

    def __exit__(self, *error: object) -> None:
        self.close()

    def ingest(self, poll: PollResult, rows: list[dict[str, Any]]) -> None:
        """Write the events of a poll, and the spans of the steps in `rows`."""
        now_s = self._wall()
        for row in rows:
            self._step(row)
        for report in poll.actors:
            self._actor(report)
        states = {f"{process.role}-{process.number}": process.state for process in poll.processes}
        gone = [who for who, what in self._open if what == "state" and who not in states] if states else []
        for who, state in {**states, **dict.fromkeys(gone, "")}.items():
            self._switch(who, "state", state)
        if poll.status is not None and poll.status.num_ready_groups != self._num_ready:
            self._num_ready, pid, ts = poll.status.num_ready_groups, self._process("buffer-0"), round(1e6 * now_s)
            counter = Event(ph="C", name="groups ready", pid=pid, tid=0, ts=ts, who="buffer-0")
            self._write(counter, ready=self._num_ready)
        for who, span in list(self._generating.items()):
            if now_s - span.end_s > 1.0:
                self._write(self._generating.pop(who))

    def phase(self, text: str) -> None:
        self._switch("launch", "phase", text)

    def evaluating(self) -> None:
        self._switch("evaluation", "evaluate", "evaluate")

    def evaluated(self, versions: str) -> None:
        self._switch("evaluation", "evaluate", "", version=versions)

    def event(self, kind: str, text: str) -> None:
        name, pid = printable(f"{kind}: {text}", 200), self._process("launch")
        self._write(Event(ph="i", s="g", name=name, cat=kind, pid=pid, tid=0, ts=round(1e6 * self._wall())))

    def close(self) -> None:
        """Write open spans and close the file. Idempotent."""
        if self._file.closed:
            return
        for who, what in list(self._open):
            self._switch(who, what, "")
        for span in self._generating.values():
            self._write(span)
        self._file.close()

    # --- from reports to events -------------------------------------------------------------------

    def _step(self, row: Mapping[str, Any]) -> None:
        start_s, end_s, wait_s = row["started_s"], row["finished_s"], row.get("time/wait_for_batch") or 0.0
        if wait_s > 0:
            waited = self._span("learner", "wait_for_batch", start_s - wait_s, start_s, "wait for batch")
            self._write(waited, step=row["step"])
        args = {"step": row["step"], "version": row["version"]}
        args |= {"lag_mean": row.get("lag/token_mean"), "lag_max": row.get("lag/token_max")}
        self._write(self._span("learner", "step", start_s, end_s, f"step {row['step']}"), **args)

    def _actor(self, report: ActorReport) -> None:
        samples, tokens = self._deltas.of(report.name, report.num_samples, report.num_tokens)
        for start_s, end_s in report.busy_intervals:
            span, before = self._span(report.name, "generate", start_s, end_s), self._generating.get(report.name)
            if before is not None and before.ts <= span.ts <= before.ts + before.dur + GAP_US <= before.ts + LONGEST_US:
                before.dur = max(before.dur, span.ts + span.dur - before.ts)
                span = before
            elif before is not None:
                self._write(before)
            counts = {"num_samples": samples, "num_tokens": tokens}  # the first span of a report gets all increments
            span.args = {"pool": report.pool} | {key: span.args.get(key, 0) + new for key, new in counts.items()}
            samples = tokens = 0
            self._generating[report.name] = span
        for update in report.updates:
            start, number = update.version
            args = {"pool": report.pool, "version": number, "start": start}
            args |= {"busy_s": update.pause_s, "load_s": update.load_s}
            self._write(self._span(report.name, "update", update.start_s, update.end_s, "weight update"), **args)

    def _switch(self, who: str, what: str, name: str, **args: object) -> None:
        """Set the phase or state of a role, '' for none, and write the span of the previous phase or state."""
        now_s = self._wall()
        before, since_s = self._open.get((who, what), ("", now_s))
        if name == before:
            return
        if before not in ("", "working"):  # other spans show the work of a working process
            self._write(self._span(who, what, since_s, now_s, before), **args)
        self._open[who, what] = name, now_s
        if not name:
            del self._open[who, what]

    # --- events -----------------------------------------------------------------------------------

    def _process(self, who: str) -> int:
        role, _, number = who.partition("-")
        pid = 100_000 * (1 + ROLES.index(role)) + int(number or 0)  # viewers treat pid 0 specially
        self._name("process_name", pid, 0, who)
        return pid

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        if (pid, tid) not in self._named:
            self._named.add((pid, tid))
            self._write(Event(ph="M", name=what, pid=pid, tid=tid, args={"name": name}))

    def _span(self, who: str, what: str, start_s: float, end_s: float, name: str = "") -> Event:
        name, pid, ts = printable(name or what, 200), self._process(who), round(1e6 * start_s)
        dur = round(1e6 * (end_s - start_s))
        return Event(ph="X", name=name, pid=pid, tid=TRACKS[what], ts=ts, dur=dur, cat=what, who=who)

    def _write(self, event: Event, **args: object) -> None:
        known = {key: round(each, 4) if isinstance(each, float) else each for key, each in args.items()}
        event.args = event.args | {key: each for key, each in known.items() if each is not None}
        if self._size >= ROTATE_BYTES and self._path.is_file():
            self._rotate()
        if event.ph == "X":
            self._process(event.who)  # the names are needed again in a new file after a rotation
            self._name("thread_name", event.pid, event.tid, TRACK_NAMES[event.tid])
            # the clocks of hosts differ: move the start of a span that starts before the end of the previous span
            track = event.pid, event.tid
            start = max(event.ts, self._ended_us.get(track, 0))
            event.dur = max(1, event.ts + event.dur - start)  # Perfetto hides spans of length 0
            event.ts = start
            self._ended_us[track] = start + event.dur
        self._append(msgspec.json.encode(event) + b",\n")

    def _rotate(self) -> None:
        self._size = 0  # if the rename fails, retry after another ROTATE_BYTES
        with suppress(OSError):
            self._path.replace(rotated(self._path))
            self._file, full = self._path.open("ab", buffering=0), self._file
            full.close()
            self._named.clear()
            self._num_ready = -1
            self._append(b"[\n")

    def _append(self, line: bytes) -> None:
        try:
            self._size += self._file.write(line)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            if str(error) != self._last_error:
                log.warning("%s cannot be written, so events are missing from the trace: %s", self._path, error)
            self._last_error = str(error)
