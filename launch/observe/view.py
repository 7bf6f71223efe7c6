"""Terminal output about a run: a status line, and the view of `leeway top`."""

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
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from leeway.buffer.ledger import COUNTS
from leeway.launch.observe.status import ActorStatus, PoolStatus, ProcessStatus, RunStatus, lag_control_effect
from leeway.launch.text import duration, number, share_of, shortened

log = logging.getLogger(__name__)

POOL_STYLES = ("cyan", "magenta", "green", "blue", "yellow")
"""Colours of the pools in order, repeated cyclically."""
MARK = "◂ bound"
MAX_LAG_ROWS = 8
BLOCKS = " ▁▂▃▄▅▆▇█"
NAME_WIDTH = 10
"""Width of the column of pane names."""
DROPPED_FIRST = ("services", "stages", "events", "actors")
"""Panes that are omitted on small screens, in this order."""
OUTSIDE = ("duplicates", "late", "quarantined")
TRAINING = "training"
"""Name of the phase in which the learner trains."""
NUM_WAITS, NUM_REASONS, MAX_REASON = 3, 3, 60
REFRESH_S = 0.5
QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04", b"")
"""Inputs that end the view: q, Q, the characters of Ctrl-C and Ctrl-D, and the end of file of a closed terminal."""


# --- one line -----------------------------------------------------------------------------------------


def phrases(status: RunStatus, left_s: float | None = None) -> list[str]:
    """Return phrases about a run, the most important first: elapsed time, step or phase, reward, lag, rates."""
    now = f"step {status.step}/{status.num_steps}"
    if status.phase != TRAINING:
        now = f"{status.phase}, for {duration(status.written_s - status.phase_since_s)}"
    if left_s is not None:
        now += f", {duration(left_s)} left"
    found = [duration(status.written_s - status.started_s), now]
    if status.step:
        found.append(f"reward {number(status.row.get('reward/mean'))}")
        lag = "-" if status.lag_mean is None else f"{status.lag_mean:.1f}"
        found.append(f"lag {lag} of {status.max_lag}")
        found.append(f"generated {status.generated_tokens_per_s:,.0f} tok/s")
        found.append(f"trained {status.learner.tokens_per_s:,.0f} tok/s")
    return found


def line(status: RunStatus, left_s: float | None = None, num_waits: int = NUM_WAITS) -> str:
    """Return the status line of a run: its phrases, up to `num_waits` waits, and the alerts."""
    sentences = status.waits[:num_waits]
    if num_waits > 1 and len(status.waits) > num_waits:
        sentences = [*sentences, f"and {len(status.waits) - num_waits} more wait"]
    return "; ".join(["  ".join(phrases(status, left_s)), *sentences, *status.alerts])


def failures(ledger: Mapping[str, int], by_reason: Mapping[str, int]) -> str:
    """Return the share of failed samples with the most common reasons; '' if none failed."""
    failed, issued = ledger.get("failed", 0), ledger.get("issued", 0)
    if not failed:
        return ""
    why = most_common(by_reason)
    return f"{failed:,} of {issued:,} samples failed ({share_of(failed, issued)})" + (f": {why}" if why else "")


def most_common(by_reason: Mapping[str, int], limit: int = NUM_REASONS) -> str:
    """Return up to `limit` of the most common reasons with their counts, and one count for all other reasons."""
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
    """Minimum number of rows on a small screen."""

    def lines(self, width: int, height: int) -> list[Text]:
        """Return up to `height` lines: the last events, or another pane's first rows and the number of other rows."""
        rows = list(self.rows)
        if len(rows) > height and self.name == "events":
            rows = rows[-height:]
        elif len(rows) > height:
            rows = [*rows[: height - 1], Text(f"... and {len(rows) - height + 1} more", style="dim")][:height]
        names = [self.name, *[""] * len(rows)]
        named = (Text.assemble((f"{name:<{NAME_WIDTH}}", "bold"), row) for name, row in zip(names, rows, strict=False))
        return [cut(row, width) for row in named]


class View:
    """A rich renderable that fits any screen; truncated panes show how many rows are omitted."""

    def __init__(self, status: RunStatus, now_s: float, *, gone: str = "", note: str = "") -> None:
        """`gone` is the reason that the launcher counts as dead, or ''; `note` is shown beside the run's name."""
        self._status, self._gone, self._note = status, gone, note
        # freeze the durations of an ended run
        self._now_s = status.ended.at_s if status.ended is not None else status.written_s if gone else now_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, sys.maxsize
        if console.is_terminal:
            height = options.height or max(1, console.height - 1)
        panes = [pane for pane in self._panes(width, console) if pane.rows]
        lines = [cut(row, width) for row in self._head(width)[: min(max(2, height // 3), height)]]
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
        return [first.append(state, style=style), progress, *packed(_figures(status), width)]

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
    """Return the lines of the panes; if too many, omit panes of `DROPPED_FIRST`, then shorten the longest panes."""
    for name in DROPPED_FIRST:
        if sum(min(pane.min_rows, len(pane.rows)) for pane in panes) > height:
            panes = [pane for pane in panes if pane.name != name]
    heights = [len(pane.rows) for pane in panes]
    least = [min(pane.min_rows, len(pane.rows)) for pane in panes]
    while sum(heights) > height:
        longest = max(range(len(panes)), key=lambda place: (heights[place] > least[place], heights[place]))
        heights[longest] -= 1
    return [line for pane, rows in zip(panes, heights, strict=True) for line in pane.lines(width, rows)]


def cut(row: Text, width: int) -> Text:
    """Return a row truncated to `width`; control characters, which texts of processes may contain, become spaces."""
    if not row.plain.isprintable():
        row.plain = "".join(char if char.isprintable() else " " for char in row.plain)
    row.truncate(width, overflow="ellipsis")
    return row


def packed(parts: Iterable[str], width: int) -> list[Text]:
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
    kl = status.row.get("policy/kl_reference")
    yield f"entropy {number(status.row.get('policy/entropy'))}" + ("" if kl is None else f", KL {number(kl)}")
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
    yield Text(f"{buffer.ready_groups} groups ready, {of_step} per step, {buffer.drawn_groups} drawn  {buffer.sampler}")
    if gap := ledger.get("gap", 0):
        yield Text(f"ledger gap {gap}: the sample counts are inconsistent; this is a bug", style="red")
    names = [*COUNTS, *(name for name in OUTSIDE if ledger.get(name)), "gap"]
    yield from packed((f"{name} {ledger.get(name, 0)}" for name in names), width)
    for reason, count in buffer.failed_by_reason.items():
        yield Text(f"{count} failed: {reason}")
    for sender, count in buffer.invalid_by_sender.items():
        yield Text(f"{count} invalid messages from {sender}")


def lag_bars(status: RunStatus, width: int) -> list[Text]:
    """Return one bar per lag or range of lags; the length of a bar shows the fraction of training tokens."""
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
    """Yield a line each for lag, allowed lag and drift over the newest steps; both lags have the same scale."""
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
