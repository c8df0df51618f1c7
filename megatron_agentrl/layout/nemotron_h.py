"""Nemotron-H (hybrid Mamba-2 / attention / MoE / MLP): disk names and shapes, and what megatron-core and vLLM make of them.

`mtp.*` tensors (multi-token prediction) have entries of their own (`heads`). Where they are not trained they are
left aside on load and carried over unchanged on export.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_agentrl.layout import parts
from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.config import Config, size
from megatron_agentrl.layout.decoder import head as head
from megatron_agentrl.layout.entries import EngineTable, Entry, Source, replicated
from megatron_agentrl.layout.heads import Head, head_of

#: Other spellings of disk names that are accepted when reading: (written by some versions, canonical).
ALIASES = (("backbone.embedding.weight", "backbone.embeddings.weight"),)
#: Tensors that may stand in a checkpoint without a parameter here, as regular expressions of the full name.
IGNORED = (r"mtp\..*",)
#: Of those, what an export carries over from its source folder.
CARRIED = (r"mtp\..*",)
ENGINES = {
    "nemotron_h": EngineTable(
        "NemotronHForCausalLM",
        renamed=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model."), (".A_log", ".A")),
        ties=False,
        ends_everywhere=True,
    )
}

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
    found: list[Head] = []
    for depth in range(config.get("num_nextn_predict_layers") or 0):
        first, last = f"mtp.layers.{depth * len(letters)}.", f"mtp.layers.{(depth + 1) * len(letters) - 1}."
        layers = [_layer(config, letter, f"mtp.layers.{depth * len(letters) + j}.") for j, letter in enumerate(letters)]
        found.append(head_of(first, Source(last + "final_layernorm.weight", (h,)), layers, h))
    return found


def embedding(config: Config) -> Source:
    return parts.table(config, "backbone.embeddings.weight")


def final_norm(config: Config) -> Source:
    return parts.norm(config, "backbone.norm_f.weight")


def layer(config: Config, index: int) -> list[Entry]:
    """Entries of layer `index`, names relative to `decoder.layers.<local index>.`."""
    return _layer(config, pattern(config)[index], f"backbone.layers.{index}.")


def _layer(config: Config, letter: str, at: str) -> list[Entry]:
    """Entries of one layer of kind `letter`, whose disk names begin with `at`."""
    before, mixer, h = parts.norm(config, at + "norm.weight"), at + "mixer.", size(config, "hidden_size")
    if letter == "M":
        return parts.mamba(config, before, mixer)
    if letter == "*":
        return parts.attention(config, before, mixer)
    if letter == "-":
        norm = replicated("mlp.linear_fc1.layer_norm_weight", before)
        return [norm, *parts.plain_mlp(config, "mlp.", mixer, size(config, "intermediate_size"), h)]
    count = size(config, "n_routed_experts")
    found = parts.router(config, before, mixer + "gate.weight", count, mixer + "gate.e_score_correction_bias")
    found += parts.plain_experts(config, mixer, count)
    if config.get("moe_shared_expert_intermediate_size"):
        ffn = size(config, "moe_shared_expert_intermediate_size")
        found += parts.plain_mlp(config, "mlp.shared_experts.", mixer + "shared_experts.", ffn, h)
    return found
