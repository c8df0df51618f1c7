"""DeepSeek-V3 (multi-head latent attention, gated experts): disk names and shapes, and what megatron-core makes of them.

One HF layer is two entries of the hybrid model: latent attention (2l), then a dense MLP for the first
`first_k_dense_replace` layers and a mixture of experts for the others (2l + 1). Prediction heads are the disk layers
from `num_hidden_layers` on; their `embed_tokens` and `shared_head.head` are copies of the model's own tables.
"""

from __future__ import annotations

from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.config import Config, refuse, size
from megatron_agentrl.layout.decoder import dense_mlp, embedding, final_norm, gated, head, routed_experts, router
from megatron_agentrl.layout.entries import Entry, Source, columns, replicated, rows
from megatron_agentrl.layout.heads import Head, head_of

__all__ = ["embedding", "final_norm", "head"]  # the tables outside of the layers are those of other decoders

ALIASES: tuple[tuple[str, str], ...] = ()
IGNORED = (r".*\.rotary_emb\.inv_freq",)
CARRIED: tuple[str, ...] = ()


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
    refuse(config, attention_bias=False)

    def hf(name: str, *shape: int) -> Source:
        return Source(at + name, shape)

    if letter == "+":
        return _latent_attention(config, hf)
    if letter == "-":
        return dense_mlp(config, at)
    count, bias = size(config, "n_routed_experts"), "mlp.gate.e_score_correction_bias"
    found = [
        *router(config, at, count),
        replicated("mlp.router.expert_bias", hf(bias, count), fp32=True),
        *routed_experts(config, at, count),
    ]
    if config.get("n_shared_experts"):
        ffn = size(config, "n_shared_experts") * size(config, "moe_intermediate_size")
        gate, up, down = gated(config, at + "mlp.shared_experts", ffn)
        found.append(rows("mlp.shared_experts.linear_fc1.weight", gate, up))
        found.append(columns("mlp.shared_experts.linear_fc2.weight", down))
    return found


def _latent_attention(config: Config, hf) -> list[Entry]:  # type: ignore[no-untyped-def]
    h, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    rank, rotary = size(config, "kv_lora_rank"), size(config, "qk_rope_head_dim")
    plain, value = size(config, "qk_nope_head_dim"), size(config, "v_head_dim")
    found = [replicated("input_layernorm.weight", hf("input_layernorm.weight", h))]
    if config.get("q_lora_rank") is None:
        found.append(
            rows("self_attention.linear_q_proj.weight", hf("self_attn.q_proj.weight", heads * (plain + rotary), h))
        )
    else:
        q_rank = size(config, "q_lora_rank")
        found += [
            rows("self_attention.linear_q_down_proj.weight", hf("self_attn.q_a_proj.weight", q_rank, h), latent=True),
            replicated(
                "self_attention.linear_q_up_proj.layer_norm_weight", hf("self_attn.q_a_layernorm.weight", q_rank)
            ),
            rows(
                "self_attention.linear_q_up_proj.weight",
                hf("self_attn.q_b_proj.weight", heads * (plain + rotary), q_rank),
            ),
        ]
    return [
        *found,
        rows(
            "self_attention.linear_kv_down_proj.weight",
            hf("self_attn.kv_a_proj_with_mqa.weight", rank + rotary, h),
            latent=True,
        ),
        replicated("self_attention.linear_kv_up_proj.layer_norm_weight", hf("self_attn.kv_a_layernorm.weight", rank)),
        rows(
            "self_attention.linear_kv_up_proj.weight",
            hf("self_attn.kv_b_proj.weight", heads * (plain + value), rank),
        ),
        columns("self_attention.linear_proj.weight", hf("self_attn.o_proj.weight", h, heads * value)),
    ]
