"""Layouts against megatron-core's own modules on every rank of worlds of up to 64: names, shapes, and each element of
the checkpoint counted once. Process groups are torch's fake ones and parameters have no storage."""

from __future__ import annotations

import pytest
import torch
from layout_configs import deepseek, llama, nemotron, qwen3, qwen3_moe

from megatron_agentrl.layout import decoder
from megatron_agentrl.layout.entries import Source, replicated
from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.recipe.schema import Recipe, Topology
from megatron_agentrl.recipe.topology_rules import topology_problems
from megatron_agentrl.recipe.weight_files import WeightsError
from megatron_agentrl.trainer.inspect import inspect

NEMOTRON = nemotron(
    head_dim=6, n_groups=8, intermediate_size=48, moe_intermediate_size=40, moe_shared_expert_intermediate_size=32
)
MOE = qwen3_moe(
    num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2, moe_intermediate_size=24, intermediate_size=40,
    mlp_only_layers=[1], tie_word_embeddings=True,
)  # fmt: skip
WORLDS = {
    "nemotron_h, 2 KV heads on 8": (NEMOTRON, Topology(world=8, tp=8, ep=2, etp=4)),
    "nemotron_h, uneven stages": (
        NEMOTRON,
        Topology(world=6, tp=2, pp=3, ep=2, etp=1, first_stage_layers=2, last_stage_layers=3),
    ),
    "qwen3_moe, tied, virtual stages": (
        MOE,
        Topology(world=4, pp=2, vpp=2, ep=2, first_stage_layers=2, last_stage_layers=2),
    ),
    "qwen3_moe, 12 experts on 12": (MOE, Topology(world=12, tp=2, ep=12, etp=1)),
    "qwen3, 2 KV heads on 4": (qwen3(num_hidden_layers=5), Topology(world=8, tp=4, pp=2)),
    "llama, tied, 4 stages": (
        llama(tie_word_embeddings=True),
        Topology(world=4, pp=4, first_stage_layers=2, last_stage_layers=2),
    ),
    "deepseek_v3, tp, pp, ep": (deepseek(), Topology(world=8, tp=2, pp=2, ep=2, etp=2)),
}
WORLDS_OF_64 = {
    "nemotron_h": (NEMOTRON, Topology(world=64, tp=4, cp=2, pp=2, vpp=2, ep=4, etp=2)),
    "qwen3_moe": (MOE, Topology(world=64, tp=8, pp=2, ep=4, etp=8)),
    "deepseek_v3": (deepseek(), Topology(world=64, tp=4, pp=2, ep=4, etp=4)),
}


def recipe(sizes: Topology) -> Recipe:
    made = Recipe()
    sizes.sequence_parallel = sizes.tp > 1
    made.topology = sizes
    return made


def check(hf, sizes) -> None:
    made = recipe(sizes)
    assert list(topology_problems(sizes, hf)) == []
    ranks = [inspect(hf, made, rank) for rank in range(sizes.world)]  # raises where a name or a shape differs
    whole = sum(torch.Size(shape).numel() for shape in hf_tensors(hf).values())
    assert sum(found.own for found in ranks) == whole == ranks[0].checkpoint_elements


@pytest.mark.parametrize("name", WORLDS)
def test_on_every_rank_the_layouts_are_the_modules_and_each_element_is_there_once(name):
    check(*WORLDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS_OF_64)
def test_on_every_rank_of_64_the_layouts_are_the_modules(name):
    check(*WORLDS_OF_64[name])


def test_a_parameter_without_a_layout_is_named(monkeypatch):
    stock = decoder.layer
    monkeypatch.setattr(
        decoder, "layer", lambda config, index: [e for e in stock(config, index) if "linear_proj" not in e.name]
    )
    with pytest.raises(
        WeightsError, match=r"parameter decoder.layers.0.self_attention.linear_proj.weight \(chunk 0\) has no layout"
    ):
        inspect(qwen3(), recipe(Topology()), 0)


def test_a_layout_without_a_parameter_is_named(monkeypatch):
    stock = decoder.layer
    extra = replicated("self_attention.sink", Source("model.sink", (18,)))
    monkeypatch.setattr(decoder, "layer", lambda config, index: [*stock(config, index), extra])
    with pytest.raises(WeightsError, match=r"the model has no parameter decoder.layers.0.self_attention.sink"):
        inspect(qwen3(), recipe(Topology()), 0)


def test_a_shape_that_differs_is_named_with_both(monkeypatch):
    stock = decoder.final_norm
    monkeypatch.setattr(decoder, "final_norm", lambda config: Source(stock(config).name, (17,)))
    with pytest.raises(WeightsError, match=r"decoder.final_norm.weight has shape \(18,\), its layout \(17,\)"):
        inspect(qwen3(), recipe(Topology()), 0)
