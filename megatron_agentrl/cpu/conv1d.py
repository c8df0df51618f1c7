"""The causal depthwise convolution of packed sequences, as one convolution instead of one a sequence.

Stands in for vLLM's `causal_conv1d_fn_cpu` (0.32.0), a Python loop that takes a fifth of a CPU engine's time where
prompts are many and short. Each sequence is laid out behind the inputs that precede it (its cached state, or zeros), one
after the other; outputs whose window would reach into another sequence are not taken.

Shapes: T tokens in all, N sequences, C channels, W taps, R rows (T plus W - 1 a sequence).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def packed_causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = -1,
    **_: Any,
) -> torch.Tensor:
    """y_CT for x_CT: sequence n is x[:, query_start_loc[n] : query_start_loc[n + 1]].

    Args:
        weight: [C, W]; y_t = sum over w of weight_w * x_(t - W + 1 + w), plus the bias.
        conv_states: [slots, C, >= W - 1], the last inputs of each sequence; slot `cache_indices[n]` (default n) is read
            where has_initial_state[n], and always written.
        pad_slot_id: sequences with this slot are left out; their outputs are zero.
    """
    assert activation in (None, True, False, "silu", "swish"), activation
    channels, width = weight.shape
    kept = width - 1
    out = torch.zeros_like(x)
    slots = torch.arange(len(query_start_loc) - 1) if cache_indices is None else cache_indices.long()
    starts, lengths = query_start_loc[:-1].long(), query_start_loc.diff().long()
    used = ((lengths > 0) & (slots != pad_slot_id)).nonzero()[:, 0]
    if not len(used):
        return out
    starts, lengths, slots = starts[used], lengths[used], slots[used]
    states_NCW = conv_states[slots, :, :kept]
    if has_initial_state is None:
        states_NCW = torch.zeros_like(states_NCW)
    else:
        states_NCW = states_NCW * has_initial_state[used][:, None, None]
    # In the rows R, sequence n begins at row_starts[n] with its `kept` earlier inputs; its own inputs follow.
    row_starts = lengths.add(kept).cumsum(0) - lengths - kept
    sequence = torch.repeat_interleave(torch.arange(len(used)), lengths)
    offset = torch.arange(len(sequence)) - (lengths.cumsum(0) - lengths)[sequence]
    source, place = starts[sequence] + offset, row_starts[sequence] + offset
    state_places = row_starts[:, None] + torch.arange(kept)
    rows_RC = torch.empty(len(sequence) + kept * len(used), channels)  # float32, whatever the model's type
    rows_RC[state_places] = states_NCW.transpose(1, 2).float()
    rows_RC[place + kept] = x.t()[source].float()
    windows = len(rows_RC) - kept
    weight_WC = weight.t().float().contiguous()
    y_RC = rows_RC[:windows] * weight_WC[0]
    for w in range(1, width):
        y_RC.addcmul_(rows_RC[w : w + windows], weight_WC[w])
    if bias is not None:
        y_RC += bias.float()
    y_TC = y_RC[place]
    out.t()[source] = (F.silu(y_TC) if activation else y_TC).to(x.dtype)
    conv_states[slots, :, :kept] = rows_RC[state_places + lengths[:, None]].transpose(1, 2).to(conv_states.dtype)
    return out
