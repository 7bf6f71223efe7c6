"""What a client that is none of the run's, or of a wrong role, gets from the buffer: a sentence, and no change."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import zmq

from buffer import protocol as p
from buffer import schema
from buffer.config import BufferConfig
from buffer.errors import StoreFull
from buffer.service import BufferService
from buffer.upkeep import MAX_SENDERS, OTHERS, Senders
from common.rpc.messages import ROLES, Asker
from common.rpc.server import STRANGER
from tests.world.buffer import facts, make_trajectory
from tests.world.serving import serving
from tests.world.waiting import wait_until

FACTS = facts(vocab_size=64, max_tokens=16, groups_per_step=1)
CLIENTS = ACTOR, LEARNER, LAUNCH, RANKER = [
    Asker(name, name.removesuffix("-0"), f"of-{name}") for name in ("actor-0", "learner", "launch", "ranker")
]


class Wire:
    """A raw connection to the service, which says what it is told to."""

    def __init__(self, address, context):
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._number = 0
        self.sent = []
        """Every message, as it went over the wire."""

    def send(self, frames):
        """Send them; the answer, whatever its number."""
        self._socket.send_multipart(frames)
        assert self._socket.poll(20_000), "no answer"
        return p.decode(self._socket.recv_multipart()[0]).message

    def ask(self, message, body=b"", *, asker, run_id=FACTS.run_id):
        self._number += 1
        frames = [p.encode(self._number, message, body, run_id=run_id, asker=asker), *([body] if body else [])]
        self.sent.append(frames)
        return self.send(frames)

    def hello(self, asker):
        return self.ask(p.Hello(asker.role, asker.name, asker.session), asker=asker)

    def close(self):
        self._socket.close()


@pytest.fixture
def service(tmp_path):
    service = BufferService(BufferConfig(), FACTS, tmp_path / "buffer")
    with serving(service) as service.address:
        yield service


@pytest.fixture
def wire(service):
    """`wire()`: a connection of its own."""
    context, made = zmq.Context(), []

    def make():
        made.append(Wire(service.address, context))
        return made[-1]

    yield make
    for each in made:
        each.close()
    context.term()


@pytest.fixture
def run(service, wire):
    """A learner has begun and published, an actor works on leases, one of which is done: what can be disturbed."""
    wire = wire()
    for asker in CLIENTS:
        assert isinstance(wire.hello(asker), p.Welcome)
    wire.ask(p.BeginIncarnation(LEARNER.session, 0, 0), asker=LEARNER)
    wire.ask(p.Published(0, 0), asker=LEARNER)
    done, rest = wire.ask(p.LeaseRequest(ACTOR.name, 1, 1, 2), asker=ACTOR).leases
    rows = [make_trajectory(done, index, seq=index) for index in done.sample_indices]
    pushed = wire.ask(p.Push(ACTOR.name, 1), bytes(schema.encode(rows, FACTS.run_id)), asker=ACTOR)
    assert {row.outcome for row in pushed.results} == {"committed"}
    return SimpleNamespace(lease=rest, wire=wire)


def held(service):
    """All that the store holds, byte by byte."""
    return service._store.read(
        lambda tx: [(t._name, bytes(k), bytes(v)) for t in tx._tables for k, v in t._scan(values=True)]
    )


def every_request(lease, actor=ACTOR.name, epoch=1):
    """One of each kind, and its body; each would change something, or tell something, coming from the right client."""
    rows = [make_trajectory(lease, index, seq=9 + index, actor=actor, epoch=epoch) for index in lease.sample_indices]
    bodies = {
        p.Push: bytes(schema.encode(rows, FACTS.run_id)),
        p.WriteScores: bytes(schema.encode_scores([], [])),
        p.Expect: bytes(schema.encode_expected(np.zeros(1, np.float32))),
    }
    made = [
        p.Hello("observer", "another", "s"), p.LeaseRequest(actor, epoch, 99, 4), p.Push(actor, epoch),
        p.GiveUp(actor, epoch, lease.lease_id, lease.attempt, lease.sample_indices, "x"), p.Renew(actor, epoch, []),
        p.HandOn(actor, epoch, lease.lease_id, lease.attempt, lease.sample_indices),
        p.DrawRequest(1, 0, 0, 1, 0.0), p.WriteScores(),
        p.StepFinished(1, 1, 0), p.Published(0, 1), p.CheckpointDurable(1, 0), p.BeginIncarnation("x", 0, 0),
        p.VisitsRequest(), p.Expect(0, 1.0), p.Drain(), p.StatusRequest(),
    ]  # fmt: skip
    assert {type(message) for message in made} == p.ASKED_BY.keys(), "a kind of request is not tried"
    return [(message, bodies.get(type(message), b"")) for message in made]


UNKNOWN = ("send Hello first", "said hello as")
NOT_OF_THE_RUN = {
    "from nobody": (lambda _: None, FACTS.run_id, ("came from nobody",)),
    "never greeted": (lambda asker: Asker("nobody", asker.role, "s"), FACTS.run_id, UNKNOWN),
    "under the name of another": (lambda asker: Asker(asker.name, asker.role, "guess"), FACTS.run_id, UNKNOWN),
    "of another run": (lambda asker: asker, "another", ("serves run 'r', not 'another'",)),
}


@pytest.mark.parametrize("who", NOT_OF_THE_RUN)
def test_whoever_is_not_a_greeted_client_of_the_run_is_refused_and_changes_nothing(service, wire, run, who):
    disguise, run_id, why = NOT_OF_THE_RUN[who]
    stranger, before = wire(), held(service)
    for message, body in every_request(run.lease):
        honest = {each.role: each for each in CLIENTS}[min(p.ASKED_BY[type(message)] - {"observer"})]
        refused = stranger.ask(message, body, asker=disguise(honest), run_id=run_id)
        assert isinstance(refused, p.Refused), message
        assert any(part in refused.reason for part in why), (message, refused)
    assert held(service) == before


@pytest.mark.parametrize("role", sorted(ROLES))
def test_a_client_in_the_wrong_role_is_refused_and_changes_nothing(service, wire, run, role):
    insider = Asker("insider", role, "s")
    wire = wire()
    epoch = wire.hello(insider).epoch
    before = held(service)
    for message, body in every_request(run.lease, insider.name, epoch):
        if role in p.ASKED_BY[type(message)]:
            continue
        for asker in (insider, Asker(ACTOR.name, role, ACTOR.session), Asker(LEARNER.name, role, LEARNER.session)):
            refused = wire.ask(message, body, asker=asker)
            assert isinstance(refused, p.Refused), (message, asker)
            assert f"of role '{role}'" in refused.reason
    assert held(service) == before


def test_a_client_that_says_another_role_than_it_was_greeted_in_is_refused_and_changes_nothing(service, wire, run):
    wire, before = wire(), held(service)
    for message, body in every_request(run.lease):
        for role in p.ASKED_BY[type(message)]:
            for known in CLIENTS:
                if role != known.role:
                    refused = wire.ask(message, body, asker=Asker(known.name, role, known.session))
                    assert isinstance(refused, p.Refused), (message, role, known)
    assert held(service) == before


def test_an_actor_that_speaks_for_another_is_refused_and_changes_nothing(service, wire, run):
    other = Asker("actor-1", "actor", "s")
    wire = wire()
    wire.hello(other)
    before = held(service)
    for message, body in every_request(run.lease):
        if p.ASKED_BY[type(message)] == {"actor"}:
            refused = wire.ask(message, body, asker=other)
            assert isinstance(refused, p.Refused)
            assert refused.reason.endswith("for 'actor-0': a client asks for itself")
    assert held(service) == before


def test_what_was_said_before_changes_nothing_when_it_is_said_again(service, wire, run):
    for request in (
        p.DrawRequest(1, 0, 0, 1, 0.0),
        p.StepFinished(1, 1, 0),
        p.Published(0, 1),
        p.CheckpointDurable(1, 0),
    ):
        assert not isinstance(run.wire.ask(request, asker=LEARNER), p.Refused)
    run.wire.ask(p.GiveUp(ACTOR.name, 1, run.lease.lease_id, 1, [0], "x"), asker=ACTOR)
    run.wire.ask(p.Drain(), asker=LAUNCH)

    def rows_and_status():
        rows = [row for row in held(service) if row[1] != b"state\0"]
        return rows, msgspec.structs.asdict(run.wire.ask(p.StatusRequest(), asker=LAUNCH)) | {"spent_s": {}}

    said, (rows, status) = list(run.wire.sent), rows_and_status()
    for frames in said * 2 + said[::-1]:
        wire().send(frames)
    rows_then, status_then = rows_and_status()
    assert rows_then == rows
    assert status_then["ledger"].pop("duplicates") == 6, "two trajectories, pushed three times more"
    assert status["ledger"].pop("duplicates") == 0
    assert status_then == status


def test_what_an_older_process_said_is_refused_once_a_newer_one_has_its_name(service, wire, run):
    newer = Asker(LEARNER.name, "learner", "newer")
    said = [frames for frames in run.wire.sent if p.decode(frames[0]).asker == LEARNER]
    run.wire.hello(newer)
    run.wire.ask(p.BeginIncarnation(newer.session, 0, 0), asker=newer)
    before = held(service)
    assert len(said) == 3
    for frames in said:
        assert "was replaced by a newer process" in wire().send(frames).reason
    assert held(service) == before


def test_who_sends_nonsense_is_named_and_counted_and_does_not_hide_the_others(service, wire, run):
    junk, actor = wire(), wire()
    junk._socket.send_multipart([b"junk"])
    actor.ask(p.Renew(ACTOR.name, 1, []), asker=ACTOR)
    for _ in range(3):
        assert isinstance(actor.ask(p.Drain(), asker=ACTOR), p.Refused)
    row = make_trajectory(run.lease, 0, seq=5, reward=float("nan"))
    actor.ask(p.Push(ACTOR.name, 1), bytes(schema.encode([row], FACTS.run_id)), asker=ACTOR)
    keep = p.HandOn(ACTOR.name, 1, run.lease.lease_id, run.lease.attempt, run.lease.sample_indices, goes_on=True)
    rows = [make_trajectory(run.lease, index, seq=0) for index in run.lease.sample_indices[:2]]
    assert actor.ask(keep, bytes(schema.encode(rows, FACTS.run_id)), asker=ACTOR) == p.Done()
    told = {}
    while len(told) < 2:
        status = run.wire.ask(p.StatusRequest(), asker=LAUNCH)
        told = status.nonsense
    (stranger,) = told.keys() - {ACTOR.name}
    assert stranger.startswith(f"{STRANGER} (process ")
    assert (told[stranger].count, told[stranger].first) == (1, "failed validation: header")
    first = "Drain is for launch, and 'actor-0' is of role 'actor'"
    assert (told[ACTOR.name].count, told[ACTOR.name].first) == (6, first)
    assert status.quarantined_by_reason == {"header": 1, "reward not finite": 1, "finish_reason": 2}


@pytest.mark.parametrize("draw_waits", [False, True])
def test_messages_that_cannot_be_read_are_counted_and_cost_no_commit(service, wire, run, draw_waits):
    def num_commits():
        return service._store._env.info()["last_txnid"]

    if draw_waits:
        assert run.wire.ask(p.DrawRequest(1, 0, 0, 1, 60.0), asker=LEARNER).ready
        draw = p.encode(1, p.DrawRequest(2, 1, 0, 1, 60.0), run_id=FACTS.run_id, asker=LEARNER)
        wire()._socket.send_multipart([draw])
        wait_until(lambda: service._parked, "the draw to wait")
    junk, before = wire(), num_commits()
    for _ in range(50):
        junk._socket.send_multipart([b"junk"])
        time.sleep(0.002)
    wait_until(lambda: sum(each.count for each in service._senders.told().values()) == 50, "the last of them")
    assert num_commits() == before
    status = run.wire.ask(p.StatusRequest(), asker=LAUNCH)
    assert status.quarantined_by_reason == {"header": 50}
    assert status.ledger["gap"] == 0


def test_messages_that_cannot_be_read_are_counted_once_a_full_disk_has_room(service, wire, run, monkeypatch):
    def full(change):
        raise StoreFull("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(service._store, "write", full)
        wire()._socket.send_multipart([b"junk"])
        wait_until(service._senders.told, "the message")
        assert run.wire.ask(p.StatusRequest(), asker=LAUNCH).kind == p.RETRY
    assert run.wire.ask(p.StatusRequest(), asker=LAUNCH).quarantined_by_reason == {"header": 1}


def test_senders_are_told_apart_up_to_a_number():
    senders = Senders()
    for number in range(MAX_SENDERS + 5):
        senders.blame(f"actor-{number}", "x" * 5000)
    told = senders.told()
    assert len(told) == MAX_SENDERS + 1
    assert told[OTHERS].count == 5
    assert max(len(each.first) for each in told.values()) < 300


def test_what_a_sender_sent_at_first_moves_no_cursor_where_it_is_shown():
    senders = Senders()
    senders.blame("actor-0", "a kind \x1b[2J\n")
    assert senders.told()["actor-0"].first == "a kind ?[2J?"
