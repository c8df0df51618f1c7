"""From a Hugging Face config.json to megatron-core's words: one reader for each `model_type`.

What megatron-core would compute differently from the Hugging Face model is refused by name; nothing in a config is
silently ignored that changes the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.trainer.architectures import deepseek_v3, nemotron_h, qwen3_moe
from megatron_agentrl.trainer.architectures.base import Architecture

READERS: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "deepseek_v3": deepseek_v3.read,
    "nemotron_h": nemotron_h.read,
    "qwen3_moe": qwen3_moe.read,
}


def architecture(hf: dict[str, Any]) -> Architecture:
    """Read a config.json dict.

    Raises:
        ValueError: an unsupported model_type or feature, by its key and value.
        KeyError: a key the model type requires is missing.
    """
    layer_pattern(hf)  # refuses an unknown model_type first
    return READERS[hf["model_type"]](hf)
