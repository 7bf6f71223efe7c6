"""What happens where something does not come, or cannot be written for a while: order, deadlines, sequence numbers."""

import contextlib
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import zmq

from buffer import ingest
from buffer import protocol as p
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.errors import BufferRefused, BufferUnavailable, StoreFull
from buffer.service import BufferService
from common.rpc.client import Patience, RpcClient, RpcErrors, _Call
from common.rpc.messages import Asker
from common.staleness import PolicyVersion
from learner.coordinator import Coordinator
from tests.world.buffer import Actor, facts, make_trajectory
from tests.world.run_context import run_context
from tests.world.serving import serving
from tests.world.waiting import LIMIT_S, wait_until


def client_of(address: str, resend_s: float = 1.0, give_up_s: float = 20.0, **hooks) -> RpcClient:
    """A client of the buffer without what makes trajectories of messages."""
    patience = Patience(resend_s=resend_s, give_up_s=give_up_s, heartbeat_s=20.0)
    errors = RpcErrors(lambda _, text: BufferRefused(text), BufferUnavailable)
    asker = Asker("t", "actor", "s")
    return RpcClient(p.PROTOCOL, address, "r", asker=asker, patience=patience, errors=errors, **hooks)


@pytest.fixture
def serve(tmp_path):
    """`serve()`: a service in a thread, on a store of its own."""
    with contextlib.ExitStack() as stack:

        def start():
            service = BufferService(BufferConfig(), facts(max_lag="unbounded"), tmp_path / "buffer")
            service.address = stack.enter_context(serving(service))
            return service

        yield start


def space_on_disk(service, monkeypatch):
    """An event, until which the disk of the service is full; and its clients' clock, which skips with each refusal."""
    has_space, write, skipped_s = threading.Event(), service._store.write, [0.0]

    def full(change):
        if not has_space.is_set():
            skipped_s[0] += 0.8
            raise StoreFull("no space is left")
        return write(change)

    monkeypatch.setattr(service._store, "write", full)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s[0])
    monkeypatch.setattr("common.rpc.client.time", clock)
    monkeypatch.setattr("learner.coordinator.time", clock)
    return has_space, clock.monotonic


def test_what_was_said_later_does_not_overtake_a_request_that_is_asked_to_wait():
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    transport = client_of(f"tcp://127.0.0.1:{port}", resend_s=5.0)
    answered = []

    def answer(*, retry):
        identity, header, *_ = router.recv_multipart()
        envelope = p.decode(header)
        if not retry:
            answered.append(type(envelope.message).__name__)
        reply = p.Refused("the disk is full", p.RETRY) if retry else p.Done()
        router.send_multipart([identity, p.encode(envelope.request_id, reply)])

    first = transport.submit(p.StepFinished(1, 1, 0))
    for _ in range(4):  # its patience grows with every refusal
        answer(retry=True)
    time.sleep(0.2)  # the last refusal has arrived
    second = transport.submit(p.CheckpointDurable(1, 0))
    deadline = time.monotonic() + 60
    while len(answered) < 2:
        assert router.poll(max(0, int((deadline - time.monotonic()) * 1000))), answered
        answer(retry=False)
    assert answered == ["StepFinished", "CheckpointDurable"]
    assert (first.result(60)[0], second.result(60)[0]) == (p.Done(), p.Done())
    transport.close(1.0)
    router.close(0)
    context.term()


def test_what_was_answered_while_the_client_stood_still_came_in_time():
    give_up_s, has_work, is_still = 1.0, threading.Event(), threading.Event()

    def stand_still():
        if has_work.is_set() and not is_still.is_set():
            is_still.set()
            time.sleep(give_up_s + 2.0)

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    transport = client_of(f"tcp://127.0.0.1:{port}", 60.0, give_up_s, pump=stand_still)
    asked = transport.submit(p.StepFinished(1, 1, 0))
    assert router.poll(LIMIT_S * 1000)
    identity, header, *_ = router.recv_multipart()
    has_work.set()
    transport.wake()
    assert is_still.wait(LIMIT_S)
    router.send_multipart([identity, p.encode(p.decode(header).request_id, p.Done())])
    assert asked.result(LIMIT_S)[0] == p.Done()
    transport.close(1.0)
    router.close(0)
    context.term()


def test_a_request_refused_very_often_is_still_sent_again():
    transport = client_of("tcp://127.0.0.1:9")
    call = _Call(1, p.Renew("a", 1, []), [], Future(), 0.0, 0.0, 0.0, num_refused=5000)
    transport._try_later(call, "the disk is full")
    assert call.not_before <= time.monotonic() + 1.0
    transport.close(0.1)


def test_a_full_disk_is_not_written_to_all_the_time_and_leases_keep_a_deadline(serve, monkeypatch):
    monkeypatch.setattr("buffer.service._FULL_PAUSE_S", 0.5)
    monkeypatch.setattr("buffer.leases.LEASE_TIMEOUT_S", 0.2)
    service = serve()
    client = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    client.connect()
    learner = BufferClient(service.address, run_id="r", role="learner", name="learner")
    learner.connect()
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    write, attempts = service._store.write, []

    def full(change):
        if service._core.leases.due_in_s() is None:  # nothing is leased yet
            return write(change)
        attempts.append(time.monotonic())
        # The change is made, and is then not committed.
        with pytest.raises(ZeroDivisionError):
            write(lambda tx: (change(tx), 1 // 0))
        raise StoreFull("no space is left")

    monkeypatch.setattr(service._store, "write", full)
    assert len(client.lease(1).result(60).leases) == 1
    wait_until(lambda: len(attempts) > 2, "some attempts")
    assert attempts[2] - attempts[0] > 0.5
    monkeypatch.setattr(service._store, "write", write)
    deadline = time.monotonic() + 60
    while (ledger := client.status().result(60).ledger)["failed"] == 0:
        assert time.monotonic() < deadline, ledger
        time.sleep(0.05)
    assert (ledger["in_flight"], ledger["failed"], ledger["gap"]) == (0, 2, 0)
    client.close(1.0)
    learner.close(1.0)


def test_a_learner_begins_once_a_full_disk_has_space_or_says_who_lets_it_wait(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("common.rpc.client._MAX_RETRY_S", 0.1)
    monkeypatch.setattr("learner.coordinator.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("buffer.client.GIVE_UP_S", 10.0)
    service = serve()
    (tmp_path / "metrics.jsonl").touch()
    context = run_context(tmp_path, facts(max_lag="unbounded"), buffer_address=service.address)
    coordinator = Coordinator(context, None)
    has_space, now = space_on_disk(service, monkeypatch)
    began = now()
    with pytest.raises(TimeoutError, match=f"{service.address} was asked to begin an incarnation .* s: no space is"):
        coordinator.begin(3, 3, began + 11.0)
    assert now() - began > 11.0
    threading.Timer(0.3, has_space.set).start()
    coordinator.begin(3, 3, now() + LIMIT_S)
    assert coordinator.resumed_at == {0: 3}
    assert coordinator.newest_published is None, "of this learner's no version is on disk yet"
    coordinator.published(PolicyVersion(0, 3))
    coordinator.settle(heartbeats=False)
    assert coordinator.newest_published == 3
    coordinator.close()


def test_a_learner_waits_for_a_draw_that_a_full_disk_has_no_room_for_as_long_as_for_a_batch(
    serve, monkeypatch, tmp_path
):
    monkeypatch.setattr("learner.coordinator.REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr("learner.coordinator.HEARTBEAT_S", 0.05)
    service, channel = serve(), SimpleNamespace(send=lambda *_: None)
    monkeypatch.setattr("learner.coordinator.BATCH_TIMEOUT_S", 1.0)
    (tmp_path / "metrics.jsonl").touch()
    context = run_context(tmp_path, facts(max_lag="unbounded"), buffer_address=service.address)
    coordinator = Coordinator(context, channel)
    coordinator.begin(0, 0, time.monotonic() + LIMIT_S)
    coordinator.published(PolicyVersion(0, 0))
    coordinator.settle()
    has_space, now = space_on_disk(service, monkeypatch)
    began = now()
    with pytest.raises(TimeoutError, match=f"{service.address} was asked to draw step 1 and has let that wait"):
        coordinator.draw(1, 0, threading.Event(), lambda: None)
    assert now() - began > 1.0
    has_space.set()
    coordinator.close()


def test_a_draw_that_lacks_samples_says_that_the_disk_they_are_for_is_full(serve, monkeypatch):
    monkeypatch.setattr("common.rpc.client._MAX_RETRY_S", 0.02)  # as of many actors: the service never pauses
    monkeypatch.setattr("buffer.service._FULL_HEARD_S", 60.0)
    service = serve()
    actor = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    learner = BufferClient(service.address, run_id="r", role="learner", name="learner")
    for client in (actor, learner):
        client.connect()
    incarnation = learner.begin_incarnation(0, 0).result(60).incarnation
    learner.published(incarnation, 0).result(60)
    lease = actor.lease(1).result(60).leases[0]
    write = service._store.write

    def only_without_samples(change):
        def changed(tx):
            before, done = tx.state.num_records, change(tx)
            return done if tx.state.num_records == before else 1 // 0

        try:
            return write(changed)
        except ZeroDivisionError:
            raise StoreFull("no space is left") from None

    monkeypatch.setattr(service._store, "write", only_without_samples)
    pushed = actor.push(make_trajectory(lease, 0, seq=0))
    wait_until(lambda: actor.put_off_because, "the push to be put off")
    draw = learner.draw(1, 0, incarnation, 2, 0.3).result(60)
    assert (draw.ready, draw.waiting_for.startswith("pushes wait: no space is left; step 1 has 0 of 2")) == (
        False,
        True,
    )
    monkeypatch.setattr(service._store, "write", write)
    assert pushed.result(60).outcome == "committed"
    monkeypatch.setattr("buffer.service._FULL_HEARD_S", 0.5)
    says = lambda: learner.draw(1, 0, incarnation, 2, 0.0).result(60).waiting_for  # noqa: E731
    wait_until(lambda: says().startswith("step 1"), "room to be heard of")
    actor.close(1.0)
    learner.close(1.0)


@pytest.mark.parametrize("in_upkeep", [False, True])
def test_what_lay_unread_while_the_service_stood_still_came_in_time(tmp_path, monkeypatch, in_upkeep):
    monkeypatch.setattr("buffer.service._MAX_TURN_MESSAGES", 1)
    now = [1000.0]
    monkeypatch.setattr("buffer.leases.LEASE_TIMEOUT_S", 10.0)
    service = BufferService(BufferConfig(), facts(max_lag="unbounded"), tmp_path / "buffer", clock=lambda: now[0])
    address = service.bind()

    def answered(future):
        deadline = time.monotonic() + LIMIT_S
        while not future.done():
            assert time.monotonic() < deadline
            service.turn()
        return future.result()

    def client(role, name):
        made = BufferClient(address, run_id="r", role=role, name=name)
        answered(made.hello())
        return made

    learner, actors = client("learner", "learner"), [client("actor", f"actor-{i}") for i in range(3)]
    incarnation = answered(learner.begin_incarnation(0, 0)).incarnation
    answered(learner.published(incarnation, 0))
    leases = [answered(actor.lease(1)).leases[0] for actor in actors]
    pushed = [
        actor.push(make_trajectory(lease, 0, seq=0, actor=f"actor-{i}"))
        for i, (actor, lease) in enumerate(zip(actors[:2], leases[:2], strict=True))
    ]
    time.sleep(0.5)  # they are there
    if in_upkeep:  # as a sync on a disk that hangs
        monkeypatch.setattr(service._upkeep, "run", lambda: now.__setitem__(0, max(now[0], 1061.0)))
    else:
        now[0] += 61.0
    assert [answered(each).outcome for each in pushed] == ["committed", "committed"]
    assert answered(learner.status()).ledger["failed"] == 0
    now[0] += 2.0  # of the third nothing came
    while not answered(learner.status()).ledger["failed"]:
        now[0] += 0.1
        assert now[0] < 1100.0
    for each in (learner, *actors):
        each.close(0.1)
    service.close()


def test_a_client_is_welcomed_once_a_full_disk_has_space_or_says_who_lets_it_wait(serve, monkeypatch):
    monkeypatch.setattr("common.rpc.client._MAX_RETRY_S", 0.1)
    monkeypatch.setattr("buffer.client.GIVE_UP_S", 10.0)
    service = serve()
    has_space, now = space_on_disk(service, monkeypatch)
    client = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    until, hello = now() + 11.0, client.hello()
    wait_until(lambda: client.put_off_because and now() > until, "its patience to be over")
    with pytest.raises(BufferUnavailable, match=f"welcome 'actor-0' within . s: {service.address} says: no space is"):
        client.connect(time.monotonic() + 0.2)
    assert not hello.done()
    threading.Timer(0.3, has_space.set).start()
    assert client.connect().epoch == 1
    assert client.put_off_because == ""
    client.close(1.0)


def test_a_trajectory_that_cannot_be_sent_leaves_no_hole_in_the_sequence(serve):
    service = serve()
    client = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    client.connect()
    learner = BufferClient(service.address, run_id="r", role="learner", name="learner")
    learner.connect()
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    (lease,) = client.lease(1).result(60).leases
    unsendable = make_trajectory(lease, 0, seq=0)
    unsendable.columns["question"] = object()
    with pytest.raises(TypeError):
        client.push(unsendable).result(60)
    assert client.push(make_trajectory(lease, 1, seq=0)).result(60).outcome == "committed"
    row = service._store.read(lambda tx: tx.actors.require("actor-0"))
    assert (row.low_water, row.num_seen_above) == (1, 0)
    client.close(1.0)
    learner.close(1.0)


def test_a_number_that_never_arrives_is_not_waited_for_without_end(make, monkeypatch):
    monkeypatch.setattr(ingest, "MAX_OVERTAKEN", 8)
    buffer = make(max_lag="unbounded", groups_per_step=20)
    buffer.begin()
    actor = Actor(buffer)
    actor.seq = 1  # number 0 is lost
    for lease in actor.lease(20):
        assert actor.work(lease) == ["committed"] * 2
    row = buffer.store.read(lambda tx: tx.actors.require("actor-0"))
    assert row.low_water == actor.seq
    assert buffer.store.read(lambda tx: tx.seen.count) == row.num_seen_above == 0
    lost = make_trajectory(lease, 0, seq=0)
    # Whether it was stored is not known any more, so it is not called a duplicate.
    assert buffer.push([lost]) == ["late"]


def test_an_address_that_is_none_is_refused_at_once():
    with pytest.raises(zmq.ZMQError):
        BufferClient("nowhere", run_id="r", role="actor", name="actor-0")
