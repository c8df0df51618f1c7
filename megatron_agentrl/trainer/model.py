"""From a Hugging Face config.json to megatron-core's HybridModel.

Reads `nemotron_h` and `qwen3_moe`. What megatron-core would compute differently from the Hugging Face model
is refused by name; nothing in a config is silently ignored that changes the policy. Heads for multi-token
prediction are not built: the policy does not use them, and `trainer.weights_io` carries them over. Weights
are not read here: a built model holds megatron-core's own initialisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_agentrl.layout.megatron import layer_pattern, padded_vocabulary, split_layers
from megatron_agentrl.recipe.schema import Dtype, Recipe
from megatron_agentrl.trainer.layers import stack_spec
from megatron_agentrl.trainer.topology import Rank


@dataclass
class Architecture:
    """What a Hugging Face config says, in megatron-core's words. `config` holds TransformerConfig fields."""

    pattern: str
    vocab_size: int
    tied: bool
    config: dict[str, Any]
    position: str = "none"
    rotary_base: float = 10000.0
    rotary_percent: float = 1.0
    mixer: dict[str, Any] = field(default_factory=dict)
    mixer_norm_eps: float = 1e-5


def _refuse(hf: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raise for a key that is present with a value the trainer does not compute."""
    for key, values in allowed.items():
        found = hf.get(key, values[0])
        if found not in values:
            raise ValueError(
                f"config.json: {key}={found!r} is not supported for model_type={hf['model_type']!r} "
                f"(supported: {', '.join(map(repr, values))})"
            )


def _number(value: Any) -> float:
    """A float that transformers may have written as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


def _nemotron_h(hf: dict[str, Any]) -> Architecture:
    pattern = layer_pattern(hf)
    older = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
             "mamba_chunk_size": "chunk_size", "mamba_dt_limit": "time_step_limit",
             "attention_head_dim": "head_dim"}  # fmt: skip
    hf = hf | {new: hf[old] for old, new in older.items() if old in hf and new not in hf}
    _refuse(hf, {
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


def _qwen3_moe(hf: dict[str, Any]) -> Architecture:
    _refuse(hf, {
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


def architecture(hf: dict[str, Any]) -> Architecture:
    """Read a config.json dict.

    Raises:
        ValueError: an unsupported model_type or feature, by its key and value.
        KeyError: a key the model type requires is missing.
    """
    layer_pattern(hf)  # refuses an unknown model_type first
    return _nemotron_h(hf) if hf["model_type"] == "nemotron_h" else _qwen3_moe(hf)


def transformer_config(hf: dict[str, Any], recipe: Recipe) -> TransformerConfig:
    """megatron-core's configuration for a Hugging Face config and the recipe's topology and type.

    Token normalisation is global (`calculate_per_token_loss`), the router computes in float32, there is no
    dropout and no auxiliary loss, and `moe_router_bias_update_rate` starts at 0 (the optimizer sets it).
    """
    arch, topology = architecture(hf), recipe.topology
    dtype = torch.bfloat16 if recipe.model.dtype == Dtype.bf16 else torch.float32
    experts = {
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }
    if "E" not in arch.pattern:
        experts = {}
        if topology.ep > 1:
            raise ValueError(f"topology.ep={topology.ep}, but the model has no experts; set topology.ep to 1")
    if experts and topology.tp > 1 and not topology.sequence_parallel:
        raise ValueError(f"topology.tp={topology.tp} with experts needs topology.sequence_parallel=true")
    if topology.cp > 1:
        raise ValueError(f"topology.cp={topology.cp}: the step does not cut sequences yet; set topology.cp to 1")
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=len(arch.pattern),
        hidden_size=hf["hidden_size"],
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=topology.pp,
        virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
        context_parallel_size=topology.cp,
        sequence_parallel=topology.sequence_parallel,
        variable_seq_lengths=topology.pp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **experts,
        **arch.config,
    )


def build(hf: dict[str, Any], recipe: Recipe, rank: Rank) -> list[HybridModel]:
    """Build this rank's model chunks (one, or `topology.vpp` of them) on `rank.device`.

    Logits stay split over tensor-parallel ranks and over the padded vocabulary: `trainer.logprobs` takes
    them as they are. Type is the recipe's; a bf16 model keeps Mamba's A_log, D and dt_bias in float32
    once `trainer.optimizer.wrap` has wrapped it.

    Raises:
        ValueError: as `architecture`, `transformer_config` and `layers.stack_spec`.
    """
    arch, config = architecture(hf), transformer_config(hf, recipe)
    spec = stack_spec(config, arch.mixer if "M" in arch.pattern else {})
    stages = split_layers(len(arch.pattern), rank.pp_size * rank.vpp_size)
    pattern = "|".join(arch.pattern[first:stop] for first, stop in stages)
    chunks = []
    for chunk in range(rank.vpp_size):
        stage = chunk if rank.vpp_size > 1 else None
        model = HybridModel(
            config,
            spec,
            vocab_size=padded_vocabulary(arch.vocab_size, rank.tp_size),
            max_sequence_length=recipe.model.max_length,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type=arch.position,
            rotary_percent=arch.rotary_percent,
            rotary_base=arch.rotary_base,
            vp_stage=stage,
        )
        for module in model.modules():
            if type(module).__name__ == "ExtendedRMSNorm":  # the mixer's gated norm has a fixed epsilon
                module.eps = arch.mixer_norm_eps
        model.true_vocab_size = arch.vocab_size
        chunks.append(model.to(rank.device))
    return chunks
