"""Nemotron-H (hybrid Mamba-2 / attention / MoE / MLP): disk names and shapes, and what megatron-core makes of them.

`mtp.*` tensors (multi-token prediction) have entries of their own (`heads`). Where they are not trained they are
left aside on load and carried over unchanged on export.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.entries import Entry, Source, columns, query_groups, replicated, rows
from megatron_agentrl.layout.heads import Head, head_of

#: Other spellings of disk names that are accepted when reading: (written by some versions, canonical).
ALIASES = (("backbone.embedding.weight", "backbone.embeddings.weight"),)
#: Tensors that may stand in a checkpoint without a parameter here, as regular expressions of the full name.
IGNORED = (r"mtp\..*",)
#: Of those, what an export carries over from its source folder.
CARRIED = (r"mtp\..*",)

_LETTERS = {
    "linear_attention": "M", "mamba": "M", "mamba2": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-",
}  # fmt: skip


def pattern(config: Config) -> str:
    """One letter per HF layer; HF layer i is entry i of the hybrid model."""
    found = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types")
    if not found:
        raise LayoutError("config.json of a 'nemotron_h' model has no hybrid_override_pattern or layers_block_type")
    return _letters(found)


def _letters(found: str | Sequence[str]) -> str:
    letters = list(found) if isinstance(found, str) else [_LETTERS.get(name, name) for name in found]
    unknown = sorted(set(letters) - set("M*E-"))
    if unknown:
        raise LayoutError(f"config.json: layer kinds {unknown} are unknown; known are {sorted(_LETTERS)} or M * E -")
    return "".join(letters)


def heads_pattern(config: Config) -> str:
    """Letters of the layers inside one prediction head."""
    return _letters(config.get("mtp_hybrid_override_pattern") or config.get("mtp_layers_block_type") or "*E")


def heads(config: Config) -> list[Head]:
    """Prediction heads: head o holds the disk layers `mtp.layers.{o * L}` to `mtp.layers.{o * L + L - 1}`, whose
    first has the projection and whose last has the norm before the shared output layer."""
    h, letters = size(config, "hidden_size"), heads_pattern(config)
    found = []
    for depth in range(config.get("num_nextn_predict_layers") or 0):
        first, last = f"mtp.layers.{depth * len(letters)}.", f"mtp.layers.{(depth + 1) * len(letters) - 1}."
        layers = [_layer(config, letter, f"mtp.layers.{depth * len(letters) + j}.") for j, letter in enumerate(letters)]
        found.append(head_of(first, Source(last + "final_layernorm.weight", (h,)), layers, h))
    return found


def embedding(config: Config) -> Source:
    return Source("backbone.embeddings.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def head(config: Config) -> Source:
    return Source("lm_head.weight", (size(config, "vocab_size"), size(config, "hidden_size")))


def final_norm(config: Config) -> Source:
    return Source("backbone.norm_f.weight", (size(config, "hidden_size"),))


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of layer `index`, names relative to `decoder.layers.<local index>.`."""
    return _layer(config, pattern(config)[index], f"backbone.layers.{index}.")


def _layer(config: Config, letter: str, at: str) -> list[Entry]:
    """Entries of one layer of kind `letter`, whose disk names begin with `at`."""
    refuse(config, use_bias=False, attention_bias=False, mlp_bias=False, mamba_proj_bias=False, use_conv_bias=True)
    h = size(config, "hidden_size")
    mixer = at + "mixer."
    norm = Source(at + "norm.weight", (h,))

    def hf(name: str, *shape: int) -> Source:
        return Source(mixer + name, shape)

    match letter:
        case "M":
            heads, groups = size(config, "mamba_num_heads"), size(config, "n_groups", "mamba_n_groups")
            d, g = heads * size(config, "mamba_head_dim"), groups * size(config, "ssm_state_size")
            kernel = size(config, "conv_kernel", "mamba_d_conv")
            return [
                replicated("mixer.in_proj.layer_norm_weight", norm),
                rows(
                    "mixer.in_proj.weight", hf("in_proj.weight", 2 * d + 2 * g + heads, h), blocks=(d, d, g, g, heads)
                ),
                rows("mixer.conv1d_weight", hf("conv1d.weight", d + 2 * g, 1, kernel), blocks=(d, g, g)),
                rows("mixer.conv1d_bias", hf("conv1d.bias", d + 2 * g), blocks=(d, g, g)),
                rows("mixer.A_log", hf("A_log", heads), fp32=True),
                rows("mixer.D", hf("D", heads), fp32=True),
                rows("mixer.dt_bias", hf("dt_bias", heads), fp32=True),
                rows("mixer.norm.weight", hf("norm.weight", d)),
                columns("mixer.out_proj.weight", hf("out_proj.weight", h, d)),
            ]
        case "*":
            heads, groups = (
                size(config, "num_attention_heads"),
                size(config, "num_key_value_heads", "num_attention_heads"),
            )
            dim = size(config, "head_dim", "attention_head_dim")
            q, k, v = (hf(f"{x}_proj.weight", n * dim, h) for x, n in (("q", heads), ("k", groups), ("v", groups)))
            return [
                replicated("self_attention.linear_qkv.layer_norm_weight", norm),
                query_groups("self_attention.linear_qkv.weight", q, k, v, groups, dim),
                columns("self_attention.linear_proj.weight", hf("o_proj.weight", h, heads * dim)),
            ]
        case "E":
            experts, ffn = size(config, "n_routed_experts"), size(config, "moe_intermediate_size")
            latent, found = config.get("moe_latent_size"), [replicated("pre_mlp_layernorm.weight", norm)]
            found.append(replicated("mlp.router.weight", hf("gate.weight", experts, h)))
            found.append(replicated("mlp.router.expert_bias", hf("gate.e_score_correction_bias", experts), fp32=True))
            if latent:
                found.append(replicated("mlp.fc1_latent_proj.weight", hf("fc1_latent_proj.weight", latent, h)))
                found.append(replicated("mlp.fc2_latent_proj.weight", hf("fc2_latent_proj.weight", h, latent)))
            width = latent or h
            for e in range(experts):
                up, down = (
                    hf(f"experts.{e}.up_proj.weight", ffn, width),
                    hf(f"experts.{e}.down_proj.weight", width, ffn),
                )
                found.append(rows("linear_fc1.weight", up, group="etp", expert=e))
                found.append(columns("linear_fc2.weight", down, group="etp", expert=e))
            if config.get("moe_shared_expert_intermediate_size"):
                ffn = size(config, "moe_shared_expert_intermediate_size")
                found.append(rows("mlp.shared_experts.linear_fc1.weight", hf("shared_experts.up_proj.weight", ffn, h)))
                found.append(
                    columns("mlp.shared_experts.linear_fc2.weight", hf("shared_experts.down_proj.weight", h, ffn))
                )
            return found
        case _:
            ffn = size(config, "intermediate_size")
            return [
                replicated("mlp.linear_fc1.layer_norm_weight", norm),
                rows("mlp.linear_fc1.weight", hf("up_proj.weight", ffn, h)),
                columns("mlp.linear_fc2.weight", hf("down_proj.weight", h, ffn)),
            ]
