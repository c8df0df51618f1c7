import pytest
import torch
from pytest import approx

from megatron_agentrl.algorithm.distillation import distillation_advantages
from megatron_agentrl.algorithm.kl import Estimator, kl

tensor = torch.tensor


def test_a_token_gains_what_the_teacher_gives_it_more_than_the_policy():
    policy = tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    found = distillation_advantages(policy, tensor([-0.25, -2.0, -4.5, -1.0]), tensor([1, 1, 1, 0]))
    assert found.tolist() == [0.75, 0.0, -4.0, 0.0]
    assert not found.requires_grad


@pytest.mark.parametrize("filler", [float("inf"), float("nan"), -95.0])
def test_masked_tokens_gain_nothing_and_a_nan_at_a_trained_token_is_seen(filler):
    found = distillation_advantages(tensor([-1.0, filler]), tensor([-0.5, filler]), tensor([1, 0]))
    assert found.tolist() == [0.5, 0.0]
    assert distillation_advantages(tensor([-1.0]), tensor([float("nan")]), tensor([1])).isnan().all()


def test_in_expectation_the_advantage_descends_the_reverse_kl_and_k3_as_a_loss_the_forward_one():
    """Over three tokens that the policy samples with its own probabilities, exactly."""
    logits = tensor([0.3, -1.2, 0.7], dtype=torch.float64, requires_grad=True)
    teacher = tensor([0.9, -0.1, -2.0], dtype=torch.float64).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    p, ones = log_p.detach().exp(), torch.ones(3)

    def gradient(of: torch.Tensor) -> list[float]:
        return torch.autograd.grad(of, logits, retain_graph=True)[0].tolist()

    reverse = gradient((log_p.exp() * (log_p - teacher)).sum())
    forward = gradient((teacher.exp() * (teacher - log_p)).sum())
    assert gradient((-p * distillation_advantages(log_p, teacher, ones) * log_p).sum()) == approx(reverse, abs=1e-12)
    assert gradient((p * kl(Estimator.k3, log_p, teacher, ones)).sum()) == approx(forward, abs=1e-12)
    assert gradient((p * kl(Estimator.k1, log_p, teacher, ones)).sum()) == approx([0.0, 0.0, 0.0], abs=1e-12)
    assert abs(reverse[0] - forward[0]) > 0.05  # the two directions differ here
