"""Adam's state in a checkpoint: per parameter, in the parameter's own shape, whoever holds which part of it.

Saving, each parameter's shards are put together on one data-parallel rank (they take turns by bytes, so host memory and
writing are shared out); loading, a rank reads the parameters of which it holds a part, and keeps its part. State that
is whole on every rank (topology.distributed_optimizer=false) has the same form, so that either can read the other's.

The keys are those of megatron-core's fully reshardable form (`optimizer.state.exp_avg.KEY`), which is not used: 0.19.2
(`get_parameter_state_dp_zero`) leaves out the padding between buckets where it gathers and counts it where it cuts, so
that with more than one bucket (overlapped gradients) all but the first are saved shifted, silently; and it holds the
state of every parameter on each rank. Step counts and parameter groups are `trainer.checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_agentrl.trainer.optimizer import inner_optimizers, parts

#: What is kept for a parameter: its float32 weights and both moments.
KINDS = ("param", "exp_avg", "exp_avg_sq")
_NOBODY = 2**31 - 1

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True)
class _Whole:
    """State of a parameter that every data-parallel rank holds whole."""

    parameter: torch.nn.Parameter
    main: torch.Tensor
    state: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        moments = {name: self.state[name] if self.state else torch.zeros_like(self.main) for name in KINDS[1:]}
        return {"param": self.main.detach(), **moments}

    def put(self, loaded: dict[str, torch.Tensor]) -> None:
        self.main.copy_(loaded["param"])
        for name in KINDS[1:]:
            self.state[name].copy_(loaded[name])


def has_moments(optimizer: Any) -> bool:
    """Whether there is state to keep: plain SGD on float32 weights has none."""
    inner = inner_optimizers(optimizer)
    return bool(inner) and not isinstance(inner[0], torch.optim.SGD)


def to_save(
    optimizer: Any, models: list[Any], model_state: dict[str, Any], copy: bool
) -> dict[str, dict[str, Sharded]]:
    """The tensors that this rank writes. Collective over data-parallel ranks.

    Args:
        model_state: `sharded_state_dict` of the chunks; says which part of each tensor this rank holds.
        copy: nothing on the host may be the optimizer's own tensor, which the next step changes. What is gathered from
            several ranks is a copy in any case.

    Returns a name for each parameter -> kind -> its float32 tensor with its place in the whole one. State that Adam
    has not made yet (before its first step) is zero.
    """
    entries = _entries(model_state)
    found = {}
    for at, part in enumerate(parts(optimizer)):
        if not isinstance(part, DistributedOptimizer):
            for position, held in enumerate(_whole(part, models)):
                tensors = held.tensors()
                found[f"{at}.{position}"] = _place(entries[id(held.parameter)], _own(tensors) if copy else tensors)
            continue
        group, written = part.data_parallel_group, [0] * part.data_parallel_group.size()
        for position, parameter in enumerate(_parameters(part)):
            writer = written.index(min(written))
            written[writer] += parameter.numel()
            if group.size() == 1:
                alone = {kind: tensor.view(parameter.shape) for kind, tensor in _shard(part, parameter).items()}
                gathered: dict[str, torch.Tensor] | None = _own(alone) if copy else alone
            else:
                gathered = _gathered(part, parameter, group, writer)
            if gathered is not None:
                found[f"{at}.{position}"] = _place(_at(entries[id(parameter)], 0), gathered)
    return found


def to_load(optimizer: Any, models: list[Any], model_state: dict[str, Any]) -> dict[str, dict[str, Sharded]]:
    """As `to_save`, with room for every parameter of which this rank holds a part. Collective alike."""
    entries = _entries(model_state)
    found = {}
    for at, part in enumerate(parts(optimizer)):
        if not isinstance(part, DistributedOptimizer):
            for position, held in enumerate(_whole(part, models)):
                found[f"{at}.{position}"] = _place(entries[id(held.parameter)], held.tensors())
            continue
        group = part.data_parallel_group
        parameters = _parameters(part)
        own = [parameter in part.model_param_group_index_map for parameter in parameters]
        # One rank must be the first reader of each tensor: the lowest that holds a part of the parameter.
        first = torch.tensor([group.rank() if held else _NOBODY for held in own], device=parameters[0].device)
        dist.all_reduce(first, dist.ReduceOp.MIN, group)
        for position, (parameter, held_here, reader) in enumerate(zip(parameters, own, first.tolist(), strict=True)):
            if held_here:
                room = {kind: torch.empty(parameter.shape, dtype=torch.float32) for kind in KINDS}
                rank = 0 if reader == group.rank() else 1 + group.rank()
                found[f"{at}.{position}"] = _place(_at(entries[id(parameter)], rank), room)
    return found


@torch.no_grad()
def put(optimizer: Any, models: list[Any], loaded: dict[str, dict[str, torch.Tensor]]) -> None:
    """Copy what was loaded for `to_load` into the optimizer, whose state must be there."""
    for at, part in enumerate(parts(optimizer)):
        if not isinstance(part, DistributedOptimizer):
            for position, held in enumerate(_whole(part, models)):
                held.put(loaded[f"{at}.{position}"])
            continue
        for position, parameter in enumerate(_parameters(part)):
            if parameter in part.model_param_group_index_map:
                mine = part._get_model_param_range_map(parameter)["param"]
                tensors = {k: t.flatten()[mine.start : mine.end] for k, t in loaded[f"{at}.{position}"].items()}
                # torch's Adam has a tensor "step" in its state, which megatron-core then expects here; None is left alone.
                part._set_main_param_and_optimizer_states(parameter, {"step": None, **tensors})
        # Offloaded state: the optimizers on the host and on the device each hold a share of it.
        if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def give_model_its_weights(optimizer: Any, models: list[Any]) -> None:
    """Round the float32 weights to the model's type and complete them on every rank, as a step does. Collective."""
    for part in parts(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):  # a float32 optimizer steps the model's own
            part._copy_main_params_to_model_params()
    for chunk in models:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def _parameters(part: DistributedOptimizer) -> list[torch.nn.Parameter]:
    """Every parameter of a sharded optimizer, held here or not, in one order on its data-parallel ranks."""
    return [parameter for buffer in part.buffers for parameter in buffer.param_index_map]


def _whole(part: Any, models: list[Any]) -> Iterator[_Whole]:
    """The parameters of an unsharded optimizer, in the model's order. In a bf16 model their float32 copies are stepped."""
    inner = part.optimizer
    stepped = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    for chunk in models:
        for parameter in chunk.parameters():
            copied = getattr(parameter, "main_param", None)
            main = parameter if copied is None else copied
            if id(main) in stepped:
                yield _Whole(parameter, main, inner.state.get(main, {}))


def _shard(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """This rank's part of a parameter's state, flat, in float32."""
    group, position = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][position]
    if part.optimizer.state.get(main):
        tensors = part._get_main_param_and_optimizer_states(parameter)
    else:
        tensors = {"param": main, **{kind: torch.zeros_like(main, dtype=torch.float32) for kind in KINDS[1:]}}
    return {kind: tensors[kind].detach().float().flatten() for kind in KINDS}


def _gathered(
    part: DistributedOptimizer, parameter: torch.nn.Parameter, group: dist.ProcessGroup, writer: int
) -> dict[str, torch.Tensor] | None:
    """A parameter's whole state, on the host of data-parallel rank `writer`; None on the others."""
    held = None
    if parameter in part.model_param_group_index_map:
        held = part._get_model_param_range_map(parameter)["param"]
    # Bits are added as integers, each to zeros: exact also for what floats would change (-0.0).
    bits = torch.zeros(len(KINDS), parameter.numel(), dtype=torch.int32, device=parameter.device)
    if held is not None:
        for row, tensor in zip(bits, _shard(part, parameter).values(), strict=True):
            row[held.start : held.end] = tensor.view(torch.int32)
    dist.reduce(bits, dist.get_global_rank(group, writer), group=group)
    if group.rank() != writer:
        return None
    whole = bits.cpu().view(torch.float32)
    # Each in storage of its own: megatron-core's writer copies what is a part of another.
    return {kind: row.clone().view(parameter.shape) for kind, row in zip(KINDS, whole, strict=True)}


def _own(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of those on the host; what lies on a device is copied to the host by the checkpoint's request."""
    return {kind: tensor.clone() if tensor.device.type == "cpu" else tensor for kind, tensor in tensors.items()}


def _entries(model_state: dict[str, Any]) -> dict[int, Sharded]:
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    return {id(entry.data): entry for entry in nested_values(sharded)}


def _at(entry: Sharded, rank: int) -> Sharded:
    """The entry as data-parallel rank `rank` has it: replicas count (pipeline, tensor, data) and (0, 0, 0) writes."""
    assert isinstance(entry.replica_id, tuple), f"{entry.key}: replica {entry.replica_id!r} has no data-parallel rank"
    return replace(entry, replica_id=(*entry.replica_id[:-1], rank))


def _place(entry: Sharded, tensors: dict[str, torch.Tensor]) -> dict[str, Sharded]:
    return {
        kind: make_sharded_optimizer_tensor(entry, tensor, f"optimizer.state.{kind}")
        for kind, tensor in tensors.items()
    }
