"""Config reading and its refusals, checkpoint keys, tied heads, and logits against transformers."""

from __future__ import annotations

import inspect
import json
import re

import pytest
import torch
import trainer_toy as toy
from megatron.core.models.hybrid import hybrid_layer_specs
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.trainer import model
from megatron_agentrl.trainer.architectures import architecture
from megatron_agentrl.trainer.config import transformer_config
from megatron_agentrl.trainer.logprobs import token_logprobs
from megatron_agentrl.trainer.random_init import random_tensors
from megatron_agentrl.trainer.weights_io import load_hf


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        (toy.NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
        (toy.NEMOTRON | {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (toy.NEMOTRON | {"n_group": 3, "topk_group": 2}, "found 3 // 2"),
        (toy.NEMOTRON | {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        (toy.QWEN | {"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_type='yarn'"),
        (toy.QWEN | {"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(hf, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        architecture(hf)


def test_topologies_that_the_model_cannot_take_are_refused_by_name():
    with pytest.raises(ValueError, match="sequence_parallel=true"):
        transformer_config(toy.NEMOTRON, toy.recipe(Topology(world=2, tp=2)))


def test_infinity_as_transformers_writes_it():
    assert architecture(toy.NEMOTRON | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}).pattern == "M*EM-E"


def test_experts_axis_without_experts_is_refused():
    dense = toy.QWEN | {"mlp_only_layers": [0, 1]}
    with pytest.raises(ValueError, match="topology.ep=2"):
        transformer_config(dense, toy.recipe(Topology(world=2, ep=2)))


# Keys of the distributed checkpoint under megatron-core's Transformer Engine specification, derived from its
# source: hybrid_stack_spec says which class stands where (checked below), TELayerNormColumnParallelLinear holds
# `layer_norm_weight` and `weight`, TERowParallelLinear `weight`, TENorm `weight`; TEGroupedMLP.sharded_state_dict
# puts every expert under `experts.linear_fc{1,2}.weight` with the expert as an axis; MambaMixer and the router
# are the same classes on both sides. MambaMixer splits in_proj and conv1d, and SwiGLU fc1, by factories.
MIXER = ["A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight", "out_proj.weight",
         "in_proj.weight", "in_proj.layer_norm_weight"]  # fmt: skip
ATTENTION = ["linear_qkv.weight", "linear_qkv.layer_norm_weight", "linear_proj.weight"]
EXPERTS = ["pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.experts.experts.linear_fc1.weight",
           "mlp.experts.experts.linear_fc2.weight"]  # fmt: skip
NEMOTRON_MOE = EXPERTS + ["mlp.router.expert_bias", "mlp.shared_experts.linear_fc1.weight",
                          "mlp.shared_experts.linear_fc2.weight"]  # fmt: skip
DENSE = ["mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.weight"]
ENDS = {"embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"}


def layer(index: int, names: list[str], prefix: str = "") -> set[str]:
    return {f"decoder.layers.{index}.{prefix}{name}" for name in names}


EXPECTED = {
    "nemotron": ENDS | layer(0, MIXER, "mixer.") | layer(1, ATTENTION, "self_attention.") | layer(2, NEMOTRON_MOE)
    | layer(3, MIXER, "mixer.") | layer(4, DENSE) | layer(5, NEMOTRON_MOE),
    "qwen": ENDS | layer(1, EXPERTS) | layer(3, EXPERTS)
    | layer(0, [*ATTENTION, "q_layernorm.weight", "k_layernorm.weight"], "self_attention.")
    | layer(2, [*ATTENTION, "q_layernorm.weight", "k_layernorm.weight"], "self_attention."),
}  # fmt: skip


@pytest.mark.parametrize("name", toy.MODELS)
def test_checkpoint_keys_are_those_of_the_transformer_engine_specification(rank, name):
    chunk = model.build(toy.MODELS[name], toy.recipe(), rank)[0]
    keys = {value.key for value in chunk.sharded_state_dict().values()}
    assert {key for key in keys if "_extra_state" not in key} == EXPECTED[name]


def test_megatron_cores_own_specification_is_the_one_the_keys_were_derived_from():
    source = re.sub(r"\s+", " ", inspect.getsource(hybrid_layer_specs).split("hybrid_inference_stack_spec =")[0])
    for stands in (
        "in_proj=TELayerNormColumnParallelLinear, out_proj=TERowParallelLinear",
        "linear_qkv=TELayerNormColumnParallelLinear, core_attention=TEDotProductAttention, linear_proj=TERowParallelLinear",
        "linear_fc1=TELayerNormColumnParallelLinear, linear_fc2=TERowParallelLinear",
        "pre_mlp_layernorm=TENorm, mlp=moe",
    ):
        assert stands in source


def test_experts_are_an_axis_of_their_checkpoint_tensor(rank):
    chunk = model.build(toy.NEMOTRON, toy.recipe(), rank)[0]
    state = chunk.sharded_state_dict()
    shard = state["decoder.layers.2.mlp.experts.local_experts.7.linear_fc2.weight"]
    assert shard.key == "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"
    assert (shard.global_shape, shard.global_offset) == ((12, 40, 28), (7, 0, 0))


def test_a_tied_head_has_one_tensor_and_an_untied_one_two(rank):
    tied = model.build(toy.QWEN | {"tie_word_embeddings": True}, toy.recipe(), rank)[0]
    assert "output_layer.weight" not in dict(tied.named_parameters())
    assert tied.shared_embedding_or_output_weight() is tied.embedding.word_embeddings.weight
    untied = dict(model.build(toy.QWEN, toy.recipe(), rank)[0].named_parameters())
    assert untied["output_layer.weight"].data_ptr() != untied["embedding.word_embeddings.weight"].data_ptr()


def test_padding_columns_are_outside_the_softmax():
    logits = torch.zeros(1, 3, 128)
    logits[..., 101:] = 50.0
    lp = token_logprobs(logits, torch.tensor([[0, 57, 100]]), 1.0, 101)
    torch.testing.assert_close(lp, torch.full((1, 3), -4.61512), atol=1e-5, rtol=0)


def test_temperature_divides_the_logits_and_bf16_is_computed_in_float32():
    logits = torch.tensor([[[2.0, 0.0]]], dtype=torch.bfloat16)
    lp = token_logprobs(logits, torch.tensor([[0]]), 0.5, 2)
    assert lp.dtype == torch.float32
    assert float(lp) == pytest.approx(-0.01814993, abs=1e-7)  # -ln(1 + exp(-4))


@pytest.mark.parametrize(("ids", "temperature", "words"), [([[101]], 1.0, "101 tokens"), ([[0]], 0.0, "temperature")])
def test_impossible_logprobs_are_refused(ids, temperature, words):
    with pytest.raises(ValueError, match=words):
        token_logprobs(torch.zeros(1, 1, 128), torch.tensor(ids), temperature, 101)


def scattered(hf):
    """Random weights, each moved away from its neutral start, so that none is without effect."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in random_tensors(hf, seed=4):
        spread = 0.3 * torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            yield name, tensor * 4
        else:
            yield name, spread if "e_score_correction_bias" in name else tensor + spread


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nemotron", {}),
        (
            "nemotron",
            {"layer_norm_epsilon": 1e-3, "conv_kernel": 3, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 4},
        ),
        ("qwen", {}),
        ("qwen", {"norm_topk_prob": False, "mlp_only_layers": [1]}),
        ("qwen", {"tie_word_embeddings": True}),
    ],
)
def test_logits_equal_transformers_on_the_same_weights(rank, tmp_path, name, changes):
    hf = toy.MODELS[name] | changes
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file(dict(scattered(hf)), tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            # transformers clamps dt from below by time_step_min, which is meant for its initial value only;
            # the engine and megatron-core follow the config's time_step_limit, (0, inf).
            module.time_step_limit = (0.0, float("inf"))
    chunks = model.build(hf, toy.recipe(), rank)
    load_hf(chunks, hf, tmp_path, rank)
    ids = torch.randint(0, 101, (3, 19), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        ours = chunks[0](ids, torch.arange(19).expand(3, -1).contiguous(), None)[..., :101]
        want = theirs(input_ids=ids).logits
    assert want.std() > 0.1
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)
