"""`leeway buffer`: inspects the buffer of a run, running or ended.

Exit status: 0 done; 1 the store cannot be read, or part of it is damaged; 2 wrong arguments, or `verify` found a fault.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer

from buffer.errors import BufferError
from buffer.ledger import COUNTS
from buffer.nonsense import SetAside
from buffer.offline.inspect import GroupView, Inspection, Quarantined, Sample, check_store, joined, read_row
from buffer.offline.inspect import compact as compact_store
from buffer.offline.sample_file import export as export_samples
from buffer.rows import SCHEMA_VERSION
from buffer.schema import SCHEMA
from buffer.store import RESTORE, buffer_folder
from common.staleness import PolicyVersion
from launch.arguments import integer, run_names
from launch.errors import ConfigError, ExitStatus, refuse
from launch.run_folder import named_run
from launch.text import MAX_TEXT, TextOf, number, printable

FAULTS = 2
"""Exit status of `verify` if it found any."""
GROUPS_HEAD = (
    f"{'group':>8} {'prompt':>8} {'phase':<6} {'reward':>8} {'version':>7} {'uses':>4}  {'tokens':<16} samples"
)
QUARANTINE_HEAD = f"{'number':>8} {'bytes':>6}  reason"
_WIDTH = 116
_FIRST_BYTES = 256
_MAX_QUARANTINED_VALUE = 2_000
"""Characters of one value of a quarantined row that are shown, whatever it is."""
_MAX_KEY = 2**63 - 1
"""Of the store."""

Decode = Callable[[Sequence[int]], str | None]
BufferPath = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of the run, its buffer/, or its name within runs/.", autocompletion=run_names
    ),
]
_ID = {"metavar": "N", "parser": integer(1, _MAX_KEY)}

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.callback()
def inspect() -> None:
    """Inspect, verify, export or compact the buffer of a run."""


@contextmanager
def _refused() -> Iterator[None]:
    """End the command with a sentence if the store cannot be read."""
    try:
        yield
    except (BufferError, ConfigError) as error:
        raise typer.Exit(refuse(error)) from None


@contextmanager
def _opened(run: Path) -> Iterator[Inspection]:
    with _refused(), Inspection.open(named_run(run)) as inspection:
        yield inspection


@app.command()
def ls(
    run: BufferPath,
    prompt: Annotated[
        int | None,
        typer.Option(metavar="N", help="Groups of this prompt.", parser=integer(0, _MAX_KEY)),
    ] = None,
    phase: Annotated[
        Literal["open", "ready", "drawn", "closed"] | None, typer.Option(help="Groups in this phase.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="The first N only.", **_ID)] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="List what failed validation instead, with its reason.")
    ] = False,
) -> int:
    """List the groups of samples."""
    if quarantine and (prompt is not None or phase is not None):
        return refuse(
            "--quarantine lists what belongs to no group: leave out --prompt and --phase", ExitStatus.WRONG_INPUT
        )
    with _opened(run) as inspection:
        print(headline(inspection))
        if quarantine:
            print(QUARANTINE_HEAD)
            lines: Iterator[str] = map(quarantine_line, islice(inspection.quarantined(), limit))
        else:
            print(GROUPS_HEAD)
            lines = listing(islice(inspection.groups(prompt_id=prompt, phase=phase), limit))
        for line in lines:
            print(line)
        return _tell_damage(inspection.damaged, inspection.folder)


@app.command()
def show(
    run: BufferPath,
    group: Annotated[
        int | None, typer.Argument(metavar="GROUP", help="Id of a group.", parser=integer(1, _MAX_KEY))
    ] = None,
    record: Annotated[int | None, typer.Option(help="One stored trajectory, in full.", **_ID)] = None,
    quarantined: Annotated[int | None, typer.Option(help="One quarantined row or message.", **_ID)] = None,
) -> int:
    """Show a group and its samples.

    They have their text if the run has a tokenizer.
    """
    if sum(each is not None for each in (group, record, quarantined)) != 1:
        return refuse("give one of GROUP, --record N and --quarantined N", ExitStatus.WRONG_INPUT)
    with _opened(run) as inspection:
        found: Quarantined | GroupView | None
        if quarantined is not None:
            found, what = inspection.quarantined_at(quarantined), f"quarantined row {quarantined}"
        elif record is not None:
            found, what = inspection.group_of_record(record), f"record {record}"
        else:
            found, what = inspection.group(group or 0), f"group {group}"
        if found is None:
            listed = "leeway buffer ls" + " --quarantine" * (quarantined is not None)
            return refuse(
                f"the buffer in {inspection.folder} holds no {what}: it never did, or it was evicted. `{listed}` lists "
                "what there is"
            )
        if isinstance(found, Quarantined):
            lines = quarantined_in_full(found)
        else:
            lines = group_in_full(found, TextOf(inspection.folder), only_record=record)
        for line in lines:
            print(line)
        return _tell_damage(inspection.damaged, inspection.folder)


@app.command()
def verify(run: BufferPath) -> int:
    """Verify every page, checksum and index, and recount the ledger."""
    with _opened(run) as inspection:
        print(headline(inspection))
        report = check_store(inspection.store)
    faults: list[str] = report["faults"]
    if not report["has_checked_pages"]:
        print("a service writes the file now, so the structure of its pages was not checked")
    print("ledger   " + "  ".join(f"{name} {report['ledger'][name]}" for name in COUNTS))
    for fault in faults:
        print(f"FAULT    {fault}")
    found = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "no fault"
    print(f"{report['num_records']} records, their groups and the ledger checked: {found}")
    if faults:
        refuse(f"{inspection.folder} is damaged: {RESTORE}")
    return FAULTS if faults else ExitStatus.OK


@app.command()
def export(run: BufferPath, out: Annotated[Path, typer.Argument(metavar="OUT.parquet")]) -> int:
    """Write the stored trajectories as a Parquet file."""
    with _opened(run) as inspection:
        done, folder = export_samples(inspection, out), inspection.folder
    print(f"{done.num_rows} trajectories of {done.num_groups} groups in {out} ({done.size_bytes / 2**20:.1f} MiB)")
    return _tell_damage(done.damaged, folder)


@app.command()
def compact(run: BufferPath) -> int:
    """Rewrite the file without its free pages; the run must have ended."""
    with _refused():
        done = compact_store(buffer_folder(named_run(run)))
    print(f"{done.folder}: {done.before_bytes / 2**20:.1f} MiB are now {done.after_bytes / 2**20:.1f} MiB")
    return ExitStatus.OK


# --- what they print -----------------------------------------------------------------------------------


def _tell_damage(damaged: list[str], folder: Path) -> int:
    for sentence in dict.fromkeys(damaged):
        refuse(f"left out: {sentence}")
    if not damaged:
        return ExitStatus.OK
    return refuse(
        f"{folder} is damaged: restore it from a copy, or do without what was left out. "
        f"`leeway buffer verify {folder}` names all that is damaged"
    )


def headline(inspection: Inspection) -> str:
    totals = inspection.totals()
    quarantined = sum(totals.quarantined_by_reason.values())
    return (
        f"run {inspection.store.facts.run_id}, schema version {SCHEMA_VERSION}, learner at version {totals.version}: "
        f"{totals.num_groups} groups, {totals.num_records} trajectories, {totals.size_bytes / 2**20:.1f} MiB, "
        f"{quarantined} quarantined"
    )


def _group_line(group: GroupView) -> str:
    row = group.row
    version = "-" if group.oldest_version is None else str(group.oldest_version)
    n = group.lengths
    lengths = f"{min(n)}..{max(n)} ({np.mean(n):.0f})" if n else "-"
    foretold = f"  longest {max(row.completion_lengths)}, foretold {row.foretold}" if row.foretold else ""
    tries = group.tries
    success = "" if tries is None else f"  success {tries.rate:.2f} of {tries.passed + tries.failed:.1f}"
    return (
        f"{row.group_id:>8} {row.prompt_id:>8} {row.phase:<6} {number(row.mean_reward):>8} {version:>7} "
        f"{row.uses:>4}  {lengths:<16} {_states(Counter(row.sample_states))}{foretold}{success}"
    )


def listing(groups: Iterable[GroupView]) -> Iterator[str]:
    """A line for each group, and one that adds them up."""
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


def quarantine_line(found: Quarantined) -> str:
    return f"{found.number:>8} {len(found.entry.data):>6}  {_why(found.entry)}"


def group_in_full(group: GroupView, decode: Decode, *, only_record: int | None = None) -> Iterator[str]:
    """`show`: a group and its samples, or of one record every column."""
    row = group.row
    yield f"group {row.group_id}: prompt {row.prompt_id}, {row.phase}, {_states(Counter(row.sample_states))}"
    held_by = f"leased to {row.actor} (epoch {row.epoch})" if row.lease_id else "not leased"
    oldest = "nothing committed" if row.oldest is None else f"oldest token {row.oldest[0]}.{row.oldest[1]}"
    counted = "" if row.oldest is None else f", which counts as version {group.oldest_version}"
    yield f"  {oldest}{counted}; attempt {row.attempt}, {held_by}; issued {row.issued}, failed {row.failed}"
    for use in row.trained_at:
        yield f"  trained at step {use.step}, version {use.version}"
    samples = [sample for sample in group.samples if only_record in (None, sample.record_id)]
    if not samples:
        yield "  none of its samples is stored"
        return
    batch = joined(samples)
    if only_record is None:
        yield from _indented(f"  columns of the first: {printable(batch.column('columns')[0].as_py())}")
    for i, sample in enumerate(samples):
        yield from _sample(group, sample, batch.slice(i, 1).to_pylist()[0], decode)
        if only_record is not None:
            yield from _all_columns(batch.slice(i, 1).to_pylist()[0])


def quarantined_in_full(found: Quarantined) -> Iterator[str]:
    """`show --quarantined`: the reason, and the row where one can be read, else the first bytes."""
    data = found.entry.data
    yield f"quarantined {found.number}: {_why(found.entry)}; {len(data)} bytes are kept"
    row = read_row(data)
    if row is not None:
        yield from _all_columns(row, _MAX_QUARANTINED_VALUE)
        return
    yield "  no row can be read from it; its first bytes:"
    for start in range(0, min(len(data), _FIRST_BYTES), 16):
        part = data[start : start + 16]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"  {start:>6}  {part.hex(' '):<47}  {seen}"


def _why(entry: SetAside) -> str:
    sender = f", from {printable(entry.sender, _WIDTH)}" if entry.sender else ""
    return printable(entry.reason, _WIDTH) + sender


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


def _all_columns(row: dict[str, Any], most: int = MAX_TEXT) -> Iterator[str]:
    """Yield a paragraph per column, with at most `most` characters of each value."""
    for name in SCHEMA.names:
        yield from _indented(f"  {name}: {printable(str(row[name]), most)}")


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
