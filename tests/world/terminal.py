"""A pseudo-terminal with a child process, and its screen, with the escape sequences that rich uses."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable

_TOKEN = re.compile(r"\x1b\[(?P<private>\??)(?P<numbers>[\d;]*)(?P<kind>[A-Za-z])|(?P<char>.)", re.DOTALL)
_BEGUN = re.compile(r"\x1b(\[\??[\d;]*)?$")
ALTERNATE_SCREEN, CURSOR = 1049, 25


def new_attributes() -> list:
    """Return the attributes of an unchanged terminal, as `Terminal.attributes` does."""
    parent, child = pty.openpty()
    try:
        return termios.tcgetattr(parent)
    finally:
        os.close(parent)
        os.close(child)


class Grid:
    """The characters of a screen."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.modes: dict[int, bool] = {}
        self._rest = ""
        self.overflowed = False
        """True once text was written beyond the last column or row."""
        self._clear()

    def _clear(self) -> None:
        self._cells = [[" "] * self.columns for _ in range(self.rows)]
        self._x = self._y = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        if begun := _BEGUN.search(text):  # a sequence may arrive in two parts
            text, self._rest = text[: begun.start()], begun[0]
        for token in _TOKEN.finditer(text):
            if token["char"] is not None:
                self._put(token["char"])
                continue
            numbers = [int(number or 0) for number in token["numbers"].split(";")]
            if token["private"]:
                for number in numbers:
                    self.modes[number] = token["kind"] == "h"
            elif token["kind"] == "H":
                row, column = [*numbers, 0][:2]
                self._x, self._y = max(0, column - 1), max(0, row - 1)
            elif token["kind"] == "J":
                self._clear()
            else:
                assert token["kind"] == "m", f"unsupported sequence {token[0]!r}"

    def _put(self, char: str) -> None:
        if char == "\r":
            self._x = 0
        elif char == "\n":
            self._y += 1
        elif char != "\x1b":
            if self._x >= self.columns or self._y >= self.rows:
                self.overflowed = True
            else:
                self._cells[self._y][self._x] = char
            self._x += 1


class Terminal:
    """A command that runs in a pseudo-terminal."""

    def __init__(self, command: list[str], columns: int, rows: int, **environment: str) -> None:
        self.grid = Grid(columns, rows)
        self.written = ""
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored if the tests run in the background
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
            os.execvpe(command[0], command, {**kept, "TERM": "xterm-256color", **environment})
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a signal may truncate a character

    def attributes(self) -> list:
        """Return the attributes of the terminal, as printed by `stty`."""
        return termios.tcgetattr(self._descriptor)

    def resize(self, columns: int, rows: int) -> None:
        self.grid = Grid(columns, rows)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._descriptor, keys.encode())

    def read(self, timeout_s: float) -> bool:
        """Read output of the command; return False once it has closed the terminal."""
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            return True
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:
            return False
        part = self._decoder.decode(data)  # a character may arrive in two parts
        self.written += part
        self.grid.feed(part)
        return bool(data)

    def wait_for(self, shows: Callable[[Grid], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not shows(self.grid):
            assert time.monotonic() < deadline, "the screen shows:\n" + "\n".join(self.grid.lines)
            assert self.read(0.2), "the command exited; the screen shows:\n" + "\n".join(self.grid.lines)

    def end(self, timeout_s: float = 30.0) -> int:
        """Wait until the command exits; return its exit status, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.read(0.1)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the command did not exit"

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)
