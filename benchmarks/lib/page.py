"""Result pages: `--page` option, Markdown tables, targets with pass or fail, and the sentence on the measurement."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.machine import Machine

MET = {True: "yes", False: "**no**", None: "-"}


def parsed(parser: argparse.ArgumentParser, page: Path) -> argparse.Namespace:
    """Add `--page` to a parser with `--quick`, and parse the command line; the two options exclude each other."""
    parser.add_argument(
        "--page", type=Path, nargs="?", const=page, metavar="FILE", help="write the page (default: in docs/results/)"
    )
    args = parser.parse_args()
    if args.page and args.quick:
        parser.error("--quick measures too little for a page: omit --quick or --page")
    return args


def write_page(path: Path, parts: Sequence[str]) -> None:
    """Write paragraphs to a file, separated by blank lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of rows under a header."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def number(value: float | None, form: str) -> str:
    """Format a value as a table cell; None becomes `-`."""
    return "-" if value is None else form.format(value)


def share(value: float | None) -> str:
    """Format a fraction as a percentage; None becomes `-`."""
    return number(value, "{:.0%}")


def ms(seconds: float) -> str:
    """Format seconds as milliseconds, without the unit."""
    return f"{seconds * 1000:,.0f}"


def origin(command: str, machine: Machine, commit: str = "") -> str:
    """Return the first sentence of a page, which states how the page was generated.

    Args:
        command: command line that writes the page.
        machine: description of the machine from before the measurement.
        commit: commit of the code; the sentence has no commit if this is empty.
    """
    return (
        f"Written by `{command}`{f', commit {commit},' if commit else ''} on {machine['cores']} cores "
        f"({machine['processor']}), no GPU, Python {machine['python']}; load average of the machine before the "
        f"measurement: {machine['load_before']:.1f}."
    )


def judged(
    result: Mapping[str, Any], bars: Mapping[str, float], word: str, *, at_full_size: bool
) -> dict[str, dict[str, Any]]:
    """Compare figures with their targets. `met` is None if a figure was not measured at full size.

    Args:
        result: figures by name.
        bars: figure -> target.
        word: "at least" or "at most".
        at_full_size: whether the figures were measured at full size.
    """

    def met(value: float | None, bar: float) -> bool | None:
        if value is None or not at_full_size:
            return None
        return bool(value >= bar if word == "at least" else value <= bar)

    found = {key: result.get(key) for key in bars}
    return {key: {word: bar, "measured": found[key], "met": met(found[key], bar)} for key, bar in bars.items()}


def bars_table(targets: Mapping[str, Mapping[str, Any]], word: str) -> str:
    """Return the table of figures and targets from a result of `judged`, for "at least" or "at most"."""
    rows = [
        [f"`{key}`", f"{each[word]:g}", number(each["measured"], "{:.3f}"), MET[each["met"]]]
        for key, each in targets.items()
    ]
    return table(["figure", f"target, {word}", "measured", "met"], rows)
