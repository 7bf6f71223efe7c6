"""What a terminal shows of a run: the display of the command that trains, and the screen of `leeway top`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from launch.observe.status import Accuracy, RunStatus
from launch.observe.view import TRAINING, View, failures, line
from launch.run_folder import RunFolder
from launch.text import number, printable

log = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 5.0
"""Seconds between lines of the plain display."""
QUIET_S = 15.0
"""Seconds after which the plain display prints a line although nothing is new, with the reason."""
REFRESH_S = 0.5
QUIT_KEYS = frozenset("qQ\x03\x04")
"""Also Ctrl-C and Ctrl-D, where they arrive as characters."""
PAUSE_KEYS = frozenset("pP ")


class LossyStream:
    """A standard stream that may go away while the run goes on: a terminal is closed, or the reader of a pipe ends.

    From then on nothing raises, and what is written goes nowhere. All else is the stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- of any kind
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._unless_lost(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._unless_lost(self._stream.flush)

    def _unless_lost(self, call: Callable[[], int | None]) -> int | None:
        try:
            return None if self.is_lost else call()
        except OSError as error:
            self.is_lost = True
            log.warning("the output of the command can no longer be written (%s); the run goes on", error)
            self._drop()
            return None

    def _drop(self) -> None:
        """Put /dev/null in its place, also of other standard streams that lead there: Python flushes them last."""
        with suppress(OSError), open(os.devnull, "wb", 0) as nowhere:  # a test's own has no descriptor
            lost = self._stream.fileno()
            standard = [each.fileno() for each in (sys.__stdout__, sys.__stderr__) if each is not None]
            for descriptor in {lost, *(each for each in standard if os.path.sameopenfile(each, lost))}:
                os.dup2(nowhere.fileno(), descriptor)


class Display:
    """A live view on a terminal; otherwise a line now and then. Never raises because of a narrow or a lost screen."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing yet. `clock` is monotonic seconds."""
        self._folder, self._clock = folder, clock
        self._stdout = LossyStream(sys.stdout)
        self._console = Console(file=cast(TextIO, self._stdout), highlight=False, markup=False)
        self._is_live = sys.stdout.isatty() and not self._console.is_dumb_terminal
        self._live: Live | None = None
        self._last_line_s = clock()
        self._last_step = 0
        self._failures = ""

    def __enter__(self) -> Display:
        self.say(f"run {self._folder.root}")
        if self._is_live:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def say(self, text: str) -> None:
        """Print what the run does now, or what happened."""
        if not self._stdout.is_lost:
            console = self._live.console if self._live is not None else self._console
            console.print("\n".join(map(printable, text.splitlines())), soft_wrap=True)

    def update(self, status: RunStatus) -> None:
        """Show the newest figures. Any thread may call it."""
        if status.buffer is not None:
            self._failures = failures(status.buffer.ledger, status.buffer.failed_by_reason)
        if self._stdout.is_lost:
            self.__exit__()
            return
        live = self._live
        if live is not None:
            live.update(View(status, status.written_s))
            return
        is_new_step = status.step != self._last_step
        is_stuck = bool(status.waits) and status.phase == TRAINING
        quiet_s = PLAIN_INTERVAL_S if is_new_step or is_stuck or status.tripped else QUIET_S
        if self._clock() - self._last_line_s >= quiet_s:
            self.say(self._line(status, is_new_step=is_new_step))
            self._last_line_s, self._last_step = self._clock(), status.step

    def last_line(self, text: str) -> None:
        """Print a line after everything is over."""
        self.__exit__()
        self.say(text)

    def fail(self, text: str) -> None:
        """Print why the run ends here; samples that failed may be a part of it."""
        self.__exit__()
        if self._failures:
            self.say(self._failures)
        print(f"leeway: {text}", file=cast(TextIO, LossyStream(sys.stderr)), flush=True)

    def finish(self, before: Accuracy | None, after: Accuracy | None, summary: Mapping[str, Any]) -> None:
        """Print the result of a run."""
        self.__exit__()
        lines = []
        if after is not None:
            lines.append(f"held-out accuracy over {after.num_problems} problems   before     after      gain")
            for name in ("greedy", "sampled"):
                first, last = getattr(before, name, None), getattr(after, name)
                gain = last - first if first is not None and last is not None else None
                lines.append(f"  {name:<37}{number(first):>11}{number(last):>10}{number(gain):>10}")
        lines.append(
            f"{summary['trained_trajectories']} trajectories in {summary['num_steps']} steps; "
            f"lag mean {number(summary['lag_mean'])}, max {summary['lag_max']} of {summary['max_lag']}; "
            f"generating during {number(summary['overlap_frac'])} of step time; ledger gap {summary['ledger_gap']}"
        )
        if failed := failures(summary["ledger"], summary["failed_by_reason"]):
            lines.append(failed)
        lines.append(f"{summary['wall_s']:.0f} s in all; model, metrics and summary.json in {self._folder.root}")
        self._console.print("\n".join(lines), soft_wrap=True)

    def _line(self, status: RunStatus, *, is_new_step: bool) -> str:
        """Return what the learner waits for while steps come, and whatever is known of the reason while none comes."""
        if is_new_step:
            return line(status, num_waits=1 if status.learner.waits_for else 0)
        is_computing = not status.learner.waits_for and status.phase == TRAINING
        return line(status) + (f"; the learner computes step {status.step + 1}" if is_computing else "")


# --- leeway top ---------------------------------------------------------------------------------------


def show(view: Callable[[bool], View], console: Console) -> None:
    """Show a view anew twice a second; q ends, p pauses and goes on.

    `view` is told whether the screen is paused, and gives the last one again then. The size may change at any time.
    """
    is_paused = False
    with _ended_by_signals(), _keys() as next_key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view(is_paused), refresh=True)
            key = next_key(REFRESH_S)
            if key in QUIT_KEYS:
                return
            if key in PAUSE_KEYS:
                is_paused = not is_paused


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits up to a timeout for a key of the terminal; it returns '' if none was pressed."""
    sources = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def next_key(timeout_s: float) -> str:
        ready, _, _ = select.select(sources, [], [], timeout_s)
        return (os.read(ready[0], 1).decode("latin-1") or "q") if ready else ""  # without a byte the terminal is gone

    before = [(each, termios.tcgetattr(each)) for each in sources]
    try:
        for each in sources:
            tty.setcbreak(each)
        yield next_key
    finally:
        for each, settings in before:
            termios.tcsetattr(each, termios.TCSADRAIN, settings)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and a closed terminal end the block as an exception does, so that the terminal is put back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
