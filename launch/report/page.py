"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from common.files import private_file
from launch.report import figures, lanes, tables
from launch.report.data import RunData
from launch.report.svg import DASH


def render(runs: Sequence[RunData], *, now_s: float | None = None) -> str:
    """The page as text.

    Args:
        runs: one, or two to compare.
        now_s: wall clock; for tests.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"clock": _clock, "number": _number}
    return environment.from_string(_resource("page.html")).render(
        runs=runs,
        verdicts=[_verdict(run) for run in runs],
        css=Markup(_resource("page.css")),
        js=Markup(_resource("page.js")),
        tiles=[tables.tiles(run) for run in runs],
        curves=[*figures.curves(runs), figures.queue(runs)],
        timelines=[(run, lanes.window(run.lanes), lanes.overview(run.lanes)) for run in runs if run.lanes],
        distributions=figures.distributions(runs),
        samples=[(run, run.buffer.trajectories) for run in runs if run.buffer is not None],
        pool_columns=tables.POOL_COLUMNS,
        pools=[(run, tables.pool_rows(run)) for run in runs],
        ledger=tables.ledger_rows(runs),
        reasons=[(run, tables.reasons(run)) for run in runs],
        differences=tables.differences(runs),
        sections=[(run, list(tables.sections(run))) for run in runs],
        made=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() if now_s is None else now_s)),
    )


def write(runs: Sequence[RunData], path: Path) -> int:
    """Write the page; it appears whole, and only its owner can read it. Returns its size in bytes.

    Raises:
        OSError: it cannot be written.
    """
    data = render(runs).encode()
    with private_file(path) as file:
        file.write(data)
    return len(data)


def _resource(name: str) -> str:
    return resources.files("launch.report").joinpath(name).read_text(encoding="utf-8")


def _verdict(run: RunData) -> str:
    """One sentence for the whole run."""
    num_steps, task = run.num_steps, run.knob("task.name") or run.knob("task.path") or "a task"
    algorithm = str(run.knob("algorithm.type") or "").replace("_", " ")
    model = Path(str(run.knob("model.path") or run.knob("model.hub") or "a model")).name
    what = f"{model} on {Path(str(task)).name}" + (f" with {algorithm}" if algorithm else "")
    if run.events.failed:
        return f"{what}: failed after {num_steps:,} steps. {run.events.failed}"
    if not num_steps:
        return f"{what}: no step yet."
    return f"{what}: {num_steps:,} steps, {run.trained_tokens:,} completion tokens trained."


def _clock(seconds: object) -> str:
    """Wall clock, UTC."""
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**40:
        return DASH
    return time.strftime("%H:%M:%S", time.gmtime(seconds))


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else DASH
