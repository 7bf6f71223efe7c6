"""Client and service over real sockets, in threads of one process."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from buffer import outbox
from buffer import service as service_module
from buffer.client import BufferClient
from buffer.config import BufferConfig
from buffer.errors import BufferRefused, BufferUnavailable, StoreError
from buffer.outbox import size_bytes
from buffer.protocol import STAGES, Credit, Lease
from buffer.schema import HANDED_ON
from buffer.service import BufferService, Credits
from buffer.store import PORT
from common.rpc.server import forget_port
from common.run import RunFacts
from common.staleness import StalenessConfig
from tests.trajectories import decode
from tests.world.buffer import make_trajectory
from tests.world.serving import serving
from tests.world.waiting import LIMIT_S

FACTS = RunFacts(
    run_id="r",
    seed=0,
    num_prompts=100,
    group_size=4,
    groups_per_step=2,
    vocab_size=64,
    max_tokens=16,
    staleness=StalenessConfig(max_lag=40),
)
CONFIG = BufferConfig()


@pytest.fixture
def service(tmp_path):
    service = BufferService(CONFIG, FACTS, tmp_path / "buffer")
    with serving(service) as service.address:
        yield service


@pytest.fixture
def connect(service):
    clients = []

    def make(name="actor-0", role="actor", run_id="r"):
        clients.append(BufferClient(service.address, run_id=run_id, role=role, name=name))
        clients[-1].connect()
        return clients[-1]

    yield make
    for client in clients:
        client.close(1.0)


@pytest.fixture
def learner(connect):
    learner = connect("learner", "learner")
    learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
    return learner


def test_a_waiting_draw_holds_up_nobody_and_is_answered_as_soon_as_it_is_ready(connect, learner):
    actor = connect()
    draw = learner.draw(1, 0, 0, 2, wait_s=2 * LIMIT_S)
    leases = actor.lease(2).result(60).leases
    pushed = [actor.push(make_trajectory(lease, index, seq=0)) for lease in leases for index in range(4)]
    assert {future.result(60).outcome for future in pushed} == {"committed"}
    batch = draw.result(LIMIT_S)
    assert batch.ready
    assert [row.group_id for row in decode(batch.body)] == [g for g in batch.group_ids for _ in range(4)]
    assert batch.rows.column("group_id").to_pylist() == [row.group_id for row in decode(batch.body)]


def test_a_draw_that_is_not_ready_in_time_names_who_owes_it(connect, learner):
    lease = connect().lease(1).result(60).leases[0]
    batch = learner.draw(1, 0, 0, 2, wait_s=0.1).result(60)
    assert not batch.ready
    assert batch.body == b""
    assert f"samples [0, 1, 2, 3] from actor-0 (lease {lease.lease_id})" in batch.waiting_for


def test_trajectories_pushed_together_share_commits(connect, learner, service, monkeypatch):
    actor = connect()
    leases = actor.lease(32).result(60).leases
    commits = []
    write = service._store.write
    monkeypatch.setattr(service._store, "write", lambda change: commits.append(1) or write(change))
    pushed = [actor.push(make_trajectory(lease, index, seq=0)) for lease in leases for index in range(4)]
    assert {future.result(60).outcome for future in pushed} == {"committed"}
    assert len(pushed) == 128
    assert len(commits) <= 16


def test_many_pushed_in_one_call_have_their_results_in_its_order_however_many_messages_they_take(
    connect, learner, monkeypatch
):
    monkeypatch.setattr(outbox, "MAX_ROWS_PER_MESSAGE", 3)
    actor = connect()
    leases = actor.lease(2).result(60).leases
    rows = [make_trajectory(lease, index, seq=0) for lease in leases for index in range(4)]
    late = replace(rows[0], lease_id=rows[0].lease_id + 1000)
    odd = replace(rows[5], reward=float("nan"))
    results = actor.push_many([rows[0], late, *rows[1:5], odd, *rows[6:]]).result(60)
    assert [result.outcome for result in results] == [
        "committed",
        "late",
        *["committed"] * 4,
        "quarantined",
        *["committed"] * 2,
    ]
    assert [result.seq for result in results] == list(range(9))
    assert actor.push_many([]).result(0) == []


def test_many_pushed_in_one_call_fail_together_but_the_good_ones_are_stored(connect, learner):
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [make_trajectory(lease, index, seq=0) for index in range(3)]
    rows[1].columns["unspeakable"] = object()
    with pytest.raises(TypeError):
        actor.push_many(rows).result(60)
    assert actor.push(rows[0]).result(60).outcome == "late"
    assert learner.status().result(60).ledger["committed"] == 2


def test_what_is_handed_on_goes_in_messages_of_as_many_samples_as_the_service_takes_in_one(
    connect, learner, monkeypatch
):
    monkeypatch.setattr("buffer.core.MAX_PUSHED_ROWS", 3)
    monkeypatch.setattr("buffer.client.MAX_ROWS_PER_MESSAGE", 3)
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [replace(make_trajectory(lease, index, seq=0, reward=None), finish_reason=HANDED_ON) for index in range(4)]
    actor.hand_on(lease, [0, 1, 2, 3], rows).result(60)
    assert actor.lease(1).result(60).leases[0].prefixes == [0, 1, 2, 3]
    assert learner.status().result(60).ledger["handed_on"] == 4


def test_the_status_says_where_the_time_of_the_service_went(connect, learner):
    before = learner.status().result(60).spent_s
    lease = connect().lease(1).result(60).leases[0]
    connect("actor-1")
    after = learner.status().result(60).spent_s
    assert lease
    assert tuple(after) == tuple(STAGES)
    assert all(after[stage] > before[stage] for stage in ("wait", "receive", "index", "commit", "acknowledge"))


def test_a_trajectory_that_cannot_be_encoded_fails_alone(connect, learner):
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [make_trajectory(lease, index, seq=0) for index in range(3)]
    rows[1].columns["unspeakable"] = object()
    good, bad, also_good = [actor.push(row) for row in rows]
    assert (good.result(60).outcome, also_good.result(60).outcome) == ("committed", "committed")
    with pytest.raises(TypeError):
        bad.result(60)


def test_a_step_far_larger_than_a_message_is_drawn_and_its_scores_are_written_back(tmp_path, monkeypatch):
    """8 MB of trajectories and 4 MB of scores, where a message to the service may have 1 MiB."""
    for module in (outbox, service_module):
        monkeypatch.setattr(module, "MAX_MESSAGE_MIB", 1)
    facts = FACTS.model_copy(update={"group_size": 32, "groups_per_step": 1, "max_tokens": 32_003})
    service = BufferService(CONFIG, facts, tmp_path / "buffer")
    with serving(service) as address:
        actor, learner = (BufferClient(address, run_id="r", role=n, name=n) for n in ("actor", "learner"))
        try:
            learner.connect()
            learner.published(learner.begin_incarnation(0, 0).result(60).incarnation, 0).result(60)
            actor.connect()
            (lease,) = actor.lease(1).result(60).leases
            rows = [make_trajectory(lease, index, seq=0, num_completion_tokens=32_000) for index in range(32)]
            for row in rows:
                row.token_ids[:] = 1
            assert {pushed.result(60).outcome for pushed in [actor.push(row) for row in rows]} == {"committed"}
            draw = learner.draw(1, 0, 0, 1, wait_s=5.0).result(60)
            assert (draw.ready, len(decode(draw.body))) == (True, 32)
            assert len(draw.body) > 7 * 2**20
            scores = [np.full(32_000, -index, np.float32) for index in range(32)]
            learner.write_scores(draw.record_ids, scores).result(60)
            learner.write_scores([], []).result(60)
            again = decode(learner.draw(1, 0, 0, 1, wait_s=5.0).result(60).body)
            assert [row.reference_logprobs[-1] for row in again] == [-index for index in range(32)]
            with pytest.raises(ValueError, match="exceeds the 1 MiB that the buffer takes in one"):
                learner.write_scores([1], [np.zeros(300_000, np.float32)])
            with pytest.raises(BufferRefused, match="record 999 is not in the buffer"):
                learner.write_scores([*draw.record_ids, 999], [*scores, scores[0]]).result(60)
        finally:
            actor.close(1.0)
            learner.close(1.0)


def test_leases_are_asked_for_one_request_after_the_other(connect, learner):
    actor = connect()
    first = actor.lease(1)
    actor._asked_for = Future()
    with pytest.raises(RuntimeError, match="'actor-0' asks for leases while its last request is not answered"):
        actor.lease(1)
    actor._asked_for = first
    groups = {first.result(60).leases[0].group_id, actor.lease(1).result(60).leases[0].group_id}
    assert len(groups) == 2


def test_refusals_and_a_closed_client_raise(connect, service):
    with pytest.raises(BufferRefused, match="serves run 'r', not 'other'"):
        connect("launch", "launch", run_id="other")
    client = connect()
    client.close()
    for call in (client.status, lambda: client.lease(1)):
        with pytest.raises(BufferUnavailable, match="closed"):
            call()


def test_who_pushes_does_not_take_its_own_standstill_for_the_silence_of_the_buffer(monkeypatch):
    """Its threads go on in any order. The IO thread, here what is said at each look, passes over the time."""
    now_s = 0.0
    transport = SimpleNamespace(address="here", heard_at=0.0, has_ended=False, wake=lambda: None)
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now_s))
    full = outbox.Outbox("actor-0", "r", 60.0, lambda: transport)
    full.open(0, Credit(rows=1, size_bytes=2**20))
    trajectory = make_trajectory(Lease(1, 1, 1, 0, [0], 0, 60.0), 0, seq=0)
    full.push(trajectory)
    looks = iter([(100.0, 0.0), (101.0, 99.0), (160.0, 99.0), (161.0, 99.0)])

    def wait(timeout_s: float) -> bool:
        nonlocal now_s
        now_s, transport.heard_at = next(looks)
        return False

    monkeypatch.setattr(full._freed, "wait", wait)
    with pytest.raises(BufferUnavailable, match="acknowledged none of 1 trajectories for 62 s"):
        full.push(trajectory)
    assert list(looks) == []


def test_an_address_in_use_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("common.rpc.server.BIND_RETRY_S", 0.0)
    first = BufferService(CONFIG, FACTS, tmp_path / "first", host="127.0.0.1")
    port = int(first.bind().rsplit(":", 1)[1])
    other = BufferService(CONFIG, FACTS, tmp_path / "other", host="127.0.0.1")
    (tmp_path / "other" / PORT).write_text(str(port))
    with pytest.raises(StoreError, match=f"cannot bind tcp://127.0.0.1:{port}"):
        other.bind()
    other.close()
    # as where another program has the port of a run that is resumed
    forget_port(tmp_path / "other" / PORT)
    other = BufferService(CONFIG, FACTS, tmp_path / "other", host="127.0.0.1")
    assert int(other.bind().rsplit(":", 1)[1]) != port
    other.close()
    first.close()


@pytest.mark.parametrize("odd", [{"reward_parts": None}, {"group_id": 2**70}, {"columns": {"deep": None}}])
def test_whatever_is_wrong_with_a_trajectory_fails_it_alone_and_the_client_lives(connect, learner, odd):
    if "columns" in odd:
        nested = []
        for _ in range(100_000):
            nested = [nested]
        odd = {"columns": {"deep": nested}}
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [make_trajectory(lease, index, seq=0) for index in range(2)]
    good, bad = actor.push(rows[0]), actor.push(replace(rows[1], **odd))
    assert good.result(60).outcome == "committed"
    with pytest.raises((AttributeError, OverflowError, RecursionError)):
        bad.result(60)
    assert actor.status().result(60).ledger["gap"] == 0


def test_a_draw_asked_again_over_a_new_connection_replaces_the_one_that_waits(connect, learner, service):
    first = learner.draw(1, 0, 0, 2, 60.0)
    again = connect("learner", "learner")
    again.begin_incarnation(0, 0)
    with pytest.raises(BufferRefused, match="was replaced"):
        learner.draw(1, 0, 0, 2, 60.0).result(60)
    waiting = again.draw(1, 0, 1, 2, 60.0)
    repeated = again.draw(1, 0, 1, 2, 0.2).result(60)
    assert not repeated.ready
    assert not service._parked
    for future in (first, waiting):
        assert not future.done() or isinstance(future.exception(), BufferRefused)


def test_a_request_that_cannot_be_sent_does_not_keep_later_ones_from_being_sent(connect, learner):
    actor = connect()
    assert len(actor.lease(np.int64(1)).result(60).leases) == 1
    assert len(actor.lease(1).result(60).leases) == 1


def test_credit_counts_the_columns_of_the_task():
    lease = Lease(1, 1, 1, 1, [0], 0, 1.0)
    small, large = make_trajectory(lease, 0, seq=0), make_trajectory(lease, 0, seq=0)
    large.columns["document"] = "x" * 2**20
    assert size_bytes(large) - size_bytes(small) >= 2**20


def test_clients_that_come_together_never_have_more_than_the_budget():
    budget = 64 * 2**20
    credits = Credits(budget)
    held = {}
    for number in range(8):  # each is greeted before any has sent a thing
        held[number] = credits.greet(f"actor-{number}", 0.0)
        assert sum(credit.size_bytes for credit in held.values()) <= budget
    for number in held:
        held[number] = credits.grant(f"actor-{number}", 1.0)
        assert sum(credit.size_bytes for credit in held.values()) <= budget
    assert sum(credit.size_bytes for credit in held.values()) == budget
