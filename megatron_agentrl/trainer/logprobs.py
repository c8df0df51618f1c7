"""Logprobs of given tokens from the model's logits, in float32.

The softmax runs over the real vocabulary only: padding columns exist because of one parallel layout, and a
softmax over them would be another policy than the engine's. Shapes: B rows, T positions, V columns held here.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def token_logprobs(
    logits_BTV: torch.Tensor,
    ids_BT: torch.Tensor,
    temperature: float,
    vocab_size: int,
    group: torch.distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    """log softmax(logits / temperature)[ids] as float32 [B, T], differentiable.

    Args:
        logits_BTV: this rank's columns, in order of rank, of the padded vocabulary.
        ids_BT: int64 ids below `vocab_size`, aligned with the logits (the token each position predicts).
        temperature: the sampling temperature, above 0.
        vocab_size: real tokens; columns from here on are left out of the softmax.
        group: tensor-parallel group that shares the columns; None or one rank when all are here.

    Raises:
        ValueError: the temperature is not above 0, or an id is outside the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature}: logprobs exist for temperatures above 0")
    if ids_BT.numel() and not 0 <= int(ids_BT.min()) <= int(ids_BT.max()) < vocab_size:
        raise ValueError(
            f"token ids reach from {int(ids_BT.min())} to {int(ids_BT.max())}, the vocabulary has {vocab_size} tokens"
        )
    ranks = group.size() if group is not None else 1
    columns = logits_BTV.shape[-1]
    first = columns * group.rank() if group is not None and ranks > 1 else 0
    scaled = logits_BTV.float() / temperature
    real = max(0, min(columns, vocab_size - first))
    if ranks == 1:
        return scaled[..., :real].log_softmax(-1).gather(-1, ids_BT[..., None])[..., 0]
    if real < columns:
        padding = torch.arange(columns, device=scaled.device) >= real
        scaled = scaled.masked_fill(padding, float("-inf"))
    return -vocab_parallel_cross_entropy(scaled.contiguous(), ids_BT, tp_group=group)
