"""Lengths: fidelity of what is trained to what was generated, and packing."""

import logging

import numpy as np
import pytest

from buffer.config import BufferConfig
from buffer.draws import Offer, best_fit, corrected, fill, well_packed
from buffer.length_model import (
    NUM_BUCKETS,
    Fidelity,
    LengthCounts,
    bounds_of,
    bucket_of,
    ks_distance,
)
from common.staleness import PolicyVersion
from tests.world.buffer import Actor, generate, train

LONG = {"vocab_size": 8192, "max_tokens": 8192, "num_prompts": 500}


def started(make, config, **changes):
    buffer = make(config, **{**LONG, "max_lag": "unbounded", **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def log_normal(random, num):
    return np.clip(random.lognormal(np.log(512), 1.0, num), 1, 8192).astype(int).tolist()


def offers_of(lengths, group_size=1):
    return [
        Offer(
            i,
            tuple(lengths[i * group_size : (i + 1) * group_size]),
            tuple(lengths[i * group_size : (i + 1) * group_size]),
        )
        for i in range(len(lengths) // group_size)
    ]


# --- buckets and counts -----------------------------------------------------------------------------


def test_every_length_lies_in_its_bucket():
    for length in [*range(1, 3000), 8192, 65536]:
        low, high = bounds_of(bucket_of(length))
        assert low <= length <= high
    assert bucket_of(0) == 0
    assert bucket_of(2**40) == NUM_BUCKETS - 1


def test_old_counts_fade_by_e_after_as_many_samples_as_the_memory_has():
    counts = LengthCounts()
    for _ in range(1000):
        counts.add([10], 1000)
    full = counts.counts[bucket_of(10)] / counts.unit
    for _ in range(1000):
        counts.add([500], 1000)
    assert counts.counts[bucket_of(10)] / counts.unit == pytest.approx(full / np.e, rel=0.01)
    for _ in range(60_000):
        counts.add([500], 1000)
    assert counts.total == pytest.approx(1001, rel=0.01)
    assert counts.shares()[bucket_of(500)] == pytest.approx(1.0)


def test_ks_is_0_for_the_same_lengths_and_1_for_disjoint_ones():
    fidelity = Fidelity()
    assert fidelity.now.ks == 0.0
    for length in (5, 50, 500):
        fidelity.generated.add([length], 1e6)
        fidelity.trained.add([length], 1e6)
    assert fidelity.now.ks == pytest.approx(0.0, abs=1e-5)
    for _ in range(9):
        fidelity.trained.add([5], 1e6)
    assert fidelity.now.ks == pytest.approx(10 / 12 - 1 / 3, abs=1e-4)
    assert ks_distance([1.0, 0.0], [0.0, 1.0]) == 1.0


def test_the_ratio_of_the_95th_percentiles_tells_starved_long_answers_to_a_bucket():
    fidelity = Fidelity()
    assert fidelity.now.p95_ratio == 1.0
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(5.0, 1.0, 4000)).astype(int) + 1
    kept = lengths[lengths < 600]
    for length in lengths:
        fidelity.generated.add([int(length)], 1e9)
    for length in kept:
        fidelity.trained.add([int(length)], 1e9)
    exact = np.quantile(kept, 0.95) / np.quantile(lengths, 0.95)
    assert exact < 0.7
    assert fidelity.now.p95_ratio == pytest.approx(exact, rel=0.1)


# --- fidelity ---------------------------------------------------------------------------------------


def test_starved_lengths_raise_the_distance_and_one_warning_that_names_them(make, caplog):
    settings = BufferConfig(sampler="reward_softmax", reward_temperature=0.01, max_uses=400)
    buffer, actor = started(make, settings, groups_per_step=2)
    generate(buffer, actor, 4, [1.0], tokens=16)
    generate(buffer, actor, 4, [0.0], tokens=3000)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 90):
            train(buffer, step)
    status = buffer.status()
    assert (status.fidelity_alarm, status.fidelity.ks) == (True, pytest.approx(0.5, abs=0.01))
    assert buffer.draw(90, 89)[0].fidelity == status.fidelity
    assert len(caplog.records) == 1
    assert "Starved: 2897-4095 tokens (50.0% of generated, 0.0% of trained)" in caplog.text


def test_faithful_training_raises_no_alarm(make, caplog):
    buffer, actor = started(make, BufferConfig(), groups_per_step=4)
    random = np.random.default_rng(0)
    for step in range(1, 60):
        for length in log_normal(random, 4):
            generate(buffer, actor, 1, tokens=min(length, 8000))
        train(buffer, step)
    assert buffer.status().fidelity.ks < 0.02
    assert not buffer.status().fidelity_alarm
    assert caplog.records == []


def test_a_redone_step_does_not_count_its_lengths_again(make):
    buffer, actor = started(make, BufferConfig(sampler="uniform", max_uses=9), groups_per_step=2)
    generate(buffer, actor, 4)
    for step in (1, 2, 3):
        train(buffer, step)
    trained = buffer.store.read(lambda tx: tx.state.fidelity.trained.total)
    assert trained == pytest.approx(12, rel=0.01)
    buffer.begin(0, 0, session="restarted")
    for step in (1, 2, 3):
        train(buffer, step, incarnation=1)
    assert buffer.store.read(lambda tx: tx.state.fidelity.trained.total) == trained


def test_the_correction_brings_trained_lengths_nearer_to_generated_ones(make):
    distances = {}
    for correction in (False, True):
        settings = BufferConfig(
            sampler="reward_softmax", reward_temperature=0.5, max_uses=40, length_correction=correction
        )
        buffer, actor = started(make, settings, groups_per_step=4, group_size=1)
        random = np.random.default_rng(1)
        for length in log_normal(random, 60):
            generate(buffer, actor, 1, [1000.0 / (length + 500)], tokens=min(length, 8000))
        for step in range(1, 80):
            train(buffer, step)
        distances[correction] = buffer.status().fidelity.ks
    assert distances[True] < 0.4 * distances[False]


def test_the_correction_takes_the_samplers_order_before_anything_was_trained_and_all_where_there_are_no_more():
    offers = offers_of([10, 20, 30, 40])
    assert corrected(offers, 4, Fidelity()) == offers
    fidelity = Fidelity()
    for length in (10, 10, 10, 10, 1000):
        fidelity.generated.add([length], 1e6)
    for _ in range(40):
        fidelity.trained.add([10], 1e6)
    assert [offer.group_id for offer in corrected(offers_of([10, 10, 1000, 10]), 1, fidelity)] == [2]


def test_groups_at_their_last_chance_enter_the_step_whatever_their_length(make):
    settings = BufferConfig(length_correction=True)
    buffer, actor = started(make, settings, groups_per_step=2, group_size=1, max_lag=3, max_actor_lag=0)
    leases = actor.lease(100)
    assert len(leases) == 8
    for number, lease in enumerate(leases):
        actor.work(lease, num_completion_tokens=3000 if number < 2 else 10)
    for step in range(1, 4):
        train(buffer, step)
        for lease in actor.lease(2):
            actor.work(lease, num_completion_tokens=10, version=PolicyVersion(0, step))
    ledger = buffer.status().ledger
    left = [key for key in buffer.core.groups.index.ready if key.oldest == 0]
    assert len(left) == 2
    assert set(train(buffer, 4).group_ids) == {group for _, group in left}
    assert ledger["dropped_stale"] == buffer.status().ledger["dropped_stale"] == 0


# --- packing ----------------------------------------------------------------------------------------


def test_best_fit_keeps_every_length_whole_and_within_the_budget():
    random = np.random.default_rng(2)
    for _ in range(50):
        lengths = log_normal(random, 60)
        bins = best_fit(lengths, 8192)
        assert sum(bins) == sum(lengths)
        assert max(bins) <= 8192
        assert len(bins) <= 1.25 * sum(lengths) / 8192 + 1
    assert sorted(best_fit([5, 3, 2, 9, 12], 10)) == [9, 10, 12]


def test_packing_by_choice_fills_micro_batches_better_and_keeps_the_lengths():
    random = np.random.default_rng(3)
    gains = []
    for seed in range(20):
        offers = offers_of(log_normal(random, 128))
        chosen, spare = offers[:32], offers[32:]
        packed = well_packed([], chosen, spare, 4096, np.random.default_rng(seed))
        assert packed == well_packed([], chosen, spare, 4096, np.random.default_rng(seed))
        assert sorted(offer.bucket for offer in packed) == sorted(offer.bucket for offer in chosen)
        assert len({offer.group_id for offer in packed}) == 32
        gains.append(fill(packed, 4096) - fill(chosen, 4096))
    assert min(gains) >= 0
    assert np.mean(gains) > 0.01


def test_a_draw_says_the_length_of_each_trajectory_and_packs_by_knob(make):
    fills = {}
    for pack_tokens in (0, 1000):
        settings = BufferConfig(max_uses=2, pack_tokens=pack_tokens)
        buffer, actor = started(make, settings, groups_per_step=4, max_lag=40, max_actor_lag=0)
        random = np.random.default_rng(4)
        for length in random.integers(200, 900, 64).tolist():
            generate(buffer, actor, 1, tokens=length)
        drawn = []
        for step in range(1, 13):
            reply, rows = buffer.draw(step, step - 1)
            assert reply.lengths == [len(row.token_ids) for row in rows]
            drawn.append(sum(reply.lengths) / (1000 * len(best_fit(reply.lengths, 1000))))
            buffer.finish(step, step)
        fills[pack_tokens] = np.mean(drawn)
    assert fills[1000] > fills[0] + 0.02
