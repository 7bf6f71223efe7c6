"""How a buffer is divided into shards, and what one of them knows of it: pure functions and rules, no sockets."""

import numpy as np
import pytest

from buffer import protocol as p
from buffer.config import BufferConfig
from buffer.draws import MAX_NAMED
from buffer.errors import BufferRefused, StoreError
from buffer.sharding.core import ShardCore
from buffer.sharding.division import (
    admission_shares,
    apportion,
    divide_step,
    must_wait,
    new_folders,
    owned_prompts,
    shard_of,
)
from buffer.store import Store
from buffer.transaction import Table
from common.staleness import PolicyVersion, StalenessConfig, StalenessContract
from tests.world.buffer import Actor, InProcessBuffer, facts


def supply(num_eligible, due=(), still_open=(), capacity=100):
    count = {at: list(due).count(at) for at in due}
    return p.PlanReply(num_eligible, capacity, count, {at: list(still_open).count(at) for at in still_open})


@pytest.fixture
def shards(tmp_path):
    """Three shards of one run, in this process."""
    made = [
        InProcessBuffer(
            tmp_path / f"shard-{shard}", facts(num_prompts=60, groups_per_step=3, shard=shard, num_shards=3)
        )
        for shard in range(3)
    ]
    yield made
    for each in made:
        each.close()


def draw(shard, step, plan, incarnation=0, version=None):
    """Draw a shard's part of a step; its record ids, or None where it must wait."""
    version = step - 1 if version is None else version
    request = p.DrawRequest(step, version, incarnation, plan[shard.facts.shard], 0.0, plan)
    answer = shard.store.write(lambda tx: shard.core.try_draw(tx, request))
    return None if answer is None else answer[0].record_ids


def hello(shard, session="1"):
    return shard.ask(
        p.Hello("actor", "actor-0", session, shard=shard.facts.shard, num_shards=shard.facts.num_shards), p.Welcome
    )


class ShardActor(Actor):
    """An actor at one shard."""

    def __init__(self, buffer):
        self.buffer, self.name, self.seq = buffer, "actor-0", 0
        self.epoch = hello(buffer).epoch


# --- prompts, slots, ids --------------------------------------------------------------------------


def test_every_prompt_belongs_to_exactly_one_shard_and_shards_are_alike_in_size():
    owned = [owned_prompts(facts(num_prompts=3000, shard=shard, num_shards=3)).tolist() for shard in range(3)]
    assert sorted(prompt for prompts in owned for prompt in prompts) == list(range(3000))
    assert all(900 < len(prompts) < 1100 for prompts in owned)
    assert all(shard_of(prompt, 3) == shard for shard in range(3) for prompt in owned[shard])


def test_a_prompt_stays_where_it_is_whatever_the_size_of_the_data():
    few = owned_prompts(facts(num_prompts=100, shard=1, num_shards=3)).tolist()
    many = owned_prompts(facts(num_prompts=1000, shard=1, num_shards=3)).tolist()
    assert [prompt for prompt in many if prompt < 100] == few


def test_one_shard_owns_every_prompt_and_all_of_the_admission():
    assert owned_prompts(facts(num_prompts=10)).tolist() == list(range(10))
    assert admission_shares(10, 1, 8) == [8]


@pytest.mark.parametrize(("total", "weights"), [(7, [1, 1, 1]), (8, [5, 3]), (100, [90, 10]), (1, [0, 4]), (0, [1, 2])])
def test_what_is_apportioned_adds_up_and_is_in_proportion(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1


def test_limits_are_kept_and_others_get_the_rest():
    assert apportion(9, [10, 1, 1], limits=[4, 9, 9]) in ([4, 3, 2], [4, 2, 3])
    assert apportion(9, [10, 1], limits=[4, 2]) == [4, 2]


@pytest.mark.parametrize("max_lag", [0, 1, 4])
@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_the_shares_of_admission_add_up_to_the_capacity_and_none_is_empty(max_lag, num_shards):
    contract = StalenessContract(StalenessConfig(max_lag=max_lag), 4)
    shares = admission_shares(1000, num_shards, contract.capacity())
    assert sum(shares) == contract.capacity()
    assert min(shares) >= 1


def test_more_shards_than_groups_may_be_outstanding_are_refused(tmp_path):
    with pytest.raises(StoreError, match=r"buffer\.shards = 5.* only 4 groups"):
        ShardCore(BufferConfig(), facts(num_prompts=100, groups_per_step=4, max_lag=0, num_shards=5), lambda: 0.0)


def test_each_shard_leases_its_own_prompts_under_ids_that_name_it(shards):
    seen = set()
    for number, shard in enumerate(shards):
        shard.begin()
        leases = ShardActor(shard).lease()
        assert leases
        for lease in leases:
            assert shard_of(lease.prompt_id, 3) == lease.lease_id % 3 == lease.group_id % 3 == number
        seen |= {(lease.lease_id, lease.group_id, lease.prompt_id) for lease in leases}
    assert len({ids[0] for ids in seen}) == len({ids[1] for ids in seen}) == len({ids[2] for ids in seen}) == len(seen)
    assert len(seen) == StalenessContract(shards[0].facts.staleness, 3).capacity()


def test_a_shard_goes_through_all_of_its_prompts_before_it_repeats_one(tmp_path):
    run = facts(num_prompts=20, groups_per_step=2, max_lag="unbounded", shard=1, num_shards=2)
    buffer = InProcessBuffer(tmp_path / "b", run)
    mine = sorted(owned_prompts(buffer.facts).tolist())
    buffer.begin()
    actor = ShardActor(buffer)
    seen, step = [], 0
    while len(seen) < 2 * len(mine):
        for lease in actor.lease():
            seen.append(lease.prompt_id)
            actor.work(lease)
        step += 1
        assert draw(buffer, step, {1: 1, 0: 1}) is not None
        buffer.finish(step, step)
        buffer.publish(step)
    buffer.close()
    assert sorted(seen[: len(mine)]) == sorted(seen[len(mine) : 2 * len(mine)]) == mine


def test_a_shard_without_prompts_grants_nothing_and_says_so(tmp_path):
    empty = next(shard for shard in range(8) if not len(owned_prompts(facts(num_prompts=3, shard=shard, num_shards=8))))
    buffer = InProcessBuffer(tmp_path / "b", facts(num_prompts=3, groups_per_step=4, shard=empty, num_shards=8))
    buffer.begin()
    assert ShardActor(buffer).lease() == []
    assert buffer.store.read(buffer.core.leases.closed_because) == f"no prompt belongs to shard {empty} of 8"
    buffer.close()


def test_a_client_that_knows_another_number_of_shards_is_refused(shards):
    with pytest.raises(BufferRefused, match="this is shard 1 of 3, the client looked for shard 0 of 1"):
        shards[1].hello("actor-0")


def test_a_store_of_another_number_of_shards_is_refused(tmp_path):
    Store(tmp_path / "shard-0", facts(num_shards=2)).close()
    with pytest.raises(StoreError, match="num_shards = 2 where this service has 3"):
        Store(tmp_path / "shard-0", facts(num_shards=3))


def test_a_folder_with_another_number_of_shards_is_refused(tmp_path):
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    Store(whole, facts()).close()
    for shard in range(2):
        Store(divided / f"shard-{shard}", facts(shard=shard, num_shards=2)).close()
    assert new_folders(whole, 1) == [whole]
    assert new_folders(divided, 2) == [divided / "shard-0", divided / "shard-1"]
    with pytest.raises(StoreError, match=r"has 1 shards and .* shards = 2"):
        new_folders(whole, 2)
    with pytest.raises(StoreError, match=r"has 2 shards and .* shards = 1"):
        new_folders(divided, 1)


def test_a_shard_promises_a_step_no_more_than_it_could_lease_anew(tmp_path):
    """All that was promised leaves, as under a smaller token_budget, and the step must become ready all the same."""
    config = BufferConfig(sampler="uniform", max_uses=4, replay_steps=1.0)
    where = {"max_lag": 16, "max_tokens": 64, "groups_per_step": 8, "num_prompts": 200, "num_shards": 2}
    first, second = made = [InProcessBuffer(tmp_path / str(i), facts(shard=i, **where), config) for i in (0, 1)]
    actor, other = map(ShardActor, made)

    def plan(step, incarnation=0):
        told = [each.ask(p.PlanRequest(step, step - 1, incarnation), p.PlanReply) for each in made]
        return divide_step(8, dict(enumerate(told)), in_order=False)

    def all_leased(tokens):
        for lease in actor.lease():
            actor.work(lease, num_completion_tokens=tokens)

    for each in made:
        each.begin()
    all_leased(40)
    for lease in other.lease():
        other.work(lease)
    parts = plan(1)
    assert None not in [draw(each, 1, parts) for each in made]
    all_leased(40)  # those of the second shard are slow
    other.lease()
    for each in made:
        each.finish(1, 1)
    first.facts = first.facts.model_copy(update={"token_budget": 20})
    first.restart()
    for each in made:
        each.begin(1, 1, session="again")
    parts = plan(2, 1)
    assert sum(parts.values()) == 8
    if draw(first, 2, parts, 1) is None:  # too long, all of them
        all_leased(4)
    assert None not in [draw(each, 2, parts, 1) for each in (first, second)]
    for each in made:
        each.close()


def test_a_shard_keeps_its_part_of_the_capacity(tmp_path):
    config = BufferConfig(capacity_trajectories=90, capacity_gib=3.0)
    parts = [
        ShardCore(config, facts(num_prompts=60, groups_per_step=3, max_lag=1, shard=shard, num_shards=3), lambda: 0.0)
        for shard in range(3)
    ]
    assert sum(part.groups.config.capacity_trajectories for part in parts) == pytest.approx(90, abs=2)
    assert sum(part.groups.config.capacity_gib for part in parts) == pytest.approx(3.0)


# --- how a step is divided ------------------------------------------------------------------------


def test_a_step_is_divided_in_proportion_to_what_is_eligible():
    assert divide_step(8, {0: supply(12), 1: supply(6), 2: supply(6)}, in_order=False) == {0: 4, 1: 2, 2: 2}


@pytest.mark.parametrize(
    ("num_groups", "ready"), [(12, [50] * 8), (2, [100, 101, 102, 103]), (4, [30, 3]), (6, [78, 72, 60, 72])]
)
def test_under_replay_a_shard_gives_in_proportion_over_many_steps_whatever_is_rounded(num_groups, ready):
    given = np.zeros(len(ready))
    for step in range(2000):
        supplies = {shard: supply(num) for shard, num in enumerate(ready)}
        for shard, num in divide_step(num_groups, supplies, in_order=False, step=step).items():
            given[shard] += num
    assert given.sum() == 2000 * num_groups
    assert given / given.sum() == pytest.approx(np.array(ready) / sum(ready), rel=0.05)


def test_a_step_takes_no_more_than_a_shard_has_or_can_promise():
    assert divide_step(6, {0: supply(1), 1: supply(50, capacity=3), 2: supply(2)}, in_order=False) == {
        0: 1,
        1: 3,
        2: 2,
    }


def test_a_shard_that_is_down_has_no_part_and_too_few_groups_elsewhere_wait_for_it():
    assert divide_step(6, {0: supply(3), 2: supply(3)}, in_order=False) == {0: 3, 2: 3}
    assert divide_step(6, {0: supply(3), 2: supply(2)}, in_order=False) == {}


def test_groups_that_no_later_step_could_use_go_first():
    """Shard 1 was down: by its eligible groups it would give one, but four of them are due now."""
    young = supply(20, due=[4] * 20)
    assert divide_step(5, {0: young, 1: supply(4, due=[0] * 4)}, in_order=False) == {0: 1, 1: 4}


def test_groups_that_later_steps_could_not_use_in_time_go_first():
    """Eight groups are due in the next step and five fit into each: three must go now."""
    plan = divide_step(5, {0: supply(40, due=[4] * 40), 1: supply(8, due=[1] * 8)}, in_order=False)
    assert plan == {0: 2, 1: 3}


def test_in_order_the_oldest_go_first_whatever_shard_has_them():
    plan = divide_step(4, {0: supply(3, due=[1, 5, 5]), 1: supply(9, due=[2, 3, 4, *[9] * 6])}, in_order=True)
    assert plan == {0: 1, 1: 3}


def test_a_step_waits_for_an_open_group_of_another_shard_that_it_would_leave_behind():
    ready = {0: supply(2, due=[2, 2]), 1: supply(2, due=[2, 2], still_open=[0])}
    assert must_wait({0: 2}, 2, ready)
    assert not must_wait({0: 2}, 2, {**ready, 1: supply(2, due=[2, 2], still_open=[1])})


# --- what a shard does with its part --------------------------------------------------------------


def prepared(shards):
    """Every shard has all the groups that it may have."""
    for shard in shards:
        shard.begin()
        actor = ShardActor(shard)
        for lease in actor.lease():
            actor.work(lease)


def test_a_part_is_recorded_with_the_whole_plan_and_asked_again_it_is_the_same(shards):
    prepared(shards)
    plan = {0: 2, 1: 1}
    first = draw(shards[0], 1, plan)
    assert len(first) == 4
    shards[0].restart()
    assert draw(shards[0], 1, plan) == first
    with pytest.raises(BufferRefused, match="is divided as"):
        draw(shards[0], 1, {0: 1, 1: 2})


def test_a_part_that_does_not_belong_to_a_whole_step_is_refused(shards):
    prepared(shards)
    with pytest.raises(BufferRefused, match="admission counts on 3 per step"):
        draw(shards[0], 1, {0: 2, 1: 2})


def test_the_next_learner_hears_how_recorded_steps_are_divided_and_redoes_them(shards):
    prepared(shards)
    plan = {0: 2, 1: 1}
    first = draw(shards[0], 1, plan)
    reply = shards[0].begin(session="second")
    assert (reply.incarnation, reply.plans) == (1, {1: plan})
    assert shards[1].begin(session="second").plans == {}
    assert draw(shards[0], 1, plan, incarnation=1) == first
    assert len(draw(shards[1], 1, plan, incarnation=1)) == 2


def test_a_shard_without_a_part_only_learns_the_version_and_how_fast_steps_are(shards):
    prepared(shards)
    shard = shards[2]
    for step in (1, 2, 5):  # it was down for the others
        shard.now_s += 4.0
        shard.ask(p.StepFinished(step, step, 0, took_part=False), p.Done)
        shard.ask(p.StepFinished(step, step, 0, took_part=False), p.Done)
    shard.ask(p.StepFinished(2, 2, 0, took_part=False), p.Done)
    assert shard.status().version == 5
    assert shard.core.groups.prompts.pace.step_s == 4.0
    assert shard.status().ledger["trained"] == 0
    assert shard.faults() == []
    with pytest.raises(BufferRefused, match="never drawn"):
        shard.finish(6, 6)


def test_a_step_that_was_drawn_ahead_elsewhere_does_not_stop_a_shard(shards):
    prepared(shards)
    assert draw(shards[2], 3, {0: 1, 1: 1, 2: 1}, version=2) is not None


def test_an_incarnation_gets_the_number_that_it_has_elsewhere(shards):
    prepared(shards)
    begin = p.BeginIncarnation("second", 0, 0, at_least=3)
    assert shards[0].ask(begin, p.IncarnationReply).incarnation == 3
    assert shards[0].ask(begin, p.IncarnationReply).incarnation == 3
    assert shards[0].ask(p.BeginIncarnation("second", 0, 0, at_least=4), p.IncarnationReply).incarnation == 4
    assert shards[0].status().ledger["gap"] == 0
    assert shards[0].faults() == []
    with pytest.raises(BufferRefused, match="replaced by incarnation 4"):
        shards[0].begin()


def test_an_offer_counts_what_can_be_used_and_says_when_it_is_due(shards):
    prepared(shards)
    shard = shards[0]
    offer = shard.ask(p.PlanRequest(1, 0, 0), p.PlanReply)
    assert offer.num_eligible == offer.capacity == shard.status().num_ready_groups
    assert offer.due == {4: offer.num_eligible}
    assert not offer.waits
    assert offer.ledger == shard.status().ledger
    assert shard.ask(p.PlanRequest(6, 5, 0), p.PlanReply).num_eligible == 0, "at version 5 they are too old"


def test_an_offer_reads_no_group_but_those_whose_owners_it_names(make, monkeypatch):
    shard, read, require = make(num_prompts=100, max_lag=8), [], Table.require
    shard.begin()
    assert len(Actor(shard).lease()) > 2 * MAX_NAMED
    monkeypatch.setattr(Table, "require", lambda table, *key: read.append(key) or require(table, *key))
    offer = shard.ask(p.PlanRequest(1, 0, 0), p.PlanReply)
    assert len(read) == MAX_NAMED, "it is asked many times a second, until the step can be divided"
    assert offer.ledger == shard.status().ledger


def test_samples_of_versions_that_a_shard_missed_are_welcome(shards):
    shards[0].begin()
    actor = ShardActor(shards[0])
    lease = actor.lease()[0]
    assert actor.work(lease, [0], version=PolicyVersion(0, 40)) == ["committed"]
    assert actor.work(lease, [1], version=PolicyVersion(0, 4000)) == ["quarantined"]
