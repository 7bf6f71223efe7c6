"""Samplers, replay, and the indexes for draws, without sockets."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from leeway.buffer import samplers
from leeway.buffer.config import BufferConfig
from leeway.buffer.errors import BufferRefused, StoreError
from leeway.common.staleness import PolicyVersion
from leeway.common.user_input import UserFileError
from tests.world.buffer import Actor, InProcessBuffer, facts, generate, index_faults, train, weights_of

UNBOUNDED = {"max_lag": "unbounded", "vocab_size": 8192, "max_tokens": 8192}


def config(sampler, **keys):
    return BufferConfig(sampler=sampler, **{"max_uses": "unlimited", **keys})


def started(make, settings, **changes):
    buffer = make(settings, **{**UNBOUNDED, **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def drawn_in(buffer, num_steps, first=1):
    """Return how often each group is drawn in `num_steps` steps."""
    return Counter(group for step in range(first, first + num_steps) for group in train(buffer, step).group_ids)


def assert_near(counts, expected, num):
    """Check that frequencies are within four standard deviations of the expected ones."""
    for key, share in expected.items():
        assert abs(counts[key] - num * share) <= 4 * math.sqrt(num * share * (1 - share)) + 1, (key, counts)


# --- samplers -------------------------------------------------------------------------------------------


def test_reward_softmax_draws_in_proportion_to_exp_of_reward_over_temperature(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.samplers.REWARD_TEMPERATURE", 0.5)
    buffer, actor = started(make, config("reward_softmax"), groups_per_step=1)
    groups = {generate(buffer, actor, 1, [reward])[0]: reward for reward in (0.0, 0.5, 1.0, 1.5)}
    total = sum(math.exp(2 * reward) for reward in groups.values())
    assert_near(drawn_in(buffer, 600), {g: math.exp(2 * r) / total for g, r in groups.items()}, 600)


def test_uniform_draws_every_group_equally_often(make):
    buffer, actor = started(make, config("uniform"), groups_per_step=2)
    groups = generate(buffer, actor, 6)
    assert_near(drawn_in(buffer, 300), dict.fromkeys(groups, 1 / 3), 300)


def test_prioritised_draws_by_the_spread_of_rewards_and_the_age(make, monkeypatch):
    monkeypatch.setattr(samplers, "EPSILON", 0.2)
    monkeypatch.setattr(samplers, "TAU", 2.0)
    buffer, actor = started(make, config("prioritised"), groups_per_step=1)
    flat, spread = generate(buffer, actor, 1, [1.0]) + generate(buffer, actor, 1, [1.0, 0.0])
    for step in range(1, 3):
        train(buffer, step)
    young = generate(buffer, actor, 1, [1.0], version=PolicyVersion(0, 2))[0]
    weight = {flat: 0.2, spread: 0.7, young: 0.2 * math.exp(2 / 2.0)}
    total = sum(weight.values())
    assert_near(drawn_in(buffer, 600, first=3), {g: w / total for g, w in weight.items()}, 600)


def test_on_policy_share_takes_the_newest_and_leaves_the_rest_to_another_sampler(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.samplers.REWARD_TEMPERATURE", 0.02)
    settings = config("on_policy_share", on_policy_share=0.5, replay_sampler="reward_softmax")
    buffer, actor = started(make, settings, groups_per_step=4)
    best = generate(buffer, actor, 2, [1.0])
    generate(buffer, actor, 6, [0.0])
    train(buffer, 1)
    newest = generate(buffer, actor, 2, [0.0], version=PolicyVersion(0, 1))
    assert set(train(buffer, 2).group_ids) == {*newest, *best}
    newest = generate(buffer, actor, 2, [2.0], version=PolicyVersion(0, 2))
    again = train(buffer, 3).group_ids
    assert sorted(again) == sorted({*newest, *best}), "the newest groups are also the best, and each is drawn once"


def test_a_replay_draw_waits_for_as_many_groups_as_a_step_has(make):
    buffer, actor = started(make, config("uniform"), groups_per_step=3)
    generate(buffer, actor, 2)
    reply, _ = buffer.draw(1, 0)
    assert (reply.ready, "has 2 of 3 groups" in reply.waiting_for) == (False, True)
    generate(buffer, actor, 1)
    assert buffer.draw(1, 0)[0].ready


# --- randomness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["uniform", "reward_softmax", "prioritised", "on_policy_share"])
def test_the_same_store_and_step_give_the_same_draw_even_after_a_restart(make, sampler):
    def run(seed, restarts):
        buffer, actor = started(
            make, BufferConfig(sampler=sampler, max_uses=3), groups_per_step=3, seed=seed, num_prompts=50
        )
        for reward in range(10):
            generate(buffer, actor, 1, [0.1 * reward], tokens=1 << reward)
        drawn = []
        for step in range(1, 7):
            if restarts:
                buffer.restart()
            drawn.append(train(buffer, step).record_ids)
        return drawn

    assert run(1, False) == run(1, True) != run(2, False)


# --- replay -----------------------------------------------------------------------------------------


def test_a_group_is_used_max_uses_times_and_its_samples_stay_trained(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=2), groups_per_step=2)
    groups = generate(buffer, actor, 4)
    used = drawn_in(buffer, 4)
    assert used == dict.fromkeys(groups, 2)
    ledger = buffer.status().ledger
    assert (ledger["trained"], ledger["uses"], ledger["redone_uses"]) == (8, 16, 0)
    assert not buffer.draw(5, 4)[0].ready


def test_a_group_of_an_unfinished_draw_is_in_no_other_draw(make):
    buffer, actor = started(make, config("uniform"), groups_per_step=2)
    generate(buffer, actor, 4)
    first, second = buffer.draw(1, 0)[0], buffer.draw(2, 1)[0]
    assert set(first.group_ids).isdisjoint(second.group_ids)
    assert not buffer.draw(3, 2)[0].ready
    buffer.finish(1, 1)
    assert set(buffer.draw(3, 2)[0].group_ids) == set(first.group_ids)


def test_a_restarted_learner_redoes_replayed_steps_unchanged(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=4), groups_per_step=2)
    generate(buffer, actor, 5)
    drawn = {step: train(buffer, step).record_ids for step in range(1, 7)}
    buffer.draw(7, 6)
    for attempt in (1, 2):
        buffer.begin(2, 2, session=f"restarted {attempt}")
        buffer.restart()
        for step in range(3, 7):
            assert train(buffer, step, incarnation=attempt).record_ids == drawn[step]
    ledger = buffer.status().ledger
    assert (ledger["uses"], ledger["redone_uses"]) == (4 * 6 + 2 * 4 * 4, 2 * 4 * 4)
    assert buffer.store.read(lambda tx: sum(group.uses for _, group in tx.groups.all_items())) == 2 * 6


def test_a_replayed_group_past_the_age_bound_is_closed_and_an_unused_one_dropped(make):
    buffer, actor = started(
        make, BufferConfig(sampler="on_policy_share", on_policy_share=1.0, max_uses=9), groups_per_step=1, max_lag=1,
        max_actor_lag=0,
    )  # fmt: skip
    unused = actor.lease(1)[0]
    used = generate(buffer, actor, 1)[0]
    train(buffer, 1)
    actor.work(unused)
    generate(buffer, actor, 1)
    train(buffer, 2)
    newest = generate(buffer, actor, 1)[0]
    assert train(buffer, 3).group_ids == [newest]
    ledger = buffer.status().ledger
    phases = buffer.store.read(lambda tx: {g: group.phase for (g,), group in tx.groups.all_items()})
    assert (ledger["dropped_stale"], phases[used], phases[unused.group_id]) == (2, "closed", "closed")
    leased_again = {lease.prompt_id for lease in actor.lease()}
    used_prompt = buffer.store.read(lambda tx: tx.groups.require(used).prompt_id)
    assert (unused.prompt_id in leased_again, used_prompt in leased_again) == (True, False)


def test_a_damaged_record_takes_its_group_out_of_replay(make):
    buffer, actor = started(make, config("uniform"), groups_per_step=1)
    damaged, good = generate(buffer, actor, 2)
    record = buffer.store.read(lambda tx: tx.groups.require(damaged).records[0])
    kept = buffer.store.read(lambda tx: tx.records.require(record))

    def flip(tx):
        key = record.to_bytes(8, "big")
        stored = bytearray(tx.records._txn.get(key, db=tx.records._db))
        stored[40] ^= 1
        tx.records._txn.put(key, bytes(stored), db=tx.records._db)

    buffer.store.write(flip)
    for step in range(1, 12):
        assert train(buffer, step).group_ids == [good]
    assert [buffer.status().ledger[name] for name in ("evicted_unused", "trained")] == [2, 2]
    buffer.store.write(lambda tx: tx.records.put(kept, record))


def test_under_unbounded_replay_waiting_groups_do_not_close_admission(make):
    buffer, actor = started(make, config("uniform"), groups_per_step=2, num_prompts=100)
    generate(buffer, actor, 40)
    assert len(actor.lease(100)) == 8, "the groups of four steps may be in flight at once"
    plain, worker = started(make, BufferConfig(), groups_per_step=2)
    generate(plain, worker, 8)
    assert worker.lease(100) == []


def test_under_bounded_replay_used_groups_make_room_for_new_ones(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=50), max_lag=30, max_actor_lag=0)
    most = len(generate(buffer, actor, 62))
    assert actor.lease(1) == [], "all groups wait for their first use, so admission is closed"
    for step in range(1, 10):
        train(buffer, step)
    assert len(actor.lease(100)) == most - buffer.core.groups.index.num_unused > 0
    assert buffer.status().num_ready_groups == most


# --- indexes ----------------------------------------------------------------------------------------


def test_items_are_drawn_in_proportion_to_weights_down_to_the_smallest_share():
    weights, random = weights_of({3: 0.0, 4: math.log(3), 9000: math.log(4), 70: -1e9}), np.random.default_rng(0)
    drawn = [weights.choose(2, random) for _ in range(4000)]
    assert_near(Counter(first for first, _ in drawn), {3: 1 / 8, 4: 3 / 8, 9000: 4 / 8}, 4000)
    after_4 = [second for first, second in drawn if first == 4]
    assert_near(Counter(after_4), {3: 1 / 5, 9000: 4 / 5}, len(after_4))
    assert 70 not in {item for both in drawn for item in both}
    for _ in range(20):
        order = weights.choose(9, random)
        assert (order[-1], sorted(order)) == (70, [3, 4, 70, 9000])
        assert set(weights.choose(1, random, {4, 3})) == {9000}
    weights.put(4, -math.inf)
    assert weights.choose(9, random, {9000, 3}) == [70]
    assert weights_of({}).choose(3, random) == []


MINE = """
def seldom_solved(group, oldest):
    if group.mean_reward == 0.25:
        raise RuntimeError("no weight for a quarter")
    return float("nan") if group.mean_reward == 0.5 else 2 * group.mean_reward

class NewestFirst:
    def choose(self, candidates, num_groups, random, taken=frozenset()):
        return [key.group_id for key in reversed(candidates.ready) if key.group_id not in taken][:num_groups]

class Twice:
    def choose(self, candidates, num_groups, random, taken=frozenset()):
        return [candidates.ready[0].group_id] * num_groups

class Broken:
    def choose(self, candidates, num_groups, random, taken=frozenset()):
        raise KeyError("lost")

newest_first, twice, broken, nothing = NewestFirst(), Twice(), Broken(), 3

def spread(group, oldest):
    return 0.0 if group.reward_spread else float("-inf")

def short(group, oldest):
    return -max(group.completion_lengths)

def of_group_alone(group):
    return 0.0

def not_a_number(group, oldest):
    return None
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return lambda name: f"{tmp_path}/mine.py:{name}"


def test_a_user_defined_sampler_chooses_the_groups_of_a_step(make, mine):
    buffer, actor = started(make, config(mine("newest_first")), groups_per_step=2)
    groups = generate(buffer, actor, 5)
    assert sorted(train(buffer, 1).group_ids) == sorted(groups[-2:])


def test_a_user_defined_weight_determines_draws_and_is_one_if_it_fails(make, mine, caplog):
    settings = config("on_policy_share", on_policy_share=0.0, replay_sampler=mine("seldom_solved"))
    buffer, actor = started(make, settings, groups_per_step=1)
    groups = {generate(buffer, actor, 1, [reward])[0]: reward for reward in (0.0, 0.25, 0.5, 1.0)}
    weights = {group: math.exp(2 * reward) if reward in (0.0, 1.0) else 1.0 for group, reward in groups.items()}
    total = sum(weights.values())
    assert_near(drawn_in(buffer, 600), {group: weight / total for group, weight in weights.items()}, 600)
    assert "no weight for a quarter" in caplog.text
    assert f"buffer.replay_sampler = '{mine('seldom_solved')}' returned NaN for group" in caplog.text
    failures = [record.args[-1] for record in caplog.records if "failures so far" in record.message]
    assert failures == [2**i for i in range(len(failures))], (
        "a failure is logged if it is the first or if the number of failures has doubled"
    )


def test_a_group_with_a_user_defined_weight_of_zero_is_drawn_last(make, mine):
    buffer, actor = started(make, BufferConfig(sampler=mine("spread")), groups_per_step=1)
    alike, others = generate(buffer, actor, 1, [1.0]), generate(buffer, actor, 2, [0.0, 1.0])
    assert sorted(train(buffer, 1).group_ids + train(buffer, 2).group_ids) == others
    assert train(buffer, 3).group_ids == alike


def test_a_user_defined_weight_can_read_the_lengths_of_a_group(make, mine):
    buffer, actor = started(make, BufferConfig(sampler=mine("short")), groups_per_step=1)
    groups = [generate(buffer, actor, 1, tokens=tokens)[0] for tokens in (900, 8, 300)]
    assert [train(buffer, step).group_ids[0] for step in (1, 2, 3)] == [groups[1], groups[2], groups[0]]


@pytest.mark.parametrize(
    ("name", "message"),
    [("twice", "chose group 1, which is already drawn or not ready"), ("broken", "raised KeyError: 'lost'")],
)
def test_a_failing_user_defined_sampler_is_reported_to_the_learner_by_name(make, mine, name, message):
    buffer, actor = started(make, config(mine(name)), groups_per_step=2)
    generate(buffer, actor, 3)
    with pytest.raises(BufferRefused, match=rf"buffer.sampler = '.*mine.py:{name}' {message}"):
        train(buffer, 1)


def test_the_samplers_of_the_examples_draw_as_described(make):
    file = Path(__file__).parents[2] / "examples" / "samplers.py"
    buffer, actor = started(make, config(f"{file}:newest_first"), groups_per_step=2)
    groups = generate(buffer, actor, 5)
    assert sorted(train(buffer, 1).group_ids) == sorted(groups[-2:])
    buffer, actor = started(make, config(f"{file}:hard_ones"), groups_per_step=1)
    solved = {generate(buffer, actor, 1, [reward])[0]: reward for reward in (0.0, 1.0)}
    total = sum(math.exp(-2 * reward) for reward in solved.values())
    assert_near(drawn_in(buffer, 400), {g: math.exp(-2 * r) / total for g, r in solved.items()}, 400)


def test_an_invalid_sampler_is_rejected_before_the_service_starts(mine):
    with pytest.raises(UserFileError, match=r"mine.py:nothing' is neither an object with choose.* nor a function"):
        samplers.build(config(mine("nothing")))
    with pytest.raises(UserFileError, match=r"mine.py:NewestFirst' is a class: name an instance"):
        samplers.build(config(mine("NewestFirst")))
    with pytest.raises(UserFileError, match=r"raised TypeError on a group of two samples: of_group_alone\(\) takes 1"):
        samplers.build(config(mine("of_group_alone")))
    with pytest.raises(UserFileError, match=r"raised TypeError on a group of two samples: float\(\)"):
        samplers.build(config(mine("not_a_number")))
    with pytest.raises(ValidationError, match="String should match pattern"):
        config("newest")


def test_a_new_sampler_uses_the_groups_of_the_previous_one(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=2), groups_per_step=1)
    groups = generate(buffer, actor, 3, [0.0]) + generate(buffer, actor, 1, [9.0])
    train(buffer, 1)
    for sampler in ("fifo", "prioritised", "reward_softmax"):
        buffer.config = BufferConfig(sampler=sampler, max_uses=2)
        buffer.restart()
        assert buffer.status().num_ready_groups == 4
        assert buffer.faults() == []
    assert groups[-1] in train(buffer, 2).group_ids + train(buffer, 3).group_ids


def test_index_changes_of_an_uncommitted_transaction_are_rolled_back(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=2), max_lag=50)
    generate(buffer, actor, 6)
    open_lease = actor.lease(1)[0]
    train(buffer, 1)
    before = buffer.core.groups.index.ready.copy()

    def everything(tx):
        ready = list(buffer.core.groups.index.ready)
        buffer.core.groups.drop_ready(tx, tx.groups.require(ready[0].group_id), "evicted_unused")
        buffer.core.groups.hold(tx, tx.groups.require(ready[1].group_id))
        buffer.core.groups.lose_lease(tx, tx.groups.require(open_lease.group_id), "lease expired")
        buffer.core.groups.config = buffer.core.groups.config.model_copy(update={"capacity_trajectories": 1})
        buffer.core.groups.evict(tx)
        assert index_faults(buffer.core, tx) == []
        assert buffer.core.groups.index.ready != before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        buffer.store.write(everything)
    assert buffer.core.groups.index.ready == before
    assert buffer.core.groups.index.leases == {open_lease.lease_id: open_lease.group_id}
    assert buffer.faults() == []


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sampler": "fifo", "max_uses": "unlimited"}, "the same oldest groups at every step"),
        ({"sampler": "on_policy_share", "replay_sampler": "fifo", "max_uses": "unlimited"}, "replay_sampler = 'fifo'"),
        ({"sampler": "newest"}, "sampler"),
        ({"max_uses": 0}, "max_uses"),
    ],
)
def test_contradictory_settings_are_rejected_with_a_message(keys, message):
    with pytest.raises(ValidationError, match=message):
        BufferConfig(**keys)


@pytest.mark.parametrize("keys", [{"sampler": "uniform"}, {"max_uses": 2}])
def test_on_stale_wait_is_rejected_with_a_sampler_that_may_leave_a_group_behind(tmp_path, keys):
    with pytest.raises(StoreError, match="on_stale = 'wait'"):
        InProcessBuffer(tmp_path, facts(on_stale="wait"), BufferConfig(**keys))
