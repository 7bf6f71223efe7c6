"""Which samples an engine starts: never more than its cache holds, and nearly as many as it could."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import ActorsConfig, KvCache, KvSample, admission_of
from planning.kv_gate import CacheAdmission, KvGate
from tests.unit.fake_actor import until

K = 8
CONFIG = ActorsConfig(admission="cache", group_size=K, max_running_samples=96, max_new_tokens=240, max_prompt_tokens=64)
CACHE = KvCache(100, 32, shares_prompts=False)


def sample(group=0, prompt=8, limit=240, there=0, usual=0.0):
    return KvSample(group, prompt, limit, there, usual)


def gate_that_saw(lengths, cache=CACHE, usual=0.0):
    """A gate after completions of these lengths, a row for each group."""
    gate = KvGate(CONFIG, cache)
    for group, row in enumerate(lengths, 1000):
        for index, _ in enumerate(row):
            gate.start((group, index), sample(group, usual=usual), 0.0)
        for index, length in enumerate(row):
            gate.end((group, index), int(length))
    return gate


def filled(gate, num_groups=96, now=0.0, **what):
    """How many of so many groups' samples it starts at once."""
    return sum(
        fill(gate, sample(group, **what), (group, index), now) for group in range(num_groups) for index in range(K)
    )


def fill(gate, each, key, now):
    if gate.has_room(each, now):
        gate.start(key, each, now)
        return True
    return False


def lognormal(random, num_groups, share, spread=0.7, median=48):
    """Lengths of groups, of which so much of the spread is the prompt's, and what is usual for each prompt."""
    own = np.sqrt(share) * random.standard_normal((num_groups, 1))
    each = np.sqrt(1 - share) * random.standard_normal((num_groups, K))
    lengths = median * np.exp(spread * (own + each))
    return np.clip(lengths, 1, 240).astype(int), median * np.exp(spread * own[:, 0])


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, KvCache(96 * 10, 32, shares_prompts=False)])
def test_without_a_cache_that_can_be_full_slots_alone_decide(cache):
    gate = KvGate(CONFIG, cache)
    assert not gate.needs_lengths
    assert gate.num_sure == gate.slots(0.0) == 96
    assert filled(gate) == 96


def test_before_any_length_was_seen_only_what_is_sure_to_fit_runs():
    gate = KvGate(CONFIG, CACHE)
    assert gate.needs_lengths
    assert gate.num_sure == 100 // -(-(64 + 240 + 1) // 32)
    assert filled(gate, prompt=64) == gate.num_sure


def test_one_sample_may_always_run_and_slots_bound_the_short_ones():
    gate = KvGate(CONFIG, KvCache(1, 32, shares_prompts=False))
    assert gate.has_room(sample(prompt=64), 0.0)
    short = gate_that_saw([[1] * K] * 100)
    assert filled(short, prompt=1) == 96


def test_the_shorter_completions_were_the_more_samples_run():
    counts = [filled(gate_that_saw([[length] * K] * 100)) for length in (200, 100, 40, 20)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] / 2


def test_what_is_foretold_of_a_prompt_counts_for_its_samples():
    seen = [[50] * K] * 100
    short, usual, long = (filled(gate_that_saw(seen, usual=50.0), usual=each) for each in (25.0, 50.0, 100.0))
    assert short > usual > long
    assert filled(gate_that_saw(seen, usual=50.0)) == usual, "nothing foretold: as usual"


def test_samples_of_a_prompt_share_its_blocks_where_the_engine_does():
    seen, shared = [[40] * K] * 100, KvCache(200, 16, shares_prompts=True)
    apart = filled(gate_that_saw(seen, shared._replace(shares_prompts=False)), prompt=64)
    assert apart == pytest.approx(200 / 7, abs=3)
    together = filled(gate_that_saw(seen, shared), prompt=64)
    assert together > 1.5 * apart


def test_where_samples_of_a_prompt_are_alike_more_is_kept_free():
    random = np.random.default_rng(0)
    apart, _ = lognormal(random, 100, share=0.0)
    alike, _ = lognormal(random, 100, share=1.0)
    first, second = gate_that_saw(apart), gate_that_saw(alike)
    assert first.history.alike == pytest.approx(0.0, abs=0.1)
    assert second.history.alike == pytest.approx(1.0, abs=0.05)
    assert filled(second) < 0.9 * filled(first)


def test_a_sample_that_has_run_long_is_expected_to_run_longer():
    gate = gate_that_saw([[10, 10, 10, 10, 10, 10, 200, 200]] * 100)
    at = np.array([200.0])
    usual = np.array([0.0])
    assert gate.history.goes_on(np.array([0.0]), at, usual)[0] < 0.35
    assert gate.history.goes_on(np.array([30.0]), at, usual)[0] > 0.95


def test_what_was_cut_is_longer_than_anything_seen():
    gate = KvGate(CONFIG, CACHE)
    for number in range(600):
        gate.start(number, sample(number), 0.0)
        gate.end(number, 50, is_cut=number % 2 == 0)
    assert gate.history.goes_on(np.array([0.0]), np.array([239.0]), np.array([0.0]))[0] == pytest.approx(0.5, abs=0.01)


def test_a_sample_may_begin_with_another_limit_than_it_waited_with():
    gate = KvGate(CONFIG, CACHE)
    for limit in (240, 40, 100):
        gate.start(1, sample(limit=limit), 0.0)
    gate.end(1, 7)
    assert (len(gate), gate._worst, gate._groups) == (0, 0, {})


def test_what_was_interrupted_says_nothing_of_lengths():
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
def test_nothing_starts_for_which_there_is_no_room_at_once(samples, fresh, shares, seen):
    cache = KvCache(60, 16, shares)
    gate = gate_that_saw([[length] for length in seen], cache)
    prompts = {}  # samples of a group have one prompt
    now = 240.0
    held = Counter()

    def blocks(group, prompt, made):
        whole = prompt // 16 if shares else 0
        held["all"] += -(-(prompt + made + 1) // 16) - whole
        held[group] = whole

    for key, (group, prompt, there, made) in enumerate(samples):
        prompt = prompts.setdefault(group, prompt)
        gate.start(key, sample(group, prompt, there=there), now - made)
        blocks(group, prompt, min(239, there + made))
    group, prompt = fresh
    prompt = prompts.setdefault(group, prompt)
    may = gate.has_room(sample(group, prompt), now)
    blocks(group, prompt, 0)
    assert not may or held.total() <= 60


@settings(max_examples=10, deadline=None)
@given(st.lists(st.lists(st.integers(1, 240), min_size=K, max_size=K), min_size=20, max_size=40), st.integers(0, 20))
def test_as_many_slots_are_told_as_new_samples_would_start(lengths, num_running):
    gate = gate_that_saw(lengths)
    there = sum(fill(gate, sample(group), ("there", group), 0.0) for group in range(num_running))
    told = gate.slots(100.0)
    started = there + filled(gate, now=100.0)
    assert told == pytest.approx(started, abs=max(3, 0.15 * started))


class BlockEngine:
    """What vLLM does with blocks: a step makes a token of each running sample, and who finds none preempts the last."""

    def __init__(self, cache, gate, lets_all_in):
        self.cache, self.gate, self.lets_all_in = cache, gate, lets_all_in
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
            each = sample(key[0], there=made, usual=usual)
            need = -(-(8 + made + 1) // self.cache.block_tokens)
            fits = (
                self.used() + need <= self.cache.num_blocks if self.lets_all_in else self.gate.has_room(each, self.now)
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


def ran(lets_all_in, foretells=True, steps=2500, warm_up=600):
    """Running samples, and the share of samples that were preempted."""
    random = np.random.default_rng(1)
    lengths, usual = lognormal(random, 400, share=0.65)
    told = zip(lengths.tolist(), usual.tolist() if foretells else [0.0] * len(usual), strict=True)
    engine = BlockEngine(CACHE, KvGate(CONFIG, CACHE), lets_all_in)
    groups = iter(enumerate(told))
    for step in range(steps):
        engine.step(groups)
        if step == warm_up:
            engine.made = engine.steps = engine.ended = engine.preempted = 0
    return engine.made / engine.steps, engine.preempted / engine.ended


def test_the_cache_is_nearly_full_and_hardly_anything_is_preempted():
    most, thrown_away = ran(lets_all_in=True)
    assert thrown_away > 0.3
    running, preempted = ran(lets_all_in=False)
    assert running > 0.8 * most
    assert preempted < 0.01
    unknown, preempted = ran(lets_all_in=False, foretells=False)
    assert preempted < 0.01
    assert unknown < running, "the less is known the more is kept free"


# --- slots ----------------------------------------------------------------------------------------


async def test_samples_take_slots_in_order_and_wait_for_room():
    gate = KvGate(CONFIG, KvCache(12, 32, shares_prompts=False))  # 8 blocks each, as far as is known
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


async def test_whoever_is_cancelled_while_it_waits_or_as_its_turn_comes_leaves_nothing():
    gate = KvGate(ActorsConfig(max_running_samples=1), None)
    slots = CacheAdmission(gate, lambda: 0.0)
    await slots.admit(0, sample())
    waits, next_one, last = (asyncio.create_task(slots.admit(key, sample())) for key in (1, 2, 3))
    await asyncio.sleep(0)
    waits.cancel()
    slots.end(0)  # the first that waits is cancelled already, and has not heard of it
    next_one.cancel()  # it is its turn, and it has not heard of that
    with pytest.raises(asyncio.CancelledError):
        await next_one
    with pytest.raises(asyncio.CancelledError):
        await waits
    await asyncio.wait_for(last, 1)
    assert len(gate) == 1
    slots.end(3)
    assert len(gate) == 0


def test_a_sample_that_begins_later_than_its_slot_has_made_nothing_until_then():
    found = []
    for began, begins in ((0.0, False), (0.0, True), (100.0, False)):
        gate = gate_that_saw([[10] * 4 + [200] * 4] * 100)
        slots = CacheAdmission(gate, lambda: 100.0)
        for key in range(5):
            gate.start(key, sample(key), began)
            if begins:
                slots.begin(key, sample(key))
        found.append(slots.at_once())
        assert len(gate) == 5
    made_100, begun, fresh = found
    assert begun == fresh != made_100


async def test_the_key_says_who_decides_and_slots_alone_do_not_look_at_the_cache():
    cache = KvCache(8, 32, shares_prompts=False)  # of one sample, as far as is known
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
