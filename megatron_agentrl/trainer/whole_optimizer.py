"""Checkpoint form of an Adam whose state is whole on every data-parallel rank (topology.distributed_optimizer=false).

Per parameter, under the very keys that megatron-core's distributed optimizer writes in its fully reshardable form
(`optimizer.state.exp_avg.KEY`), so that a run can go on with its state sharded, or whole, whichever wrote it.
Step counts and parameter groups are `trainer.checkpoint`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

MOMENTS = ("exp_avg", "exp_avg_sq")


def _parameters(
    inners: list[torch.optim.Optimizer], models: list[Any]
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, dict[str, Any]]]:
    """The model's parameters in order, each with what is stepped for it (itself, or its float32 copy in a bf16 model)
    and that one's state."""
    stepped = {
        id(parameter): inner.state[parameter]
        for inner in inners
        for group in inner.param_groups
        for parameter in group["params"]
    }
    for chunk in models:
        for parameter in chunk.parameters():
            main = getattr(parameter, "main_param", None)
            main = parameter if main is None else main
            yield parameter, main, stepped[id(main)]


def sharded_state(
    inners: list[torch.optim.Optimizer], models: list[Any], model_state: dict[str, Any]
) -> dict[int, dict[str, Any]]:
    """Position of a parameter -> its float32 weights ("param") and moments, as sharded tensors.

    Args:
        inners: torch's optimizers, with state for every parameter.
        model_state: `sharded_state_dict` of the chunks; says which part of each tensor this rank holds.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    entries = {id(entry.data): entry for entry in nested_values(sharded)}
    found: dict[int, dict[str, Any]] = {}
    for position, (parameter, main, state) in enumerate(_parameters(inners, models)):
        tensors = {"param": main.detach(), **{name: state[name] for name in MOMENTS}}
        found[position] = {
            name: make_sharded_optimizer_tensor(entries[id(parameter)], tensor, f"optimizer.state.{name}")
            for name, tensor in tensors.items()
        }
    return found


@torch.no_grad()
def put(inners: list[torch.optim.Optimizer], models: list[Any], loaded: dict[int, dict[str, Any]]) -> None:
    """Copy what was loaded for `sharded_state` into the optimizers."""
    for position, (_, main, state) in enumerate(_parameters(inners, models)):
        main.copy_(loaded[position]["param"])
        for name in MOMENTS:
            state[name].copy_(loaded[position][name])
