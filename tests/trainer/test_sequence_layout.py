"""Where tokens stand in the model's input: by hand, and as laws over any set of lengths and parallel sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_agentrl.cpu.packed import thd_get_partitioned_indices
from megatron_agentrl.data.packing import Multiples, first_fit, multiples
from megatron_agentrl.trainer.batch import MicroBatch, sft_micro_batch
from megatron_agentrl.trainer.context_parallel import natural_order, rank_positions
from megatron_agentrl.trainer.sequence_layout import lay_out

LENGTHS = st.lists(st.integers(1, 19), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1)


def rows_of(lengths: list[int]) -> MicroBatch:
    """Row b holds the ids 100 * b + 1, 100 * b + 2, ..."""
    return sft_micro_batch([([100 * b + t + 1 for t in range(n)], [1] * n) for b, n in enumerate(lengths)], pad_id=0)


def test_packed_rows_by_hand():
    layout = lay_out(rows_of([4, 1, 3]), packing=True)
    assert layout.ids_RL.tolist() == [[1, 2, 3, 201, 202]]
    assert layout.targets_RL.tolist() == [[2, 3, 4, 202, 203]]
    assert layout.positions_RL.tolist() == [[0, 1, 2, 0, 1]]
    assert layout.padding_RL.tolist() == [[False] * 5]
    params = layout.packed
    assert params.qkv_format == "thd" and params.cu_seqlens_q.tolist() == [0, 3, 5] and params.max_seqlen_q == 3
    assert params.seq_idx.tolist() == [[0, 0, 0, 1, 1]]
    rows = layout.to_rows(torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5]]))
    torch.testing.assert_close(rows, torch.tensor([[0.0, 0.1, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0], [0.0, 0.4, 0.5, 0.0]]))


def test_padded_rows_by_hand():
    layout = lay_out(rows_of([4, 1, 3]), packing=False)
    assert layout.packed is None
    assert layout.ids_RL.tolist() == [[1, 2, 3], [101, 0, 0], [201, 202, 203]]
    assert layout.padding_RL.tolist() == [[False] * 3, [True] * 3, [False, False, True]]
    rows = layout.to_rows(torch.arange(9.0).view(3, 3))
    assert rows.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 6, 7, 0]]


def test_what_a_head_two_tokens_ahead_reads_and_predicts_by_hand():
    packed, padded = (lay_out(rows_of([5, 2, 4]), packing=packing, ahead=2) for packing in (True, False))
    assert packed.cu_seqlens.tolist() == [0, 4, 5, 8]  # as the rows themselves lie
    assert packed.ids_RL.tolist() == [[3, 4, 0, 0, 0, 203, 0, 0]]
    assert packed.targets_RL.tolist() == [[4, 5, 0, 0, 0, 204, 0, 0]]
    assert packed.padding_RL.tolist() == [[False, False, True, True, True, False, True, True]]
    assert padded.ids_RL.tolist() == [[3, 4, 0, 0], [0] * 4, [203, 204, 0, 0]]
    assert padded.padding_RL.tolist() == [[False, False, True, True], [True] * 4, [False, True, True, True]]
    for layout in (packed, padded):
        rows = layout.to_rows(layout.targets_RL.float())
        assert rows.tolist() == [[0, 0, 0, 4, 5], [0] * 5, [0, 0, 0, 204, 0]]
    late = lay_out(rows_of([5, 2, 4]), packing=True, ahead=2, cp=2, cp_rank=1)
    assert late.ids_RL.tolist() == [[4, 0, 0, 0, 0, 0]] and late.targets_RL.tolist() == [[5, 0, 0, 0, 0, 0]]


def test_zigzag_by_hand():
    early, late = (lay_out(rows_of([7, 4]), packing=True, cp=2, cp_rank=rank) for rank in range(2))
    # 6 and 3 inputs, padded to 8 and 4: chunks of 2 and of 1, of which rank 0 holds the first and the last.
    assert early.ids_RL.tolist() == [[1, 2, 0, 0, 101, 0]] and late.ids_RL.tolist() == [[3, 4, 5, 6, 102, 103]]
    assert early.positions_RL.tolist() == [[0, 1, 6, 7, 0, 3]]
    assert early.padding_RL.tolist() == [[False, False, True, True, False, True]]
    assert early.packed.cu_seqlens_q.tolist() == [0, 8, 12]  # of the whole row, as megatron-core expects


def test_a_micro_batch_without_tokens_still_has_positions():
    nothing = MicroBatch(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    layout = lay_out(nothing, packing=True, tp=2, sequence_parallel=True, cp=2)
    assert layout.ids_RL.shape == (1, 2) and layout.padding_RL.all()
    assert lay_out(nothing, packing=True).ids_RL.shape == (1, 1)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans())
def test_every_token_but_a_rows_first_is_predicted_exactly_once(lengths, cp, tp, sequence_parallel, packing):
    batch = rows_of(lengths)
    made = [
        lay_out(batch, packing=packing, tp=tp, sequence_parallel=sequence_parallel, cp=cp, cp_rank=rank)
        for rank in range(cp)
    ]
    multiple = multiples(tp, cp, sequence_parallel)
    assert len({layout.ids_RL.shape for layout in made}) == 1
    width = made[0].ids_RL.shape[1]
    assert width * cp % multiple.row == 0 and (width % tp == 0 or not sequence_parallel)
    if packing:
        assert width * cp == multiple.positions(lengths)  # what the coordinator's plan counted
        assert all(length % multiple.sequence == 0 for length in made[0].cu_seqlens.diff().tolist())
    found = []
    for layout in made:
        real = ~layout.padding_RL
        found += list(zip(layout.ids_RL[real].tolist(), layout.targets_RL[real].tolist(), strict=True))
        assert (layout.positions_RL[real] + 1 == layout.ids_RL[real] % 100).all()  # restarts with each row
    ids = [[100 * b + t + 1 for t in range(n)] for b, n in enumerate(lengths)]
    assert sorted(found) == sorted((a, b) for row in ids for a, b in zip(row[:-1], row[1:], strict=True))
    # Values gathered from all ranks come back to their tokens (the gather itself is the workers' test).
    whole = torch.cat([layout.targets_RL for layout in made], 1)
    if cp > 1:
        whole = whole[:, made[0].order_S]
    back = torch.zeros(batch.ids_BT.numel(), dtype=torch.int64)
    want = batch.ids_BT.clone()
    want[:, 0] = 0
    for layout in made:
        back[layout.given_N] = whole.flatten()[layout.taken_N]
        assert torch.equal(back.view_as(want), want)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(2, 4))
def test_ranks_share_the_positions_as_transformer_engines_kernel_does(chunks, cp):
    ends = torch.tensor([0, *chunks]).cumsum(0) * 2 * cp
    shares = [rank_positions(ends.tolist(), cp, rank) for rank in range(cp)]
    for rank, share in enumerate(shares):
        kernel = thd_get_partitioned_indices(ends.int(), int(ends[-1]), cp, rank)
        assert kernel.dtype == torch.int32 and kernel.tolist() == share.tolist()
    together = torch.cat(shares)
    assert together[natural_order(ends.tolist(), cp)].tolist() == list(range(int(ends[-1])))


def test_a_length_that_cannot_be_cut_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="6 positions cannot be cut over 2 .* multiple of 4: pad it"):
        rank_positions([0, 6], 2, 0)


def test_multiples_by_hand():
    assert multiples() == multiples(tp=4) == Multiples(1, 1)
    assert multiples(tp=2, sequence_parallel=True) == Multiples(1, 2)
    assert multiples(cp=2) == Multiples(4, 4)
    assert multiples(tp=4, cp=2, sequence_parallel=True) == Multiples(4, 8)
    assert multiples(tp=3, cp=2, sequence_parallel=True) == Multiples(4, 12)
    assert Multiples(4, 8).positions([6, 3, 1, 0]) == 16  # 5 -> 8, 2 -> 4, nothing, nothing; 12 -> 16


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=3), max_size=12), st.integers(8, 80), st.integers(1, 3)
)
def test_first_fit_keeps_the_bound_and_opens_no_group_for_nothing(sizes, bound, cp):
    multiple = multiples(tp=2, cp=cp, sequence_parallel=True)
    groups = first_fit(sizes, bound, multiple)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    held = [multiple.positions(n for index in group for n in sizes[index]) for group in groups]
    assert all(len(group) == 1 or total <= bound for group, total in zip(groups, held, strict=True))
    for later, total in zip(groups[1:], held[1:], strict=True):
        first = multiple.positions(sizes[later[0]])
        assert all(earlier + first > bound for earlier in held[: groups.index(later)]), (groups, held, total)
