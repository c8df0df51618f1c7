"""`llama`, `qwen3`, `qwen3_moe`: RoPE attention, then a gated MLP or a mixture of gated experts.

Qwen3 norms its queries and keys, Llama does not; that and the experts are all the difference.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from megatron_agentrl.layout.decoder import NORMED, experts, head_dim
from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.recipe.model_rules import rope_parameters
from megatron_agentrl.trainer.architectures.base import Architecture

#: What Llama 3's scaling of the frequencies takes, under megatron-core's names, which are transformers' too.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read(hf: dict[str, Any]) -> Architecture:
    config = {
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "kv_channels": head_dim(hf),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "qk_layernorm": hf["model_type"] in NORMED,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "ffn_hidden_size": hf["intermediate_size"],
    }
    pattern = layer_pattern(hf)
    if "E" in pattern:
        # The softmax over the chosen logits equals the renormalised choice from the full softmax; without
        # renormalisation the full softmax comes first.
        config |= {
            "num_moe_experts": experts(hf),
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        }
    rope = rope_parameters(hf)
    return Architecture(
        pattern=pattern,
        vocab_size=hf["vocab_size"],
        tied=hf.get("tie_word_embeddings", False),
        config=config,
        position="rope",
        rotary_base=rope["rope_theta"],
        rope_linear_factor=rope["factor"] if rope["rope_type"] == "linear" else None,
        rope_llama3={key: rope[key] for key in LLAMA3} if rope["rope_type"] == "llama3" else None,
    )
