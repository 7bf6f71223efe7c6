"""KV-cache admission: an engine starts nearly as many samples as its cache can hold, and never more."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.actors.config import ActorsConfig, KvCache, KvSample, admission_of
from leeway.planning.kv_gate import CacheAdmission, KvGate
from tests.unit.fake_actor import until

K = 8
CONFIG = ActorsConfig(admission="cache", group_size=K, max_running_samples=96, max_new_tokens=240, max_prompt_tokens=64)
CACHE = KvCache(100, 32, shares_prompts=False)


def sample(group=0, prompt=8, limit=240, prefix=0, usual=0.0):
    return KvSample(group, prompt, limit, prefix, usual)


def trained_gate(lengths, cache=CACHE, usual=0.0):
    """Return a gate that observed completions of the given lengths, one row per group."""
    gate = KvGate(CONFIG, cache)
    for group, row in enumerate(lengths, 1000):
        for index, _ in enumerate(row):
            gate.start((group, index), sample(group, usual=usual), 0.0)
        for index, length in enumerate(row):
            gate.end((group, index), int(length))
    return gate


def num_started(gate, num_groups=96, now=0.0, **fields):
    """Return how many samples of `num_groups` groups start immediately."""
    return sum(
        start(gate, sample(group, **fields), (group, index), now) for group in range(num_groups) for index in range(K)
    )


def start(gate, each, key, now):
    if gate.has_room(each, now):
        gate.start(key, each, now)
        return True
    return False


def lognormal(random, num_groups, share, spread=0.7, median=48):
    """Return lengths per group and the usual length of each prompt; prompts explain `share` of the variance."""
    own = np.sqrt(share) * random.standard_normal((num_groups, 1))
    each = np.sqrt(1 - share) * random.standard_normal((num_groups, K))
    lengths = median * np.exp(spread * (own + each))
    return np.clip(lengths, 1, 240).astype(int), median * np.exp(spread * own[:, 0])


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, KvCache(96 * 10, 32, shares_prompts=False)])
def test_only_slots_limit_samples_if_the_cache_cannot_fill_up(cache):
    gate = KvGate(CONFIG, cache)
    assert not gate.needs_lengths
    assert gate.num_sure == gate.slots(0.0) == 96
    assert num_started(gate) == 96


def test_without_observed_lengths_only_samples_that_surely_fit_start():
    gate = KvGate(CONFIG, CACHE)
    assert gate.needs_lengths
    assert gate.num_sure == 100 // -(-(64 + 240 + 1) // 32)
    assert num_started(gate, prompt=64) == gate.num_sure


def test_one_sample_may_always_run_and_slots_limit_short_samples():
    gate = KvGate(CONFIG, KvCache(1, 32, shares_prompts=False))
    assert gate.has_room(sample(prompt=64), 0.0)
    short = trained_gate([[1] * K] * 100)
    assert num_started(short, prompt=1) == 96


def test_more_samples_run_if_completions_are_shorter():
    counts = [num_started(trained_gate([[length] * K] * 100)) for length in (200, 100, 40, 20)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] / 2


def test_predicted_lengths_of_a_prompt_apply_to_its_samples():
    seen = [[50] * K] * 100
    short, usual, long = (num_started(trained_gate(seen, usual=50.0), usual=each) for each in (25.0, 50.0, 100.0))
    assert short > usual > long
    assert num_started(trained_gate(seen, usual=50.0)) == usual, (
        "a sample without a predicted length counts with the usual length"
    )


def test_samples_share_prompt_blocks_if_the_cache_shares_prompts():
    seen, shared = [[40] * K] * 100, KvCache(200, 16, shares_prompts=True)
    apart = num_started(trained_gate(seen, shared._replace(shares_prompts=False)), prompt=64)
    assert apart == pytest.approx(200 / 7, abs=3)
    together = num_started(trained_gate(seen, shared), prompt=64)
    assert together > 1.5 * apart


def test_correlated_lengths_within_a_group_keep_more_space_free():
    random = np.random.default_rng(0)
    apart, _ = lognormal(random, 100, share=0.0)
    alike, _ = lognormal(random, 100, share=1.0)
    first, second = trained_gate(apart), trained_gate(alike)
    assert first.history.correlation == pytest.approx(0.0, abs=0.1)
    assert second.history.correlation == pytest.approx(1.0, abs=0.05)
    assert num_started(second) < 0.9 * num_started(first)


def test_a_long_running_sample_is_expected_to_run_longer():
    gate = trained_gate([[10, 10, 10, 10, 10, 10, 200, 200]] * 100)
    at = np.array([200.0])
    usual = np.array([0.0])
    assert gate.history.survival(np.array([0.0]), at, usual)[0] < 0.35
    assert gate.history.survival(np.array([30.0]), at, usual)[0] > 0.95


def test_a_truncated_sample_counts_as_longer_than_all_observed():
    gate = KvGate(CONFIG, CACHE)
    for number in range(600):
        gate.start(number, sample(number), 0.0)
        gate.end(number, 50, is_cut=number % 2 == 0)
    assert gate.history.survival(np.array([0.0]), np.array([239.0]), np.array([0.0]))[0] == pytest.approx(0.5, abs=0.01)


def test_the_limit_of_a_sample_may_change_while_it_waits():
    gate = KvGate(CONFIG, CACHE)
    for limit in (240, 40, 100):
        gate.start(1, sample(limit=limit), 0.0)
    gate.end(1, 7)
    assert (len(gate), gate._worst, gate._groups) == (0, 0, {})


def test_interrupted_samples_do_not_update_the_length_history():
    gate = KvGate(CONFIG, CACHE)
    gate.start(1, sample(), 0.0)
    before = gate.history.usual_tokens
    gate.end(1, None)
    assert gate.history.usual_tokens == before == 240.0
    assert len(gate) == 0


running = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 64), st.integers(0, 200), st.integers(0, 230)), min_size=1, max_size=40
)


@settings(max_examples=100, deadline=None)
@given(
    running, st.tuples(st.integers(0, 5), st.integers(1, 64)), st.booleans(), st.lists(st.integers(1, 240), max_size=64)
)
def test_no_sample_starts_without_room_for_it_now(samples, fresh, shares, seen):
    cache = KvCache(60, 16, shares)
    gate = trained_gate([[length] for length in seen], cache)
    prompts = {}  # all samples of a group have the same prompt
    now = 240.0
    held = Counter()

    def blocks(group, prompt, made):
        whole = prompt // 16 if shares else 0
        held["all"] += -(-(prompt + made + 1) // 16) - whole
        held[group] = whole

    for key, (group, prompt, prefix, made) in enumerate(samples):
        prompt = prompts.setdefault(group, prompt)
        gate.start(key, sample(group, prompt, prefix=prefix), now - made)
        blocks(group, prompt, min(239, prefix + made))
    group, prompt = fresh
    prompt = prompts.setdefault(group, prompt)
    may = gate.has_room(sample(group, prompt), now)
    blocks(group, prompt, 0)
    assert not may or held.total() <= 60


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(1, 240), min_size=K, max_size=K), min_size=20, max_size=40), st.integers(0, 20))
def test_reported_slots_match_the_new_samples_that_would_start(lengths, num_running):
    gate = trained_gate(lengths)
    num_before = sum(start(gate, sample(group), ("before", group), 0.0) for group in range(num_running))
    slots = gate.slots(100.0)
    started = num_before + num_started(gate, now=100.0)
    assert slots == pytest.approx(started, abs=max(3, 0.15 * started))


class BlockEngine:
    """Model of vLLM's cache blocks. A step adds a token to each running sample.

    If the blocks run out, the sample that started last is preempted.
    """

    def __init__(self, cache, gate, admits_all):
        self.cache, self.gate, self.admits_all = cache, gate, admits_all
        self.running, self.waiting = {}, []
        self.now = self.made = self.steps = self.ended = self.preempted = 0

    def used(self):
        return sum(-(-(8 + made + 1) // self.cache.block_tokens) for _, _, made in self.running.values())

    def step(self, groups):
        self.now += 1
        while len(self.waiting) < K:
            group, (lengths, usual) = next(groups)
            self.waiting += [((group, index), length, 0, usual) for index, length in enumerate(lengths)]
        while self.waiting and len(self.running) < 96:
            key, length, made, usual = self.waiting[0]
            each = sample(key[0], prefix=made, usual=usual)
            need = -(-(8 + made + 1) // self.cache.block_tokens)
            fits = (
                self.used() + need <= self.cache.num_blocks if self.admits_all else self.gate.has_room(each, self.now)
            )
            if not fits:
                break
            self.gate.start(key, each, self.now)
            self.running[key] = [length, usual, made]
            self.waiting.pop(0)
        while self.used() > self.cache.num_blocks:
            key, (length, usual, made) = self.running.popitem()
            self.gate.end(key, None)
            self.waiting.insert(0, (key, length, made, usual))
            self.preempted += 1
        self.made += len(self.running)
        self.steps += 1
        for key in list(self.running):
            self.running[key][2] += 1
            if self.running[key][2] >= self.running[key][0]:
                length, _, _ = self.running.pop(key)
                self.gate.end(key, length, is_cut=length >= 240)
                self.ended += 1


def simulate(admits_all, predicts=True, steps=2500, warm_up=600):
    """Return the mean number of running samples and the share of preempted samples."""
    random = np.random.default_rng(1)
    lengths, usual = lognormal(random, 400, share=0.65)
    drawn = zip(lengths.tolist(), usual.tolist() if predicts else [0.0] * len(usual), strict=True)
    engine = BlockEngine(CACHE, KvGate(CONFIG, CACHE), admits_all)
    groups = iter(enumerate(drawn))
    for step in range(steps):
        engine.step(groups)
        if step == warm_up:
            engine.made = engine.steps = engine.ended = engine.preempted = 0
    return engine.made / engine.steps, engine.preempted / engine.ended


def test_the_cache_is_nearly_full_and_preemptions_are_rare():
    most, always_preempted = simulate(admits_all=True)
    assert always_preempted > 0.3
    running, preempted = simulate(admits_all=False)
    assert running > 0.8 * most
    assert preempted < 0.01
    unknown, preempted = simulate(admits_all=False, predicts=False)
    assert preempted < 0.01
    assert unknown < running, "without predicted lengths, more space is kept free"


# --- slots ----------------------------------------------------------------------------------------


async def test_samples_take_slots_in_order_and_wait_for_room():
    gate = KvGate(CONFIG, KvCache(12, 32, shares_prompts=False))  # a sample reserves 8 blocks until lengths are known
    slots, order = CacheAdmission(gate, lambda: 0.0), []

    async def run(key):
        await slots.admit(key, sample(key))
        order.append(key)

    tasks = [asyncio.create_task(run(key)) for key in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == [0]
    slots.end(0, 240, is_cut=True)
    await until(lambda: order == [0, 1])
    assert len(gate) == 1
    slots.end(1)
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_a_cancelled_waiter_holds_no_slot():
    gate = KvGate(ActorsConfig(max_running_samples=1), None)
    slots = CacheAdmission(gate, lambda: 0.0)
    await slots.admit(0, sample())
    waits, next_one, last = (asyncio.create_task(slots.admit(key, sample())) for key in (1, 2, 3))
    await asyncio.sleep(0)
    waits.cancel()
    slots.end(0)  # the first waiter is cancelled, but its task has not run yet
    next_one.cancel()  # the second waiter is admitted, but its task has not run yet
    with pytest.raises(asyncio.CancelledError):
        await next_one
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.wait_for(last, 1)
    assert len(gate) == 1
    slots.end(3)
    assert len(gate) == 0


def test_a_sample_has_no_tokens_until_it_begins():
    found = []
    for began, begins in ((0.0, False), (0.0, True), (100.0, False)):
        gate = trained_gate([[10] * 4 + [200] * 4] * 100)
        slots = CacheAdmission(gate, lambda: 100.0)
        for key in range(5):
            gate.start(key, sample(key), began)
            if begins:
                slots.begin(key, sample(key))
        found.append(slots.at_once())
        assert len(gate) == 5
    made_100, begun, fresh = found
    assert begun == fresh != made_100


async def test_the_admission_key_selects_the_policy_and_slots_ignore_the_cache():
    cache = KvCache(8, 32, shares_prompts=False)  # room for one sample until lengths are known
    by_slots = admission_of(CONFIG.model_copy(update={"admission": "slots"}), cache, lambda: 0.0)
    assert isinstance(admission_of(CONFIG, cache, lambda: 0.0), CacheAdmission)
    assert by_slots.num_sure == by_slots.at_once() == CONFIG.max_running_samples
    assert not by_slots.needs_lengths
    for key in range(CONFIG.max_running_samples):
        await asyncio.wait_for(by_slots.admit(key, sample(key)), 1)
    waits = asyncio.create_task(by_slots.admit(-1, sample()))
    await asyncio.sleep(0)
    assert not waits.done()
    by_slots.end(0, 240, is_cut=True)
    await asyncio.wait_for(waits, 1)
