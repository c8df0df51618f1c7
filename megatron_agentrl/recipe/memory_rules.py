"""Whether the recipe's ways to save memory can be put in force: activation recompute and the optimizer on the host.

Torch-free. A module that the model does not have is refused: nothing would be recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_agentrl.recipe.errors import did_you_mean
from megatron_agentrl.recipe.model_kinds import kinds, letters
from megatron_agentrl.recipe.precision_rules import INSTALL, names, transformer_engine_missing
from megatron_agentrl.recipe.schema import Fp8Recipe, Memory, Recipe, Recompute

#: Module of selective recompute -> the kind of layer that has it.
RECOMPUTE_MODULES = {
    "core_attn": "attention",
    "mlp": "mlp",
    "moe": "experts",
    "moe_act": "experts",
    "shared_experts": "shared_experts",
    "layernorm": "experts",  # other norms stand inside the linear that follows them
    "mla_up_proj": "attention",
}


def memory_problems(recipe: Recipe, config: dict[str, Any] | None, gpus: int) -> Iterator[str]:
    """One line for each leaf of `memory` that cannot be put in force. `gpus` is what this machine has."""
    memory, default = recipe.memory, Memory()
    if memory.recompute is not Recompute.full:
        for leaf in ("recompute_method", "recompute_layers"):
            if (value := getattr(memory, leaf)) != getattr(default, leaf):
                yield f"memory.{leaf}={getattr(value, 'value', value)}: has no effect without memory.recompute=full; leave it out"
    if memory.recompute is Recompute.selective:
        yield from _module_problems(recipe, config, gpus)
    elif memory.recompute_modules is not None:
        yield f"memory.recompute_modules={memory.recompute_modules}: has no effect without memory.recompute=selective; leave it out"
    if memory.recompute is Recompute.full and config:
        per_stage = len(letters(config)) // (recipe.topology.pp * recipe.topology.vpp)
        if per_stage and memory.recompute_layers > per_stage:
            yield f"memory.recompute_layers={memory.recompute_layers}: a pipeline stage has {per_stage} layers; set {per_stage} or less"
    yield from _offload_problems(recipe, gpus)


def _module_problems(recipe: Recipe, config: dict[str, Any] | None, gpus: int) -> Iterator[str]:
    words = names(recipe.memory.recompute_modules)
    if not words:
        yield (
            "memory.recompute_modules=null: memory.recompute=selective needs modules; "
            f"give some of {','.join(RECOMPUTE_MODULES)}"
        )
    there = kinds(config) if config else set(RECOMPUTE_MODULES.values())
    for word in words:
        key = f"memory.recompute_modules: {word}"
        if word not in RECOMPUTE_MODULES:
            yield f"{key} is no module; {did_you_mean(word, RECOMPUTE_MODULES)}"
        elif RECOMPUTE_MODULES[word] not in there:
            yield f"{key}: the model has no {RECOMPUTE_MODULES[word]} layers; leave it out"
        elif word == "mla_up_proj" and config and not config.get("kv_lora_rank"):
            yield f"{key}: the model has no multi-latent attention; leave it out"
        elif word == "moe_act" and (missing := transformer_engine_missing()):
            yield f"{key} belongs to grouped experts, and {missing}; {INSTALL}, or give moe"
        elif word == "layernorm" and gpus and (missing := transformer_engine_missing()):
            yield f"{key}: megatron-core 0.19.2 fails on a GPU where {missing}; {INSTALL}, or leave it out"
        elif (
            word in ("moe_act", "layernorm")
            and recipe.precision.fp8
            and recipe.precision.fp8_recipe is Fp8Recipe.delayed
        ):
            yield f"{key} cannot be recomputed with precision.fp8_recipe=delayed; set precision.fp8_recipe=tensorwise"
    if "moe" in words:
        for inside in sorted({"moe_act", "shared_experts"} & set(words)):
            yield f"memory.recompute_modules: {inside} is part of moe, which is recomputed whole; leave {inside} out"


def _offload_problems(recipe: Recipe, gpus: int) -> Iterator[str]:
    memory = recipe.memory
    if not memory.optimizer_offload:
        if not memory.optimizer_offload_overlap:
            yield "memory.optimizer_offload_overlap=false: has no effect without memory.optimizer_offload; leave it out"
        return
    key = f"memory.optimizer_offload={memory.optimizer_offload}"
    if not gpus:
        yield f"{key}: found no GPU, the optimizer's state is in the host's memory already; set memory.optimizer_offload=0"
    phases = [recipe.optimizer, *([recipe.warm_start.optimizer] if recipe.warm_start.steps else [])]
    if any(optimizer.name != "adam" for optimizer in phases):
        yield f"{key}: only Adam has state to move, found optimizer.name=sgd; leave it out"
