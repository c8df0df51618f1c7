"""A checkpoint written without Transformer Engine has the keys and shapes of one written with it.

Transformer Engine cannot be imported here. What is compared: the model that the product's own Transformer Engine
specification describes (megatron-core's tree: which layer has a norm where, and which linear holds its norm), each of
its leaves replaced by a torch one with the parameter names that Transformer Engine documents for it, against the local
specification's; over torch's fake process group. The experts' grouped GEMM cannot be built: without Transformer Engine
megatron-core puts its SequentialMLP there, with which TEGroupedMLP declares its sharded keys interchangeable.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import mtp_toy
import pytest
import torch
import trainer_toy as toy
from megatron.core.extensions import transformer_engine as te
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import layers, model
from megatron_agentrl.trainer.checkpoint_match import tensors
from megatron_agentrl.trainer.inspect import simulated
from megatron_agentrl.trainer.latent_experts import LocalMoELayer
from megatron_agentrl.trainer.mla import LatentCoreAttention



class Replicated(torch.nn.Linear):
    """Latent attention's down projections: whole on each tensor-parallel rank, as `TELinear` holds them there."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, parallel_mode: str, bias: bool, **_: Any) -> None:
        assert parallel_mode == "duplicated" and not bias
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {}, sharded_offsets)


#: Transformer Engine's leaf -> torch's with the same parameters: LayerNormLinear has weight and layer_norm_weight.
LEAVES: list[tuple[Any, Any]] = [
    (te.TELayerNormColumnParallelLinear, layers.NormColumnParallelLinear),
    (te.TEColumnParallelLinear, ColumnParallelLinear),
    (te.TERowParallelLinear, RowParallelLinear),
    (te.TELinear, Replicated),
    (te.TENorm, layers.RMSNorm),
    (te.TEDotProductAttention, LatentCoreAttention),  # no parameters
    (HybridStack, layers.LocalHybridStack),  # its final norm is TENorm by name
    (MoELayer, LocalMoELayer),  # its latent projections are TELinear by name
]
MODELS = toy.MODELS | toy.FURTHER | {"deepseek": mtp_toy.DEEPSEEK, "nemotron heads": mtp_toy.NEMOTRON}


def torch_leaves(node: Any) -> Any:
    """The specification's tree with torch's leaves."""
    for leaf, stand_in in LEAVES:
        if node is leaf:
            return stand_in
    if isinstance(node, ModuleSpec):
        return replace(node, module=torch_leaves(node.module), submodules=torch_leaves(node.submodules))
    if isinstance(node, partial):
        return partial(torch_leaves(node.func), **{key: torch_leaves(value) for key, value in node.keywords.items()})
    if isinstance(node, list):
        return [torch_leaves(value) for value in node]
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{f.name: torch_leaves(getattr(node, f.name)) for f in fields(node)})
    return node


def keys(name: str, sizes: Topology, rank: int) -> dict[str, tuple[int, ...]]:
    """Checkpoint key -> global shape, of what one rank of the layout holds."""
    with simulated(rank, sizes) as at:
        heads = "num_nextn_predict_layers" in MODELS[name]
        chunks = model.build(MODELS[name], (mtp_toy if heads else toy).recipe(sizes), at)
        found = {}
        for chunk in chunks:
            state = {k: v for k, v in chunk.sharded_state_dict().items() if "_extra_state" not in k}
            found |= {tensor.key: tuple(tensor.global_shape) for tensor in tensors(state)}
        return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes, rank", [(Topology(), 0), (Topology(world=8, pp=2), 5)], ids=["one", "PP2"])
def test_keys_and_shapes_equal_those_of_the_transformer_engine_specification(monkeypatch, name, sizes, rank):
    want = keys(name, sizes, rank)

    def te_spec(config: Any, mixer: dict[str, Any]) -> ModuleSpec:
        with monkeypatch.context() as patched:
            patched.setattr(layers, "HAVE_TE", True)
            return torch_leaves(real(config, mixer))

    real = layers.stack_spec
    monkeypatch.setattr(model, "stack_spec", te_spec)
    monkeypatch.setattr(multi_latent_attention, "TELinear", Replicated)  # asked for by name
    assert keys(name, sizes, rank) == want
    assert len(want) >= 8


def test_a_norm_in_another_place_would_show(monkeypatch):
    """The comparison can fail: a linear without its norm lacks a key."""
    want = keys("nemotron", Topology(), 0)
    monkeypatch.setattr(layers, "NormColumnParallelLinear", ColumnParallelLinear)
    missing = set(want) - set(keys("nemotron", Topology(), 0))
    assert missing == {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mixer.in_proj.layer_norm_weight",
        "decoder.layers.4.mlp.linear_fc1.layer_norm_weight",
    }
