"""Topologies that cannot be: each is refused with the numbers found and the nearest legal choice."""

import dataclasses

import pytest

from megatron_agentrl.recipe.model_kinds import letters
from megatron_agentrl.recipe.schema import Dispatcher, FlexBackend, Optimizer, Recipe, Topology
from megatron_agentrl.recipe.topology_rules import data_parallel_problems, topology_problems

CONFIG = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*EM*E",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}
SP = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"world": 4, "pp": 2, "ep": 4, "etp": 1}, "etp·ep·pp = 1·4·2 = 8 does not divide world = 4"),
        ({"world": 4, "tp": 2, "ep": 4}, "etp·ep·pp = 2·4·1 = 8 does not divide world = 4 (etp was not given and follows tp = 2); topology.etp=1 would fit"),
        ({"world": 8, "tp": 3}, "tp·pp·cp = 3·1·1 = 3 does not divide world = 8"),
        ({"world": 8, "tp": 8, "etp": 1}, "the model has 4 attention heads"),
        ({"world": 5, "ep": 5}, "the model has 8 experts, which ep does not divide; sizes that fit: 1, 2, 4, 8"),
        ({"world": 4, "pp": 4}, "pp·vpp = 4 does not divide the model's 6 layers; set pp·vpp = 3, or set topology.first_stage_layers=1 topology.last_stage_layers=1"),
        ({"world": 2, "vpp": 2}, "needs pp > 1"),
        ({"world": 2, "sequence_parallel": True}, "needs tp > 1"),
        ({"world": 4, "tp": 4, "etp": 1}, "the model has 2 Mamba groups, which tp does not divide; sizes that fit: 1, 2"),
        ({"world": 8, "pp": 8}, "pp·vpp = 8 stages, but the model has 6 layers; set topology.pp and topology.vpp so that pp·vpp is at most 6"),
        ({"world": 2, "pp": 2, "vpp": 2}, "set topology.first_stage_layers=1 topology.last_stage_layers=1"),
        ({"world": 2, "pp": 2, "first_stage_layers": 2, "last_stage_layers": 2}, "6 layers, first_stage_layers = 2, last_stage_layers = 2; leave both out for an even split"),
        ({"first_stage_layers": 3}, "topology.first_stage_layers=3: has no effect with one stage"),
        ({"world": 2, "tp": 2}, "experts with tp > 1 need each token once in the tensor-parallel group; set topology.sequence_parallel=true"),
        ({"world": 3, "tp": 1, "etp": 3}, "the model's experts have 64 columns (moe_intermediate_size), which etp does not divide; sizes that fit: 1, 2, 4, 8, 16, 32, 64"),
        ({"world": 2, "ep": 2, "dispatcher": Dispatcher.flex}, "needs the package DeepEP on GPUs, found no module deep_ep"),
        ({"dispatcher": Dispatcher.flex}, "etp·ep = 1, there is nobody to send tokens to"),
        ({"flex_backend": FlexBackend.hybridep}, "has no effect with topology.dispatcher=alltoall"),
        ({"world": 2, "tp": 2, **SP, "tp_comm_overlap": True}, "needs the package Transformer Engine"),
        ({"tp_comm_overlap": True}, "needs tp > 1 with sequence_parallel"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(sizes, words):
    lines = list(topology_problems(Topology(**sizes), CONFIG))
    assert any(words in line for line in lines), lines


@pytest.mark.parametrize("sizes", [
    {"world": 1}, {"world": 6}, {"world": 2, "ep": 2}, {"world": 4, "ep": 2, "dispatcher": Dispatcher.allgather},
    {"world": 2, "tp": 2, **SP}, {"world": 4, "tp": 2, **SP, "ep": 2, "etp": 2}, {"world": 2, "pp": 2, "vpp": 3},
    {"world": 4, "pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}, {"world": 2, "pp": 2, "last_stage_layers": 2},
])  # fmt: skip
def test_sizes_that_fit(sizes):
    assert list(topology_problems(Topology(**sizes), CONFIG)) == []


def test_a_pattern_with_unknown_letters_is_refused():
    (line,) = topology_problems(Topology(), CONFIG | {"hybrid_override_pattern": "M*XE|?"})
    assert line == (
        "config.json: the layer pattern holds ?, X, |; known are M Mamba-2, * attention, E mixture of experts, - MLP: "
        "correct the pattern"
    )


def test_a_model_without_experts_takes_neither_ep_nor_a_dispatcher():
    dense = CONFIG | {"hybrid_override_pattern": "M*-", "intermediate_size": 45}
    assert list(topology_problems(Topology(world=2, ep=2, dispatcher=Dispatcher.allgather), dense)) == [
        "topology.ep=2: the model has no experts; set topology.ep=1",
        "topology.dispatcher=allgather: has no effect, the model has no experts; leave it out",
    ]
    (line,) = topology_problems(Topology(world=2, tp=2), dense)
    assert "45 MLP columns (intermediate_size), which tp does not divide; sizes that fit: 1" in line


def test_more_tensor_parallel_ranks_than_key_value_heads_cut_the_interleaved_rows():
    odd = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 5, "intermediate_size": 64}  # fmt: skip
    (line,) = topology_problems(Topology(world=8, tp=8), odd)
    assert "the model has 50 query, key and value rows, which tp does not divide; sizes that fit: 1, 2" in line
    assert list(topology_problems(Topology(world=8, tp=8), odd | {"num_key_value_heads": 4})) == []


def test_layers_are_those_of_the_hybrid_model():
    qwen = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "mlp_only_layers": [1]}
    assert letters(qwen) == "*E*-*E"
    words = {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"]}
    assert letters(words) == "M*E-"


@pytest.mark.parametrize(
    ("topology", "name", "words"),
    [
        ({"overlap_param_gather": True}, "adam", "needs topology.overlap_grad_reduce=true"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "distributed_optimizer": False},
            "adam",
            "needs topology.distributed_optimizer=true",
        ),
        ({"overlap_param_gather": True, "overlap_grad_reduce": True}, "sgd", "needs optimizer.name=adam"),
        ({"bucket_size": 1000}, "adam", "has no effect without topology.overlap_grad_reduce=true"),
        ({"distributed_optimizer": False}, "sgd", "has no effect with optimizer.name=sgd"),
    ],
)
def test_overlap_that_the_optimizer_does_not_allow(topology, name, words):
    recipe = dataclasses.replace(Recipe(), topology=Topology(**topology), optimizer=Optimizer(name=name))
    (line,) = data_parallel_problems(recipe)
    assert words in line


def test_overlap_of_both_kinds_is_legal_with_the_sharded_optimizer():
    topology = Topology(world=2, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1000)
    assert list(data_parallel_problems(dataclasses.replace(Recipe(), topology=topology))) == []
