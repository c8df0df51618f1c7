"""`deepseek_v3`: multi-head latent attention with interleaved RoPE or YaRN, gated experts chosen within groups."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.recipe.model_rules import rope_parameters
from megatron_agentrl.trainer.architectures.base import Architecture


def read(hf: dict[str, Any]) -> Architecture:
    heads = hf["num_attention_heads"]
    pattern = layer_pattern(hf)
    config = {
        "multi_latent_attention": True,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "ffn_hidden_size": hf["intermediate_size"],
        **_rotary(hf),
    }
    if "E" in pattern or hf.get("num_nextn_predict_layers"):
        config |= _experts(hf)
    return Architecture(
        pattern=pattern,
        vocab_size=hf["vocab_size"],
        tied=hf.get("tie_word_embeddings", False),
        config=config,
    )


def _rotary(hf: dict[str, Any]) -> dict[str, Any]:
    """RoPE, plain or YaRN. megatron-core scales the softmax by YaRN's factor even where RoPE is plain, so that
    factor is 1 then."""
    rope = rope_parameters(hf)
    base = rope["rope_theta"]
    if rope["rope_type"] == "default":
        return {"rope_type": "rope", "rotary_base": base, "rotary_percent": 1.0, "rotary_scaling_factor": 1.0}
    both = bool(rope.get("mscale")) and bool(rope.get("mscale_all_dim"))
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope["mscale"] if both else 1.0,
        "mscale_all_dim": rope["mscale_all_dim"] if both else 0.0,
    }


def _experts(hf: dict[str, Any]) -> dict[str, Any]:
    groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
    shared = hf.get("n_shared_experts") or 0
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": shared * hf["moe_intermediate_size"] or None,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": chosen if groups > 1 else None,
    }
