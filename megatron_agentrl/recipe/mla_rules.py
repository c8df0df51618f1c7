"""Latent attention (MLA): what it does not go with, and what engines need of its folder. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_agentrl.recipe.precision_rules import transformer_engine_missing
from megatron_agentrl.recipe.schema import Recipe, Topology


def latent_topology_problems(topology: Topology, config: dict[str, Any]) -> Iterator[str]:
    """Cuts that latent attention does not take."""
    tp = topology.tp
    if not config.get("kv_lora_rank"):
        return
    if tp > 1 and not topology.sequence_parallel:
        yield (
            f"topology.tp={tp}: with latent attention needs topology.sequence_parallel=true, else the rotary key's "
            "gradient is not summed over the ranks; set it"
        )
    if transformer_engine_missing() is None:
        return  # it holds the down projections whole
    for name, size in (
        ("q_lora_rank", config.get("q_lora_rank") or 0),
        ("kv_lora_rank + qk_rope_head_dim", config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)),
    ):
        if size % tp:
            yield (
                f"topology.tp={tp}: the latents have {size} rows ({name}), which tp does not divide; "
                "set a topology.tp that does"
            )


def latent_packing_problems(recipe: Recipe, config: dict[str, Any] | None) -> Iterator[str]:
    """Packed rows are right for latent attention but for values that are wider than keys."""
    config = config or {}
    width = (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0)
    if recipe.train.packing and config.get("kv_lora_rank") and (config.get("v_head_dim") or 0) > width:
        yield (
            f"train.packing=true: the model's values are wider than its keys (v_head_dim={config['v_head_dim']}, keys "
            f"{width}), and megatron-core 0.19.2 would cut them in packed rows; set train.packing=false"
        )


def latent_problems(config: dict[str, Any] | None, *, on_cpu: bool) -> Iterator[str]:
    """One line for each thing that vLLM would not serve, or would compute otherwise than the trainer.

    vLLM 0.32's attention for latents on a CPU was measured 0.26 nats away from transformers on a tiny float32 model
    that it had loaded from disk itself, where the trainer is within 1e-5: no canary could be proven.
    """
    if config is None or config.get("model_type") != "deepseek_v3":
        return
    for key, value in {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
        if config.get(key) != value:  # without them vLLM routes by softmax and has no router bias
            yield (
                f"config.json: {key} is {config.get(key)!r}, expected {value!r}, as the engine reads it there "
                f"(transformers does not write it); add it to the model folder's config.json"
            )
    if on_cpu:
        yield (
            "config.json: model_type is 'deepseek_v3', whose latent attention an engine on a CPU does not compute as the "
            "trainer does; use engines on GPUs, or warm-start only (the sft command)"
        )
