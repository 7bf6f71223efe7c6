"""Free ports for processes that cannot choose their own."""

from __future__ import annotations

import random
import socket

_BELOW_THE_EPHEMERAL = range(20_000, 32_000)
"""Linux assigns ephemeral ports from 32,768 on: any connection could take a port found free there."""
_NUM_TRIES = 100


def free_port() -> int:
    """Return a free TCP port of loopback outside the ephemeral range."""
    chance = random.SystemRandom()  # with a seed, concurrent tests would choose the same port
    for _ in range(_NUM_TRIES):
        port = chance.choice(_BELOW_THE_EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(
        f"none of {_NUM_TRIES} ports between {_BELOW_THE_EPHEMERAL.start} and {_BELOW_THE_EPHEMERAL.stop} is free"
    )
