"""Every config.json key that changes what a model computes is supported or refused by name, without torch."""

import ast
import json
import math
import subprocess
import sys

import pytest

from megatron_agentrl.layout.megatron import ARCHITECTURES as LAYOUTS
from megatron_agentrl.recipe.model_rules import RULES, canonical, model_problems, rope_parameters
from megatron_agentrl.recipe.validate import ARCHITECTURES

DENSE = {"vocab_size": 101, "hidden_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 12, "intermediate_size": 52}  # fmt: skip
LLAMA, QWEN3 = DENSE | {"model_type": "llama"}, DENSE | {"model_type": "qwen3"}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
#: The published config.json of Nemotron 3 Nano, all of its keys.
NANO = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 64, "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1, "pad_token_id": 0,
    "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 1e-4, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001,
    "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4", "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
#: The sizes of DeepSeek-V3's published config.json, without its FP8 quantization.
DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 3,
    "intermediate_size": 18432, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1,
    "num_nextn_predict_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840, "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0,
}  # fmt: skip
YARN = DEEPSEEK["rope_scaling"]
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_every_architecture_has_rules_and_a_layout():
    assert set(ARCHITECTURES) <= set(RULES) and set(ARCHITECTURES) <= set(LAYOUTS)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN3,
        MOE,
        NANO,
        DEEPSEEK,
        DEEPSEEK | {"q_lora_rank": None, "rope_scaling": None},
        NANO | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        NANO | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]},
        MOE | {"num_experts": 0},
        {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 12},
        LLAMA | {"rope_scaling": SCALED | {"original_max_position_embeddings": 8192}, "rope_theta": 500000.0},
        LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        QWEN3 | {"layer_types": ["full_attention"] * 3, "max_window_layers": 3, "sliding_window": 4096},
        LLAMA | {"_name_or_path": "somewhere", "some_future_switch": False, "another": None},
        NANO | {"time_step_limit": [0.0, {"__float__": "Infinity"}], "moe_latent_size": 1024},
    ],
)
def test_what_is_computed_exactly_has_no_problem(config):
    assert list(model_problems(config)) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"attention_bias": True}, "attention_bias=True is not computed for model_type='llama'; expected False"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias=True is not computed"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act='gelu' is not computed for model_type='llama'; expected 'silu'"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window=4096 is unknown for model_type='llama'"),
        (LLAMA | {"rope_interleaved": True}, "rope_interleaved=True is unknown"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not computed"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn' is not computed"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type='dynamic' is not computed"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor=None for rope_type='linear'; expected a number above 0"),
        (LLAMA | {"rope_scaling": SCALED}, "original_max_position_embeddings=None for rope_type='llama3'"),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config={'quant_method': 'fp8'} is not"),
        (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0 is unknown for model_type='llama'"),
        (QWEN3 | {"use_sliding_window": True}, "use_sliding_window=True is not computed"),
        (QWEN3 | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has sliding_attention; expected"),
        (QWEN3 | {"head_dim": None}, "head_dim is missing, a qwen3 model needs it"),
        (MOE | {"num_experts_per_tok": 13}, "num_experts_per_tok=13 with 12 experts; expected 1 to 12"),
        (MOE | {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size=64 is unknown"),
        (NANO | {"use_bias": True}, "use_bias=True is not computed for model_type='nemotron_h'"),
        (NANO | {"use_conv_bias": False}, "use_conv_bias=False is not computed"),
        (NANO | {"mamba_conv_bias": False, "use_conv_bias": None}, "use_conv_bias=False is not computed"),
        (NANO | {"residual_in_fp32": True}, "residual_in_fp32=True is not computed"),
        (NANO | {"tie_word_embeddings": True}, "tie_word_embeddings=True is not computed"),
        (NANO | {"n_shared_experts": 2}, "n_shared_experts=2 is not computed"),
        (NANO | {"num_hidden_layers": 50}, "num_hidden_layers=50, but the layer pattern has 52 layers"),
        (NANO | {"hybrid_override_pattern": "MX", "num_hidden_layers": 2}, "layer kinds 'X' are unknown"),
        (NANO | {"hybrid_override_pattern": None}, "neither hybrid_override_pattern nor layers_block_type"),
        (NANO | {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=6 is not computed"),
        (NANO | {"n_group": 4, "topk_group": 2}, "n_group=4 is computed where num_experts_per_tok // topk_group is 2"),
        (NANO | {"time_step_limit": [0.0, 1.0]}, "time_step_limit=(0.0, 1.0) is not computed"),
        (NANO | {"sliding_window": 128}, "sliding_window=128 is not computed"),
        (NANO | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*X"}, "layer kinds 'X' are unknown"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank is missing, a deepseek_v3 model needs it"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave=False is not computed for model_type='deepseek_v3'"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method='greedy' is not computed"),
        (DEEPSEEK | {"num_key_value_heads": 8}, "latent attention has a key and a value for each of its 128 heads"),
        (DEEPSEEK | {"first_k_dense_replace": 62}, "first_k_dense_replace=62; expected 0 to num_hidden_layers = 61"),
        (DEEPSEEK | {"topk_group": 2}, "n_group=8 is computed where num_experts_per_tok // topk_group is 2, found 8 // 2"),
        (DEEPSEEK | {"rope_scaling": SCALED}, "rope_type='llama3' is not computed for model_type='deepseek_v3'"),
        (DEEPSEEK | {"rope_scaling": YARN | {"factor": None}}, "factor=None for rope_type='yarn'"),
        (DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0}}, "mscale_all_dim=1.0 for rope_type='yarn' without mscale"),
        (DEEPSEEK | {"rope_scaling": YARN | {"truncate": False}}, "truncate=False for rope_type='yarn' is not computed"),
        (DEEPSEEK | {"index_topk": 2048}, "index_topk=2048 is unknown for model_type='deepseek_v3'"),
    ],
)  # fmt: skip
def test_what_is_not_is_refused_by_name_in_one_line(config, words):
    (line,) = model_problems(config)
    assert words in line and line.startswith("config.json: ") and "\n" not in line
    assert "; " in line  # a way out


def test_older_spellings_are_read():
    assert canonical({"mamba_n_groups": 8, "mamba_d_conv": 4})["n_groups"] == 8
    assert rope_parameters({"rope_theta": 5e5}) == {"rope_type": "default", "rope_theta": 5e5}
    assert rope_parameters({"rope_scaling": {"type": "linear", "factor": 2.0}})["rope_type"] == "linear"
    llama3 = rope_parameters({"rope_parameters": SCALED, "max_position_embeddings": 131072})
    assert llama3["original_max_position_embeddings"] == 131072


CLASSES = ("LlamaConfig", "Qwen3Config", "Qwen3MoeConfig", "NemotronHConfig", "DeepseekV3Config")


@pytest.fixture(scope="module")
def written():
    """Each class's defaults as it saves them. In one process of its own: importing transformers takes long."""
    code = f"import transformers as t; print([getattr(t, n)().to_json_string(use_diff=False) for n in {CLASSES}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    return dict(zip(CLASSES, map(json.loads, ast.literal_eval(done.stdout)), strict=True))


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_that_transformers_writes_is_known(written, name):
    """What the defaults hold beyond the rules' words would be refused as unknown."""
    assert [line for line in model_problems(written[name]) if "unknown" in line] == []
