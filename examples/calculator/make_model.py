"""Writes model/: a 734k-parameter hybrid policy (Mamba-2, attention, mixture of experts) with a byte vocabulary.

No weights are written: the recipe starts it with `model.init=random`. Run `python make_model.py` to
write the folder anew; the files beside it are its output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Special tokens, from id 256 on. Ids 0-255 are the bytes.
SPECIALS = ["<pad>", "<bos>", "<user>", "<asst>", "<call>", "</call>", "<res>", "</res>", "<ans>", "<eos>"]
VOCABULARY = 272

TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    <user>{{ message.content }}{% if not loop.last or add_generation_prompt %}<asst>{% endif -%}
  {%- elif message.role == 'assistant' -%}
    {%- for call in message.tool_calls or [] -%}
      <call>{{ call.function.arguments.expression }}</call>
    {%- else -%}
      <ans>{{ message.content }}<eos>
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    <res>{{ message.content }}</res>
  {%- else -%}
    {{- raise_exception('roles are user, assistant and tool, not ' ~ message.role) -}}
  {%- endif -%}
{%- endfor -%}
"""

#: How a sampled turn is read back. A turn is a call or an answer from its first token on; anything else
#: is handed to the agent as raw text.
RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "start_anchor": ["<asst>", "</res>"],
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open_pattern": r"\A<call>",
            "close": "</call>",
            "content": "text",
            "content_args": {"strip": False},
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "calculator", "arguments": {"expression": "{content}"}},
            },
        },
        "content": {
            "open_pattern": r"\A<ans>",
            "close": "<eos>",
            "content": "text",
            "content_args": {"strip": False},
        },
    },
}

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention", "full_attention", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32",
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "moe_latent_size": None,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "intermediate_size": 256,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "layer_norm_epsilon": 1e-05,
    "residual_in_fp32": False,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 257,
    "eos_token_id": 265,
    "pad_token_id": 256,
    "dtype": "float32",
}


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: one token per byte, the specials, and unused ids up to the vocabulary's size."""
    specials = SPECIALS + [f"<unused{n}>" for n in range(VOCABULARY - 256 - len(SPECIALS))]
    added = [
        {"id": 256 + n, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for n, token in enumerate(specials)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_alphabet())},
            "merges": [],
        },
    }


def files() -> dict[str, str]:
    """Name → text of every file of the folder."""
    objects: dict[str, dict[str, Any]] = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": 257, "eos_token_id": [261, 265], "pad_token_id": 256},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": TEMPLATE,
            "response_template": RESPONSE_TEMPLATE,
        },
    }
    texts = {name: json.dumps(value, indent=1, ensure_ascii=True) + "\n" for name, value in objects.items()}
    return {**texts, "chat_template.jinja": TEMPLATE}


def main() -> None:
    folder = Path(__file__).parent / "model"
    folder.mkdir(exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
