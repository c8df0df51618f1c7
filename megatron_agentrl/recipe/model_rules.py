"""Which config.json the trainer computes exactly as its own model does, and why others are refused. No torch.

`model_problems` yields one line for each key that is missing, that has a value which megatron-core or the engine
would compute differently, or that nothing here knows. The recipe's check and the trainer's readers
(`trainer.architectures`) call it, so what passes the check is what gets built. A new `model_type` needs a `Rules`
here; parallel sizes and the shapes of weights are judged elsewhere (`recipe.validate`, `layout`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_agentrl.recipe.model_kinds import WORDS

Config = dict[str, Any]

#: Spellings that older remote code or transformers wrote, by the name that is read.
_OLDER = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "chunk_size": "mamba_chunk_size",
    "time_step_limit": "mamba_dt_limit",
    "head_dim": "attention_head_dim",
}


def _keys(words: str) -> frozenset[str]:
    return frozenset(words.split())


#: Keys of any model that have no part in the computation: provenance, special tokens, defaults of generation, training
#: and serving.
BOOKKEEPING = _keys(
    """architectures transformers_version dtype torch_dtype auto_map use_cache name_or_path license
    initializer_range pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id
    return_dict output_hidden_states output_attentions torchscript chunk_size_feed_forward is_encoder_decoder is_decoder
    problem_type id2label label2id num_labels task_specific_params tokenizer_class prefix use_return_dict
    output_router_logits router_aux_loss_coef pretraining_tp model_max_length unsloth_version
    unsloth_fixed is_llama_config finetuning_task keys_to_ignore_at_inference
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
    transformers.js_config"""
)
#: These and the sizes that every reader uses.
_COMMON = BOOKKEEPING | _keys(
    """model_type vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    tie_word_embeddings max_position_embeddings rope_theta"""
)


@dataclass(frozen=True)
class Rules:
    """What a model_type's config.json may say.

    reads      further keys that the layout table and the reader use, or that have no part in the computation
    only       key -> (value where the key is absent, further values that mean the same)
    required   keys without a default, for a given config
    special    rules over several keys
    """

    reads: frozenset[str]
    only: dict[str, tuple[Any, ...]]
    required: Callable[[Config], list[str]]
    special: Callable[[Config], Iterator[str]]


def canonical(config: Config) -> Config:
    """The config with older spellings under the names that are read; nothing else changes."""
    return config | {new: config[old] for new, old in _OLDER.items() if old in config and config.get(new) is None}


def model_problems(config: Config) -> Iterator[str]:
    """One line for each thing in a config.json dict that keeps its model from being trained exactly.

    A model_type without rules yields nothing: whether it is known at all is the caller's question.
    """
    kind = config.get("model_type")
    rules = RULES.get(str(kind))
    if rules is None:
        return
    found = canonical(config)
    missing = [key for key in rules.required(found) if found.get(key) is None]
    for key in missing:
        yield f"config.json: {key} is missing, a {kind} model needs it; save the model's whole config"
    for key, values in {**_ONLY, **rules.only}.items():
        value = found.get(key, values[0])
        if value not in values:
            yield (
                f"config.json: {key}={value!r} is not computed for model_type={kind!r}; expected "
                f"{' or '.join(map(repr, values))}; choose a model without it"
            )
    known = _COMMON | rules.reads | set(rules.only) | set(_ONLY) | set(_OLDER.values())
    for key in sorted(set(config) - known):
        if not key.startswith("_") and config[key] not in (None, False, 0, "", [], {}):
            yield (
                f"config.json: {key}={_short(config[key])} is unknown for model_type={kind!r} and may change what the "
                f"model computes; expected only known keys; remove {key} where it does not"
            )
    if not missing:
        yield from rules.special(found)


#: Key -> allowed values, of every model_type.
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None, {}),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0.0, None),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (False, None),
    "cross_attention_hidden_size": (None,),
    "add_cross_attention": (False, None),
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _expert_problems(config: Config, count: int) -> Iterator[str]:
    chosen = config["num_experts_per_tok"]
    if not isinstance(chosen, int) or not 1 <= chosen <= count:
        yield (
            f"config.json: num_experts_per_tok={chosen!r} with {count} experts; expected 1 to {count}; "
            "save the model's own config"
        )


# ---- decoders: llama, qwen3, qwen3_moe ----------------------------------------------------------------------------


def rope_parameters(config: Config) -> dict[str, Any]:
    """RoPE's parameters under transformers' present names, from any of its spellings: rope_type, rope_theta and,
    for a scaled type, what that type takes."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.get("type") or "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return rope


_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_problems(config: Config) -> Iterator[str]:
    kind, rope = config["model_type"], rope_parameters(config)
    needs = _ROPE_NEEDS.get(rope["rope_type"])
    if needs is None:
        yield (
            f"config.json: rope_type={rope['rope_type']!r} is not computed for model_type={kind!r}; expected one of "
            f"{', '.join(_ROPE_NEEDS)}; choose a model with one of those"
        )
        return
    for key in needs:
        if not isinstance(rope.get(key), int | float) or not rope[key] > 0:
            yield (
                f"config.json: {key}={rope.get(key)!r} for rope_type={rope['rope_type']!r}; expected a number above 0; "
                "save the model's whole config"
            )
    # transformers ignores the factor for these models, vLLM applies it: trainer and engine could not agree.
    for where in (rope, config):
        if where.get("partial_rotary_factor", 1.0) not in (1.0, None):
            yield (
                f"config.json: partial_rotary_factor={where['partial_rotary_factor']!r} is not computed for "
                f"model_type={kind!r}; expected 1.0; remove it"
            )
            break
    odd = sorted({name for name in config.get("layer_types") or () if name != "full_attention"})
    if odd:
        yield (
            f"config.json: layer_types has {', '.join(odd)}; expected full_attention only for model_type={kind!r}; "
            "choose a model without windows"
        )


def _decoder_required(config: Config) -> list[str]:
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    kind = config["model_type"]
    if kind != "llama":  # an absent key means a number that transformers knows by heart
        needed.append("num_key_value_heads")
    if kind == "qwen3":
        needed.append("head_dim")
    if kind == "qwen3_moe":
        count = config.get("num_experts", config.get("num_local_experts"))
        needed += ["num_experts"] if count is None else []
        needed += ["num_experts_per_tok", "moe_intermediate_size"] if count else []
    return needed


def _decoder_special(config: Config) -> Iterator[str]:
    yield from _rope_problems(config)
    count = config.get("num_experts", config.get("num_local_experts"))
    if config["model_type"] == "qwen3_moe" and count:
        yield from _expert_problems(config, count)


_DECODER_READS = _keys("intermediate_size rms_norm_eps rope_parameters rope_scaling partial_rotary_factor layer_types")
_DECODER_ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_QWEN3_READS = _DECODER_READS | {"sliding_window", "max_window_layers"}  # both without effect: no window is used
_QWEN3_ONLY = _DECODER_ONLY | {"use_sliding_window": (False, None)}

# ---- deepseek_v3 -------------------------------------------------------------------------------------------------

_DEEPSEEK_READS = _keys(
    """intermediate_size rms_norm_eps rope_parameters rope_scaling q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim qk_head_dim v_head_dim first_k_dense_replace n_routed_experts n_shared_experts num_experts_per_tok
    moe_intermediate_size norm_topk_prob routed_scaling_factor n_group topk_group num_nextn_predict_layers
    aux_loss_alpha seq_aux ep_size"""
)
_DEEPSEEK_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}


def _deepseek_experts(config: Config) -> bool:
    """Whether a layer or a prediction head has experts."""
    layers, dense = config.get("num_hidden_layers") or 0, config.get("first_k_dense_replace") or 0
    return dense < layers or bool(config.get("num_nextn_predict_layers"))


def _deepseek_required(config: Config) -> list[str]:
    needed = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    needed += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "first_k_dense_replace"]
    if _deepseek_experts(config):
        needed += ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"]
    return needed


def _deepseek_special(config: Config) -> Iterator[str]:
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups not in (None, heads):
        yield (
            f"config.json: num_key_value_heads={groups} is not computed for model_type='deepseek_v3': latent attention "
            f"has a key and a value for each of its {heads} heads; save the model's own config"
        )
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    if dense > layers:
        yield (
            f"config.json: first_k_dense_replace={dense}; expected 0 to num_hidden_layers = {layers}; "
            "save the model's own config"
        )
    yield from _latent_rope_problems(rope_parameters(config))
    if _deepseek_experts(config):
        yield from _expert_problems(config, config["n_routed_experts"])
        yield from _router_problems(config)


def _latent_rope_problems(rope: dict[str, Any]) -> Iterator[str]:
    """RoPE of latent attention: plain, or YaRN as megatron-core computes it."""
    if rope["rope_type"] == "default":
        return
    if rope["rope_type"] != "yarn":
        yield (
            f"config.json: rope_type={rope['rope_type']!r} is not computed for model_type='deepseek_v3'; expected "
            "default or yarn; choose a model with one of those"
        )
        return
    for key in ("factor", "original_max_position_embeddings"):
        if not isinstance(rope.get(key), int | float) or not rope[key] > 0:
            yield (
                f"config.json: {key}={rope.get(key)!r} for rope_type='yarn'; expected a number above 0; "
                "save the model's whole config"
            )
    for key, value in {"attention_factor": None, "truncate": True, "partial_rotary_factor": 1.0}.items():
        if rope.get(key, value) != value:
            yield (
                f"config.json: {key}={rope[key]!r} for rope_type='yarn' is not computed; expected {value!r}; "
                "choose a model without it"
            )
    if rope.get("mscale_all_dim") and not rope.get("mscale"):
        # It scales the softmax alone then; megatron-core would divide the rotation by it too.
        yield (
            f"config.json: mscale_all_dim={rope['mscale_all_dim']} for rope_type='yarn' without mscale is not computed; "
            "expected both or neither; choose a model with both"
        )


# ---- nemotron_h ---------------------------------------------------------------------------------------------------

_NEMOTRON_READS = _keys(
    """hybrid_override_pattern layers_block_type layer_types num_hidden_layers intermediate_size ssm_state_size
    mamba_num_heads mamba_head_dim n_groups conv_kernel chunk_size time_step_limit n_routed_experts n_shared_experts
    moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size num_experts_per_tok routed_scaling_factor
    norm_topk_prob n_group topk_group layer_norm_epsilon num_nextn_predict_layers mtp_layers_block_type
    mtp_hybrid_override_pattern
    expand mamba_expand num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype rescale_prenorm_residual
    moe_shared_expert_overlap time_step_min time_step_max time_step_floor mamba_dt_min mamba_dt_max mamba_dt_init_floor
    norm_eps rms_norm_eps rope_parameters partial_rotary_factor"""
)
_NEMOTRON_ONLY: dict[str, tuple[Any, ...]] = {
    "use_bias": (False, None),
    "mamba_proj_bias": (False, None),
    "use_conv_bias": (True,),
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "sliding_window": (None,),
    "hidden_dropout": (0.0, None),
    "n_shared_experts": (1, None),
    "residual_in_fp32": (False, None),
    "tie_word_embeddings": (False, None),  # transformers and vLLM give these models a head of their own all the same
}
_NEMOTRON_NEEDS = {
    "M": ["ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel"],
    "*": ["head_dim", "num_key_value_heads"],
    "E": ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"],
    "-": ["intermediate_size"],
}


def _layers(config: Config) -> list[str]:
    """A letter or an unknown word for each layer; empty where config.json does not say."""
    found = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types") or ()
    return [WORDS.get(kind, kind) for kind in found]


def _head_layers(config: Config) -> list[str]:
    """Likewise for the layers inside a multi-token-prediction head; empty for a model without any."""
    if not config.get("num_nextn_predict_layers"):
        return []
    found = config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type") or "*E"
    return [WORDS.get(kind, kind) for kind in found]


def _nemotron_required(config: Config) -> list[str]:
    needed = ["vocab_size", "hidden_size", "num_attention_heads"]
    for letter in sorted(set(_layers(config)) | set(_head_layers(config))):
        needed += _NEMOTRON_NEEDS.get(letter, [])
    return needed


def _nemotron_special(config: Config) -> Iterator[str]:
    letters = _layers(config)
    if not letters:
        yield (
            "config.json: a nemotron_h model has neither hybrid_override_pattern nor layers_block_type; expected one "
            "of them; save the model's whole config"
        )
    if unknown := sorted((set(letters) | set(_head_layers(config))) - set(_NEMOTRON_NEEDS)):
        yield (
            f"config.json: layer kinds {', '.join(map(repr, unknown))} are unknown; expected "
            f"{', '.join(WORDS)} or a pattern of M * E -; choose a model of those"
        )
    count = config.get("num_hidden_layers")
    if letters and count is not None and count != len(letters):
        yield (
            f"config.json: num_hidden_layers={count}, but the layer pattern has {len(letters)} layers; expected the "
            "same number; save the model's own config"
        )
    limit = tuple(map(_number, config.get("time_step_limit") or (0.0, math.inf)))
    if limit != (0.0, math.inf):
        yield (
            f"config.json: time_step_limit={limit} is not computed for model_type='nemotron_h'; expected (0.0, inf); "
            "choose a model without it"
        )
    if "E" in letters:
        yield from _expert_problems(config, config["n_routed_experts"])
        yield from _router_problems(config)


def _router_problems(config: Config) -> Iterator[str]:
    # megatron-core divides sigmoid scores by their sum exactly when more than one expert is chosen.
    normalised, top_k = config.get("norm_topk_prob", True), config["num_experts_per_tok"]
    if normalised != (top_k > 1):
        yield (
            f"config.json: norm_topk_prob={normalised} with num_experts_per_tok={top_k} is not computed: megatron-core "
            "normalises sigmoid scores exactly when more than one expert is chosen; choose a model that does too"
        )
    # A group's score is the sum of its two best experts in the model, of its top_k // topk_group best here.
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > 1 and top_k // chosen != 2:
        yield (
            f"config.json: n_group={groups} is computed where num_experts_per_tok // topk_group is 2, "
            f"found {top_k} // {chosen}; choose a model with 2"
        )


def _number(value: Any) -> float:
    """A float that transformers may have written as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if isinstance(value, dict) else float(value)


RULES: dict[str, Rules] = {
    "deepseek_v3": Rules(_DEEPSEEK_READS, _DEEPSEEK_ONLY, _deepseek_required, _deepseek_special),
    "nemotron_h": Rules(_NEMOTRON_READS, _NEMOTRON_ONLY, _nemotron_required, _nemotron_special),
    "llama": Rules(_DECODER_READS, _DECODER_ONLY, _decoder_required, _decoder_special),
    "qwen3": Rules(_QWEN3_READS, _QWEN3_ONLY, _decoder_required, _decoder_special),
    "qwen3_moe": Rules(
        _QWEN3_READS
        | _keys(
            """num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step
            mlp_only_layers"""
        ),
        _QWEN3_ONLY,
        _decoder_required,
        _decoder_special,
    ),
}
