"""Llama, Qwen3 and Qwen3-MoE: disk names and shapes, and what megatron-core and vLLM make of them.

One table for decoders whose layer is attention and then an MLP: the three differ in normed queries and keys
(Qwen3) and in experts (Qwen3-MoE) only. One HF layer is two entries of the hybrid model: attention (2l), then
a mixture of experts or a dense MLP (2l + 1).
"""

from __future__ import annotations

from megatron_agentrl.layout import parts
from megatron_agentrl.layout.config import Config, size
from megatron_agentrl.layout.entries import EngineTable, Entry, Source
from megatron_agentrl.layout.parts import head_dim

__all__ = ["head_dim"]  # a fact of these models that readers of config.json ask for here

ALIASES: tuple[tuple[str, str], ...] = ()
IGNORED = (r".*\.rotary_emb\.inv_freq",)
CARRIED: tuple[str, ...] = ()
ENGINES = {
    "llama": EngineTable("LlamaForCausalLM", layer=2),
    "qwen3": EngineTable("Qwen3ForCausalLM", layer=2),
    "qwen3_moe": EngineTable("Qwen3MoeForCausalLM", layer=2, ends_everywhere=True),
}

#: Model types whose queries and keys pass an RMSNorm of one head each.
NORMED = ("qwen3", "qwen3_moe")
#: Model types with experts.
MIXTURES = ("qwen3_moe",)


def pattern(config: Config) -> str:
    """Two letters per HF layer: `*E`, or `*-` for a layer that config.json makes dense."""
    layers = range(size(config, "num_hidden_layers"))
    if config["model_type"] not in MIXTURES or not experts(config):
        return "*-" * len(layers)
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    return "".join("*-" if index in dense or (index + 1) % step else "*E" for index in layers)


def experts(config: Config) -> int:
    """Routed experts of a layer, under either name; 0 makes every layer dense."""
    found = config.get("num_experts", config.get("num_local_experts"))
    return 0 if found == 0 else size(config, "num_experts", "num_local_experts")


def embedding(config: Config) -> Source:
    return parts.table(config, "model.embed_tokens.weight")


def head(config: Config) -> Source:
    return parts.table(config, "lm_head.weight")


def final_norm(config: Config) -> Source:
    return parts.norm(config, "model.norm.weight")


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of hybrid layer `index` (HF layer index // 2), names relative to `decoder.layers.<local index>.`."""
    letter, at = pattern(config)[index], f"model.layers.{index // 2}."
    if letter == "*":
        before = parts.norm(config, at + "input_layernorm.weight")
        return parts.attention(config, before, at + "self_attn.", normed=config["model_type"] in NORMED)
    before = parts.norm(config, at + "post_attention_layernorm.weight")
    if letter == "-":
        return parts.dense_mlp(config, before, at + "mlp.")
    count, ffn = experts(config), size(config, "moe_intermediate_size")
    return [
        *parts.router(config, before, at + "mlp.gate.weight", count),
        *parts.gated_experts(config, at + "mlp.experts.", count, ffn),
    ]
