"""One client of three services over real sockets, in threads of one process."""

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from buffer import client as client_module
from buffer import service as service_module
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.errors import BufferRefused, BufferUnavailable, StoreFull
from buffer.schema import HANDED_ON
from buffer.service import BufferService
from buffer.sharding.client import ShardedClient, open_client
from buffer.sharding.shards import Shard
from tests.trajectories import decode
from tests.world.buffer import facts, make_trajectory
from tests.world.waiting import wait_until

CONFIG = BufferConfig(give_up_after_s=60.0, shards=3)


class Services:
    """Three services; each answers unless it is told to pause."""

    def __init__(self, folder, num_shards=3, config=CONFIG, **changes):
        self._over = threading.Event()
        self._paused = [threading.Event() for _ in range(num_shards)]
        self._stands_still = [threading.Event() for _ in range(num_shards)]
        self.services = []
        self.addresses = []
        for shard in range(num_shards):
            run = facts(num_prompts=90, groups_per_step=6, shard=shard, num_shards=num_shards, **changes)
            self.services.append(BufferService(config, run, folder / f"shard-{shard}"))
            self.addresses.append(self.services[-1].bind())
        self._threads = [threading.Thread(target=self._serve, args=(shard,)) for shard in range(num_shards)]
        for thread in self._threads:
            thread.start()

    def _serve(self, shard):
        try:
            while not self._over.is_set():
                if self._paused[shard].is_set():
                    self._stands_still[shard].set()
                    time.sleep(0.01)
                else:
                    self.services[shard].turn()
        finally:
            self.services[shard].close()

    def pause(self, shard):
        """From now on it answers nothing."""
        self._stands_still[shard].clear()
        self._paused[shard].set()
        assert self._stands_still[shard].wait(60)

    def resume(self, shard):
        self._paused[shard].clear()

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def services(tmp_path):
    made = Services(tmp_path)
    yield made
    made.close()


def opened(addresses, name="actor-0", role="actor", patience_s=60.0):
    """A client of all shards, to which one is silent only after so long."""
    client = open_client(addresses, run_id="r", role=role, name=name, config=CONFIG)
    for shard in client._shards:
        shard._patience_s = patience_s
    return client


@pytest.fixture
def connect(services):
    clients = []

    def make(name="actor-0", role="actor", addresses=None, **patience):
        clients.append(opened(addresses or services.addresses, name, role, **patience))
        clients[-1].connect()
        return clients[-1]

    yield make
    for client in clients:
        client.close(0.5)


@pytest.fixture
def learner(connect):
    learner = connect("learner", "learner")
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    return learner


def generate(actor, leases, reward=1.0):
    pushed = [actor.push(make_trajectory(lease, index, seq=0, reward=reward)) for lease in leases for index in (0, 1)]
    return [future.result(60).outcome for future in pushed]


def test_what_is_handed_on_comes_with_the_next_leases_of_its_shard(connect, learner, monkeypatch):
    monkeypatch.setattr(client_module, "message_room", lambda: 400)  # one sample fits a message
    actor, other = connect(), connect("actor-1")
    leases = actor.lease(6).result(60).leases
    for lease in leases[:5]:
        rows = [make_trajectory(lease, i, seq=0, reward=None, num_completion_tokens=1 + i) for i in (0, 1)]
        rows = [replace(row, finish_reason=HANDED_ON) for row in rows]
        actor.hand_on(lease, [0, 1], rows[1:] if lease is leases[0] else rows).result(60)
    granted = other.lease(5).result(60)
    assert {lease.group_id for lease in granted.leases} == {lease.group_id for lease in leases[:5]}
    assert len({lease.lease_id % 3 for lease in granted.leases}) > 1
    prefixes = granted.prefixes()
    lengths = {(lease.group_id, i): len(prefixes[lease.lease_id, i].token_ids) for lease in granted.leases
               for i in lease.prefixes}  # fmt: skip
    first, *others = [lease.group_id for lease in leases[:5]]
    assert lengths == {(first, 1): 2, **{(group, i): 1 + i for group in others for i in (0, 1)}}
    ledger = learner.status().result(60).ledger
    assert (ledger["handed_on"], ledger["gap"]) == (10, 0)


def test_one_address_needs_no_view(services):
    client = open_client(services.addresses[:1], run_id="r", role="actor", name="actor-0", config=CONFIG)
    assert isinstance(client, BufferClient)
    with pytest.raises(BufferRefused, match="this is shard 0 of 3"):
        client.connect()
    client.close(0.5)


def test_addresses_in_another_order_are_refused(connect, services):
    with pytest.raises(BufferRefused, match="give the addresses of all shards in their order"):
        connect(addresses=services.addresses[::-1])


def test_leases_come_from_all_shards_and_what_is_made_of_them_finds_its_shard(connect, learner):
    actor = connect()
    leases = actor.lease(9).result(60).leases
    assert sorted({lease.lease_id % 3 for lease in leases}) == [0, 1, 2]
    assert len(leases) == 9
    assert set(generate(actor, leases[:6])) == {"committed"}
    assert actor.renew([lease.lease_id for lease in leases[6:]] + [10**9]).result(60).lost == [10**9]
    for lease in leases[6:]:
        actor.give_up(lease, [0, 1], "no reason").result(60)
    status = learner.status().result(60)
    assert status.ledger["committed"] == 12
    assert status.failed_by_reason == {"no reason": 6}
    assert status.ledger["gap"] == 0


def test_one_group_at_a_time_comes_from_each_shard_in_turn(connect, learner):
    actor = connect()
    shards = [actor.lease(1).result(60).leases[0].lease_id % 3 for _ in range(6)]
    assert sorted(shards) == [0, 0, 1, 1, 2, 2]


def test_a_step_is_one_batch_in_the_order_of_the_shards_and_scores_find_their_records(connect, learner):
    actor = connect()
    waiting = learner.draw(1, 0, 0, 6, 0.2).result(60)
    assert not waiting.ready
    assert "step 1 has 0 of 6 groups; shard 0 has 0" in waiting.waiting_for
    generate(actor, actor.lease(12).result(60).leases)
    batch = learner.draw(1, 0, 0, 6, 60.0).result(60)
    assert batch.ready
    assert learner.draw(1, 0, 0, 6, 60.0).result(60).record_ids == batch.record_ids
    shards = [record % 3 for record in batch.record_ids]
    assert shards == sorted(shards)
    assert set(shards) == {0, 1, 2}
    assert [row.group_id for row in decode(batch.body)] == [group for group in batch.group_ids for _ in range(2)]
    assert batch.lengths == [len(row.token_ids) for row in decode(batch.body)]
    assert batch.ledger["drawn"] == 12
    scores = [np.full(4, -record, np.float32) for record in batch.record_ids]
    learner.write_scores(batch.record_ids, scores).result(60)
    again = learner.draw(1, 0, 0, 6, 60.0).result(60)
    assert [row.reference_logprobs[0] for row in decode(again.body)] == [-record for record in batch.record_ids]
    learner.step_finished(1, 1).result(60)
    assert learner.status().result(60).ledger["trained"] == 12


def test_a_silent_shard_is_left_out_named_and_told_in_order_when_it_answers(connect, learner, services):
    actor = connect()
    while leases := actor.lease(24).result(60).leases:
        generate(actor, leases)
    assert learner.status().result(60).ledger["committed"] == 48
    silent = learner._shards[1]
    silent._patience_s = 0.3
    services.pause(1)
    for step in (1, 2):
        batch = learner.draw(step, step - 1, 0, 6, 60.0).result(60)
        assert batch.ready, batch.waiting_for
        assert 1 not in {group % 3 for group in batch.group_ids}
        learner.step_finished(step, step).result(60)
        learner.published(0, step).result(60)
    before = learner.status().result(60)
    assert before.silent_shards == [1]
    assert before.ledger["committed"] == 48, "what is known of a silent shard still counts"
    waiting = learner.draw(3, 2, 0, 6, 0.1).result(60)
    assert f"shard 1: no answer from {services.addresses[1]}" in waiting.waiting_for
    services.resume(1)
    silent._patience_s = 60.0
    batch = learner.draw(3, 2, 0, 6, 60.0).result(60)
    assert 1 in {group % 3 for group in batch.group_ids}
    learner.step_finished(3, 3).result(60)
    after = learner.status().result(60)
    assert (after.silent_shards, after.version, after.ledger["gap"]) == ([], 3, 0)


def test_a_learner_waits_for_every_shard_before_it_begins(connect, services):
    services.pause(2)
    learner = connect("learner", "learner", patience_s=0.5)
    begun = learner.begin_incarnation(0, 0)
    with pytest.raises(TimeoutError):
        begun.result(1.0)
    services.resume(2)
    assert begun.result(60).incarnation == 0


def test_leases_that_a_silent_shard_granted_late_are_not_lost(connect, learner, services):
    actor = connect()
    actor._shards[2]._patience_s = 0.3
    services.pause(2)
    first = actor.lease(6).result(60).leases
    assert {lease.lease_id % 3 for lease in first} == {0, 1}
    services.resume(2)
    late = []

    def somebody_has_each():
        late.extend(actor.lease(1).result(60).leases)
        in_flight = learner.status().result(60).ledger["in_flight"]
        return 2 in {lease.lease_id % 3 for lease in late} and in_flight == 2 * (len(first) + len(late))

    wait_until(somebody_has_each, "every lease to be somebody's")


def test_while_all_shards_that_know_an_actor_are_silent_its_client_goes_on_and_says_what_went_wrong(
    connect, learner, services
):
    actor = connect()
    stranger, *others = actor._shards
    stranger.is_connected = False
    for shard in others:
        shard._patience_s = 0.1
        services.pause(shard.number)
    waiting = actor.lease(1)
    time.sleep(0.3)
    assert actor.renew([]).result(60).lost == []
    assert not waiting.done()
    actor._shards.late_error = BufferRefused("shard 0: it serves another run")
    with pytest.raises(BufferRefused, match="another run"):
        waiting.result(60)
    for shard in others:
        services.resume(shard.number)


def test_a_shard_without_credit_holds_up_no_push_to_another(tmp_path, monkeypatch):
    """Rows of 320 kB, of which a client may have 1 MiB unacknowledged at each shard."""
    monkeypatch.setattr(service_module, "INBOX_BYTES", 2**20)
    services = Services(tmp_path, max_tokens=40_003, vocab_size=50_000, max_lag="unbounded")
    actor, learner = (opened(services.addresses, name, name) for name in ("actor", "learner"))
    actor.connect()
    learner.connect()
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    leases = actor.lease(15).result(60).leases
    services.pause(2)
    pushed = [
        (lease.lease_id % 3, actor.push(make_trajectory(lease, index, seq=0, num_completion_tokens=40_000)))
        for lease in sorted(leases, key=lambda lease: -(lease.lease_id % 3))
        for index in (0, 1)
    ]
    assert len([shard for shard, _ in pushed if shard == 2]) > 4
    assert {future.result(60).outcome for shard, future in pushed if shard != 2} == {"committed"}
    assert not any(future.done() for shard, future in pushed if shard == 2)
    services.resume(2)
    # on a slow machine the shard sleeps for longer than a client waits before it sends again
    assert {future.result(60).outcome for shard, future in pushed if shard == 2} <= {"committed", "duplicate"}
    actor.close(0.5)
    learner.close(0.5)
    services.close()


def test_pushes_without_credit_fail_when_the_client_is_closed(connect, learner):
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    actor._shards[lease.lease_id % 3].client.has_room = lambda _: False
    waiting = actor.push(make_trajectory(lease, 0, seq=0))
    actor.close(0.2)
    with pytest.raises(BufferUnavailable):
        waiting.result(60)
    with pytest.raises(BufferUnavailable, match="closed"):
        actor.push(make_trajectory(lease, 0, seq=0))


class Limited:
    """A client with credit for one row more, which two threads meet in."""

    shard, address = 0, "tcp://h:1"

    def __init__(self):
        self.room, self._both = 1, threading.Barrier(2)

    def meet(self):
        with suppress(threading.BrokenBarrierError):
            self._both.wait(0.3)

    def has_room(self, trajectory):
        room = self.room
        self.meet()
        return room > 0

    def push(self, trajectory):
        assert self.room > 0, "it would block"
        if trajectory == "broken":
            raise AttributeError("it has no tokens")
        self.room -= 1
        pushed = Future()
        pushed.set_result(trajectory)
        return pushed


class Meeting(deque):
    """In which two threads append at once."""

    def __init__(self, meet):
        super().__init__()
        self._meet = meet

    def append(self, item):
        super().append(item)
        self._meet()


@pytest.mark.parametrize("room", [1, 0])
async def test_threads_that_push_at_once_share_the_credit_and_what_waits_is_pushed(room):
    shard, loop = Shard(Limited(), patience_s=1.0), asyncio.get_running_loop()
    shard.client.room, shard._waiting = room, Meeting(shard.client.meet)
    pushed = await asyncio.gather(*(asyncio.to_thread(shard.push, row, loop) for row in "ab"))
    assert sum(future.done() for future in pushed) == room
    shard.client.room = 2
    done = await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, pushed)), 10)
    assert sorted(done) == ["a", "b"]


async def test_a_row_that_cannot_be_pushed_fails_alone():
    shard, loop = Shard(Limited(), patience_s=1.0), asyncio.get_running_loop()
    shard.client.room = 0
    broken, sound = (shard.push(row, loop) for row in ("broken", "sound"))
    shard.client.room = 1
    assert await asyncio.wait_for(asyncio.wrap_future(sound), 10) == "sound"
    with pytest.raises(AttributeError, match="no tokens"):
        broken.result(0)


async def test_what_a_shard_is_told_waits_until_it_has_answered_what_it_was_told_before():
    made = []

    def request(_):
        made.append(Future())
        return made[-1]

    shard = Shard(SimpleNamespace(shard=0), patience_s=1.0)
    told = [shard.tell(request) for _ in range(3)]
    for number in (1, 2, 3):
        for _ in range(100):  # turns of the loop, of which it needs a few
            await asyncio.sleep(0)
        assert len(made) == number
        made[-1].set_result(number)
    assert [await task for task in told] == [1, 2, 3]


def test_what_waits_fails_when_the_client_is_closed_and_nothing_can_follow(connect, learner, services):
    services.pause(0)
    services.pause(1)
    services.pause(2)
    waiting = learner.published(0, 1)
    learner.close(0.2)
    learner.close(0.2)
    with pytest.raises(BufferUnavailable):
        waiting.result(60)
    with pytest.raises(BufferUnavailable, match="closed"):
        learner.status()


def test_a_shard_that_never_answers_is_an_error_that_names_it(services, monkeypatch):
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", 0.5)
    client = opened(services.addresses, "learner", "learner")
    assert isinstance(client, ShardedClient)
    client.connect()
    client.begin_incarnation(0, 0).result(60)
    silent = client._shards[1]
    silent._patience_s, transport = 0.2, silent.client._transport
    transport._patience = replace(transport._patience, give_up_s=1.0)
    services.pause(1)
    with pytest.raises(BufferUnavailable, match=f"shard 1: the buffer service at {services.addresses[1]}"):
        publish_for(client, 60.0)
    client.close(0.2)


def test_shards_that_put_the_greeting_off_are_named_with_their_reasons(services, monkeypatch):
    monkeypatch.setattr("common.rpc.client._MAX_RETRY_S", 0.1)
    client = opened(services.addresses)
    writes = [service._store.write for service in services.services]

    def full(_):
        raise StoreFull("no space is left")

    for service in services.services:
        monkeypatch.setattr(service._store, "write", full)
    whys = "; ".join(f"{address} says: no space is left" for address in services.addresses)
    with pytest.raises(BufferUnavailable, match="did not welcome 'actor-0' within 0 s"):
        client.connect(time.monotonic())
    wait_until(lambda: all(shard.client.put_off_because for shard in client._shards), "all shards to refuse")
    with pytest.raises(BufferUnavailable, match=f"did not welcome 'actor-0' within 0 s: {whys}"):
        client.connect(time.monotonic() + 0.2)
    for service, write in zip(services.services, writes, strict=True):
        monkeypatch.setattr(service._store, "write", write)
    assert client.connect(time.monotonic() + 60).epoch == 1
    client.close(0.5)


def publish_for(client, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        client.published(0, 0).result(60)
        time.sleep(0.02)


async def test_a_shard_that_dies_with_a_part_of_a_step_asked_of_it_is_silent_and_named_for_no_step_before():
    never = Future()
    shard = Shard(SimpleNamespace(shard=0, address="tcp://h:1", draw=lambda *_: never), patience_s=0.2)
    shard.waiting_for = "step 5 has 1 of 2 groups"
    part = asyncio.create_task(shard.draw(6, 5, 0, {0: 1}, 0.3))
    await asyncio.sleep(0)
    assert (shard.is_silent, shard.waiting_for) == (False, ""), "it may let a draw wait for so long"
    await asyncio.sleep(0.6)
    assert shard.is_silent
    part.cancel()
