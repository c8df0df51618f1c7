"""Layouts against megatron-core's own modules on every rank, and against transformers by logits."""

import json
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp
from layout_configs import nemotron, numbered, qwen3_moe, whole
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from weights_worker import gather

from megatron_agentrl.layout.megatron import hf_tensors, holders
from megatron_agentrl.recipe.schema import Recipe, Topology
from megatron_agentrl.trainer import model as trainer_model
from megatron_agentrl.trainer import topology
from megatron_agentrl.trainer.inspect import simulated
from megatron_agentrl.trainer.random_init import random_tensors, write_random
from megatron_agentrl.trainer.weights_io import coordinates_of, grid_of, iterate_hf, load_hf, save_hf

NEMOTRON, QWEN = nemotron(), qwen3_moe()
TIED = qwen3_moe(tie_word_embeddings=True, num_key_value_heads=2)
#: Query groups 2, so that tp = 4 cuts through them.
QWEN_TP4 = qwen3_moe(
    num_attention_heads=8, num_key_value_heads=2, mlp_only_layers=[2], intermediate_size=32, moe_intermediate_size=8
)


def recipe(sizes: Topology) -> Recipe:
    made = Recipe()
    made.topology = replace(sizes, sequence_parallel=sizes.tp > 1)
    return made


def write(folder, config):
    """A checkpoint whose elements are all different whole numbers, exact in float32."""
    folder.mkdir()
    save_file({name: tensor.float() for name, tensor in numbered(config).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (NEMOTRON, Topology()),
        (NEMOTRON, Topology(world=4, tp=4, ep=1, etp=4)),
        (NEMOTRON, Topology(world=4, tp=4, ep=4, etp=1)),
        (NEMOTRON, Topology(world=8, tp=2, pp=2, ep=2, etp=2)),
        (NEMOTRON, Topology(world=8, tp=2, pp=2, vpp=2, ep=4, etp=1)),
        (TIED, Topology(world=4, pp=4)),
        (TIED, Topology(world=2, tp=2)),
        (QWEN, Topology(world=6, tp=3, pp=2, ep=3, etp=1)),
        (QWEN, Topology(world=4, pp=2, vpp=2, ep=2)),
        (QWEN_TP4, Topology(world=8, tp=4, ep=4, etp=2)),
    ],
    ids=lambda value: (
        "" if isinstance(value, dict) else "-".join(f"{k}{getattr(value, k)}" for k in ("tp", "pp", "vpp", "ep", "etp"))
    ),
)
def test_every_rank_of_a_world_fills_all_its_parameters_and_together_they_are_the_checkpoint(tmp_path, config, sizes):
    source = write(tmp_path / "hf", config)
    held = []
    for index in range(sizes.world):
        with simulated(index, sizes) as rank:
            chunks = trainer_model.build(config, recipe(sizes), rank)
            for tensor in (tensor for chunk in chunks for tensor in chunk.state_dict().values() if tensor is not None):
                tensor.fill_(float("nan"))
            load_hf(chunks, config, source, rank)
            found = {}
            for number, chunk in enumerate(chunks):
                for name, tensor in chunk.state_dict().items():
                    if tensor is not None:
                        assert not tensor.isnan().any(), f"rank {index}: {name} was not filled"
                        found[number, name] = tensor.double()
            held.append(found)
            grid = grid_of(config, rank)
    expected = numbered(config)
    for tensor in holders(config, grid):
        name = tensor.tensor.name
        for replica in (0, -1):
            parts = [(part, held[part.ranks[replica]][part.chunk, part.name]) for part in tensor.holdings]
            assert whole(name, tensor.tensor.shape, parts).equal(expected[name]), name


def test_a_tied_model_over_a_pipeline_holds_the_embedding_at_both_ends_only(tmp_path):
    source, sizes = write(tmp_path / "hf", TIED), Topology(world=4, pp=4)
    names = []
    for index in range(4):
        with simulated(index, sizes) as rank:
            (chunk,) = trainer_model.build(TIED, recipe(sizes), rank)
            load_hf([chunk], TIED, source, rank)
            ends = {n: p for n, p in chunk.named_parameters() if n.startswith(("embedding", "output_layer"))}
            names.append(set(ends))
            for parameter in ends.values():
                assert parameter[:101].double().equal(numbered(TIED)["model.embed_tokens.weight"])
    assert names == [{"embedding.word_embeddings.weight"}, set(), set(), {"output_layer.weight"}]


def test_every_rank_stands_where_megatron_core_puts_it():
    for sizes in (Topology(world=24, tp=2, cp=3, pp=2, ep=4, etp=1), Topology(world=16, tp=4, pp=2, ep=2, etp=2)):
        for index in range(0, sizes.world, 5):
            with simulated(index, sizes) as rank:
                at = coordinates_of(NEMOTRON, rank)  # compares with its own order and raises
                found = (at.tp_rank, at.pp_rank, at.ep_rank, at.etp_rank)
                assert found == (
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_expert_model_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_rank(),
                )


# Logits


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(chunk, ids):
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        return chunk(ids, positions, None)[..., :101]


# transformers' grouped matrix product wants rows of whole 16 bytes
@pytest.mark.parametrize(
    "config",
    [NEMOTRON, qwen3_moe(hidden_size=20, moe_intermediate_size=8, mlp_only_layers=[1])],
    ids=["nemotron_h", "qwen3_moe"],
)
def test_a_random_checkpoint_gives_the_logits_of_transformers_and_returns_bit_equal(tmp_path, config):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    write_random(tmp_path / "hf", tmp_path / "base", seed=5)
    reference = transformers_model(tmp_path / "hf")
    ids = torch.randint(0, 101, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(ids).logits
    rank = topology.init(Topology(), seed=1, timeout=60)
    try:
        chunks = trainer_model.build(config, recipe(Topology()), rank)
        load_hf(chunks, config, tmp_path / "hf", rank)
        chunks[0].eval()
        # two orders of summation in Mamba's scan; a row in a wrong place differs by 1e-2
        torch.testing.assert_close(logits_of(chunks[0], ids), expected, atol=1e-4, rtol=0)
        save_hf(tmp_path / "export", tmp_path / "hf", iterate_hf(chunks, config, rank, torch.float32))
    finally:
        topology.shutdown()
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "export"))
    assert list(first) == list(again)
    assert all(first[name].dtype == again[name].dtype and first[name].equal(again[name]) for name in first)
    with torch.no_grad():
        # with equal weights too, logits of two loads were seen to differ by 9e-8
        found = transformers_model(tmp_path / "export")(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


# Gathering across real processes


@pytest.mark.parametrize(
    "sizes",
    [{"tp": 2, "ep": 2}, pytest.param({"tp": 2, "pp": 2, "ep": 2}, marks=pytest.mark.slow)],
    ids=["two processes", "four processes"],
)
def test_tensors_spread_over_processes_arrive_whole_on_rank_zero(tmp_path, sizes):
    world = sizes["tp"] * sizes.get("pp", 1)
    write(tmp_path / "hf", NEMOTRON)
    mp.spawn(gather, args=(world, sizes, tmp_path), nprocs=world)
    assert (tmp_path / "out" / "model.safetensors").is_file()


# Random weights


def test_random_weights_follow_the_measured_rules():
    found = dict(random_tensors(nemotron(hidden_size=512, mamba_num_heads=64, num_attention_heads=64), seed=0))
    layer = "backbone.layers.{}.mixer."
    assert found["backbone.embeddings.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert found[layer.format(0) + "in_proj.weight"].std().item() == pytest.approx(0.7 / 512**0.5, rel=0.02)
    assert found[layer.format(1) + "q_proj.weight"].std().item() == pytest.approx(0.7 / 512**0.5, rel=0.02)
    out = 0.02 / (2 * 8) ** 0.5 * (128 / 512) ** 0.5 * 2
    assert found[layer.format(1) + "o_proj.weight"].std().item() == pytest.approx(out, rel=0.02)
    assert found[layer.format(2) + "gate.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    conv = found[layer.format(0) + "conv1d.weight"]
    assert -0.5 <= conv.min() < -0.49 and 0.49 < conv.max() <= 0.5
    assert found[layer.format(0) + "conv1d.bias"].count_nonzero() == 0
    assert found[layer.format(0) + "A_log"].exp().tolist() == pytest.approx(list(range(1, 65)))
    assert (found[layer.format(0) + "D"] == 1).all()
    dt = torch.nn.functional.softplus(found[layer.format(0) + "dt_bias"])
    assert dt.min() >= 1e-3 and dt.max() <= 0.1 + 1e-6
    assert (found["backbone.layers.0.norm.weight"] == 1).all()


def test_random_weights_depend_on_the_seed_alone():
    first, again, other = (dict(random_tensors(QWEN, seed)) for seed in (1, 1, 2))
    assert all(first[name].equal(again[name]) for name in first)
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])
    assert not first["lm_head.weight"].equal(first["model.embed_tokens.weight"])
    assert list(first) == list(hf_tensors(QWEN))
