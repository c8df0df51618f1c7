"""The grouped relu² experts against the sum they stand for, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.cpu.vllm import relu2_experts


def one_by_one(x_TH, w1_EFH, w2_EHF, ids_TK, weights_TK):
    y_TH = torch.zeros_like(x_TH)
    for t in range(x_TH.shape[0]):
        for k in range(ids_TK.shape[1]):
            e = int(ids_TK[t, k])
            y_TH[t] += weights_TK[t, k] * (w2_EHF[e] @ (w1_EFH[e] @ x_TH[t]).clamp(min=0).square())
    return y_TH


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 40), experts=st.integers(2, 9), top_k=st.integers(1, 2), seed=st.integers(0, 999))
def test_grouped_experts_are_the_weighted_sum_over_the_chosen_ones(tokens, experts, top_k, seed):
    torch.manual_seed(seed)
    x_TH, w1_EFH, w2_EHF = torch.randn(tokens, 12), torch.randn(experts, 20, 12) / 4, torch.randn(experts, 12, 20) / 4
    weights_TK, ids_TK = torch.rand(tokens, experts).topk(top_k)
    got = relu2_experts(x_TH, w1_EFH, w2_EHF, ids_TK.int(), weights_TK)
    torch.testing.assert_close(got, one_by_one(x_TH, w1_EFH, w2_EHF, ids_TK, weights_TK), rtol=1e-4, atol=1e-4)


def test_without_weights_each_expert_counts_once():
    x_TH, w1_EFH, w2_EHF = torch.ones(1, 4), torch.ones(2, 4, 4), torch.ones(2, 4, 4)
    w2_EHF[1] *= 10
    # relu(4)² = 16, summed over four units: 64, and 640 from the second expert
    assert relu2_experts(x_TH, w1_EFH, w2_EHF, torch.tensor([[0, 1]]), None).tolist() == [[704.0] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_has_the_type_of_the_input(dtype):
    x_TH, w1_EFH, w2_EHF = (
        torch.ones(3, 8, dtype=dtype),
        torch.ones(2, 16, 8, dtype=dtype),
        torch.ones(2, 8, 16, dtype=dtype),
    )
    assert relu2_experts(x_TH, w1_EFH, w2_EHF, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)).dtype == dtype
