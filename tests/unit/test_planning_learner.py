"""Predicted step times agree with simulated schedules and with the packing of the learner."""

import numpy as np
import pytest

from leeway.learner import step as learner_step
from leeway.learner.packing import CostModel, pack
from leeway.planning import costs as planning
from leeway.planning.costs import LearnerShape, LearnerTime, LeastSquares, bubble_in_micro_batches, terms


def one_forward_one_backward(num_stages, num_micro_batches, forward_s, backward_s):
    """Return the end time of 1F1B, from the dependencies of each action."""
    orders = []
    for stage in range(num_stages):
        warm = min(num_stages - stage, num_micro_batches)
        order = [("F", m) for m in range(warm)]
        for m in range(num_micro_batches):
            order += [("B", m)] + ([("F", m + warm)] if m + warm < num_micro_batches else [])
        orders.append(order)
    done, free_s, at = {}, [0.0] * num_stages, [0] * num_stages
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, m = order[at[stage]]
                needs = {("F", m): (stage - 1, "F", m), ("B", m): (stage + 1, "B", m)}[kind, m]
                is_end = (stage == 0) if kind == "F" else (stage == num_stages - 1)
                if not is_end and needs not in done:
                    break
                began_s = max(free_s[stage], 0.0 if is_end else done[needs])
                free_s[stage] = done[stage, kind, m] = began_s + (forward_s if kind == "F" else backward_s)
                at[stage] += 1
    return max(free_s)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 9), (8, 16)])
def test_the_time_of_1f1b_matches_its_schedule(num_stages, num_micro_batches):
    work_s = 0.5  # time of a micro-batch, forward and backward through all stages
    shape = LearnerShape(num_stages, schedule="1f1b", token_budget=100)
    lengths = [100] * num_micro_batches  # one sequence per micro-batch
    law = LearnerTime(step=0.0, token=work_s / 100)
    stage_s = work_s / num_stages
    expected_s = one_forward_one_backward(num_stages, num_micro_batches, stage_s / 3, 2 * stage_s / 3)
    assert law.seconds(lengths, 1, 1, shape) == pytest.approx(expected_s, rel=1e-9)
    idle = expected_s / stage_s - num_micro_batches
    assert bubble_in_micro_batches("1f1b", num_stages, 1) == pytest.approx(idle, abs=1e-9)


def test_bubbles_match_known_values_per_schedule():
    """tests/unit/test_benchmarks_learner.py compares the bubbles with torch's own tables."""
    assert bubble_in_micro_batches("1f1b", 4, 1) == 3
    assert bubble_in_micro_batches("interleaved_1f1b", 4, 2) == 1.5
    assert bubble_in_micro_batches("zero_bubble", 4, 1) == 1


@pytest.mark.parametrize("shape", [LearnerShape(), LearnerShape(2, 2, token_budget=256, unit="group")])
def test_the_work_of_a_step_matches_the_micro_batches_of_the_learner(shape):
    random = np.random.default_rng(0)
    lengths = random.integers(30, 120, 64)
    sequences = [np.r_[np.full(20, i // 8), np.zeros(n - 20, np.int64)] for i, n in enumerate(lengths.tolist())]
    packed = pack(sequences, [20] * 64, shape.rule(CostModel(2.0, 0.01)), np.arange(64) // 8)
    per_replica = packed.cost_M.reshape(shape.num_replicas, -1)
    rounds = per_replica.shape[1] + shape.idle
    expected = 7.0 + rounds * (3.0 + per_replica.sum(axis=1).max() / (shape.num_stages * per_replica.shape[1]))
    assert LearnerTime(7.0, 3.0, 2.0, 0.01).seconds(lengths.tolist(), 20, 8, shape) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_each_minibatch_is_packed_separately_and_has_its_own_bubble(schedule):
    law, lengths = LearnerTime(0.0, 0.004, 2e-5, 3e-9), np.random.default_rng(0).integers(100, 500, 64).tolist()
    one = LearnerShape(4, 1, schedule=schedule, token_budget=1024)
    four = LearnerShape(4, 1, schedule=schedule, token_budget=1024, num_minibatches=4)
    parts = [[n for i, n in enumerate(lengths) if i // 4 % 4 == part] for part in range(4)]
    taken_s = law.seconds(lengths, 1, 4, four)
    assert taken_s == pytest.approx(sum(law.seconds(each, 1, 4, one) for each in parts))
    assert taken_s > 1.15 * law.seconds(lengths, 1, 4, one), "four bubbles take more time than one"
    num = len(planning.cost_of_micro_batches(*map(np.array, (lengths, [1] * 64, range(64))), one.rule(CostModel()),
                                             np.arange(64) // 4)[0])  # fmt: skip
    row = terms(float(sum(lengths)), float(sum(n * n for n in lengths)), num, four)
    assert np.dot(row, (law.step, law.micro_batch, law.token, law.token_squared)) == pytest.approx(taken_s, rel=0.05)


def test_groups_split_across_micro_batches_need_an_extra_forward_pass(monkeypatch):
    law, lengths = LearnerTime(0.0, 0.004, 2e-5), [100] * 64
    for budget, passes in ((2048, 1.0), (512, 4 / 3)):  # a group has 800 tokens
        either = LearnerShape(2, token_budget=budget, unit="group")
        saves = LearnerShape(2, token_budget=budget, unit="group", saves_pass=True)
        assert law.seconds(lengths, 1, 8, saves) == pytest.approx(passes * law.seconds(lengths, 1, 8, either))
    for shape, more in ((saves, 4 / 3), (either, 1.0)):  # the fitted cost per token excludes the extra pass
        row, plain = terms(6400.0, 0.0, 13, shape, takes_two=True), terms(6400.0, 0.0, 13, shape)
        assert row[0] == 1.0
        assert row[1:3] == pytest.approx([more * each for each in plain[1:3]])
    assert planning.MOST_EVALUATED == learner_step.MOST_EVALUATED
    monkeypatch.setattr(planning, "MOST_EVALUATED", 1000)
    large = LearnerShape(2, token_budget=2048, unit="group", saves_pass=True)
    again = LearnerShape(2, token_budget=2048, unit="group")
    assert law.seconds(lengths, 1, 8, large) == pytest.approx(4 / 3 * law.seconds(lengths, 1, 8, again))


def test_a_cost_model_fitted_to_one_shape_holds_for_another():
    law, random, moments = LearnerTime(0.05, 0.004, 2e-5, 3e-9), np.random.default_rng(3), LeastSquares(4)
    for budget in (1024, 4096):
        shape = LearnerShape(2, 1, token_budget=budget)
        for _ in range(20):
            lengths = random.integers(100, 900, 32)
            num = -(-int(lengths.sum()) // budget)
            row = terms(float(lengths.sum()), float((lengths**2).sum()), num, shape)
            moments.add(row, float(np.dot(row, (law.step, law.micro_batch, law.token, law.token_squared))))
    found = LearnerTime(*moments.fit().coefficients)
    assert found.token == pytest.approx(law.token, rel=1e-3)
    assert found.micro_batch == pytest.approx(law.micro_batch, rel=1e-3)
    lengths = [500] * 64
    for shape in (LearnerShape(4, 2, token_budget=2048), LearnerShape(1, 1, token_budget=8192)):
        assert found.seconds(lengths, 1, 8, shape) == pytest.approx(law.seconds(lengths, 1, 8, shape), rel=1e-3)


@pytest.mark.parametrize("budget", [8192, 16_384, 65_536])
@pytest.mark.parametrize(("prompt_tokens", "most_new"), [(1, 4000), (1000, 300)])
def test_a_step_of_many_samples_is_estimated_from_a_part_of_its_groups(budget, prompt_tokens, most_new):
    """Groups of short completions fit whole into the larger budgets, where their prompts are shared."""
    random = np.random.default_rng(5)
    law, shape = LearnerTime(0.1, 1e-3, 1e-6, 1e-11), LearnerShape(4, 2, token_budget=budget)
    lengths = (prompt_tokens + random.integers(100, most_new, 4096)).tolist()
    packed = law.seconds(lengths, prompt_tokens, 8, shape)
    assert law.seconds([*lengths, *lengths[:8]], prompt_tokens, 8, shape) == pytest.approx(packed, rel=0.03)
