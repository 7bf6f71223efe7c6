"""View: a run as lines that fit any width and height."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from buffer.ledger import COUNTS
from launch.observe.status import ActorStatus, ProcessStatus, RunStatus
from launch.text import duration, number, share_of, shortened

POOL_STYLES = ("cyan", "magenta", "green", "blue", "yellow")
"""Of the pools, in their order; they begin anew after the last."""
MARK = "◂ bound"
_HEAD = 17
"""Columns before a bar: the lag and its share."""
MAX_ROWS = 12
"""More lags than this share rows, however much room there is."""


def style_of(pools: Sequence[str], pool: str) -> str:
    return POOL_STYLES[pools.index(pool) % len(POOL_STYLES)] if pool in pools else "white"


def lag_rows(status: RunStatus, width: int, max_rows: int, *, ascii_only: bool) -> list[Text]:
    """One row for each lag up to the greatest, or to the bound where there is one; shares are of all trained tokens.

    Where there are more lags than `max_rows`, some share a row. `width` is in columns.
    """
    lags, pools = status.lags, sorted(status.lags)
    total = sum(sum(counts.values()) for counts in lags.values())
    if not total or max_rows < 1:
        return []
    bound = status.max_lag if isinstance(status.max_lag, int) else None
    num_lags = 1 + max(bound or 0, *(lag for counts in lags.values() for lag in counts))
    step = -(-num_lags // max_rows)
    block, mark = ("#", "< bound") if ascii_only else ("█", MARK)
    sums = [
        {pool: sum(lags[pool].get(lag, 0) for lag in range(first, first + step)) for pool in pools}
        for first in range(0, num_lags, step)
    ]
    scale = max(1, width - _HEAD - len(mark)) / max(sum(each.values()) for each in sums)
    rows = []
    for place, counts in enumerate(sums):
        first, last = place * step, place * step + step - 1
        name = str(first) if step == 1 else f"{first}-{last}"
        row = Text(f"{name:>7} {sum(counts.values()) / total:>6.1%}  ")
        for pool in pools:
            row.append(block * round(counts[pool] * scale), style=style_of(pools, pool))
        if bound is not None and first <= bound <= last:
            row.append(f" {mark}", style="bold")
        rows.append(row)
    return rows


OUTSIDE = ("duplicates", "late", "quarantined")

Wrap = Callable[[str, str], list[Text]]
"""A sentence and its style, as lines of the width at hand."""


@dataclass(frozen=True)
class Section:
    """Lines under one name."""

    name: str
    lines: list[Text]
    least: int = 1
    """So many of them before less important sections get any."""
    keeps_end: bool = False
    """Where there is no room for all: the last lines stay, not the first."""
    within: Callable[[int], list[Text]] | None = None
    """The same in a given number of lines; None where lines have to be left out."""


def head(status: RunStatus, now_s: float, width: int, gone: str, note: str) -> list[Text]:
    """The first lines, most important first: the run and its state, how far it is, how it does, how fast."""
    ended = status.ended
    if ended is not None:
        state, style = ended.text, "green" if ended.exit_status == 0 else "red"
    elif gone:
        state, style = gone, "red"
    else:
        state, style = f"{status.phase}, for {duration(now_s - status.phase_since_s)}", "green"
    first = Text.assemble((status.run, "bold"), "  ", duration(now_s - status.started_s), "  ")
    if note:
        first.append(f"[{note}]", style="reverse").append("  ")
    first.append(state, style=style)
    return [first, _progress_line(status, width), *packed(_quality(status), width), *packed(_speed(status), width)]


def packed(parts: Iterable[str], width: int) -> list[Text]:
    """Parts side by side, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return [Text(line) for line in lines]


def sections(status: RunStatus, now_s: float, width: int, wrap: Wrap, *, ascii_only: bool) -> list[Section]:
    """All sections that have something to show, in the order in which they stand."""

    def lag(max_rows: int) -> list[Text]:
        return lag_rows(status, width, max_rows, ascii_only=ascii_only)

    wrong = [line for sentence in status.tripped for line in wrap(sentence, "red")]
    waits = [line for sentence in status.waits for line in wrap(sentence, "")]
    events = [
        Text.assemble((time.strftime("%H:%M:%S", time.localtime(event.time_s)), "dim"), f" {event.text}")
        for event in status.events
    ]
    found = [
        Section("wrong", wrong, least=2),
        Section("pools", list(_pools(status))),
        Section("actors", list(_processes(status.actors, now_s)), least=2),
        Section("stages", list(_processes(status.stages, now_s))),
        Section("services", list(_processes(status.services, now_s)), least=0),
        Section("buffer", _buffer(status, width), least=2),
        Section("lag", lag(MAX_ROWS), least=3, within=lag),
        Section("waits", waits if status.ended or waits else [Text("nobody waits", style="dim")], least=2),
        Section("events", events, keeps_end=True),
    ]
    return [section for section in found if section.lines]


def _progress_line(status: RunStatus, width: int) -> Text:
    share = min(1.0, status.step / max(1, status.num_steps))
    published = f", published {status.published}" if status.published else ""
    words = f" step {status.step}/{status.num_steps}  version {status.version}{published}"
    room = max(0, min(40, width - len(words)))
    done = round(share * room)
    return Text.assemble(("━" * done, "green"), ("━" * (room - done), "dim"), words)


def _quality(status: RunStatus) -> Iterator[str]:
    yield f"reward {number(status.reward)}"
    yield f"loss {number(status.loss)}"
    if status.evaluations:
        first, last = (number(status.evaluations[place].greedy) for place in (0, -1))
        known = f"{first} -> {last}" if len(status.evaluations) > 1 else last
        yield f"accuracy {known} (version {status.evaluations[-1].versions})"
    yield f"lag mean {number(status.lag_mean)}, max {status.lag_max} of {status.max_lag}"
    yield f"mismatch {number(status.mismatch_lag0_abs)}"


def _speed(status: RunStatus) -> Iterator[str]:
    learner = status.learner
    yield f"tokens/s generated {status.generated_tokens_per_s:,.0f}"
    yield f"trained {learner.tokens_per_s:,.0f}"
    if learner.busy_frac is not None and learner.step_s is not None:
        yield f"learner busy {learner.busy_frac:.0%}, step {learner.step_s:.2f} s"
    if learner.restarts:
        yield f"learner restarts {learner.restarts}"


def _pools(status: RunStatus) -> Iterator[Text]:
    names = sorted(status.lags)
    width = 2 + max((len(pool.name) for pool in status.pools), default=0)
    for pool in status.pools:
        short, engines = pool.working < pool.wanted, pool.engines
        yield Text.assemble(
            (f"{pool.name:<{width}}", f"bold {style_of(names, pool.name)}"),
            (f"{pool.working}/{pool.wanted} work", "yellow" if short else ""),
            f"  {pool.tokens_per_s:>5,.0f} tokens/s {pool.running:>4} running",
            f"  lag {number(pool.lag_mean)}  mismatch {number(pool.mismatch_lag0_abs)}",
            "" if engines.slots_used is None else f"  {engines.slots_used:.0%} of {engines.slots} slots",
            "" if engines.step_s is None else f"  step {1e3 * engines.step_s:.1f} ms",
            f"  cache {engines.kv_usage:.0%}" if engines.kv_usage else "",
            (f"  {engines.preempted} preempted", "yellow") if engines.preempted else "",
            (f"  {engines.tokens_lost} tokens lost", "yellow") if engines.tokens_lost else "",
            f"  hands on at {engines.hand_on_at} tokens" if engines.hand_on_at else "",
        )


def _processes(processes: Sequence[ProcessStatus], now_s: float) -> Iterator[Text]:
    width = 2 + max((len(process.name) for process in processes), default=0)
    for process in processes:
        line = Text.assemble((f"{process.name:<{width}}", "bold"))
        actor = process if isinstance(process, ActorStatus) else None
        if actor is not None and actor.state == "working" and actor.version is not None:
            behind = f" ({actor.behind} behind)" if actor.behind else ""
            line.append(f"v {actor.version}{behind}  {actor.tokens_per_s:>7,.0f} tokens/s  {actor.running:>4} running")
        else:
            line.append(process.state, style=_style(process.state))
            if actor is not None or process.state not in ("working", "finished"):
                line.append(f", for {duration(now_s - process.since_s)}", style=_style(process.state) if actor else "")
        if process.restarts:
            line.append(f"  {process.restarts} restarts", style="yellow")
        if actor is not None and actor.refused:
            line.append(f"  refused {actor.refused}", style="red")
        if process.waits_for:
            long = f", {duration(actor.waits_s)}" if actor is not None and actor.waits_s else ""
            line.append(f"  {'' if actor else 'waits for '}{process.waits_for}{long}", style="dim")
        yield line


def _style(state: str) -> str:
    if state.startswith("lost"):
        return "red"
    return "" if state in ("working", "finished") else "yellow"


def _buffer(status: RunStatus, width: int) -> list[Text]:
    buffer = status.buffer
    if buffer is None:
        return []
    ledger = buffer.ledger
    state = [
        f"{buffer.ready_groups} groups ready, {buffer.groups_per_step} a step, {buffer.drawn_groups} drawn",
        f"sampler {buffer.sampler}",
    ]
    gap = ledger.get("gap", 0)
    bug = [Text(f"ledger gap {gap}: samples are not counted right, which is a bug", style="red")] if gap else []
    names = [*COUNTS, *(name for name in OUTSIDE if ledger.get(name)), "gap"]
    counts = packed((f"{name} {ledger.get(name, 0)}" for name in names), width)
    failed = packed((f"{count} failed: {reason}" for reason, count in buffer.failed_by_reason.items()), width)
    nonsense = packed(
        (f"{count} refused: nonsense from {sender}" for sender, count in buffer.nonsense_by_sender.items()), width
    )
    return [*packed(state, width), *bug, *counts, *failed, *nonsense]


NAME_WIDTH = 9
"""Columns of the names of the sections; narrow screens do without."""
NARROW = 50
TWO_COLUMNS = 150
"""From this width on the sections stand in two columns."""
RIGHT = frozenset({"lag", "waits", "events"})
MOST_IMPORTANT_FIRST = ("wrong", "lag", "waits", "pools", "buffer", "actors", "stages", "events", "services")
TALLEST = 60
"""Lines where the height is not known, as in a pipe."""


TRAINING = "training"
"""The phase in which steps are taken."""
NUM_WAITS = 3
"""How many of those who wait are named in a line."""


def line(status: RunStatus, num_waits: int = NUM_WAITS) -> str:
    """A run in one line: how far it is, and who waits for whom, of whom so many are named."""
    phase = f"{status.phase}, for {status.written_s - status.phase_since_s:.0f} s"
    figures = phase
    if status.step:
        figures = (
            f"step {status.step}/{status.num_steps}  reward {number(status.reward)}  "
            f"lag {number(status.lag_mean)} (max {status.lag_max} of {status.max_lag})  "
            f"tokens/s generated {status.generated_tokens_per_s:.0f} trained {status.learner.tokens_per_s:.0f}"
        )
        if status.phase != TRAINING and status.ended is None:
            figures += f"  {phase}"
    sentences = status.waits[:num_waits]
    if num_waits and len(status.waits) > num_waits:
        sentences = [*sentences, f"and {len(status.waits) - num_waits} more wait"]
    return "; ".join([f"{status.written_s - status.started_s:5.0f} s  {figures}", *sentences, *status.tripped])


NUM_REASONS, MAX_REASON = 3, 60
"""Why samples failed: how many of the reasons are named in a sentence, and characters of each."""


def failures(ledger: Mapping[str, int], by_reason: Mapping[str, int]) -> str:
    """Which share of the samples asked for failed, and the commonest reasons; empty where none did."""
    failed, issued = ledger.get("failed", 0), ledger.get("issued", 0)
    if not failed:
        return ""
    why = commonest(by_reason)
    return f"{failed:,} of {issued:,} samples failed ({share_of(failed, issued)})" + (f": {why}" if why else "")


def commonest(by_reason: Mapping[str, int], most: int = NUM_REASONS) -> str:
    """The commonest reasons with their counts, so many of them; the others are counted together."""
    ordered = sorted(by_reason.items(), key=lambda each: -each[1])
    named = [f"{shortened(reason, MAX_REASON)} ({count:,})" for reason, count in ordered[:most]]
    if others := ordered[most:]:
        named.append(f"{len(others)} other reason{'s' * (len(others) > 1)} ({sum(count for _, count in others):,})")
    return "; ".join(named)


class View:
    """A rich renderable that always fits: what is less important goes first where there is no room."""

    def __init__(self, status: RunStatus, now_s: float, *, gone: str = "", note: str = "") -> None:
        """`gone` says why the command is thought gone, empty where it is not; `note` stands beside the name."""
        self._snapshot = status
        # nothing of a run that is over goes on
        self._now_s = status.ended.at_s if status.ended is not None else status.written_s if gone else now_s
        self._gone = gone
        self._note = note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lines that are no wider and no more than there is room for."""
        width = max(1, options.max_width)
        height = options.height or (max(1, console.height - 1) if console.is_terminal else TALLEST)
        for line in self.lines(width, height, ascii_only=options.ascii_only):
            yield from line.render(console)
            yield Segment.line()

    def lines(self, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
        """The view as lines: at most `height`, none wider than `width`."""
        status = self._snapshot
        top = head(status, self._now_s, width, self._gone, self._note)[: max(2, height // 3)][:height]
        room = height - len(top)
        is_wide = width >= TWO_COLUMNS
        column = (width - 2) // 2 if is_wide else width
        inside = column - NAME_WIDTH if column >= NARROW else column

        def wrap(sentence: str, style: str) -> list[Text]:
            return list(Text(sentence, style=style).wrap(_MEASURE, max(8, inside)))

        found = sections(status, self._now_s, inside, wrap, ascii_only=ascii_only)
        if is_wide:
            left = _column([each for each in found if each.name not in RIGHT], column, room)
            right = _column([each for each in found if each.name in RIGHT], column, room)
            body = _beside(left, right, column)
        else:
            body = _column(found, column, room)
        return [_cut(line, width) for line in [*top, *body]]


_MEASURE = Console(width=80, legacy_windows=False, force_terminal=False, color_system=None)
"""Wrapping a text needs a console, though of no particular kind."""


def fit(found: Sequence[Section], room: int) -> dict[str, int]:
    """How many lines each section gets: first what each needs least, by importance, then the rest in turns."""
    given = {section.name: 0 for section in found}
    by_importance = sorted(found, key=lambda section: MOST_IMPORTANT_FIRST.index(section.name))
    for section in by_importance:
        given[section.name] = min(section.least, len(section.lines), room)
        room -= given[section.name]
    while room > 0 and (wanting := [each for each in by_importance if given[each.name] < len(each.lines)]):
        for section in wanting[:room]:
            given[section.name] += 1
        room -= len(wanting[:room])
    return given


def _column(found: Sequence[Section], width: int, room: int) -> list[Text]:
    given = fit(found, room)
    lines: list[Text] = []
    for section in found:
        for place, line in enumerate(_shortened(section, given[section.name])):
            name = section.name if place == 0 else ""
            lines.append(Text.assemble((f"{name:<{NAME_WIDTH}}", "bold"), line) if width >= NARROW else line)
    return [_cut(line, width) for line in lines]


def _shortened(section: Section, count: int) -> list[Text]:
    """So many of its lines; where some are left out, it says how many."""
    missing = len(section.lines) - count
    if missing <= 0 or count == 0:
        return section.lines[:count]
    if section.within is not None:
        return section.within(count)
    if section.keeps_end:
        return section.lines[-count:]
    more = [Text(f"... and {missing + 1} more", style="dim")] if count > 1 else []
    return [*section.lines[: count - len(more)], *more]


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    lines = []
    for first, second in zip_longest(left, right, fillvalue=Text()):
        line = first.copy()
        line.pad_right(width + 2 - line.cell_len)
        lines.append(line.append_text(second))
    return lines


def _cut(line: Text, width: int) -> Text:
    """The line, no wider; what comes from elsewhere may hold tabs and line ends, and moves no cursor."""
    plain = line.copy()
    if not plain.plain.isprintable():
        plain = Text("".join(char if char.isprintable() else " " for char in plain.plain), style=plain.style)
    plain.truncate(width, overflow="ellipsis")
    return plain
