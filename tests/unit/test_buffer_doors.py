"""Requests from unknown clients or with a wrong role are refused with a reason and change nothing in the store."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from leeway.buffer import protocol as p
from leeway.buffer import schema
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import StoreFull
from leeway.buffer.service import BufferService
from leeway.buffer.upkeep import MAX_SENDERS, OTHERS, Senders
from leeway.common.rpc.messages import ROLES, ClientIdentity
from leeway.common.rpc.server import UNAUTHENTICATED
from tests.world.buffer import facts, make_trajectory
from tests.world.serving import serving
from tests.world.waiting import wait_until

FACTS = facts(vocab_size=64, max_tokens=16, groups_per_step=1)
CLIENTS = ACTOR, LEARNER, LAUNCH, RANKER = [
    ClientIdentity(name, name.removesuffix("-0"), f"of-{name}") for name in ("actor-0", "learner", "launch", "ranker")
]


class Wire:
    """Raw connection to the service for arbitrary messages."""

    def __init__(self, address, context):
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._number = 0
        self.sent = []
        """The frames of every message that was sent."""

    def send(self, frames):
        """Send frames and return the next reply. The number of the reply is not checked."""
        self._socket.send_multipart(frames)
        assert self._socket.poll(20_000), "the service did not answer within 20 s"
        return p.decode(self._socket.recv_multipart()[0]).message

    def ask(self, message, body=b"", *, client, run_id=FACTS.run_id):
        self._number += 1
        frames = [p.encode(self._number, message, body, run_id=run_id, client=client), *([body] if body else [])]
        self.sent.append(frames)
        return self.send(frames)

    def hello(self, client):
        return self.ask(p.Hello(client.role, client.name, client.session), client=client)

    def close(self):
        self._socket.close()


@pytest.fixture
def service(tmp_path):
    service = BufferService(BufferConfig(), FACTS, tmp_path / "buffer")
    with serving(service) as service.address:
        yield service


@pytest.fixture
def wire(service):
    """Return `wire()`, which opens a new connection."""
    context, wires = zmq.Context(), []

    def make():
        wires.append(Wire(service.address, context))
        return wires[-1]

    yield make
    for each in wires:
        each.close()
    context.term()


@pytest.fixture
def run(service, wire):
    """Register a learner and publish version 0; return an open lease of an actor that has completed another lease."""
    wire = wire()
    for client in CLIENTS:
        assert isinstance(wire.hello(client), p.Welcome)
    wire.ask(p.BeginIncarnation(LEARNER.session, 0, 0), client=LEARNER)
    wire.ask(p.Published(0, 0), client=LEARNER)
    done, rest = wire.ask(p.LeaseRequest(ACTOR.name, 1, 1, 2), client=ACTOR).leases
    rows = [make_trajectory(done, index, seq=index) for index in done.sample_indices]
    pushed = wire.ask(p.Push(ACTOR.name, 1), bytes(schema.encode(rows, FACTS.run_id)), client=ACTOR)
    assert {row.outcome for row in pushed.results} == {"committed"}
    return SimpleNamespace(lease=rest, wire=wire)


def held(service):
    """Return the content of the store, byte by byte."""
    return service._store.read(
        lambda tx: [(t._name, bytes(k), bytes(v)) for t in tx._tables for k, v in t._scan(values=True)]
    )


def every_request(lease, actor=ACTOR.name, epoch=1):
    """Return one request of each kind with its body. A client with the right role can send each request."""
    rows = [make_trajectory(lease, index, seq=9 + index, actor=actor, epoch=epoch) for index in lease.sample_indices]
    bodies = {
        p.Push: bytes(schema.encode(rows, FACTS.run_id)),
        p.WriteScores: bytes(schema.encode_scores([], [])),
        p.Expect: bytes(schema.encode_expected(np.zeros(1, np.float32))),
    }
    requests = [
        p.Hello("observer", "another", "s"), p.LeaseRequest(actor, epoch, 99, 4), p.Push(actor, epoch),
        p.GiveUp(actor, epoch, lease.lease_id, lease.attempt, lease.sample_indices, "x"), p.Renew(actor, epoch, []),
        p.HandOn(actor, epoch, lease.lease_id, lease.attempt, lease.sample_indices),
        p.DrawRequest(1, 0, 0, 1, 0.0), p.WriteScores(),
        p.StepFinished(1, 1, 0), p.Published(0, 1), p.CheckpointDurable(1, 0), p.BeginIncarnation("x", 0, 0),
        p.PosteriorsRequest(), p.Expect(0, 1.0), p.Drain(), p.StatusRequest(),
    ]  # fmt: skip
    assert {type(message) for message in requests} == p.ALLOWED_ROLES.keys(), "the list lacks a kind of request"
    return [(message, bodies.get(type(message), b"")) for message in requests]


UNKNOWN = ("send Hello first", "sent Hello as")
UNKNOWN_CLIENTS = {
    "no sender": (lambda _: None, FACTS.run_id, ("has no sender",)),
    "no Hello": (lambda client: ClientIdentity("stranger", client.role, "s"), FACTS.run_id, UNKNOWN),
    "name of another": (lambda client: ClientIdentity(client.name, client.role, "guess"), FACTS.run_id, UNKNOWN),
    "another run": (lambda client: client, "another", ("serves run 'r', not 'another'",)),
}


@pytest.mark.parametrize("kind", UNKNOWN_CLIENTS)
def test_an_unknown_client_is_refused_and_changes_nothing(service, wire, run, kind):
    disguise, run_id, reasons = UNKNOWN_CLIENTS[kind]
    stranger, before = wire(), held(service)
    for message, body in every_request(run.lease):
        honest = {each.role: each for each in CLIENTS}[min(p.ALLOWED_ROLES[type(message)] - {"observer"})]
        refused = stranger.ask(message, body, client=disguise(honest), run_id=run_id)
        assert isinstance(refused, p.Refused), message
        assert any(part in refused.reason for part in reasons), (message, refused)
    assert held(service) == before


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_client_in_the_wrong_role_is_refused_and_changes_nothing(service, wire, run, role):
    insider = ClientIdentity("insider", role, "s")
    wire = wire()
    epoch = wire.hello(insider).epoch
    before = held(service)
    for message, body in every_request(run.lease, insider.name, epoch):
        if role in p.ALLOWED_ROLES[type(message)]:
            continue
        for client in (
            insider,
            ClientIdentity(ACTOR.name, role, ACTOR.session),
            ClientIdentity(LEARNER.name, role, LEARNER.session),
        ):
            refused = wire.ask(message, body, client=client)
            assert isinstance(refused, p.Refused), (message, client)
            assert f"has role '{role}'" in refused.reason
    assert held(service) == before


def test_a_client_that_claims_another_role_is_refused_and_changes_nothing(service, wire, run):
    wire, before = wire(), held(service)
    for message, body in every_request(run.lease):
        for role in p.ALLOWED_ROLES[type(message)]:
            for known in CLIENTS:
                if role != known.role:
                    refused = wire.ask(message, body, client=ClientIdentity(known.name, role, known.session))
                    assert isinstance(refused, p.Refused), (message, role, known)
    assert held(service) == before


def test_an_actor_that_sends_requests_for_another_actor_is_refused_and_changes_nothing(service, wire, run):
    other = ClientIdentity("actor-1", "actor", "s")
    wire = wire()
    wire.hello(other)
    before = held(service)
    for message, body in every_request(run.lease):
        if p.ALLOWED_ROLES[type(message)] == {"actor"}:
            refused = wire.ask(message, body, client=other)
            assert isinstance(refused, p.Refused)
            assert refused.reason.endswith("for 'actor-0': send requests in your own name")
    assert held(service) == before


def test_repeated_requests_change_nothing(service, wire, run):
    for request in (
        p.DrawRequest(1, 0, 0, 1, 0.0),
        p.StepFinished(1, 1, 0),
        p.Published(0, 1),
        p.CheckpointDurable(1, 0),
    ):
        assert not isinstance(run.wire.ask(request, client=LEARNER), p.Refused)
    run.wire.ask(p.GiveUp(ACTOR.name, 1, run.lease.lease_id, 1, [0], "x"), client=ACTOR)
    run.wire.ask(p.Drain(), client=LAUNCH)

    def rows_and_status():
        rows = [row for row in held(service) if row[1] != b"state\0"]
        return rows, msgspec.structs.asdict(run.wire.ask(p.StatusRequest(), client=LAUNCH)) | {"spent_s": {}}

    sent, (rows, status) = list(run.wire.sent), rows_and_status()
    for frames in sent * 2 + sent[::-1]:
        wire().send(frames)
    rows_after, status_after = rows_and_status()
    assert rows_after == rows
    assert status_after["ledger"].pop("duplicates") == 6, "two trajectories were pushed three more times"
    assert status["ledger"].pop("duplicates") == 0
    assert status_after == status


def test_requests_of_a_replaced_process_are_refused_and_change_nothing(service, wire, run):
    newer = ClientIdentity(LEARNER.name, "learner", "newer")
    sent = [frames for frames in run.wire.sent if p.decode(frames[0]).asker == LEARNER]
    run.wire.hello(newer)
    run.wire.ask(p.BeginIncarnation(newer.session, 0, 0), client=newer)
    before = held(service)
    assert len(sent) == 3
    for frames in sent:
        assert "was replaced by a newer process" in wire().send(frames).reason
    assert held(service) == before


def test_invalid_messages_are_counted_per_sender(service, wire, run):
    junk, actor = wire(), wire()
    junk._socket.send_multipart([b"junk"])
    actor.ask(p.Renew(ACTOR.name, 1, []), client=ACTOR)
    for _ in range(3):
        assert isinstance(actor.ask(p.Drain(), client=ACTOR), p.Refused)
    row = make_trajectory(run.lease, 0, seq=5, reward=float("nan"))
    actor.ask(p.Push(ACTOR.name, 1), bytes(schema.encode([row], FACTS.run_id)), client=ACTOR)
    keep = p.HandOn(ACTOR.name, 1, run.lease.lease_id, run.lease.attempt, run.lease.sample_indices, goes_on=True)
    rows = [make_trajectory(run.lease, index, seq=0) for index in run.lease.sample_indices[:2]]
    assert actor.ask(keep, bytes(schema.encode(rows, FACTS.run_id)), client=ACTOR) == p.Done()
    invalid = {}
    while len(invalid) < 2:
        status = run.wire.ask(p.StatusRequest(), client=LAUNCH)
        invalid = status.invalid_messages
    (stranger,) = invalid.keys() - {ACTOR.name}
    assert stranger.startswith(f"{UNAUTHENTICATED} (process ")
    assert (invalid[stranger].count, invalid[stranger].first) == (1, "failed validation: header")
    first = "Drain requires role launch, but 'actor-0' has role 'actor'"
    assert (invalid[ACTOR.name].count, invalid[ACTOR.name].first) == (6, first)
    assert status.quarantined_by_reason == {"header": 1, "reward not finite": 1, "finish_reason": 2}


@pytest.mark.parametrize("draw_waits", [False, True])
def test_unreadable_messages_are_counted_without_a_commit(service, wire, run, draw_waits):
    def num_commits():
        return service._store._env.info()["last_txnid"]

    if draw_waits:
        assert run.wire.ask(p.DrawRequest(1, 0, 0, 1, 60.0), client=LEARNER).ready
        draw = p.encode(1, p.DrawRequest(2, 1, 0, 1, 60.0), run_id=FACTS.run_id, client=LEARNER)
        wire()._socket.send_multipart([draw])
        wait_until(lambda: service._parked, "the draw to wait")
    junk, before = wire(), num_commits()
    for _ in range(50):
        junk._socket.send_multipart([b"junk"])
        time.sleep(0.002)
    wait_until(lambda: sum(each.count for each in service._senders.snapshot().values()) == 50, "the last message")
    assert num_commits() == before
    status = run.wire.ask(p.StatusRequest(), client=LAUNCH)
    assert status.quarantined_by_reason == {"header": 50}
    assert status.ledger["gap"] == 0


def test_unreadable_messages_are_counted_after_a_full_disk_has_space(service, wire, run, monkeypatch):
    def full(change):
        raise StoreFull("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(service._store, "write", full)
        wire()._socket.send_multipart([b"junk"])
        wait_until(service._senders.snapshot, "the message")
        assert run.wire.ask(p.StatusRequest(), client=LAUNCH).kind == p.RETRY
    assert run.wire.ask(p.StatusRequest(), client=LAUNCH).quarantined_by_reason == {"header": 1}


def test_senders_are_counted_separately_up_to_a_limit():
    senders = Senders()
    for number in range(MAX_SENDERS + 5):
        senders.record_invalid(f"actor-{number}", "x" * 5000)
    counts = senders.snapshot()
    assert len(counts) == MAX_SENDERS + 1
    assert counts[OTHERS].count == 5
    assert max(len(each.first) for each in counts.values()) < 300


def test_control_characters_in_the_first_message_of_a_sender_are_replaced():
    senders = Senders()
    senders.record_invalid("actor-0", "a kind \x1b[2J\n")
    assert senders.snapshot()["actor-0"].first == "a kind ?[2J?"
