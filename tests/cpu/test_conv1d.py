"""The packed causal convolution against one convolution a sequence, states included."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.cpu.conv1d import packed_causal_conv1d


def one_by_one(x_CT, weight_CW, bias_C, states, starts, slots, has_initial):
    out, kept = torch.zeros_like(x_CT), weight_CW.shape[1] - 1
    for n, slot in enumerate(slots.tolist()):
        first, stop = starts[n].item(), starts[n + 1].item()
        if first == stop or slot == -1:
            continue
        before = states[slot, :, :kept] if has_initial[n] else torch.zeros(len(x_CT), kept)
        row = torch.cat([before, x_CT[:, first:stop]], 1)
        out[:, first:stop] = F.silu(F.conv1d(row[None], weight_CW[:, None], bias_C, groups=len(x_CT))[0])
        states[slot, :, :kept] = row[:, len(row[0]) - kept :]
    return out


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    width=st.integers(2, 4),
    skipped=st.integers(0, 8),
    seed=st.integers(0, 999),
)
def test_packed_sequences_convolve_as_if_each_were_alone(lengths, width, skipped, seed):
    torch.manual_seed(seed)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    x_CT = torch.randn(int(starts[-1]), 6).t()
    weight_CW, bias_C = torch.randn(6, width), torch.randn(6)
    slots = torch.randperm(12)[: len(lengths)].int()
    slots[skipped:][:1] = -1
    has_initial = torch.rand(len(lengths)) > 0.5
    states = torch.randn(12, 6, width + 1)
    expected_states = states.clone()
    expected = one_by_one(x_CT, weight_CW, bias_C, expected_states, starts, slots, has_initial)
    got = packed_causal_conv1d(
        x_CT, weight_CW, bias_C, states, starts, cache_indices=slots, has_initial_state=has_initial
    )
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(states, expected_states)


def test_taps_run_from_the_oldest_input_to_the_present_one():
    x_CT = torch.tensor([[1.0, 2.0, 3.0, 10.0, 20.0]])
    states = torch.zeros(2, 1, 1)
    got = packed_causal_conv1d(
        x_CT, torch.tensor([[100.0, 1.0]]), None, states, torch.tensor([0, 3, 5]), activation=None
    )
    assert got.tolist() == [[1.0, 102.0, 203.0, 10.0, 1020.0]]
    assert states.flatten().tolist() == [3.0, 20.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_has_the_type_of_the_input_and_sums_in_float32(dtype):
    x_CT = torch.tensor([[256.0, 1.0, 1.0]], dtype=dtype)
    got = packed_causal_conv1d(
        x_CT,
        torch.ones(1, 3, dtype=dtype),
        None,
        torch.zeros(1, 1, 2, dtype=dtype),
        torch.tensor([0, 3]),
        activation=None,
    )
    assert got.dtype == dtype
    assert got.tolist() == [[256.0, 257.0 if dtype == torch.float32 else 256.0, 258.0]]
