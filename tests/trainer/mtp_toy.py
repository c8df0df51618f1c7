"""Tiny models with multi-token-prediction heads, and how the tests build and step them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import trainer_toy as toy

from megatron_agentrl.recipe.schema import Mtp, Optimizer, Recipe, Topology
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.random_init import random_tensors
from megatron_agentrl.trainer.topology import Rank

DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "first_k_dense_replace": 1, "intermediate_size": 52, "n_routed_experts": 12,
    "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 28,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip
#: Two heads, each of two layers.
NEMOTRON = toy.NEMOTRON | {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
MODELS = {"deepseek": DEEPSEEK, "nemotron": NEMOTRON}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 1.2,
}  # fmt: skip


def recipe(topology_: Topology | None = None, **mtp: object) -> Recipe:
    """A recipe that trains the heads; `mtp` changes leaves of model.mtp."""
    made = toy.recipe(topology_)
    made.model.mtp = Mtp(**{"train": True, "loss_weight": 0.3} | mtp)  # type: ignore[arg-type]
    return made


def build(
    name: str, rank: Rank, opt: Optimizer, topology_: Topology | None = None, packing: bool = False, **mtp: object
):
    """(wrapped chunks, optimizer) of a toy model with seed 3; the trunk's weights do not depend on the heads."""
    topology.seed_everything(3)
    made = recipe(topology_, **mtp)
    made.train.packing = packing
    chunks = optimizer.wrap(model.build(MODELS[name], made, rank), opt, made)
    return chunks, optimizer.build(chunks, opt, made)


def scattered(hf: dict, heads: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Random tensors in which norms and router biases differ from their neutral values."""
    generator = torch.Generator().manual_seed(9)
    for name, tensor in random_tensors(hf, seed=4, heads=heads):
        spread = 0.3 * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            yield name, tensor * 4
        else:
            yield name, spread if "e_score_correction_bias" in name else tensor + spread
