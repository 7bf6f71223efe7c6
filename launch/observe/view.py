"""View: a run on a terminal of any size, as panes of `rich.layout`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.layout import Layout
from rich.table import Table
from rich.text import Text

from buffer.ledger import COUNTS
from launch.observe.status import ActorStatus, PoolStatus, ProcessStatus, RunStatus
from launch.text import duration, number, share_of, shortened

POOL_STYLES = ("cyan", "magenta", "green", "blue", "yellow")
"""Colours of the pools in their order; they repeat after the last."""
MARK = "◂ bound"
MAX_LAG_ROWS = 8
NAME_WIDTH, NARROW, TWO_COLUMNS = 10, 50, 150
"""Columns of the names of panes; from which width on they are shown; from which width on panes stand in two columns."""
DROPPED_FIRST = ("services", "stages", "events", "actors")
"""Panes that small screens do without."""
OUTSIDE = ("duplicates", "late", "quarantined")
TRAINING = "training"
"""The phase in which steps are taken."""
NUM_WAITS, NUM_REASONS, MAX_REASON = 3, 3, 60

Cell = str | Text
Row = Sequence[Cell]


# --- a run in a sentence ------------------------------------------------------------------------------


def line(status: RunStatus, num_waits: int = NUM_WAITS) -> str:
    """Return a run in one line: progress, and up to `num_waits` sentences of what waits for what."""
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
    return "; ".join([f"{status.written_s - status.started_s:5.0f} s  {figures}", *sentences, *status.tripped])


def failures(ledger: Mapping[str, int], by_reason: Mapping[str, int]) -> str:
    """Return the share of samples that failed with the commonest reasons; empty if none did."""
    failed, issued = ledger.get("failed", 0), ledger.get("issued", 0)
    if not failed:
        return ""
    why = commonest(by_reason)
    return f"{failed:,} of {issued:,} samples failed ({share_of(failed, issued)})" + (f": {why}" if why else "")


def commonest(by_reason: Mapping[str, int], most: int = NUM_REASONS) -> str:
    """Return up to `most` of the commonest reasons with their counts, and the others as one count."""
    ordered = sorted(by_reason.items(), key=lambda each: -each[1])
    named = [f"{shortened(reason, MAX_REASON)} ({count:,})" for reason, count in ordered[:most]]
    if others := ordered[most:]:
        named.append(f"{len(others)} other reason{'s' * (len(others) > 1)} ({sum(count for _, count in others):,})")
    return "; ".join(named)


# --- the panes ----------------------------------------------------------------------------------------


class Pane:
    """Rows of cells under one name: a renderable that says how many rows it left out for want of height."""

    def __init__(self, name: str, rows: Sequence[Row], least: int = 1, *, keeps_end: bool = False) -> None:
        self.name, self.rows, self.least, self._keeps_end = name, rows, least, keeps_end

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows, height = list(self.rows), options.height or len(self.rows)
        if len(rows) > height and self._keeps_end:
            rows = rows[-height:]
        elif len(rows) > height > 1 and self.name:
            rows = [*rows[: height - 1], [Text(f"... and {len(rows) - height + 1} more", style="dim")]]
        grid = Table.grid(padding=(0, 2, 0, 0))
        if options.max_width >= NARROW and self.name:
            rows = [[Text("" if place else self.name, style="bold"), *row] for place, row in enumerate(rows)]
            grid.add_column(no_wrap=True, min_width=NAME_WIDTH - 2)
        for place in range(max((len(row) for row in self.rows), default=0)):
            names = [_safe(row[0]).cell_len for row in self.rows if len(row) > 1]  # only the last column is cut
            grid.add_column(no_wrap=True, overflow="ellipsis", min_width=max(names, default=0) * (place == 0) or None)
        for row in rows:
            grid.add_row(*map(_safe, row))
        yield grid


def lag_bars(status: RunStatus, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return bars of the share of trained tokens by lag, up to the bound or the greatest; neighbours may share one."""
    lags, pools = status.lags, sorted(status.lags)
    total = sum(sum(counts.values()) for counts in lags.values())
    if not total:
        return []
    bound = status.max_lag if isinstance(status.max_lag, int) else None
    num_lags = 1 + max(bound or 0, *(lag for counts in lags.values() for lag in counts))
    step = -(-num_lags // MAX_LAG_ROWS)
    block, mark = ("#", "< bound") if ascii_only else ("█", MARK)
    sums = [
        {pool: sum(lags[pool].get(lag, 0) for lag in range(first, first + step)) for pool in pools}
        for first in range(0, num_lags, step)
    ]
    scale = max(1, width - 17 - len(mark)) / max(sum(each.values()) for each in sums)
    bars = []
    for first, counts in zip(range(0, num_lags, step), sums, strict=True):
        name = str(first) if step == 1 else f"{first}-{first + step - 1}"
        bar = Text(f"{name:>7} {sum(counts.values()) / total:>6.1%}  ")
        for pool in pools:
            bar.append(block * round(counts[pool] * scale), style=_pool_style(pools, pool))
        if bound is not None and first <= bound < first + step:
            bar.append(f" {mark}", style="bold")
        bars.append(bar)
    return bars


def _safe(cell: Cell) -> Text:
    """Return a cell without characters that move the cursor: texts of processes may hold any."""
    text = Text(cell) if isinstance(cell, str) else cell
    if text.plain.isprintable():
        return text
    return Text("".join(char if char.isprintable() else " " for char in text.plain), style=text.style)


def _pool_style(pools: Sequence[str], pool: str) -> str:
    return POOL_STYLES[pools.index(pool) % len(POOL_STYLES)] if pool in pools else "white"


def _head(status: RunStatus, now_s: float, gone: str, note: str, width: int) -> list[Row]:
    ended = status.ended
    if ended is not None:
        state, style = ended.text, "green" if ended.exit_status == 0 else "red"
    else:
        state = gone or f"{status.phase}, for {duration(now_s - status.phase_since_s)}"
        style = "red" if gone else "green"
    first = Text.assemble((status.run, "bold"), "  ", duration(now_s - status.started_s), "  ")
    if note:
        first.append(f"[{note}]", style="reverse").append("  ")
    done = round(30 * min(1.0, status.step / max(1, status.num_steps)))
    words = f" step {status.step}/{status.num_steps}  version {status.version}"
    published = f", published {status.published}" if status.published else ""
    progress = Text.assemble(words.strip() + published + "  ", ("━" * done, "green"), ("━" * (30 - done), "dim"))
    return [[first.append(state, style=style)], [progress], *_packed(_figures(status), width)]


def _packed(parts: Iterable[str], width: int) -> list[Row]:
    """Put parts beside each other, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return [[line] for line in lines]


def _figures(status: RunStatus) -> Iterator[str]:
    yield f"reward {number(status.row.get('reward/mean'))}"
    yield f"loss {number(status.row.get('loss'))}"
    yield f"lag mean {number(status.lag_mean)}, max {status.lag_max} of {status.max_lag}"
    yield f"mismatch {number(status.mismatch_lag0_abs)}"
    learner = status.learner
    yield f"tokens/s generated {status.generated_tokens_per_s:,.0f}"
    yield f"trained {learner.tokens_per_s:,.0f}"
    if (busy := status.learner_busy_frac) is not None:
        yield f"learner busy {busy:.0%}, step {status.row['time/step']:.2f} s"
    if status.evaluations:
        first, last = (number(status.evaluations[place].greedy) for place in (0, -1))
        known = f"{first} -> {last}" if len(status.evaluations) > 1 else last
        yield f"accuracy {known} (version {status.evaluations[-1].versions})"
    if learner.restarts:
        yield f"learner restarts {learner.restarts}"


def _pool(pool: PoolStatus, names: Sequence[str]) -> Row:
    engines = pool.engines
    more = [
        "" if engines.slots_used is None else f"{engines.slots_used:.0%} of {engines.slots} slots",
        "" if engines.step_s is None else f"step {1e3 * engines.step_s:.1f} ms",
        f"cache {engines.kv_usage:.0%}" if engines.kv_usage else "",
        f"{engines.preempted} preempted" if engines.preempted else "",
        f"{engines.tokens_lost} tokens lost" if engines.tokens_lost else "",
        f"hands on at {engines.hand_on_at} tokens" if engines.hand_on_at else "",
    ]
    return [
        Text(pool.name, style=f"bold {_pool_style(names, pool.name)}"),
        Text(f"{pool.working}/{pool.wanted} work", style="yellow" if pool.working < pool.wanted else "")
        + f"  {pool.tokens_per_s:>5,.0f} tokens/s  {pool.running:>4} running  lag {number(pool.lag_mean)}"
        + f"  mismatch {number(pool.mismatch_lag0_abs)}  {'  '.join(filter(None, more))}",
    ]


def _process(process: ProcessStatus, now_s: float) -> Row:
    actor = process if isinstance(process, ActorStatus) else None
    style = "red" if process.state.startswith("lost") else "" if process.state in ("working", "finished") else "yellow"
    if actor is not None and process.state == "working" and actor.version is not None:
        behind = f" ({actor.behind} behind)" if actor.behind else ""
        cells: list[Cell] = [f"v {actor.version}{behind}  {actor.tokens_per_s:,.0f} tokens/s  {actor.running} running"]
    else:
        is_timed = actor is not None or process.state not in ("working", "finished")
        since = f", for {duration(now_s - process.since_s)}" if is_timed else ""
        cells = [Text(f"{process.state}{since}", style=style)]
    if process.restarts:
        cells.append(Text(f"{process.restarts} restarts", style="yellow"))
    if actor is not None and actor.refused:
        cells.append(Text(f"refused {actor.refused}", style="red"))
    if process.waits_for:
        long = f", {duration(actor.waits_s)}" if actor is not None and actor.waits_s else ""
        cells.append(Text(f"{'' if actor else 'waits for '}{process.waits_for}{long}", style="dim"))
    return [Text(process.name, style="bold"), Text("  ").join(map(_safe, cells))]


def _buffer(status: RunStatus, width: int) -> Iterator[Row]:
    buffer = status.buffer
    if buffer is None:
        return
    ledger, of_step = buffer.ledger, buffer.groups_per_step
    yield [f"{buffer.ready_groups} groups ready, {of_step} a step, {buffer.drawn_groups} drawn  {buffer.sampler}"]
    if gap := ledger.get("gap", 0):
        yield [Text(f"ledger gap {gap}: samples are not counted right, which is a bug", style="red")]
    names = [*COUNTS, *(name for name in OUTSIDE if ledger.get(name)), "gap"]
    yield from _packed((f"{name} {ledger.get(name, 0)}" for name in names), width)
    for reason, count in buffer.failed_by_reason.items():
        yield [f"{count} failed: {reason}"]
    for sender, count in buffer.nonsense_by_sender.items():
        yield [f"{count} refused: nonsense from {sender}"]


class View:
    """A rich renderable that fits any screen: panes that have no room for all their rows say so."""

    def __init__(self, status: RunStatus, now_s: float, *, gone: str = "", note: str = "") -> None:
        """`gone` says why the command is thought gone, or is empty; `note` stands beside the name of the run."""
        self._status, self._gone, self._note = status, gone, note
        # a run that is over does not change any more
        self._now_s = status.ended.at_s if status.ended is not None else status.written_s if gone else now_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height, width = options.height or max(1, console.height - 1), options.max_width
        is_wide = width >= TWO_COLUMNS and console.is_terminal
        head = Pane("", _head(self._status, self._now_s, self._gone, self._note, width))
        column = (width // (1 + is_wide)) - (NAME_WIDTH if width >= NARROW else 0)
        bars: list[Row] = [[bar] for bar in lag_bars(self._status, column, ascii_only=options.ascii_only)]
        panes = list(self._panes(column, console, bars))
        if not console.is_terminal:
            yield from (head, *panes)
            return
        top = Layout(head, size=min(len(head.rows), max(2, height // 3), height))
        body = _stack(panes, height - len(head.rows))
        if is_wide:
            right = [pane for pane in panes if pane.name in ("lag", "waits", "events")]
            left = [pane for pane in panes if pane not in right]
            body = Layout()
            body.split_row(*(_stack(each, height - len(head.rows)) for each in (left, right)))
        whole = Layout()
        whole.split_column(top, body)
        yield from console.render(whole, options.update(height=height))

    def _panes(self, width: int, console: Console, bars: list[Row]) -> Iterator[Pane]:
        status, now_s = self._status, self._now_s

        def wrapped(sentences: Iterable[str], style: str = "") -> list[Row]:
            return [[row] for each in sentences for row in _safe(Text(each, style)).wrap(console, max(8, width))]

        events: list[Row] = [
            [Text.assemble((time.strftime("%H:%M:%S", time.localtime(each.time_s)), "dim"), f" {each.text}")]
            for each in status.events
        ]
        idle: list[Row] = [] if status.ended else [[Text("no process waits", style="dim")]]
        for pane in (
            Pane("wrong", wrapped(status.tripped, "red"), least=2),
            Pane("pools", [_pool(each, sorted(status.lags)) for each in status.pools], least=2),
            Pane("actors", [_process(each, now_s) for each in status.actors], least=2),
            Pane("stages", [_process(each, now_s) for each in status.stages], least=2),
            Pane("services", [_process(each, now_s) for each in status.services]),
            Pane("buffer", list(_buffer(status, width)), least=2),
            Pane("lag", bars, least=MAX_LAG_ROWS),
            Pane("waits", wrapped(status.waits) or idle, least=2),
            Pane("events", events, keeps_end=True),
        ):
            if pane.rows:
                yield pane


def _stack(panes: Sequence[Pane], height: int) -> Layout:
    """Put panes under each other: as they are if they fit, else each with at least some of its rows."""
    for name in DROPPED_FIRST:
        if sum(min(pane.least, len(pane.rows)) for pane in panes) > height:
            panes = [pane for pane in panes if pane.name != name]
    whole = Layout()
    if sum(len(pane.rows) for pane in panes) <= height:
        layouts = [*(Layout(pane, size=len(pane.rows)) for pane in panes), Layout(Text(" "))]
    else:
        least = [min(pane.least, len(pane.rows)) for pane in panes]
        layouts = [Layout(pane, ratio=len(pane.rows), minimum_size=n) for pane, n in zip(panes, least, strict=True)]
    whole.split_column(*layouts)
    return whole
