"""CURVE keys for the sockets of a run, and the authenticator of a service, which admits only clients with a key.

A run has one key pair for its services and one for its clients. Holders of the client keys can connect to all services
of the run; any other connection is refused in the handshake, before a byte of a message is read.
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

WARN_EVERY_S = 60.0
"""Minimum seconds between two warnings about refused keys."""
BURST_S = 1.0
"""Seconds from the first refused key of a burst to the warning that counts the burst."""
HANDSHAKE_S = 2.0
"""Handshake timeout in seconds; limits idle unauthenticated connections."""
LOOPBACK = "127.0.0.1"
_DESCRIPTORS = 2**16
_NUM_KEY_CHARACTERS = 40
_ZAP_DOMAIN = b"leeway"
_NUM_ZAP_FRAMES = 7
"""Number of frames: version, request, domain, address, identity, mechanism, and the client's public CURVE key."""


class Key:
    """A key that is not printed by accident: only `reveal` returns its characters."""

    __slots__ = ("_characters",)

    def __init__(self, characters: bytes) -> None:
        """Wrap a key of 40 Z85 characters, the format of zmq; raise ValueError without the key for a wrong length."""
        if len(characters) != _NUM_KEY_CHARACTERS:
            raise ValueError(f"a CURVE key has {_NUM_KEY_CHARACTERS} characters, got {len(characters)}")
        self._characters = characters

    def reveal(self) -> bytes:
        return self._characters

    def is_same(self, raw: bytes) -> bool:
        return hmac.compare_digest(z85.decode(self._characters), raw)

    def __repr__(self) -> str:
        return "Key(hidden)"

    def __reduce__(self) -> tuple[type[Key], tuple[bytes]]:
        return Key, (self._characters,)  # Ray sends keys to the processes of the run


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """Keys of a client of the run's services."""

    server: Key
    public: Key
    secret: Key

    def lock(self, client: zmq.Socket[bytes]) -> None:
        """Restrict a socket to the services of the run; call this before the socket connects."""
        client.curve_serverkey = self.server.reveal()
        client.curve_publickey = self.public.reveal()
        client.curve_secretkey = self.secret.reveal()


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """Keys of a service of the run."""

    secret: Key
    client: Key
    """Public key of the run's clients."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run. Generated at every start of a run; never written to disk."""

    services: ServiceKeys
    clients: ClientKeys

    @classmethod
    def make(cls) -> RunKeys:
        """Generate new keys; raise RuntimeError if the installed libzmq lacks CURVE."""
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


class CurveAuthenticator(ThreadAuthenticator):
    """Admits holders of the run's client key; counts and logs all other keys.

    libzmq queries the authenticator for each key (ZAP, https://rfc.zeromq.org/spec/27/). Connections without a key
    fail in the handshake.
    """

    def __init__(self, service: zmq.Socket[bytes], keys: ServiceKeys, name: str) -> None:
        """Start the only authenticator of a context, before the socket binds; `name` is the service in log lines.

        Call `stop` once the service's socket is closed.
        """
        super().__init__(service.context)
        self._keys = keys
        self._name = name
        self._num_unlogged = 0
        self._last_address = ""
        self._warn_at = -math.inf
        self.num_refused = 0
        _raise_descriptor_limit()
        service.curve_server = True
        service.curve_secretkey = keys.secret.reveal()
        service.zap_domain = _ZAP_DOMAIN
        service.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, refuse all connections
        service.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        self.start()

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Reply whether the holder of a key may connect."""
        is_ours = len(msg) == _NUM_ZAP_FRAMES and msg[5] == b"CURVE" and self._keys.client.is_same(msg[6])
        status = (b"200", b"OK") if is_ours else (b"400", b"not of this run")
        # reply before any step that can fail: libzmq sends no further query until this query is answered
        self.zap_socket.send_multipart([msg[0], msg[1], *status, b"", b""])
        if not is_ours:
            self._count_refusal(msg[3].decode(errors="replace") if len(msg) > 3 else "")

    def _count_refusal(self, address: str) -> None:
        self.num_refused += 1
        self._num_unlogged += 1
        self._last_address = address or "an unknown address"
        if self._num_unlogged == 1:
            delay_s = max(BURST_S, self._warn_at - time.monotonic())
            asyncio.get_running_loop().call_later(delay_s, self._log_burst)

    def _log_burst(self) -> None:
        log.warning(
            "%s refused %d connections whose key is not of this run, most recently from %s. This warning "
            "appears at most once per %g s",
            self._name,
            self._num_unlogged,
            self._last_address,
            WARN_EVERY_S,
        )
        self._num_unlogged = 0
        self._warn_at = time.monotonic() + WARN_EVERY_S

    def stop(self) -> None:
        """Stop the thread, and log the refused keys that are not yet logged."""
        super().stop()
        if self._num_unlogged:
            self._log_burst()


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files: each unauthenticated connection uses a descriptor until its handshake ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    desired = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < desired:
        resource.setrlimit(resource.RLIMIT_NOFILE, (desired, hard))
