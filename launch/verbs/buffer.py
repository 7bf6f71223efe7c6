"""`leeway buffer`: looks at the buffer of a run, live or over.

    leeway buffer ls RUN                   groups; --quarantine: what failed validation
    leeway buffer show RUN GROUP           one group; --record N, --quarantined N
    leeway buffer verify RUN               every page, every checksum, every index, the ledger
    leeway buffer export RUN OUT.parquet   the trajectories as a table
    leeway buffer compact RUN              a smaller file; only where the run is over

Exit status: 0 done; 1 the store cannot be read, or part of it is damaged; 2 wrong arguments, or `verify`
found a fault.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.errors import ConfigError
from launch.exit_status import ExitStatus
from launch.run_folder import named_run

if TYPE_CHECKING:
    from buffer.offline.inspect import GroupView, Inspection, Selection

FAULTS = 2
"""Exit status of `verify` where it found any."""
PHASES = ("open", "ready", "drawn", "closed")
INDEXES = ("prompt", "version", "reward", "length")
_MAX_INTEGER = 2**63 - 1
_SELECTION = ("prompt", "version", "since_version", "min_reward", "max_length", "phase")


def add_parser(verbs: Any) -> None:  # noqa: ANN401 -- argparse has no public type for it
    """Add `buffer` and its verbs to the command's parser."""
    buffer = verbs.add_parser("buffer", help="look at, verify, export or compact the replay buffer of a run")
    parts = buffer.add_subparsers(dest="buffer_verb", required=True, metavar="VERB")
    ls = _verb(parts, "ls", "list the groups of samples")
    _add_selection(ls)
    ls.add_argument("--by", choices=INDEXES, help="complete groups only, in the order of this index")
    ls.add_argument("--reverse", action="store_true", help="descending order of --by")
    ls.add_argument("--limit", type=_count, metavar="N", help="the first N only")
    ls.add_argument("--quarantine", action="store_true", help="list what failed validation instead, with its reason")
    show = _verb(parts, "show", "show a group and its samples, with their text where the run has a tokenizer")
    what = show.add_mutually_exclusive_group(required=True)
    what.add_argument("group", nargs="?", type=_count, metavar="GROUP", help="the group's id")
    what.add_argument("--record", type=_count, metavar="N", help="one stored trajectory, in full")
    what.add_argument("--quarantined", type=_count, metavar="N", help="one quarantined row or message")
    show.add_argument("--shard", type=_integer, metavar="S", help="whose --quarantined is meant; default: the first")
    _verb(parts, "verify", "prove every page, checksum and index, and recount the ledger")
    export = _verb(parts, "export", "write the stored trajectories as a Parquet file")
    export.add_argument("out", type=Path, metavar="OUT.parquet")
    _add_selection(export)
    _verb(parts, "compact", "rewrite the file without its free pages; the run must be over")
    buffer.set_defaults(run_verb=run)


def run(parsed: argparse.Namespace) -> int:
    """Run one of the verbs and return the exit status."""
    from buffer.errors import BufferError

    if contradiction := _contradiction(parsed):
        print(f"leeway: {contradiction}", file=sys.stderr)
        return ExitStatus.WRONG_INPUT
    verb = {"ls": _ls, "show": _show, "verify": _verify, "export": _export, "compact": _compact}[parsed.buffer_verb]
    try:
        return verb(parsed)
    except (BufferError, ConfigError) as error:
        print(f"leeway: {error}", file=sys.stderr)
        return ExitStatus.FAILED


def _verb(parts: Any, name: str, text: str) -> argparse.ArgumentParser:  # noqa: ANN401
    parser: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, its buffer/, or its name within runs/")
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    chosen = parser.add_argument_group("which groups")
    chosen.add_argument("--prompt", type=_integer, metavar="N", help="of this prompt")
    version = chosen.add_mutually_exclusive_group()
    version.add_argument("--version", type=_integer, metavar="V", help="whose oldest token is of policy version V")
    version.add_argument(
        "--since-version", type=_integer, metavar="V", help="whose oldest token is of version V or newer"
    )
    chosen.add_argument("--min-reward", type=float, metavar="R", help="whose mean reward is at least R")
    chosen.add_argument("--max-length", type=_integer, metavar="N", help="none of whose samples has more tokens than N")
    chosen.add_argument("--phase", choices=PHASES, help="in this phase of their life")


def _count(text: str) -> int:
    return _integer(text, least=1)


def _integer(text: str, least: int = 0) -> int:
    """A number of the size that the store's keys have."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not least <= number <= _MAX_INTEGER:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no whole number from {least} to {_MAX_INTEGER}")
    return number


def _contradiction(parsed: argparse.Namespace) -> str:
    """Why these options do not go together; '' where they do."""
    if parsed.buffer_verb == "show" and parsed.shard is not None and parsed.quarantined is None:
        return "--shard says whose --quarantined is meant, and none is asked for: groups and records need no shard"
    if parsed.buffer_verb != "ls":
        return ""
    given = [name for name in (*_SELECTION, "by") if getattr(parsed, name) is not None]
    given += ["reverse"] if parsed.reverse else []
    if parsed.quarantine and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        return f"--quarantine lists what belongs to no group, so it takes --limit alone: leave out {names}"
    if parsed.reverse and parsed.by is None:
        return f"--reverse turns the order of --by round, and there is none: add --by {'|'.join(INDEXES)}"
    return ""


def _selection(parsed: argparse.Namespace) -> Selection:
    from buffer.offline.inspect import Selection

    exact = parsed.version
    return Selection(
        prompt_id=parsed.prompt,
        since_version=parsed.since_version if exact is None else exact,
        until_version=exact,
        min_reward=parsed.min_reward,
        max_length=parsed.max_length,
        phase=parsed.phase,
    )


def _open(path: Path) -> Inspection:
    from buffer.offline.inspect import Inspection

    return Inspection.open(named_run(path))


def _ls(parsed: argparse.Namespace) -> int:
    from launch.verbs import buffer_text as text

    with _open(parsed.run) as inspection:
        print(text.headline(inspection))
        if parsed.quarantine:
            print(text.QUARANTINE_HEAD)
            for entry in islice(inspection.quarantined(), parsed.limit):
                print(text.quarantine_line(entry))
            return _tell_damage(inspection.damaged, inspection.folder)
        tally = text.Tally()
        print(text.GROUPS_HEAD)
        for group in islice(_listed(inspection, parsed), parsed.limit):
            tally.add(group)
            print(text.group_line(group))
        print(tally.line())
        return _tell_damage(inspection.damaged, inspection.folder)


def _listed(inspection: Inspection, parsed: argparse.Namespace) -> Iterator[GroupView]:
    return inspection.groups(_selection(parsed), by=parsed.by, newest_first=parsed.reverse)


def _show(parsed: argparse.Namespace) -> int:
    from launch.tokenizer import TextOf
    from launch.verbs import buffer_text as text

    with _open(parsed.run) as inspection:
        if parsed.quarantined is not None:
            return _show_quarantined(inspection, parsed)
        if parsed.record is not None:
            group = inspection.group_of_record(parsed.record)
        else:
            group = inspection.group(parsed.group)
        if group is None:
            what = f"record {parsed.record}" if parsed.record is not None else f"group {parsed.group}"
            print(
                f"leeway: the buffer in {inspection.folder} holds no {what}: it never did, or it was evicted. "
                "`leeway buffer ls` lists what there is",
                file=sys.stderr,
            )
            return ExitStatus.FAILED
        for line in text.group_in_full(group, TextOf(inspection.folder), only_record=parsed.record):
            print(line)
        return _tell_damage(inspection.damaged, inspection.folder)


def _show_quarantined(inspection: Inspection, parsed: argparse.Namespace) -> int:
    from launch.verbs import buffer_text as text

    shard = inspection.stores[0].facts.shard if parsed.shard is None else parsed.shard
    entry = inspection.quarantined_at(shard, parsed.quarantined)
    if entry is None:
        print(
            f"leeway: the quarantine of shard {shard} in {inspection.folder} does not hold number "
            f"{parsed.quarantined}: it never did, or it had to make room. `leeway buffer ls --quarantine` lists what "
            "there is, as SHARD:NUMBER for all shards but the first",
            file=sys.stderr,
        )
        return ExitStatus.FAILED
    for line in text.quarantined_in_full(entry):
        print(line)
    return ExitStatus.OK


def _verify(parsed: argparse.Namespace) -> int:
    from buffer.offline.verify import check_store
    from buffer.store import RESTORE
    from launch.verbs import buffer_text as text

    faults: list[str] = []
    with _open(parsed.run) as inspection:
        print(text.headline(inspection))
        sums: Counter[str] = Counter()
        for store in inspection.stores:
            report = check_store(store)
            where = "" if len(inspection.stores) == 1 else f"shard {store.facts.shard}: "
            faults += [where + fault for fault in report["faults"]]
            sums.update(report["ledger"])
            sums["records"] += report["num_records"]
            if not report["has_checked_pages"]:
                print(f"{where}a service writes the file now, so the structure of its pages was not checked")
    print("ledger   " + "  ".join(f"{name} {sums[name]}" for name in text.LEDGER_SHOWN))
    for fault in faults:
        print(f"FAULT    {fault}")
    found = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "no fault"
    print(f"{sums['records']} records, every index and the ledger checked: {found}")
    if faults:
        print(f"leeway: {inspection.folder} is damaged: {RESTORE}", file=sys.stderr)
    return FAULTS if faults else ExitStatus.OK


def _export(parsed: argparse.Namespace) -> int:
    from buffer.offline.export import export

    with _open(parsed.run) as inspection:
        done, folder = export(inspection, _selection(parsed), parsed.out), inspection.folder
    print(
        f"{done.num_rows} trajectories of {done.num_groups} groups in {parsed.out} ({done.size_bytes / 2**20:.1f} MiB)"
    )
    return _tell_damage(done.damaged, folder)


def _compact(parsed: argparse.Namespace) -> int:
    from buffer.offline.compact import compact
    from buffer.store import buffer_folder

    for done in compact(buffer_folder(named_run(parsed.run))):
        print(f"{done.folder}: {done.before_bytes / 2**20:.1f} MiB are now {done.after_bytes / 2**20:.1f} MiB")
    return ExitStatus.OK


def _tell_damage(damaged: list[str], folder: Path) -> int:
    for sentence in dict.fromkeys(damaged):
        print(f"leeway: left out: {sentence}", file=sys.stderr)
    if not damaged:
        return ExitStatus.OK
    print(
        f"leeway: {folder} is damaged: restore it from a copy, or do without what was left out. "
        f"`leeway buffer verify {folder}` names all that is damaged",
        file=sys.stderr,
    )
    return ExitStatus.FAILED
