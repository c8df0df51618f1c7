"""megatron-core's TransformerConfig for a Hugging Face config and a recipe: one function for each concern.

Every leaf of the recipe that changes how a layer computes is put in force here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_agentrl.layout.megatron import heads_pattern
from megatron_agentrl.recipe.mla_rules import latent_packing_problems, latent_topology_problems
from megatron_agentrl.recipe.mtp_rules import mtp_problems
from megatron_agentrl.recipe.schema import Dispatcher, Mtp, Recipe, Topology
from megatron_agentrl.trainer.architectures import architecture
from megatron_agentrl.trainer.precision import model_fields, recompute_fields


def transformer_config(hf: dict[str, Any], recipe: Recipe) -> TransformerConfig:
    """megatron-core's configuration for a Hugging Face config and the recipe's topology and type.

    Token normalisation is global (`calculate_per_token_loss`), the router computes in float32, there is no
    dropout and no auxiliary loss, and `moe_router_bias_update_rate` starts at 0 (the optimizer sets it).

    Raises:
        ValueError: a topology that the model cannot take, by the recipe's key.
    """
    arch, topology = architecture(hf), recipe.topology
    heads = recipe.model.mtp.train
    found = [*latent_topology_problems(topology, hf), *latent_packing_problems(recipe, hf)]
    if found := found + list(mtp_problems(recipe, hf) if heads else ()):
        raise ValueError("\n".join(found))
    latent = arch.config.get("multi_latent_attention", False)
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
        **model_fields(recipe),
        **recompute_fields(recipe),
        **experts(topology, "E" in arch.pattern or (heads and "E" in heads_pattern(hf)[0])),
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
        "tp_comm_overlap": topology.tp_comm_overlap,
        # Shapes travel with the tensors, except where megatron-core refuses that: see `micro_batches.conform`.
        "variable_seq_lengths": topology.pp > 1 and topology.dispatcher is not Dispatcher.allgather,
        # A batch of sends and receives is matched by order. With interleaved stages over two ranks an activation
        # and a gradient travel to the same peer in one batch, and megatron-core 0.19.2 would swap them.
        "overlap_p2p_comm": topology.vpp > 1,
        "batch_p2p_comm": topology.vpp == 1,
    }


def experts(topology: Topology, present: bool) -> dict[str, Any]:
    """How experts are routed and cut; for a model without any, only what megatron-core insists on."""
    if not present:
        if topology.ep > 1:
            raise ValueError(f"topology.ep={topology.ep}, but the model has no experts; set topology.ep to 1")
        # With pipeline stages it refuses its own default dispatcher, also where nothing is dispatched.
        return {"moe_token_dispatcher_type": "alltoall"}
    if topology.tp > 1 and not topology.sequence_parallel:
        raise ValueError(f"topology.tp={topology.tp} with experts needs topology.sequence_parallel=true")
    return {
        "expert_model_parallel_size": topology.ep,
        "expert_tensor_parallel_size": topology.etp,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_token_dispatcher_type": topology.dispatcher.value,
        "moe_flex_dispatcher_backend": topology.flex_backend.value,
    }


def prediction_heads(hf: dict[str, Any], mtp: Mtp) -> dict[str, Any]:
    """Multi-token-prediction heads; {} where they are not trained."""
    if not mtp.train:
        return {}
    return {
        "mtp_num_layers": heads_pattern(hf)[1],
        "mtp_loss_scaling_factor": mtp.loss_weight,
        "mtp_detach_heads": mtp.detach,
    }


def fusions() -> dict[str, bool]:
    """Fused kernels: all off."""
    names = ("persist_layer_norm", "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion",
             "masked_softmax_fusion", "apply_rope_fusion")  # fmt: skip
    return dict.fromkeys(names, False)
