"""The pure-torch Mamba-2 stand-ins against the recurrence they stand for, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.cpu import mamba, megatron


def inputs(length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(2, length, 6, 5, generator=g), "dt": torch.randn(2, length, 6, generator=g),
        "A": -torch.rand(6, generator=g) * 4 - 0.1, "B": torch.randn(2, length, 3, 7, generator=g),
        "C": torch.randn(2, length, 3, 7, generator=g), "D": torch.randn(6, generator=g),
        "z": torch.randn(2, length, 6, 5, generator=g), "dt_bias": torch.randn(6, generator=g),
    }  # fmt: skip


def recurrence(x, dt, A, B, C, D, z, dt_bias, starts=(0,), state=None):
    """h = exp(dt A) h + dt B x; y = (C h + D x) silu(z), in float64; the state is zero at each start."""
    x, dt, A, B, C, D, z, dt_bias = (t.double() for t in (x, dt, A, B, C, D, z, dt_bias))
    dt = F.softplus(dt + dt_bias)
    B, C = B.repeat_interleave(2, 2), C.repeat_interleave(2, 2)
    h = torch.zeros(2, 6, 5, 7, dtype=torch.float64) if state is None else state.double()
    out = []
    for t in range(x.shape[1]):
        if t in starts[1:]:
            h = torch.zeros_like(h)
        h = h * (dt[:, t] * A).exp()[..., None, None] + torch.einsum("bh,bhn,bhp->bhpn", dt[:, t], B[:, t], x[:, t])
        out.append((torch.einsum("bhn,bhpn->bhp", C[:, t], h) + D[:, None] * x[:, t]) * F.silu(z[:, t]))
    return torch.stack(out, 1), h


def scan(i, chunk, **kwargs):
    return mamba.mamba_chunk_scan_combined(
        i["x"],
        i["dt"],
        i["A"],
        i["B"],
        i["C"],
        chunk,
        D=i["D"],
        z=i["z"],
        dt_bias=i["dt_bias"],
        dt_softplus=True,
        **kwargs,
    )


@pytest.mark.parametrize(("length", "chunk"), [(1, 8), (8, 8), (13, 8), (29, 4), (5, 128)])
def test_scan_equals_the_sequential_recurrence(length, chunk):
    i = inputs(length)
    y, state = scan(i, chunk, return_final_states=True)
    want, last = recurrence(**i)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(length=st.integers(1, 40), first=st.integers(1, 48), second=st.integers(1, 48), seed=st.integers(0, 999))
def test_scan_does_not_depend_on_the_chunk_size(length, first, second, seed):
    i = inputs(length, seed)
    torch.testing.assert_close(scan(i, first), scan(i, second), rtol=1e-4, atol=1e-4)


def test_scan_continues_from_an_initial_state():
    i = inputs(19)
    half = {k: v[:, :11] if v.dim() > 1 else v for k, v in i.items()}
    rest = {k: v[:, 11:] if v.dim() > 1 else v for k, v in i.items()}
    _, state = scan(half, 4, return_final_states=True)
    torch.testing.assert_close(scan(rest, 4, initial_states=state), scan(i, 4)[:, 11:], rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_the_recurrence():
    i = {k: v.requires_grad_() for k, v in inputs(11).items()}
    weight = torch.randn(2, 11, 6, 5, generator=torch.Generator().manual_seed(9))
    got = torch.autograd.grad((scan(i, 4) * weight).sum(), list(i.values()))
    want = torch.autograd.grad((recurrence(**i)[0] * weight).sum(), list(i.values()))
    for key, a, b in zip(i, got, want, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def test_packed_sequences_do_not_see_each_other():
    i = inputs(21)
    seq_idx = torch.tensor([[0] * 5 + [1] * 9 + [2] * 7] * 2)
    want, _ = recurrence(**i, starts=(0, 5, 14))
    torch.testing.assert_close(scan(i, 4, seq_idx=seq_idx).double(), want, rtol=1e-5, atol=1e-5)


def test_packed_convolution_equals_each_sequence_alone():
    g = torch.Generator().manual_seed(0)
    x, w, b = torch.randn(1, 12, 9, generator=g), torch.randn(9, 4, generator=g), torch.randn(9, generator=g)
    packed = mamba.causal_conv1d(x, w, b, seq_idx=torch.tensor([[0] * 3 + [1] * 9]))
    alone = torch.cat([mamba.causal_conv1d(x[:, :3], w, b), mamba.causal_conv1d(x[:, 3:], w, b)], 1)
    torch.testing.assert_close(packed, alone)
    # First output by hand: only the last tap sees a token.
    torch.testing.assert_close(alone[0, 0], F.silu(x[0, 0] * w[:, 3] + b))


@pytest.mark.parametrize("length", [1, 3, 12])
@pytest.mark.parametrize("with_bias", [True, False])
def test_convolution_and_its_gradients_equal_torchs_depthwise_one(length, with_bias):
    g = torch.Generator().manual_seed(2)
    x, w, b = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((2, length, 9), (9, 4), (9,)))
    bias = b if with_bias else None
    want = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), w[:, None], bias, groups=9)).mT
    got = mamba.causal_conv1d(x, w, bias)
    torch.testing.assert_close(got, want)
    weight = torch.randn(2, length, 9, generator=g)
    inputs = [x, w, b] if with_bias else [x, w]
    for found, expected in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((want * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_convolution_of_bf16_sums_in_float32():
    x = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    y = mamba.causal_conv1d(x, torch.ones(1, 3, dtype=torch.bfloat16), None)
    assert y.dtype == torch.bfloat16 and y.flatten().tolist() == [256.0, 256.0, 258.0]  # 257 has no bf16


def test_large_decay_and_long_chunk_stay_finite():
    i = inputs(64) | {"A": torch.full((6,), -80.0)}
    y = scan(i, 64)
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y.double(), recurrence(**i)[0], rtol=1e-4, atol=1e-4)


def test_grouped_norm_gates_before_it_normalises():
    norm = mamba.RMSNorm(6, eps=0.0, group_size=3, norm_before_gate=False)
    x, z = torch.tensor([[3.0, 4.0, 0.0, 1.0, 1.0, 1.0]]), torch.full((1, 6), 2.0)
    root = (25 / 3) ** 0.5
    torch.testing.assert_close(norm(x, z), torch.tensor([[3 / root, 4 / root, 0.0, 1.0, 1.0, 1.0]]))


def test_installing_the_shim_again_changes_nothing():
    before = torch.zeros, torch.distributed.all_gather, torch.Tensor.to
    assert megatron.install() is True
    assert (torch.zeros, torch.distributed.all_gather, torch.Tensor.to) == before
    assert torch.zeros(2, device="cuda").device.type == "cpu"


def test_the_shim_refuses_to_come_after_megatron_core(monkeypatch):
    monkeypatch.setattr(megatron, "_installed", False)
    with pytest.raises(RuntimeError, match="call install\\(\\) first"):
        megatron.install()


def test_the_shim_leaves_device_contexts_alone():
    with torch.device("meta"):
        assert torch.empty(2).device.type == torch.arange(3.0).device.type == "meta"
