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
    rotary_percent: float = 1.0
    mixer: dict[str, Any] = field(default_factory=dict)
    mixer_norm_eps: float = 1e-5


def refuse(hf: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Raise for a key that is present with a value the trainer does not compute."""
    for key, values in allowed.items():
        found = hf.get(key, values[0])
        if found not in values:
            raise ValueError(
                f"config.json: {key}={found!r} is not supported for model_type={hf['model_type']!r} "
                f"(supported: {', '.join(map(repr, values))})"
            )
