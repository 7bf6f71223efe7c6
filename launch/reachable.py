"""Does somebody listen at an address? Asked before anything that would wait for long."""

from __future__ import annotations

import socket
from contextlib import closing

CONNECT_S = 3.0


def answers(address: str, limit_s: float = CONNECT_S) -> bool:
    """Does somebody listen there?

    Args:
        address: HOST:PORT, or ray://HOST:PORT.
        limit_s: how long the connection may take.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s)):
            return True
    except (OSError, ValueError, OverflowError):
        return False
