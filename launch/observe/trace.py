"""timeline.jsonl: who did what and when, one line per span or sample, as the launcher hears of it.

Every line has `who`, `what`, `start_s` and `end_s` (wall clock, seconds since the epoch; equal in a sample), then
details. docs/reports.md lists the kinds.

The file of a long run stays small because its grain is a 10,000th of the time that the run has lasted: 10 ms after
100 s, 9 s after a day. Spans of one kind whose gap is smaller become one span, and keep what they add up to; short
ones that lie together within one grain become one line with their number; samples come no closer than the grain. So
each kind of each role has at most 10,000 * (1 + ln(T / 10 s)) lines after a time T: 100,000 in the worst week, some
10 MB. Memory is one open span per kind and role.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from actors.report import ActorReport
from buffer.protocol import Status
from launch.observe.totals import Fresh

if TYPE_CHECKING:
    from launch.observe.observer import PollResult  # which needs all sections of the config: a reader does not

log = logging.getLogger(__name__)

GRAINS = 10_000
LEAST_GRAIN_S = 0.001
LONGEST_OPEN_S = 20.0
"""Generation that goes on is cut here, so that a reader of a live or a killed run misses no more of it than this."""
STEP_TIMES = ("reference", "forward", "loss", "backward", "optimizer", "publish")
SUMS = ("busy_s", "num_samples", "num_tokens", "load_s", "tokens", *STEP_TIMES)
"""Details that add up where spans become one."""
MAXIMA = ("lag_max",)
"""Those of which the greatest is kept; of all others it is the last."""


@dataclass(slots=True)
class Span:
    """Something that took from `start_s` to `end_s`."""

    who: str
    what: str
    start_s: float
    end_s: float
    details: dict[str, Any] = field(default_factory=dict)

    def line(self) -> bytes:
        """As it stands in the file."""
        span = {"who": self.who, "what": self.what, "start_s": round(self.start_s, 4), "end_s": round(self.end_s, 4)}
        rounded = {key: round(v, 4) if isinstance(v, float) else v for key, v in self.details.items() if v is not None}
        return msgspec.json.encode(span | rounded) + b"\n"

    def take_in(self, later: Span) -> None:
        """Become one with a later span of the kind."""
        together = self.details.get("count", 1) + later.details.get("count", 1)
        known: dict[str, list[Any]] = {}
        for key, value in (*self.details.items(), *later.details.items()):
            if value is not None:
                known.setdefault(key, []).append(value)
        sums = {key: sum(values) for key, values in known.items() if key in SUMS}
        greatest = {key: max(values) for key, values in known.items() if key in MAXIMA}
        self.end_s = max(self.end_s, later.end_s)
        self.details = self.details | later.details | sums | greatest | {"count": together}


class Line(msgspec.Struct):
    """A line of the file as it is read; what a kind of line does not have is None."""

    who: str
    what: str
    start_s: float
    end_s: float
    count: int = 1
    """How many spans it stands for."""
    pool: str | None = None
    busy_s: float | None = None
    num_samples: int | None = None
    num_tokens: int | None = None
    load_s: float | None = None
    state: str | None = None
    text: str | None = None
    step: int | None = None
    version: int | str | None = None
    tokens: int | None = None
    lag_mean: float | None = None
    lag_max: float | None = None
    ready_groups: int | None = None
    in_flight: int | None = None
    waiting: int | None = None
    published: int | None = None
    running: dict[str, int] | None = None


def read(path: Path) -> Iterator[Line]:
    """The lines of a timeline, in the order in which they were written: each kind of each role in order of time.

    A line that is torn, or that somebody else has written, is left out.

    Raises:
        OSError: there is no file, or it cannot be read.
    """
    decode = msgspec.json.Decoder(Line).decode
    with path.open("rb") as lines:
        for line in lines:
            try:
                yield decode(line)
            except msgspec.MsgspecError:
                continue


class Timeline:
    """Writes the file; a context manager. Every line is handed to the system as it is written.

    A disk that takes no more costs lines of the file, and never the run.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        """Open the file.

        Args:
            path: of timeline.jsonl; appended to where it is there.
            wall: seconds since the epoch.

        Raises:
            OSError: it cannot be opened.
        """
        self._file = path.open("ab", buffering=0)
        self._wall = wall
        self._started_s = wall()
        self._open: dict[tuple[str, str], Span] = {}
        self._sampled_s: dict[str, float] = {}
        self._fresh = Fresh()
        self._states: dict[str, tuple[str, float]] = {}
        self._phase: tuple[str, float] | None = None
        self._begun: dict[tuple[str, str], float] = {}
        self._complained = ""

    def __enter__(self) -> Timeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def grain_s(self) -> float:
        """What is shorter than this is not told apart."""
        return max(LEAST_GRAIN_S, (self._wall() - self._started_s) / GRAINS)

    def take_in(self, news: PollResult) -> None:
        """Write what a poll of the roles brought."""
        for row in news.steps:
            self._step(row)
        for report in news.actors:
            self._actor(report)
        for process in news.processes:
            who = f"{process.role}-{process.number}"
            self._state(who, process.state)
        if news.processes:
            there = {f"{process.role}-{process.number}" for process in news.processes}
            for who in self._states.keys() - there:  # it has left the run
                self._end_state(who, *self._states.pop(who))
        if news.status is not None and self._is_due("buffer"):
            self._write(self._queue(news.status))
        if news.actors and self._is_due("actors"):
            self._write(self._running(news.actors))
        self._cut()

    def phase(self, text: str) -> None:
        """The run does something else now."""
        now_s = self._wall()
        if self._phase is not None:
            self._write(Span("launch", "phase", self._phase[1], now_s, {"text": self._phase[0]}))
        self._phase = (text, now_s) if text else None

    def begin(self, who: str, what: str) -> None:
        """Something begins that `finish` ends."""
        self._begun[who, what] = self._wall()

    def finish(self, who: str, what: str, **details: Any) -> None:  # noqa: ANN401 -- JSON
        """It is over; what had not begun is left out."""
        start_s = self._begun.pop((who, what), None)
        if start_s is not None:
            self.span(who, what, start_s, self._wall(), **details)

    def span(self, who: str, what: str, start_s: float, end_s: float, **details: Any) -> None:  # noqa: ANN401 -- JSON
        """Something that is over; `step` in its details is the number of the step."""
        self._add(Span(who, what, start_s, end_s, details), gap_counts=False)

    def close(self) -> None:
        """Write what is open. May be called twice."""
        if self._file.closed:
            return
        self.phase("")
        for who, what in list(self._begun):
            self.finish(who, what)
        for who, (state, since_s) in self._states.items():
            self._end_state(who, state, since_s)
        for span in self._open.values():
            self._write(span)
        self._open.clear()
        self._file.close()

    # --- what is reported, as spans ---------------------------------------------------------------

    def _step(self, row: Mapping[str, Any]) -> None:
        start_s, end_s, wait_s = row["started_s"], row["finished_s"], row.get("time/wait_for_batch") or 0.0
        if wait_s > 0:
            self.span("learner", "wait_for_batch", start_s - wait_s, start_s, step=row["step"], busy_s=wait_s)
        times = {name: row.get(f"time/{name}") for name in STEP_TIMES}
        facts = {
            "step": row["step"],
            "version": row["version"],
            "skipped": row.get("skipped") or None,
            "restarts": row.get("restarts") or None,
            "tokens": 0 if row.get("skipped") else row.get("batch/completion_tokens"),
            "lag_mean": row.get("lag/token_mean"),
            "lag_max": row.get("lag/token_max"),
            "busy_s": end_s - start_s,
        }
        self.span("learner", "step", start_s, end_s, **facts, **times)

    def _actor(self, report: ActorReport) -> None:
        samples, tokens = self._fresh.of(report.name, report.num_samples, report.num_tokens)
        counts = {"num_samples": samples, "num_tokens": tokens}
        for start_s, end_s in report.busy_intervals:
            details = {"pool": report.pool, "busy_s": end_s - start_s, **counts}
            self._add(Span(report.name, "generate", start_s, end_s, details), gap_counts=True)
            counts = {"num_samples": 0, "num_tokens": 0}
        for update in report.updates:
            version = f"{update.version[0]}.{update.version[1]}"
            facts = {"pool": report.pool, "version": version, "busy_s": update.pause_s, "load_s": update.load_s}
            self.span(report.name, "update", update.start_s, update.end_s, **facts)

    def _state(self, who: str, state: str) -> None:
        """Write how long a process was what it is no longer; that it works is what the other spans say."""
        before = self._states.get(who)
        if before is not None and before[0] == state:
            return
        if before is not None:
            self._end_state(who, *before)
        self._states[who] = state, self._wall()

    def _end_state(self, who: str, state: str, since_s: float) -> None:
        if state != "working":
            self._write(Span(who, "state", since_s, self._wall(), {"state": state}))

    def _queue(self, status: Status) -> Span:
        now_s = self._wall()
        counts = {name: status.ledger.get(name) for name in ("in_flight", "waiting", "drawn", "trained", "committed")}
        facts = {"ready_groups": status.num_ready_groups, "drawn_groups": status.num_drawn_groups}
        sizes = {"version": status.version, "published": status.newest[1], "size_bytes": status.size_bytes}
        return Span("buffer", "queue", now_s, now_s, facts | counts | sizes)

    def _running(self, reports: list[ActorReport]) -> Span:
        now_s = self._wall()
        running = {report.name: report.num_running for report in reports}
        return Span("actors", "running", now_s, now_s, {"running": running})

    # --- the grain --------------------------------------------------------------------------------

    def _add(self, span: Span, *, gap_counts: bool) -> None:
        """Write a span, or keep it open for what may come to it.

        Args:
            span: begins after what came before of its kind.
            gap_counts: one with what came before where the gap is small; else where both are, together.
        """
        key = span.who, span.what
        before = self._open.get(key)
        if before is not None:
            between_s = span.start_s - before.end_s if gap_counts else span.end_s - before.start_s
            is_long = gap_counts and before.end_s - before.start_s > max(LONGEST_OPEN_S, 10 * self.grain_s)
            # a step that a restarted learner takes again is not one with those that it takes back
            goes_on = span.details.get("step", 1) > before.details.get("step", 0)
            if between_s <= self.grain_s and not is_long and span.start_s >= before.start_s and goes_on:
                before.take_in(span)
                return
            self._write(before)
        self._open[key] = span

    def _cut(self) -> None:
        """Write what nothing can come to any more."""
        now_s = self._wall()
        for key, span in list(self._open.items()):
            if now_s - span.end_s > max(self.grain_s, 1.0):
                self._write(self._open.pop(key))

    def _is_due(self, what: str) -> bool:
        now_s = self._wall()
        if now_s - self._sampled_s.get(what, 0.0) < self.grain_s:
            return False
        self._sampled_s[what] = now_s
        return True

    def _write(self, span: Span) -> None:
        try:
            self._file.write(span.line())
        except OSError as error:
            if str(error) != self._complained:
                log.warning("%s cannot be written, so the timeline has a hole: %s", self._file.name, error)
            self._complained = str(error)
