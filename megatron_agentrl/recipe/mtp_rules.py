"""Legality of `model.mtp`: training multi-token-prediction heads. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_agentrl.recipe.schema import Mtp, Recipe, Recompute, RecomputeMethod


def mtp_problems(recipe: Recipe, config: dict[str, Any] | None) -> Iterator[str]:
    """One line for each setting of `model.mtp` without effect or that the model or topology cannot take."""
    mtp, default = recipe.model.mtp, Mtp()
    if not mtp.train:
        for name in ("loss_weight", "detach"):
            if (value := getattr(mtp, name)) != getattr(default, name):
                yield (
                    f"model.mtp.{name}={str(value).lower()}: has no effect with model.mtp.train=false; "
                    "leave it out or set model.mtp.train=true"
                )
        return
    if config is None:
        return
    if not config.get("num_nextn_predict_layers"):
        yield (
            f"model.mtp.train=true: the model has no prediction heads (config.json: num_nextn_predict_layers is "
            f"{config.get('num_nextn_predict_layers')}); set model.mtp.train=false"
        )
    elif config.get("model_type") not in ("deepseek_v3", "nemotron_h"):
        yield (
            f"model.mtp.train=true: heads of a {config.get('model_type')!r} model are not trained here, those of "
            "deepseek_v3 and nemotron_h are; set model.mtp.train=false"
        )
    if config.get("tie_word_embeddings") and recipe.topology.pp > 1:
        yield (
            f"model.mtp.train=true: with tied embeddings megatron-core cannot save heads over a pipeline "
            f"(topology.pp={recipe.topology.pp}); set topology.pp=1 or model.mtp.train=false"
        )
    if recipe.topology.pp > 1 and recipe.topology.overlap_grad_reduce and mtp.detach:
        yield (
            "model.mtp.train=true: with topology.overlap_grad_reduce megatron-core waits for a gradient of the last stage's "
            f"embedding, which detached heads do not give (topology.pp={recipe.topology.pp}); set "
            "topology.overlap_grad_reduce=false"
        )
    memory = recipe.memory
    if memory.recompute is Recompute.full and (
        memory.recompute_method is not RecomputeMethod.uniform or memory.recompute_layers != 1
    ):
        yield (
            f"model.mtp.train=true: megatron-core recomputes heads one at a time, found memory.recompute_method="
            f"{memory.recompute_method.value} and memory.recompute_layers={memory.recompute_layers}; set uniform and 1"
        )
