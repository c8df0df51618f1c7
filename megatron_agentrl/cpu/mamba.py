"""Pure-torch stand-ins for the `mamba_ssm` names that megatron-core's Mamba-2 mixer imports.

`mamba_ssm` ships Triton kernels only. The functions here take the same arguments and compute the same
values by the chunked (state-space dual) form of Dao & Gu, "Transformers are SSMs" (2024): quadratic
inside a chunk, a recurrence between chunks. All arithmetic is float32; autograd differentiates it.

Legend: B batch, L length, H heads, P head width, G groups, N state width, C chunks, Q chunk length.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def _sequence_breaks(seq_idx_BL: torch.Tensor | None) -> torch.Tensor | None:
    """1 where a position starts a new packed sequence (the state must not cross it), else 0: [B, L]."""
    if seq_idx_BL is None:
        return None
    return F.pad((seq_idx_BL[:, 1:] != seq_idx_BL[:, :-1]).to(torch.int64), (1, 0))


def mamba_chunk_scan_combined(
    x_BLHP: torch.Tensor,
    dt_BLH: torch.Tensor,
    A_H: torch.Tensor,
    B_BLGN: torch.Tensor,
    C_BLGN: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The selective scan h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t, y_t = C_t h_t + D x_t, times silu(z_t).

    Returns y_BLHP in x's type, and the last state [B, H, P, N] (float32) when `return_final_states`.
    `seq_idx` [B, L] numbers packed sequences: the state is zero at the start of each.

    Raises:
        NotImplementedError: for `cu_seqlens` / `return_varlen_states` (inference only in megatron-core).
    """
    if cu_seqlens is not None or return_varlen_states:
        raise NotImplementedError("variable-length states are an inference feature; use seq_idx for packed rows")
    out_dtype = x_BLHP.dtype
    batch, length, heads, _ = x_BLHP.shape
    x, dt, B, C = (t.float() for t in (x_BLHP, dt_BLH, B_BLGN, C_BLGN))
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    skip = x

    chunk = min(chunk_size, length)
    pad = -length % chunk
    breaks = _sequence_breaks(seq_idx)
    if pad:
        # Padded positions have dt = 0: they neither decay the state nor add to it.
        x, dt, B, C = (F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (x, dt, B, C))
        breaks = F.pad(breaks, (0, pad)) if breaks is not None else None
    B, C = (t.repeat_interleave(heads // t.shape[2], dim=2) for t in (B, C))

    def chunked(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(batch, -1, chunk, *t.shape[2:])

    X_BCQHP, B_BCQHN, C_BCQHN = chunked(x * dt[..., None]), chunked(B), chunked(C)
    decay_BHCQ = chunked(dt * A_H.float()).permute(0, 3, 1, 2).cumsum(-1)

    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    if breaks is None:
        reach, from_start, to_end, whole = causal, None, None, None
    else:
        # Number of sequence starts up to each position of its chunk; equal numbers share a sequence.
        starts_BCQ = chunked(breaks).cumsum(-1)
        reach = (causal & (starts_BCQ[..., :, None] == starts_BCQ[..., None, :]))[:, None]
        from_start = (starts_BCQ == 0)[:, None]
        to_end = (starts_BCQ == starts_BCQ[..., -1:])[:, None]
        whole = (starts_BCQ[..., -1] == 0)[:, None]

    def kept(weights: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return weights if mask is None else weights.masked_fill(~mask, 0.0)

    # Masked before the exponential: above the diagonal the difference is positive and may overflow.
    within = (decay_BHCQ[..., :, None] - decay_BHCQ[..., None, :]).masked_fill(~reach, float("-inf")).exp()
    scores_BHCQS = torch.einsum("bcqhn,bcshn->bhcqs", C_BCQHN, B_BCQHN) * within
    y_BCQHP = torch.einsum("bhcqs,bcshp->bcqhp", scores_BHCQS, X_BCQHP)

    to_state = kept((decay_BHCQ[..., -1:] - decay_BHCQ).exp(), to_end)
    added_BCHPN = torch.einsum("bcqhn,bhcq,bcqhp->bchpn", B_BCQHN, to_state, X_BCQHP)
    carry_BHC = kept(decay_BHCQ[..., -1].exp(), whole)
    state_BHPN = torch.zeros_like(added_BCHPN[:, 0]) if initial_states is None else initial_states.float()
    entering = []
    for c in range(added_BCHPN.shape[1]):
        entering.append(state_BHPN)
        state_BHPN = state_BHPN * carry_BHC[:, :, c, None, None] + added_BCHPN[:, c]
    y_BCQHP = y_BCQHP + torch.einsum(
        "bcqhn,bchpn,bhcq->bcqhp", C_BCQHN, torch.stack(entering, 1), kept(decay_BHCQ.exp(), from_start)
    )

    y = y_BCQHP.flatten(1, 2)[:, :length]
    if D is not None:
        y = y + skip * (D.float() if D.dim() == 2 else D.float()[:, None])
    if z is not None:
        y = y * F.silu(z.float())
    y = y.to(out_dtype)
    return (y, state_BHPN) if return_final_states else y


class _CausalConvolution(torch.autograd.Function):
    """y_t = bias + sum over k of weight_k * x_(t - K + 1 + k), as K shifted products: K is 4, and torch's depthwise
    convolution costs twice as much, most of it in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x_BLE: torch.Tensor, weight_EK: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
        length, width = x_BLE.shape[1], weight_EK.shape[1]
        padded, weight_KE = F.pad(x_BLE.float(), (0, 0, width - 1, 0)), weight_EK.float().t().contiguous()
        y_BLE = padded[:, :length] * weight_KE[0]
        for k in range(1, width):
            y_BLE.addcmul_(padded[:, k : k + length], weight_KE[k])
        ctx.save_for_backward(padded, weight_KE)
        return (y_BLE if bias_E is None else y_BLE.add_(bias_E)).to(x_BLE.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BLE: torch.Tensor) -> Any:  # type: ignore[override]
        padded, weight_KE = ctx.saved_tensors
        length, width = grad_BLE.shape[1], len(weight_KE)
        dtype, grad_BLE = grad_BLE.dtype, grad_BLE.float()
        later = F.pad(grad_BLE, (0, 0, 0, width - 1))
        grad_x = later[:, width - 1 :] * weight_KE[0]
        for k in range(1, width):
            grad_x.addcmul_(later[:, width - 1 - k : width - 1 - k + length], weight_KE[k])
        grad_weight = torch.stack([(grad_BLE * padded[:, k : k + length]).sum((0, 1)) for k in range(width)], 1)
        grad_bias = grad_BLE.sum((0, 1)).to(dtype) if ctx.needs_input_grad[2] else None
        return grad_x.to(dtype), grad_weight.to(dtype), grad_bias


def causal_conv1d(x_BLE: torch.Tensor, weight_EK: torch.Tensor, bias_E: torch.Tensor | None,
                  seq_idx: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """Depthwise causal convolution followed by silu; with `seq_idx` taps never reach into another sequence."""
    width, length = weight_EK.shape[1], x_BLE.shape[1]
    if seq_idx is None:
        return F.silu(_CausalConvolution.apply(x_BLE, weight_EK, bias_E))
    y = torch.zeros_like(x_BLE) if bias_E is None else bias_E.expand_as(x_BLE)
    for back in range(min(width, length)):
        same = F.pad(seq_idx[:, back:] == seq_idx[:, : length - back], (back, 0))
        shifted = F.pad(x_BLE[:, : length - back], (0, 0, back, 0))
        y = y + shifted.masked_fill(~same[..., None], 0.0) * weight_EK[:, width - 1 - back]
    return F.silu(y)


def mamba_split_conv1d_scan_combined(
    zxbcdt_BLE: torch.Tensor,
    conv1d_weight_EK: torch.Tensor,
    conv1d_bias_E: torch.Tensor | None,
    dt_bias_H: torch.Tensor,
    A_H: torch.Tensor,
    D: torch.Tensor,
    chunk_size: int,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: torch.Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: torch.Tensor | None = None,
    outproj_bias: torch.Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Convolution, scan and gate of one mixer, from the packed projection [z | x | B | C | dt].

    Returns y [B, L, H*P], gated by silu(z).

    Raises:
        NotImplementedError: for the fused norm or output projection, which megatron-core does not ask for.
    """
    if rmsnorm_weight is not None or outproj_weight is not None or return_final_states or activation != "silu":
        raise NotImplementedError("only the un-fused silu form is provided on a CPU")
    heads, (batch, length, _) = dt_bias_H.numel(), zxbcdt_BLE.shape
    inner = heads * headdim if headdim else D.numel()
    conv_width = conv1d_weight_EK.shape[0]
    state_width = (conv_width - inner) // 2
    z, xBC, dt = zxbcdt_BLE.split([inner, conv_width, heads], -1)
    x, B, C = causal_conv1d(xBC, conv1d_weight_EK, conv1d_bias_E, seq_idx).split([inner, state_width, state_width], -1)
    y = mamba_chunk_scan_combined(
        x.reshape(batch, length, heads, -1), dt, A_H,
        B.reshape(batch, length, ngroups, -1), C.reshape(batch, length, ngroups, -1), chunk_size,
        D=D, z=z.reshape(batch, length, heads, -1), dt_bias=dt_bias_H, initial_states=initial_states,
        seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit,
    )  # fmt: skip
    assert isinstance(y, torch.Tensor)
    return y.reshape(batch, length, inner)


class RMSNorm(torch.nn.Module):
    """RMS norm over groups of `group_size` channels, with an optional silu gate z before or after the norm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """x and z [..., hidden]; returns the same shape and type as x."""
        dtype, x = x.dtype, x.float()
        if z is not None and not self.norm_before_gate:
            x = x * F.silu(z.float())
        grouped = x.unflatten(-1, (-1, self.group_size))
        x = (grouped * (grouped.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight.float()
        if z is not None and self.norm_before_gate:
            x = x * F.silu(z.float())
        return x.to(dtype)
