"""Client and service over real sockets, in threads of one process."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from leeway.buffer import outbox
from leeway.buffer import service as service_module
from leeway.buffer.client import BufferClient
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, BufferUnavailable, StoreError
from leeway.buffer.outbox import size_bytes
from leeway.buffer.protocol import STAGES, Credit, Lease
from leeway.buffer.schema import REQUEUED
from leeway.buffer.service import BufferService, Credits
from leeway.buffer.store import PORT
from leeway.common.rpc.server import forget_port
from leeway.common.run import RunFacts
from leeway.common.staleness import StalenessConfig
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


def test_a_waiting_draw_blocks_no_other_request_and_is_answered_when_it_is_ready(connect, learner):
    actor = connect()
    draw = learner.draw(1, 0, 0, 2, wait_s=2 * LIMIT_S)
    leases = actor.lease(2).result(60).leases
    pushed = [actor.push(make_trajectory(lease, index, seq=0)) for lease in leases for index in range(4)]
    assert {future.result(60).outcome for future in pushed} == {"committed"}
    batch = draw.result(LIMIT_S)
    assert batch.ready
    assert [row.group_id for row in decode(batch.body)] == [g for g in batch.group_ids for _ in range(4)]
    assert batch.rows.column("group_id").to_pylist() == [row.group_id for row in decode(batch.body)]


def test_a_draw_that_times_out_reports_missing_samples_and_their_actor(connect, learner):
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


def test_push_many_returns_results_in_order_over_several_messages(connect, learner, monkeypatch):
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


def test_push_many_fails_as_a_whole_but_stores_the_good_trajectories(connect, learner):
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [make_trajectory(lease, index, seq=0) for index in range(3)]
    rows[1].columns["unspeakable"] = object()
    with pytest.raises(TypeError):
        actor.push_many(rows).result(60)
    assert actor.push(rows[0]).result(60).outcome == "late"
    assert learner.status().result(60).ledger["committed"] == 2


def test_requeued_samples_are_split_into_messages_of_the_maximum_size(connect, learner, monkeypatch):
    monkeypatch.setattr("leeway.buffer.core.MAX_PUSHED_ROWS", 3)
    monkeypatch.setattr("leeway.buffer.client.MAX_ROWS_PER_MESSAGE", 3)
    actor = connect()
    lease = actor.lease(1).result(60).leases[0]
    rows = [replace(make_trajectory(lease, index, seq=0, reward=None), finish_reason=REQUEUED) for index in range(4)]
    actor.requeue(lease, [0, 1, 2, 3], rows).result(60)
    assert actor.lease(1).result(60).leases[0].prefixes == [0, 1, 2, 3]
    assert learner.status().result(60).ledger["requeued"] == 4


def test_the_status_reports_the_time_of_the_service_by_stage(connect, learner):
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
    """Use 8 MB of trajectories and 4 MB of scores with a limit of 1 MiB per message to the service."""
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
            with pytest.raises(ValueError, match="exceeds the limit of 1 MiB per message"):
                learner.write_scores([1], [np.zeros(300_000, np.float32)])
            with pytest.raises(BufferRefused, match="record 999 never existed in this buffer"):
                learner.write_scores([*draw.record_ids, 999], [*scores, scores[0]]).result(60)
        finally:
            actor.close(1.0)
            learner.close(1.0)


def test_lease_requests_are_sent_one_at_a_time(connect, learner):
    actor = connect()
    first = actor.lease(1)
    actor._last_lease = Future()
    with pytest.raises(RuntimeError, match="'actor-0' requested leases before its last request was answered"):
        actor.lease(1)
    actor._last_lease = first
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


def test_a_stalled_client_does_not_count_its_own_stall_as_silence_of_the_buffer(monkeypatch):
    """Threads resume in any order after a stall; `looks` fakes the clock and the last reply seen by the IO thread."""
    now_s = 0.0
    transport = SimpleNamespace(address="here", last_seen_s=0.0, has_ended=False, wake=lambda: None)
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now_s))
    full = outbox.Outbox("actor-0", "r", 60.0, lambda: transport)
    full.open(0, Credit(rows=1, size_bytes=2**20))
    trajectory = make_trajectory(Lease(1, 1, 1, 0, [0], 0, 60.0), 0, seq=0)
    full.push(trajectory)
    looks = iter([(100.0, 0.0), (101.0, 99.0), (160.0, 99.0), (161.0, 99.0)])

    def wait(timeout_s: float) -> bool:
        nonlocal now_s
        now_s, transport.last_seen_s = next(looks)
        return False

    monkeypatch.setattr(full._freed, "wait", wait)
    with pytest.raises(BufferUnavailable, match="acknowledged none of 1 trajectories for 62 s"):
        full.push(trajectory)
    assert list(looks) == []


def test_an_address_in_use_raises_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("leeway.common.rpc.server.BIND_RETRY_S", 0.0)
    first = BufferService(CONFIG, FACTS, tmp_path / "first", host="127.0.0.1")
    port = int(first.bind().rsplit(":", 1)[1])
    other = BufferService(CONFIG, FACTS, tmp_path / "other", host="127.0.0.1")
    (tmp_path / "other" / PORT).write_text(str(port))
    with pytest.raises(StoreError, match=f"cannot bind tcp://127.0.0.1:{port}"):
        other.bind()
    other.close()
    # simulates that another program uses the port of a resumed run
    forget_port(tmp_path / "other" / PORT)
    other = BufferService(CONFIG, FACTS, tmp_path / "other", host="127.0.0.1")
    assert int(other.bind().rsplit(":", 1)[1]) != port
    other.close()
    first.close()


@pytest.mark.parametrize("odd", [{"reward_parts": None}, {"group_id": 2**70}, {"columns": {"deep": None}}])
def test_an_invalid_trajectory_fails_alone_and_the_client_keeps_running(connect, learner, odd):
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


def test_a_draw_repeated_over_a_new_connection_replaces_the_waiting_one(connect, learner, service):
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


def test_a_request_that_cannot_be_sent_does_not_block_later_ones(connect, learner):
    actor = connect()
    assert len(actor.lease(np.int64(1)).result(60).leases) == 1
    assert len(actor.lease(1).result(60).leases) == 1


def test_credit_counts_the_columns_of_the_task():
    lease = Lease(1, 1, 1, 1, [0], 0, 1.0)
    small, large = make_trajectory(lease, 0, seq=0), make_trajectory(lease, 0, seq=0)
    large.columns["document"] = "x" * 2**20
    assert size_bytes(large) - size_bytes(small) >= 2**20


def test_the_credit_of_clients_that_connect_together_never_exceeds_the_budget():
    budget = 64 * 2**20
    credits = Credits(budget)
    held = {}
    for number in range(8):  # each client is greeted before any client has sent data
        held[number] = credits.greet(f"actor-{number}", 0.0)
        assert sum(credit.size_bytes for credit in held.values()) <= budget
    for number in held:
        held[number] = credits.grant(f"actor-{number}", 1.0)
        assert sum(credit.size_bytes for credit in held.values()) <= budget
    assert sum(credit.size_bytes for credit in held.values()) == budget
