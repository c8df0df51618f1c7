"""Where the tokens of a micro-batch's rows stand in the model's input, and how logprobs come back to the rows.

Two layouts: *padded*, one input row for each row, and *packed* (`train.packing`), all rows one after another in one
input row with `cu_seqlens` between them. Either may be cut over context-parallel ranks. Losses and columns never see
the difference: they work on rows, [B, T], and every context-parallel rank holds all of them. No model runs here.

Legend: B rows of the micro-batch, T their longest; R input rows (B, or 1 when packed), S input positions, L positions
of one rank. A row's last token predicts nothing, so a row of n tokens has n - 1 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_agentrl.data.packing import multiples
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.context_parallel import gather_positions, natural_order, rank_positions


@dataclass(frozen=True)
class SequenceLayout:
    """One micro-batch's input on one context-parallel rank.

    ids_RL        int64 inputs, 0 in the padding
    targets_RL    int64, the token that each position predicts; 0 in the padding
    positions_RL  int64, position inside its own sequence
    padding_RL    bool, True where there is no token to predict
    taken_N       int64 flat indices into [R, S] of the positions that predict a token
    given_N       int64 flat indices into [B, T] of the tokens that they predict
    shape         (B, T)
    cu_seqlens    int32 starts of the packed sequences and the end of the last, of the whole input; None when padded
    seq_idx       int32 [1, S], number of each position's sequence; None when padded
    longest       positions of the longest packed sequence
    order_S       `natural_order` of the positions; None without context parallelism
    """

    ids_RL: torch.Tensor
    targets_RL: torch.Tensor
    positions_RL: torch.Tensor
    padding_RL: torch.Tensor
    taken_N: torch.Tensor
    given_N: torch.Tensor
    shape: tuple[int, int]
    cu_seqlens: torch.Tensor | None = None
    seq_idx: torch.Tensor | None = None
    longest: int = 0
    order_S: torch.Tensor | None = None

    def to(self, device: torch.device) -> SequenceLayout:
        """The same layout on another device."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in found.items() if torch.is_tensor(value)
        }
        return replace(self, **moved)

    @property
    def packed(self) -> PackedSeqParams | None:
        """What attention, rotary embedding and Mamba need to keep packed sequences apart.

        Padding belongs to the sequence that it follows: nothing that is causal looks at it, and kernels need no gaps.
        """
        if self.cu_seqlens is None:
            return None
        ends = self.cu_seqlens
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
            seq_idx=self.seq_idx,
        )

    def to_rows(self, values_RL: torch.Tensor, group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """Values of the input positions as [B, T], each at the token its position predicts; 0 elsewhere.

        Differentiable. Collective over `group` (the context-parallel group) where the positions were cut: every rank
        gets all rows and must compute the same from them.
        """
        if self.order_S is not None:
            assert group is not None
            whole_SR = gather_positions(values_RL.t().contiguous(), self.order_S, group, replicated=True)
            values_RL = whole_SR.t()
        rows = values_RL.new_zeros(self.shape[0] * self.shape[1])
        return rows.index_copy(0, self.given_N, values_RL.flatten()[self.taken_N]).view(self.shape)


def lay_out(
    batch: MicroBatch, *, packing: bool, tp: int = 1, sequence_parallel: bool = False, cp: int = 1, cp_rank: int = 0,
    align: int = 1, ahead: int = 0,
) -> SequenceLayout:  # fmt: skip
    """The layout of a micro-batch (on the CPU) for the given parallel sizes, on context-parallel rank `cp_rank`.

    `ahead`: what a multi-token-prediction head reads and predicts. Position t of a row then holds the row's token
    t + ahead and predicts token t + ahead + 1; where the row has no such token there is padding. Rows and sequences lie
    as they do at 0.
    """
    asked = multiples(tp, cp, sequence_parallel)
    row = asked.row * align
    made = _packed(batch, asked.sequence, row, ahead) if packing else _padded(batch, row, ahead)
    if cp == 1:
        return made
    ends = [0, made.ids_RL.shape[1]] if made.cu_seqlens is None else made.cu_seqlens.tolist()
    here = rank_positions(ends, cp, cp_rank)
    return replace(
        made,
        ids_RL=made.ids_RL[:, here],
        targets_RL=made.targets_RL[:, here],
        positions_RL=made.positions_RL[:, here],
        padding_RL=made.padding_RL[:, here],
        order_S=natural_order(ends, cp),
    )


def _padded(batch: MicroBatch, multiple: int, ahead: int) -> SequenceLayout:
    rows, longest = batch.ids_BT.shape
    pad = -(longest - 1) % multiple
    positions_BS = torch.arange(longest - 1 + pad).expand(rows, -1).contiguous()
    # A row's last token predicts nothing: in the longest row it is no input at all, so counting it in the others
    # would make the router's bias depend on the grouping.
    padding_BS = positions_BS >= batch.lengths_B[:, None] - 1 - ahead
    row, position = (~padding_BS).nonzero(as_tuple=True)
    return SequenceLayout(
        ids_RL=_widened(batch.ids_BT[:, ahead:-1], positions_BS.shape[1]),
        targets_RL=_widened(batch.ids_BT[:, 1 + ahead :], positions_BS.shape[1]),
        positions_RL=positions_BS,
        padding_RL=padding_BS,
        taken_N=row * positions_BS.shape[1] + position,
        given_N=row * longest + position + 1 + ahead,
        shape=(rows, longest),
    )


def _widened(ids_BT: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(ids_BT, (0, width - ids_BT.shape[1])).contiguous()


def _packed(batch: MicroBatch, multiple: int, row_multiple: int, ahead: int) -> SequenceLayout:
    inputs_B = (batch.lengths_B - 1).clamp(min=0)
    kept = inputs_B.nonzero()[:, 0]
    if not len(kept):  # a stand-in of weight 0: one sequence of padding
        kept = torch.zeros(1, dtype=torch.int64)
    inputs_N = inputs_B[kept]
    held_N = inputs_N.add(multiple - 1).div(multiple, rounding_mode="floor") * multiple
    total = int(held_N.sum())
    held_N[-1] += max(row_multiple, -(-total // row_multiple) * row_multiple) - total  # the row's own padding
    ends = torch.nn.functional.pad(held_N.cumsum(0), (1, 0))
    sequence_S = torch.repeat_interleave(torch.arange(len(kept)), held_N)
    positions_S = torch.arange(int(ends[-1])) - ends[sequence_S]
    padding_S = positions_S >= inputs_N[sequence_S] - ahead
    taken_N = (~padding_S).nonzero()[:, 0]
    source_N = kept[sequence_S[taken_N]] * batch.ids_BT.shape[1] + positions_S[taken_N] + ahead
    flat = batch.ids_BT.flatten()
    blank = torch.zeros(len(positions_S), dtype=torch.int64)
    return SequenceLayout(
        ids_RL=blank.index_copy(0, taken_N, flat[source_N])[None],
        targets_RL=blank.index_copy(0, taken_N, flat[source_N + 1])[None],
        positions_RL=positions_S[None],
        padding_RL=padding_S[None],
        taken_N=taken_N,
        given_N=source_N + 1,
        shape=(batch.ids_BT.shape[0], batch.ids_BT.shape[1]),
        cu_seqlens=ends.to(torch.int32),
        seq_idx=sequence_S.to(torch.int32)[None],
        longest=int(held_N.max()),
    )
