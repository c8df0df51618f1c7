import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from megatron_agentrl.algorithm.corrections import CORRECTIONS, importance_weights
from megatron_agentrl.algorithm.kl import Estimator, kl
from megatron_agentrl.algorithm.losses import MAX_LOG_RATIO, cross_entropy, ppo_clip
from megatron_agentrl.recipe.schema import Correction

tensor = torch.tensor
INF, NAN = float("inf"), float("nan")


def ones(values):
    return torch.ones(len(values), dtype=torch.bool)


# PPO


def test_asymmetric_clip_gives_the_four_textbook_cases():
    difference = tensor([0.1, 0.4, -0.3, 0.0])
    found = ppo_clip(difference, torch.zeros(4), tensor([1.0, 1.0, -1.0, -1.0]), ones(difference), 0.2, 0.28)
    assert found.loss.tolist() == approx([-1.105171, -1.28, 0.8, 1.0], abs=1e-6)
    assert float(found.loss.mean()) == approx(-0.146293, abs=1e-6)
    assert found.clipped.tolist() == [False, True, True, False]


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    args = tensor([1.5]), torch.zeros(1), tensor([-1.0]), ones([1]), 0.2, 0.28
    assert ppo_clip(*args).loss.tolist() == approx([4.481689])
    assert ppo_clip(*args, dual_clip=3.0).loss.tolist() == approx([3.0])
    assert ppo_clip(*args, dual_clip=3.0).clipped.tolist() == [True]


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_ratio_times_advantage():
    logprobs = tensor([0.1, 0.4, -0.3, 0.0], requires_grad=True)
    ppo_clip(logprobs, torch.zeros(4), tensor([1.0, 1.0, -1.0, -1.0]), ones([0] * 4), 0.2, 0.28).loss.sum().backward()
    assert logprobs.grad.tolist() == approx([-1.105171, 0.0, 0.0, 1.0], abs=1e-6)


def test_a_huge_ratio_with_zero_advantage_is_zero_with_zero_gradient():
    logprobs = tensor([95.0], requires_grad=True)
    found = ppo_clip(logprobs, torch.zeros(1), torch.zeros(1), ones([1]), 0.2, 0.2)
    found.loss.sum().backward()
    assert found.loss.tolist() == [0.0] and logprobs.grad.tolist() == [0.0]


def test_the_clamp_is_counted_on_trained_tokens_only_and_the_ratio_agrees_with_it():
    found = ppo_clip(tensor([95.0, -95.0, 95.0]), torch.zeros(3), -torch.ones(3), tensor([1, 1, 0]), 0.2, 0.2)
    assert found.clamped.tolist() == [True, True, False]
    assert found.ratio.tolist() == approx([math.exp(MAX_LOG_RATIO), math.exp(-MAX_LOG_RATIO), 0.0])


@pytest.mark.parametrize("filler", [0.0, 1.0, 95.0, INF, -INF, NAN])
def test_masked_tokens_add_nothing_whatever_they_hold(filler):
    logprobs = tensor([-1.0, filler, filler, -0.5], requires_grad=True)
    behaviour = tensor([-1.1, filler, 1.0, -0.7])
    mask = tensor([1.0, 0.0, 0.0, 1.0])
    weights = tensor([1.0, filler, filler, 1.0])
    found = ppo_clip(logprobs, behaviour, tensor([1.0, filler, filler, 1.0]), mask, 0.2, 0.28, weights=weights)
    total = found.loss.sum() + kl(Estimator.k3, logprobs, behaviour, mask).sum() + cross_entropy(logprobs, mask).sum()
    total.backward()
    expected = -math.exp(0.1) - math.exp(0.2) + (math.expm1(-0.1) + 0.1) + (math.expm1(-0.2) + 0.2) + 1.5
    assert total.item() == approx(expected, abs=1e-6)
    assert logprobs.grad[1:3].tolist() == [0.0, 0.0]
    assert torch.isfinite(logprobs.grad).all()


def test_a_nan_at_a_trained_token_stays_visible():
    nan = tensor([NAN])
    assert ppo_clip(nan, torch.zeros(1), torch.ones(1), ones([1]), 0.2, 0.2).loss.isnan().all()
    assert kl(Estimator.k3, nan, torch.zeros(1), ones([1])).isnan().all()
    for kind in Correction:
        assert importance_weights(kind, nan, torch.zeros(1), ones([1]), cap=2.0).weights.isnan().all()


# Importance weights


@pytest.mark.parametrize(("kind", "expected"), [(Correction.mask, -0.745248), (Correction.truncate, -1.120248)])
def test_token_weights_in_a_band(kind, expected):
    log_ratio = tensor([0.0, 0.02, -0.04, 0.6])
    found = importance_weights(kind, log_ratio, torch.zeros(4), ones(log_ratio), cap=1.5, floor=0.5)
    assert float((-found.weights).mean()) == approx(expected, abs=1e-6)
    assert found.outside.tolist() == [False, False, False, True]


def test_ratios_that_overflow_are_rejected_without_nan_in_loss_or_gradient():
    behaviour = -tensor([95.0, 0.0, 0.0, -95.0])
    logprobs = torch.zeros(4, requires_grad=True)
    mask = ones(behaviour)
    weights = importance_weights(Correction.mask, logprobs, behaviour, mask, cap=5.0, floor=0.5).weights
    assert weights.tolist() == [0.0, 1.0, 1.0, 0.0]
    advantages = tensor([1.0, 2.0, -1.0, 1.0])
    loss = ppo_clip(logprobs, logprobs.detach(), advantages, mask, 0.2, 0.2, weights=weights).loss.sum() / mask.sum()
    loss.backward()
    assert float(loss) == -0.25
    assert logprobs.grad.tolist() == [0.0, -0.5, 0.25, 0.0]


def test_truncation_of_an_overflowing_ratio_gives_the_cap_and_no_gradient_flows_through_weights():
    logprobs = tensor([95.0, -95.0], requires_grad=True)
    found = importance_weights(Correction.truncate, logprobs, torch.zeros(2), ones([0, 0]), cap=2.0)
    assert found.weights.tolist() == approx([2.0, 0.0])
    assert not found.weights.requires_grad
    assert set(CORRECTIONS) == set(Correction)


# KL


@pytest.mark.parametrize(
    ("kind", "at_plus", "at_minus"), [("k1", 0.2, -0.5), ("k2", 0.02, 0.125), ("k3", 0.018731, 0.148721)]
)
def test_kl_estimators_of_pi_against_the_reference(kind, at_plus, at_minus):
    found = kl(Estimator(kind), tensor([-1.0, -1.0]), tensor([-1.2, -0.5]), ones([0, 0]))
    assert found.tolist() == approx([at_plus, at_minus], abs=1e-6)


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=6))
@settings(deadline=None)
def test_k3_is_never_negative_and_its_expectation_is_the_kl(logits):
    pi = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    reference = torch.linspace(-1, 1, len(logits), dtype=torch.float64).log_softmax(0)
    divergence = float((pi.exp() * (pi - reference)).sum())
    mask = torch.ones(len(logits))
    k3 = kl(Estimator.k3, pi, reference, mask)
    assert (k3 >= 0).all()
    if float((pi - reference).min()) > -20:  # inside the clamp
        assert float((pi.exp() * k3).sum()) == approx(divergence, abs=1e-9)
