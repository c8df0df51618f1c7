"""From a Hugging Face config.json to megatron-core's words: one reader for each `model_type`.

What megatron-core would compute differently from the Hugging Face model is refused by name, by the rules that the
recipe's check applies before anything starts (`recipe.model_rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_agentrl.layout.megatron import layer_pattern
from megatron_agentrl.recipe.model_rules import model_problems
from megatron_agentrl.trainer.architectures import decoder, deepseek_v3, nemotron_h
from megatron_agentrl.trainer.architectures.base import Architecture

READERS: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    "deepseek_v3": deepseek_v3.read,
    "nemotron_h": nemotron_h.read,
    "qwen3_moe": decoder.read,
    "qwen3": decoder.read,
    "llama": decoder.read,
}


def architecture(hf: dict[str, Any]) -> Architecture:
    """Read a config.json dict.

    Raises:
        ValueError: an unsupported model_type or feature, or a missing key, each by its key and value.
    """
    layer_pattern(hf)  # refuses an unknown model_type first
    if found := list(model_problems(hf)):
        raise ValueError("\n".join(found))
    return READERS[hf["model_type"]](hf)
