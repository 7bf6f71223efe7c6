"""Screen: shows views on a terminal until somebody presses q, and puts the terminal back as it was."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from launch.top.view import View

REFRESH_S = 0.5
QUIT_KEYS = frozenset("qQ\x03\x04")
"""Also Ctrl-C and Ctrl-D, where they arrive as characters."""
PAUSE_KEYS = frozenset("pP ")


def show(view: Callable[[bool], View], console: Console) -> None:
    """Show a view anew twice a second; q ends, p pauses and goes on.

    Args:
        view: makes it; told whether the screen is paused, for which it gives the last one again.
        console: on a terminal, whose size may change at any time.
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
    """Single keys from the terminal, as they are pressed: a function that waits so many seconds for one."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda timeout_s: _read(descriptor, timeout_s)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _read(descriptor: int, timeout_s: float) -> str:
    """A key, or an empty text after the timeout."""
    ready, _, _ = select.select([descriptor], [], [], timeout_s)
    if not ready:
        return ""
    pressed = os.read(descriptor, 1)
    return pressed.decode("latin-1") if pressed else "q"  # the terminal is gone


def _no_key(timeout_s: float) -> str:
    select.select([], [], [], timeout_s)
    return ""


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the block as an exception does, so that the terminal is put back."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
