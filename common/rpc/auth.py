"""CURVE keys for the sockets of a run, and the doorkeeper of a service that lets only their holders in.

A run has one key pair for its services and one for its clients. Holders of the second may talk to all services of the
run; any other connection is refused in the handshake, before a byte of a message is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import math
import resource
import time
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0
"""Least seconds between two lines about refused keys."""
BURST_S = 1.0
"""Seconds from the first key of a burst to the line that counts it."""
HANDSHAKE_S = 2.0
"""Handshake timeout; limits idle unauthenticated connections."""
LOOPBACK = "127.0.0.1"
_DESCRIPTORS = 2**16
_NUM_KEY_CHARACTERS = 40
_ZAP_DOMAIN = b"leeway"
_NUM_ZAP_FRAMES = 7
"""Version, request, domain, address, identity, mechanism, and of CURVE the client's public key."""


class Key:
    """A key that nothing prints by accident: its characters are had from `reveal` alone."""

    __slots__ = ("_characters",)

    def __init__(self, characters: bytes) -> None:
        """Take 40 characters of Z85, as zmq does; ValueError, which does not show them, if they are no key."""
        if len(characters) != _NUM_KEY_CHARACTERS:
            raise ValueError(f"a CURVE key has {_NUM_KEY_CHARACTERS} characters, and this one {len(characters)}")
        self._characters = characters

    def reveal(self) -> bytes:
        return self._characters

    def is_same(self, raw: bytes) -> bool:
        return hmac.compare_digest(z85.decode(self._characters), raw)

    def __repr__(self) -> str:
        return "Key(hidden)"

    def __reduce__(self) -> tuple[type[Key], tuple[bytes]]:
        return Key, (self._characters,)  # Ray carries it to the processes of the run


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client of the run's services has."""

    server: Key
    public: Key
    secret: Key

    def lock(self, client: zmq.Socket[bytes]) -> None:
        """Let this socket talk to the run's services alone; before it connects."""
        client.curve_serverkey = self.server.reveal()
        client.curve_publickey = self.public.reveal()
        client.curve_secretkey = self.secret.reveal()


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """What a service of the run has."""

    secret: Key
    client: Key
    """Public key of the run's clients."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run. Every start of a run makes its own; they are never written down."""

    services: ServiceKeys
    clients: ClientKeys

    @classmethod
    def make(cls) -> RunKeys:
        """Make new ones; RuntimeError if the installed libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise RuntimeError("the installed pyzmq was built without CURVE; install its wheel from the package index")
        (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(
            ServiceKeys(Key(server_secret), Key(client)), ClientKeys(Key(server), Key(client), Key(client_secret))
        )


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


class Doorkeeper(ThreadAuthenticator):
    """Lets the holders of the run's client key in, and counts and logs keys that are not of the run.

    libzmq asks about each key (ZAP, https://rfc.zeromq.org/spec/27/). Connections without one fail in the handshake.
    """

    def __init__(self, service: zmq.Socket[bytes], keys: ServiceKeys, who: str) -> None:
        """Start before the socket binds, in a context without another ZAP handler; the log calls the service `who`.

        Call `stop` once the service's socket is closed.
        """
        super().__init__(service.context)
        self._keys = keys
        self._who = who
        self._num_unlogged = 0
        self._last_address = ""
        self._complain_at = -math.inf
        self.num_refused = 0
        _raise_descriptor_limit()
        service.curve_server = True
        service.curve_secretkey = keys.secret.reveal()
        service.zap_domain = _ZAP_DOMAIN
        service.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody comes in, instead of everybody
        service.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self.start()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer whether the holder of a key may connect."""
        is_ours = len(msg) == _NUM_ZAP_FRAMES and msg[5] == b"CURVE" and self._keys.client.is_same(msg[6])
        status = (b"200", b"OK") if is_ours else (b"400", b"not of this run")
        # before anything that could fail: a question without its answer would be the last one
        self.zap_socket.send_multipart([msg[0], msg[1], *status, b"", b""])
        if not is_ours:
            self._refused(msg[3].decode(errors="replace") if len(msg) > 3 else "")

    def _refused(self, address: str) -> None:
        self.num_refused += 1
        self._num_unlogged += 1
        self._last_address = address or "an unknown address"
        if self._num_unlogged == 1:
            delay_s = max(BURST_S, self._complain_at - time.monotonic())
            asyncio.get_running_loop().call_later(delay_s, self._log_burst)

    def _log_burst(self) -> None:
        log.warning(
            "%s refused strangers: %d with a key that is not of this run, the last one from %s. Logged at most once in "
            "%g s",
            self._who,
            self._num_unlogged,
            self._last_address,
            COMPLAIN_EVERY_S,
        )
        self._num_unlogged = 0
        self._complain_at = time.monotonic() + COMPLAIN_EVERY_S

    def stop(self) -> None:
        """End the thread, and log what is left of a burst."""
        super().stop()
        if self._num_unlogged:
            self._log_burst()


def _raise_descriptor_limit() -> None:
    """Strangers hold a descriptor each until they are cut off; the usual 1,024 of a process would be few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
