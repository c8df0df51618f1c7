"""The recipe's `precision` and `memory` sections in megatron-core's words.

Four dicts, one for each of megatron-core's configurations: the layers (TransformerConfig), data parallelism
(DistributedDataParallelConfig) and the optimizer (OptimizerConfig). What is legal where is `recipe.precision_rules`
and `recipe.memory_rules`; here a value that cannot be put in force on this machine still raises, because a model
can be built without the command line.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.quantization.quant_config import RecipeConfig

from megatron_agentrl.recipe.precision_rules import FP8_LIMITS, names, precision_aware
from megatron_agentrl.recipe.schema import Dtype, Fp8Recipe, GradientDtype, MasterDtype, MomentDtype, Recipe, Recompute

TORCH_DTYPE = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16, Dtype.fp16: torch.float16}

_GRADIENTS = {GradientDtype.fp32: torch.float32, GradientDtype.bf16: torch.bfloat16}
_MASTERS = {MasterDtype.fp32: torch.float32, MasterDtype.fp16: torch.float16}
_MOMENTS = {
    MomentDtype.fp32: torch.float32,
    MomentDtype.bf16: torch.bfloat16,
    MomentDtype.fp16: torch.float16,
    MomentDtype.fp8: torch.uint8,  # Transformer Engine's Adam stores scaled FP8 as bytes
}

#: Kind of linear -> its modules' names in megatron-core's hybrid model.
_MODULE_PATTERNS = {
    "mamba": "*.mixer.*",
    "attention": "*.self_attention.*",
    "mlp": "*.mlp.linear_fc[12]",
    "experts": "*.mlp.experts.*",
    "shared_experts": "*.mlp.shared_experts.*",
    "latent": "*.mlp.fc[12]_latent_proj",
}


def model_fields(recipe: Recipe) -> dict[str, Any]:
    """TransformerConfig: the type of parameters and activations, and FP8."""
    dtype = TORCH_DTYPE[recipe.model.dtype]
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        **_fp8_fields(recipe),
    }


def _fp8_fields(recipe: Recipe) -> dict[str, Any]:
    precision = recipe.precision
    if precision.fp8 is None:
        return {}
    return {
        "fp8": precision.fp8.value,
        "fp8_recipe": precision.fp8_recipe.value,
        "fp8_param": precision.fp8_param_gather,
        "fp8_amax_history_len": precision.fp8_amax_history,
        "fp8_amax_compute_algo": precision.fp8_amax_algorithm.value,
        "fp8_margin": precision.fp8_margin,
        "tp_only_amax_red": precision.fp8_amax_tp_only,
        "fp8_wgrad": precision.fp8_weight_gradient,
        "fp8_dot_product_attention": precision.fp8_attention,
        "fp8_output_proj": precision.fp8_head,
        "first_last_layers_bf16": precision.bf16_first_layers + precision.bf16_last_layers > 0,
        "num_layers_at_start_in_bf16": precision.bf16_first_layers,
        "num_layers_at_end_in_bf16": precision.bf16_last_layers,
        "quant_recipe": kept_in_bf16(names(precision.bf16_modules)),
    }


def kept_in_bf16(kinds: list[str]) -> RecipeConfig | None:
    """megatron-core's per-module quantization that leaves these kinds of linears out of FP8; None for no kinds.

    A module that matches gets a recipe without any format, which turns the layer's FP8 off inside it.
    """
    if not kinds:
        return None
    bf16 = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    matchers = {
        kind: {"type": "glob", "pattern": _MODULE_PATTERNS[kind], "config": "bf16", "enabled": True} for kind in kinds
    }
    return RecipeConfig.from_config_dict({"configs": {"bf16": bf16}, "matchers": matchers})


def recompute_fields(recipe: Recipe) -> dict[str, Any]:
    """TransformerConfig: which activations are computed again in the backward pass."""
    memory = recipe.memory
    if memory.recompute is None:
        return {}
    if memory.recompute is Recompute.full:
        return {
            "recompute_granularity": "full",
            "recompute_method": memory.recompute_method.value,
            "recompute_num_layers": memory.recompute_layers,
        }
    return {"recompute_granularity": "selective", "recompute_modules": names(memory.recompute_modules)}


def ddp_fields(recipe: Recipe) -> dict[str, Any]:
    """DistributedDataParallelConfig: the type of gradients, and FP8 weights in the parameter buffer."""
    precision = recipe.precision
    gather = precision.fp8 is not None and precision.fp8_param_gather
    return {
        "grad_reduce_in_fp32": precision.gradients is GradientDtype.fp32,
        "fp8_param_gather": gather,
        # MXFP8 weights have two forms and no room in the parameter buffer: the gradients' buffer carries them.
        "reuse_grad_buf_for_mxfp8_param_ag": gather and precision.fp8_recipe is Fp8Recipe.mxfp8,
    }


def optimizer_fields(recipe: Recipe) -> dict[str, Any]:
    """OptimizerConfig: types of parameters, masters and moments, fp16's scaling, the part on the host.

    Raises:
        ValueError: an offload where there is no GPU to move anything from.
    """
    precision, memory = recipe.precision, recipe.memory
    dtype = TORCH_DTYPE[recipe.model.dtype]
    fields: dict[str, Any] = {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }
    if dtype is torch.float16:
        fields |= {
            "initial_loss_scale": precision.loss_scale,
            "min_loss_scale": precision.loss_scale_min,
            "loss_scale_window": precision.loss_scale_window,
            "hysteresis": 1,  # an overflowing step is repeated at once, which is of use at a lower scale only
        }
    if precision.fp8 is not None:
        fields |= {
            "fp8_recipe": precision.fp8_recipe.value,
            "reuse_grad_buf_for_mxfp8_param_ag": ddp_fields(recipe)["reuse_grad_buf_for_mxfp8_param_ag"],
        }
    # The host part of the optimizer goes by the same path in megatron-core as state in lower types.
    if precision_aware(precision) or memory.optimizer_offload:
        fields |= {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": _GRADIENTS[precision.gradients],
            "main_params_dtype": _MASTERS[precision.masters],
            "exp_avg_dtype": _MOMENTS[precision.exp_avg],
            "exp_avg_sq_dtype": _MOMENTS[precision.exp_avg_sq],
        }
    if memory.optimizer_offload:
        fields |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": memory.optimizer_offload,
            "overlap_cpu_optimizer_d2h_h2d": memory.optimizer_offload_overlap,
        }
    return fields


def token_multiple(config: Any) -> int:
    """What the tokens of a micro-batch must be a multiple of: the side of an FP8 block, 1 without FP8."""
    return FP8_LIMITS[Fp8Recipe(getattr(config.fp8_recipe, "value", config.fp8_recipe))].block if config.fp8 else 1
