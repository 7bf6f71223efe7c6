"""`leeway buffer`: inspect the buffer of an active or ended run.

Exit status: 0: success; 1: the store is unreadable or partly damaged; 2: invalid arguments, or `verify` found faults.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from leeway.buffer.errors import BufferError
from leeway.buffer.ledger import COUNTS
from leeway.buffer.offline.inspect import Decode, GroupView, Inspection, Sample, check_store, joined
from leeway.buffer.offline.inspect import export as export_samples
from leeway.buffer.rows import SCHEMA_VERSION
from leeway.buffer.store import RESTORE
from leeway.common.staleness import PolicyVersion
from leeway.launch.arguments import integer, run_argument
from leeway.launch.errors import ConfigError, ExitStatus, print_error
from leeway.launch.run_folder import named_run
from leeway.launch.text import TextOf, number, printable

FAULTS = 2
"""Exit status of `verify` if the store has faults."""
GROUPS_HEAD = (
    f"{'group':>8} {'prompt':>8} {'phase':<6} {'reward':>8} {'version':>7} {'uses':>4}  {'tokens':<16} samples"
)
_WIDTH = 116
_MAX_KEY = 2**63 - 1
"""Largest id that the store accepts."""

BufferPath = Annotated[Path, run_argument("Folder of the run or its buffer, or the run's name within runs/.")]

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback()
def inspect() -> None:
    """Inspect, verify or export the buffer of a run."""


@contextmanager
def _opened(run: Path) -> Iterator[Inspection]:
    """Open the store; print an error and exit if it cannot be read."""
    try:
        with Inspection.open(named_run(run)) as inspection:
            yield inspection
    except (BufferError, ConfigError) as error:
        raise typer.Exit(print_error(error)) from None


@app.command()
def ls(
    run: BufferPath,
    prompt: Annotated[
        int | None,
        typer.Option(metavar="N", help="List only groups of this prompt.", parser=integer(0, _MAX_KEY)),
    ] = None,
    phase: Annotated[
        Literal["open", "ready", "drawn", "closed"] | None, typer.Option(help="List only groups in this phase.")
    ] = None,
) -> int:
    """List the groups of samples."""
    with _opened(run) as inspection:
        print(headline(inspection))
        print(GROUPS_HEAD)
        for line in listing(inspection.groups(prompt_id=prompt, phase=phase)):
            print(line)
        return _report_damage(inspection.damaged, inspection.folder)


@app.command()
def show(
    run: BufferPath,
    group: Annotated[int, typer.Argument(metavar="GROUP", help="Id of a group.", parser=integer(1, _MAX_KEY))],
) -> int:
    """Show a group and its samples.

    Samples are shown with their text if the run has a tokenizer.
    """
    with _opened(run) as inspection:
        found = inspection.group(group)
        if found is None:
            return print_error(
                f"the buffer in {inspection.folder} holds no group {group}: it never existed or was evicted. "
                "`leeway buffer ls` lists the groups"
            )
        for line in group_lines(found, TextOf(inspection.folder)):
            print(line)
        return _report_damage(inspection.damaged, inspection.folder)


@app.command()
def verify(run: BufferPath) -> int:
    """Verify every page, checksum and index, and recount the ledger."""
    with _opened(run) as inspection:
        print(headline(inspection))
        report = check_store(inspection.store)
    faults: list[str] = report["faults"]
    if not report["has_checked_pages"]:
        print("a service is writing the file, so the structure of its pages was not checked")
    print("ledger   " + "  ".join(f"{name} {report['ledger'][name]}" for name in COUNTS))
    for fault in faults:
        print(f"FAULT    {fault}")
    found = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "no fault"
    print(f"checked {report['num_records']} records, their groups and the ledger: {found}")
    if faults:
        print_error(f"{inspection.folder} is damaged: {RESTORE}")
    return FAULTS if faults else ExitStatus.OK


@app.command()
def export(run: BufferPath, out: Annotated[Path, typer.Argument(metavar="OUT.parquet")]) -> int:
    """Write the stored trajectories, with their text, as a Parquet file."""
    with _opened(run) as inspection:
        done, folder = export_samples(inspection, out, TextOf(inspection.folder)), inspection.folder
    print(f"{done.num_rows} trajectories of {done.num_groups} groups in {out} ({done.size_bytes / 2**20:.1f} MiB)")
    return _report_damage(done.damaged, folder)


# --- output -------------------------------------------------------------------------------------------


def _report_damage(damaged: list[str], folder: Path) -> int:
    for sentence in dict.fromkeys(damaged):
        print_error(f"left out: {sentence}")
    if not damaged:
        return ExitStatus.OK
    return print_error(
        f"{folder} is damaged: restore it from a copy, or continue without the rows that were left out. "
        f"`leeway buffer verify {folder}` lists all damage"
    )


def headline(inspection: Inspection) -> str:
    state, store = inspection.state(), inspection.store
    quarantined = sum(state.ledger.quarantined_by_reason.values())
    return (
        f"run {store.facts.run_id}, schema version {SCHEMA_VERSION}, learner at version {state.version}: "
        f"{inspection.num_groups()} groups, {state.num_records} trajectories, {store.size_bytes / 2**20:.1f} MiB, "
        f"{quarantined} quarantined"
    )


def _group_line(group: GroupView) -> str:
    row = group.row
    version = "-" if group.oldest_version is None else str(group.oldest_version)
    n = group.lengths
    lengths = f"{min(n)}..{max(n)} ({np.mean(n):.0f})" if n else "-"
    predicted = f"  longest {max(row.completion_lengths)}, predicted {row.predicted}" if row.predicted else ""
    tries = group.tries
    success = "" if tries is None else f"  success {tries.rate:.2f} of {tries.passed + tries.failed:.1f}"
    return (
        f"{row.group_id:>8} {row.prompt_id:>8} {row.phase:<6} {number(row.mean_reward):>8} {version:>7} "
        f"{row.uses:>4}  {lengths:<16} {_states(Counter(row.sample_states))}{predicted}{success}"
    )


def listing(groups: Iterable[GroupView]) -> Iterator[str]:
    """Yield a line for each group, and a line of totals."""
    num_groups = num_tokens = num_rewards = 0
    reward_total = 0.0
    states: Counter[str] = Counter()
    for group in groups:
        rewards = [reward for reward in group.row.rewards if reward is not None]
        num_groups, num_tokens = num_groups + 1, num_tokens + sum(group.lengths)
        num_rewards, reward_total = num_rewards + len(rewards), reward_total + sum(rewards)
        states.update(group.row.sample_states)
        yield _group_line(group)
    mean = reward_total / num_rewards if num_rewards else None
    samples = f"{states.total()} samples" + (f" ({_states(states)})" if states else "")
    yield f"{num_groups} groups, {samples}, {num_tokens} tokens, mean reward {number(mean)}"


def group_lines(group: GroupView, decode: Decode) -> Iterator[str]:
    """Yield the lines that `show` prints for a group and its samples."""
    row = group.row
    yield f"group {row.group_id}: prompt {row.prompt_id}, {row.phase}, {_states(Counter(row.sample_states))}"
    held_by = f"leased to {row.actor} (epoch {row.epoch})" if row.lease_id else "not leased"
    oldest = "nothing committed" if row.oldest is None else f"oldest token {row.oldest[0]}.{row.oldest[1]}"
    counted = "" if row.oldest is None else f", counted as version {group.oldest_version}"
    yield f"  {oldest}{counted}; attempt {row.attempt}, {held_by}; issued {row.issued}, failed {row.failed}"
    for use in row.trained_at:
        yield f"  used for training at step {use.step}, version {use.version}"
    if not group.samples:
        yield "  no samples stored"
        return
    rows = joined(group.samples).to_pylist()
    yield from _indented(f"  columns of the first sample: {printable(rows[0]['columns'])}")
    for sample, columns in zip(group.samples, rows, strict=True):
        yield from _sample(group, sample, columns, decode)


def _sample(group: GroupView, sample: Sample, row: dict[str, Any], decode: Decode) -> Iterator[str]:
    parts = ", ".join(f"{printable(part['name'])} {number(part['value'])}" for part in row["reward_parts"])
    state = group.row.sample_states[sample.sample_index]
    reward = f"reward {number(row['reward'])}" + (f" ({parts})" if parts else "")
    yield f"sample {sample.sample_index}: record {sample.record_id}, {state}, {reward}, {row['finish_reason']}"
    num_prompt = row["prompt_length"]
    by = " ".join(f"{PolicyVersion(s['incarnation'], s['version'])} [{s['start']}, {s['end']})" for s in row["spans"])
    yield f"  {num_prompt} prompt tokens, {len(row['logprobs'])} completion tokens; sampled by {by}"
    yield f"  logprobs {_summary(row['logprobs'])}; reference {_summary(row['reference_logprobs'])}"
    prompt, completion = decode(row["token_ids"][:num_prompt]), decode(row["token_ids"][num_prompt:])
    if prompt is not None:
        yield from _indented(f"  {prompt!r}")
        yield from _indented(f"  -> {completion!r}")


def _summary(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    return f"mean {np.mean(values):.3f}, min {min(values):.3f}, sum {np.sum(values):.3f}"


def _states(counts: Counter[str]) -> str:
    return " ".join(f"{count} {state}" for state, count in counts.most_common())


def _indented(line: str) -> list[str]:
    return textwrap.wrap(
        line, _WIDTH, subsequent_indent="      ", break_long_words=True, break_on_hyphens=False, drop_whitespace=False
    )
