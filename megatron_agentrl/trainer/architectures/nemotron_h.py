"""`nemotron_h`: hybrids of Mamba-2, attention without positions, relu² MLPs and mixtures of relu² experts."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.activations import squared_relu

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.trainer.architectures.base import Architecture, refuse


def _number(value: Any) -> float:
    """A float that transformers may have written as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def read(hf: dict[str, Any]) -> Architecture:
    pattern = layer_pattern(hf)
    older = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
             "mamba_chunk_size": "chunk_size", "mamba_dt_limit": "time_step_limit",
             "attention_head_dim": "head_dim"}  # fmt: skip
    hf = hf | {new: hf[old] for old, new in older.items() if old in hf and new not in hf}
    refuse(hf, {
        "attention_bias": (False,), "mlp_bias": (False,), "use_bias": (False,), "mamba_proj_bias": (False,),
        "use_conv_bias": (True,), "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",),
        "sliding_window": (None,), "attention_dropout": (0.0, 0), "hidden_dropout": (0.0, 0),
        "n_shared_experts": (1, None), "residual_in_fp32": (False,),
    })  # fmt: skip
    limit = tuple(map(_number, hf.get("time_step_limit", (0.0, math.inf))))
    if limit != (0.0, math.inf):
        raise ValueError(f"config.json: time_step_limit={limit} is not supported (only (0.0, inf))")
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
        # megatron-core divides sigmoid scores by their sum exactly when more than one expert is chosen.
        normalised, top_k = hf.get("norm_topk_prob", True), hf["num_experts_per_tok"]
        if normalised != (top_k > 1):
            raise ValueError(
                f"config.json: norm_topk_prob={normalised} with num_experts_per_tok={top_k} is not supported "
                f"(sigmoid scores are normalised exactly when more than one expert is chosen)"
            )
        # A group's score is the sum of its two best experts in the model, of its top_k // topk_group best here.
        groups, chosen = hf.get("n_group") or 1, hf.get("topk_group") or 1
        if groups > 1 and top_k // chosen != 2:
            raise ValueError(
                f"config.json: n_group={groups} is supported where num_experts_per_tok // topk_group is 2, "
                f"found {top_k} // {chosen}"
            )
        config |= {
            "num_moe_experts": hf["n_routed_experts"],
            "moe_router_topk": top_k,
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
