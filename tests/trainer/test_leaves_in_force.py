"""Every leaf that shapes the trainer is read back from megatron-core's own configuration.

What is only constructed here and runs nowhere without a GPU: all `precision.fp8*` and `bf16_*` leaves, masters and
moments below fp32, the offload. megatron-core's configurations accept them without Transformer Engine, except FP8 in
a model with experts, which is shown with its refusal.
"""

from __future__ import annotations

import pytest
import torch
import trainer_toy as toy
from megatron.core.quantization.quant_config import MatchContext
from megatron.core.transformer import TransformerConfig

from megatron_agentrl.recipe.leaves import get, leaves
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.recipe.values import parse
from megatron_agentrl.trainer.config import transformer_config
from megatron_agentrl.trainer.data_parallel import ddp_config
from megatron_agentrl.trainer.optimizer import optimizer_config
from megatron_agentrl.trainer.precision import ddp_fields

HF = toy.NEMOTRON | {"hybrid_override_pattern": "M*-M*-"}  # FP8 with experts asks for Transformer Engine's version
FP8 = "precision.fp8=hybrid model.dtype=bf16"
OFFLOAD = "memory.optimizer_offload=0.5 model.dtype=bf16"  # with it megatron-core takes other types without TE
TP2 = "topology.tp=2 topology.world=2"

#: leaf -> (its override, what it needs beside it, which configuration, field, value read back)
CASES: dict[str, tuple[str, str, str, str, object]] = {
    "model.dtype": ("fp16", "", "model", "fp16", True),
    "topology.tp": ("2", "topology.world=2", "model", "tensor_model_parallel_size", 2),
    "topology.pp": ("2", "experts topology.world=2", "model", "pipeline_model_parallel_size", 2),
    "topology.vpp": ("3", "experts topology.pp=2", "model", "virtual_pipeline_model_parallel_size", 3),
    "topology.ep": ("2", "experts topology.world=2", "model", "expert_model_parallel_size", 2),
    "topology.etp": ("2", "experts topology.world=2", "model", "expert_tensor_parallel_size", 2),
    "topology.sequence_parallel": ("true", TP2, "model", "sequence_parallel", True),
    "topology.cp": ("2", "topology.world=2", "model", "context_parallel_size", 2),
    "topology.dispatcher": ("allgather", "experts", "model", "moe_token_dispatcher_type", "allgather"),
    "topology.flex_backend": ("hybridep", "experts", "model", "moe_flex_dispatcher_backend", "hybridep"),
    "topology.tp_comm_overlap": ("true", TP2 + " topology.sequence_parallel=true", "model", "tp_comm_overlap", True),
    "topology.distributed_optimizer": ("false", "", "ddp", "use_distributed_optimizer", False),
    "topology.overlap_grad_reduce": ("true", "", "ddp", "overlap_grad_reduce", True),
    "topology.overlap_param_gather": ("true", "topology.overlap_grad_reduce=true", "ddp", "overlap_param_gather", True),
    "topology.bucket_size": ("9", "topology.overlap_grad_reduce=true", "ddp", "bucket_size", 9),
    "precision.fp8": ("e4m3", "model.dtype=bf16", "model", "fp8", "e4m3"),
    "precision.fp8_recipe": ("blockwise", FP8, "model", "fp8_recipe", "blockwise"),
    "precision.fp8_param_gather": ("true", FP8, "model", "fp8_param", True),
    "precision.fp8_amax_history": ("16", FP8, "model", "fp8_amax_history_len", 16),
    "precision.fp8_amax_algorithm": ("most_recent", FP8, "model", "fp8_amax_compute_algo", "most_recent"),
    "precision.fp8_margin": ("2", FP8, "model", "fp8_margin", 2),
    "precision.fp8_amax_tp_only": ("true", FP8, "model", "tp_only_amax_red", True),
    "precision.fp8_weight_gradient": ("false", FP8, "model", "fp8_wgrad", False),
    "precision.fp8_attention": ("true", FP8, "model", "fp8_dot_product_attention", True),
    "precision.fp8_head": ("true", FP8 + " precision.fp8_recipe=mxfp8", "model", "fp8_output_proj", True),
    "precision.bf16_first_layers": ("2", FP8, "model", "num_layers_at_start_in_bf16", 2),
    "precision.bf16_last_layers": ("1", FP8, "model", "num_layers_at_end_in_bf16", 1),
    "precision.bf16_modules": ("mamba", FP8, "model", "quant_recipe.matchers.0.pattern", "*.mixer.*"),
    "precision.gradients": ("bf16", "model.dtype=bf16", "ddp", "grad_reduce_in_fp32", False),
    "precision.masters": ("fp16", OFFLOAD, "optimizer", "main_params_dtype", torch.float16),
    "precision.exp_avg": ("fp8", OFFLOAD, "optimizer", "exp_avg_dtype", torch.uint8),
    "precision.exp_avg_sq": ("bf16", OFFLOAD, "optimizer", "exp_avg_sq_dtype", torch.bfloat16),
    "precision.loss_scale": ("64", "model.dtype=fp16", "optimizer", "initial_loss_scale", 64.0),
    "precision.loss_scale_min": ("2", "model.dtype=fp16", "optimizer", "min_loss_scale", 2.0),
    "precision.loss_scale_window": ("7", "model.dtype=fp16", "optimizer", "loss_scale_window", 7),
    "memory.recompute": ("full", "", "model", "recompute_granularity", "full"),
    "memory.recompute_method": ("block", "memory.recompute=full", "model", "recompute_method", "block"),
    "memory.recompute_layers": ("2", "memory.recompute=full", "model", "recompute_num_layers", 2),
    "memory.recompute_modules": ("mlp,core_attn", "memory.recompute=selective", "model", "recompute_modules", ["mlp", "core_attn"]),
    "memory.optimizer_offload": ("0.25", "", "optimizer", "optimizer_offload_fraction", 0.25),
    "memory.optimizer_offload_overlap": ("false", OFFLOAD, "optimizer", "overlap_cpu_optimizer_d2h_h2d", False),
    "optimizer.name": ("sgd", "", "optimizer", "optimizer", "sgd"),
    "optimizer.lr": ("0.5", "", "optimizer", "lr", 0.5),
    "optimizer.beta1": ("0.5", "", "optimizer", "adam_beta1", 0.5),
    "optimizer.beta2": ("0.5", "", "optimizer", "adam_beta2", 0.5),
    "optimizer.eps": ("0.5", "", "optimizer", "adam_eps", 0.5),
    "optimizer.weight_decay": ("0.5", "", "optimizer", "weight_decay", 0.5),
    "optimizer.clip_grad": ("0.5", "", "optimizer", "clip_grad", 0.5),
}  # fmt: skip

#: Leaves of the same sections that megatron-core's configurations do not hold, and where they are in force instead.
ELSEWHERE = {
    "topology.world": "trainer.topology.init compares it with WORLD_SIZE",
    "topology.threads": "torch.set_num_threads in trainer.topology.init",
    "topology.first_stage_layers": "layout.megatron.split_layers, asked by trainer.model",
    "topology.last_stage_layers": "layout.megatron.split_layers, asked by trainer.model",
    "precision.compute_capability": "recipe.precision_rules compares it with what the FP8 recipe needs",
    "optimizer.schedule": "trainer.optimizer.learning_rate",
    "optimizer.warmup_steps": "trainer.optimizer.learning_rate",
    "optimizer.min_lr_fraction": "trainer.optimizer.learning_rate",
    "optimizer.router_bias_rate": "trainer.optimizer.set_router_bias_rate",
}


def made(*overrides: str) -> Recipe:
    recipe = Recipe()
    for override in " ".join(overrides).split():
        key, _, text = override.partition("=")
        section, _, name = key.rpartition(".")
        setattr(get(recipe, section), name, parse(leaves()[key], text))
    return recipe


def read(recipe: Recipe, where: str, field: str, hf: dict = HF):
    found = {
        "model": lambda: vars(transformer_config(hf, recipe)),
        "ddp": lambda: vars(ddp_config(recipe, sharded=recipe.topology.distributed_optimizer)),
        "optimizer": lambda: vars(optimizer_config(recipe.optimizer, recipe)),
    }[where]()
    first, *path = field.split(".")
    value = found[first]
    for step in path:
        value = value[int(step)] if step.isdigit() else getattr(value, step, None)
    return value


def test_every_leaf_of_the_trainers_sections_has_its_place():
    sections = ("topology.", "precision.", "memory.", "optimizer.")
    wanted = {key for key in leaves() if key.startswith(sections)} | {"model.dtype"}
    assert wanted == set(CASES) | set(ELSEWHERE)
    assert not set(CASES) & set(ELSEWHERE)


@pytest.mark.parametrize("key", CASES)
def test_a_leaf_is_read_back_from_megatron_cores_configuration(key):
    text, beside, where, field, want = CASES[key]
    hf = toy.NEMOTRON if beside.startswith("experts") else HF
    beside = beside.removeprefix("experts")
    assert read(made(beside, f"{key}={text}"), where, field, hf) == want
    if "." not in field:
        assert read(made(beside), where, field, hf) != want  # so that the case cannot pass by the default


def test_fp8_reaches_all_three_configurations():
    recipe = made(FP8, "precision.fp8_recipe=mxfp8 precision.fp8_param_gather=true")
    fields = ddp_fields(recipe)
    assert fields["fp8_param_gather"] and fields["reuse_grad_buf_for_mxfp8_param_ag"]
    settings = optimizer_config(recipe.optimizer, recipe)
    assert settings.fp8_recipe == "mxfp8" and settings.reuse_grad_buf_for_mxfp8_param_ag
    tensorwise = made(FP8, "precision.fp8_param_gather=true")
    assert ddp_fields(tensorwise)["fp8_param_gather"]
    assert not ddp_fields(tensorwise)["reuse_grad_buf_for_mxfp8_param_ag"]


@pytest.mark.parametrize(
    ("kept", "inside", "outside"),
    [
        ("mamba", "decoder.layers.0.mixer.in_proj", "decoder.layers.1.self_attention.linear_qkv"),
        ("attention", "decoder.layers.1.self_attention.linear_proj", "decoder.layers.0.mixer.out_proj"),
        ("mlp", "decoder.layers.2.mlp.linear_fc1", "decoder.layers.2.mlp.experts.linear_fc1"),
        ("experts", "decoder.layers.2.mlp.experts.linear_fc2", "decoder.layers.2.mlp.shared_experts.linear_fc2"),
        ("shared_experts", "decoder.layers.2.mlp.shared_experts.linear_fc1", "decoder.layers.2.mlp.linear_fc1"),
        ("latent", "decoder.layers.2.mlp.fc1_latent_proj", "decoder.layers.2.mlp.experts.linear_fc1"),
    ],
)
def test_kinds_kept_in_bf16_match_their_own_modules_only(kept, inside, outside):
    config: TransformerConfig = transformer_config(HF, made(FP8, f"precision.bf16_modules={kept}"))
    found = config.quant_recipe.match(MatchContext(inside, 0))
    assert found.config == {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    assert config.quant_recipe.match(MatchContext(outside, 0)) is None


def test_what_megatron_core_refuses_without_transformer_engine_is_said_in_its_words():
    with pytest.raises(
        ValueError, match="transformer-engine>=1.7.0 supports MoE FP8 training, but your version is 0.0.0"
    ):
        transformer_config(toy.NEMOTRON, made(FP8))
    with pytest.raises(RuntimeError, match="requires FusedAdam from TransformerEngine"):
        optimizer_config(Recipe().optimizer, made("model.dtype=bf16 precision.exp_avg=bf16"))
    with pytest.raises(ValueError, match="Delayed scaling does not support first / last layer in BF16"):
        transformer_config(HF, made(FP8, "precision.fp8_recipe=delayed precision.bf16_first_layers=1"))
    with pytest.raises(ValueError, match="fp8_output_proj requires fp8_recipe='mxfp8'"):
        transformer_config(HF, made(FP8, "precision.fp8_head=true"))
