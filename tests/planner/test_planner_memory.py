"""Parameter counts against published totals, and the order of magnitude of what a run needs."""

from math import prod

import pytest
from quickstart_shape import CONFIG as QUICKSTART

from megatron_agentrl.layout.megatron import hf_tensors
from megatron_agentrl.planner.memory import (
    GIB,
    activation_bytes,
    available_bytes,
    count_heads,
    count_parameters,
    device_bytes_per_parameter,
    estimate,
    host_bytes_per_parameter,
)
from megatron_agentrl.recipe.schema import (
    Dtype,
    Fp8Format,
    GradientDtype,
    Memory,
    MomentDtype,
    Precision,
    Recipe,
    Recompute,
    RecomputeMethod,
)

NANO = {
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}


LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def test_the_quickstart_model_has_734_thousand_parameters():
    assert count_parameters(QUICKSTART).total == 734_400


def test_nano_has_31_58_billion_parameters_93_percent_of_them_in_experts():
    count = count_parameters(NANO)
    assert count.total == 31_577_940_288
    assert round(count.experts / count.total, 3) == 0.930


def test_qwen3_30b_a3b_has_30_53_billion_parameters():
    assert count_parameters(QWEN3_30B).total == 30_532_122_624


def test_layer_names_count_as_pattern_letters_do():
    named = {**QUICKSTART, "layers_block_type": ["mamba", "attention", "moe"] * 2}
    del named["hybrid_override_pattern"]
    assert count_parameters(named) == count_parameters(QUICKSTART)


def test_tied_tables_count_once():
    assert count_parameters({**QUICKSTART, "tie_word_embeddings": True}).embedding == 272 * 128


def test_memory_grows_with_what_a_run_holds():
    recipe = Recipe()
    plain = estimate(recipe, QUICKSTART, gpu=False)
    assert 3 * GIB < plain.total < 8 * GIB
    recipe.rollout.kv_cache_gib = 3.0
    assert estimate(recipe, QUICKSTART, gpu=False).total == plain.total + 2 * GIB
    recipe.topology.world = 2
    assert estimate(recipe, QUICKSTART, gpu=False).trainers == 2
    assert estimate(recipe, QUICKSTART, gpu=False, mode="eval").trainers == 0


def test_nano_in_fp32_needs_16_bytes_a_parameter_on_a_trainer_and_expert_parallelism_lowers_it():
    recipe = Recipe()
    one = estimate(recipe, NANO, gpu=False).trainer
    assert 16 * 31.577e9 < one < 16 * 31.578e9 + 45 * GIB
    recipe.topology.world = recipe.topology.ep = 4
    assert round(one - estimate(recipe, NANO, gpu=False).trainer) == 12 * 29_374_808_064


def test_bf16_halves_an_engines_two_copies_of_the_weights():
    recipe = Recipe()
    recipe.rollout.dtype = Dtype.bf16
    fp32 = Recipe()
    halved = estimate(fp32, NANO, gpu=False).engine - estimate(recipe, NANO, gpu=False).engine
    assert round(halved) == 2 * 2 * 31_577_940_288


def test_bytes_a_parameter_by_type():
    def each(dtype: Dtype, precision: Precision | None = None, offload: float = 0.0) -> tuple[float, float]:
        recipe = Recipe(precision=precision or Precision(), memory=Memory(optimizer_offload=offload))
        recipe.model.dtype = dtype
        return device_bytes_per_parameter(recipe), host_bytes_per_parameter(recipe)

    assert each(Dtype.fp32) == (4 + 4 + 8, 0)
    assert each(Dtype.bf16) == each(Dtype.fp16) == (2 + 4 + 4 + 8, 0)
    assert each(Dtype.bf16, Precision(gradients=GradientDtype.bf16)) == (2 + 2 + 4 + 8, 0)
    assert each(Dtype.bf16, Precision(exp_avg=MomentDtype.fp8, exp_avg_sq=MomentDtype.bf16)) == (2 + 4 + 4 + 1 + 2, 0)
    assert each(Dtype.bf16, Precision(fp8=Fp8Format.e4m3, fp8_param_gather=True)) == (2 + 4 + 4 + 8, 0)
    assert each(Dtype.bf16, offload=0.75) == (2 + 4 + 3, 9)


def test_full_recompute_keeps_inputs_and_one_unit():
    def kept(**memory) -> float:
        recipe = Recipe(memory=Memory(**memory))
        recipe.train.micro_batch_tokens = 1000
        return activation_bytes(recipe, QUICKSTART) / 4000 - 3 * 272

    assert kept() == 17 * 6 * 128
    assert kept(recompute=Recompute.full) == (6 + 17) * 128
    assert kept(recompute=Recompute.full, recompute_layers=3) == (2 + 3 * 17) * 128
    block = {"recompute": Recompute.full, "recompute_method": RecomputeMethod.block, "recompute_layers": 4}
    assert kept(**block) == (4 + 2 * 17) * 128


def test_context_parallel_ranks_share_the_positions_of_a_micro_batch_and_no_weights():
    recipe = Recipe()
    recipe.train.micro_batch_tokens = 4096
    assert activation_bytes(recipe, NANO) == 4096 * 4 * (17 * 52 * 2688 + 3 * 131072)  # 45.2e9
    whole = estimate(recipe, NANO, gpu=False).trainer
    recipe.topology.world = recipe.topology.cp = 4
    assert activation_bytes(recipe, NANO) == 1024 * 4 * (17 * 52 * 2688 + 3 * 131072)
    assert whole - estimate(recipe, NANO, gpu=False).trainer == pytest.approx(3072 * 4 * (17 * 52 * 2688 + 3 * 131072))


def test_on_gpus_only_the_processes_themselves_count():
    assert estimate(Recipe(), NANO, gpu=True).total < 8 * GIB


def test_this_machine_has_memory_to_offer():
    free, limit = available_bytes()
    assert 0 < free < 2**50
    assert limit


def test_deepseek_v3_has_671_billion_parameters_and_a_head_of_12():
    config = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3, "intermediate_size": 18432,
        "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    count = count_parameters(config)
    assert count.total == 671_026_419_200  # published: 671 billion
    assert round(count.experts / count.total, 3) == 0.974
    assert count_heads(config).total == 11_610_068_224  # published: 11.5 billion beside the shared tables


def test_dense_decoders_have_their_published_sizes():
    assert count_parameters(LLAMA_8B).total == 8_030_261_248
    assert count_parameters(QWEN3_8B).total == 8_190_735_360
    assert count_parameters(QWEN3_8B).experts == 0


@pytest.mark.parametrize(
    "model", [QUICKSTART, NANO, QWEN3_30B, LLAMA_8B, QWEN3_8B, QWEN3_30B | {"mlp_only_layers": [0, 5]}]
)
def test_the_count_is_the_sum_over_the_tensors_of_the_layout(model):
    config = {"head_dim": 128, "conv_kernel": 4} | model
    assert count_parameters(config).total == sum(prod(shape) for shape in hf_tensors(config).values())
