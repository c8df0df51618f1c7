"""How gradients and parameters travel between data-parallel ranks: the recipe's words in megatron-core's.

megatron-core keeps gradients (and, with its distributed optimizer, parameters) in buffers that are cut into buckets.
Without overlap there is one bucket and one collective, after the last micro-batch; with it each bucket travels as
soon as it is complete. The numbers are the same. No mathematics here: the optimizer is `trainer.optimizer`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig

from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.trainer.precision import ddp_fields

#: Smallest default bucket and its growth with the group, in parameters: below, a collective is all latency.
LEAST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000


def ddp_config(recipe: Recipe, *, sharded: bool) -> DistributedDataParallelConfig:
    """megatron-core's data-parallel settings. `sharded`: the optimizer's state is cut over data-parallel ranks.

    Raises:
        ValueError: parameters can only be gathered late where each rank updates a shard of them.
    """
    topology = recipe.topology
    if topology.overlap_param_gather and not (sharded and topology.overlap_grad_reduce):
        raise ValueError(
            "topology.overlap_param_gather needs optimizer.name=adam with topology.distributed_optimizer=true and "
            "topology.overlap_grad_reduce=true; set it to false"
        )
    return DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        **ddp_fields(recipe),
        overlap_grad_reduce=topology.overlap_grad_reduce,
        overlap_param_gather=topology.overlap_param_gather,
        bucket_size=topology.bucket_size,
        check_for_nan_in_grad=False,  # train_step checks the norm, and names the step
    )


def bucket_size(ddp: DistributedDataParallelConfig, ranks: int, chunk: int, pp_rank: int) -> int | None:
    """Parameters of a bucket of model chunk `chunk`; None is one bucket.

    As megatron-core's wrapper decides it: only the first chunk of the first pipeline stage is cut, the others'
    communication is not on the critical path. The optimizer's layout must be made with the same number.
    """
    if not ddp.overlap_grad_reduce or chunk > 0 or pp_rank > 0:
        return None
    return ddp.bucket_size or max(LEAST_BUCKET, BUCKET_PER_RANK * ranks)


def settle(models: list[Any]) -> None:
    """Complete parameters on every rank. Collective.

    With `overlap_param_gather` a step leaves each rank with its updated shard; the next forward pass gathers the
    rest. Whoever reads parameters outside of a forward pass (publish, export, checkpoint, reference) calls this first.
    """
    for chunk in models:
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if not bucket_group.param_gather_dispatched or bucket_group.param_gather_handle is not None:
                bucket_group.start_param_sync(force_sync=True)
