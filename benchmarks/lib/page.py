"""Pages: the option that asks for one, tables in Markdown, bars and whether they are met, how a page was made."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import Machine

MET = {True: "yes", False: "**no**", None: "-"}


def parsed(parser: argparse.ArgumentParser, page: Path) -> argparse.Namespace:
    """The arguments of a benchmark that knows `--quick`, with `--page`, which is not for both."""
    parser.add_argument(
        "--page", type=Path, nargs="?", const=page, metavar="FILE", help="write it; by default to docs/results/"
    )
    args = parser.parse_args()
    if args.page and args.quick:
        parser.error("--quick measures nothing that a page could show; leave --quick or --page out")
    return args


def write_page(path: Path, parts: Sequence[str]) -> None:
    """Write paragraphs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under a head."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def number(value: float | None, form: str) -> str:
    """As a cell, where there is one."""
    return "-" if value is None else form.format(value)


def share(value: float | None) -> str:
    """A part of a whole in per cent."""
    return number(value, "{:.0%}")


def ms(seconds: float) -> str:
    """Milliseconds as a cell, without the unit."""
    return f"{seconds * 1000:,.0f}"


def origin(command: str, machine: Machine, commit: str = "") -> str:
    """How a page was made, as its first sentences.

    Args:
        command: that writes it.
        machine: as it was before.
        commit: named where it is given.
    """
    return (
        f"Written by `{command}`{f', commit {commit},' if commit else ''} on {machine['cores']} cores "
        f"({machine['processor']}), no GPU, Python {machine['python']}; load average of the machine before it began: "
        f"{machine['load_before']:.1f}."
    )


def judged(
    result: Mapping[str, Any], bars: Mapping[str, float], word: str, *, at_full_size: bool
) -> dict[str, dict[str, Any]]:
    """Every wanted bar, what was measured, and whether it is met; None where it was not measured at full size.

    Args:
        result: figures by name.
        bars: figure -> what is wanted of it.
        word: "at least" or "at most".
        at_full_size: was it measured so?
    """

    def met(value: float | None, bar: float) -> bool | None:
        if value is None or not at_full_size:
            return None
        return bool(value >= bar if word == "at least" else value <= bar)

    found = {key: result.get(key) for key in bars}
    return {key: {word: bar, "measured": found[key], "met": met(found[key], bar)} for key, bar in bars.items()}


def bars_table(wanted: Mapping[str, Mapping[str, Any]], word: str) -> str:
    """What `judged` found with one word."""
    rows = [
        [f"`{key}`", f"{each[word]:g}", number(each["measured"], "{:.3f}"), MET[each["met"]]]
        for key, each in wanted.items()
    ]
    return table(["figure", f"wanted, {word}", "measured", "met"], rows)
