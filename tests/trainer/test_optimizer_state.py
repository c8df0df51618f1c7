"""Adam's state whole on each rank (distributed_optimizer=false): its checkpoints are those of the sharded one.

Every layout against every other is `test_checkpoint_matrix`.
"""

from __future__ import annotations

import pytest
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import checkpoint
from megatron_agentrl.trainer.step import train_step

WHOLE, SHARDED = Topology(distributed_optimizer=False), Topology()


def steps(chunks, opt, first: int, last: int) -> list[float]:
    return [
        train_step(chunks, opt, [toy.rows(range(6))], toy.negative_logprob, lr=1e-2, tokens=toy.TOKENS, step=k).loss
        for k in range(first, last)
    ]


@pytest.mark.parametrize("writer", [WHOLE, SHARDED], ids=["written whole", "written sharded"])
@pytest.mark.parametrize("reader", [WHOLE, SHARDED], ids=["read whole", "read sharded"])
def test_a_run_goes_on_as_if_uninterrupted(rank, tmp_path, writer, reader):
    chunks, opt = toy.build("nemotron", rank, toy.ADAM, writer)
    assert chunks[0].ddp_config.use_distributed_optimizer is writer.distributed_optimizer
    steps(chunks, opt, 1, 3)
    folder = checkpoint.save(tmp_path, chunks, opt, 2, {})
    want = steps(chunks, opt, 3, 6)
    chunks, opt = toy.build("nemotron", rank, toy.ADAM, reader)
    checkpoint.load(folder, chunks, opt)
    assert steps(chunks, opt, 3, 6) == want
    assert checkpoint.check(checkpoint.save(tmp_path, chunks, opt, 5, {}))["optimizer_step"] == 5


def test_both_kinds_of_state_take_the_same_steps(rank):
    losses = []
    for kind in (WHOLE, SHARDED):
        chunks, opt = toy.build("qwen", rank, toy.ADAM, kind)
        losses.append(steps(chunks, opt, 1, 5))
    assert losses[0] == losses[1]
