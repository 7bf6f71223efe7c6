"""How a command ends: what is wrong with its input, the signals that end it, and its exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from enum import IntEnum
from types import FrameType
from typing import Any


class ConfigError(ValueError):
    """The config is wrong, or the run that was named; the text is one sentence that says where and what to do."""


@contextlib.contextmanager
def as_config_error(where: str = "", kind: type[ValueError] = ValueError) -> Iterator[None]:
    """What the packages say of a wrong value is a `ConfigError`, with the place of it before."""
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


class Interrupts:
    """Counts the signals. While training, the first asks for an orderly end; any other ends now."""

    def __init__(self) -> None:
        self.count = 0
        self.training = False
        """Who asked for an orderly end is heard; see `go_on`."""
        self.ending = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
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
        self.count += 1  # nothing else: a handler may come in the middle of a write
        if not self.ending and (self.count > 1 or not self.training):
            raise Stopped
