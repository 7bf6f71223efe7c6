"""Eviction by capacity and by sampler, and the listing of stored groups."""

from leeway.buffer import protocol as p
from leeway.buffer.config import BufferConfig
from leeway.buffer.offline.inspect import Inspection
from leeway.common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, train

UNBOUNDED = {"max_lag": "unbounded", "vocab_size": 8192, "max_tokens": 8192, "num_prompts": 100}


def started(make, config, **changes):
    buffer = make(config, **{**UNBOUNDED, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def stored(buffer):
    return buffer.store.read(lambda tx: {group for (group,) in tx.groups.all_keys()})


def found(buffer):
    return [group.row.group_id for group in Inspection(buffer.store).groups() if group.row.is_stored]


# --- eviction ---------------------------------------------------------------------------------------


def test_closed_groups_are_evicted_first_and_then_the_oldest_of_replay(make):
    settings = BufferConfig(sampler="on_policy_share", on_policy_share=1.0, max_uses=2, capacity_trajectories=20)
    buffer, actor = started(make, settings, groups_per_step=1)
    old = generate(buffer, actor, 4)
    for step in (1, 2):
        train(buffer, step)
    used_up = old[-1]
    buffer.ask(p.CheckpointDurable(2, 0), p.Done)
    new = generate(buffer, actor, 7, version=PolicyVersion(0, 2))
    assert stored(buffer) == {*old, *new} - {used_up}
    more = generate(buffer, actor, 2, version=PolicyVersion(0, 2))
    assert stored(buffer) == {*old[2:], *new, *more} - {used_up}
    ledger = buffer.status().ledger
    assert (ledger["trained"], ledger["evicted_unused"], buffer.status().num_records) == (2, 4, 20)


def test_records_of_a_recorded_draw_stay_until_a_durable_checkpoint(make):
    settings = BufferConfig(sampler="uniform", max_uses=2, capacity_trajectories=20)
    buffer, actor = started(make, settings, groups_per_step=1)
    generate(buffer, actor, 10)
    drawn = {step: train(buffer, step).record_ids for step in range(1, 7)}
    held = {record for records in drawn.values() for record in records}
    generate(buffer, actor, 20)
    assert held <= buffer.store.read(lambda tx: {record for (record,) in tx.records.all_keys()})
    buffer.begin(0, 0, session="restarted")
    for step, records in drawn.items():
        assert train(buffer, step, incarnation=1).record_ids == records
    buffer.ask(p.CheckpointDurable(6, 1), p.Done)
    assert buffer.status().num_records <= 20


def test_eviction_keeps_the_groups_that_admission_counts_on(make):
    """Check that groups remain to be drawn even if records that await a durable checkpoint exceed the capacity."""
    settings = BufferConfig(sampler="uniform", max_uses=2, capacity_trajectories=20)
    buffer, actor = started(make, settings, groups_per_step=1)
    for step in range(1, 40):
        generate(buffer, actor, 2)
        assert step < 3 or buffer.status().num_ready_groups >= 4
        train(buffer, step)
    assert buffer.status().num_records > 20


def test_eviction_removes_every_trace_of_a_group(make):
    settings = BufferConfig(sampler="fifo", max_uses=2, capacity_trajectories=20)
    buffer, actor = started(make, settings, groups_per_step=1)
    generate(buffer, actor, 30)
    kept = stored(buffer)
    assert len(kept) == 10
    assert found(buffer) == sorted(kept)
    ledger = buffer.status().ledger
    assert (ledger["evicted_unused"], ledger["waiting"]) == (40, 20)


# --- listing ----------------------------------------------------------------------------------------


def test_the_listing_shows_effective_versions_after_a_learner_restart(make):
    buffer, actor = started(make, BufferConfig(sampler="prioritised", max_uses=9), groups_per_step=1)
    groups = []
    for number in range(5):
        groups += generate(buffer, actor, 1, version=PolicyVersion(0, number))
        train(buffer, number + 1)
    buffer.begin(2, 2, session="restarted")
    versions = {group.row.group_id: group.oldest_version for group in Inspection(buffer.store).groups()}
    assert [versions[group] for group in groups] == [0, 1, 2, 2, 2]
    assert buffer.faults() == []
