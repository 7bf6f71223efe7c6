"""Packing by cost and over replicas; step batches; reference scores and step reports."""

from dataclasses import replace
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.buffer.ledger import Ledger
from leeway.buffer.lengths import LengthFidelity
from leeway.buffer.schema import Trajectory, VersionSpan, to_batch
from leeway.common.staleness import PolicyVersion
from leeway.launch.observe.metrics import METRICS
from leeway.learner.batch import Leaves, StepBatch
from leeway.learner.mesh import MeshPlace
from leeway.learner.model import DeviceBatch
from leeway.learner.networks import Reference
from leeway.learner.optimizer import UpdateResult
from leeway.learner.packing import (
    CostModel,
    PackingRule,
    best_fit,
    deal,
    micro_batches_required,
    order,
    pack,
    plan,
    spread,
)
from leeway.learner.report import (
    MAX_PARTS,
    StepTimes,
    lag_metrics,
    part_metrics,
    replay_metrics,
    step_report,
    uninformative_frac,
)
from leeway.learner.step import StepResult, Update
from tests.world.learner import TABLES

RULE = PackingRule(64)


def sequences(lengths):
    """Return sequences of distinct tokens, so that no two share a prompt."""
    return [np.arange(1, 1 + length) + 10_000 * i for i, length in enumerate(lengths)]


def log_normal(number, seed=0):
    """Return lengths that are distributed like lengths of answers: median 200, sigma 1.0, at most 2048."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(200), 1.0, number))
    return np.clip(drawn, 2, 2048).astype(int).tolist()


# --- packing --------------------------------------------------------------------------------------


def test_best_fit_fills_the_fullest_bin_first():
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]


def test_a_sequence_longer_than_the_budget_is_rejected_by_number():
    with pytest.raises(ValueError, match=r"sequence 1 of the batch has 9 tokens.*token_budget = 8"):
        pack(sequences([3, 9]), [1, 1], PackingRule(8))


def test_an_empty_batch_and_a_sequence_without_a_prompt_are_rejected():
    with pytest.raises(ValueError, match="cannot pack an empty batch"):
        pack([], [], RULE)
    with pytest.raises(ValueError, match="sequence 1 has no prompt token"):
        pack(sequences([3, 4]), [1, 0], RULE)


def test_long_tailed_lengths_are_packed_with_little_padding_and_even_replicas():
    lengths = log_normal(1000)
    packed = pack(sequences(lengths), [1] * len(lengths), PackingRule(4096))
    assert packed.efficiency > 0.98
    rule = PackingRule(4096, num_replicas=4, min_micro_batches=2, multiple=2, cost=CostModel(1.0, 1 / 2000))
    shared = pack(sequences(lengths), [1] * len(lengths), rule)
    assert shared.cost_balance(4) > 0.99
    assert (shared.num_micro_batches, shared.num_empty) == (80, 0)


def test_three_full_micro_batches_on_two_replicas_become_four_of_similar_cost():
    lengths = [10] * 9
    bins = plan(lengths, np.array(lengths), PackingRule(30, num_replicas=2))
    assert sorted(map(len, bins)) == [2, 2, 2, 3]
    assert sorted(map(len, bins[:2])) in ([2, 2], [2, 3])


def test_required_micro_batches_are_filled_and_only_surplus_ones_are_empty():
    packed = pack(sequences([8, 7, 6]), [2] * 3, PackingRule(64, num_replicas=2, min_micro_batches=2))
    assert (packed.num_micro_batches, packed.num_empty) == (4, 1)
    assert packed.efficiency == pytest.approx(21 / 256)


def test_best_fit_is_used_if_even_costs_do_not_fit():
    lengths = [6, 5, 4, 3, 2]  # two bins of 10 are full; length 2 would not fit after 6 + 3 and 5 + 4
    assert spread(lengths, np.array(lengths, float), 10, 2) is None
    assert [sum(lengths[i] for i in members) for members in plan(lengths, np.array(lengths), PackingRule(10))] == [
        10,
        10,
    ]


def test_attention_counts_in_a_quadratic_cost_model():
    lengths = [90, 30, 30, 30]
    by_tokens = pack(sequences(lengths), [1] * 4, PackingRule(100, num_replicas=2))
    assert [sum(lengths[i] for i in members) for members in by_tokens.members] == [90, 90]
    squared = PackingRule(150, num_replicas=3, cost=CostModel(1.0, 0.1))
    assert sorted(pack(sequences(lengths), [1] * 4, squared).cost_M) == [120.0, 240.0, 900.0]
    assert CostModel(2.0, 0.5).of([3, 4]).tolist() == [10.5, 16.0]


def test_a_shared_prompt_costs_its_tokens_and_their_square_once():
    rows = [np.append(np.arange(10), np.full(2, 100 + i)) for i in range(4)]
    packed = pack(rows, [10] * 4, PackingRule(48, cost=CostModel(1.0, 0.5)))
    each, prompt = 12 + 0.5 * 12**2, 10 + 0.5 * 10**2
    assert packed.cost_M.tolist() == [4 * each - 3 * prompt]


def test_bins_are_dealt_in_rounds_with_expensive_ones_to_the_least_loaded_replica():
    assert deal(np.array([9.0, 7.0, 5.0, 1.0]), 2) == [[0, 3], [1, 2]]


def test_a_pipeline_begins_and_ends_with_cheap_micro_batches():
    cost_N = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    assert cost_N[order(cost_N, range(5))].tolist() == [1, 3, 5, 4, 2]


def test_the_cost_balance_of_a_single_loaded_replica_is_its_share():
    packed = pack(sequences([20]), [1], PackingRule(32, num_replicas=4))
    assert packed.cost_balance(4) == pytest.approx(0.25)


def test_samples_of_a_prompt_are_packed_together_with_one_copy_of_the_prompt():
    prompts = [np.arange(10), np.arange(50, 60)]
    rows = [np.append(prompts[i % 2], np.full(2, 100 + i)) for i in range(8)]  # a group of four has 48 tokens
    units = np.arange(8) % 2
    packed = pack(rows, [10] * 8, PackingRule(48, min_micro_batches=2), units)
    assert sorted(sorted(members.tolist()) for members in packed.members) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert packed.cost_M.tolist() == [10 + 4 * 2] * 2
    assert packed.unit == "sequence", "the packing rule sets no other unit"
    assert packed.shared_frac == 2 * 3 * 10 / 96
    apart = pack(rows, [10] * 8, PackingRule(24, min_micro_batches=2), units)
    assert [len(members) for members in apart.members] == [2] * 4, "a group of 48 tokens does not fit"
    assert (apart.num_tokens, apart.efficiency) == (96, 1.0)


@pytest.mark.parametrize(("num_stages", "device", "num_micro_batches"), [(1, "cpu", 1), (2, "cpu", 2), (1, "cuda", 2)])
def test_on_one_stage_of_a_cpu_the_budget_counts_a_prompt_once(num_stages, device, num_micro_batches):
    prompts = [np.arange(10), np.arange(50, 60)]
    rows = [np.append(prompts[i % 2], np.full(2, 100 + i)) for i in range(8)]  # 96 tokens, of which 36 are computed
    rule = PackingRule.of_schedule("1f1b", num_stages, 48, 1, CostModel(), "sequence").on_device(device)
    packed = pack(rows, [10] * 8, rule, np.arange(8) % 2)
    assert packed.num_micro_batches == num_micro_batches
    assert packed.num_tokens == 96


def test_the_budget_limits_the_keys_that_attention_gathers():
    rows = [np.append(np.arange(10), [100 + i]) for i in range(30)]  # units of 10 gather 110 tokens and compute 20
    packed = pack(rows, [10] * 30, PackingRule(30, most_gathered=4), np.arange(30) % 3)
    assert [len(members) for members in packed.members] == [10] * 3


def test_only_interleaved_schedules_require_multiples_of_the_stages():
    required = {name: micro_batches_required(name, 4) for name in ("1f1b", "fused", "interleaved_1f1b")}
    assert required == {"1f1b": (4, 1), "fused": (4, 1), "interleaved_1f1b": (4, 4)}


# --- batch ----------------------------------------------------------------------------------------


def trajectory(spans, **changes) -> Trajectory:
    length = spans[-1][-1]
    row = Trajectory(
        lease_id=0,
        attempt=0,
        group_id=0,
        sample_index=0,
        prompt_id=0,
        token_ids=np.zeros(2 + length, np.int32),
        prompt_length=2,
        logprobs=np.zeros(length, np.float32),
        spans=tuple(VersionSpan(PolicyVersion(*version), start, end) for version, start, end in spans),
        reward=1.0,
        finish_reason="stop",
        finished_s=100.0,
    )
    return replace(row, **changes)


def of_lengths(*samples):
    """Return one trajectory per (group, number of tokens)."""
    seen = {}
    rows = []
    for group, length in samples:
        index = seen[group] = seen.get(group, -1) + 1
        fields = {"group_id": group, "sample_index": index}
        rows.append(trajectory([((0, 0), 0, length - 2)], **fields))
    return rows


def test_lags_count_from_the_checkpoint_at_which_a_restart_resumed():
    # incarnation 0 reached version 9, and incarnation 1 resumed from its checkpoint at version 6
    abandoned = trajectory([((0, 8), 0, 3)])
    crossing = trajectory([((0, 5), 0, 1), ((1, 7), 1, 3)], group_id=4)
    batch = StepBatch.build(to_batch([abandoned, crossing], "run"), 8, {0: 0, 1: 6}, RULE)
    assert batch.lag_T.tolist() == [2, 2, 2, 3, 1, 1]
    assert batch.group_B.tolist() == [0, 1]
    assert batch.single_version_B.tolist() == [True, False]
    metrics = lag_metrics([batch], batch, newest_published=7, started_s=103.0)
    assert metrics["lag/abandoned"] == 3
    assert metrics["lag/token_max"] == 3
    assert metrics["lag/in_flight"] == 1.0
    assert metrics["lag/in_queue"] == 1.5
    assert metrics["lag/publish"] == 1
    assert lag_metrics([batch], batch, newest_published=None, started_s=103.0)["lag/publish"] is None
    assert metrics["lag/wall_s"] == 3.0


def test_a_part_of_a_batch_keeps_its_token_columns_and_packing_rule():
    rows = of_lengths((0, 5), (0, 6), (1, 4), (1, 9))
    rule = PackingRule(16, num_replicas=2, min_micro_batches=2)
    whole = StepBatch.build(to_batch(rows, "run"), 3, {0: 0}, rule)
    part = whole.part(np.array([2, 3]), version=4)
    assert part.tokens_of(np.array([1])).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert whole.tokens_of(np.array([0, 3])).tolist() == [0, 1, 2, 9, 10, 11, 12, 13, 14, 15]
    assert part.sequence_T.tolist() == [0] * 2 + [1] * 7
    assert part.lag_T.tolist() == [4] * 9
    assert part.packed.num_micro_batches == 4
    assert part.packed.num_tokens == 13


# --- scoring and report ---------------------------------------------------------------------------


class Echo:
    """Pipeline whose log-probability of a token is the negated token id; counts the tokens of each pass."""

    modules = ()

    def __init__(self):
        self.num_tokens = []

    def forward_only(self, batch):
        self.num_tokens.append(batch.packed.num_tokens)
        return -batch.tokens_ML.double()


def reference_of(*pipelines, teacher_of_prompt=b""):
    mesh = SimpleNamespace(place=MeshPlace(0))
    return Reference(pipelines, mesh, torch.device("cpu"), torch.float64, teacher_of_prompt)


def score(batch, *pipelines, teacher_of_prompt=b""):
    on_device = DeviceBatch(batch.packed, torch.device("cpu"))
    return reference_of(*pipelines, teacher_of_prompt=teacher_of_prompt).score(batch, on_device)


def test_the_reference_scores_only_samples_without_stored_scores():
    rows = of_lengths((0, 5), (0, 6), (1, 4))
    rows = [
        replace(row, token_ids=np.arange(len(row.token_ids), dtype=np.int32) + 10 * i) for i, row in enumerate(rows)
    ]
    rows[1] = replace(rows[1], reference_logprobs=np.full(4, -0.5, np.float32))
    pipeline = Echo()
    reference_T, scores = score(StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, PackingRule(8)), pipeline)
    assert pipeline.num_tokens == [9]
    assert reference_T.tolist() == [-2, -3, -4, -0.5, -0.5, -0.5, -0.5, -22, -23]
    assert {i: values.tolist() for i, values in scores.items()} == {0: [-2, -3, -4], 2: [-22, -23]}

    known = [replace(row, reference_logprobs=np.zeros(row.num_completion_tokens, np.float32)) for row in rows]
    assert score(StepBatch.build(to_batch(known, "run"), 0, {0: 0}, PackingRule(8)), pipeline)[1] == {}
    assert pipeline.num_tokens == [9]
    assert score(StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, PackingRule(8)))[0].isnan().sum() == 5


class Shifted(Echo):
    """An `Echo` whose log-probabilities are lower by a thousand."""

    def forward_only(self, batch):
        return super().forward_only(batch) - 1000


def test_each_teacher_scores_the_samples_of_its_own_prompts():
    rows = of_lengths((0, 5), (0, 6), (1, 4), (2, 3))
    rows = [
        replace(row, prompt_id=prompt, token_ids=np.arange(len(row.token_ids), dtype=np.int32) + 10 * i)
        for i, (row, prompt) in enumerate(zip(rows, (2, 0, 2, 1), strict=True))
    ]
    rows[1] = replace(rows[1], reference_logprobs=np.full(4, -0.5, np.float32))
    math, code = Echo(), Shifted()
    table = bytes([0, 0, 1])  # prompt 2 belongs to the teacher `code`
    reference_T, scores = score(
        StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, PackingRule(8)), math, code, teacher_of_prompt=table
    )
    assert (math.num_tokens, code.num_tokens) == ([3], [9]), "each teacher scores only its prompts"
    assert reference_T.tolist() == [-1002, -1003, -1004, -0.5, -0.5, -0.5, -0.5, -1022, -1023, -32]
    assert {i: values.tolist() for i, values in scores.items()} == {
        0: [-1002, -1003, -1004],
        2: [-1022, -1023],
        3: [-32],
    }


def test_scoring_packs_for_one_forward_pass_even_if_the_loss_compares_groups():
    rows = [replace(row, token_ids=row.token_ids + i) for i, row in enumerate(of_lengths(*[(0, 3)] * 4, *[(1, 3)] * 2))]
    rule = PackingRule(12, min_micro_batches=2, unit="group", num_stages=2)
    batch = StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, rule)
    assert batch.packed.cost_M.tolist() == [6, 12], "bins of whole groups are uneven, but save a pass"
    assert batch.pack(np.arange(6)).cost_M.tolist() == [9, 9]


class OffLoaded(Echo):
    """An `Echo` that fetches its weights for a pass and counts the fetches."""

    is_here, num_fetched = False, 0

    @property
    def modules(self):
        return (self,)

    def forward_only(self, batch):
        self.is_here, self.num_fetched = True, self.num_fetched + (not self.is_here)
        return super().forward_only(batch)

    def release(self):
        self.is_here = False


def test_off_loaded_references_are_fetched_one_at_a_time_and_released_before_training():
    rows = [replace(row, prompt_id=prompt) for row, prompt in zip(of_lengths((0, 5), (1, 4)), (0, 1), strict=True)]
    one, other = OffLoaded(), OffLoaded()
    seen = []
    other.forward_only = lambda batch: seen.append(one.is_here) or OffLoaded.forward_only(other, batch)
    score(
        StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, PackingRule(8)), one, other, teacher_of_prompt=bytes([0, 1])
    )
    assert (one.num_fetched, other.num_fetched) == (1, 1)
    assert (one.is_here, other.is_here) == (False, False)
    assert seen == [False], "the memory holds only one reference"


class Third(Echo):
    """An `Echo` whose log-probabilities are divided by 3, so that float32 rounds the values."""

    def forward_only(self, batch):
        return super().forward_only(batch) / 3


def test_a_repeated_step_reads_the_stored_scores_in_any_precision():
    rows, rule = of_lengths((0, 5), (0, 6)), PackingRule(8)
    rows = [replace(row, token_ids=np.arange(len(row.token_ids), dtype=np.int32)) for row in rows]
    first_T, scores = score(StepBatch.build(to_batch(rows, "run"), 0, {0: 0}, rule), Third())
    stored = [replace(row, reference_logprobs=scores[i]) for i, row in enumerate(rows)]
    again_T, _ = score(StepBatch.build(to_batch(stored, "run"), 0, {0: 0}, rule))
    assert first_T.dtype == again_T.dtype == torch.float64
    assert torch.equal(first_T, again_T)
    assert -1 / 3 not in again_T.tolist()


def test_a_step_reports_the_age_and_the_number_of_uses_of_its_samples():
    spans = [((0, 1), 0, 2), ((0, 4), 2, 6)]
    older = [trajectory(spans, group_id=4, sample_index=0), trajectory(spans, group_id=4, sample_index=1)]
    fresh = [trajectory([((0, 5), 0, 4)], group_id=2, sample_index=0)]
    batch = StepBatch.build(to_batch([*older, *fresh], "run"), 5, {0: 0}, RULE)
    found = replay_metrics(batch, {"uses": 24, "redone_uses": 4, "trained": 10})
    assert found == {
        "buffer/effective_uses": 20,
        "buffer/uses_per_sample": 2.0,
        "buffer/age_at_use": pytest.approx((4 + 0) / 2),
        "buffer/on_policy_share": pytest.approx(4 / 16),
    }
    assert replay_metrics(batch, {"uses": 0, "redone_uses": 0, "trained": 0})["buffer/uses_per_sample"] is None


def test_a_step_reports_the_fraction_of_groups_with_equal_rewards():
    spans, rewards = [((0, 3), 0, 4)], {1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.5,), 4: (0.0, 0.0, 0.0)}
    rows = [
        trajectory(spans, group_id=group, sample_index=index, reward=reward)
        for group, several in rewards.items()
        for index, reward in enumerate(several)
    ]
    batch = StepBatch.build(to_batch(rows, "run"), 3, {0: 0}, RULE)
    assert uninformative_frac(batch) == 2 / 4, "a group of one sample does not count"
    report = step_report(
        batch, StepResult(4, (Update(batch, UpdateResult(True, (1.0,), 1e-5, 1.0), {}),), {}), 1, 3,
        StepTimes(0.0, 1.0, 2.0), counts_of(Ledger(uninformative=6)), LengthFidelity(),
    )  # fmt: skip
    assert (report["buffer/uninformative_frac"], report["buffer/uninformative"]) == (0.5, 6)


def test_a_step_reports_the_mean_of_each_of_several_reward_functions():
    one = [((0, 3), 0, 4)]
    parts = [{"exact": 1.0, "format": 0.5}, {"exact": None, "format": 0.1}, {"exact": 0.0}]
    batch = StepBatch.build(to_batch([trajectory(one, reward_parts=each) for each in parts], "run"), 3, {0: 0}, RULE)
    assert part_metrics(batch) == {"reward/part/exact": 0.5, "reward/part/format": pytest.approx(0.3)}
    report = step_report(
        batch, StepResult(4, (Update(batch, UpdateResult(True, (1.0,), 1e-5, 1.0), {}),), {}), 1, 3,
        StepTimes(0.0, 1.0, 2.0), counts_of(Ledger()), LengthFidelity(0.1, 0.8),
    )  # fmt: skip
    assert report["reward/part/exact"] == 0.5
    alone = [trajectory(one, reward_parts={"exact": 1.0})]
    assert part_metrics(StepBatch.build(to_batch(alone, "run"), 3, {0: 0}, RULE)) == {}, "reward/mean has a single part"
    many = [trajectory(one, reward_parts={f"f{number}": 1.0 for number in range(MAX_PARTS + 9)})]
    assert len(part_metrics(StepBatch.build(to_batch(many, "run"), 3, {0: 0}, RULE))) == MAX_PARTS


def test_logged_values_are_metrics_beside_the_reward():
    one = [((0, 3), 0, 4)]
    parts = [{"exact": 1.0, "log/num_steps": 3.0}, {"exact": 0.0, "log/num_steps": 4.0}, {"exact": 0.0}]
    batch = StepBatch.build(to_batch([trajectory(one, reward_parts=each) for each in parts], "run"), 3, {0: 0}, RULE)
    assert part_metrics(batch) == {"reward/num_steps": 3.5}, "a single reward has no metric of its own"


def plain_normalised(groups, parts, weights):
    """Return the normalised reward of each sample, by the definition."""
    found = [part.get("overlong_penalty", 0.0) for part in parts]
    for name, weight in weights.items():
        for group in set(groups):
            own = [i for i, each in enumerate(groups) if each == group and parts[i].get(name) is not None]
            values = [parts[i][name] for i in own]
            spread = stdev(values) if len(values) > 1 else 0.0
            for i in own:
                found[i] += weight * (parts[i][name] - fmean(values)) / (spread + 1e-6)
    return found


VALUES = st.sampled_from([None, -1.0, 0.0, 0.25, 1.0, 300.0])


@given(
    samples=st.lists(st.tuples(st.integers(0, 2), VALUES, VALUES, st.sampled_from([0.0, -0.5])), min_size=1),
    weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
)
@settings(deadline=None, max_examples=50)
def test_each_reward_is_standardised_in_its_group_before_the_sum(samples, weights):
    samples.sort(key=lambda each: each[0])
    parts = [{"exact": a, "short": b, "overlong_penalty": c} for _, a, b, c in samples]
    rows = [
        trajectory([((0, 3), 0, 4)], group_id=group + 1, sample_index=index, reward_parts=part, reward=0.0)
        for index, ((group, *_), part) in enumerate(zip(samples, parts, strict=True))
    ]
    by_name = dict(zip(("exact", "short"), weights, strict=True))
    batch = StepBatch.build(to_batch(rows, "run"), 3, {0: 0}, RULE, by_name)
    leaves = Leaves(torch.zeros(len(batch.sequence_T), dtype=torch.float64))
    inputs = batch.loss_inputs(leaves, leaves, leaves.logprobs_T)
    expected = plain_normalised([group for group, *_ in samples], parts, by_name)
    assert inputs.rewards_B.tolist() == pytest.approx(expected, abs=1e-10, rel=1e-10)
    half = batch.part(np.flatnonzero(batch.group_B == 0), 3).loss_inputs(leaves, leaves, leaves.logprobs_T)
    assert half.rewards_B.tolist() == pytest.approx(inputs.rewards_B[: len(half.rewards_B)].tolist())


def counts_of(ledger: Ledger) -> dict[str, int]:
    """Return the counts as the buffer reports them."""
    return {**ledger.counts(), **ledger.failed_by_kind(), "quarantined": 0, "gap": 0}


def test_a_step_reports_the_packing_of_its_batch():
    rule = PackingRule(16, num_replicas=2, min_micro_batches=2)
    batch = StepBatch.build(to_batch(of_lengths((0, 12), (0, 10), (1, 14)), "run"), 3, {0: 0}, rule)
    taken = Update(batch, UpdateResult(True, (1.0,), 1e-5, 1.0), {})
    ledger = counts_of(Ledger(filtered=5, filtered_too_long=4))
    report = step_report(
        batch, StepResult(4, (taken,), {}), 1, 3, StepTimes(0.0, 1.0, 2.0), ledger, LengthFidelity(0.1, 0.8)
    )
    assert (report["length/fidelity_ks"], report["length/p95_ratio"]) == (0.1, 0.8)
    assert report["batch/micro_batches"] == 2
    assert report["batch/empty_micro_batches"] == 1
    assert report["batch/pack_efficiency"] == pytest.approx(36 / 64)
    assert report["batch/cost_balance"] == pytest.approx(18 / 22)
    assert report["batch/shared_frac"] == 0
    assert report["buffer/filtered_too_long"] == 4
    assert list(report["lag_by_actor"].values()) == [{3: 36 - 3 * 2}], "only completion tokens count"
    skipped = replace(taken, result=UpdateResult(False, (1.0,), 1e-5, 1.0))
    report = step_report(
        batch, StepResult(3, (skipped,), {}), 1, 3, StepTimes(0.0, 1.0, 2.0), ledger, LengthFidelity(0.1, 0.8)
    )
    assert report["lag_by_actor"] == {}, "a skipped update trains on no tokens"
    assert set(report) - TABLES <= set(METRICS)
