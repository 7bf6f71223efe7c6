"""Trace which files a trajectory, a weight version, a config key and a metric pass: `python -m tests.walks`.

A walk is the set of product files in which a function runs between two events, in any process. Files that also run
while the system is idle are counted separately. The traced run is small, and its reward function sleeps, so that events
do not overlap. The i-th call of the reward function sleeps for `WAITS_S[i]`; the longest sleep is the idle time. The
walk of a config key contains the files on the call stacks that read the key. The result replaces the lists of
docs/architecture.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- walks: written by python -m tests.walks -->", "<!-- end of walks -->"

WAITS_S = (1.0, 1.0, 2.0, 2.0, 25.0, 4.0)
"""Seconds that each call of the reward function takes. The first two calls are an evaluation; each group has two calls.
The last value also applies to all further calls. The longest call is the idle time, in which leases are renewed."""
LEASE, GRADIENT = "buffer/client.py:lease", "learner/optimizer.py:apply"
PUBLISH, APPLIED = "weight_sync/publisher.py:publish", "actors/weights.py:_put"
ROW = "learner/report.py:step_report"
KEY = "common/staleness.py:StalenessConfig.max_lag"
METRIC_S = 1.5
"""Seconds from the measurement of a row of metrics until the row has reached every consumer."""
UPDATE_S = 3.0
"""Seconds from the publication of a version until engines serve it; the next step starts later."""

CONFIG = """
[model]
path = "{root}/examples/demo_model"

[task]
type = "file"
path = "rows.jsonl"
template = "{{question:compact}}="
rewards = ["reward.py:slow"]
num_heldout = 1

[algorithm]
type = "trajectory_balance"

[actors]
num_actors = 1
group_size = 2
max_prompt_tokens = 8
max_new_tokens = 8
max_running_samples = 2

[learner]
num_stages = 2
num_steps = 4
groups_per_step = 1
token_budget = 64
learning_rate = 1e-4

[weight_sync]
max_lag = 3
publish_every = 2

[tracking]
prometheus_port = 9464
"""
REWARD = """
import fcntl, time

def slow(completions, **columns):
    with open("{log}", "r+") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        waits = {waits}
        number = len(log.read().splitlines())
        began = time.time()
        time.sleep(waits[min(number, len(waits) - 1)])
        log.write(f"{{began}} {{time.time()}}\\n")
    return [float(number % 2) for _ in completions]
"""


class Call(NamedTuple):
    """A recorded call of a product function."""

    at_ms: float
    event: str
    """Kind of the event: call, return or key."""
    file: str
    function: str
    pid: int


class Trace:
    """The recorded calls of all processes of a run, by time."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[Call] = []
        for path in folder.glob("*.trace"):
            for line in path.read_text(encoding="utf-8").splitlines():
                at_ms, event, file, function = line.split("\t")
                self.calls.append(Call(float(at_ms), event, file, function, int(path.stem)))
        self.calls.sort()

    def files(self, begin_ms: float, end_ms: float, pids: Iterable[int] | None = None) -> set[str]:
        selected = None if pids is None else set(pids)
        return {
            call.file
            for call in self.calls
            if begin_ms <= call.at_ms <= end_ms and (selected is None or call.pid in selected)
        }

    def first(self, marker: str, after_ms: float = 0.0) -> Call:
        file, function = marker.split(":")
        for call in self.calls:
            if call[1:4] == ("call", file, function) and call.at_ms > after_ms:
                return call
        raise LookupError(f"{marker} was not called after {after_ms:.0f} ms")

    def last(self, marker: str, before_ms: float) -> Call:
        file, function = marker.split(":")
        return next(call for call in reversed(self.calls) if call[2:4] == (file, function) and call.at_ms < before_ms)

    def key(self, end_ms: float) -> set[str]:
        return {call.file for call in self.calls if call.event == "key" and call.at_ms <= end_ms}


def trace_run(folder: Path) -> tuple[Trace, list[tuple[float, float]]]:
    """Train and inspect a small run; return its trace, and the start and end of each reward call in ms."""
    rows = [f'{{"question": "{number} + {number % 7}"}}' for number in range(10, 60)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    log, records = folder / "rewards.log", folder / "trace"
    log.touch()
    records.mkdir()
    (folder / "reward.py").write_text(REWARD.format(log=log, waits=WAITS_S), encoding="utf-8")
    (folder / "walk.toml").write_text(CONFIG.format(root=ROOT), encoding="utf-8")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "tests" / "tracing"),
        "LEEWAY_TRACE": str(records),
        "LEEWAY_TRACE_EXACT": " ".join((LEASE, GRADIENT, PUBLISH, APPLIED, ROW)),
        "LEEWAY_TRACE_KEY": KEY,
    }
    run = folder / "runs" / "walk"

    def leeway(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "leeway", *words], cwd=folder, env=environment, check=True)

    leeway("train", "walk.toml", "--run.dir", str(run.parent), "--run.name", run.name)
    for verb in ("status", "report"):
        leeway(verb, str(run))
    times = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    return Trace(records), [(float(begin) * 1000, float(end) * 1000) for begin, end in times]


class Walk(NamedTuple):
    """The files on one path through the system."""

    name: str
    then: set[str]
    """Files that run only on this path."""
    always: set[str]
    """Files that run on this path and also while the system is idle."""


def walks(trace: Trace, rewards: Sequence[tuple[float, float]]) -> list[Walk]:
    begin, end = max(rewards, key=lambda times: times[1] - times[0])
    idle = trace.files(begin + 1000, end - 100)
    command = trace.calls[0].pid
    roles = {call.pid for call in trace.calls} - {command}
    lease, gradient, row = trace.first(LEASE), trace.first(GRADIENT), trace.first(ROW)
    row_is_out = row.at_ms + METRIC_S * 1000
    publish = trace.first(PUBLISH, after_ms=row_is_out)
    applied = trace.last(APPLIED, before_ms=publish.at_ms + UPDATE_S * 1000)
    command_ended = max(call.at_ms for call in trace.calls if call.pid == command)
    found = {
        "A trajectory, from lease to gradient": trace.files(lease.at_ms, gradient.at_ms, roles),
        "A weight version, from a stage to an engine, through the folder": trace.files(
            publish.at_ms, applied.at_ms, roles
        ),
        "A row of metrics, from the learner to `metrics.jsonl`, trackers, `leeway status` and the report": trace.files(
            row.at_ms, row_is_out, [row.pid, command]
        )
        | trace.files(command_ended, float("inf")),
    }
    key = Walk("`weight_sync.max_lag`, from TOML to admission", trace.key(gradient.at_ms), set())
    return [*(Walk(name, files - idle, files & idle) for name, files in found.items()), key]


def page(found: Sequence[Walk]) -> str:
    """Return the generated section of docs/architecture.md."""
    lines = [BEGIN, "", "| walk | files that run only on this path | files that also run while idle |"]
    lines.append("|---|---|---|")
    lines += [f"| {walk.name} | {len(walk.then)} | {len(walk.always)} |" for walk in found]
    for walk in found:
        lines += ["", f"**{walk.name}.** {_by_package(walk.then)}."]
        if walk.always:
            lines.append(f"Also while idle: {_by_package(walk.always)}.")
    return "\n".join(fill(line, 120, break_long_words=False) if line[:1] != "|" else line for line in [*lines, "", END])


def _by_package(files: set[str]) -> str:
    packages: dict[str, list[str]] = {}
    for file in sorted(files):
        package, _, name = file.partition("/")
        packages.setdefault(package, []).append(name.removesuffix(".py").removesuffix("/__init__"))
    return "; ".join(f"`{package}/` {', '.join(names)}" for package, names in packages.items())


def main() -> None:
    """Trace a run, print its walks and write the walks into docs/architecture.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--print", action="store_true", help="print the walks without writing docs/architecture.md")
    parser.add_argument("--keep", type=Path, help="folder for the run and the records; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="walks-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        text = page(walks(*trace_run(folder)))
    print(text)
    if not arguments.print:
        old = PAGE.read_text(encoding="utf-8")
        before, after = old.split(BEGIN)[0], old.split(END)[1]
        PAGE.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    main()
