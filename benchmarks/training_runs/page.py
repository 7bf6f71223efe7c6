"""Tables in Markdown, and the line that says how a page was made."""

from __future__ import annotations

from collections.abc import Sequence

from training_runs.machine import Machine


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under a head."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def origin(command: str, machine: Machine) -> str:
    """How a page was made, as its first sentences.

    Args:
        command: that writes it.
        machine: as it was before.
    """
    return (
        f"Written by `{command}`, commit {machine['commit']}, on {machine['cores']} cores ({machine['processor']}), no "
        f"GPU, Python {machine['python']}; load average of the machine before it began: {machine['load_before']:.1f}."
    )


def share(value: float | None) -> str:
    """A part of a whole in per cent."""
    return "-" if value is None else f"{value:.0%}"
