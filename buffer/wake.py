"""Wake: lets a thread that polls sockets look around."""

from __future__ import annotations

import contextlib
import os
import threading


class Wake:
    """A pipe to poll beside sockets. `set` is for any thread, the rest for the one that polls `fd`."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._is_closed = False

    def set(self) -> None:
        """Make `fd` readable; after `close` there is nobody to wake."""
        # Under the lock, for after `close` the number of the pipe may be that of another file.
        with self._lock, contextlib.suppress(BlockingIOError):  # full of wake-ups already
            if not self._is_closed:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Take all wake-ups out."""
        try:
            while os.read(self.fd, 4096):
                continue
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the pipe back."""
        with self._lock:
            self._is_closed = True
            os.close(self.fd)
            os.close(self._write)
