"""Canary rows: the trainer's own scores, on rows where no router's choice hangs on noise."""

from __future__ import annotations

import pytest
import torch
import trainer_toy as toy
from megatron.core.transformer.moe.router import TopKRouter

from megatron_agentrl.trainer import canary
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.step import forward_logprobs


@pytest.mark.parametrize("name", ["nemotron", "qwen"])
def test_rows_carry_the_logprobs_of_the_trainers_own_forward(rank, name):
    chunks, _ = toy.build(name, rank, toy.ADAM)
    rows = canary.score(chunks, vocabulary=101, length=13, seed=5)
    assert [len(row.ids) for row in rows] == [13, 13]
    ids = torch.tensor([row.ids for row in rows])
    batch = MicroBatch(ids, torch.tensor([13, 13]), {"mask": torch.ones(2, 13)})
    want = forward_logprobs(chunks, [batch])[0]
    assert torch.allclose(torch.tensor([row.logprobs for row in rows]), want, atol=1e-5)
    assert all(row.logprobs[0] == 0.0 and max(row.logprobs[1:]) < 0 for row in rows)


def test_the_rows_follow_from_the_seed_and_lie_in_the_vocabulary(rank):
    chunks, _ = toy.build("qwen", rank, toy.ADAM)
    first, again, other = (canary.score(chunks, 101, 9, seed=s) for s in (1, 1, 2))
    assert first == again
    assert [row.ids for row in first] != [row.ids for row in other]
    assert all(0 <= i < 101 for row in first for i in row.ids)


def test_a_row_whose_routing_is_a_tie_is_passed_over(rank):
    chunks, _ = toy.build("qwen", rank, toy.ADAM)
    count, length = 8, 9
    with canary.router_margins(chunks, count) as margin_B:
        ids = canary.candidates(101, length, count, seed=1)
        batch = MicroBatch(ids, torch.full((count,), length), {"mask": torch.ones(count, length)})
        forward_logprobs(chunks, [batch])
    assert torch.isfinite(margin_B).all() and (margin_B > 0).all()
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
    for router in routers:  # all experts alike: every choice is a tie
        router.weight.data[:] = router.weight.data[:1].clone()
    with canary.router_margins(chunks, count) as tied_B:
        forward_logprobs(chunks, [batch])
    assert tied_B.max() < canary.DECISIVE
    assert not any(m._forward_hooks for m in routers)  # nothing is left hooked
