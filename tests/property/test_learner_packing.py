"""Packing holds what it promises for any lengths, replicas and schedules."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import CostModel, PackingRule, deal, pack, plan

SHAPES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=40)
"""Tokens of prompt and completion of each sequence; prompts of one length are one prompt."""
RULES = st.builds(
    PackingRule,
    token_budget=st.integers(50, 90),
    num_replicas=st.integers(1, 4),
    min_micro_batches=st.integers(1, 5),
    multiple=st.integers(1, 4),
    cost=st.builds(CostModel, st.just(1.0), st.sampled_from([0.0, 0.01, 1.0])),
)


def packed_of(shapes, rule, unit_B=None):
    """Sequences, whose completions have distinct tokens, and the batch that they are packed into."""
    edges = np.cumsum([0, *[completion for _, completion in shapes]])
    completions = [np.arange(start, end) for start, end in itertools.pairwise(edges)]
    rows = [
        np.concatenate([-100 * prompt - np.arange(prompt), completion])
        for (prompt, _), completion in zip(shapes, completions, strict=True)
    ]
    return rows, pack(rows, [prompt for prompt, _ in shapes], rule, unit_B)


@given(SHAPES, RULES)
def test_every_completion_token_is_found_again_and_predicted_by_the_one_before_it(shapes, rule):
    rows, packed = packed_of(shapes, rule)
    pairs = [(row[prompt - 1 : -1], row[prompt:]) for row, (prompt, _) in zip(rows, shapes, strict=True)]
    before, completions = (np.concatenate(each) for each in zip(*pairs, strict=True))
    np.testing.assert_array_equal(packed.tokens_ML.reshape(-1)[packed.output_T], completions)
    assert len(set(packed.output_T.tolist())) == len(completions), "each has a place of its own"
    for m, (where, which) in enumerate(zip(packed.predicting, packed.predicted, strict=True)):
        np.testing.assert_array_equal(packed.tokens_ML[m, where], before[which])
        np.testing.assert_array_equal(packed.output_T[which] // packed.width, np.full(len(which), m))
    assert sum(map(len, packed.predicted)) == len(packed.output_T)


@given(SHAPES, RULES)
def test_no_sequence_is_lost_cut_or_moved_in_position_and_no_prompt_is_in_a_micro_batch_twice(shapes, rule):
    rows, packed = packed_of(shapes, rule, np.arange(len(shapes)) // 3)
    assert sorted(np.concatenate(packed.members)) == list(range(len(rows)))
    for m, (members, bounds, places) in enumerate(zip(packed.members, packed.bounds, packed.places, strict=True)):
        if not len(members):
            assert (bounds.tolist(), places.tolist()) == ([0, 1], [0]), "attention needs a sequence everywhere"
            continue
        np.testing.assert_array_equal(packed.tokens_ML[m, places], np.concatenate([rows[i] for i in members]))
        np.testing.assert_array_equal(np.diff(bounds), [len(rows[i]) for i in members])
        restarted = np.concatenate([np.arange(len(rows[i])) for i in members])
        np.testing.assert_array_equal(packed.positions_ML[m, places], restarted)
        num_tokens = sum({shapes[i][0] for i in members}) + sum(shapes[i][1] for i in members)
        assert sorted(set(places.tolist())) == list(range(num_tokens))
        assert not packed.tokens_ML[m, num_tokens:].any()
        assert not packed.positions_ML[m, num_tokens:].any()
    assert packed.num_tokens == sum(map(len, rows))


@given(SHAPES, RULES)
def test_every_replica_runs_as_many_micro_batches_of_the_budget_as_the_schedule_asks_for(shapes, rule):
    rows, packed = packed_of(shapes, rule)
    assert packed.width == rule.token_budget
    per_replica, rest = divmod(packed.num_micro_batches, rule.num_replicas)
    assert rest == 0
    assert per_replica >= rule.min_micro_batches
    assert per_replica % rule.multiple == 0
    # of any two micro-batches that best fit makes, one is more than half full, else it had made one of them
    needed = 2 * sum(map(len, rows)) // rule.token_budget + 1
    most = max(-(-needed // rule.num_replicas), rule.min_micro_batches)
    assert per_replica < most + rule.multiple


@given(SHAPES, RULES, st.integers(1, 4), st.data())
def test_units_stay_whole_where_the_budget_has_room_for_each_and_a_pipeline_is_no_slower_for_it(
    shapes, rule, num_stages, data
):
    rows, by_sequence = packed_of(shapes, rule)
    unit_B = np.array([data.draw(st.integers(0, max(0, len(shapes) // 4))) for _ in shapes])
    unit_B = np.unique(unit_B, return_inverse=True)[1]
    rule = replace(rule, unit="group", num_stages=num_stages)
    packed = pack(rows, [prompt for prompt, _ in shapes], rule, unit_B)
    fits = np.bincount(unit_B, list(map(len, rows))).max() <= rule.token_budget
    if packed.unit == "sequence":
        # else a unit's length does not tell its cost
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
    """Of a pipeline: the sum of its micro-batches, and the dearest once more for every stage beyond the first."""
    cost_RM = np.asarray(cost_M).reshape(rule.num_replicas, -1)
    return max(cost_R.sum() + (rule.num_stages - 1) * cost_R.max() for cost_R in cost_RM)


@given(SHAPES, RULES)
def test_the_replicas_shares_put_together_are_the_batch(shapes, rule):
    _, packed = packed_of(shapes, rule)
    num_replicas = rule.num_replicas
    shares = [packed.of_replica(replica, num_replicas) for replica in range(num_replicas)]
    for name in ("tokens_ML", "positions_ML", "cost_M"):
        np.testing.assert_array_equal(np.concatenate([getattr(share, name) for share in shares]), getattr(packed, name))
    assert sum(share.num_tokens for share in shares) == packed.num_tokens
    assert [len(share.members) for share in shares] == [packed.num_micro_batches // num_replicas] * num_replicas
    output_RT = np.stack([share.output_T for share in shares])
    assert ((output_RT >= 0).sum(axis=0) == 1).all(), "every token is of one replica"
    size = shares[0].tokens_ML.size
    of_T = (output_RT >= 0).argmax(axis=0)
    np.testing.assert_array_equal(output_RT.max(axis=0) + of_T * size, packed.output_T)
    for name in ("places", "predicting", "predicted"):
        put_together = [each for share in shares for each in getattr(share, name)]
        assert [each.tolist() for each in put_together] == [each.tolist() for each in getattr(packed, name)]
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
def test_the_dearest_replica_is_above_the_mean_by_less_than_one_bin(case):
    num_replicas, costs = case
    cost_N = np.array(costs)
    shares = deal(cost_N, num_replicas)
    assert sorted(n for share in shares for n in share) == list(range(len(costs)))
    assert {len(share) for share in shares} == {len(costs) // num_replicas}
    cost_R = np.array([cost_N[share].sum() for share in shares])
    spread = cost_N.max() - cost_N.min()
    assert cost_R.max() <= cost_R.mean() + (1 - 1 / num_replicas) * spread + 1e-6


@given(SHAPES, RULES, st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_changes_no_micro_batchs_lengths(shapes, rule, random):
    lengths = [prompt + completion for prompt, completion in shapes]
    shuffled = random.sample(lengths, len(lengths))

    def of(some):
        return [Counter(some[i] for i in members) for members in plan(some, rule.cost.of(some), rule)]

    assert of(lengths) == of(shuffled)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_work_is_shared_among_the_replicas_and_micro_batches_that_there_have_to_be(lengths, num_replicas, multiple):
    rule = PackingRule(2000, num_replicas, 1, multiple)  # one micro-batch has room for all
    bins = plan(lengths, rule.cost.of(lengths), rule)
    assert len(bins) == num_replicas * multiple
    filled_R = np.array([len(members) > 0 for members in bins]).reshape(num_replicas, -1).sum(axis=1)
    assert filled_R.sum() == min(len(lengths), len(bins))
    assert filled_R.max() - filled_R.min() <= 1
