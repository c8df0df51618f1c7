import itertools

import pytest
import torch
from layout_configs import local, nemotron, numbered, qwen3_moe, whole

from megatron_agentrl.layout.boxes import LayoutError, check_cover, check_tiling
from megatron_agentrl.layout.megatron import (
    Coordinates,
    Grid,
    Variant,
    fp32_tensors,
    hf_tensors,
    holders,
    layer_pattern,
    padded_vocabulary,
    parameter_layouts,
    split_layers,
)

CASE_C02 = qwen3_moe(num_hidden_layers=1, num_experts=2)


BUILD = Variant()


def layouts(config, variant=BUILD, **at):
    return {layout.name: layout for layout in parameter_layouts(config, Coordinates(**at), variant)}


def rows_of(layout, tensor):
    return [row for box in layout.boxes if box.tensor == tensor for row in range(box.r0, box.r1)]


# C01: vocabulary padding


def test_vocabulary_is_padded_to_a_multiple_of_divisor_times_tp():
    assert [padded_vocabulary(101, tp, 64) for tp in (1, 2, 3, 4)] == [128, 128, 192, 256]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padded_rows_come_from_no_tensor_and_are_never_exported(tp):
    config = nemotron()
    embedding = torch.arange(101, dtype=torch.float64)[:, None].expand(101, 24)
    tensors = numbered(config) | {"backbone.embeddings.weight": embedding, "lm_head.weight": -embedding}
    parts, rows = {"embedding.word_embeddings.weight": [], "output_layer.weight": []}, padded_vocabulary(101, tp, 64)
    for rank in range(tp):
        for name, layout in layouts(config, Variant(vocab_divisor=64), tp=tp, tp_rank=rank).items():
            if name in parts:
                check_tiling(layout)
                parts[name].append(local(layout, tensors))
    joined = torch.cat(parts["embedding.word_embeddings.weight"])
    assert joined.shape == (rows, 24)
    assert joined[:101].equal(embedding) and joined[101:].count_nonzero() == 0
    assert torch.cat(parts["output_layer.weight"])[:101].equal(-embedding)
    grid = Grid(tp, ((0, 8),), tp=tp)
    by_name = {found.tensor.name: found for found in holders(config, grid, Variant(vocab_divisor=64))}
    for name in ("backbone.embeddings.weight", "lm_head.weight"):
        boxes = [box for holding in by_name[name].holdings for box in holding.boxes]
        assert max(box.r1 for box in boxes) == 101
        check_cover(name, (101, 24), boxes)


# C02: fused QKV and gate/up


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_qkv_of_tp3_holds_one_whole_query_group_per_rank(rank):
    qkv = layouts(CASE_C02, tp=3, tp_rank=rank)["decoder.layers.0.self_attention.linear_qkv.weight"]
    attention = "model.layers.0.self_attn."
    assert qkv.shape == (16, 18)
    assert rows_of(qkv, attention + "q_proj.weight") == list(range(8 * rank, 8 * rank + 8))
    assert rows_of(qkv, attention + "k_proj.weight") == list(range(4 * rank, 4 * rank + 4))
    assert rows_of(qkv, attention + "v_proj.weight") == list(range(4 * rank, 4 * rank + 4))
    assert [box.row for box in qkv.boxes] == [0, 8, 12]


def test_gate_and_up_are_cut_each_on_its_own():
    gate, up = ("model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.mlp.experts.1.up_proj.weight")
    for rank, expected in ((0, [0, 1, 2]), (1, [3, 4, 5])):
        fc1 = layouts(CASE_C02, etp=2, etp_rank=rank)["decoder.layers.1.mlp.experts.local_experts.1.linear_fc1.weight"]
        assert fc1.shape == (6, 18)
        assert rows_of(fc1, gate) == expected and rows_of(fc1, up) == expected
        assert [(box.tensor, box.row) for box in fc1.boxes] == [(gate, 0), (up, 3)]


def test_kv_heads_that_tp_does_not_divide_are_refused_before_any_weight_is_read():
    with pytest.raises(LayoutError, match=r"num_key_value_heads=3 and TP 2"):
        parameter_layouts(CASE_C02, Coordinates(tp=2))


def test_more_ranks_than_kv_heads_cut_the_interleaved_rows_as_they_stand():
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    found = [layouts(CASE_C02, tp=6, tp_rank=rank)[name] for rank in range(6)]
    attention = "model.layers.0.self_attn."
    assert [layout.shape for layout in found] == [(8, 18)] * 6
    assert rows_of(found[2], attention + "q_proj.weight") == list(range(8, 16))
    assert rows_of(found[3], attention + "k_proj.weight") == [4, 5, 6, 7]
    assert rows_of(found[3], attention + "v_proj.weight") == [4, 5, 6, 7]
    assert sorted(row for layout in found for row in rows_of(layout, attention + "k_proj.weight")) == list(range(12))


def test_head_dim_comes_from_the_config_not_from_hidden_over_heads():
    config = qwen3_moe(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    shapes = hf_tensors(config)
    assert [shapes[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkvo"] == [
        (24, 16),
        (12, 16),
        (12, 16),
        (16, 24),
    ]


# C04: pipeline stages


def test_uneven_stages_cover_every_layer_once():
    assert split_layers(7, 3, last=1) == ((0, 3), (3, 6), (6, 7))
    assert split_layers(7, 3, first=2, last=1) == ((0, 2), (2, 6), (6, 7))
    assert split_layers(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert split_layers(9, 4, first=2, last=1) == ((0, 2), (2, 5), (5, 8), (8, 9))


def test_virtual_stages_are_dealt_round_robin():
    grid = Grid(2, split_layers(8, 4), pp=2)
    assert grid.coordinates(0).chunks == ((0, 2), (4, 6))
    assert grid.coordinates(1).chunks == ((2, 4), (6, 8))


@pytest.mark.parametrize(
    ("layers", "stages", "hints"), [(2, 3, {}), (7, 3, {"first": 6, "last": 1}), (7, 1, {"first": 3})]
)
def test_a_split_that_leaves_a_stage_empty_or_a_layer_out_is_refused(layers, stages, hints):
    with pytest.raises(LayoutError, match=f"{layers} layers cannot be split into {stages} stages"):
        split_layers(layers, stages, **hints)


def test_layer_names_are_local_to_the_chunk_and_point_at_the_global_layer():
    config = qwen3_moe(num_hidden_layers=4)
    found = {}
    for rank in range(2):
        at = Grid(2, split_layers(8, 4), pp=2).coordinates(rank)
        for layout in parameter_layouts(config, at):
            if layout.name.endswith("pre_mlp_layernorm.weight"):
                found[rank, layout.chunk, layout.name] = layout.boxes[0].tensor
    assert found == {
        (
            rank,
            chunk,
            "decoder.layers.1.pre_mlp_layernorm.weight",
        ): f"model.layers.{layer}.post_attention_layernorm.weight"
        for (rank, chunk), layer in {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}.items()
    }


# Mamba, experts, names


def test_mamba_in_proj_cuts_z_x_b_c_and_dt_each_on_its_own():
    found = layouts(nemotron(), tp=4, tp_rank=1)
    in_proj = found["decoder.layers.0.mixer.in_proj.weight"]
    # d_inner 56, groups x state 24, heads 8: blocks start at 0, 56, 112, 136, 160
    assert [(box.r0, box.r1, box.row) for box in in_proj.boxes] == [
        (14, 28, 0), (70, 84, 14), (118, 124, 28), (142, 148, 34), (162, 164, 40),
    ]  # fmt: skip
    conv = found["decoder.layers.0.mixer.conv1d_weight"]
    assert conv.shape == (26, 1, 3)
    assert [(box.r0, box.r1, box.c0, box.c1) for box in conv.boxes] == [(14, 28, 0, 3), (62, 68, 0, 3), (86, 92, 0, 3)]


def test_experts_are_numbered_locally_under_either_naming():
    name = "backbone.layers.2.mixer.experts.{}.up_proj.weight"
    for grouped, pattern in (
        (False, "mlp.experts.local_experts.{}.linear_fc1.weight"),
        (True, "mlp.experts.linear_fc1.weight{}"),
    ):
        found = layouts(nemotron(), Variant(grouped_experts=grouped), ep=3, ep_rank=2)
        assert [found["decoder.layers.2." + pattern.format(e)].boxes[0].tensor for e in range(4)] == [
            name.format(e) for e in (8, 9, 10, 11)
        ]
        assert "decoder.layers.2." + pattern.format(4) not in found


def test_only_the_load_bearing_tensors_stay_fp32():
    kinds = {name.split("mixer.")[1] for name in fp32_tensors(nemotron())}
    assert kinds == {"A_log", "D", "dt_bias", "gate.e_score_correction_bias"}


def test_a_tied_head_is_a_second_copy_on_the_last_of_several_stages_only():
    config = nemotron(tie_word_embeddings=True)
    assert "output_layer.weight" not in layouts(config)
    chunks = split_layers(8, 2)
    assert "output_layer.weight" not in layouts(config, pp=2, pp_rank=0, chunks=chunks[:1])
    head = layouts(config, pp=2, pp_rank=1, chunks=chunks[1:])["output_layer.weight"]
    assert {box.tensor for box in head.boxes} == {"backbone.embeddings.weight"}
    exported = [found.tensor.name for found in holders(config, Grid(2, chunks, pp=2))]
    assert exported.count("backbone.embeddings.weight") == 1 and "lm_head.weight" not in exported


def test_layer_kinds_are_read_from_either_spelling():
    kinds = ["mamba", "attention", "linear_attention", "full_attention", "moe", "mlp"]
    config = nemotron(layers_block_type=kinds)
    del config["hybrid_override_pattern"]
    assert layer_pattern(config) == "M*M*E-"
    assert layer_pattern(qwen3_moe(num_hidden_layers=3, mlp_only_layers=[1])) == "*E*-*E"


@pytest.mark.parametrize(
    ("config", "at", "message"),
    [
        (nemotron(n_groups=4), {"tp": 8}, "n_groups=4 cannot be divided among TP 8"),
        (nemotron(), {"ep": 5}, "experts=12 cannot be divided among EP 5"),
        (nemotron(num_attention_heads=6), {"tp": 4}, "num_attention_heads=6"),
        (nemotron(use_bias=True), {}, "use_bias=True"),
        (nemotron(hidden_size=None), {}, "no hidden_size"),
        (nemotron(mamba_num_heads=None), {}, "no mamba_num_heads"),
        (nemotron(n_groups=None), {}, "no n_groups or mamba_n_groups"),
        (nemotron(moe_intermediate_size="20"), {}, "moe_intermediate_size='20', expected a positive integer"),
        (nemotron(num_attention_heads=7), {}, "num_attention_heads=7 is no multiple of num_key_value_heads=2"),
        ({"model_type": "gpt2"}, {}, "model_type 'gpt2' has no layout"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_with_the_key(config, at, message):
    with pytest.raises(LayoutError, match=message):
        parameter_layouts(config, Coordinates(**at))


def test_a_grid_whose_sizes_do_not_divide_the_world_is_refused():
    with pytest.raises(LayoutError, match=r"etp\*ep\*pp = 1\*4\*2 = 8 does not divide the 4"):
        Grid(4, split_layers(8, 2), pp=2, ep=4)


# The law: for every grid, each rank's parameters are tiled once and every tensor comes back bit-equal.

GRIDS = [
    {"world": 1},
    {"world": 2, "tp": 2},
    {"world": 4, "tp": 4},
    {"world": 4, "ep": 4},
    {"world": 4, "pp": 2, "ep": 2},
    {"world": 8, "tp": 4, "etp": 2, "ep": 2},
    {"world": 8, "tp": 2, "ep": 2, "pp": 2, "etp": 2},
    {"world": 8, "tp": 2, "ep": 4, "etp": 1, "pp": 2},
    {"world": 12, "tp": 2, "cp": 3, "pp": 2, "ep": 3, "etp": 1},
]


@pytest.mark.parametrize(("grid", "vpp"), list(itertools.product(GRIDS, [1, 2])))
@pytest.mark.parametrize(
    "config", [nemotron(), nemotron(moe_latent_size=16, tie_word_embeddings=True), qwen3_moe(num_key_value_heads=2)]
)
def test_every_tensor_survives_the_way_to_the_ranks_and_back(config, grid, vpp):
    if config["model_type"] == "qwen3_moe" and grid.get("tp", 1) == 4:
        config = config | {"num_attention_heads": 8}
    grid = Grid(stages=split_layers(8, grid.get("pp", 1) * vpp), **grid)
    tensors = numbered(config)
    ranks = []
    for rank in range(grid.world):
        parameters = {}
        for layout in parameter_layouts(config, grid.coordinates(rank)):
            check_tiling(layout)
            assert (layout.chunk, layout.name) not in parameters
            parameters[layout.chunk, layout.name] = local(layout, tensors)
        ranks.append(parameters)
    seen = []
    for found in holders(config, grid):
        seen.append(found.tensor.name)
        check_cover(found.tensor.name, found.tensor.shape, [box for holding in found.holdings for box in holding.boxes])
        for pick in (0, -1):  # the first and the last replica of each part
            joined = whole(
                found.tensor.name,
                found.tensor.shape,
                [(holding, ranks[holding.ranks[pick]][holding.chunk, holding.name]) for holding in found.holdings],
            )
            assert joined.equal(tensors[found.tensor.name]), found.tensor.name
    assert seen == list(tensors)


def test_rank_3071_of_4096_is_answered_without_building_the_others():
    super_120b = nemotron(
        hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=4096, vocab_size=131072, num_attention_heads=32, num_key_value_heads=2, head_dim=128,
        mamba_num_heads=128, mamba_head_dim=64, n_groups=8, ssm_state_size=128, n_routed_experts=512,
        moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
    )  # fmt: skip
    grid = Grid(4096, split_layers(88, 8), tp=8, pp=8, ep=64)
    found = {layout.name: layout for layout in parameter_layouts(super_120b, grid.coordinates(3071))}
    assert grid.coordinates(3071) == Coordinates(
        tp=8, tp_rank=7, pp=8, pp_rank=5, ep=64, ep_rank=63, etp=1, etp_rank=0, chunks=((55, 66),)
    )
    # layers 55..65 are "MEM*EMEMEME"; 4608 interleaved QKV rows over TP 8 leave 576 a rank: the last has q, k and v
    qkv = found["decoder.layers.3.self_attention.linear_qkv.weight"]
    assert qkv.shape == (576, 4096)
    assert [(box.tensor[-13:], box.r0, box.r1) for box in qkv.boxes] == [
        ("q_proj.weight", 3776, 4096), ("k_proj.weight", 128, 256), ("v_proj.weight", 128, 256),
    ]  # fmt: skip
    assert found["decoder.layers.1.mlp.experts.local_experts.7.linear_fc1.weight"].boxes[0].tensor == (
        "backbone.layers.56.mixer.experts.511.up_proj.weight"
    )
