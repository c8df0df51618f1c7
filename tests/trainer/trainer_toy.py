"""Tiny models and batches for the trainer's tests. Every dimension is different, so that a wrong axis shows."""

from __future__ import annotations

import torch

from megatron_agentrl.recipe.schema import Optimizer, Recipe, Topology
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.batch import MicroBatch
from megatron_agentrl.trainer.topology import Rank

NEMOTRON = {
    "model_type": "nemotron_h", "vocab_size": 101, "hidden_size": 40, "hybrid_override_pattern": "M*EM-E", "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 52, "ssm_state_size": 16, "mamba_head_dim": 14, "mamba_num_heads": 6,
    "n_groups": 2, "conv_kernel": 4, "chunk_size": 8, "n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 12, "intermediate_size": 52, "num_experts": 12, "num_experts_per_tok": 3,
    "moe_intermediate_size": 28, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LATENT = NEMOTRON | {"moe_latent_size": 24}
LLAMA = {
    "model_type": "llama", "vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 52, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
DENSE = LLAMA | {"model_type": "qwen3", "rope_parameters": None, "rope_theta": 1e6, "tie_word_embeddings": True}
#: The two that every parallel case runs on, and those that run where their architecture matters.
MODELS = {"nemotron": NEMOTRON, "qwen": QWEN}
FURTHER = {"latent": LATENT, "llama": LLAMA, "qwen3": DENSE}
#: Eight Mamba heads, for tensor-parallel ranks that share theirs once more over context-parallel ones.
OTHERS = {"wide": NEMOTRON | {"mamba_num_heads": 8}}

LENGTHS = (9, 7, 5, 11, 4, 8)
TOKENS = float(sum(LENGTHS) - len(LENGTHS))
SGD = Optimizer(name="sgd", lr=0.1, clip_grad=0.0)
ADAM = Optimizer(name="adam", lr=1e-2, clip_grad=1.0, weight_decay=0.01, router_bias_rate=1e-3)


def rows(which: tuple[int, ...] | list[int]) -> MicroBatch:
    """Some of the six rows, right-padded; row i is the same in every grouping. All tokens but the first train."""
    if not which:
        return MicroBatch(torch.zeros(0, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {})
    length = max(LENGTHS[i] for i in which)
    ids, mask = torch.zeros(len(which), length, dtype=torch.int64), torch.zeros(len(which), length)
    for at, i in enumerate(which):
        generator = torch.Generator().manual_seed(1000 + i)
        ids[at, : LENGTHS[i]] = torch.randint(0, 101, (LENGTHS[i],), generator=generator)
        mask[at, 1 : LENGTHS[i]] = 1.0
    return MicroBatch(ids, torch.tensor([LENGTHS[i] for i in which]), {"mask": mask})


def negative_logprob(logprobs_BT: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mask = batch.columns["mask"]
    return -(logprobs_BT * mask).sum(), {"tokens": mask.sum()}


def recipe(topology_: Topology | None = None, packing: bool = False) -> Recipe:
    made = Recipe()
    made.topology, made.train.packing = topology_ or Topology(), packing
    return made


def build(name: str, rank: Rank, opt: Optimizer, topology_: Topology | None = None, packing: bool = False):
    """(wrapped chunks, optimizer) of a toy model with seed 3."""
    topology.seed_everything(3)
    made = recipe(topology_, packing)
    chunks = optimizer.wrap(model.build((MODELS | FURTHER | OTHERS)[name], made, rank), opt, made)
    return chunks, optimizer.build(chunks, opt, made)
