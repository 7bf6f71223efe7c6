"""Several updates per step: minibatches, versions, lags, learning rates, and skipped updates."""

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leeway.algorithms.distillation import DistillationConfig
from leeway.algorithms.oapl import OAPLConfig
from leeway.algorithms.off_policy_ppo import OffPolicyPPOConfig
from leeway.algorithms.online_dpo import OnlineDPOConfig
from leeway.algorithms.trajectory_balance import TrajectoryBalanceConfig
from leeway.learner import step as step_file
from leeway.learner.batch import Leaves
from leeway.learner.config import LearnerConfig
from leeway.learner.mesh import Mesh
from leeway.learner.optimizer import learning_rate
from leeway.learner.report import lag_metrics
from leeway.learner.step import TrainStep, counted, minibatches
from tests.world.learner import (
    SEED,
    NoDeviceReads,
    build,
    make_models,
    make_networks,
    make_rows,
    run_ranks,
    single_rank,
    weights_of,
)

HEAD = OffPolicyPPOConfig(baseline="value_head", kl_beta=0.1)
MODEL = OffPolicyPPOConfig(baseline="critic")


@pytest.fixture
def train_step(tmp_path):
    """Return a function that builds the step of one process and returns the step with its networks."""
    make_models(tmp_path)
    with single_rank():

        def make(algorithm, *, one_pass=True, precision="float64", **config):
            config = LearnerConfig(**{"learning_rate": 1e-2, **config})
            networks, reference = make_networks(tmp_path / "tied", config, algorithm, precision=precision)
            return TrainStep(networks, reference, algorithm, config, SEED, one_pass=one_pass), networks

        yield make


# --- division -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_divides_the_batch_into_minibatches_of_whole_groups(units, num_minibatches, num_epochs, seed):
    unit_B = np.array(units)
    plan = minibatches(unit_B, num_minibatches, num_epochs, (seed, 3))
    num_parts = min(num_minibatches, len(set(units)))
    assert len(plan) == num_parts * num_epochs
    largest = np.unique(unit_B, return_counts=True)[1].max()
    for epoch in range(num_epochs):
        parts = plan[epoch * num_parts : (epoch + 1) * num_parts]
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(units)))
        assert len({unit for part in parts for unit in set(unit_B[part].tolist())}) == sum(
            len(set(unit_B[part].tolist())) for part in parts
        ), "a unit is in two minibatches"
        sizes = [len(part) for part in parts]
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) <= largest
    again = minibatches(unit_B, num_minibatches, num_epochs, (seed, 3))
    assert all(np.array_equal(one, other) for one, other in zip(plan, again, strict=True))


def test_the_order_of_minibatches_depends_on_run_step_and_epoch():
    unit_B = np.arange(32)
    plans = [minibatches(unit_B, 4, 2, seed) for seed in [(0, 0), (0, 1), (1, 0)]]
    firsts = {tuple(plan[epoch * 4].tolist()) for plan in plans for epoch in (0, 1)}
    assert len(firsts) == 6


def test_a_part_of_a_batch_holds_its_samples_with_the_lag_of_its_version():
    rows = make_rows(0)
    batch = build(rows, version=3)
    sequences = np.flatnonzero(np.isin(batch.group_B, [1, 3]))
    part = batch.part(sequences, version=5)
    assert part.num_groups == 2
    assert part.group_B.tolist() == [0, 0, 0, 1, 1, 1]
    assert part.prompt_B.tolist() == [1, 1, 1, 3, 3, 3]
    assert set(part.lag_T.tolist()) == {5}
    where_T = batch.tokens_of(sequences)
    expected = np.concatenate([rows[i].token_ids[rows[i].prompt_length :] for i in sequences])
    assert len(where_T) == len(expected)
    np.testing.assert_array_equal(part.packed.tokens_ML.reshape(-1)[part.packed.output_T], expected)
    np.testing.assert_array_equal(sequences[part.sequence_T], batch.sequence_T[where_T])


def test_minibatches_keep_groups_whole_or_prompts_if_the_loss_compares_prompts(train_step):
    batch = build(make_rows(0, num_groups=6, num_prompts=3))
    for compare, num_updates in (("group", 4), ("prompt", 3)):
        step, _ = train_step(OnlineDPOConfig(compare=compare), num_minibatches=4)
        result = step.run(batch, 0)
        seen = [set(update.batch.prompt_B.tolist()) for update in result.updates]
        # three prompts give at most three updates
        assert len(seen) == num_updates
        assert (sum(map(len, seen)) == 3) == (compare == "prompt")


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [TrajectoryBalanceConfig(), HEAD, MODEL], ids=["balance", "head", "model"])
def test_the_gradient_of_an_update_does_not_depend_on_its_micro_batches(train_step, algorithm):
    _, networks = train_step(algorithm)
    gradients = []
    for token_budget, least in ((4096, 1), (64, 1), (30, 1), (4096, 7)):
        batch = build(make_rows(0), 0, token_budget, min_micro_batches=least)
        on_device = networks.on_device(batch.packed)
        leaves = networks.forward_only(on_device)
        for network in networks.all:
            if network.modules[-1].heads != "token":
                # a value head of nonzero weights, so that its gradient reaches the layers
                torch.nn.init.constant_(network.modules[-1].value_head.weight, 0.1)
        coefficients_T = torch.linspace(-1, 2, len(leaves.logprobs_T), dtype=torch.float64)
        networks.train(on_device, Leaves(coefficients_T, None if leaves.values_T is None else coefficients_T.flip(0)))
        found = {}
        for network in networks.all:
            for name, parameter in network.named_weights():
                found[network.modules[-1].heads, name] = parameter.grad.clone()
        for optimizer in networks.optimizers:
            optimizer.clear()
        gradients.append(found)
    for other in gradients[1:]:
        for key, gradient in gradients[0].items():
            assert (gradient - other[key]).abs().max() <= 1e-12 * max(1.0, float(gradient.abs().max())), key


@pytest.mark.parametrize(
    ("config", "algorithm", "num_passes"),
    [
        ({"num_epochs": 2, "one_pass": False}, OffPolicyPPOConfig(), 2),  # one pass for the batch, one for epoch 2
        ({"num_epochs": 2}, OffPolicyPPOConfig(), 1),
        ({}, OffPolicyPPOConfig(), 0),
        ({}, OffPolicyPPOConfig(kl_beta=0.1), 1),  # the KL is part of the reward and of the baseline
        ({}, TrajectoryBalanceConfig(), 1),
        # One pass per update: this loss does not need the log-probabilities at the start of the step.
        ({"num_minibatches": 2}, TrajectoryBalanceConfig(), 2),
        ({"num_epochs": 2}, OffPolicyPPOConfig(proximal="interpolated"), 0),
        ({"num_epochs": 2}, DistillationConfig(), 0),
    ],
)
def test_forward_only_passes_run_only_if_needed_and_the_first_ratio_is_exactly_one(
    train_step, config, algorithm, num_passes
):
    step, networks = train_step(algorithm, **config)
    passes = []
    forward = networks.forward_only
    networks.forward_only = lambda batch: passes.append(1) or forward(batch)
    result = step.run(build(make_rows(0)), 0)
    assert len(passes) == num_passes
    if algorithm.type != "off_policy_ppo":
        return
    assert all(f"off_policy/clip_frac_{side}" in result.updates[0].metrics for side in ("low", "high"))
    assert result.updates[0].metrics["off_policy/clip_frac_low"] == 0.0


def test_no_pass_copies_from_the_host_after_its_batch_is_on_the_device(train_step, monkeypatch):
    _, networks = train_step(OffPolicyPPOConfig())
    on_device = networks.on_device(build(make_rows(0)).packed)
    assert on_device.packed.num_micro_batches > 1
    assert all(layout.grids for layout in on_device.layouts)  # grids are built at their first use, and only on a CPU
    buckets = [each for layout in on_device.layouts for each in layout.grids.buckets]
    assert any(each.queries.shape != each.keys.shape for each in buckets), "a shared prompt is queried once"
    monkeypatch.setattr(torch, "from_numpy", lambda _: pytest.fail("a copy from the host waits for queued GPU work"))
    leaves = networks.forward_only(on_device)
    networks.train(on_device, Leaves(torch.ones_like(leaves.logprobs_T)))
    indices = []
    found_T = networks.train_in_one_pass(on_device, lambda where, logprobs: indices.append(where) or logprobs)
    assert torch.equal(torch.cat(indices).sort()[0], torch.arange(len(found_T)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_one_pass_step_reads_nothing_from_the_device_before_the_pass_ends(train_step, precision):
    step, networks = train_step(OffPolicyPPOConfig(corrections=("token_tis",)), precision=precision)
    passes, train = [], networks.train_in_one_pass
    step.run(build(make_rows(0)), 0)  # builds the schedule, for which stages communicate

    def watched(batch, gradient):
        with NoDeviceReads():
            passes.append(train(batch, gradient))
        return passes[-1]

    networks.train_in_one_pass = watched
    assert not step.run(build(make_rows(0)), 1).skipped
    assert len(passes) == 1
    with pytest.raises(AssertionError, match="waits for the device"), NoDeviceReads():
        passes[0].sum().item()


def test_a_batch_with_too_many_loss_evaluations_takes_two_passes(train_step, monkeypatch):
    step, networks = train_step(OffPolicyPPOConfig())
    batch = build(make_rows(0))
    evaluated = batch.packed.num_micro_batches * len(batch.sequence_T)
    assert [passes_of(step, networks, batch, most, monkeypatch) for most in (evaluated, evaluated - 1)] == [0, 1]


def passes_of(step, networks, batch, most_evaluated, monkeypatch) -> int:
    """Count the forward-only passes of a step."""
    passes, forward = [], networks.forward_only
    monkeypatch.setattr(step_file, "MOST_EVALUATED", most_evaluated)
    monkeypatch.setattr(networks, "forward_only", lambda batch: passes.append(1) or forward(batch))
    step.run(batch, 0)
    monkeypatch.undo()
    return len(passes)


# --- versions, lags, rates ------------------------------------------------------------------------


def test_each_update_is_a_version_and_its_lag_counts_from_that_version(train_step):
    step, _ = train_step(OffPolicyPPOConfig(), num_minibatches=2, num_epochs=2)
    between = []
    batch = build(make_rows(0), version=7)
    result = step.run(batch, 3, between.append)
    assert between == [8, 9, 10]
    assert result.version == 11
    assert [update.batch.version for update in result.updates] == [7, 8, 9, 10]
    metrics = lag_metrics([update.batch for update in counted(result.updates)], batch, 7, 0.0)
    assert metrics["lag/token_max"] == 10
    assert metrics["lag/token_mean"] == pytest.approx(8.5, abs=0.3)
    assert metrics["lag/publish"] == 0
    assert result.metrics["updates/taken"] == 4
    assert result.metrics["updates/skipped"] == 0


def rates(config, updates, last=0.0):
    """Return the learning rates of consecutive updates."""
    return list(accumulate(updates, lambda rate, update: learning_rate(config, update, rate), initial=last))[1:]


def test_the_learning_rate_warms_up_and_decays_to_zero():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=2, num_steps=6, lr_schedule="linear")
    assert rates(config, range(7)) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = config.model_copy(update={"lr_schedule": "cosine"})
    assert rates(cosine, range(5))[-1] == pytest.approx(0.5)
    assert rates(LearnerConfig(learning_rate=0.3, warmup_steps=0, lr_schedule="constant"), [99]) == [0.3]


def test_the_learning_rate_follows_updates_and_ends_with_the_last_step():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=1, num_steps=3, num_minibatches=2, lr_schedule="linear")
    assert rates(config, range(7)) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_run_with_more_steps_enters_the_longer_schedule_at_the_warm_up_pace():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=4, num_steps=12, lr_schedule="linear")
    *_, last = rates(config, range(12))
    assert last == 0.125
    longer = config.model_copy(update={"num_steps": 44})
    assert rates(longer, range(12, 16), last) == [0.375, 0.625, 0.75, 0.725]


@pytest.mark.parametrize("one_pass", [True, False])
def test_beta_reaches_its_final_value_over_the_updates_of_the_run(train_step, one_pass):
    algorithm = TrajectoryBalanceConfig(beta=1.0, beta_final=0.5, corrections=[])
    step, _ = train_step(algorithm, one_pass=one_pass, num_steps=2, num_epochs=2, learning_rate=1e-9)
    betas, norms = [], []
    for number in range(3):
        # these versions mean that one of the two updates of each previous step was skipped
        updates = step.run(build(make_rows(0), version=number), number).updates
        betas += [update.metrics["tb/beta"] for update in updates]
        norms.append(updates[0].result.grad_norms[0])
    assert betas == [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert norms[0] < norms[1] < norms[2], "the gradient scales with 1 / beta"


def test_metrics_of_a_step_are_means_over_its_updates_by_completion_tokens(train_step):
    step, _ = train_step(OffPolicyPPOConfig(), num_minibatches=3)
    result = step.run(build(make_rows(0)), 0)
    weights = [len(update.batch.sequence_T) for update in result.updates]
    losses = [update.metrics["loss"] for update in result.updates]
    assert result.metrics["loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-12)
    norms = [update.result.grad_norms[0] for update in result.updates]
    assert result.metrics["grad_norm"] == pytest.approx(np.average(norms, weights=weights), rel=1e-12)


def test_the_off_policy_metrics_of_a_step_refer_to_its_start(train_step):
    algorithm = OffPolicyPPOConfig(corrections=("icepop",))
    one, several = (
        train_step(algorithm, num_minibatches=number, num_epochs=number)[0].run(build(make_rows(0)), 0).metrics
        for number in (1, 2)
    )
    names = [name for name in one if name.startswith(("mismatch/", "off_policy/ess", "off_policy/chi2"))]
    assert "off_policy/ess_sequence_truncated" in names
    assert one["mismatch/lag0_tokens"] > 0
    for name in [*names, "off_policy/masked_frac"]:
        assert several[name] == pytest.approx(one[name], rel=1e-9), name


def test_the_mismatch_covers_the_first_update_if_no_loss_reads_the_start_of_the_step(train_step):
    step, networks = train_step(DistillationConfig(), num_minibatches=2)
    batch = build(make_rows(0))
    whole = networks.forward_only(networks.on_device(batch.packed)).logprobs_T
    result = step.run(batch, 0)
    first = result.updates[0].batch
    assert 0 < len(first.sequence_T) < len(batch.sequence_T)
    sequences = minibatches(batch.group_B, 2, 1, (SEED, 0))[0]
    behaviour_T = torch.tensor(batch.rows.column("logprobs").flatten().to_pylist(), dtype=torch.float64)
    log_rho_T = (whole - behaviour_T)[batch.tokens_of(sequences)]
    assert result.metrics["mismatch/k1"] == pytest.approx(-float(log_rho_T.mean()), rel=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [TrajectoryBalanceConfig(), OffPolicyPPOConfig(), HEAD, OnlineDPOConfig(), OAPLConfig(), DistillationConfig()],
    ids=lambda algorithm: f"{algorithm.type}-{algorithm.needs.critic}",
)
def test_entropy_and_kl_of_every_loss_equal_those_of_loops_over_the_tokens(train_step, algorithm):
    step, networks = train_step(algorithm)
    frozen = networks.forward_only(networks.on_device(build(make_rows(0)).packed)).logprobs_T
    step.run(build(make_rows(0)), 0)  # moves the policy away from the reference
    batch = build(make_rows(0), 1)
    log_pi = networks.forward_only(networks.on_device(batch.packed)).logprobs_T.tolist()
    log_mu = batch.rows.column("logprobs").flatten().to_pylist()
    log_ref = frozen.float().tolist()  # the buffer stores scores in float32
    metrics = step.run(batch, 1).metrics
    rho = [math.exp(p - m) for p, m in zip(log_pi, log_mu, strict=True)]
    entropy = -math.fsum(w * p for w, p in zip(rho, log_pi, strict=True)) / math.fsum(rho)
    kl = math.fsum(w * (p - r) for w, p, r in zip(rho, log_pi, log_ref, strict=True)) / math.fsum(rho)
    assert metrics["policy/nll"] == pytest.approx(-math.fsum(log_pi) / len(log_pi), abs=1e-12)
    assert metrics["policy/entropy"] == pytest.approx(entropy, abs=1e-12)
    assert metrics["policy/kl_reference"] == (pytest.approx(kl, abs=1e-12) if algorithm.needs.reference else None)
    assert abs(kl) > 1e-4


# --- skipped updates ------------------------------------------------------------------------------


def poison(networks, num_calls_before: int, network="policy") -> None:
    """Make the gradient of a norm, which autograd adds, NaN once, after `num_calls_before` calls."""
    parameter = next(each for each in dict(getattr(networks, network).named_weights()).values() if each.ndim == 1)
    calls = []

    def hook(gradient):
        calls.append(1)
        return gradient * torch.nan if len(calls) == num_calls_before + 1 else gradient

    parameter.register_hook(hook)


def test_a_non_finite_update_is_skipped_and_the_others_of_its_step_are_taken(train_step):
    step, networks = train_step(OffPolicyPPOConfig(), num_minibatches=4)
    batch = build(make_rows(0), 0, 4096)  # one micro-batch per update, so one hook call
    poison(networks, num_calls_before=1)
    result = step.run(batch, 0)
    assert [update.result.taken for update in result.updates] == [True, False, True, True]
    assert [update.batch.version for update in result.updates] == [0, 1, 1, 2]
    assert (result.version, result.skipped, result.metrics["updates/skipped"]) == (3, False, 1)
    assert np.isfinite(result.metrics["grad_norm"])
    assert all(torch.isfinite(weight).all() for weight in weights_of(networks).values())


def with_infinite_losses(step: TrainStep) -> list[int]:
    """Make losses infinite, but not their gradients, until the returned list is empty."""
    loss, left = step._loss, [1]

    def made_infinite(inputs):
        output = loss(inputs)
        return replace(output, loss=output.loss + torch.inf) if left else output

    step._loss = made_infinite
    return left


@pytest.mark.parametrize("one_pass", [True, False])
def test_an_update_with_a_non_finite_loss_and_finite_gradients_is_skipped(train_step, one_pass):
    algorithm = OffPolicyPPOConfig(proximal="behaviour")
    step, networks = train_step(algorithm, one_pass=one_pass, num_minibatches=2)
    left, before, weights = with_infinite_losses(step), weights_of(networks), []

    def between_updates(_):
        left.clear()
        weights.append(weights_of(networks))

    result = step.run(build(make_rows(0), 0, 4096), 0, between_updates)
    assert ("time/forward" not in result.metrics) == one_pass
    assert [update.result.taken for update in result.updates] == [False, True]
    assert [update.result.lr_scale for update in result.updates] == [1.0, 1.0]
    assert all(torch.equal(weight, before[name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("network", ["policy", "critic"])
def test_policy_and_critic_are_updated_together(train_step, network):
    step, networks = train_step(MODEL)
    before = weights_of(networks)
    poison(networks, 0, network)
    batch = build(make_rows(0), 0, 4096)
    assert step.run(batch, 0).skipped
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(networks).items())
    assert not step.run(batch, 1).skipped
    after = weights_of(networks)
    assert {name.split(".")[0] for name in after if not torch.equal(after[name], before[name])} == {"policy", "critic"}


def one_rank(folder, mesh: Mesh) -> None:
    """Run the next test on one process: the first of two updates has a NaN on one stage, or an infinite loss."""
    algorithm, config = OffPolicyPPOConfig(), LearnerConfig(num_minibatches=2, learning_rate=1e-2)
    place = mesh.place
    for bad_rank in (*range(place.num_ranks), None):
        networks, reference = make_networks(folder / "untied", config, algorithm, mesh)
        if place.rank == bad_rank:
            poison(networks, 0)
        step = TrainStep(networks, reference, algorithm, config, SEED)
        left = with_infinite_losses(step) if bad_rank is None else []
        batch = build(make_rows(0), 0, 4096, num_replicas=place.num_replicas, min_micro_batches=place.num_stages)
        before = weights_of(networks)
        result = step.run(batch, 0, lambda _, left=left: left.clear())
        assert [update.result.taken for update in result.updates] == [False, True], (place.rank, bad_rank)
        after = weights_of(networks)
        assert all(torch.isfinite(weight).all() for weight in after.values())
        assert not all(torch.equal(after[name], before[name]) for name in before), "the second update is taken"
        # the non-finite update is not in the moments of this rank
        assert all(float(entry["step"]) == 1 for entry in networks.optimizers[0].adam.state.values())


@pytest.mark.process
def test_a_nan_on_one_stage_or_an_infinite_loss_skips_the_update_on_every_stage(tmp_path):
    make_models(tmp_path)
    run_ranks("tests.unit.test_learner_updates", tmp_path, [(1, 2), (2, 2)])
