"""Causal attention without Transformer Engine, for padded and packed rows, with and without context parallelism.

megatron-core's own local attention takes neither packed sequences nor context parallelism; where neither is asked for,
this class is that one, unchanged. Packed sequences are attended one by one (those of equal length as one batch), never
through a mask over the whole row. Under context parallelism each rank gathers all keys and values and attends with its
own queries; the gradients of keys and values are summed over the ranks. Projections and rotary embedding are not here.

Legend: N sequences of one length, L positions of a sequence, Q queries of it on this rank, H heads, D head width.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.functional import scaled_dot_product_attention

from megatron_agentrl.trainer.context_parallel import gather_positions, natural_order


class EqualLengths(NamedTuple):
    """Packed sequences of one length: where their queries [N, Q] stand on this rank and their keys [N, L] in the row."""

    queries_NQ: torch.Tensor
    keys_NL: torch.Tensor


@lru_cache(maxsize=64)  # every layer of a micro-batch asks for the same
def by_length(cu_seqlens: tuple[int, ...], cp: int) -> list[EqualLengths]:
    """Packed sequences grouped by length, shortest first. A rank holds 1 / cp of each sequence, in their order."""
    ends = torch.tensor(cu_seqlens)
    lengths = ends.diff()
    found = []
    for length in lengths.unique().tolist():
        if length:
            starts_N1 = ends[:-1][lengths == length][:, None]
            queries = starts_N1 // cp + torch.arange(length // cp)
            found.append(EqualLengths(queries, starts_N1 + torch.arange(length)))
    return found


def causal(query_NQHD: torch.Tensor, key_NLHD: torch.Tensor, value_NLHD: torch.Tensor, scale: float,
           cp: int = 1, rank: int = 0) -> torch.Tensor:  # fmt: skip
    """Causal attention of this rank's queries over whole sequences: [N, Q, H, D of the values].

    Q = L / cp: with cp > 1 the queries are chunks `rank` and `2 * cp - 1 - rank` of the sequence's 2 * cp. Heads of the
    keys may be fewer than those of the queries (grouped-query attention).
    """
    shared = query_NQHD.shape[2] // key_NLHD.shape[2]
    query, key, value = (t.transpose(1, 2) for t in (query_NQHD, key_NLHD, value_NLHD))
    if shared > 1:
        key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    if cp == 1:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2)
    chunk = query.shape[2] // 2
    parts = []
    for part, place in zip(query.split(chunk, 2), (rank, 2 * cp - 1 - rank), strict=True):
        reach = (place + 1) * chunk  # the chunk's last query sees all keys up to here
        seen = torch.ones(chunk, reach, dtype=torch.bool, device=query.device).tril(reach - chunk)
        parts.append(
            scaled_dot_product_attention(part, key[:, :, :reach], value[:, :, :reach], attn_mask=seen, scale=scale)
        )
    return torch.cat(parts, 2).transpose(1, 2)


class LocalCoreAttention(DotProductAttention):
    """megatron-core's local attention, which also takes packed sequences and context parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        single = copy.copy(config)
        single.context_parallel_size = 1  # the parent refuses anything else; this class computes it
        super().__init__(single, *args, pg_collection=pg_collection, **kwargs)
        self.config = config
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [S, B, H, D] and key, value [S, B, G, D] of this rank's positions -> [S, B, H * D].

        Packed: [S, H, D] and [S, G, D] -> [S, H * D].

        Raises:
            NotImplementedError: packed or context-parallel, with dropout, a window, a softmax offset, or a mask or
                bias of the caller's.
        """
        if packed_seq_params is None and self.cp_group is None:
            return super().forward(query, key, value, attention_mask, attn_mask_type, attention_bias)
        self._refuse(attention_mask, attention_bias)
        packed = packed_seq_params is not None
        if packed_seq_params is not None:
            ends = tuple(packed_seq_params.cu_seqlens_q.tolist())
        else:
            ends = (0, query.shape[0] * self.config.context_parallel_size)
        cp, rank = 1, 0
        if self.cp_group is not None:
            cp, rank = self.cp_group.size(), self.cp_group.rank()
            order = natural_order(ends, cp).to(query.device)
            key, value = (gather_positions(t, order, self.cp_group, replicated=False) for t in (key, value))
        if not packed:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
            out_BSHD = causal(query, key, value, self.softmax_scale, cp, rank)
            return out_BSHD.transpose(0, 1).flatten(2)
        parts, places = [], []
        for group in by_length(ends, cp):
            queries, keys = group.queries_NQ.to(query.device), group.keys_NL.to(query.device)
            out_NQHD = causal(query[queries], key[keys], value[keys], self.softmax_scale, cp, rank)
            parts.append(out_NQHD.flatten(2).flatten(0, 1))
            places.append(queries.flatten())
        return torch.cat(parts).index_select(0, torch.cat(places).argsort())

    def _refuse(self, attention_mask: torch.Tensor | None, attention_bias: torch.Tensor | None) -> None:
        for what, present in (
            ("an attention mask", attention_mask is not None),
            ("an attention bias", attention_bias is not None),
            ("attention dropout", self.training and self.attention_dropout.p > 0),
            ("window attention", self.config.window_size is not None),
            ("a softmax offset", self.softmax_offset is not None),
        ):
            if present:
                raise NotImplementedError(
                    f"{what} is not computed for packed or context-parallel sequences without Transformer Engine; "
                    f"set train.packing=false and topology.cp=1"
                )
