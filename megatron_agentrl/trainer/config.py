"""megatron-core's TransformerConfig for a Hugging Face config and a recipe: one function for each concern.

Every leaf of the recipe that changes how a layer computes is put in force here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_agentrl.layout.megatron import heads_pattern
from megatron_agentrl.recipe.schema import Dtype, Mtp, Recipe, Topology
from megatron_agentrl.trainer.architectures import architecture


def transformer_config(hf: dict[str, Any], recipe: Recipe) -> TransformerConfig:
    """megatron-core's configuration for a Hugging Face config and the recipe's topology and type.

    Token normalisation is global (`calculate_per_token_loss`), the router computes in float32, there is no
    dropout and no auxiliary loss, and `moe_router_bias_update_rate` starts at 0 (the optimizer sets it).

    Raises:
        ValueError: a topology that the model cannot take, by the recipe's key.
    """
    arch, topology = architecture(hf), recipe.topology
    if topology.cp > 1:
        raise ValueError(f"topology.cp={topology.cp}: the step does not cut sequences yet; set topology.cp to 1")
    latent = arch.config.get("multi_latent_attention", False)
    if latent and topology.tp > 1 and not topology.sequence_parallel:
        raise ValueError(f"topology.tp={topology.tp} with latent attention needs topology.sequence_parallel=true")
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=len(arch.pattern),
        hidden_size=hf["hidden_size"],
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        **parallelism(topology),
        **precision(recipe),
        **experts(topology, "E" in arch.pattern),
        **fusions(),
        **prediction_heads(hf, recipe.model.mtp),
        **arch.config,
    )


def parallelism(topology: Topology) -> dict[str, Any]:
    """How the model is cut over ranks."""
    return {
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
        "context_parallel_size": topology.cp,
        "sequence_parallel": topology.sequence_parallel,
        "variable_seq_lengths": topology.pp > 1,
    }


def precision(recipe: Recipe) -> dict[str, Any]:
    """The types that layers compute and communicate in."""
    dtype = torch.bfloat16 if recipe.model.dtype == Dtype.bf16 else torch.float32
    return {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16}


def experts(topology: Topology, present: bool) -> dict[str, Any]:
    """How experts are routed and cut; {} for a model without any."""
    if not present:
        if topology.ep > 1:
            raise ValueError(f"topology.ep={topology.ep}, but the model has no experts; set topology.ep to 1")
        return {}
    if topology.tp > 1 and not topology.sequence_parallel:
        raise ValueError(f"topology.tp={topology.tp} with experts needs topology.sequence_parallel=true")
    return {
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": "alltoall",
    }


def prediction_heads(hf: dict[str, Any], mtp: Mtp) -> dict[str, Any]:
    """Multi-token-prediction heads; {} where they are not trained. Raises ValueError for a model without any."""
    if not mtp.train:
        return {}
    count = heads_pattern(hf)[1]
    if not count:
        raise ValueError("model.mtp.train=true, but the model has no prediction heads; set model.mtp.train=false")
    return {"mtp_num_layers": count, "mtp_loss_scaling_factor": mtp.loss_weight, "mtp_detach_heads": mtp.detach}


def fusions() -> dict[str, bool]:
    """Fused kernels: all off."""
    names = ("persist_layer_norm", "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion",
             "masked_softmax_fusion", "apply_rope_fusion")  # fmt: skip
    return dict.fromkeys(names, False)
