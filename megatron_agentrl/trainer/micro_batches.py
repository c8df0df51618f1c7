"""Micro-batches as megatron-core's schedule and token dispatcher demand them.

Two demands come from the topology, not from the data. The interleaved schedule takes micro-batches in groups of
`pp`: the rest is filled up with empty ones. The all-gather dispatcher gathers as many tokens from each rank as the
rank itself has: all ranks bring micro-batches of one shape. Filling changes no number: an empty micro-batch and a
padded column weigh nothing. Shapes: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.topology import own_device


def empty() -> MicroBatch:
    """A micro-batch of weight 0."""
    return MicroBatch(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {})


def conform(models: list[Any], batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches to run for `batches`, the first len(batches) of them in the same order. Collective.

    Every rank brings the same number. Rows and columns that are added stand after the given ones.
    """
    config = get_model_config(models[0])
    if len(models) > 1:
        batches = batches + [empty()] * (-len(batches) % config.pipeline_model_parallel_size)
    if config.moe_token_dispatcher_type == "allgather" and config.expert_model_parallel_size > 1:
        batches = _of_one_shape(batches)
    return batches


def _of_one_shape(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Each micro-batch padded to the largest [B, T] that a data-parallel rank has for it; over a pipeline, all of
    them to the largest of all, because megatron-core then agrees on one shape for the whole step."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shapes = torch.tensor([[max(1, batch.ids_BT.shape[0]), max(2, batch.ids_BT.shape[1])] for batch in batches])
    shapes = shapes.to(own_device())
    dist.all_reduce(shapes, dist.ReduceOp.MAX, group=group)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        shapes = shapes.amax(dim=0, keepdim=True).expand_as(shapes)
    return [padded(batch, rows, tokens) for batch, (rows, tokens) in zip(batches, shapes.tolist(), strict=True)]


def padded(batch: MicroBatch, rows: int, tokens: int) -> MicroBatch:
    """`batch` as [rows, tokens]: ids and columns are 0 in what is added, added rows have length 0."""
    more_rows, more_tokens = rows - batch.ids_BT.shape[0], tokens - batch.ids_BT.shape[1]
    if not more_rows and not more_tokens:
        return batch

    def pad(tensor_BT: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor_BT, (0, more_tokens, 0, more_rows))

    return MicroBatch(
        pad(batch.ids_BT),
        torch.nn.functional.pad(batch.lengths_B, (0, more_rows)),
        {name: pad(column_BT) for name, column_BT in batch.columns.items()},
    )
