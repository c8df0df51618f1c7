"""Which kinds of layers a Hugging Face config names, without torch: what the rules on precision and memory ask.

Not a parameter count (`planner.memory`) and not the layout (`layout`): only which kinds are there, how many entries
megatron-core's layer pattern has, and the sizes of each kind's linears on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_agentrl.recipe.schema import Topology

#: Words that configs use for the letters of a hybrid pattern.
WORDS = {"linear_attention": "M", "mamba": "M", "mamba2": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}  # fmt: skip


class Linear(NamedTuple):
    """One weight matrix as a rank holds it: `rows` outputs, `columns` inputs."""

    kind: str
    name: str
    rows: int
    columns: int


def letters(config: dict[str, Any]) -> str:
    """megatron-core's pattern: M Mamba-2, * attention, E mixture of experts, - dense MLP; letters that are unknown stay
    as they are.

    An attention with its MLP is one layer of a transformer's config.json and two here.
    """
    if config.get("model_type") == "nemotron_h":
        found = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types")
        return "".join(found if isinstance(found, str) else [WORDS.get(word, str(word)[:1]) for word in found or ()])
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    return "".join(
        "*E" if expert_count(config) and i not in dense and (i + 1) % step == 0 and i >= first else "*-"
        for i in range(config.get("num_hidden_layers") or 0)
    )


def expert_count(config: dict[str, Any]) -> int:
    """Routed experts of a layer; 0 for a model without any."""
    return config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0


def shared_width(config: dict[str, Any]) -> int:
    """Width of the shared experts together; 0 without any."""
    if config.get("moe_shared_expert_intermediate_size"):
        return config["moe_shared_expert_intermediate_size"]
    return (config.get("n_shared_experts") or 0) * (config.get("moe_intermediate_size") or 0)


def kinds(config: dict[str, Any]) -> set[str]:
    """Kinds of linears: mamba, attention, mlp, experts, shared_experts, latent."""
    pattern = letters(config)
    found = {
        name
        for letter, name in (("M", "mamba"), ("*", "attention"), ("-", "mlp"), ("E", "experts"))
        if letter in pattern
    }
    if "experts" in found and shared_width(config):
        found.add("shared_experts")
    if "experts" in found and config.get("moe_latent_size"):
        found.add("latent")
    return found


def linears(config: dict[str, Any], topology: Topology) -> Iterator[Linear]:
    """The linears of each kind, once. Multi-latent attention's projections are left out: their sizes vary by model.

    Raises KeyError where the config lacks a size that its kind of layer needs.
    """
    tp, hidden = topology.tp, config["hidden_size"]
    etp = topology.etp if topology.etp is not None else tp
    there = kinds(config)
    fc1 = 1 if config.get("model_type") == "nemotron_h" else 2  # elsewhere gate and up stand in one matrix
    if "mamba" in there:
        heads, groups, state = config["mamba_num_heads"], config["n_groups"], config["ssm_state_size"]
        inner = heads * config["mamba_head_dim"]
        yield Linear("mamba", "in_proj", (2 * inner + 2 * groups * state + heads) // tp, hidden)
        yield Linear("mamba", "out_proj", hidden, inner // tp)
    if "attention" in there and not config.get("kv_lora_rank"):
        heads = config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        groups = config.get("num_key_value_heads") or heads
        yield Linear("attention", "linear_qkv", size * (heads + 2 * groups) // tp, hidden)
        yield Linear("attention", "linear_proj", hidden, size * heads // tp)
    if "mlp" in there:
        width = config["intermediate_size"]
        yield Linear("mlp", "linear_fc1", fc1 * width // tp, hidden)
        yield Linear("mlp", "linear_fc2", hidden, width // tp)
    if "experts" in there:
        entry, width = config.get("moe_latent_size") or hidden, config["moe_intermediate_size"]
        yield Linear("experts", "linear_fc1", fc1 * width // etp, entry)
        yield Linear("experts", "linear_fc2", entry, width // etp)
        if "latent" in there:
            yield Linear("latent", "fc1_latent_proj", entry, hidden)
        if "shared_experts" in there:
            shared = shared_width(config)
            yield Linear("shared_experts", "linear_fc1", fc1 * shared // tp, hidden)
            yield Linear("shared_experts", "linear_fc2", hidden, shared // tp)
