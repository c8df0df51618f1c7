"""Llama, Qwen3 and Qwen3-MoE: disk names and shapes, and what megatron-core makes of them.

One table for decoders whose layer is attention and then an MLP: the three differ in normed queries and keys
(Qwen3) and in experts (Qwen3-MoE) only. One HF layer is two entries of the hybrid model: attention (2l), then
a mixture of experts or a dense MLP (2l + 1).
"""

from __future__ import annotations

from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.entries import Entry, Source, columns, query_groups, replicated, rows

ALIASES: tuple[tuple[str, str], ...] = ()
IGNORED = (r".*\.rotary_emb\.inv_freq",)
CARRIED: tuple[str, ...] = ()

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


def head_dim(config: Config) -> int:
    """Width of one attention head; the hidden size divided by the heads where config.json does not give it."""
    if config.get("head_dim"):
        return size(config, "head_dim")
    return size(config, "hidden_size") // size(config, "num_attention_heads")


def embedding(config: Config) -> Source:
    return Source("model.embed_tokens.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def head(config: Config) -> Source:
    return Source("lm_head.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def final_norm(config: Config) -> Source:
    return Source("model.norm.weight", (size(config, "hidden_size"),))


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of hybrid layer `index` (HF layer index // 2), names relative to `decoder.layers.<local index>.`."""
    refuse(config, attention_bias=False, mlp_bias=False)
    letter = pattern(config)[index]
    at = f"model.layers.{index // 2}."
    if letter == "*":
        return _attention(config, at)
    if letter == "-":
        return dense_mlp(config, at)
    return [*router(config, at, experts(config)), *routed_experts(config, at, experts(config))]


def dense_mlp(config: Config, at: str) -> list[Entry]:
    """A gated MLP and the norm before it; `at` begins the disk names of its HF layer."""
    norm = Source(at + "post_attention_layernorm.weight", (size(config, "hidden_size"),))
    gate, up, down = gated(config, at + "mlp", size(config, "intermediate_size"))
    return [
        replicated("mlp.linear_fc1.layer_norm_weight", norm),
        rows("mlp.linear_fc1.weight", gate, up),
        columns("mlp.linear_fc2.weight", down),
    ]


def router(config: Config, at: str, count: int) -> list[Entry]:
    """The norm before a mixture of `count` experts, and its router."""
    h = size(config, "hidden_size")
    return [
        replicated("pre_mlp_layernorm.weight", Source(at + "post_attention_layernorm.weight", (h,))),
        replicated("mlp.router.weight", Source(at + "mlp.gate.weight", (count, h))),
    ]


def routed_experts(config: Config, at: str, count: int) -> list[Entry]:
    """The `count` gated experts of a mixture."""
    found = []
    for e in range(count):
        gate, up, down = gated(config, f"{at}mlp.experts.{e}", size(config, "moe_intermediate_size"))
        found.append(rows("linear_fc1.weight", gate, up, group="etp", expert=e))
        found.append(columns("linear_fc2.weight", down, group="etp", expert=e))
    return found


def _attention(config: Config, at: str) -> list[Entry]:
    h, dim = size(config, "hidden_size"), head_dim(config)
    heads, groups = size(config, "num_attention_heads"), size(config, "num_key_value_heads", "num_attention_heads")
    q, k, v = (
        Source(f"{at}self_attn.{x}_proj.weight", (n * dim, h)) for x, n in (("q", heads), ("k", groups), ("v", groups))
    )
    found = [
        replicated("self_attention.linear_qkv.layer_norm_weight", Source(at + "input_layernorm.weight", (h,))),
        query_groups("self_attention.linear_qkv.weight", q, k, v, groups, dim),
    ]
    if config["model_type"] in NORMED:
        for x in ("q", "k"):
            norm = Source(f"{at}self_attn.{x}_norm.weight", (dim,))
            found.append(replicated(f"self_attention.{x}_layernorm.weight", norm))
    o = Source(at + "self_attn.o_proj.weight", (h, heads * dim))
    found.append(columns("self_attention.linear_proj.weight", o))
    return found


def gated(config: Config, prefix: str, ffn: int) -> tuple[Source, Source, Source]:
    """gate, up and down of one SwiGLU."""
    h = size(config, "hidden_size")
    gate, up = (Source(f"{prefix}.{name}_proj.weight", (ffn, h)) for name in ("gate", "up"))
    return gate, up, Source(f"{prefix}.down_proj.weight", (h, ffn))
