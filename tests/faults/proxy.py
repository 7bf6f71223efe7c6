"""A proxy between clients and the service that randomly delays, reorders and duplicates messages in both directions."""

import heapq
import itertools
import random
import threading
import time

import zmq


class Proxy:
    """Context manager of a proxy bound to `address`, with one connection to the service for each client."""

    def __init__(self, service_address: str, *, seed: int, max_delay_s: float = 0.05, duplicates: float = 0.2) -> None:
        """Args:
        service_address: address to which messages are forwarded.
        seed: seed of all random choices.
        max_delay_s: maximum delay of a message; delays are uniform, so messages overtake one another.
        duplicates: share of messages that are forwarded twice, each copy with its own delay.
        """
        self._service_address = service_address
        self._chance = random.Random(seed)
        self._max_delay_s, self._duplicates = max_delay_s, duplicates
        self._context = zmq.Context()
        self._front = self._socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.address = self._front.getsockopt_string(zmq.LAST_ENDPOINT)
        self._backs: dict[bytes, zmq.Socket] = {}
        self._waiting: list[tuple[float, int, zmq.Socket, list[bytes]]] = []
        self._numbers = itertools.count()
        self._newest_passed: dict[tuple[zmq.Socket, bytes], int] = {}
        self._stop = threading.Event()
        self.num_messages = self.num_duplicated = self.num_overtaken = 0
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        for socket in (self._front, *self._backs.values()):
            socket.close()
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(0)
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._stop.is_set():
            due_in_s = self._waiting[0][0] - time.monotonic() if self._waiting else 0.2
            for socket, _ in poller.poll(max(0.0, min(due_in_s, 0.2)) * 1000):
                self._take(socket, poller)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                self._forward()

    def _take(self, socket: zmq.Socket, poller: zmq.Poller) -> None:
        frames = socket.recv_multipart()
        if socket is self._front:
            client, *message = frames
            if client not in self._backs:
                back = self._backs[client] = self._socket(zmq.DEALER)
                back.connect(self._service_address)
                poller.register(back, zmq.POLLIN)
            self._delay(self._backs[client], message)
        else:
            client = next(client for client, back in self._backs.items() if back is socket)
            self._delay(self._front, [client, *frames])

    def _delay(self, target: zmq.Socket, frames: list[bytes]) -> None:
        self.num_messages += 1
        copies = 2 if self._chance.random() < self._duplicates else 1
        self.num_duplicated += copies - 1
        number = next(self._numbers)
        for _ in range(copies):
            due = time.monotonic() + self._chance.uniform(0.0, self._max_delay_s)
            heapq.heappush(self._waiting, (due, number, target, frames))

    def _forward(self) -> None:
        _, number, target, frames = heapq.heappop(self._waiting)
        way = (target, frames[0] if target is self._front else b"")
        newest = self._newest_passed.get(way, -1)
        self.num_overtaken += number < newest
        self._newest_passed[way] = max(number, newest)
        target.send_multipart(frames)
