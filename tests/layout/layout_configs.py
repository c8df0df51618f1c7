"""Tiny configs in which no two sizes are equal where a mistake could hide, and tensors that name their own rows."""

from __future__ import annotations

import torch

from megatron_agentrl.layout.boxes import ParameterLayout, matrix_shape
from megatron_agentrl.layout.megatron import hf_tensors


def nemotron(**changes):
    return {
        "model_type": "nemotron_h",
        "vocab_size": 101,
        "hidden_size": 24,
        "hybrid_override_pattern": "M*E-ME*E",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "intermediate_size": 44,
        "ssm_state_size": 6,
        "mamba_num_heads": 8,
        "mamba_head_dim": 7,
        "n_groups": 4,
        "conv_kernel": 3,
        "n_routed_experts": 12,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 28,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def qwen3_moe(**changes):
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 101,
        "hidden_size": 18,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "intermediate_size": 30,
        "num_experts": 12,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def qwen3(**changes):
    return {
        "model_type": "qwen3",
        "vocab_size": 101,
        "hidden_size": 18,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def llama(**changes):
    return qwen3(model_type="llama", hidden_size=24, num_hidden_layers=5, intermediate_size=56, head_dim=4) | changes


def deepseek(**changes):
    return {
        "model_type": "deepseek_v3",
        "vocab_size": 101,
        "hidden_size": 40,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 1,
        "intermediate_size": 56,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 3,
        "topk_group": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    } | changes


def numbered(config) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, each element a different whole number (exact in float64)."""
    found, at = {}, 0
    for name, shape in hf_tensors(config).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count, dtype=torch.float64).view(shape)
        at += count
    return found


def local(layout: ParameterLayout, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The parameter that `layout` describes, built from the checkpoint's tensors."""
    out = torch.zeros(matrix_shape(layout.shape), dtype=torch.float64)
    for box in layout.boxes:
        source = tensors[box.tensor]
        source = source.reshape(matrix_shape(source.shape))
        out[box.row : box.row + box.rows, box.col : box.col + box.cols] = source[box.r0 : box.r1, box.c0 : box.c1]
    return out.view(layout.shape)


def whole(name: str, shape, holdings) -> torch.Tensor:
    """A checkpoint tensor joined from (holding, local parameter) pairs; NaN where nothing was written."""
    out = torch.full(matrix_shape(shape), float("nan"), dtype=torch.float64)
    for holding, parameter in holdings:
        matrix = parameter.reshape(matrix_shape(parameter.shape))
        for box in holding.boxes:
            assert box.tensor == name
            out[box.r0 : box.r1, box.c0 : box.c1] = matrix[box.row : box.row + box.rows, box.col : box.col + box.cols]
    return out.view(shape)
