"""What a rank holds, built without memory or peers: against the trainer's own model, and summed over whole worlds."""

import resource
from dataclasses import replace

import mtp_toy
import pytest
import shapes
import torch
import torch.distributed as dist
import trainer_toy as toy

from megatron_agentrl.layout.megatron import hf_tensors, padded_vocabulary
from megatron_agentrl.recipe.schema import Dtype, Recipe, Topology
from megatron_agentrl.recipe.topology_rules import topology_problems
from megatron_agentrl.trainer import model, optimizer, topology
from megatron_agentrl.trainer.inspect import inspect


def recipe(sizes: Topology, dtype: Dtype = Dtype.bf16) -> Recipe:
    made = Recipe()
    made.topology, made.model.dtype = sizes, dtype
    return made


ULTRA_AT_4096 = Topology(world=4096, tp=8, sequence_parallel=True, pp=4, ep=64, etp=2)
#: model, config.json, topology. A line more is a model more.
LARGE = [
    ("Nano", shapes.NANO, Topology(world=256, tp=4, sequence_parallel=True, pp=2, ep=16, etp=1)),
    pytest.param(
        "Super",
        shapes.SUPER,
        Topology(world=1024, tp=8, sequence_parallel=True, pp=4, ep=32, etp=1),
        marks=pytest.mark.slow,
    ),
    pytest.param("Ultra", shapes.ULTRA, ULTRA_AT_4096, marks=pytest.mark.slow),
]
ELEMENTS = {"Nano": 31_577_940_288, "Super": 120_668_707_840, "Ultra": 549_308_993_536}


@pytest.mark.parametrize("name", ["nemotron", "qwen"])
def test_it_holds_what_the_trainers_own_model_holds_once_wrapped_for_training(name):
    hf, made = toy.MODELS[name], recipe(Topology())
    seen = {held.name: (held.shape, held.dtype) for held in inspect(hf, made, 0).held}
    at = topology.init(Topology(), seed=1, timeout=60)
    try:
        chunk = optimizer.wrap(model.build(hf, made, at), toy.SGD)[0].module.module
        kept = set(chunk.state_dict(keep_vars=True))
        held = dict(chunk.named_parameters()) | {n: b for n, b in chunk.named_buffers() if n in kept}
        assert seen == {n: (tuple(p.shape), p.dtype) for n, p in held.items() if not n.endswith("_extra_state")}
    finally:
        topology.shutdown()


@pytest.mark.parametrize(
    ("hf", "sizes"),
    [
        (toy.NEMOTRON, Topology(world=8, tp=2, sequence_parallel=True, pp=2, ep=2, etp=1)),
        (toy.QWEN | {"tie_word_embeddings": True}, Topology(world=4, pp=2, ep=2)),
        (toy.NEMOTRON | {"moe_latent_size": 20}, Topology(world=8, tp=2, sequence_parallel=True, ep=2, etp=2)),
        (toy.QWEN, Topology(world=4, pp=2, vpp=2, ep=2)),
        (mtp_toy.DEEPSEEK, Topology(world=8, tp=2, sequence_parallel=True, pp=2, ep=2, etp=1)),
    ],
)
def test_over_every_rank_of_a_world_the_model_is_there_exactly_once(hf, sizes):
    assert list(topology_problems(sizes, hf)) == []
    ranks = [inspect(hf, recipe(sizes), rank) for rank in range(sizes.world)]
    whole = sum(torch.Size(shape).numel() for shape in hf_tensors(hf).values())
    assert {found.checkpoint_elements for found in ranks} == {whole}
    assert sum(found.own for found in ranks) == whole
    by_copies: dict[tuple, list[int]] = {}
    for found in ranks:  # and each parameter's holders are just the ranks that hold it
        for held in found.held:
            by_copies.setdefault((found.rank.pp, held.name, held.chunk, held.sources), []).append(found.rank.rank)
            assert found.rank.rank in held.ranks
    for found in ranks:
        for held in found.held:
            if held.sources:
                assert by_copies[found.rank.pp, held.name, held.chunk, held.sources] == list(held.ranks)


@pytest.mark.parametrize("name", mtp_toy.MODELS)
def test_trained_heads_are_counted_once_and_the_embedding_they_read_is_a_copy(name):
    hf, made = mtp_toy.MODELS[name], mtp_toy.recipe(Topology(world=4, pp=2, ep=2))
    ranks = [inspect(hf, made, rank) for rank in range(4)]
    whole = sum(torch.Size(shape).numel() for shape in hf_tensors(hf, heads=True).values())
    assert sum(found.own for found in ranks) == whole == ranks[0].checkpoint_elements
    copies = [[held.name for held in found.held if held.copy] for found in ranks]
    assert copies == [[], [], ["embedding.word_embeddings.weight"], ["embedding.word_embeddings.weight"]]


def test_nothing_is_left_behind_even_by_a_model_that_cannot_be_built():
    with pytest.raises(ValueError, match="num_attention_heads"):
        inspect(toy.NEMOTRON | {"num_attention_heads": 5}, recipe(Topology(world=4, tp=4, sequence_parallel=True)), 3)
    assert not dist.is_initialized()
    assert inspect(toy.NEMOTRON, recipe(Topology()), 0).rank.world == 1
    with pytest.raises(ValueError, match="rank=4: expected 0 to 3"):
        inspect(toy.NEMOTRON, recipe(Topology(world=4)), 4)


@pytest.mark.parametrize(("name", "hf", "sizes"), LARGE)
def test_the_ranks_of_a_large_job_sum_up_to_the_checkpoint(name, hf, sizes):
    """One rank of each pipeline stage is built, each at other tensor and expert coordinates; ranks of a stage differ
    in which rows they hold, not in shapes, so a parameter counts (ranks of the stage) / (ranks with the same)."""
    assert list(topology_problems(sizes, hf)) == []
    per_stage, total = sizes.world // sizes.pp, 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for stage in range(sizes.pp):
        rank = stage * per_stage + (stage * 797 + per_stage - 1) % per_stage
        found = inspect(hf, recipe(sizes), rank)
        assert found.rank.pp == stage
        for held in found.held:
            assert per_stage % len(held.ranks) == 0
            total += held.elements * (per_stage // len(held.ranks))
    padding = (padded_vocabulary(hf["vocab_size"], sizes.tp) - hf["vocab_size"]) * hf["hidden_size"]
    total -= padding * (1 if hf["tie_word_embeddings"] else 2)
    assert total == found.checkpoint_elements == ELEMENTS[name]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB


@pytest.mark.slow
def test_a_rank_in_the_middle_of_ultra_at_4096_ranks():
    sizes = replace(ULTRA_AT_4096, etp=1)
    found = inspect(shapes.ULTRA, recipe(sizes), 3071)
    assert (found.rank.tp, found.rank.pp, found.rank.ep, found.chunks) == (7, 2, 63, ((54, 81),))
    held = {item.name: item for item in found.held}
    expert = held["decoder.layers.23.mlp.experts.local_experts.7.linear_fc1.weight"]
    assert (expert.layer, expert.expert, expert.shape, expert.nbytes) == (77, 511, (5120, 2048), 20 * 2**20)
    assert [box.tensor for box in expert.sources] == ["backbone.layers.77.mixer.experts.511.up_proj.weight"]
    assert held["decoder.layers.24.mixer.A_log"].dtype == torch.float32
    assert (found.elements, found.own) == (3_402_496_128, 0)
