"""Invariants of packing for any lengths, replicas and schedules."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leeway.learner.packing import CostModel, PackingRule, deal, pack, plan

SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=40)
"""Prompt and completion tokens of each sequence; prompts of equal length are the same prompt."""
RULES = st.builds(
    PackingRule,
    token_budget=st.integers(50, 90),
    num_replicas=st.integers(1, 4),
    min_micro_batches=st.integers(1, 5),
    multiple=st.integers(1, 4),
    cost=st.builds(CostModel, st.just(1.0), st.sampled_from([0.0, 0.01, 1.0])),
    most_gathered=st.sampled_from([1, 2, 4]),
)


def packed_of(shapes, rule, unit_B=None):
    """Return sequences with distinct completion tokens, and the batch into which they are packed."""
    edges = np.cumsum([0, *[completion for _, completion in shapes]])
    completions = [np.arange(start, end) for start, end in itertools.pairwise(edges)]
    rows = [
        np.concatenate([-100 * prompt - np.arange(prompt), completion])
        for (prompt, _), completion in zip(shapes, completions, strict=True)
    ]
    return rows, pack(rows, [prompt for prompt, _ in shapes], rule, unit_B)


@given(SHAPES, RULES)
def test_every_completion_token_is_packed_once_and_predicted_by_the_previous_token(shapes, rule):
    rows, packed = packed_of(shapes, rule)
    pairs = [(row[prompt - 1 : -1], row[prompt:]) for row, (prompt, _) in zip(rows, shapes, strict=True)]
    before, completions = (np.concatenate(each) for each in zip(*pairs, strict=True))
    np.testing.assert_array_equal(packed.tokens_ML.reshape(-1)[packed.output_T], completions)
    assert len(set(packed.output_T.tolist())) == len(completions), "each token has its own index"
    for m, (where, which) in enumerate(zip(packed.predicting, packed.predicted, strict=True)):
        np.testing.assert_array_equal(packed.tokens_ML[m, where], before[which])
        np.testing.assert_array_equal(packed.output_T[which] // packed.width, np.full(len(which), m))
    assert sum(map(len, packed.predicted)) == len(packed.output_T)


@given(SHAPES, RULES)
def test_sequences_stay_whole_and_a_micro_batch_holds_each_prompt_once(shapes, rule):
    rows, packed = packed_of(shapes, rule, np.arange(len(shapes)) // 3)
    assert sorted(np.concatenate(packed.members)) == list(range(len(rows)))
    for m, (members, bounds, places) in enumerate(zip(packed.members, packed.bounds, packed.places, strict=True)):
        if not len(members):
            assert (bounds.tolist(), places.tolist()) == ([0, 1], [0]), "attention needs at least one sequence"
            continue
        np.testing.assert_array_equal(packed.tokens_ML[m, places], np.concatenate([rows[i] for i in members]))
        np.testing.assert_array_equal(np.diff(bounds), [len(rows[i]) for i in members])
        restarted = np.concatenate([np.arange(len(rows[i])) for i in members])
        np.testing.assert_array_equal(packed.positions_ML[m, places], restarted)
        num_tokens = sum({shapes[i][0] for i in members}) + sum(shapes[i][1] for i in members)
        assert sum(len(rows[i]) for i in members) <= rule.most_gathered * rule.token_budget
        assert sorted(set(places.tolist())) == list(range(num_tokens))
        assert not packed.tokens_ML[m, num_tokens:].any()
        assert not packed.positions_ML[m, num_tokens:].any()
    assert packed.num_tokens == sum(map(len, rows))


@given(SHAPES, RULES)
def test_every_replica_has_the_micro_batches_that_the_schedule_requires(shapes, rule):
    rows, packed = packed_of(shapes, rule)
    assert packed.width == rule.token_budget
    per_replica, rest = divmod(packed.num_micro_batches, rule.num_replicas)
    assert rest == 0
    assert per_replica >= rule.min_micro_batches
    assert per_replica % rule.multiple == 0
    # of any two micro-batches, one is more than half full, because best fit merges two micro-batches that fit together
    needed = 2 * sum(map(len, rows)) // rule.token_budget + 1
    most = max(-(-needed // rule.num_replicas), rule.min_micro_batches)
    assert per_replica < most + rule.multiple


@given(SHAPES, RULES, st.integers(1, 4), st.data())
def test_units_stay_whole_if_they_fit_and_one_pass_is_not_slower_than_two(shapes, rule, num_stages, data):
    rows, by_sequence = packed_of(shapes, rule)
    unit_B = np.array([data.draw(st.integers(0, max(0, len(shapes) // 4))) for _ in shapes])
    unit_B = np.unique(unit_B, return_inverse=True)[1]
    rule = replace(rule, unit="group", num_stages=num_stages)
    packed = pack(rows, [prompt for prompt, _ in shapes], rule, unit_B)
    gathered_U = np.bincount(unit_B, list(map(len, rows)))
    held = {(unit, prompt) for unit, (prompt, _) in zip(unit_B.tolist(), shapes, strict=True)}
    computed_U = np.bincount(unit_B, [completion for _, completion in shapes])
    np.add.at(computed_U, [unit for unit, _ in held], [prompt for _, prompt in held])
    fits = np.maximum(computed_U, gathered_U / rule.most_gathered).max() <= rule.token_budget
    if packed.unit == "sequence":
        # under these conditions, the length of a unit determines its cost
        if fits and not rule.cost.per_token_squared and len({prompt for prompt, _ in shapes}) == len(shapes):
            lengths_U = np.bincount(unit_B, list(map(len, rows))).astype(int)
            whole = [lengths_U[units].sum() for units in plan(lengths_U.tolist(), rule.cost.of(lengths_U), rule)]
            assert 3 * duration(whole, rule) > 4 * duration(by_sequence.cost_M, rule)
        assert [members.tolist() for members in packed.members] == [m.tolist() for m in by_sequence.members]
        return
    assert fits
    homes = [{m for m, members in enumerate(packed.members) if (unit_B[members] == unit).any()} for unit in set(unit_B)]
    assert set(map(len, homes)) == {1}
    assert sorted(np.concatenate(packed.members)) == list(range(len(rows)))
    assert 3 * duration(packed.cost_M, rule) <= 4 * duration(by_sequence.cost_M, rule) * (1 + 1e-9)


def duration(cost_M, rule):
    """Return the pipeline cost: the sum of the micro-batches, plus the largest once per stage beyond the first."""
    cost_RM = np.asarray(cost_M).reshape(rule.num_replicas, -1)
    return max(cost_R.sum() + (rule.num_stages - 1) * cost_R.max() for cost_R in cost_RM)


@given(SHAPES, RULES)
def test_the_shares_of_the_replicas_together_are_the_batch(shapes, rule):
    _, packed = packed_of(shapes, rule)
    num_replicas = rule.num_replicas
    shares = [packed.of_replica(replica, num_replicas) for replica in range(num_replicas)]
    for name in ("tokens_ML", "positions_ML", "cost_M"):
        np.testing.assert_array_equal(np.concatenate([getattr(share, name) for share in shares]), getattr(packed, name))
    assert sum(share.num_tokens for share in shares) == packed.num_tokens
    assert [len(share.members) for share in shares] == [packed.num_micro_batches // num_replicas] * num_replicas
    output_RT = np.stack([share.output_T for share in shares])
    assert ((output_RT >= 0).sum(axis=0) == 1).all(), "every token belongs to one replica"
    size = shares[0].tokens_ML.size
    of_T = (output_RT >= 0).argmax(axis=0)
    np.testing.assert_array_equal(output_RT.max(axis=0) + of_T * size, packed.output_T)
    for name in ("places", "predicting", "predicted"):
        joined = [each for share in shares for each in getattr(share, name)]
        assert [each.tolist() for each in joined] == [each.tolist() for each in getattr(packed, name)]
    for share in shares:
        for m, which in enumerate(share.predicted):
            np.testing.assert_array_equal(share.output_T[which] // share.width, np.full(len(which), m))


@given(
    st.integers(1, 6).flatmap(
        lambda num_replicas: st.tuples(
            st.just(num_replicas),
            st.integers(1, 8).flatmap(
                lambda share: st.lists(st.floats(0, 1e6), min_size=share * num_replicas, max_size=share * num_replicas)
            ),
        )
    )
)
def test_the_most_loaded_replica_exceeds_the_mean_by_less_than_one_bin(case):
    num_replicas, costs = case
    cost_N = np.array(costs)
    shares = deal(cost_N, num_replicas)
    assert sorted(n for share in shares for n in share) == list(range(len(costs)))
    assert {len(share) for share in shares} == {len(costs) // num_replicas}
    cost_R = np.array([cost_N[share].sum() for share in shares])
    spread = cost_N.max() - cost_N.min()
    assert cost_R.max() <= cost_R.mean() + (1 - 1 / num_replicas) * spread + 1e-6


@given(SHAPES, RULES, st.randoms(use_true_random=False))
def test_the_order_of_sequences_does_not_change_the_lengths_in_micro_batches(shapes, rule, random):
    lengths = [prompt + completion for prompt, completion in shapes]
    shuffled = random.sample(lengths, len(lengths))

    def of(some):
        return [Counter(some[i] for i in members) for members in plan(some, rule.cost.of(some), rule)]

    assert of(lengths) == of(shuffled)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_sequences_are_spread_over_all_required_micro_batches_and_replicas(lengths, num_replicas, multiple):
    rule = PackingRule(2000, num_replicas, 1, multiple)  # one micro-batch could hold all sequences
    bins = plan(lengths, rule.cost.of(lengths), rule)
    assert len(bins) == num_replicas * multiple
    filled_R = np.array([len(members) > 0 for members in bins]).reshape(num_replicas, -1).sum(axis=1)
    assert filled_R.sum() == min(len(lengths), len(bins))
    assert filled_R.max() - filled_R.min() <= 1
