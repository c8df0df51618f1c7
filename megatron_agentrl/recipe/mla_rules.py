"""What engines need of a `deepseek_v3` model folder beyond what the trainer reads. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: Latent and rotary key together, the one width that vLLM's CPU attention is compiled for.
CPU_LATENT = 576


def latent_problems(config: dict[str, Any] | None, *, on_cpu: bool) -> Iterator[str]:
    """One line for each thing that vLLM would not serve, or would compute otherwise than the trainer."""
    if config is None or config.get("model_type") != "deepseek_v3":
        return
    for key, value in {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
        if config.get(key) != value:  # without them vLLM routes by softmax and has no router bias
            yield (
                f"config.json: {key} is {config.get(key)!r}, expected {value!r}, as the engine reads it there "
                f"(transformers does not write it); add it to the model folder's config.json"
            )
    width = (config.get("kv_lora_rank") or 0) + (config.get("qk_rope_head_dim") or 0)
    if on_cpu and width != CPU_LATENT:
        yield (
            f"config.json: kv_lora_rank + qk_rope_head_dim = {width}, but an engine on a CPU serves latent attention of "
            f"{CPU_LATENT} only; use such a model, or engines on GPUs"
        )
