"""`qwen3_moe`: RoPE attention with normed queries and keys, then a gated MLP or a mixture of gated experts."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.trainer.architectures.base import Architecture, refuse


def read(hf: dict[str, Any]) -> Architecture:
    refuse(hf, {
        "attention_bias": (False,), "hidden_act": ("silu",), "use_sliding_window": (False, None),
        "attention_dropout": (0.0, 0),
    })  # fmt: skip
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise ValueError(f"config.json: rope_type={scaling!r} is not supported for model_type='qwen3_moe'")
    config = {
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "ffn_hidden_size": hf["intermediate_size"],
    }
    pattern = layer_pattern(hf)
    if "E" in pattern:
        # The softmax over the chosen logits equals the renormalised choice from the full softmax; without
        # renormalisation the full softmax comes first.
        config |= {
            "num_moe_experts": hf.get("num_experts") or hf["num_local_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        }
    return Architecture(
        pattern=pattern,
        vocab_size=hf["vocab_size"],
        tied=hf.get("tie_word_embeddings", False),
        config=config,
        position="rope",
        rotary_base=rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
        rotary_percent=rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)),
    )
