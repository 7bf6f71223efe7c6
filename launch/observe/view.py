"""Terminal output of a run: a status line, the view of `leeway top`, and the display of the launcher."""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from leeway.buffer.ledger import COUNTS
from leeway.launch.observe.status import Accuracy, ActorStatus, PoolStatus, ProcessStatus, RunStatus, lag_control_effect
from leeway.launch.run_folder import RunFolder
from leeway.launch.text import duration, number, printable, share_of, shortened

log = logging.getLogger(__name__)

POOL_STYLES = ("cyan", "magenta", "green", "blue", "yellow")
"""Colours of the pools in order, repeated cyclically."""
MARK = "◂ bound"
MAX_LAG_ROWS = 8
BLOCKS = " ▁▂▃▄▅▆▇█"
NAME_WIDTH = 10
"""Width of the column of pane names."""
DROPPED_FIRST = ("services", "stages", "events", "actors")
"""Panes omitted on small screens, in order."""
OUTSIDE = ("duplicates", "late", "quarantined")
TRAINING = "training"
"""Name of the phase in which steps are taken."""
NUM_WAITS, NUM_REASONS, MAX_REASON = 3, 3, 60
PLAIN_INTERVAL_S = 5.0
"""Seconds between lines if the output is not a terminal."""
QUIET_S = 15.0
"""Seconds after which a line is printed even without news, with the reason."""
REFRESH_S = 0.5
QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04", b"")
"""Includes Ctrl-C and Ctrl-D as characters, and end of file from a closed terminal."""


# --- one line -----------------------------------------------------------------------------------------


def line(status: RunStatus, num_waits: int = NUM_WAITS) -> str:
    """Return a run in one line: progress, up to `num_waits` waits, and the alerts."""
    phase = f"{status.phase}, for {status.written_s - status.phase_since_s:.0f} s"
    figures = phase
    if status.step:
        figures = (
            f"step {status.step}/{status.num_steps}  reward {number(status.row.get('reward/mean'))}  "
            f"lag {number(status.lag_mean)} (max {status.lag_max} of {status.max_lag})  "
            f"tokens/s generated {status.generated_tokens_per_s:.0f} trained {status.learner.tokens_per_s:.0f}"
        )
        if status.phase != TRAINING and status.ended is None:
            figures += f"  {phase}"
    sentences = status.waits[:num_waits]
    if num_waits and len(status.waits) > num_waits:
        sentences = [*sentences, f"and {len(status.waits) - num_waits} more wait"]
    return "; ".join([f"{status.written_s - status.started_s:5.0f} s  {figures}", *sentences, *status.alerts])


def failures(ledger: Mapping[str, int], by_reason: Mapping[str, int]) -> str:
    """Return the share of failed samples with the most common reasons; '' if none failed."""
    failed, issued = ledger.get("failed", 0), ledger.get("issued", 0)
    if not failed:
        return ""
    why = most_common(by_reason)
    return f"{failed:,} of {issued:,} samples failed ({share_of(failed, issued)})" + (f": {why}" if why else "")


def most_common(by_reason: Mapping[str, int], limit: int = NUM_REASONS) -> str:
    """Return up to `limit` of the most common reasons with their counts, and one count for all others."""
    ordered = sorted(by_reason.items(), key=lambda each: -each[1])
    named = [f"{shortened(reason, MAX_REASON)} ({count:,})" for reason, count in ordered[:limit]]
    if others := ordered[limit:]:
        named.append(f"{len(others)} other reason{'s' * (len(others) > 1)} ({sum(count for _, count in others):,})")
    return "; ".join(named)


# --- the view -----------------------------------------------------------------------------------------


class Pane(NamedTuple):
    name: str
    rows: Sequence[Text]
    min_rows: int = 2
    """Rows that it keeps on a small screen."""

    def lines(self, width: int, height: int) -> list[Text]:
        """Return up to `height` lines: the last events; for other panes the first rows and a count of the others."""
        rows = list(self.rows)
        if len(rows) > height and self.name == "events":
            rows = rows[-height:]
        elif len(rows) > height:
            rows = [*rows[: height - 1], Text(f"... and {len(rows) - height + 1} more", style="dim")][:height]
        names = [self.name, *[""] * len(rows)]
        named = (Text.assemble((f"{name:<{NAME_WIDTH}}", "bold"), row) for name, row in zip(names, rows, strict=False))
        return [_cut(row, width) for row in named]


class View:
    """A rich renderable that fits any screen; truncated panes show how many rows are omitted."""

    def __init__(self, status: RunStatus, now_s: float, *, gone: str = "", note: str = "") -> None:
        """`gone` is why the launcher counts as dead, or empty; `note` is shown beside the name of the run."""
        self._status, self._gone, self._note = status, gone, note
        # freeze the durations of an ended run
        self._now_s = status.ended.at_s if status.ended is not None else status.written_s if gone else now_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, sys.maxsize
        if console.is_terminal:
            height = options.height or max(1, console.height - 1)
        panes = [pane for pane in self._panes(width, console) if pane.rows]
        lines = [_cut(row, width) for row in self._head(width)[: min(max(2, height // 3), height)]]
        yield Text("\n", no_wrap=True, end="").join([*lines, *_fitted(panes, width, height - len(lines))])

    def _head(self, width: int) -> list[Text]:
        status, ended = self._status, self._status.ended
        if ended is not None:
            state, style = ended.text, "green" if ended.exit_status == 0 else "red"
        else:
            state = self._gone or f"{status.phase}, for {duration(self._now_s - status.phase_since_s)}"
            style = "red" if self._gone else "green"
        first = Text.assemble((status.run, "bold"), "  ", duration(self._now_s - status.started_s), "  ")
        if self._note:
            first.append(f"[{self._note}]", style="reverse").append("  ")
        done = round(30 * min(1.0, status.step / max(1, status.num_steps)))
        words = f"step {status.step}/{status.num_steps}  version {status.version}"
        published = f", published {status.published}" if status.published else ""
        progress = Text.assemble(words, published, "  ", ("━" * done, "green"), ("━" * (30 - done), "dim"))
        return [first.append(state, style=style), progress, *_packed(_figures(status), width)]

    def _panes(self, width: int, console: Console) -> Iterator[Pane]:
        status = self._status
        inner = max(8, width - NAME_WIDTH)

        def wrapped(sentences: Iterable[str], style: str = "") -> list[Text]:
            return [row for each in sentences for row in Text(each, style).wrap(console, inner)]

        idle = [] if status.ended else [Text("no process waits", style="dim")]
        yield Pane("alerts", wrapped(status.alerts, "red"))
        yield Pane("pools", list(_pools(status)))
        yield Pane("actors", list(_processes(status.actors, self._now_s)))
        yield Pane("stages", list(_processes(status.stages, self._now_s)))
        yield Pane("services", list(_processes(status.services, self._now_s)), min_rows=1)
        yield Pane("buffer", list(_buffer(status, inner)))
        yield Pane("lag", lag_bars(status, inner), min_rows=MAX_LAG_ROWS)
        summary = lag_control_effect(status.recent_lags, status.max_lag)
        yield Pane("control", [*_control_lines(status, inner), *wrapped([summary] if summary else [])])
        yield Pane("waits", wrapped(status.waits) or idle)
        at = [time.strftime("%H:%M:%S", time.localtime(event.time_s)) for event in status.events]
        events = [Text.assemble((when, "dim"), f" {each.text}") for when, each in zip(at, status.events, strict=True)]
        yield Pane("events", events, min_rows=1)


def _fitted(panes: Sequence[Pane], width: int, height: int) -> list[Text]:
    """Return the stacked panes; if they do not fit, each keeps at least its `min_rows`."""
    for name in DROPPED_FIRST:
        if sum(min(pane.min_rows, len(pane.rows)) for pane in panes) > height:
            panes = [pane for pane in panes if pane.name != name]
    heights = [len(pane.rows) for pane in panes]
    least = [min(pane.min_rows, len(pane.rows)) for pane in panes]
    while sum(heights) > height:
        longest = max(range(len(panes)), key=lambda place: (heights[place] > least[place], heights[place]))
        heights[longest] -= 1
    return [line for pane, rows in zip(panes, heights, strict=True) for line in pane.lines(width, rows)]


def _cut(row: Text, width: int) -> Text:
    """Return a row truncated to a width, without control characters, which texts of processes may contain."""
    if not row.plain.isprintable():
        row.plain = "".join(char if char.isprintable() else " " for char in row.plain)
    row.truncate(width, overflow="ellipsis")
    return row


def _packed(parts: Iterable[str], width: int) -> list[Text]:
    """Join parts on as few lines as possible."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return list(map(Text, lines))


def _figures(status: RunStatus) -> Iterator[str]:
    yield f"reward {number(status.row.get('reward/mean'))}"
    yield f"loss {number(status.row.get('loss'))}"
    allowed, drift = (status.row.get(name) for name in ("lag/allowed", "lag/drift"))
    control = "" if allowed is None else f", allowed {number(allowed)}, drift {number(drift)}"
    yield f"lag mean {number(status.lag_mean)}, max {status.lag_max} of {status.max_lag}{control}"
    yield f"mismatch {number(status.mismatch_lag0_abs)}"
    yield f"tokens/s generated {status.generated_tokens_per_s:,.0f}"
    yield f"trained {status.learner.tokens_per_s:,.0f}"
    if (busy := status.learner_busy_frac) is not None:
        yield f"learner busy {busy:.0%}, step {status.row['time/step']:.2f} s"
    if status.evaluations:
        first, last = (number(status.evaluations[place].greedy) for place in (0, -1))
        known = f"{first} -> {last}" if len(status.evaluations) > 1 else last
        yield f"accuracy {known} (version {status.evaluations[-1].versions})"
    if status.learner.restarts:
        yield f"learner restarts {status.learner.restarts}"


def _pool_style(pools: Sequence[str], pool: str) -> str:
    return POOL_STYLES[pools.index(pool) % len(POOL_STYLES)] if pool in pools else "white"


def _pools(status: RunStatus) -> Iterator[Text]:
    width, names = max((len(pool.name) for pool in status.pools), default=0), sorted(status.lags)
    for pool in status.pools:
        yield Text.assemble(
            (f"{pool.name:<{width}}  ", f"bold {_pool_style(names, pool.name)}"),
            (f"{pool.working}/{pool.wanted} working", "yellow" if pool.working < pool.wanted else ""),
            f"  {pool.tokens_per_s:>5,.0f} tokens/s  {pool.running:>4} running  lag {number(pool.lag_mean)}"
            f"  mismatch {number(pool.mismatch_lag0_abs)}  {'  '.join(_engines(pool))}",
        )


def _engines(pool: PoolStatus) -> Iterator[str]:
    engines = pool.engines
    figures = {
        "{:.0%} of " + f"{engines.slots} slots": engines.slots_used,
        "step {:.1f} ms": engines.step_s and 1e3 * engines.step_s,
        "cache {:.0%}": engines.kv_usage or None,
        "{} preempted": engines.preempted or None,
        "{} tokens lost": engines.tokens_lost or None,
        "requeues at {} tokens": engines.requeue_at or None,
    }
    return (text.format(figure) for text, figure in figures.items() if figure is not None)


def _processes(processes: Sequence[ProcessStatus], now_s: float) -> Iterator[Text]:
    width = max((len(each.name) for each in processes), default=0)
    for each in processes:
        yield Text.assemble((f"{each.name:<{width}}  ", "bold"), Text("  ").join(_process(each, now_s)))


def _process(process: ProcessStatus, now_s: float) -> Iterator[Text]:
    actor = process if isinstance(process, ActorStatus) else None
    is_quiet = process.state in ("working", "finished")
    if actor is not None and process.state == "working" and actor.version is not None:
        behind = f" ({actor.behind} behind)" if actor.behind else ""
        yield Text(f"v {actor.version}{behind}  {actor.tokens_per_s:,.0f} tokens/s  {actor.running} running")
    else:
        since = "" if actor is None and is_quiet else f", for {duration(now_s - process.since_s)}"
        style = "red" if process.state.startswith("lost") else "" if is_quiet else "yellow"
        yield Text(f"{process.state}{since}", style=style)
    if process.restarts:
        yield Text(f"{process.restarts} restarts", style="yellow")
    if actor is not None and actor.refused:
        yield Text(f"refused {actor.refused}", style="red")
    if actor is not None and actor.waits_for:
        yield Text(actor.waits_for + (f", {duration(actor.waits_s)}" if actor.waits_s else ""), style="dim")


def _buffer(status: RunStatus, width: int) -> Iterator[Text]:
    buffer = status.buffer
    if buffer is None:
        return
    ledger, of_step = buffer.ledger, buffer.groups_per_step
    yield Text(f"{buffer.ready_groups} groups ready, {of_step} a step, {buffer.drawn_groups} drawn  {buffer.sampler}")
    if gap := ledger.get("gap", 0):
        yield Text(f"ledger gap {gap}: the sample counts are inconsistent; this is a bug", style="red")
    names = [*COUNTS, *(name for name in OUTSIDE if ledger.get(name)), "gap"]
    yield from _packed((f"{name} {ledger.get(name, 0)}" for name in names), width)
    for reason, count in buffer.failed_by_reason.items():
        yield Text(f"{count} failed: {reason}")
    for sender, count in buffer.invalid_by_sender.items():
        yield Text(f"{count} invalid messages from {sender}")


def lag_bars(status: RunStatus, width: int) -> list[Text]:
    """Return bars of the share of trained tokens by lag, up to max_lag or the largest lag; a bar may cover several."""
    lags, pools = status.lags, sorted(status.lags)
    total = sum(sum(counts.values()) for counts in lags.values())
    if not total:
        return []
    bound = status.max_lag if isinstance(status.max_lag, int) else None
    num_lags = 1 + max(bound or 0, *(lag for counts in lags.values() for lag in counts))
    step = -(-num_lags // MAX_LAG_ROWS)
    sums = {
        first: {pool: sum(lags[pool].get(lag, 0) for lag in range(first, first + step)) for pool in pools}
        for first in range(0, num_lags, step)
    }
    scale = max(1, width - 17 - len(MARK)) / max(sum(each.values()) for each in sums.values())
    bars = []
    for first, counts in sums.items():
        name = str(first) if step == 1 else f"{first}-{first + step - 1}"
        bar = Text(f"{name:>7} {sum(counts.values()) / total:>6.1%}  ")
        for pool in pools:
            bar.append("█" * round(counts[pool] * scale), style=_pool_style(pools, pool))
        if bound is not None and first <= bound < first + step:
            bar.append(f" {MARK}", style="bold")
        bars.append(bar)
    return bars


def _control_lines(status: RunStatus, width: int) -> Iterator[Text]:
    """Yield lag, allowed lag and drift over the newest steps; the first two share a scale."""
    if isinstance(status.max_lag, int) and status.recent_lags:
        for name, metric in {"mean": "lag/token_mean", "allowed": "lag/allowed", "drift": "lag/drift"}.items():
            values = [value or 0.0 for value in status.recent_lags[metric]][-max(1, width - 16) :]
            top = max(values) if metric == "lag/drift" else status.max_lag
            bars = "".join(BLOCKS[min(8, round(8 * value / top))] if top else " " for value in values)
            yield Text(f"{name:>7} {number(values[-1]):>6}  {bars}")


# --- leeway top ---------------------------------------------------------------------------------------


def show(view: Callable[[], View], console: Console) -> None:
    """Show a view on a terminal, updated twice a second, until a quit key is pressed; always restore the terminal."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, frame: sys.exit(128 + number))
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    try:
        tty.setcbreak(stdin)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(view(), refresh=True)
                if select.select([stdin], [], [], REFRESH_S)[0] and os.read(stdin, 1) in QUIT_KEYS:
                    return
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


# --- the launcher's own terminal ------------------------------------------------------------------------


class LossyStream:
    """Wrapper of a standard stream that may be closed during the run; later output is discarded without an error.

    Flushes every write. All other attributes are those of the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- of any kind
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._discard()  # first, because the warning may go to this stream
            log.warning("the output of the launcher can no longer be written (%s); the run continues", error)
        return len(text)

    def flush(self) -> None:
        self.write("")

    def _discard(self) -> None:
        """Redirect the stream to /dev/null, and standard streams on the same file: Python flushes them at exit."""
        with suppress(OSError), open(os.devnull, "wb", 0) as null:  # streams in tests have no descriptor
            lost = self._stream.fileno()
            standard = [each.fileno() for each in (sys.__stdout__, sys.__stderr__) if each is not None]
            for descriptor in {lost, *(each for each in standard if os.path.sameopenfile(each, lost))}:
                os.dup2(null.fileno(), descriptor)


class Display:
    """A live view on a terminal, else a line every few seconds. Tolerates a narrow or closed terminal."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a display that shows nothing yet. `clock` returns monotonic seconds."""
        self._folder, self._clock = folder, clock
        self._console = Console(file=cast(TextIO, LossyStream(sys.stdout)), highlight=False, markup=False)
        self._live: Live | None = None
        self._last_line_s = clock()
        self._last_step = 0
        self._failures = ""

    def __enter__(self) -> Display:
        self.log(f"run {self._folder.root}")
        if sys.stdout.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def log(self, text: str) -> None:
        """Print a message, such as a phase or an event."""
        self._console.print("\n".join(map(printable, text.splitlines())), soft_wrap=True)

    def update(self, status: RunStatus) -> None:
        """Show the newest status. Thread-safe."""
        if status.buffer is not None:
            self._failures = failures(status.buffer.ledger, status.buffer.failed_by_reason)
        live = self._live
        if live is not None:
            live.update(View(status, status.written_s))
        elif status.ended is None:
            self._print_line(status)

    def _print_line(self, status: RunStatus) -> None:
        """Print a line: with each new step what the learner waits for; without one, all waits."""
        is_new_step, is_training = status.step != self._last_step, status.phase == TRAINING
        is_stuck = bool(status.waits) and is_training
        quiet_s = PLAIN_INTERVAL_S if is_new_step or is_stuck or status.alerts else QUIET_S
        if self._clock() - self._last_line_s < quiet_s:
            return
        self._last_line_s, self._last_step = self._clock(), status.step
        if is_new_step:
            self.log(line(status, num_waits=1 if status.learner.waits_for else 0))
        else:
            is_computing = is_training and not status.learner.waits_for
            self.log(line(status) + (f"; the learner computes step {status.step + 1}" if is_computing else ""))

    def last_line(self, text: str) -> None:
        """Print a line after the run, below the live view."""
        self.__exit__()
        self.log(text)

    def fail(self, text: str) -> None:
        """Print why the run failed, after the summary of failed samples."""
        self.__exit__()
        if self._failures:
            self.log(self._failures)
        print(f"leeway: {text}", file=cast(TextIO, LossyStream(sys.stderr)))

    def finish(self, before: Accuracy | None, after: Accuracy | None, summary: Mapping[str, Any]) -> None:
        self.__exit__()
        if after is not None:
            changes = [
                f"{which} {number(getattr(before, which, None))} -> {number(getattr(after, which))}"
                for which in ("greedy", "sampled")
            ]
            self.log(f"held-out accuracy over {after.num_problems} problems: {', '.join(changes)}")
        self.log(
            f"{summary['trained_trajectories']} trajectories in {summary['num_steps']} steps; "
            f"lag mean {number(summary['lag_mean'])}, max {summary['lag_max']} of {summary['max_lag']}; "
            f"generating during {number(summary['overlap_frac'])} of step time; ledger gap {summary['ledger_gap']}"
        )
        if failed := failures(summary["ledger"], summary["failed_by_reason"]):
            self.log(failed)
        self.log(f"{summary['wall_s']:.0f} s in total; model, metrics and summary.json are in {self._folder.root}")
