"""The processes of runs on this machine, found by the logs that they write: also those whose command is gone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROLE_LOG = re.compile(r"(buffer|weights|stage|actor)\.\d+\.log")


@dataclass(frozen=True)
class Found:
    """A process that writes into the log of a role."""

    run: Path
    """The folder of its run, as the system names it."""
    name: str
    """Role and number, as in "actor.0"."""
    process: psutil.Process


def role_processes() -> Iterator[Found]:
    """All of this machine that this user can see, of all runs.

    Neither this command nor who started it: a shell may have its output in a log too.
    """
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            output = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:  # gone, or somebody else's
            continue
        if output.parent.name == "logs" and _ROLE_LOG.fullmatch(output.name) and process.pid not in mine:
            yield Found(output.parent.parent, output.stem, process)
