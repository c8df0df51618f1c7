"""The layer specification of the hybrid model: megatron-core's own with Transformer Engine, local ones without.

Both give the same parameter names and the same distributed-checkpoint keys, so that a checkpoint written on
a laptop loads on a cluster. Transformer Engine puts the norm before a column-parallel linear inside that
linear (`linear_fc1.layer_norm_weight`); `NormColumnParallelLinear` does the same with torch. Also here:
the router that leaves padding out of the expert-bias counts. No model configuration is read here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TENorm,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as te_stack_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_agentrl.trainer.attention import LocalCoreAttention
from megatron_agentrl.trainer.latent_experts import LocalMoELayer
from megatron_agentrl.trainer.mla import LatentCoreAttention, LatentSelfAttention
from megatron_agentrl.trainer.mtp import PredictionHead


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that megatron-core sums its gradient over ranks that share a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NormColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear with the RMSNorm of its input inside, named as Transformer Engine names it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        device = self.weight.device
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """input_ [..., input_size]; returns (output, bias) as ColumnParallelLinear does."""
        normed = F.rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class Router(TopKRouter):
    """megatron-core's router, with the expert-bias counts of the tokens that are really there.

    0.19.2 combines the mask [tokens] with the routing map [tokens, experts] as if both had the same last
    dimension, so a padding mask cannot be used with the expert bias. Padding must not count: it would make
    the bias depend on how rows are grouped into micro-batches. A frozen bias counts nothing.
    """

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if not self.enable_expert_bias or self.frozen_expert_bias or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask.reshape(-1, 1)
            self.local_tokens_per_expert += routing_map.sum(dim=0)


class LocalHybridStack(HybridStack):
    """HybridStack builds its final norm from Transformer Engine by name; this one builds torch's."""

    def __init__(self, config: TransformerConfig, submodules: HybridStackSubmodules, **kwargs: Any) -> None:
        wanted = kwargs.pop("post_layer_norm", True)
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = wanted
        if self.post_process and wanted:
            self.final_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)


def _local_moe() -> Any:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def shared_experts(*, config: Any, pg_collection: Any, gate: bool, name: str | None = None) -> SharedExpertMLP:
        return SharedExpertMLP(config=config, submodules=linears, gate=gate, pg_collection=pg_collection, name=name)

    return partial(
        LocalMoELayer,
        submodules=MoESubmodules(
            experts=partial(SequentialMLP, submodules=linears), shared_experts=shared_experts, router=Router
        ),
    )


def _prediction_heads(norm: Any, linear: Any) -> ModuleSpec:
    """Multi-token-prediction heads; their inner layers are the stack's own."""
    parts = MultiTokenPredictionLayerSubmodules(enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=linear)
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules([ModuleSpec(module=PredictionHead, submodules=parts)]),
    )


def local_stack_spec(mixer: dict[str, Any]) -> ModuleSpec:
    """The hybrid stack on torch layers: M Mamba-2, * attention, E mixture of experts, - MLP, + latent attention.

    Args:
        mixer: further keyword arguments of MambaMixer (convolution width, chunk size).
    """
    return ModuleSpec(
        module=LocalHybridStack,
        submodules=HybridStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        params=mixer,
                        submodules=MambaMixerSubmodules(in_proj=NormColumnParallelLinear, out_proj=RowParallelLinear),
                    ),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    self_attention=ModuleSpec(
                        module=SelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=SelfAttentionSubmodules(
                            linear_qkv=NormColumnParallelLinear,
                            core_attention=LocalCoreAttention,
                            linear_proj=RowParallelLinear,
                            q_layernorm=RMSNorm,
                            k_layernorm=RMSNorm,
                        ),
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mla_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm,
                    self_attention=ModuleSpec(
                        module=LatentSelfAttention,
                        params={"attn_mask_type": AttnMaskType.causal},
                        submodules=MLASelfAttentionSubmodules(
                            linear_q_proj=ColumnParallelLinear,
                            linear_q_down_proj=ColumnParallelLinear,
                            linear_q_up_proj=NormColumnParallelLinear,
                            linear_kv_down_proj=ColumnParallelLinear,
                            linear_kv_up_proj=NormColumnParallelLinear,
                            core_attention=LatentCoreAttention,
                            linear_proj=RowParallelLinear,
                            q_layernorm=IdentityOp,
                            kv_layernorm=IdentityOp,
                        ),
                    ),
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    mlp=partial(
                        MLP.as_mlp_submodule,
                        submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear),
                    ),
                    mlp_bda=get_bias_dropout_add,
                ),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=RMSNorm, mlp=_local_moe(), mlp_bda=get_bias_dropout_add
                ),
            ),
            mtp_block_spec=_prediction_heads(RMSNorm, ColumnParallelLinear),
        ),
    )


def _transformer_engine_spec(config: TransformerConfig, mixer: dict[str, Any]) -> ModuleSpec:
    """megatron-core's tree with this mixer, router, latent attention, prediction heads, and q and k norms as configured."""
    stack = te_stack_spec.submodules
    mamba, attention, latent, experts = stack.mamba_layer, stack.attention_layer, stack.mla_layer, stack.moe_layer

    def within(layer: ModuleSpec, **changed: Any) -> ModuleSpec:
        return replace(layer, submodules=replace(layer.submodules, **changed))

    mamba = within(mamba, mixer=replace(mamba.submodules.mixer, params=mixer))
    if config.qk_layernorm:
        inner = within(attention.submodules.self_attention, q_layernorm=TENorm, k_layernorm=TENorm)
        attention = within(attention, self_attention=inner)
    build = experts.submodules.mlp
    router = partial(build.func, submodules=replace(build.keywords["submodules"], router=Router))
    experts = within(experts, mlp=router)
    up = TELayerNormColumnParallelLinear
    inner = within(latent.submodules.self_attention, linear_q_up_proj=up, linear_kv_up_proj=up)
    latent = within(latent, self_attention=replace(inner, module=LatentSelfAttention))
    return within(
        te_stack_spec,
        mamba_layer=mamba,
        attention_layer=attention,
        mla_layer=latent,
        moe_layer=experts,
        mtp_block_spec=_prediction_heads(TENorm, TEColumnParallelLinear),
    )


def stack_spec(config: TransformerConfig, mixer: dict[str, Any]) -> ModuleSpec:
    """The specification for this machine: megatron-core's own where Transformer Engine is present.

    Raises:
        ValueError: the configuration needs Transformer Engine, which is absent.
    """
    if HAVE_TE:
        return _transformer_engine_spec(config, mixer)
    if config.fp8:
        raise ValueError("fp8 needs Transformer Engine, which is not installed; install it or turn it off")
    spec = local_stack_spec(mixer)
    if not config.qk_layernorm:
        attention = spec.submodules.attention_layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = None
    return spec
