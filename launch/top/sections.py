"""Section: a part of the view, as lines that may be cut at the right and shortened at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text

from launch.state.snapshot import Actor, Pool, Process, Snapshot
from launch.top.bars import MAX_ROWS, lag_rows, style_of
from launch.words import duration, number

LEDGER = ("issued", "in_flight", "committed", "waiting", "drawn", "trained", "failed", "filtered", "dropped_stale")
OUTSIDE = ("duplicates", "late", "quarantined", "evicted_unused")
"""Shown where there are any."""

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
    """The same said in so many lines; None where some have to be left out."""


def head(snapshot: Snapshot, now_s: float, width: int, gone: str, note: str) -> list[Text]:
    """The first lines, most important first: the run and its state, how far it is, how it does, how fast."""
    ended = snapshot.ended
    if ended is not None:
        state, style = ended.text, "green" if ended.exit_status == 0 else "red"
    elif gone:
        state, style = gone, "red"
    else:
        state, style = f"{snapshot.phase}, for {duration(now_s - snapshot.phase_since_s)}", "green"
    until_s = ended.at_s if ended is not None else snapshot.written_s if gone else now_s
    first = Text.assemble((snapshot.run, "bold"), "  ", duration(until_s - snapshot.started_s), "  ")
    if note:
        first.append(f"[{note}]", style="reverse").append("  ")
    first.append(state, style=style)
    return [first, _progress_line(snapshot, width), *_quality(snapshot, width), *_speed(snapshot, width)]


def packed(parts: Iterable[str], width: int) -> list[Text]:
    """Parts side by side, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return [Text(line) for line in lines]


def sections(snapshot: Snapshot, now_s: float, width: int, wrap: Wrap, *, ascii_only: bool) -> list[Section]:
    """All sections that have something to show, in the order in which they stand."""

    def lag(max_rows: int) -> list[Text]:
        return lag_rows(snapshot.lags, snapshot.max_lag, width, max_rows=max_rows, ascii_only=ascii_only)

    wrong = [line for sentence in snapshot.tripped for line in wrap(sentence, "red")]
    waits = [line for sentence in snapshot.waits for line in wrap(sentence, "")]
    found = [
        Section("wrong", wrong, least=2),
        Section("pools", list(_pools(snapshot))),
        Section("actors", list(_actors(snapshot.actors, now_s)), least=2),
        Section("stages", list(_processes(snapshot.stages, now_s))),
        Section("services", list(_processes(snapshot.services, now_s)), least=0),
        Section("buffer", list(_buffer(snapshot, width)), least=2),
        Section("lag", lag(MAX_ROWS), least=3, within=lag),
        Section("waits", waits if snapshot.ended or waits else [Text("nobody waits", style="dim")], least=2),
        Section("events", [_event(each.time_s, each.text) for each in snapshot.events], keeps_end=True),
    ]
    return [section for section in found if section.lines]


def _progress_line(snapshot: Snapshot, width: int) -> Text:
    share = min(1.0, snapshot.step / max(1, snapshot.num_steps))
    published = f", published {snapshot.published}" if snapshot.published else ""
    words = f" step {snapshot.step}/{snapshot.num_steps}  version {snapshot.version}{published}"
    room = max(0, min(40, width - len(words)))
    done = round(share * room)
    return Text.assemble(("━" * done, "green"), ("━" * (room - done), "dim"), words)


def _quality(snapshot: Snapshot, width: int) -> list[Text]:
    parts = [f"reward {number(snapshot.reward)}", f"loss {number(snapshot.loss)}"]
    if snapshot.evaluations:
        known = [number(each.greedy) for each in snapshot.evaluations]
        first = f"{known[0]} -> " if len(known) > 1 else ""
        parts.append(f"accuracy {first}{known[-1]} (version {snapshot.evaluations[-1].versions})")
    parts.append(f"lag mean {number(snapshot.lag_mean)}, max {snapshot.lag_max} of {snapshot.max_lag}")
    parts.append(f"mismatch {number(snapshot.mismatch_lag0_abs)}")
    return packed(parts, width)


def _speed(snapshot: Snapshot, width: int) -> list[Text]:
    learner = snapshot.learner
    parts = [f"tokens/s generated {snapshot.generated_tokens_per_s:,.0f}", f"trained {learner.tokens_per_s:,.0f}"]
    if learner.busy_frac is not None and learner.step_s is not None:
        parts.append(f"learner busy {learner.busy_frac:.0%}, step {learner.step_s:.2f} s")
    if learner.restarts:
        parts.append(f"learner restarts {learner.restarts}")
    return packed(parts, width)


def _pools(snapshot: Snapshot) -> Iterator[Text]:
    names, width = sorted(snapshot.lags), _name_width(snapshot.pools)
    for pool in snapshot.pools:
        short = pool.working < pool.wanted
        yield Text.assemble(
            (f"{pool.name:<{width}}", f"bold {style_of(names, pool.name)}"),
            (f"{pool.working}/{pool.wanted} work", "yellow" if short else ""),
            f"  {pool.tokens_per_s:>5,.0f} tokens/s {pool.running:>4} running",
            f"  lag {number(pool.lag_mean)}  mismatch {number(pool.mismatch_lag0_abs)}",
        )


def _name_width(found: Sequence[Actor | Process | Pool]) -> int:
    return max((len(each.name) for each in found), default=0) + 2


def _actors(actors: Sequence[Actor], now_s: float) -> Iterator[Text]:
    width = _name_width(actors)
    for actor in actors:
        yield _actor(actor, now_s, width)


def _processes(processes: Sequence[Process], now_s: float) -> Iterator[Text]:
    width = _name_width(processes)
    for process in processes:
        yield _process(process, now_s, width)


def _actor(actor: Actor, now_s: float, width: int) -> Text:
    line = Text.assemble((f"{actor.name:<{width}}", "bold"))
    if actor.state != "working" or actor.version is None:
        line.append(f"{actor.state}, for {duration(now_s - actor.since_s)}", style=_style(actor.state))
    else:
        behind = f" ({actor.behind} behind)" if actor.behind else ""
        line.append(f"v {actor.version}{behind}  {actor.tokens_per_s:>7,.0f} tokens/s  {actor.running:>4} running")
    if actor.restarts:
        line.append(f"  {actor.restarts} restarts", style="yellow")
    if actor.refused:
        line.append(f"  refused {actor.refused}", style="red")
    if actor.waits_for:
        line.append(f"  {actor.waits_for}", style="dim")
    return line


def _process(process: Process, now_s: float, width: int) -> Text:
    line = Text.assemble((f"{process.name:<{width}}", "bold"), (process.state, _style(process.state)))
    if process.state not in ("working", "finished"):
        line.append(f", for {duration(now_s - process.since_s)}")
    if process.restarts:
        line.append(f"  {process.restarts} restarts", style="yellow")
    if process.waits_for:
        line.append(f"  waits for {process.waits_for}", style="dim")
    return line


def _style(state: str) -> str:
    if state.startswith("lost"):
        return "red"
    return "" if state in ("working", "finished") else "yellow"


def _buffer(snapshot: Snapshot, width: int) -> Iterator[Text]:
    buffer = snapshot.buffer
    if buffer is None:
        return
    ledger = buffer.ledger
    state = [
        f"{buffer.ready_groups} groups ready, {buffer.groups_per_step} a step, {buffer.drawn_groups} drawn",
        f"{ledger.get('in_flight', 0)} samples in flight",
        f"law {buffer.law}",
    ]
    yield from packed(state, width)
    gap = ledger.get("gap", 0)
    if gap:
        yield Text(f"ledger gap {gap}: samples are not counted right, which is a bug", style="red")
    names = [*LEDGER, *(name for name in OUTSIDE if ledger.get(name)), "gap"]
    yield from packed((f"{name} {ledger.get(name, 0)}" for name in names), width)
    if buffer.failed_by_reason:
        yield from packed((f"{count} failed: {reason}" for reason, count in buffer.failed_by_reason.items()), width)


def _event(time_s: float, text: str) -> Text:
    moment = datetime.fromtimestamp(time_s).astimezone().strftime("%H:%M:%S")
    return Text.assemble((moment, "dim"), f" {text}")
