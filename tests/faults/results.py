"""What every fault showed: markers, the recorder that tests write to, and the page made of it.

A test of the fault matrix carries `@pytest.mark.fault(row, injection)`; its positive control, the same
injection with the protection switched off, `@pytest.mark.fault(row, protection, control=True)`.
Both may name the programs they need (`tools=("strace",)`), whether they need root, and whether they
are for the full run alone (`full=True`), as controls always are: they test the tests. The full run is
LEEWAY_FAULTS=all.
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
"""Where to write the table; unset: nowhere."""

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
"""Program -> its package in Debian."""


@dataclass
class Shown:
    """One test's line."""

    row: int | str
    what: str
    control: bool
    outcome: str = "not run"
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The line of the table."""
        what = f"*control:* {self.what}" if self.control else self.what
        result = self.outcome if self.outcome == "passed" else f"**{self.outcome}**"
        cells = (str(self.row), what, result, ", ".join(self.notes) or "-")
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


class Recorder:
    """Tests write what they showed into it."""

    def __init__(self) -> None:
        self.shown: dict[str, Shown] = {}

    def write(self, path: Path) -> None:
        """Make the page."""
        tests = sorted(self.shown.values(), key=lambda shown: (isinstance(shown.row, str), shown.row, shown.control))
        passed = sum(test.outcome == "passed" for test in tests)
        lines = [
            "# The fault matrix, measured",
            "",
            f"Written by `make faults` on {time.strftime('%Y-%m-%d')}, {_machine()}: {passed} of {len(tests)} tests "
            "passed. A *control* is the same injection with the protection switched off: it passes where the loss "
            "shows, and proves that the tests of its row are not blind.",
            "",
            "| # | injection, or what is switched off | result | what it showed |",
            "|---|---|---|---|",
        ]
        lines += [test.line() for test in tests]
        path.write_text("\n".join(lines) + "\n")


def _machine() -> str:
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    kernel = ".".join(platform.release().split(".")[:2])
    return f"{os.cpu_count()} cores ({platform.machine()}), {memory_gib:.0f} GiB RAM, {platform.system()} {kernel}"


def missing_tools(tools: Iterable[str]) -> str:
    """Which of these programs are missing, and how to get them; '' where none is."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    packages = sorted({PACKAGES.get(tool, tool) for tool in missing})
    return f"needs {', '.join(missing)} (apt-get install {' '.join(packages)})" if missing else ""


def parse(marker: pytest.Mark) -> Shown:
    """The line that a test's marker opens."""
    row, what = marker.args
    return Shown(row, what, control=bool(marker.kwargs.get("control")))


def reason_to_skip(marker: pytest.Mark) -> str | None:
    """Why the test cannot run here, or not in this run."""
    if (marker.kwargs.get("full") or marker.kwargs.get("control")) and not FULL:
        return "part of `make faults`"
    if missing := missing_tools(marker.kwargs.get("tools", ())):
        return missing
    if marker.kwargs.get("root") and os.geteuid() != 0:
        return "needs root"
    return None


def as_text(counts: Counter[str]) -> str:
    """`fdatasync 5, writev 3`."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
