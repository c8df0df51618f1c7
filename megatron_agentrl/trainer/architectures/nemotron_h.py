"""`nemotron_h`: hybrids of Mamba-2, attention without positions, relu² MLPs and mixtures of relu² experts."""

from __future__ import annotations

from typing import Any

from megatron.core.activations import squared_relu

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.recipe.model_rules import canonical
from megatron_agentrl.trainer.architectures.base import Architecture


def read(hf: dict[str, Any]) -> Architecture:
    pattern = layer_pattern(hf)
    hf = canonical(hf)
    config = {
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "kv_channels": hf["head_dim"],
        "layernorm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "ffn_hidden_size": hf.get("intermediate_size") or 4 * hf["hidden_size"],
    }
    if "M" in pattern:
        config |= {
            "is_hybrid_model": True,
            "mamba_state_dim": hf["ssm_state_size"],
            "mamba_head_dim": hf["mamba_head_dim"],
            "mamba_num_groups": hf["n_groups"],
            "mamba_num_heads": hf["mamba_num_heads"],
        }
    if "E" in pattern:
        groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
        config |= {
            "num_moe_experts": hf["n_routed_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_latent_size": hf.get("moe_latent_size"),
            "moe_shared_expert_intermediate_size": hf.get("moe_shared_expert_intermediate_size"),
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
            "moe_router_num_groups": groups if groups > 1 else None,
            "moe_router_group_topk": chosen if groups > 1 else None,
        }
    return Architecture(
        pattern=pattern,
        vocab_size=hf["vocab_size"],
        tied=hf.get("tie_word_embeddings", False),
        config=config,
        mixer={"d_conv": hf.get("conv_kernel", 4), "chunk_size": hf.get("chunk_size", 128)},
        mixer_norm_eps=hf.get("layer_norm_epsilon", 1e-5),
    )
