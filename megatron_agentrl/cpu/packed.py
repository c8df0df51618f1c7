"""What megatron-core asks of CUDA packages for packed sequences, answered on the CPU.

Two questions: whether the Mamba kernels take packed sequences (`cpu.mamba` does), and which positions of packed
sequences a context-parallel rank holds (a kernel of Transformer Engine). Used by `cpu.megatron.install` only.
"""

from __future__ import annotations

import types

import torch


def thd_get_partitioned_indices(
    cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
) -> torch.Tensor:
    """Positions (int32) of the packed row that `rank` holds: chunks rank and 2 * world_size - 1 - rank of each sequence.

    Args:
        cu_seqlens: starts of the sequences and the end of the last; each a multiple of 2 * world_size long.
    """
    position = torch.arange(total_tokens)
    sequence = torch.bucketize(position, cu_seqlens[1:].long(), right=True)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff()
    chunk = (position - starts[sequence]) * 2 * world_size // lengths[sequence]
    mine = torch.minimum(chunk, 2 * world_size - 1 - chunk) == rank
    return position[mine].int()


def install() -> None:
    """Call after megatron-core's Mamba modules can be imported."""
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer

    # The convolution is `cpu.mamba.causal_conv1d`: the package, whose version is asked for, is never called.
    mamba_mixer.is_causal_conv1d_min_version = lambda version, check_equality=True: True
    if mamba_context_parallel.tex is None:
        mamba_context_parallel.tex = types.SimpleNamespace(thd_get_partitioned_indices=thd_get_partitioned_indices)
        mamba_context_parallel.is_te_min_version = lambda version, check_equality=True: True
