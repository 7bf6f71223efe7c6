"""Missing messages and temporarily failing writes: order of requests, deadlines, sequence numbers."""

import contextlib
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import zmq

from leeway.buffer import ingest
from leeway.buffer import protocol as p
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, BufferUnavailable, StoreFull
from leeway.buffer.service import BufferService
from leeway.common.rpc.client import RpcClient, RpcErrors, Timeouts, _Call
from leeway.common.rpc.messages import ClientIdentity
from leeway.common.staleness import PolicyVersion
from leeway.learner.coordinator import Coordinator
from tests.world.buffer import Actor, facts, make_trajectory
from tests.world.run_context import run_context
from tests.world.serving import serving
from tests.world.waiting import LIMIT_S, wait_until


def client_of(address: str, resend_s: float = 1.0, give_up_s: float = 20.0, **hooks) -> RpcClient:
    """Return an RPC client of the buffer that does not decode trajectories."""
    timeouts = Timeouts(resend_s=resend_s, request_s=give_up_s, heartbeat_s=20.0)
    errors = RpcErrors(lambda _, text: BufferRefused(text), BufferUnavailable)
    identity = ClientIdentity("t", "actor", "s")
    return RpcClient(p.PROTOCOL, address, "r", identity=identity, timeouts=timeouts, errors=errors, **hooks)


@pytest.fixture
def serve(tmp_path):
    """Return `serve()`, which runs a service with its own store in a thread."""
    with contextlib.ExitStack() as stack:

        def start():
            service = BufferService(BufferConfig(), facts(max_lag="unbounded"), tmp_path / "buffer")
            service.address = stack.enter_context(serving(service))
            return service

        yield start


def space_on_disk(service, monkeypatch):
    """Simulate a full disk until the returned event is set.

    Also return a clock that advances by 0.8 s at each refused write.
    """
    has_space, write, skipped_s = threading.Event(), service._store.write, [0.0]

    def full(change):
        if not has_space.is_set():
            skipped_s[0] += 0.8
            raise StoreFull("no space is left")
        return write(change)

    monkeypatch.setattr(service._store, "write", full)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + skipped_s[0])
    monkeypatch.setattr("leeway.common.rpc.client.time", clock)
    monkeypatch.setattr("leeway.learner.coordinator.time", clock)
    return has_space, clock.monotonic


def test_a_later_request_does_not_overtake_a_deferred_one():
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
    for _ in range(4):  # the retry delay grows with every refusal
        answer(retry=True)
    time.sleep(0.2)  # wait until the last refusal has arrived
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


def test_a_reply_that_arrives_during_a_stall_of_the_client_is_in_time():
    give_up_s, has_work, is_stalled = 1.0, threading.Event(), threading.Event()

    def stall():
        if has_work.is_set() and not is_stalled.is_set():
            is_stalled.set()
            time.sleep(give_up_s + 2.0)

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    transport = client_of(f"tcp://127.0.0.1:{port}", 60.0, give_up_s, pump=stall)
    future = transport.submit(p.StepFinished(1, 1, 0))
    assert router.poll(LIMIT_S * 1000)
    identity, header, *_ = router.recv_multipart()
    has_work.set()
    transport.wake()
    assert is_stalled.wait(LIMIT_S)
    router.send_multipart([identity, p.encode(p.decode(header).request_id, p.Done())])
    assert future.result(LIMIT_S)[0] == p.Done()
    transport.close(1.0)
    router.close(0)
    context.term()


def test_a_request_refused_many_times_is_still_retried():
    transport = client_of("tcp://127.0.0.1:9")
    call = _Call(1, p.Renew("a", 1, []), [], Future(), 0.0, 0.0, 0.0, num_refused=5000)
    transport._try_later(call, "the disk is full")
    assert call.not_before <= time.monotonic() + 1.0
    transport.close(0.1)


def test_writes_to_a_full_disk_pause_between_attempts_and_leases_keep_a_deadline(serve, monkeypatch):
    monkeypatch.setattr("leeway.buffer.service._FULL_PAUSE_S", 0.5)
    monkeypatch.setattr("leeway.buffer.leases.LEASE_TIMEOUT_S", 0.2)
    service = serve()
    client = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    client.connect()
    learner = BufferClient(service.address, run_id="r", role="learner", name="learner")
    learner.connect()
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    write, attempts = service._store.write, []

    def full(change):
        if service._core.leases.due_in_s() is None:  # no lease is granted yet
            return write(change)
        attempts.append(time.monotonic())
        # The change is applied but not committed.
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


def test_a_learner_begins_after_a_full_disk_has_space_or_reports_the_cause(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("leeway.common.rpc.client._MAX_RETRY_S", 0.1)
    monkeypatch.setattr("leeway.learner.coordinator.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("leeway.buffer.client.GIVE_UP_S", 10.0)
    service = serve()
    (tmp_path / "metrics.jsonl").touch()
    context = run_context(tmp_path, facts(max_lag="unbounded"), buffer_address=service.address)
    coordinator = Coordinator(context, None)
    has_space, now = space_on_disk(service, monkeypatch)
    began = now()
    with pytest.raises(TimeoutError, match=f"{service.address} did not begin an incarnation within .* s: no space is"):
        coordinator.begin(3, 3, began + 11.0)
    assert now() - began > 11.0
    threading.Timer(0.3, has_space.set).start()
    coordinator.begin(3, 3, now() + LIMIT_S)
    assert coordinator.resumed_at == {0: 3}
    assert coordinator.newest_published is None, "no version of this learner is on disk yet"
    coordinator.published(PolicyVersion(0, 3))
    coordinator.flush(heartbeats=False)
    assert coordinator.newest_published == 3
    coordinator.close()


def test_a_draw_on_a_full_disk_times_out_like_a_missing_batch(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("leeway.learner.coordinator.REQUEST_TIMEOUT_S", 0.1)
    monkeypatch.setattr("leeway.learner.coordinator.HEARTBEAT_S", 0.05)
    service, channel = serve(), SimpleNamespace(send=lambda *_: None)
    monkeypatch.setattr("leeway.learner.coordinator.BATCH_TIMEOUT_S", 1.0)
    (tmp_path / "metrics.jsonl").touch()
    context = run_context(tmp_path, facts(max_lag="unbounded"), buffer_address=service.address)
    coordinator = Coordinator(context, channel)
    coordinator.begin(0, 0, time.monotonic() + LIMIT_S)
    coordinator.published(PolicyVersion(0, 0))
    coordinator.flush()
    has_space, now = space_on_disk(service, monkeypatch)
    began = now()
    with pytest.raises(TimeoutError, match=f"{service.address} did not draw step 1 within"):
        coordinator.draw(1, 0, threading.Event(), lambda: None)
    assert now() - began > 1.0
    has_space.set()
    coordinator.close()


def test_a_waiting_draw_reports_that_pushes_wait_for_a_full_disk(serve, monkeypatch):
    # frequent retries, so that the service is never idle
    monkeypatch.setattr("leeway.common.rpc.client._MAX_RETRY_S", 0.02)
    monkeypatch.setattr("leeway.buffer.service._FULL_REPORT_S", 60.0)
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
    wait_until(lambda: actor.retry_reason, "the push to be deferred")
    draw = learner.draw(1, 0, incarnation, 2, 0.3).result(60)
    assert (draw.ready, draw.waiting_for.startswith("pushes wait: no space is left; step 1 has 0 of 2")) == (
        False,
        True,
    )
    monkeypatch.setattr(service._store, "write", write)
    assert pushed.result(60).outcome == "committed"
    monkeypatch.setattr("leeway.buffer.service._FULL_REPORT_S", 0.5)
    waiting_for = lambda: learner.draw(1, 0, incarnation, 2, 0.0).result(60).waiting_for  # noqa: E731
    wait_until(lambda: waiting_for().startswith("step 1"), "the report of a full disk to end")
    actor.close(1.0)
    learner.close(1.0)


@pytest.mark.parametrize("in_upkeep", [False, True])
def test_messages_that_arrive_during_a_stall_of_the_service_are_in_time(tmp_path, monkeypatch, in_upkeep):
    monkeypatch.setattr("leeway.buffer.service._MAX_TURN_MESSAGES", 1)
    now = [1000.0]
    monkeypatch.setattr("leeway.buffer.leases.LEASE_TIMEOUT_S", 10.0)
    service = BufferService(BufferConfig(), facts(max_lag="unbounded"), tmp_path / "buffer", clock=lambda: now[0])
    address = service.bind()

    def answered(future):
        deadline = time.monotonic() + LIMIT_S
        while not future.done():
            assert time.monotonic() < deadline
            service.turn()
        return future.result()

    def client(role, name):
        connected = BufferClient(address, run_id="r", role=role, name=name)
        answered(connected.hello())
        return connected

    learner, actors = client("learner", "learner"), [client("actor", f"actor-{i}") for i in range(3)]
    incarnation = answered(learner.begin_incarnation(0, 0)).incarnation
    answered(learner.published(incarnation, 0))
    leases = [answered(actor.lease(1)).leases[0] for actor in actors]
    pushed = [
        actor.push(make_trajectory(lease, 0, seq=0, actor=f"actor-{i}"))
        for i, (actor, lease) in enumerate(zip(actors[:2], leases[:2], strict=True))
    ]
    time.sleep(0.5)  # wait until the pushes have arrived
    if in_upkeep:  # the service stalls during its upkeep, as it would if a disk hangs
        monkeypatch.setattr(service._upkeep, "run", lambda: now.__setitem__(0, max(now[0], 1061.0)))
    else:
        now[0] += 61.0
    assert [answered(each).outcome for each in pushed] == ["committed", "committed"]
    assert answered(learner.status()).ledger["failed"] == 0
    now[0] += 2.0  # the third actor sends no message in this time
    while not answered(learner.status()).ledger["failed"]:
        now[0] += 0.1
        assert now[0] < 1100.0
    for each in (learner, *actors):
        each.close(0.1)
    service.close()


def test_a_client_connects_after_a_full_disk_has_space_or_reports_the_cause(serve, monkeypatch):
    monkeypatch.setattr("leeway.common.rpc.client._MAX_RETRY_S", 0.1)
    monkeypatch.setattr("leeway.buffer.client.GIVE_UP_S", 10.0)
    service = serve()
    has_space, now = space_on_disk(service, monkeypatch)
    client = BufferClient(service.address, run_id="r", role="actor", name="actor-0")
    until, hello = now() + 11.0, client.hello()
    wait_until(lambda: client.retry_reason and now() > until, "its timeout to pass")
    with pytest.raises(BufferUnavailable, match=f"within . s: .* {service.address} asked to retry: no space is"):
        client.connect(time.monotonic() + 0.2)
    assert not hello.done()
    threading.Timer(0.3, has_space.set).start()
    assert client.connect().epoch == 1
    assert client.retry_reason == ""
    client.close(1.0)


def test_a_trajectory_that_cannot_be_sent_leaves_no_gap_in_the_sequence(serve):
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


def test_a_sequence_number_that_never_arrives_is_not_awaited_forever(make, monkeypatch):
    monkeypatch.setattr(ingest, "MAX_OVERTAKEN", 8)
    buffer = make(max_lag="unbounded", groups_per_step=20)
    buffer.begin()
    actor = Actor(buffer)
    actor.seq = 1  # the message with number 0 is lost
    for lease in actor.lease(20):
        assert actor.work(lease) == ["committed"] * 2
    row = buffer.store.read(lambda tx: tx.actors.require("actor-0"))
    assert row.low_water == actor.seq
    assert buffer.store.read(lambda tx: tx.seen.count) == row.num_seen_above == 0
    lost = make_trajectory(lease, 0, seq=0)
    # The service no longer has a record of number 0, so the sample counts as late, not as a duplicate.
    assert buffer.push([lost]) == ["late"]


def test_an_invalid_address_is_rejected_immediately():
    with pytest.raises(zmq.ZMQError):
        BufferClient("nowhere", run_id="r", role="actor", name="actor-0")
