"""Results of the fault tests: their markers, the recorder of the results, and the page made from the results.

A test of the fault matrix carries `@pytest.mark.fault(row, injection)`. Its positive control, which is the same
injection with the protection switched off, carries `@pytest.mark.fault(row, protection, control=True)`. A marker may
name required programs (`tools=("strace",)`), require root, and limit the test to the full run (`full=True`). Controls
run only in the full run, because they test the tests. LEEWAY_FAULTS=all selects the full run.
"""

import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.full import FULL

PAGE = os.environ.get("LEEWAY_FAULTS_PAGE")
"""File to which the table is written; if None, no table is written."""

PACKAGES = {
    "strace": "strace",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "iptables": "iptables",
    "ip": "iproute2",
    "tc": "iproute2",
    "faketime": "faketime",
    "fallocate": "util-linux",
}
"""Debian package of each program."""


@dataclass
class Row:
    """The row of one test in the table of results."""

    row: int | str
    label: str
    control: bool
    outcome: str = "not run"
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the row of the table."""
        label = f"*control:* {self.label}" if self.control else self.label
        result = self.outcome if self.outcome == "passed" else f"**{self.outcome}**"
        cells = (str(self.row), label, result, ", ".join(self.notes) or "-")
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


class Recorder:
    """Collects the results of the tests."""

    def __init__(self) -> None:
        self.shown: dict[str, Row] = {}

    def write(self, path: Path) -> None:
        """Write the page."""
        tests = sorted(self.shown.values(), key=lambda shown: (isinstance(shown.row, str), shown.row, shown.control))
        passed = sum(test.outcome == "passed" for test in tests)
        lines = [
            "# The fault matrix, measured",
            "",
            f"Written by `make faults` on {time.strftime('%Y-%m-%d')}, {_machine()}: {passed} of {len(tests)} tests "
            "passed. A *control* is the same injection with the protection switched off: it passes if the loss "
            "occurs, which proves that the tests of its row detect it.",
            "",
            "| # | injection, or disabled protection | result | observations |",
            "|---|---|---|---|",
        ]
        lines += [test.line() for test in tests]
        path.write_text("\n".join(lines) + "\n")


def _machine() -> str:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores ({platform.machine()}), {memory_gib:.0f} GiB RAM, {platform.system()} {kernel}"


def missing_tools(tools: Iterable[str]) -> str:
    """Return a text with the missing programs and the command that installs them; '' if no program is missing."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    packages = sorted({PACKAGES.get(tool, tool) for tool in missing})
    return f"needs {', '.join(missing)} (apt-get install {' '.join(packages)})" if missing else ""


def parse(marker: pytest.Mark) -> Row:
    """Return the empty row for a test's marker."""
    row, label = marker.args
    return Row(row, label, control=bool(marker.kwargs.get("control")))


def reason_to_skip(marker: pytest.Mark) -> str | None:
    """Return why the test cannot run on this machine or in this run, or None."""
    if (marker.kwargs.get("full") or marker.kwargs.get("control")) and not FULL:
        return "part of `make faults`"
    if missing := missing_tools(marker.kwargs.get("tools", ())):
        return missing
    if marker.kwargs.get("root") and os.geteuid() != 0:
        return "needs root"
    return None


def as_text(counts: Counter[str]) -> str:
    """Return the counts as text: `fdatasync 5, writev 3`."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
