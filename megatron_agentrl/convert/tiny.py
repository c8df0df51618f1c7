"""Tiny random models of the known architectures, with tokenizer and chat template: for tests, demos and servers.

No two sizes of a model are equal where a mistake could hide behind that; sizes that parallel layouts divide are
divisible (2 key/value heads, 12 experts). Weights depend on the seed and each tensor's name alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert import jobs
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.safetensors_io import Shards
from megatron_agentrl.layout.megatron import heads_pattern
from megatron_agentrl.trainer.random_init import random_tensors

PAD, BOS, EOS, START = "<pad>", "<bos>", "<eos>", "<turn>"
SPECIAL = (PAD, BOS, EOS, START)
VOCABULARY = len(SPECIAL) + 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "use_cache": True,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LLAMA: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 176, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "mlp_bias": False,
} | _ROPE  # fmt: skip
_NEMOTRON: dict[str, Any] = _COMMON | {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 96,
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention", "moe"],
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 176, "ssm_state_size": 48,
    "mamba_num_heads": 12, "mamba_head_dim": 32, "n_groups": 4, "conv_kernel": 4, "chunk_size": 64,
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 80,
    "moe_shared_expert_intermediate_size": 112, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
    "use_bias": False, "mlp_bias": False, "mamba_proj_bias": False, "use_conv_bias": True,
    "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "num_hidden_layers": 6,
    "mtp_layers_block_type": ["full_attention", "moe"],
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": _NEMOTRON,
    "nemotron_h_latent": _NEMOTRON | {"moe_latent_size": 56},
    "qwen3_moe": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 176,
        "moe_intermediate_size": 80, "num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [1], "hidden_act": "silu", "rms_norm_eps": 1e-6,
    } | _ROPE,
    "qwen3": _LLAMA | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "llama": _LLAMA,
    "deepseek_v3": _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 96,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
        "v_head_dim": 24, "intermediate_size": 176, "moe_intermediate_size": 80, "n_routed_experts": 12,
        "num_experts_per_tok": 4, "n_group": 3, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_interleave": True, "num_nextn_predict_layers": 1,
    } | _ROPE,
}  # fmt: skip

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def make_tiny(
    name: str,
    target: Path,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    heads: bool = True,
    changes: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
    replace: bool = False,
) -> None:
    """Write a Hugging Face folder with random weights of the architecture `name`, one of CONFIGS.

    Args:
        heads: the multi-token-prediction heads too, where the architecture has them.
        changes: keys of config.json to set otherwise.

    Raises:
        ConvertError: an unknown name, or `target` is there already.
    """
    if name not in CONFIGS:
        raise ConvertError(f"{name!r} is no architecture here; expected one of {', '.join(CONFIGS)}")
    config = CONFIGS[name] | {"dtype": str(dtype).removeprefix("torch.")} | dict(changes or {})
    heads = heads and bool(heads_pattern(config)[1])
    if not heads and "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    tensors = dict(_tensors(config, seed, dtype, heads))
    with jobs.target(target, replace) as folder:
        with Shards(folder, {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, shard_bytes) as shards:
            for tensor_name, tensor in tensors.items():
                shards.write(tensor_name, tensor.reshape(tensor.shape[0], -1).contiguous())
        _write_json(folder / "config.json", config)
        _write_json(
            folder / "generation_config.json",
            {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "do_sample": True, "temperature": 1.0},
        )
        _write_tokenizer(folder)


def _tensors(
    config: Mapping[str, Any], seed: int, dtype: torch.dtype, heads: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's random weights, with norms and biases moved off the constants that would hide a swap."""
    for name, tensor in random_tensors(config, seed, dtype, heads):
        if tensor.dim() == 1 and not name.endswith(("A_log", "dt_bias")):
            digest = hashlib.sha256(f"{seed}|spread|{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            tensor = (tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        yield name, tensor


def _write_tokenizer(folder: Path) -> None:
    """One token a byte, four special ones before them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
            "clean_up_tokenization_spaces": False, "model_max_length": 1024,
        },
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
