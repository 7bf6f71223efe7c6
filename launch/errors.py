"""Exit statuses, config errors and signal handling."""

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

from leeway.common.errors import LeewayError


class ConfigError(LeewayError, ValueError):
    """The config or the named run is invalid; the message is one sentence with the place and the fix."""


@contextlib.contextmanager
def as_config_error(
    where: str = "", kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Re-raise errors of this kind as `ConfigError`, with `where` before the text."""
    try:
        yield
    except kind as error:
        raise ConfigError(f"{where}{error}") from None


class ExitStatus(IntEnum):
    """Exit statuses of `leeway`."""

    OK = 0
    FAILED = 1
    """The run failed; the run folder has its results up to the failure."""
    WRONG_INPUT = 2
    """The input is invalid, and nothing was started."""
    INTERRUPTED = 130


def print_error(why: object, status: ExitStatus = ExitStatus.FAILED) -> ExitStatus:
    """Print an error as one line to standard error, and return the status."""
    print("leeway:", *str(why).splitlines(), file=sys.stderr)
    return status


_NO_LIBRARIES = frozenset({"benchmarks", "conftest", "docs", "examples", "scripts", "setup", "test", "tests"})
"""Names of folders that some distributions install by mistake; libraries never import these folders."""


def hiding_module(*folders: str, names: Container[str] = ()) -> str:
    """Return an error if a file in these folders or PYTHONPATH hides a module, "" if no file does. Import nothing.

    `names` limits the check to these modules; without names, it covers the modules of Python, Leeway and libraries.
    """
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    first = [os.path.abspath(each) for each in (*folders, *os.environ.get("PYTHONPATH", "").split(os.pathsep)) if each]
    others = [*(each for each in sys.path if os.path.abspath(each) not in first), home]
    for folder in first:
        entries = os.listdir(folder) if os.path.isdir(folder) and os.path.realpath(folder) != home else []
        is_installed = any(each.endswith((".dist-info", ".egg-info")) for each in entries)
        for name in sorted({each.partition(".")[0] for each in entries} - _NO_LIBRARIES):
            owner = "Python's own" if name in sys.stdlib_module_names else "Leeway's own" if name == "leeway" else ""
            is_first = name in sys.builtin_module_names or FrozenImporter.find_spec(name) is not None
            if is_first or not (name in names if names else owner or not is_installed):
                continue
            found, hidden = (PathFinder.find_spec(name, path) for path in ([folder], others))
            if found is not None and found.origin and hidden is not None and hidden.origin:
                return (
                    f"{found.origin} would be imported in place of {owner or 'the library'} {name}, {hidden.origin}: "
                    "rename that file, start the command in another folder, or remove the file's folder from PYTHONPATH"
                )
    return ""


def open_streams() -> None:
    """Open closed standard streams on /dev/null, and replace characters that the output's encoding lacks by "?"."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)  # keep the descriptor, or the next opened file would receive the output
    os.close(descriptor)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def report_failure(error: Exception, status: int) -> int:
    """Print why the command failed and return its exit status, which is `status` if only the output pipe was closed.

    Re-raise the error if it does not come from a config, a library or a file.
    """
    if isinstance(error, ConfigError):
        return print_error(error, ExitStatus.WRONG_INPUT)
    if _is_unfit_vision(error):
        cure = "run `pip uninstall -y torchvision torchaudio torchcodec`, which Leeway does not use"
        return print_error(f"the installed torchvision does not match torch: {cure}", ExitStatus.WRONG_INPUT)
    if library := _broken_library(error):
        why = hiding_module(os.getcwd()) or "run `leeway doctor`, which checks every library"
        return print_error(f"{library} cannot be imported: {error}: {why}", ExitStatus.WRONG_INPUT)
    if not isinstance(error, OSError):
        raise error
    try:
        sys.stdout.write("\n")  # fails if the output itself cannot be written
        sys.stdout.flush()
    except OSError as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_closed = isinstance(lost, BrokenPipeError)  # the reader closed the pipe, as `head` does
        return status if is_closed else print_error(f"the output cannot be written: {lost.strerror}")
    return print_error(f"{error.filename}: {error.strerror}" if error.filename else error)


def _broken_library(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if trace.tb_frame.f_code.co_name == "<module>" and package not in ("leeway", "__main__"):
            return package
        trace = trace.tb_next
    where = error.name if isinstance(error, ImportError) else error.filename if isinstance(error, SyntaxError) else ""
    return "a library" if where is None else where


def _is_unfit_vision(error: BaseException | None) -> bool:
    """Return whether torchvision raised the error or one of its causes; Transformers reports only its own module."""
    return error is not None and ("torchvision" in str(error) or _is_unfit_vision(error.__cause__ or error.__context__))


class Stopped(BaseException):
    """Request to end the run immediately; not an Exception, because libraries may catch every Exception."""


END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Signals that end a run: from Ctrl-C, a closed terminal, and job managers shortly before or at the time limit."""
SAME_REQUEST_S = 0.3
"""Signals within this time after a first signal count as one request, because systemd sends SIGTERM and SIGHUP."""


class Interrupts:
    """Counter of `END_SIGNALS`. In training, the first signal requests an orderly end; all others raise `Stopped`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the counter; entering the context installs the handlers. `clock` returns monotonic seconds."""
        self._clock = clock
        self.count = 0
        self.training = False
        """Whether the first request leads to an orderly end; if False, the first request raises `Stopped`."""
        self.ending = False
        self._first_s = 0.0
        """Time of the first request, in seconds of `clock`."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.getsignal(number) for number in END_SIGNALS}
        if self._previous[signal.SIGHUP] is signal.SIG_IGN:  # by nohup; SIGINT counts even if it is ignored
            del self._previous[signal.SIGHUP]
        for number in self._previous:
            signal.signal(number, self._on_signal)
        return self

    def end(self) -> None:
        """Only count signals from now on, because the processes are being shut down."""
        self.ending = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if a signal arrived where Python drops exceptions, such as in a callback of C code."""
        if self.count and not self.training:
            raise Stopped

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # print nothing: this handler may interrupt a write
        now_s = self._clock()
        if self.count and now_s - self._first_s < SAME_REQUEST_S:
            return
        self._first_s = self._first_s if self.count else now_s
        self.count += 1
        if not self.ending and (self.count > 1 or not self.training):
            raise Stopped
