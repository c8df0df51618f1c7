"""From token losses to the loss of a global batch, whatever way the batch is cut.

Each mode is a quotient of two sums, and both sums add up over micro-batches, ranks and packings. So a part
gives its pair, the pairs are added, and one division at the end gives the same number for any partition.
A mean of per-part means does not.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch


class Reduction(str, Enum):
    token_mean = "token_mean"
    """Sum over tokens / trained tokens. Each token weighs the same."""
    sequence_mean_token_mean = "sequence_mean_token_mean"
    """Mean over rows of each row's token mean. Each row weighs the same."""
    sequence_mean_token_sum = "sequence_mean_token_sum"
    """Mean over rows of each row's token sum."""


def partial_sums(kind: Reduction, loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator of one part of the batch; add them over parts, then divide.

    Rows without a trained token count for nothing. Values at masked tokens are not looked at.
    """
    mask_BT = mask_BT.bool()
    loss_BT = torch.where(mask_BT, loss_BT, torch.zeros((), dtype=loss_BT.dtype, device=loss_BT.device))
    return REDUCTIONS[kind](loss_BT, mask_BT)


def _token_mean(loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return loss_BT.sum(), mask_BT.sum()


def _sequence_mean_token_mean(loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_B = mask_BT.sum(-1)
    return (loss_BT.sum(-1) / tokens_B.clamp(min=1)).sum(), (tokens_B > 0).sum()


def _sequence_mean_token_sum(loss_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return loss_BT.sum(), mask_BT.any(-1).sum()


REDUCTIONS: dict[Reduction, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    Reduction.token_mean: _token_mean,
    Reduction.sequence_mean_token_mean: _sequence_mean_token_mean,
    Reduction.sequence_mean_token_sum: _sequence_mean_token_sum,
}
