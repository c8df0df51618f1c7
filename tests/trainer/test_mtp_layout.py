"""Layouts of latent attention and prediction heads against megatron-core's own modules on every rank of a world."""

from __future__ import annotations

import json
from dataclasses import replace

import mtp_toy
import pytest
import torch
from layout_configs import whole
from safetensors.torch import save_file

from megatron_agentrl.layout.boxes import check_cover, check_tiling
from megatron_agentrl.layout.megatron import (
    Grid,
    Variant,
    hf_tensors,
    holders,
    layer_pattern,
    parameter_layouts,
    split_layers,
)
from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import layers, mla, model
from megatron_agentrl.trainer.inspect import simulated
from megatron_agentrl.trainer.weights_io import coordinates_of, grid_of, load_hf


def numbered(config) -> dict[str, torch.Tensor]:
    """Every tensor with heads, each element a different whole number (exact in float32)."""
    found, at = {}, 0
    for name, shape in hf_tensors(config, heads=True).items():
        count = torch.Size(shape).numel()
        found[name] = torch.arange(at, at + count, dtype=torch.float32).view(shape)
        at += count
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        Topology(),
        Topology(world=2, tp=2),
        Topology(world=2, pp=2),
        Topology(world=2, ep=2),
        Topology(world=4, tp=2, pp=2, ep=2, etp=1),
        Topology(world=3, pp=3, vpp=2),
    ],
    ids=lambda t: f"tp{t.tp}-pp{t.pp}-vpp{t.vpp}-ep{t.ep}",
)
@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_every_rank_fills_all_its_parameters_and_together_they_are_the_checkpoint(tmp_path, name, sizes):
    config = mtp_toy.MODELS[name]
    expected = numbered(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(expected, tmp_path / "model.safetensors")
    held = []
    for index in range(sizes.world):
        with simulated(index, sizes) as rank:
            recipe = mtp_toy.recipe(replace(sizes, sequence_parallel=sizes.tp > 1))
            chunks = model.build(config, recipe, rank)
            found = {}
            for number, chunk in enumerate(chunks):
                for key, tensor in chunk.state_dict().items():
                    if tensor is not None:
                        found[number, key] = tensor.fill_(float("nan"))
            layouts = parameter_layouts(config, coordinates_of(config, rank), Variant(heads=True))
            assert {(x.chunk, x.name): x.shape for x in layouts} == {key: tuple(t.shape) for key, t in found.items()}
            load_hf(chunks, config, tmp_path, rank)  # raises where names or shapes of model and layout differ
            assert not any(tensor.isnan().any() for tensor in found.values())
            held.append(found)
            grid = grid_of(config, rank)
    seen = []
    for tensor in holders(config, grid, Variant(heads=True)):
        seen.append(tensor.tensor.name)
        for replica in (0, -1):
            parts = [(part, held[part.ranks[replica]][part.chunk, part.name].double()) for part in tensor.holdings]
            assert whole(tensor.tensor.name, tensor.tensor.shape, parts).equal(expected[tensor.tensor.name].double())
    assert seen == list(expected)


def test_whether_down_projections_are_whole_is_read_from_the_specification():
    stack = layers.local_stack_spec({})
    assert not mla.whole_latents(stack)
    stack.submodules.mla_layer.submodules.self_attention.submodules.linear_kv_down_proj = torch.nn.Linear
    assert mla.whole_latents(stack)  # as Transformer Engine's: a linear that is not column-parallel


def test_heads_over_a_pipeline_with_tied_embeddings_are_megatron_cores_to_refuse(monkeypatch):
    config, sizes = mtp_toy.DEEPSEEK | {"tie_word_embeddings": True}, Topology(world=2, pp=2)
    with simulated(1, sizes) as rank:
        with pytest.raises(ValueError, match="megatron-core cannot save heads over a pipeline"):
            model.build(config, mtp_toy.recipe(sizes), rank)
        monkeypatch.setattr("megatron_agentrl.trainer.config.mtp_problems", lambda recipe, hf: [])  # its reason:
        (chunk,) = model.build(config, mtp_toy.recipe(sizes), rank)
        with pytest.raises(AssertionError):  # "No output layer" is expected where the heads are, but one is built
            chunk.sharded_state_dict()


@pytest.mark.parametrize("whole_latents", [False, True])
@pytest.mark.parametrize("heads", [False, True])
def test_either_build_covers_the_checkpoint_once(whole_latents, heads):
    config, variant = mtp_toy.DEEPSEEK, Variant(grouped_experts=True, whole_latents=whole_latents, heads=heads)
    grid = Grid(8, split_layers(len(layer_pattern(config)), 2), tp=2, pp=2, ep=4, etp=1)
    for rank in range(8):
        layouts = parameter_layouts(config, grid.coordinates(rank), variant)
        assert len({layout.name for layout in layouts}) == len(layouts)
        for layout in layouts:
            check_tiling(layout)
            if layout.name.endswith("linear_kv_down_proj.weight"):
                assert layout.shape == ((24, 40) if whole_latents else (12, 40))
    for found in holders(config, grid, variant):
        check_cover(found.tensor.name, found.tensor.shape, [box for part in found.holdings for box in part.boxes])
