"""config.json of the large models, in their published sizes; weights and tokenizers are not needed."""

from __future__ import annotations

from typing import Any

#: What the three Nemotron 3 models have in common.
_NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 131072, "num_key_value_heads": 2, "head_dim": 128, "mamba_head_dim": 64,
    "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
    "tie_word_embeddings": False, "max_position_embeddings": 262144,
}  # fmt: skip

NANO = _NEMOTRON | {
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "intermediate_size": 1856, "mamba_num_heads": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}  # fmt: skip

SUPER = _NEMOTRON | {
    "hidden_size": 4096, "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "intermediate_size": 2688, "mamba_num_heads": 128, "n_routed_experts": 512,
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376, "routed_scaling_factor": 5.0,
}  # fmt: skip

#: The published sizes; the order of its 108 layers is a plausible one (48 Mamba-2, 48 of experts, 12 attention).
ULTRA = _NEMOTRON | {
    "hidden_size": 8192, "hybrid_override_pattern": "MEMEMEM*E" * 12,
    "num_attention_heads": 64, "intermediate_size": 5120, "mamba_num_heads": 256, "n_routed_experts": 512,
    "num_experts_per_tok": 22, "moe_intermediate_size": 5120, "moe_latent_size": 2048,
    "moe_shared_expert_intermediate_size": 10240, "routed_scaling_factor": 5.0,
}  # fmt: skip

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
