"""DeepSeek-V3 (multi-head latent attention, gated experts): disk names and shapes, and what megatron-core and vLLM make of them.

One HF layer is two entries of the hybrid model: latent attention (2l), then a dense MLP for the first
`first_k_dense_replace` layers and a mixture of experts for the others (2l + 1). Prediction heads are the disk layers
from `num_hidden_layers` on; their `embed_tokens` and `shared_head.head` are copies of the model's own tables.
"""

from __future__ import annotations

from megatron_agentrl.layout import parts
from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.decoder import embedding, final_norm, head
from megatron_agentrl.layout.entries import EngineTable, Entry, Source
from megatron_agentrl.layout.heads import Head, head_of

__all__ = ["embedding", "final_norm", "head"]  # the tables outside of the layers are those of other decoders

ALIASES: tuple[tuple[str, str], ...] = ()
IGNORED = (r".*\.rotary_emb\.inv_freq",)
CARRIED: tuple[str, ...] = ()
ENGINES = {"deepseek_v3": EngineTable("DeepseekV3ForCausalLM", layer=2, ties=False)}


def pattern(config: Config) -> str:
    """Two letters per HF layer: `+-` for the first dense ones, `+E` for the others (+ is latent attention)."""
    refuse(config, moe_layer_freq=1)
    layers, dense = size(config, "num_hidden_layers"), config.get("first_k_dense_replace", 3)
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        raise LayoutError(f"config.json: first_k_dense_replace={dense!r}, expected 0 to num_hidden_layers = {layers}")
    return "+-" * dense + "+E" * (layers - dense)


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of hybrid layer `index` (HF layer index // 2), names relative to `decoder.layers.<local index>.`."""
    return _layer(config, pattern(config)[index], f"model.layers.{index // 2}.")


def heads_pattern(config: Config) -> str:
    """Letters of the layers inside one prediction head: attention and experts, whatever the first layers are."""
    return "+E"


def heads(config: Config) -> list[Head]:
    """Prediction heads: head m is the disk layer num_hidden_layers + m."""
    h, found = size(config, "hidden_size"), []
    for number in _head_layers(config):
        at = f"model.layers.{number}."
        norm = Source(at + "shared_head.norm.weight", (h,))
        found.append(head_of(at, norm, [_layer(config, letter, at) for letter in heads_pattern(config)], h))
    return found


def heads_names(config: Config) -> str:
    """A regular expression of the disk names that belong to prediction heads."""
    numbers = "|".join(map(str, _head_layers(config)))
    return rf"model\.layers\.({numbers})\..*" if numbers else r"(?!)"


def copies(config: Config) -> dict[str, str]:
    """Second names on disk of the model's own tables: name -> the tensor that it repeats."""
    found = {}
    for number in _head_layers(config):
        found[f"model.layers.{number}.embed_tokens.weight"] = "model.embed_tokens.weight"
        found[f"model.layers.{number}.shared_head.head.weight"] = "lm_head.weight"
    return found


def _head_layers(config: Config) -> range:
    layers = size(config, "num_hidden_layers")
    return range(layers, layers + (config.get("num_nextn_predict_layers") or 0))


def _layer(config: Config, letter: str, at: str) -> list[Entry]:
    """Entries of one hybrid layer of kind `letter`, whose disk names begin with `at`."""
    if letter == "+":
        before = parts.norm(config, at + "input_layernorm.weight")
        return parts.latent_attention(config, before, at + "self_attn.")
    before = parts.norm(config, at + "post_attention_layernorm.weight")
    if letter == "-":
        return parts.dense_mlp(config, before, at + "mlp.")
    count, ffn, shared = (
        size(config, "n_routed_experts"),
        size(config, "moe_intermediate_size"),
        config.get("n_shared_experts"),
    )
    bias = at + "mlp.gate.e_score_correction_bias"
    found = parts.router(config, before, at + "mlp.gate.weight", count, bias)
    found += parts.gated_experts(config, at + "mlp.experts.", count, ffn)
    if shared:
        found += parts.gated_mlp(config, "mlp.shared_experts.", at + "mlp.shared_experts.", shared * ffn)
    return found
