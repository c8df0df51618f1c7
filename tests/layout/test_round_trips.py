"""HF -> Megatron (a) -> Megatron (b) -> HF and HF -> Megatron -> engine by boxes alone, bit-equal for every model kind."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_configs import deepseek, llama, nemotron, qwen3, qwen3_moe
from placing import Ranks, checkpoint, engine, grid, transfer

from megatron_agentrl.layout.boxes import LayoutError, check_tiling
from megatron_agentrl.layout.engine import EngineTopology, engine_layouts, engine_stages
from megatron_agentrl.layout.megatron import Variant, parameter_layouts

#: 2 KV heads, 12 experts, vocabulary 101; every size that eight ranks share is a multiple of 8, and no two are equal.
MODELS = {
    "nemotron_h": nemotron(
        hybrid_override_pattern="M*E-ME", head_dim=6, n_groups=8, intermediate_size=48, moe_intermediate_size=40, moe_shared_expert_intermediate_size=32
    ),
    "nemotron_h, latent experts, heads": nemotron(
        hybrid_override_pattern="M*E-ME", head_dim=6, n_groups=8, moe_latent_size=16, intermediate_size=48, moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=32, num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E",
    ),
    "qwen3_moe, tied": qwen3_moe(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, moe_intermediate_size=24,
        intermediate_size=40, mlp_only_layers=[1], tie_word_embeddings=True,
    ),
    "qwen3": qwen3(num_hidden_layers=5),
    "llama, tied": llama(tie_word_embeddings=True),
    "deepseek_v3, heads": deepseek(q_lora_rank=32, num_hidden_layers=3),
}  # fmt: skip
#: Neighbours in this ring, and every third, are the pairs.
TOPOLOGIES = [
    {},
    {"world": 8, "tp": 8},
    {"world": 6, "pp": 3, "tp": 2},
    {"world": 4, "pp": 2, "vpp": 2, "ep": 2},
    {"world": 12, "tp": 2, "ep": 12, "etp": 1},
    {"world": 8, "pp": 2, "first": 3, "ep": 4, "etp": 1},
    {"world": 16, "tp": 4, "cp": 2, "ep": 2, "etp": 2},
    {"world": 64, "tp": 4, "cp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 2},
]
PAIRS = [(a, (a + step) % len(TOPOLOGIES)) for step in (1, 3) for a in range(len(TOPOLOGIES))]
ENGINES = [
    EngineTopology(),
    EngineTopology(tp=8),
    EngineTopology(tp=2, pp=3),
    EngineTopology(tp=4, dp=2),
    EngineTopology(tp=2, dp=2, pp=2, expert_parallel=True),
    EngineTopology(dp=5, expert_parallel=True),
]


def build(name: str) -> Variant:
    """The trainer's build of the model; heads where it has any."""
    return Variant(heads="heads" in name, grouped_experts="latent" in name)


@functools.cache
def tensors(name: str):
    return checkpoint(MODELS[name], build(name).heads)


@functools.cache
def loaded(name: str, topology: int) -> Ranks:
    return Ranks(MODELS[name], grid(MODELS[name], **TOPOLOGIES[topology]), build(name)).fill(tensors(name))


def assert_same(found: Ranks, expected: Ranks) -> None:
    for mine, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert (mine.writes == 1).all(), mine.layout.name
        assert (mine.values == theirs.values).all(), mine.layout.name


@pytest.mark.parametrize("name", MODELS)
def test_every_topology_holds_the_checkpoint_and_gives_it_back(name):
    for number in range(len(TOPOLOGIES)):
        ranks = loaded(name, number)
        for parameter in ranks.parameters():
            check_tiling(parameter.layout)
            assert (parameter.writes == 1).all()
        for replica in (0, -1):
            exported = ranks.export(replica)
            assert list(exported) == list(tensors(name))
            assert all((exported[key] == tensor).all() for key, tensor in tensors(name).items())


@pytest.mark.parametrize("name", MODELS)
def test_96_pairs_of_topologies_reshard_bit_equal_and_write_every_element_once(name):
    for a, b in PAIRS:
        target = Ranks(MODELS[name], loaded(name, b).grid, build(name))
        transfer(loaded(name, a).sources(), target.parameters())
        assert_same(target, loaded(name, b))  # whose export is the checkpoint
    assert len(PAIRS) * len(MODELS) == 96


@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_fills_every_element_of_an_engine_exactly_once(name):
    config, whole = MODELS[name], tensors(name)
    for number, topology in enumerate(ENGINES):
        if name in ("qwen3", "llama, tied"):  # vLLM refuses expert parallelism without experts
            topology = EngineTopology(tp=topology.tp, pp=topology.pp, dp=topology.dp)
        parameters = engine(config, topology)
        transfer(loaded(name, number).sources(), parameters)
        for parameter in parameters:
            check_tiling(parameter.layout)
            assert (parameter.writes == 1).all(), parameter.layout.name
            for box in parameter.layout.boxes:
                want = whole[box.tensor][box.r0 : box.r1, box.c0 : box.c1]
                if parameter.layout.element_rule.value == "neg_exp":
                    want = -np.exp(want)
                assert (parameter.read(box.row, box.col, box.rows, box.cols) == want).all()
        taken = {box.tensor for parameter in parameters for box in parameter.layout.boxes}
        main = set(checkpoint(config))  # prediction heads are not part of the engine's model
        assert taken == main


# The law, over random topologies


@st.composite
def topologies(draw):
    tp, pp, vpp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 3), (1, 2), (1, 2)))
    etp, ep, dp = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 3, 4, 6, 12))), draw(st.integers(1, 2))
    dense, sparse = tp * cp * pp, etp * ep * pp
    world = np.lcm(dense, sparse) * dp
    if world > 64:
        tp, cp, ep, etp, world = 1, 1, 1, 1, pp
    if pp * vpp > 5:
        vpp = 1
    return {"world": int(world), "tp": tp, "cp": cp, "pp": pp, "vpp": vpp, "ep": ep, "etp": etp}


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(MODELS)), topologies(), topologies())
def test_any_two_topologies_reshard_bit_equal(name, a, b):
    config, variant = MODELS[name], build(name)
    source = Ranks(config, grid(config, **a), variant).fill(tensors(name))
    target = Ranks(config, grid(config, **b), variant)
    transfer(source.sources(), target.parameters())
    assert all((parameter.writes == 1).all() for parameter in target.parameters())
    exported = target.export(-1)
    assert all((exported[key] == tensor).all() for key, tensor in tensors(name).items())


# What vLLM holds, in numbers


def engine_rank(config, rank, **sizes):
    return {layout.name: layout for layout in engine_layouts(config, EngineTopology(**sizes), rank)}


def test_an_engine_with_more_ranks_than_kv_heads_repeats_each_head():
    """The trainer cuts the interleaved rows as they stand; both hold two heads of 6 rows, 12 in the export."""
    name = "model.layers.0.self_attn.qkv_proj.weight"
    found = [engine_rank(qwen3(), rank, tp=8)[name] for rank in range(8)]
    assert {layout.shape for layout in found} == {(18, 18)}
    rows = [[(box.tensor[-13:-7], box.r0, box.r1, box.row) for box in layout.boxes] for layout in found]
    assert rows[0] == [("q_proj", 0, 6, 0), ("k_proj", 0, 6, 6), ("v_proj", 0, 6, 12)]
    assert rows[3] == [("q_proj", 18, 24, 0), ("k_proj", 0, 6, 6), ("v_proj", 0, 6, 12)]
    assert rows[4] == [("q_proj", 24, 30, 0), ("k_proj", 6, 12, 6), ("v_proj", 6, 12, 12)]


def test_experts_are_whole_with_expert_parallelism_and_cut_over_tp_and_dp_without():
    config, name = MODELS["qwen3_moe, tied"], "model.layers.0.mlp.experts.routed_experts.w13_weight"
    whole = engine_rank(config, 2, tp=2, dp=2, expert_parallel=True)[name]
    assert whole.shape == (3, 48, 18) and whole.matrix == (144, 18)
    assert [(box.tensor.split("experts.")[1], box.r0, box.r1, box.row) for box in whole.boxes[:3]] == [
        ("6.gate_proj.weight", 0, 24, 0), ("6.up_proj.weight", 0, 24, 24), ("7.gate_proj.weight", 0, 24, 48),
    ]  # fmt: skip
    cut = engine_rank(config, 2, tp=2, dp=2)[name]
    assert cut.shape == (12, 12, 18)
    assert [(box.r0, box.r1, box.row) for box in cut.boxes[:2]] == [(12, 18, 0), (12, 18, 6)]
    uneven = [engine_rank(config, rank, dp=5, expert_parallel=True)[name].shape[0] for rank in range(5)]
    assert uneven == [3, 3, 2, 2, 2]


def test_an_engine_pads_the_vocabulary_to_64_whatever_its_tp():
    shapes = [engine_rank(qwen3(), 0, tp=tp)["lm_head.weight"].shape for tp in (1, 2, 4, 8)]
    assert shapes == [(128, 18), (64, 18), (32, 18), (16, 18)]
    last = engine_rank(qwen3(), 7, tp=8)["lm_head.weight"]
    assert last.boxes == () and [(pad.row, pad.rows) for pad in last.padding] == [(0, 16)]


def test_latents_are_whole_on_each_rank_of_an_engine_and_lie_in_one_parameter():
    found = engine_rank(deepseek(), 1, tp=2)["model.layers.0.self_attn.fused_qkv_a_proj.weight"]
    assert [(box.tensor.split("self_attn.")[1], box.rows, box.row) for box in found.boxes] == [
        ("q_a_proj.weight", 20, 0), ("kv_a_proj_with_mqa.weight", 24, 20),
    ]  # fmt: skip


def test_layers_that_pp_does_not_divide_go_to_the_stages_before_the_last():
    for count, pp, sizes in ((7, 3, [2, 3, 2]), (8, 3, [3, 3, 2]), (9, 4, [2, 2, 3, 2]), (11, 4, [3, 3, 3, 2])):
        stages = engine_stages(qwen3(num_hidden_layers=count), EngineTopology(pp=pp))
        assert [stop - start for start, stop in stages] == sizes
    by_hand = engine_stages(qwen3(num_hidden_layers=7), EngineTopology(pp=3, layers=(1, 5, 1)))
    assert by_hand == ((0, 1), (1, 6), (6, 7))


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (qwen3_moe(), {"tp": 2}, "num_key_value_heads=3 and TP 2: neither divides the other"),
        (qwen3(), {"tp": 3}, "num_attention_heads=8 cannot be divided among TP 3"),
        (nemotron(), {"tp": 8}, "n_groups=4 cannot be divided among TP 8"),
        (deepseek(num_attention_heads=6, num_key_value_heads=6), {"tp": 4}, "num_attention_heads=6"),
        (qwen3(num_attention_heads=3, num_key_value_heads=3), {"tp": 3}, "the padded vocabulary=128 cannot be"),
        (qwen3_moe(), {"dp": 16, "expert_parallel": True}, "12 experts over tp \\* dp = 16 ranks"),
        (qwen3_moe(num_key_value_heads=2), {"tp": 2, "dp": 2}, "6 rows cannot be cut into 4 equal parts"),
        (nemotron(tie_word_embeddings=True), {}, "NemotronHForCausalLM has a head of its own"),
        (qwen3(), {"pp": 2, "layers": (1, 2)}, "4 layers cannot be split into PP 2 stages of \\[1, 2\\]"),
        (qwen3(), {"pp": 5}, "4 layers cannot be split into PP 5 stages"),
    ],
)
def test_what_vllm_cannot_cut_is_refused_with_the_key(config, sizes, message):
    with pytest.raises(LayoutError, match=message):
        engine_layouts(config, EngineTopology(**sizes), 0)


def test_a_rank_outside_the_engine_is_refused():
    with pytest.raises(LayoutError, match="rank 4 of an engine of 4 ranks"):
        engine_layouts(qwen3(), EngineTopology(tp=4), 4)


# C03: tying is decided by the config's flag, not by a name


@pytest.mark.parametrize("tied", [True, False])
def test_a_prefixed_embedding_is_tied_at_both_ends_of_a_pipeline(monkeypatch, tied):
    from megatron_agentrl.layout import decoder, parts

    name = "model.language_model.embed_tokens.weight"
    monkeypatch.setattr(decoder, "embedding", lambda config: parts.table(config, name))
    config = llama(vocab_size=12, hidden_size=4, num_hidden_layers=4, tie_word_embeddings=tied)
    four = grid(config, world=4, pp=4)
    ends = [
        {x.name: x.boxes[0].tensor for x in parameter_layouts(config, four.coordinates(rank)) if not x.name.startswith("decoder")}
        for rank in range(4)
    ]  # fmt: skip
    head = name if tied else "lm_head.weight"
    assert ends == [{"embedding.word_embeddings.weight": name}, {}, {}, {"output_layer.weight": head}]
    source = checkpoint(config)
    assert (name in source) and ("lm_head.weight" in source) != tied
    assert all(
        (Ranks(config, four, Variant()).fill(source).export(0)[key] == value).all() for key, value in source.items()
    )
