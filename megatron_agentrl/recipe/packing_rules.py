"""What packed rows and context parallelism do not go with. Numbers in, one line for each problem out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_agentrl.recipe.schema import Dispatcher, Recipe, Topology


def packing_problems(recipe: Recipe) -> Iterator[str]:
    """What does not go together with packed rows."""
    topology = recipe.topology
    if recipe.train.packing and topology.ep > 1 and topology.dispatcher is Dispatcher.allgather:
        yield (
            "train.packing=true: topology.dispatcher=allgather needs as many tokens on every rank, and packed rows have "
            "as many as they have; set topology.dispatcher=alltoall"
        )


def context_parallel_problems(topology: Topology, config: dict[str, Any]) -> Iterator[str]:
    """Mamba layers exchange positions for heads, so context-parallel ranks share the heads and groups of their
    tensor-parallel rank. Attention gathers keys and values and fits any size."""
    tp, cp = topology.tp, topology.cp
    heads = config.get("mamba_num_heads")
    if cp == 1 or not heads or heads % tp:
        return
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    held, held_groups = heads // tp, max(1, groups // tp)
    fitting = [
        size for size in range(1, held + 1) if held % size == 0 and not (held_groups % size and size % held_groups)
    ]
    if cp not in fitting:
        nearest = max((size for size in fitting if size <= cp), default=1)
        yield (
            f"topology.cp={cp}: a tensor-parallel rank holds {held} Mamba heads in {held_groups} groups (tp={tp}); cp must "
            f"divide the heads and divide or be a multiple of the groups, so it can be "
            f"{', '.join(map(str, fitting[:12]))}; set topology.cp={nearest}"
        )
