"""Qwen3-MoE: disk names and shapes, and what megatron-core makes of them.

One HF layer is two entries of the hybrid model: attention (2l) and MoE, or a dense MLP where the config
says so (2l + 1).
"""

from __future__ import annotations

from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.entries import Entry, Source, columns, query_groups, replicated, rows

ALIASES: tuple[tuple[str, str], ...] = ()
IGNORED = (r".*\.rotary_emb\.inv_freq",)
CARRIED: tuple[str, ...] = ()


def pattern(config: Config) -> str:
    """Two letters per HF layer: `*E`, or `*-` for a layer that config.json makes dense."""
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    layers = range(size(config, "num_hidden_layers"))
    return "".join("*-" if index in dense or (index + 1) % step else "*E" for index in layers)


def embedding(config: Config) -> Source:
    return Source("model.embed_tokens.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def head(config: Config) -> Source:
    return Source("lm_head.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def final_norm(config: Config) -> Source:
    return Source("model.norm.weight", (size(config, "hidden_size"),))


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of hybrid layer `index` (HF layer index // 2), names relative to `decoder.layers.<local index>.`."""
    refuse(config, attention_bias=False)
    h = size(config, "hidden_size")
    at = f"model.layers.{index // 2}."
    letter = pattern(config)[index]

    def hf(name: str, *shape: int) -> Source:
        return Source(at + name, shape)

    def gated(prefix: str, ffn: int) -> tuple[Source, Source, Source]:
        gate, up = (hf(f"{prefix}.{name}_proj.weight", ffn, h) for name in ("gate", "up"))
        return gate, up, hf(f"{prefix}.down_proj.weight", h, ffn)

    if letter == "*":
        heads, groups = size(config, "num_attention_heads"), size(config, "num_key_value_heads", "num_attention_heads")
        dim = size(config, "head_dim") if config.get("head_dim") else h // heads
        q, k, v = (
            hf(f"self_attn.{x}_proj.weight", n * dim, h) for x, n in (("q", heads), ("k", groups), ("v", groups))
        )
        norm = hf("input_layernorm.weight", h)
        return [
            replicated("self_attention.linear_qkv.layer_norm_weight", norm),
            query_groups("self_attention.linear_qkv.weight", q, k, v, groups, dim),
            replicated("self_attention.q_layernorm.weight", hf("self_attn.q_norm.weight", dim)),
            replicated("self_attention.k_layernorm.weight", hf("self_attn.k_norm.weight", dim)),
            columns("self_attention.linear_proj.weight", hf("self_attn.o_proj.weight", h, heads * dim)),
        ]
    norm = hf("post_attention_layernorm.weight", h)
    if letter == "-":
        gate, up, down = gated("mlp", size(config, "intermediate_size"))
        return [
            replicated("mlp.linear_fc1.layer_norm_weight", norm),
            rows("mlp.linear_fc1.weight", gate, up),
            columns("mlp.linear_fc2.weight", down),
        ]
    experts, ffn = size(config, "num_experts", "num_local_experts"), size(config, "moe_intermediate_size")
    found = [
        replicated("pre_mlp_layernorm.weight", norm),
        replicated("mlp.router.weight", hf("mlp.gate.weight", experts, h)),
    ]
    for e in range(experts):
        gate, up, down = gated(f"mlp.experts.{e}", ffn)
        found.append(rows("linear_fc1.weight", gate, up, group="etp", expert=e))
        found.append(columns("linear_fc2.weight", down, group="etp", expert=e))
    return found
