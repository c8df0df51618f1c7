"""What a Hugging Face config says, in megatron-core's words; shared by the readers beside this."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Architecture:
    """What a Hugging Face config says, in megatron-core's words. `config` holds TransformerConfig fields."""

    pattern: str
    vocab_size: int
    tied: bool
    config: dict[str, Any]
    position: str = "none"
    rotary_base: float = 10000.0
    rope_linear_factor: float | None = None
    """All positions are divided by this (rope_type `linear`)."""
    rope_llama3: dict[str, float] | None = None
    """Llama 3's scaling of the frequencies (rope_type `llama3`): factor, low_freq_factor, high_freq_factor and
    original_max_position_embeddings."""
    mixer: dict[str, Any] = field(default_factory=dict)
    mixer_norm_eps: float = 1e-5
