"""How a command ends: what is wrong with its input, the signals that end it, and its exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from types import FrameType
from typing import Any


class ConfigError(ValueError):
    """The config is wrong, or the run that was named; the text is one sentence that says where and what to do."""


@contextlib.contextmanager
def as_config_error(
    where: str = "", kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """What the packages say of a wrong value, or of what cannot be read, is a `ConfigError`, with its place before."""
    try:
        yield
    except kind as error:
        raise ConfigError(f"{where}{error}") from None


class ExitStatus(IntEnum):
    """Of `leeway`."""

    OK = 0
    FAILED = 1
    """The run failed; what it had is in its folder."""
    WRONG_INPUT = 2
    """The input is wrong, and nothing was started."""
    INTERRUPTED = 130


def refuse(why: object, status: ExitStatus = ExitStatus.FAILED) -> ExitStatus:
    """Say on the standard error why something cannot be done."""
    print("leeway:", *str(why).splitlines(), file=sys.stderr)  # what a library says may have several lines
    return status


class Stopped(BaseException):
    """The run ends at once. Not an Exception, or a library that catches all of those would catch it too."""


END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Requests to end a run: Ctrl-C, a closed terminal, and what job managers send, before the time limit or at it."""
SAME_REQUEST_S = 0.3
"""Signals within so long of the first are one request: `timeout` sends its own twice, systemd SIGTERM and SIGHUP."""


class Interrupts:
    """Counts the requests to end by `END_SIGNALS`; SIGHUP unless the command was told to ignore it, as by nohup.

    While training, the first asks for an orderly end; any other ends now.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Hear nothing yet. `clock` is monotonic seconds."""
        self._clock = clock
        self.count = 0
        self.training = False
        """Who asked for an orderly end is heard; see `go_on`."""
        self.ending = False
        self._first_s = 0.0
        """When the first came, by the clock."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        heard = {number: signal.getsignal(number) for number in END_SIGNALS}
        self._previous = {each: handler for each, handler in heard.items() if _is_to_be_heard(each, handler)}
        for number in self._previous:
            signal.signal(number, self._on_signal)
        return self

    def end(self) -> None:
        """From here on the processes are being ended."""
        self.ending = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def go_on(self) -> None:
        """Between two phases, before anything that was asked to end begins.

        Raises:
            Stopped: a signal came while nothing could be raised, as in a callback of C code, where Python drops it.
        """
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


def _is_to_be_heard(number: int, handler: object) -> bool:
    """A shell's background job ignores SIGINT too, but whoever sends one to it by hand means it."""
    return number != signal.SIGHUP or handler is not signal.SIG_IGN
