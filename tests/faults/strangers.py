"""Clients that have no access to a service: unauthenticated sockets, invalid bytes and slow connections.

`python -m tests.faults.strangers HOST PORT COUNT` holds COUNT connections until it is killed: some send nothing, some
half a greeting, some half a handshake. Connections that the service closes are opened again.
"""

import pickle
import selectors
import socket
import sys
import time
from pathlib import Path

import zmq

from leeway.common.rpc.auth import RunKeys

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HALF_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(60)
"""First bytes of a command of 200 bytes."""
SLOW = (b"", GREETING[:10], GREETING, GREETING + _HALF_HELLO)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self):
        return open, (self._file, "w")


def pickled(file: Path) -> bytes:
    return pickle.dumps(Bomb(file))


def unauthenticated_sockets(keys: RunKeys) -> dict[str, dict]:
    """Return socket options by kind of unauthenticated client."""
    public, secret = zmq.curve_keypair()
    return {
        "wrong key": {
            "curve_serverkey": keys.clients.server.reveal(),
            "curve_publickey": public,
            "curve_secretkey": secret,
        },
        "no key": {},
        "PLAIN": {"plain_username": b"leeway", "plain_password": b"leeway"},
        "right key for a wrong server": {
            "curve_serverkey": public,
            "curve_publickey": keys.clients.public.reveal(),
            "curve_secretkey": keys.clients.secret.reveal(),
        },
    }


def garbage(file: Path) -> list[bytes]:
    """Return byte strings to write to a connection in place of a handshake."""
    return [
        b"GET / HTTP/1.1\r\nHost: leeway\r\n\r\n",
        pickled(file),
        GREETING[:12] + pickled(file),
        bytes(range(256)) * 64,
        b"\xff" * 4096,
        GREETING + b"\x04\xff" + bytes(255),
        GREETING + b"\x02" + (2**62).to_bytes(8, "big"),
    ]


def host_and_port(address: str) -> tuple[str, int]:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


def send_bytes(address: str, data: bytes) -> None:
    """Connect, send the bytes, and wait until the service closes the connection or 4 s have passed."""
    with socket.create_connection(host_and_port(address), timeout=4) as connection:
        try:
            connection.sendall(data)
            while connection.recv(4096):
                pass
        except OSError:
            return  # the service closed the connection during the send, or left it open for 4 s


def hold(host: str, port: int, count: int) -> None:
    """Keep `count` slow connections open, forever."""
    selector = selectors.DefaultSelector()
    number, num_open = 0, 0
    print("ready", flush=True)
    while True:
        while num_open < count:
            try:
                connection = socket.create_connection((host, port), timeout=2)
                connection.sendall(SLOW[number % len(SLOW)])
            except OSError:
                time.sleep(0.05)
                break
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
            number, num_open = number + 1, num_open + 1
        for key, _ in selector.select(0.2):
            try:
                is_over = not key.fileobj.recv(4096)
            except OSError:
                is_over = True
            if is_over:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                num_open -= 1


if __name__ == "__main__":
    hold(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
