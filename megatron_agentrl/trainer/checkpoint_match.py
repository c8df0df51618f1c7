"""Whether a distributed checkpoint is this model's, from its metadata alone, before a weight is read.

Compares the keys and global shapes of the model's tensors with those in the folder; the optimizer's and everything
else in the folder is left to the load itself. The padding of the vocabulary is the writer's topology, not the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from megatron_agentrl.layout.megatron import VOCABULARY_DIVISOR
from megatron_agentrl.trainer.hf_headers import some
from megatron_agentrl.trainer.topology import own_device
from megatron_agentrl.trainer.torch_metadata import StoredTensor, read_metadata

#: Prefix of the optimizer's keys in a checkpoint; the model's have none.
OPTIMIZER = "optimizer."


class OtherModel(ValueError):
    """The checkpoint holds another model than the one it is to be read into."""


def check_same_model(folder: Path, state: dict[str, Any]) -> dict[str, StoredTensor]:
    """Refuse a checkpoint whose tensors are not those of the model; returns what it stores of them. Collective.

    Args:
        folder: a complete checkpoint.
        state: the model's sharded state dict on this rank, without the optimizer's.

    Raises:
        OtherModel: on every rank that sees a difference; naming tensors, both shapes and one way out.
        PoisonedMetadata: the folder's table is damaged, or names what no checkpoint needs.
    """
    stored = {key: tensor for key, tensor in read_metadata(folder).items() if not key.startswith(OPTIMIZER)}
    own = {tensor.key: tensor for tensor in tensors(state)}
    found = [f"it has no {key} {tuple(tensor.global_shape)}" for key, tensor in own.items() if key not in stored]
    found += [
        f"its {key} has shape {stored[key].shape}, the model's {tuple(tensor.global_shape)}"
        for key, tensor in own.items()
        if key in stored and not _same_shape(stored[key], tensor)
    ]
    found += [f"the model has no {key} {stored[key].shape}" for key in _held_by_none(sorted(stored), own)]
    if found:
        raise OtherModel(
            f"{folder} is a checkpoint of another model: {some(found, 4)}; resume with the model.path it was trained "
            "from, or start a new run"
        )
    return stored


def _same_shape(stored: StoredTensor, own: ShardedTensor) -> bool:
    """Equal, but for rows that pad a vocabulary to a multiple of 64 times the tensor-parallel size of either side."""
    shape = tuple(own.global_shape)
    if stored.shape == shape or not own.allow_shape_mismatch:
        return stored.shape == shape
    # A vocabulary of V rows is in (rows - step, rows] on both sides; the chunks of a table are its tensor-parallel ranks.
    ranges = [
        (rows - VOCABULARY_DIVISOR * parts, rows)
        for rows, parts in ((stored.shape[0], len(stored.chunks)), (shape[0], own.axis_fragmentations[0]))
    ]
    return stored.shape[1:] == shape[1:] and max(low for low, _ in ranges) < min(high for _, high in ranges)


def has_other_type(stored: dict[str, StoredTensor], state: dict[str, Any]) -> bool:
    """Whether a tensor of the model stands in its checkpoint in another type (model.dtype was changed in between)."""
    return any(stored[tensor.key].dtype != tensor.dtype for tensor in tensors(state))


def tensors(state: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Every tensor of a sharded state dict; what is saved in parts under keys of its own is built into them."""
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            yield from tensors({"built": value.build()})
        elif isinstance(value, ShardedTensor):
            yield value


def _held_by_none(keys: list[str], own: dict[str, Any]) -> list[str]:
    """Which of `keys` (the same list on every rank) no rank's model holds. One byte a key travels."""
    held = torch.tensor([key in own for key in keys], dtype=torch.uint8, device=own_device())
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return [key for key, found in zip(keys, held.tolist(), strict=True) if not found]
