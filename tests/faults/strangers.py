"""Those who have no business with a service: by their sockets, by what they say, and by how slowly they say it.

`python -m tests.faults.strangers HOST PORT COUNT` holds so many connections until it is ended: some say nothing, some
half a greeting, some half a handshake. Those that are cut off come again.
"""

import pickle
import selectors
import socket
import sys
import time
from pathlib import Path

import zmq

from common.rpc.auth import RunKeys

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HALF_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(60)
"""Of a command of 200 bytes."""
SLOW = (b"", GREETING[:10], GREETING, GREETING + _HALF_HELLO)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self):
        return open, (self._file, "w")


def pickled(file: Path) -> bytes:
    return pickle.dumps(Bomb(file))


def sockets_of_strangers(keys: RunKeys) -> dict[str, dict]:
    """By who they are: the options of their sockets."""
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
    """What is written to a connection without any handshake."""
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


def say(address: str, words: bytes) -> None:
    """Connect, say it, and wait until the service hangs up or 4 s have passed."""
    with socket.create_connection(host_and_port(address), timeout=4) as stranger:
        try:
            stranger.sendall(words)
            while stranger.recv(4096):
                pass
        except OSError:
            return  # it hung up while we spoke, or does not


def hold(host: str, port: int, count: int) -> None:
    """Keep `count` slow connections, for ever."""
    selector = selectors.DefaultSelector()
    number, num_open = 0, 0
    print("ready", flush=True)
    while True:
        while num_open < count:
            try:
                stranger = socket.create_connection((host, port), timeout=2)
                stranger.sendall(SLOW[number % len(SLOW)])
            except OSError:
                time.sleep(0.05)
                break
            stranger.setblocking(False)
            selector.register(stranger, selectors.EVENT_READ)
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
