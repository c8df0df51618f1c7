"""Which positions of a sequence a context-parallel rank holds, and how values per position come back in order.

Causal attention costs a late position more than an early one. A sequence is therefore cut into 2 * cp equal chunks
and rank r holds chunks r and 2 * cp - 1 - r (zig-zag): every rank then attends to the same number of pairs. Packed
sequences are cut one by one. megatron-core's rotary embedding, Mamba mixer and Transformer Engine's attention all
expect this order. No attention is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


def rank_positions(cu_seqlens: Sequence[int], cp: int, rank: int) -> torch.Tensor:
    """Positions (int64, in the order that the rank holds them) of sequences [cu[i], cu[i + 1]).

    Raises:
        ValueError: a sequence's length is not a multiple of 2 * cp.
    """
    parts = []
    for first, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk, rest = divmod(stop - first, 2 * cp)
        if rest:
            raise ValueError(
                f"a sequence of {stop - first} positions cannot be cut over {cp} context-parallel ranks; "
                f"expected a multiple of {2 * cp}: pad it"
            )
        late = 2 * cp - 1 - rank
        parts += [torch.arange(first + c * chunk, first + (c + 1) * chunk) for c in (rank, late)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def natural_order(cu_seqlens: Sequence[int], cp: int) -> torch.Tensor:
    """Where each position stands after the shards of all ranks were concatenated in order of rank (int64)."""
    return torch.cat([rank_positions(cu_seqlens, cp, rank) for rank in range(cp)]).argsort()


def gather_positions(
    local_SX: torch.Tensor, order_S: torch.Tensor, group: torch.distributed.ProcessGroup, *, replicated: bool
) -> torch.Tensor:
    """All positions in natural order from each rank's own: [S / cp, ...] -> [S, ...]. Differentiable; collective.

    Args:
        order_S: from `natural_order`.
        group: the context-parallel group.
        replicated: what comes after computes the same on every rank, so that each rank's own share of the gradient is
            complete. Otherwise (keys and values, which each rank uses for its own queries) the shares of all ranks are
            summed.
    """
    whole = gather_from_sequence_parallel_region(local_SX, tensor_parallel_output_grad=not replicated, group=group)
    return whole.index_select(0, order_S)
