"""Filling up to what a schedule or a dispatcher demands changes no number."""

from __future__ import annotations

import pytest
import torch
import trainer_toy as toy

from megatron_agentrl.trainer.micro_batches import conform, empty, padded
from megatron_agentrl.trainer.step import forward_logprobs, is_empty, train_step


def test_padding_adds_rows_of_length_0_and_columns_of_0():
    batch = padded(toy.rows([1, 2]), rows=3, tokens=9)
    assert batch.ids_BT.shape == batch.columns["mask"].shape == (3, 9)
    assert batch.lengths_B.tolist() == [7, 5, 0]
    assert batch.columns["mask"].sum() == 6 + 4
    assert batch.ids_BT[:2, :7].equal(toy.rows([1, 2]).ids_BT)
    assert is_empty(padded(empty(), 2, 5)) and not is_empty(batch)


@pytest.mark.parametrize("name", toy.MODELS)
def test_a_padded_micro_batch_trains_and_scores_as_the_bare_one(rank, name):
    found = []
    for batches in ([toy.rows(range(6))], [padded(toy.rows(range(6)), 8, 14), padded(empty(), 3, 6)]):
        chunks, opt = toy.build(name, rank, toy.SGD)
        logprobs_BT = forward_logprobs(chunks, batches)[0][:6, :11]
        result = train_step(chunks, opt, batches, toy.negative_logprob, lr=0.1, tokens=toy.TOKENS)
        found.append((logprobs_BT, result))
    (want_BT, want), (got_BT, got) = found
    torch.testing.assert_close(got_BT, want_BT, rtol=1e-5, atol=1e-6)
    assert (got.loss, got.grad_norm) == pytest.approx((want.loss, want.grad_norm), rel=1e-5)
    assert got.metrics == want.metrics


def test_one_process_without_a_pipeline_keeps_its_micro_batches(rank):
    chunks, _ = toy.build("qwen", rank, toy.SGD)
    batches = [toy.rows([0]), empty(), toy.rows([1, 2])]
    assert conform(chunks, batches) == batches
