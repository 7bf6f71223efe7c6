"""Length fidelity: lengths of trained samples compared with lengths of generated samples."""

import numpy as np
import pytest

from leeway.buffer.config import BufferConfig
from leeway.buffer.lengths import (
    NUM_BUCKETS,
    Fidelity,
    LengthCounts,
    bucket_of,
    ks_distance,
)
from tests.world.buffer import Actor, generate, train

LONG = {"vocab_size": 8192, "max_tokens": 8192, "num_prompts": 500}


def started(make, config, **changes):
    buffer = make(config, **{**LONG, "max_lag": "unbounded", **changes})
    actor = Actor(buffer)
    buffer.begin()
    return buffer, actor


def log_normal(random, num):
    return np.clip(random.lognormal(np.log(512), 1.0, num), 1, 8192).astype(int).tolist()


# --- buckets and counts -----------------------------------------------------------------------------


def test_every_length_lies_in_its_bucket():
    for length in [*range(1, 3000), 8192, 65536]:
        assert 2 ** (bucket_of(length) / 2) <= length < 2 ** ((bucket_of(length) + 1) / 2)
    assert bucket_of(0) == 0
    assert bucket_of(2**40) == NUM_BUCKETS - 1


def test_old_counts_decay_by_e_over_the_memory_length():
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


def test_the_p95_ratio_measures_starved_long_answers_to_within_a_bucket():
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


def test_starved_lengths_raise_the_distance_and_its_alarm(make, monkeypatch):
    monkeypatch.setattr("leeway.buffer.samplers.REWARD_TEMPERATURE", 0.01)
    settings = BufferConfig(sampler="reward_softmax", max_uses=400)
    buffer, actor = started(make, settings, groups_per_step=2)
    generate(buffer, actor, 4, [1.0], tokens=16)
    generate(buffer, actor, 4, [0.0], tokens=3000)
    for step in range(1, 90):
        train(buffer, step)
    status = buffer.status()
    assert (status.fidelity_alarm, status.fidelity.ks) == (True, pytest.approx(0.5, abs=0.01))
    assert buffer.draw(90, 89)[0].fidelity == status.fidelity


def test_faithful_training_raises_no_alarm(make):
    buffer, actor = started(make, BufferConfig(), groups_per_step=4)
    random = np.random.default_rng(0)
    for step in range(1, 60):
        for length in log_normal(random, 4):
            generate(buffer, actor, 1, tokens=min(length, 8000))
        train(buffer, step)
    assert buffer.status().fidelity.ks < 0.02
    assert not buffer.status().fidelity_alarm


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
