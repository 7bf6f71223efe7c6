"""Finding: what one check has found; examine: all checks side by side, each with its limit of time; show: the table."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal

from common.threads import DaemonThreads

State = Literal["ok", "warning", "problem"]
LIMIT_S = 28.0
"""Of all checks together, where none is known to take longer."""
_STYLE = {"ok": "green", "warning": "yellow", "problem": "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    state: State
    found: str
    remedy: str = ""
    """What to do; '' where it is in order."""


Check = Callable[[], Sequence[Finding]]


def ok(name: str, found: str) -> list[Finding]:
    """It is as it should be."""
    return [Finding(name, "ok", found)]


def warning(name: str, found: str, remedy: str) -> list[Finding]:
    """A run may go well, or be slow, or lose something."""
    return [Finding(name, "warning", found, remedy)]


def problem(name: str, found: str, remedy: str) -> list[Finding]:
    """A run would fail."""
    return [Finding(name, "problem", found, remedy)]


def examine(checks: Sequence[tuple[str, Check]], limit_s: float = LIMIT_S) -> Iterator[Finding]:
    """Run all named checks at once, and yield what they find, in their order.

    One that raises, or is not done within `limit_s` of all together, is a problem of its name.
    """
    threads = DaemonThreads("doctor", max(1, len(checks)))
    deadline = time.monotonic() + limit_s
    for name, future in [(name, threads.submit(check)) for name, check in checks]:
        try:
            yield from future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeout:
            hangs = "something that it looks at hangs, such as a network file system or a broken GPU driver"
            yield from problem(name, f"no answer within {limit_s:g} s", hangs)
        except Exception as error:  # a check that is at a loss says so, and the others go on
            text = str(error).splitlines()[0] if str(error) else "no reason given"
            yield from problem(name, f"could not be looked at: {type(error).__name__}: {text}", "see to that first")


def show(findings: Sequence[Finding]) -> None:
    """Print them as a table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", pad_edge=False, box=None)
    table.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        what = Text(finding.found)
        if finding.remedy:
            what.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(Text(finding.name, no_wrap=True), Text(finding.state, _STYLE[finding.state], no_wrap=True), what)
    Console(highlight=False, markup=False).print(table)
    counts = Counter(finding.state for finding in findings)
    print(f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} in order")
