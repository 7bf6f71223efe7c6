"""View: a snapshot of a run, fitted into any width and height."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from launch.state.snapshot import Snapshot
from launch.top.sections import Section, head, sections

NAME_WIDTH = 9
"""Columns of the names of the sections; narrow screens do without."""
NARROW = 50
TWO_COLUMNS = 150
"""From this width on the sections stand in two columns."""
RIGHT = frozenset({"lag", "waits", "events"})
"""In the right one."""
MOST_IMPORTANT_FIRST = ("wrong", "lag", "waits", "pools", "buffer", "actors", "stages", "events", "services")
TALLEST = 60
"""Lines where the height is not known, as in a pipe."""


class View:
    """A rich renderable that always fits: what is less important goes first where there is no room."""

    def __init__(self, snapshot: Snapshot, now_s: float, *, gone: str = "", note: str = "") -> None:
        """Take what is to be shown.

        Args:
            snapshot: of the run.
            now_s: seconds since the epoch.
            gone: why the command is thought gone; empty where it is not.
            note: beside the name, as 'paused'.
        """
        self._snapshot = snapshot
        self._now_s = now_s
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
        """The view as lines of at most this width, at most so many."""
        snapshot = self._snapshot
        top = head(snapshot, self._now_s, width, self._gone, self._note)[: max(2, height // 3)][:height]
        room = height - len(top)
        is_wide = width >= TWO_COLUMNS
        column = (width - 2) // 2 if is_wide else width
        inside = column - NAME_WIDTH if column >= NARROW else column

        def wrap(sentence: str, style: str) -> list[Text]:
            return list(Text(sentence, style=style).wrap(_MEASURE, max(8, inside)))

        found = sections(snapshot, self._now_s, inside, wrap, ascii_only=ascii_only)
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
        shown = _shortened(section, given[section.name])
        for number, line in enumerate(shown):
            if width >= NARROW:
                name = section.name if number == 0 else ""
                lines.append(Text.assemble((f"{name:<{NAME_WIDTH}}", "bold"), line))
            else:
                lines.append(line)
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
    if count == 1:
        return section.lines[:1]
    return [*section.lines[: count - 1], Text(f"... and {missing + 1} more", style="dim")]


def _beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    lines = []
    for number in range(max(len(left), len(right))):
        line = left[number].copy() if number < len(left) else Text()
        line.pad_right(width + 2 - line.cell_len)
        if number < len(right):
            line.append_text(right[number])
        lines.append(line)
    return lines


def _cut(line: Text, width: int) -> Text:
    """The line, no wider; what comes from elsewhere may hold tabs and line ends, and moves no cursor."""
    plain = line.copy()
    if not plain.plain.isprintable():
        plain = Text("".join(char if char.isprintable() else " " for char in plain.plain), style=plain.style)
    plain.truncate(width, overflow="ellipsis")
    return plain
