"""InProcessShard: the client of one shard without sockets; the shard can be cut off and come back.

What answers are the real rules over a real store. While the shard is down requests wait, and are
answered in order when it is back: what `common.rpc.client` does by sending them again.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import msgspec

from buffer import protocol as p
from buffer import schema
from buffer.client import Draw, Granted
from buffer.errors import BufferRefused
from common.rpc.client import settle
from tests.world.buffer import InProcessBuffer


class Shard:
    """A store and its rules, for whichever clients there are."""

    def __init__(self, folder, facts, config):
        self.buffer = InProcessBuffer(folder, facts, config)
        self.number = facts.shard
        self.lock = threading.RLock()
        self.is_up = True
        self.goes_down_at = None
        """The kind of request at which it goes down, before it is answered."""
        self._waiting = []
        """(message, body, what reads the reply, future), in order."""

    def ask(self, message, read, body=b""):
        """A future of the reply."""
        future = Future()
        with self.lock:
            if self.goes_down_at is not None and isinstance(message, self.goes_down_at):
                self.is_up, self.goes_down_at = False, None
            self._waiting.append((message, body, read, future))
            self._work()
        return future

    def restart(self):
        """Come back as a new process would, and answer what waits."""
        with self.lock:
            self.buffer.restart()
            self.is_up, self.goes_down_at = True, None
            # Actors may find it before the learner, whose news it has missed.
            self._waiting.sort(key=lambda entry: not isinstance(entry[0], p.Push))
            self._work()

    def cut_off(self):
        with self.lock:
            self.is_up = False

    def forget(self, session):
        """A client is gone, and with it what it still wanted to say."""
        with self.lock:
            self._waiting = [each for each in self._waiting if not self._is_of(each[2], session)]

    @staticmethod
    def _is_of(read, session):
        return getattr(read, "session", None) == session

    def _work(self):
        """Answer what can be answered; a draw that is not ready waits, and holds up nobody."""
        is_done = False
        while self.is_up and not is_done:
            is_done = True
            for entry in list(self._waiting):
                message, body, read, future = entry
                try:
                    answer = self.buffer.answer(message, body)
                    if answer is None:
                        continue
                    result = read(answer)
                except BufferRefused as error:
                    result = error
                self._waiting.remove(entry)
                settle(future, result)
                is_done = is_done and isinstance(message, p.DrawRequest)


class InProcessShard:
    """What a `BufferClient` is to one shard."""

    def __init__(self, shard: Shard, *, role, name, session):
        self.shard, self.name, self.address = shard.number, name, f"shard-{shard.number}"
        self._to = shard
        self._role, self._session = role, session
        self._epoch, self._incarnation, self._requests, self._seq = 0, -1, 0, 0

    def _ask(self, message, read=None, body=b""):
        def reading(answer):
            return read(answer) if read else answer[0]

        reading.session = (self.name, self._session)
        return self._to.ask(message, reading, body)

    def hello(self):
        facts = self._to.buffer.facts

        def welcomed(answer):
            self._epoch = answer[0].epoch
            return answer[0]

        message = p.Hello(self._role, self.name, self._session, shard=facts.shard, num_shards=facts.num_shards)
        return self._ask(message, welcomed)

    def close(self, timeout_s=None):
        self._to.forget((self.name, self._session))

    def status(self):
        return self._ask(p.StatusRequest())

    def drain(self):
        return self._ask(p.Drain())

    def lease(self, max_groups, lane="", token_s=0.0, *, wants_lengths=False):
        def granted(answer):
            reply, body = answer
            return Granted(**msgspec.structs.asdict(reply), body=bytes(body))

        self._requests += 1
        asked = p.LeaseRequest(self.name, self._epoch, self._requests, max_groups, lane, token_s, wants_lengths)
        return self._ask(asked, granted)

    def hand_on(self, lease, sample_indices, there, *, goes_on=False):
        body = bytes(schema.encode(there, self._to.buffer.facts.run_id))
        message = p.HandOn(self.name, self._epoch, lease.lease_id, lease.attempt, list(sample_indices), goes_on)
        return self._ask(message, None, body)

    def push(self, trajectory):
        trajectory = replace(trajectory, actor=self.name, epoch=self._epoch, seq=self._seq)
        self._seq += 1
        body = bytes(schema.encode([trajectory], self._to.buffer.facts.run_id))
        return self._ask(p.Push(self.name, self._epoch), lambda answer: answer[0].results[0], body)

    def has_room(self, trajectory):
        return True

    def renew(self, lease_ids):
        return self._ask(p.Renew(self.name, self._epoch, list(lease_ids)))

    def begin_incarnation(self, version, step, *, at_least=0):
        def begun(answer):
            self._incarnation = answer[0].incarnation
            return answer[0]

        return self._ask(p.BeginIncarnation(self._session, version, step, at_least), begun)

    def offer(self, step, version, incarnation):
        return self._ask(p.PlanRequest(step, version, incarnation))

    def draw(self, step, version, incarnation, num_groups, wait_s, plan=None):
        def drawn(answer):
            reply, body = answer
            return Draw(**msgspec.structs.asdict(reply), body=bytes(body))

        return self._ask(p.DrawRequest(step, version, incarnation, num_groups, wait_s, dict(plan or {})), drawn)

    def step_finished(self, step, version, skipped=False, *, took_part=True):
        return self._ask(p.StepFinished(step, version, self._incarnation, skipped, took_part))

    def published(self, incarnation, version):
        return self._ask(p.Published(incarnation, version))

    def checkpoint_durable(self, step):
        return self._ask(p.CheckpointDurable(step, self._incarnation))
