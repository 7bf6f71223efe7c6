"""What `verify` sees beyond the indexes of groups, and when the indexes are built anew."""

import pytest

from buffer import protocol as p
from buffer.config import BufferConfig
from buffer.eligible import EligibleIndex
from buffer.groups import Groups
from buffer.transaction import Table
from tests.world.buffer import Actor, InProcessBuffer, facts


@pytest.fixture
def busy(tmp_path):
    """A buffer with open leases, a row that came out of order, and a recorded draw."""
    buffer = InProcessBuffer(tmp_path, facts())
    actor = Actor(buffer)
    buffer.begin()
    leases = actor.lease(4)
    for lease in leases[:2]:
        actor.work(lease)
    buffer.push(actor.rows(leases[2])[1:])
    assert buffer.draw(1, 0)[0].ready
    assert buffer.faults() == []
    yield buffer
    buffer.close()


def change(table, field, make_other, *key):
    """Replace a field of a row."""

    def apply(tx):
        row = getattr(tx, table).require(*key)
        setattr(row, field, make_other(getattr(row, field)))
        getattr(tx, table).put(row, *key)

    return apply


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda tx: tx.leases.put(999, 3), "lease 3 leads to group 999, but group 3"),
        (change("actors", "num_seen_above", lambda count: count + 5, "actor-0"), "'actor-0' counts 6 sequence numbers"),
        (lambda tx: tx.seen.delete_texts("actor-0"), "'actor-0' counts 1 sequence numbers"),
        (lambda tx: tx.seen.put(b"", "nobody", 1, 7), "'nobody' counts 0 sequence numbers"),
        (change("draws", "record_ids", lambda ids: [9991, *ids[1:]], 1), "step 1 names 1 records that its groups do"),
        (change("draws", "record_ids", lambda ids: [-1, *ids[1:]], 1), "step 1 names 1 records that its groups do"),
        (change("draws", "record_ids", lambda ids: [*ids[:-1], 5], 1), "such as [5]"),
        (change("draws", "lengths", lambda lengths: [1] * len(lengths), 1), "step 1 has other lengths than"),
        (change("draws", "lengths", lambda lengths: lengths[1:], 1), "step 1 has other lengths than"),
        (change("draws", "lengths", lambda _: [], 1), "step 1 has other lengths than"),
    ],
)
def test_verify_names_what_disagrees(busy, damage, fault):
    busy.store.write(damage)
    assert any(fault in found for found in busy.faults()), busy.faults()


def settings_of(**knobs):
    return EligibleIndex(BufferConfig(**knobs)).settings


@pytest.mark.parametrize(
    ("sampler", "idle", "used"),
    [
        ("fifo", {"reward_temperature": 2.0, "age_tau": 2.0}, {"eviction": "lowest_reward"}),
        ("uniform", {"reward_temperature": 2.0, "on_policy_share": 0.9}, {"max_uses": 3}),
        ("reward_softmax", {"priority_alpha": 2.0}, {"reward_temperature": 2.0}),
        ("prioritised", {"reward_temperature": 2.0, "replay_sampler": "fifo"}, {"age_tau": 2.0}),
        ("prioritised", {}, {"priority_alpha": 2.0}),
        ("length_balanced", {"priority_alpha": 2.0}, {"sampler": "fifo"}),
        ("on_policy_share", {"on_policy_share": 0.9, "age_tau": 2.0}, {"replay_sampler": "prioritised"}),
    ],
)
def test_only_a_knob_of_the_sampler_in_use_changes_what_indexes_are_built_for(sampler, idle, used):
    knobs = {"sampler": sampler, "max_uses": 2}
    assert settings_of(**{**knobs, **idle}) == settings_of(**knobs) != settings_of(**{**knobs, **used})


def test_a_store_is_not_indexed_anew_for_a_knob_that_no_index_depends_on(make, monkeypatch):
    rebuilt = []
    monkeypatch.setattr(Groups, "rebuild", lambda groups, tx, last: rebuilt.append(last))
    buffer = make(BufferConfig(sampler="on_policy_share", on_policy_share=0.5))
    buffer.begin()
    for knobs in ({"on_policy_share": 0.6}, {"on_policy_share": 0.6, "reward_temperature": 2.0}):
        buffer.config = BufferConfig(sampler="on_policy_share", **knobs)
        buffer.restart()
        buffer.status()
    assert rebuilt == []
    buffer.config = BufferConfig(sampler="on_policy_share", replay_sampler="reward_softmax")
    buffer.restart()
    buffer.status()
    assert len(rebuilt) == 1


def test_lost_leases_are_issued_again_in_time_that_grows_with_their_number(make, monkeypatch):
    """Every key that a transaction reads is counted: a list of all leases for each one would be 512^2 / 2."""
    buffer = make(groups_per_step=128, max_lag="unbounded", num_prompts=1000)
    first = Actor(buffer, session="1")
    buffer.begin()
    assert len(first.lease(1000)) == 512
    again = Actor(buffer, session="2")
    num_read = 0
    scan = Table._scan

    def counted(table, start, **how):
        nonlocal num_read
        for each in scan(table, start, **how):
            num_read += 1
            yield each

    monkeypatch.setattr(Table, "_scan", counted)
    leases = buffer.ask(p.LeaseRequest(again.name, again.epoch, 1, 1000), p.LeaseGrant).leases
    assert [lease.attempt for lease in leases] == [2] * 512
    assert num_read < 10 * 512


def test_a_capacity_below_a_single_message_is_refused():
    with pytest.raises(ValueError, match=r"less than a single message may hold \(64 MiB\)"):
        BufferConfig(capacity_gib=1e-9)
