"""Closed doors: CURVE keys for the sockets of a run, and the doorkeeper of a service that lets only their holders in.

A run has one key pair for its services and one for its clients. Whoever has the second may talk to all services of
the run; everybody else is refused in the handshake, before a byte of a message is read.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

COMPLAIN_EVERY_S = 60.0
HANDSHAKE_S = 2.0
"""Who has not shown a key after so long is cut off, so that silent strangers cannot use up a service's descriptors."""
LOOPBACK = "127.0.0.1"
_GATHER_S = 1.0
_GOODBYE_S = 10.0
_DESCRIPTORS = 2**16
_NUM_KEY_CHARACTERS = 40
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"leeway"
_NUM_ZAP_FRAMES = 7
"""Version, request, domain, address, identity, mechanism, and of CURVE one credential: the client's public key."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (unix(7))."""
_NO_KEY, _WRONG_KEY = "no key, or no handshake of CURVE", "a key that is not of this run"


class Key:
    """A key that nothing prints by accident: its characters are had from `reveal` alone."""

    __slots__ = ("_characters",)

    def __init__(self, characters: bytes) -> None:
        """From 40 characters of Z85, as zmq takes them.

        Raises:
            ValueError: it is no key; the text does not show it.
        """
        if len(characters) != _NUM_KEY_CHARACTERS:
            raise ValueError(f"a CURVE key has {_NUM_KEY_CHARACTERS} characters, and this one {len(characters)}")
        self._characters = characters

    def reveal(self) -> bytes:
        """The 40 characters, for a socket's option."""
        return self._characters

    def is_same(self, raw: bytes) -> bool:
        """Is it this key? The handshake has 32 bytes of it."""
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
    """Public key of the run's clients: nobody else is let in."""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run. Every start of a run makes its own; they are never written down."""

    services: ServiceKeys
    clients: ClientKeys

    @classmethod
    def make(cls) -> RunKeys:
        """New ones, by libsodium's random numbers or those of the system.

        Raises:
            RuntimeError: the installed libzmq has no CURVE.
        """
        if not zmq.has("curve"):
            raise RuntimeError("the installed pyzmq was built without CURVE; install its wheel from the package index")
        (server, server_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(
            ServiceKeys(Key(server_secret), Key(client)), ClientKeys(Key(server), Key(client), Key(client_secret))
        )


def is_loopback(host: str) -> bool:
    """Does this address mean this machine alone?"""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


class Doorkeeper:
    """Lets the holders of the run's client key in, counts everybody else, and names them in the log.

    A thread: it answers libzmq's question about each key (ZAP, https://rfc.zeromq.org/spec/27/), and follows the
    socket's own events for those who never show one. zmq.auth's authenticator is not used because it neither tells
    who was refused nor sees who shows no key.
    """

    def __init__(
        self, service: zmq.Socket[bytes], keys: ServiceKeys, who: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start, before the socket binds; its context must have no other ZAP handler. The log names the service so."""
        self._keys = keys
        self._who = who
        self._clock = clock
        self.num_refused: Counter[str] = Counter()
        """By reason."""
        self._untold: Counter[str] = Counter()
        self._last_address = ""
        self._complain_at = 0.0
        self._open: dict[int, str] = {}
        """Descriptor -> the peer's address, of connections in the order in which they came."""
        self._num_welcome = 0
        """Of those, how many have shown their key. Which they are, libzmq does not say."""
        self._num_shown_wrong = 0
        """Of the others, how many have shown a wrong one and are counted."""
        self._has_failed = False
        """The connection whose end is told next."""
        _raise_descriptor_limit()
        service.curve_server = True
        service.curve_secretkey = keys.secret.reveal()
        service.zap_domain = _ZAP_DOMAIN
        service.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler nobody comes in, instead of everybody
        service.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
        context = service.context
        self._questions = context.socket(zmq.REP)
        self._questions.linger = 0
        self._questions.bind(_ZAP_ADDRESS)
        self._events = service.get_monitor_socket(_WATCHED)
        self._bell, self._bell_inside = (context.socket(zmq.PAIR) for _ in range(2))
        self._bell.bind(f"inproc://doorkeeper-{id(self)}")
        self._bell_inside.connect(f"inproc://doorkeeper-{id(self)}")
        self._thread = threading.Thread(target=self._run, name=f"{who} door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; after the service's socket is closed: who came before would be refused. Twice is fine."""
        if self._bell.closed:
            return
        with contextlib.suppress(zmq.Again):  # the thread is gone already
            self._bell.send(b"", zmq.NOBLOCK)
        self._thread.join(_GOODBYE_S)
        self._bell.close(0)

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            for each in (self._questions, self._events, self._bell_inside):
                each.close(0)

    def _keep(self) -> None:
        poller = zmq.Poller()
        for each in (self._questions, self._events, self._bell_inside):
            poller.register(each, zmq.POLLIN)
        while True:
            wait_s = max(0.0, self._complain_at - self._clock()) if self._untold else None
            ready = dict(poller.poll(None if wait_s is None else int(wait_s * 1000) + 1))
            if self._bell_inside in ready:
                return
            try:
                # events first: who asks has come by now, and whoever went before that must not go in this one's stead
                self._follow()
                if self._questions in ready:
                    self._answer()
                self._complain()
            except Exception:  # without its thread the door would be shut for the run's own clients too
                log.exception("the door of %s failed at one thing and goes on; strangers may be miscounted", self._who)

    def _answer(self) -> None:
        """Libzmq asks whether the holder of a key may come in."""
        frames = self._questions.recv_multipart()
        is_ours = len(frames) == _NUM_ZAP_FRAMES and frames[5] == b"CURVE" and self._keys.client.is_same(frames[6])
        status = (b"200", b"OK") if is_ours else (b"400", b"not of this run")
        # before anything that could fail: a question without its answer would be the last one
        self._questions.send_multipart([frames[0], frames[1], *status, b"", b""])
        if not is_ours:
            self._num_shown_wrong += 1
            self._refused(_WRONG_KEY, frames[3].decode(errors="replace") if len(frames) > 3 else "")

    def _follow(self) -> None:
        """Connections come, prove themselves or fail, and go; a failure is followed by its connection's end."""
        while self._events.poll(0):
            told = recv_monitor_message(self._events)
            event, value = told["event"], told["value"]
            if event == zmq.EVENT_ACCEPTED:
                self._open[value] = _peer_of(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_welcome += 1
            elif event & _FAILED:
                self._has_failed = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._gone(value)

    def _gone(self, descriptor: int) -> None:
        place = list(self._open).index(descriptor) if descriptor in self._open else len(self._open)
        address = self._open.pop(descriptor, "")
        # cut off for its very first bytes is no failed handshake to libzmq, but the end of one that was not welcome yet
        if self._has_failed or place >= self._num_welcome:
            if self._num_shown_wrong:
                self._num_shown_wrong -= 1
            else:
                self._refused(_NO_KEY, address)
        self._has_failed = False
        self._num_welcome = min(self._num_welcome, len(self._open))
        self._num_shown_wrong = min(self._num_shown_wrong, len(self._open) - self._num_welcome)

    def _refused(self, reason: str, address: str) -> None:
        if not self._untold:  # a moment later, so that one line tells of all who come together
            self._complain_at = max(self._complain_at, self._clock() + _GATHER_S)
        self.num_refused[reason] += 1
        self._untold[reason] += 1
        self._last_address = address or self._last_address

    def _complain(self) -> None:
        if not self._untold or self._clock() < self._complain_at:
            return
        counts = ", ".join(f"{count} with {reason}" for reason, count in self._untold.items())
        where = self._last_address or "an address that was gone before it could be read"
        log.warning(
            "%s refused strangers: %s; the last one from %s. Clients of this run hold its key; others have no business "
            "here. Said at most once in %g s",
            self._who,
            counts,
            where,
            COMPLAIN_EVERY_S,
        )
        self._untold.clear()
        self._last_address = ""
        self._complain_at = self._clock() + COMPLAIN_EVERY_S


def _raise_descriptor_limit() -> None:
    """Strangers hold a descriptor each until they are cut off; the usual 1,024 of a process would be few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _peer_of(descriptor: int) -> str:
    """The address at the other end; empty where it is gone. For people: the descriptor may be another's by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return ""
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # it is no socket any more, and the copy is still ours
        os.close(copy)
        return ""
    with connection, contextlib.suppress(OSError):
        if connection.family == socket.AF_UNIX:
            process, user, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            return f"process {process} of user {user}"
        return str(connection.getpeername()[0]) if connection.family in _INTERNET else ""
    return ""
