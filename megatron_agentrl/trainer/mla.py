"""Multi-head latent attention (MLA) where megatron-core's own classes do not do: two small subclasses.

They serve the local build and the Transformer Engine build alike, so that both have the same parameter names. No
configuration is read here beyond what megatron-core's MLATransformerConfig says.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import divide

from megatron_agentrl.trainer.attention import LocalCoreAttention


class LatentCoreAttention(LocalCoreAttention):
    """Local attention, padded or packed, whose values may be narrower than its keys; megatron-core's takes neither width.

    MLA's base class builds one without widths first, and MLA then replaces it.
    """

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            heads, ranks = self.config.num_attention_heads, self.pg_collection.tp.size()
            self.hidden_size_per_partition = divide(v_channels * heads, ranks)


class LatentSelfAttention(MLASelfAttention):
    """megatron-core's MLA, with the modules of its specification built as they stand.

    Two things differ from 0.19.2. It takes a norm fused into an up projection only from Transformer Engine, and then
    also puts one before the plain query projection of models without a query latent, where checkpoints have none. And
    with column-parallel down projections it hands every rank the whole rotary key without summing its gradient, to
    which each rank adds only what its own heads give.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": IdentityOp,
        }

    def _qkv_down_projection(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [s / TP, b, h] -> (query latent, key-value latent and rotary key), whole in their last dimension and
        cut along the sequence, as the replicated projection gives them; megatron-core goes on from there."""
        q_SBR, kv_SBR = super()._qkv_down_projection(hidden_states)
        if kv_SBR.size(-1) != self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            kv_SBR = gather_from_tensor_model_parallel_region(kv_SBR, group=self.tp_group)
            kv_SBR = scatter_to_sequence_parallel_region(kv_SBR, group=self.tp_group)
        return q_SBR, kv_SBR


def whole_latents(stack: ModuleSpec) -> bool:
    """Whether every tensor-parallel rank holds the down projections whole, from the classes that the stack names."""
    layer = stack.submodules.mla_layer
    if not isinstance(layer, ModuleSpec):
        return False
    return not issubclass(layer.submodules.self_attention.submodules.linear_kv_down_proj, ColumnParallelLinear)
