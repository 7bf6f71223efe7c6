"""Ports for a test to give to a process that does not choose its own."""

from __future__ import annotations

import random
import socket

_BELOW_THE_EPHEMERAL = range(20_000, 32_000)
"""Linux takes the ports of its own choice from 32,768 on: what a test has found free there, any connection may get."""
_NUM_TRIES = 100


def free_port() -> int:
    """A TCP port of loopback that nobody has and that the system gives to nobody by itself."""
    chance = random.SystemRandom()  # two tests beside each other would choose the same by a seed
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
