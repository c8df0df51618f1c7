"""Data-parallel wrapping, the optimizer and its learning rate.

Thin over megatron-core: gradients are kept and reduced in float32, Adam's state is sharded over the
data-parallel ranks (megatron-core's distributed optimizer, which knows Adam only), SGD's is not. What the
recipe names is set here and nowhere else. Weight decay is decoupled and, as usual, not applied to
one-dimensional parameters.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import distrib_optimizer as _distrib
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_agentrl.recipe.schema import Dtype, Optimizer, Recipe, Schedule
from megatron_agentrl.trainer import loss_scale
from megatron_agentrl.trainer.data_parallel import bucket_size, ddp_config
from megatron_agentrl.trainer.precision import optimizer_fields

#: Parameters that stay in float32 in a bf16 or fp16 model: the scan's decay is an exponential of an exponential.
FLOAT32_PARAMETERS = ("A_log", "D", "dt_bias")


def learning_rate(opt: Optimizer, step: int, total: int) -> float:
    """The learning rate of 1-based step `step` of `total`.

    Step k of the warm-up uses lr * k / warmup_steps. After it the rate is constant, or falls (linear or
    half a cosine) from lr to lr * min_lr_fraction, reached exactly at the last step.

    Raises:
        ValueError: step is below 1.
    """
    if step < 1:
        raise ValueError(f"learning_rate counts steps from 1, got {step}")
    if step <= opt.warmup_steps:
        return opt.lr * step / opt.warmup_steps
    if opt.schedule == Schedule.constant:
        return opt.lr
    span = total - max(opt.warmup_steps, 1)
    done = min(1.0, (step - max(opt.warmup_steps, 1)) / span) if span > 0 else 1.0
    share = 1.0 - done if opt.schedule == Schedule.linear else 0.5 * (1.0 + math.cos(math.pi * done))
    return opt.lr * (opt.min_lr_fraction + (1.0 - opt.min_lr_fraction) * share)


def wrap(models: list[Any], opt: Optimizer, recipe: Recipe | None = None) -> list[DistributedDataParallel]:
    """Wrap model chunks for data parallelism. A model is wrapped once; `opt` says which kind of state it serves.

    `recipe` is the one the model was built from (None: the defaults with the model's own type).

    The weights of data-parallel rank 0 are copied to the others, so that all start equal.

    Raises:
        ValueError: an optimizer name other than adam or sgd, or an overlap that it does not allow.
    """
    config = get_model_config(models[0])
    recipe = recipe or _defaults(config)
    ddp = _ddp_config(opt, recipe)
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    wrapped = []
    for chunk, model in enumerate(models):
        model = in_its_type(model)
        layout = None
        if ddp.use_distributed_optimizer:
            layout = _distrib.DistributedOptimizer.compute_full_param_layout(
                [parameter for parameter in model.parameters() if parameter.requires_grad],
                bucket_size(ddp, ranks, chunk, pp_rank),
                ranks,
                ddp,
                expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
            )
        wrapped.append(
            DistributedDataParallel(config, ddp, model, disable_bucketing=chunk > 0, full_param_layout=layout)
        )
    for chunk_model in wrapped:
        chunk_model.broadcast_params()
    return wrapped


def in_its_type(model: Any) -> Any:
    """The model as it computes in its config's type: bare in fp32, else in megatron-core's wrapper for half types, with
    FLOAT32_PARAMETERS as they were."""
    config = get_model_config(model)
    if not (config.bf16 or config.fp16):
        return model
    kept = {n: p.detach().float() for n, p in model.named_parameters() if n.endswith(FLOAT32_PARAMETERS)}
    wrapped = Float16Module(config, model)
    for name, parameter in wrapped.module.named_parameters():
        if name in kept:
            parameter.data = kept[name]
    return wrapped


def _ddp_config(opt: Optimizer, recipe: Recipe) -> DistributedDataParallelConfig:
    return ddp_config(recipe, sharded=is_distributed(opt) and recipe.topology.distributed_optimizer)


def is_distributed(opt: Optimizer) -> bool:
    """Whether the optimizer has state that can be sharded over data-parallel ranks."""
    if opt.name not in ("adam", "sgd"):
        raise ValueError(f"optimizer.name={opt.name!r} is not supported; supported: adam, sgd")
    return opt.name == "adam"


def build(models: list[DistributedDataParallel], opt: Optimizer, recipe: Recipe | None = None) -> MegatronOptimizer:
    """The optimizer over wrapped chunks, from their present weights, with empty state.

    `recipe` as for `wrap`. Also sets the phase's router-bias rate: at 0 the bias is frozen and nothing is counted.

    Raises:
        ValueError: the chunks were wrapped for the other kind of optimizer state.
    """
    config = get_model_config(models[0])
    sharded = models[0].ddp_config.use_distributed_optimizer
    if sharded and not is_distributed(opt):
        raise ValueError(
            f"optimizer.name={opt.name!r} cannot follow the optimizer that this model was wrapped for; "
            f"use the same name in warm_start.optimizer and optimizer"
        )
    if (config.bf16 or config.fp16) and opt.name == "sgd":
        raise ValueError("optimizer.name='sgd' needs model.dtype=fp32: without state it keeps no float32 weights")
    settings = optimizer_config(opt, recipe or _defaults(config), models[0].ddp_config)
    if settings.optimizer_cpu_offload and not torch.cuda.is_available():
        raise ValueError(
            "memory.optimizer_offload: there is no GPU, the optimizer's state is in the host's memory already; "
            "set memory.optimizer_offload=0"
        )
    optimizer = get_megatron_optimizer(settings, models)
    if config.fp16:
        loss_scale.share(parts(optimizer), settings)
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = [chunk.no_sync for chunk in models] if len(models) > 1 else models[0].no_sync
    set_router_bias_rate(models, opt.router_bias_rate)
    for part in parts(optimizer):
        _complete(part)
    return optimizer


def optimizer_config(
    opt: Optimizer, recipe: Recipe, ddp: DistributedDataParallelConfig | None = None
) -> OptimizerConfig:
    """megatron-core's configuration of one phase's optimizer, over models that were wrapped by `ddp` (None: by the
    settings that `wrap` takes from the same arguments).

    Raises:
        RuntimeError: types of state that megatron-core keeps with Transformer Engine only (in its own words).
    """
    ddp = ddp or _ddp_config(opt, recipe)
    return OptimizerConfig(
        optimizer=opt.name,
        lr=opt.lr,
        min_lr=0.0,
        weight_decay=opt.weight_decay,
        adam_beta1=opt.beta1,
        adam_beta2=opt.beta2,
        adam_eps=opt.eps,
        sgd_momentum=0.0,
        clip_grad=opt.clip_grad,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
        **optimizer_fields(recipe),
    )


def _defaults(config: TransformerConfig) -> Recipe:
    """A recipe of defaults with the type that a model was built in."""
    recipe = Recipe()
    recipe.model.dtype = Dtype.bf16 if config.bf16 else Dtype.fp16 if config.fp16 else Dtype.fp32
    return recipe


def apply_prepared(optimizer: Any) -> bool:
    """Clip and apply the gradients that `optimizer.prepare_grads()` left; whether they were applied. Collective.

    megatron-core's `step` prepares them itself, which a caller who has looked at the norm before must not let happen
    again: in fp16 it divides them by the loss scale, and float32 gradients in the buffer that they were summed in. Adam
    hides such a second division, the clipping and `eps` do not.
    """
    optimizer.prepare_grads = lambda: False
    try:
        applied, _, _ = optimizer.step()
    finally:
        del optimizer.prepare_grads  # the class's own again
    return bool(applied)


def parts(optimizer: Any) -> list[Any]:
    """The optimizers inside: one for dense parameters and one for experts under expert parallelism."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's (or Transformer Engine's) own inside `parts`; a rank may hold no parameter of a part, which then has none."""
    return [part.optimizer for part in parts(optimizer) if getattr(part, "optimizer", None) is not None]


def _complete(part: Any) -> None:
    """Fill a gap of megatron-core 0.19.2 that shows when the optimizer's state is saved or loaded."""
    if isinstance(part, _distrib.DistributedOptimizer):
        # A group's parameters stand with the float32 ones first; the index that checkpoints go by keeps the order of
        # the buffers. In a half-precision model with float32 parameters the state of one would be another's.
        for group, ranges in enumerate(part.opt_group_ranges):
            for position, parameter in enumerate(sorted(ranges["params"], key=lambda p: p.dtype != torch.float32)):
                part.model_param_group_index_map[parameter] = (group, position)


def set_learning_rate(optimizer: Any, lr: float) -> None:
    """Set the rate of all parameter groups for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_router_bias_rate(models: list[Any], rate: float) -> None:
    """Set the step of the aux-loss-free bias update; 0 freezes the bias and stops counting."""
    get_model_config(models[0]).moe_router_bias_update_rate = rate
    for router in routers(models):
        router.frozen_expert_bias = rate == 0.0


def routers(models: list[Any]) -> list[Any]:
    """Routers with an expert bias, in layer order."""
    return [
        module
        for chunk in models
        for module in get_attr_wrapped_model(chunk, "modules")()
        if getattr(module, "expert_bias", None) is not None
    ]
