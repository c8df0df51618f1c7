"""Which table describes which model type. A new architecture is its table and one line here.

What a table has to define is in docs/add_an_architecture.md.
"""

from __future__ import annotations

from types import ModuleType

from megatron_agentrl.layout import decoder, deepseek_v3, nemotron_h
from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.config import Config

ARCHITECTURES: dict[str, ModuleType] = {
    "deepseek_v3": deepseek_v3,
    "nemotron_h": nemotron_h,
    "qwen3_moe": decoder,
    "qwen3": decoder,
    "llama": decoder,
}


def architecture(config: Config) -> ModuleType:
    """The table of `model_type`. Raises LayoutError for a type without one."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise LayoutError(f"model_type {kind!r} has no layout; known are {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def layer_pattern(config: Config) -> str:
    """One letter per layer of the hybrid model: M Mamba-2, * attention, + latent attention, E mixture of experts, - MLP."""
    return architecture(config).pattern(config)
