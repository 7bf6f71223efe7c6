"""Terminal output of the launcher: a redrawn progress line, or a line every 10 s if the output is not a terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from leeway.launch.observe.status import RunStatus
from leeway.launch.observe.view import NUM_WAITS, TRAINING, cut, failures, line, packed, phrases
from leeway.launch.run_folder import RunFolder
from leeway.launch.text import number, printable

log = logging.getLogger(__name__)

PLAIN_INTERVAL_S = 10.0
"""Seconds between lines if the output is not a terminal."""
MIN_WAIT = 24
"""Minimum number of columns for the text of a wait at the end of the progress line."""


def progress_line(status: RunStatus, left_s: float | None, width: int) -> Text:
    """Return the phrases that fit into `width`, and the first wait; `left_s` is the estimated time to the last step."""
    shown = packed(phrases(status, left_s), width)[0]
    if status.phase == TRAINING and status.waits and len(shown) + MIN_WAIT <= width:
        shown.append(f"  {status.waits[0]}", style="dim")
    return cut(shown, width)


class LossyStream:
    """Wrapper of a standard stream that may be closed during the run; later output is discarded without an error.

    Flushes every write. All other attributes come from the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- any attribute of the stream
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            self._discard()  # before the warning, which may be written to this stream
            log.warning("the output of the launcher can no longer be written (%s); the run continues", error)
        return len(text)

    def flush(self) -> None:
        self.write("")

    def _discard(self) -> None:
        """Redirect the stream, and standard streams on its file, to /dev/null: Python flushes streams at exit."""
        with suppress(OSError), open(os.devnull, "wb", 0) as null:  # streams in tests have no descriptor
            lost = self._stream.fileno()
            standard = [each.fileno() for each in (sys.__stdout__, sys.__stderr__) if each is not None]
            for descriptor in {lost, *(each for each in standard if os.path.sameopenfile(each, lost))}:
                os.dup2(null.fileno(), descriptor)


class Display:
    """Redraws a progress line on a terminal, or prints a line every 10 s. Tolerates a narrow or closed terminal."""

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a display that shows nothing yet. `clock` returns monotonic seconds."""
        self._folder, self._clock = folder, clock
        self._console = Console(file=cast(TextIO, LossyStream(sys.stdout)), highlight=False, markup=False)
        self._live: Live | None = None
        self._last_line_s = clock()
        self._last_step = 0
        self._training_since: tuple[int, float] | None = None
        """Step and time at which training was first observed."""
        self._failures = ""

    def __enter__(self) -> Display:
        self.log(f"run {self._folder.root}")
        if sys.stdout.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def log(self, text: str) -> None:
        """Print a message, such as a phase or an event."""
        self._console.print("\n".join(map(printable, text.splitlines())), soft_wrap=True)

    def update(self, status: RunStatus) -> None:
        """Show the newest status. Thread-safe."""
        if status.buffer is not None:
            self._failures = failures(status.buffer.ledger, status.buffer.failed_by_reason)
        left_s, live = self._left_s(status), self._live
        if live is not None:
            live.update(progress_line(status, left_s, self._console.width))
        elif status.ended is None and self._clock() - self._last_line_s >= PLAIN_INTERVAL_S:
            self._print_line(status, left_s)

    def _left_s(self, status: RunStatus) -> float | None:
        """Return the seconds to the last step at the mean pace of this launch; None before its first training step."""
        if status.phase != TRAINING:
            return None
        if self._training_since is None:
            self._training_since = status.step, status.written_s
        first, since_s = self._training_since
        done = status.step - first  # negative while a restarted learner repeats steps
        return (status.written_s - since_s) / done * (status.num_steps - status.step) if done > 0 else None

    def _print_line(self, status: RunStatus, left_s: float | None) -> None:
        """Print a status line with the learner's wait after a new step, or with all waits if there is no new step."""
        is_stuck = status.step == self._last_step
        self._last_line_s, self._last_step = self._clock(), status.step
        text = line(status, left_s, NUM_WAITS if is_stuck else int(bool(status.learner.waits_for)))
        is_computing = is_stuck and status.phase == TRAINING and not status.learner.waits_for
        self.log(text + (f"; the learner computes step {status.step + 1}" if is_computing else ""))

    def last_line(self, text: str) -> None:
        """Print a line after the run, below the live view."""
        self.__exit__()
        self.log(text)

    def fail(self, text: str) -> None:
        """Print why the run failed, after the summary of failed samples."""
        self.__exit__()
        if self._failures:
            self.log(self._failures)
        print(f"leeway: {text}", file=cast(TextIO, LossyStream(sys.stderr)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.__exit__()
        self.log(
            f"{summary['trained_trajectories']} trajectories in {summary['num_steps']} steps; "
            f"lag mean {number(summary['lag_mean'])}, max {summary['lag_max']} of {summary['max_lag']}; "
            f"generating during {number(summary['overlap_frac'])} of step time; ledger gap {summary['ledger_gap']}"
        )
        if failed := failures(summary["ledger"], summary["failed_by_reason"]):
            self.log(failed)
        self.log(f"{summary['wall_s']:.0f} s in total; model: {self._folder.export}")
