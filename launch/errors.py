"""Exit statuses, config errors and the handling of signals."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Container, Iterator
from enum import IntEnum
from importlib.machinery import FrozenImporter, PathFinder
from types import FrameType
from typing import Any


class ConfigError(ValueError):
    """The config is wrong, or the run that was named; the text is one sentence that says where and what to do."""


@contextlib.contextmanager
def as_config_error(
    where: str = "", kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Raise errors of this kind as `ConfigError`, with their place before the text."""
    try:
        yield
    except kind as error:
        raise ConfigError(f"{where}{error}") from None


class ExitStatus(IntEnum):
    """Exit statuses of `leeway`."""

    OK = 0
    FAILED = 1
    """The run failed; what it had is in its folder."""
    WRONG_INPUT = 2
    """The input is wrong, and nothing was started."""
    INTERRUPTED = 130


def refuse(why: object, status: ExitStatus = ExitStatus.FAILED) -> ExitStatus:
    """Print why something cannot be done to the standard error, in one line, and return the status."""
    print("leeway:", *str(why).splitlines(), file=sys.stderr)
    return status


_OURS = frozenset({"actors", "algorithms", "buffer", "common", "launch", "learner", "planning", "weight_sync"})
_NO_LIBRARIES = frozenset({"benchmarks", "conftest", "docs", "examples", "scripts", "setup", "test", "tests"})
"""Folders that distributions install by mistake; no library imports them."""


def hiding_module(*folders: str, names: Container[str] = ()) -> str:
    """Return a sentence on a file in these folders or PYTHONPATH that hides a module; else "". Imports nothing.

    `names` are the modules that matter; without any those of Python, of Leeway and of libraries.
    """
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    asked = [os.path.abspath(each) for each in (*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if each]
    others = [*(each for each in sys.path if os.path.abspath(each) not in asked), home]
    for folder in asked:
        entries = os.listdir(folder) if os.path.isdir(folder) and os.path.realpath(folder) != home else []
        is_installed = any(each.endswith((".dist-info", ".egg-info")) for each in entries)
        for name in sorted({each.partition(".")[0] for each in entries} - _NO_LIBRARIES):
            whose = "Python's own" if name in sys.stdlib_module_names else "Leeway's own" if name in _OURS else ""
            is_first = name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None
            if is_first or not (name in names if names else whose or not is_installed):
                continue
            found, hidden = (PathFinder.find_spec(name, path) for path in ([folder], others))
            if found is not None and found.origin and hidden is not None and hidden.origin:
                return (
                    f"{found.origin} would be imported in place of {whose or 'the library'} {name}, {hidden.origin}: "
                    "rename it, start the command in another folder, or take its folder out of PYTHONPATH"
                )
    return ""


def open_streams() -> None:
    """Open closed standard streams on /dev/null, and write "?" for characters that the output's encoding lacks."""
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)  # else the next file that is opened would receive the output
    os.close(nowhere)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def failed(error: Exception, status: int) -> int:
    """Print why the command ends, and return its exit status; the given one if the output's reader has closed it.

    Raises the error again if it is not of a config, a library or a file.
    """
    if isinstance(error, ConfigError):
        return refuse(error, ExitStatus.WRONG_INPUT)
    if library := _broken_library(error):
        why = hiding_module(os.getcwd()) or "run `leeway doctor`, which looks at every library"
        return refuse(f"{library} cannot be imported: {error}: {why}", ExitStatus.WRONG_INPUT)
    if not isinstance(error, OSError):
        raise error
    try:
        sys.stdout.write("\n")  # fails if the output is what cannot be written
        sys.stdout.flush()
    except OSError as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_gone = isinstance(lost, BrokenPipeError)  # as `head` is
        return status if is_gone else refuse(f"the output cannot be written: {lost.strerror}")
    return refuse(f"{error.filename}: {error.strerror}" if error.filename else error)


def _broken_library(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if trace.tb_frame.f_code.co_name == "<module>" and package not in (*_OURS, "__main__"):
            return package
        trace = trace.tb_next
    where = error.name if isinstance(error, ImportError) else error.filename if isinstance(error, SyntaxError) else ""
    return "a library" if where is None else where


class Stopped(BaseException):
    """The run ends at once. Not an Exception, which a library might catch."""


END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Requests to end a run: Ctrl-C, a closed terminal, and what job managers send, before the time limit or at it."""
SAME_REQUEST_S = 0.3
"""Seconds after the first signal in which others are the same request: systemd sends SIGTERM and SIGHUP."""


class Interrupts:
    """Counts requests to end by `END_SIGNALS`. While training, the first asks for an orderly end; others end now."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Install no handler yet. `clock` is monotonic seconds."""
        self._clock = clock
        self.count = 0
        self.training = False
        """Requests for an orderly end are followed; see `go_on`."""
        self.ending = False
        self._first_s = 0.0
        """Time of the first, by the clock."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in END_SIGNALS}
        if handlers[signal.SIGHUP] is signal.SIG_IGN:  # as nohup sets it; SIGINT, which a shell ignores too, counts
            del handlers[signal.SIGHUP]
        self._previous = handlers
        for number in self._previous:
            signal.signal(number, self._on_signal)
        return self

    def end(self) -> None:
        """Count signals only: the processes are being ended."""
        self.ending = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def go_on(self) -> None:
        """Raise `Stopped` if a signal came where Python drops exceptions, as in a callback of C code."""
        if self.count and not self.training:
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # it writes nothing: a handler may come in the middle of a write
        now_s = self._clock()
        if self.count and now_s - self._first_s < SAME_REQUEST_S:
            return
        self._first_s = self._first_s if self.count else now_s
        self.count += 1
        if not self.ending and (self.count > 1 or not self.training):
            raise Stopped
