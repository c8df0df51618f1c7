"""What the tables are put together from: the layers of known kinds, with the disk names that vary as arguments.

Each function gives the entries of one part of a layer: its parameters under megatron-core's names, and the checkpoint
tensors of each. `at` begins the disk names. Sizes are read from config.json under the keys that Hugging Face uses for
the kind of layer. A part that only one model type has stands in that type's table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_agentrl.layout.boxes import ElementRule
from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.entries import Entry, Source, columns, query_groups, replicated, rows

#: Disk names of a gated MLP's projections: what passes the activation, what it is multiplied with, what comes back.
GATED = ("gate_proj", "up_proj", "down_proj")


def table(config: Config, name: str) -> Source:
    """The embedding or the head: vocabulary x hidden."""
    return Source(name, (size(config, "vocab_size"), size(config, "hidden_size")))


def norm(config: Config, name: str) -> Source:
    """A norm over the hidden size."""
    return Source(name, (size(config, "hidden_size"),))


def head_dim(config: Config) -> int:
    """Width of one attention head; the hidden size divided by the heads where config.json does not give it."""
    if config.get("head_dim") or config.get("attention_head_dim"):
        return size(config, "head_dim", "attention_head_dim")
    return size(config, "hidden_size") // size(config, "num_attention_heads")


def attention(config: Config, before: Source, at: str, *, normed: bool = False) -> list[Entry]:
    """Attention with grouped queries and the norm `before` it; `normed`: queries and keys pass a norm of one head."""
    refuse(config, attention_bias=False)
    h, dim = size(config, "hidden_size"), head_dim(config)
    heads, groups = size(config, "num_attention_heads"), size(config, "num_key_value_heads", "num_attention_heads")
    q, k, v = (Source(f"{at}{x}_proj.weight", (n * dim, h)) for x, n in (("q", heads), ("k", groups), ("v", groups)))
    norms = [replicated(f"self_attention.{x}_layernorm.weight", Source(f"{at}{x}_norm.weight", (dim,))) for x in "qk"]
    return [
        replicated("self_attention.linear_qkv.layer_norm_weight", before),
        query_groups("self_attention.linear_qkv.weight", q, k, v, groups, dim),
        *(norms if normed else []),
        columns("self_attention.linear_proj.weight", Source(at + "o_proj.weight", (h, heads * dim))),
    ]


def gated_mlp(
    config: Config, name: str, at: str, ffn: int, names: Sequence[str] = GATED, expert: int | None = None
) -> list[Entry]:
    """A gated MLP of width `ffn`: parameters `{name}linear_fc1.weight` (gate above up) and `{name}linear_fc2.weight`."""
    return _mlp(config, name, at, ffn, size(config, "hidden_size"), names, expert)


def plain_mlp(config: Config, name: str, at: str, ffn: int, width: int, expert: int | None = None) -> list[Entry]:
    """An MLP without a gate, from and to `width` columns."""
    return _mlp(config, name, at, ffn, width, ("up_proj", "down_proj"), expert)


def _mlp(
    config: Config, name: str, at: str, ffn: int, width: int, names: Sequence[str], expert: int | None
) -> list[Entry]:
    refuse(config, mlp_bias=False)
    *inner, outer = names
    group: Literal["tp", "etp"] = "tp" if expert is None else "etp"
    return [
        rows(
            name + "linear_fc1.weight", *(Source(f"{at}{x}.weight", (ffn, width)) for x in inner),
            group=group, expert=expert,
        ),
        columns(name + "linear_fc2.weight", Source(f"{at}{outer}.weight", (width, ffn)), group=group, expert=expert),
    ]  # fmt: skip


def dense_mlp(config: Config, before: Source, at: str) -> list[Entry]:
    """A gated MLP of width intermediate_size and the norm `before` it."""
    norm = replicated("mlp.linear_fc1.layer_norm_weight", before)
    return [norm, *gated_mlp(config, "mlp.", at, size(config, "intermediate_size"))]


def router(config: Config, before: Source, weight: str, count: int, bias: str | None = None) -> list[Entry]:
    """The norm `before` a mixture of `count` experts and its router; `bias`: what is added to its scores, kept fp32."""
    return [
        replicated("pre_mlp_layernorm.weight", before),
        replicated("mlp.router.weight", Source(weight, (count, size(config, "hidden_size")))),
        *([replicated("mlp.router.expert_bias", Source(bias, (count,)), fp32=True)] if bias else []),
    ]


def gated_experts(config: Config, at: str, count: int, ffn: int, names: Sequence[str] = GATED) -> list[Entry]:
    """`count` gated experts, named `{at}{e}.` on disk."""
    return [entry for e in range(count) for entry in gated_mlp(config, "", f"{at}{e}.", ffn, names, expert=e)]


def plain_experts(config: Config, at: str, count: int) -> list[Entry]:
    """`count` experts without a gate, named `{at}experts.{e}.` on disk; with moe_latent_size between two projections
    that are the same on each rank."""
    h, ffn, latent = size(config, "hidden_size"), size(config, "moe_intermediate_size"), config.get("moe_latent_size")
    found = []
    if latent:
        down, up = ((latent, h), (h, latent))
        found.append(replicated("mlp.fc1_latent_proj.weight", Source(at + "fc1_latent_proj.weight", down)))
        found.append(replicated("mlp.fc2_latent_proj.weight", Source(at + "fc2_latent_proj.weight", up)))
    for e in range(count):
        found += plain_mlp(config, "", f"{at}experts.{e}.", ffn, latent or h, expert=e)
    return found


def mamba(config: Config, before: Source, at: str) -> list[Entry]:
    """Mamba-2 and the norm `before` it. A, D and the time steps' bias stay fp32; vLLM keeps -exp(A_log), and D and
    the bias in its own type."""
    refuse(config, use_bias=False, mamba_proj_bias=False, use_conv_bias=True)
    h, heads, groups = (
        size(config, "hidden_size"),
        size(config, "mamba_num_heads"),
        size(config, "n_groups", "mamba_n_groups"),
    )
    d, g = heads * size(config, "mamba_head_dim"), groups * size(config, "ssm_state_size")
    kernel = size(config, "conv_kernel", "mamba_d_conv")
    inner, conv = (d, d, g, g, heads), (d, g, g)

    def hf(name: str, *shape: int) -> Source:
        return Source(at + name, shape)

    return [
        replicated("mixer.in_proj.layer_norm_weight", before),
        rows("mixer.in_proj.weight", hf("in_proj.weight", sum(inner), h), blocks=inner),
        rows("mixer.conv1d_weight", hf("conv1d.weight", sum(conv), 1, kernel), blocks=conv),
        rows("mixer.conv1d_bias", hf("conv1d.bias", sum(conv)), blocks=conv),
        rows("mixer.A_log", hf("A_log", heads), fp32=True, engine_rule=ElementRule.neg_exp),
        rows("mixer.D", hf("D", heads), fp32=True, engine_fp32=False),
        rows("mixer.dt_bias", hf("dt_bias", heads), fp32=True, engine_fp32=False),
        rows("mixer.norm.weight", hf("norm.weight", d)),
        columns("mixer.out_proj.weight", hf("out_proj.weight", h, d)),
    ]


def latent_attention(config: Config, before: Source, at: str) -> list[Entry]:
    """Multi-head latent attention and the norm `before` it; queries have a latent too where q_lora_rank is given."""
    refuse(config, attention_bias=False)
    h, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    rank, rotary = size(config, "kv_lora_rank"), size(config, "qk_rope_head_dim")
    plain, value = size(config, "qk_nope_head_dim"), size(config, "v_head_dim")

    def hf(name: str, *shape: int) -> Source:
        return Source(f"{at}{name}.weight", shape)

    queries = heads * (plain + rotary)
    if config.get("q_lora_rank") is None:
        query = [rows("self_attention.linear_q_proj.weight", hf("q_proj", queries, h))]
    else:
        q_rank = size(config, "q_lora_rank")
        query = [
            rows("self_attention.linear_q_down_proj.weight", hf("q_a_proj", q_rank, h), latent=True),
            replicated("self_attention.linear_q_up_proj.layer_norm_weight", hf("q_a_layernorm", q_rank)),
            rows("self_attention.linear_q_up_proj.weight", hf("q_b_proj", queries, q_rank)),
        ]
    return [
        replicated("input_layernorm.weight", before),
        *query,
        rows("self_attention.linear_kv_down_proj.weight", hf("kv_a_proj_with_mqa", rank + rotary, h), latent=True),
        replicated("self_attention.linear_kv_up_proj.layer_norm_weight", hf("kv_a_layernorm", rank)),
        rows("self_attention.linear_kv_up_proj.weight", hf("kv_b_proj", heads * (plain + value), rank)),
        columns("self_attention.linear_proj.weight", hf("o_proj", h, heads * value)),
    ]
