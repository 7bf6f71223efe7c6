"""Corrections applied to known weights, and their bounds."""

import math
from dataclasses import replace

import pytest
import torch

from leeway.algorithms.corrections import (
    CISPO,
    GSPO,
    Clip,
    GeometricMask,
    IcePop,
    SequenceClip,
    SequenceTIS,
    TokenTIS,
    importance_weights,
)
from tests.unit.loss_batches import make_inputs

LENGTHS = [2, 1, 0, 3]
RHO = [2.0, 0.5, 6.0, 1.0, 1.5, 0.25]


def stale_inputs(rho=RHO, **changes):
    """Return a batch whose tokens have the given ratios pi_prox / mu."""
    inputs = make_inputs(groups=[0, 0, 1, 1], lengths=LENGTHS)
    log_rho_T = torch.tensor(rho, dtype=torch.float64).log()
    return replace(inputs, behaviour_logprobs_T=inputs.proximal_logprobs_T - log_rho_T, **changes)


def weights(*corrections):
    weighing = importance_weights(stale_inputs(), corrections)
    assert not weighing.weight_T.requires_grad
    return weighing.weight_T.tolist(), weighing.metrics


@pytest.mark.parametrize(
    ("correction", "expected", "share"),
    [
        (TokenTIS(cap=1.8), [1.8, 0.5, 1.8, 1.0, 1.5, 0.25], 2 / 6),
        # the products of the ratios of each sequence are 1, 6 and 0.375
        (SequenceTIS(cap=2.0), [1.0, 1.0, 2.0, 0.375, 0.375, 0.375], 1 / 6),
        (IcePop(low=0.5, high=5.0), [2.0, 0.5, 0.0, 1.0, 1.5, 0.0], 2 / 6),
        # the geometric means of the ratios are 1, 6, and 0.375 to the power of 1/3 = 0.721
        (GeometricMask(low=0.75, high=5.0), [2.0, 0.5, 0.0, 0.0, 0.0, 0.0], 4 / 6),
        (GeometricMask(low=0.7, high=7.0), RHO, 0.0),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_each_correction_bounds_or_masks_weights_by_its_formula(correction, expected, share):
    found, metrics = weights(correction)
    assert found == pytest.approx(expected, abs=1e-12)
    assert metrics == {f"off_policy/{correction.type}_frac": pytest.approx(share)}


def test_without_a_correction_the_weight_is_the_raw_ratio():
    found, metrics = weights()
    assert found == pytest.approx(RHO, abs=1e-12)
    assert metrics == {}


def test_truncation_and_masks_compose_in_any_order():
    parts = (SequenceTIS(cap=0.8), IcePop(low=0.4), GeometricMask(low=0.5, high=5.0), GSPO())
    # sequence_tis caps the products 1 and 6 at 0.8. icepop masks the ratios 6 and 0.25.
    # geometric_mask masks the second sequence.
    expected = [0.8, 0.8, 0.0, 0.375, 0.375, 0.0]
    first = weights(*parts)
    assert first[0] == pytest.approx(expected, abs=1e-12)
    assert set(first[1]) == {f"off_policy/{name}_frac" for name in ("sequence_tis", "icepop", "geometric_mask")}
    assert weights(*reversed(parts)) == first


def test_bounds_are_inclusive():
    exact = replace(make_inputs(groups=[0], lengths=[2]), behaviour_logprobs_T=torch.zeros(2).double())
    exact = replace(exact, proximal_logprobs_T=torch.zeros(2).double())
    for mask in (IcePop(low=1.0, high=2.0), IcePop(low=0.5, high=1.0), GeometricMask(low=1.0, high=1.5)):
        assert importance_weights(exact, [mask]).kept_T.all()
    assert importance_weights(exact, [TokenTIS(cap=1.0)]).metrics["off_policy/token_tis_frac"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratios_are_clamped_before_they_become_weights(dtype):
    inputs = make_inputs(groups=[0], lengths=[3])
    far = replace(
        inputs,
        proximal_logprobs_T=torch.tensor([0.0, -1e4, -1e4], dtype=dtype),
        behaviour_logprobs_T=torch.tensor([-1e4, 0.0, 0.0], dtype=dtype),
    )
    assert importance_weights(far, []).weight_T.tolist() == pytest.approx([math.exp(20), math.exp(-20), math.exp(-20)])
    # the log ratio of the sequence is 20 - 20 - 20, because the log ratio of each token is clamped first
    product = importance_weights(far, [SequenceTIS(cap=1e30)]).weight_T
    assert product.tolist() == pytest.approx([math.exp(-20)] * 3)


SURROGATES = {
    "clip": Clip(clip_low=0.1, clip_high=0.3),
    "sequence_clip": SequenceClip(clip_low=0.1, clip_high=0.3),
    "gspo": GSPO(clip_low=0.1, clip_high=0.3),
    "cispo": CISPO(low=0.9, high=1.3),
}


def surrogate(kind, advantage, u):
    """Return objective, gradient, and clipped tokens (low, high) of one sequence whose tokens have the ratios u."""
    inputs = make_inputs(groups=[0], lengths=[len(u)])
    leaf_T = (inputs.proximal_logprobs_T + torch.tensor(u, dtype=torch.float64).log()).requires_grad_()
    advantage_T = torch.full((len(u),), advantage, dtype=torch.float64)
    moved = replace(inputs, logprobs_T=leaf_T)
    found = SURROGATES[kind].objective(moved, advantage_T)
    (slope_T,) = torch.autograd.grad(found.objective_T.sum(), leaf_T)
    return found.objective_T.tolist(), slope_T.tolist(), found.low_T.tolist(), found.high_T.tolist()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_clipping_limits_gains_but_not_losses(advantage):
    u = [0.5, 1.0, 1.25, 2.0]
    objective, slope, low, high = surrogate("clip", advantage, u)
    if advantage > 0:
        assert objective == pytest.approx([1.0, 2.0, 2.5, 2.6])
        assert slope == pytest.approx([1.0, 2.0, 2.5, 0.0])
        assert (low, high) == ([False] * 4, [False, False, False, True])
    else:
        assert objective == pytest.approx([-1.8, -2.0, -2.5, -4.0])
        assert slope == pytest.approx([0.0, -2.0, -2.5, -4.0])
        assert (low, high) == ([True, False, False, False], [False] * 4)


@pytest.mark.parametrize(
    ("kind", "ratio"), [("sequence_clip", 0.5 * 1.5 * 1.6), ("gspo", (0.5 * 1.5 * 1.6) ** (1 / 3))]
)
def test_a_sequence_has_one_ratio_that_depends_on_each_of_its_tokens(kind, ratio):
    objective, slope, low, high = surrogate(kind, 2.0, [0.5, 1.5, 1.6])
    # gspo counts the objective once per token; sequence_clip counts the objective once per sequence
    assert objective == pytest.approx([2 * ratio / (3 if kind == "sequence_clip" else 1)] * 3)
    assert slope == pytest.approx([2 * ratio] * 3)
    assert not any(low + high)
    for u, advantage in (([0.5, 1.5, 3.0], 2.0), ([0.5, 0.5, 1.0], -2.0)):  # the sequence ratio is outside the bounds
        _, slope, low, high = surrogate(kind, advantage, u)
        assert slope == [0.0] * 3
        assert all(high if advantage > 0 else low)
        assert surrogate(kind, -advantage, u)[1] != [0.0] * 3


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token(advantage):
    _, slope, low, high = surrogate("cispo", advantage, [0.5, 1.0, 1.25, 2.0])
    assert slope == pytest.approx([0.9 * advantage, advantage, 1.25 * advantage, 1.3 * advantage])
    assert (low, high) == ([True, False, False, False], [False, False, False, True])


@pytest.mark.parametrize("kind", SURROGATES)
def test_clipping_has_no_effect_and_no_count_for_zero_advantages(kind):
    objective, slope, low, high = surrogate(kind, 0.0, [0.1, 0.1, 0.1])
    assert [*objective, *slope] == [0.0] * 6
    assert not any(low + high)


@pytest.mark.parametrize("kind", SURROGATES)
def test_every_surrogate_is_the_policy_gradient_at_the_start_of_a_step(kind):
    assert surrogate(kind, 2.0, [1.0, 1.0, 1.0])[1] == pytest.approx([2.0] * 3)
