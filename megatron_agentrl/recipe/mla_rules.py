"""What engines need of a `deepseek_v3` model folder beyond what the trainer reads. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def latent_problems(config: dict[str, Any] | None, *, on_cpu: bool) -> Iterator[str]:
    """One line for each thing that vLLM would not serve, or would compute otherwise than the trainer.

    vLLM 0.32's attention for latents on a CPU was measured 0.26 nats away from transformers on a tiny float32 model
    that it had loaded from disk itself, where the trainer is within 1e-5: no canary could be proven.
    """
    if config is None or config.get("model_type") != "deepseek_v3":
        return
    for key, value in {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}.items():
        if config.get(key) != value:  # without them vLLM routes by softmax and has no router bias
            yield (
                f"config.json: {key} is {config.get(key)!r}, expected {value!r}, as the engine reads it there "
                f"(transformers does not write it); add it to the model folder's config.json"
            )
    if on_cpu:
        yield (
            "config.json: model_type is 'deepseek_v3', whose latent attention an engine on a CPU does not compute as the "
            "trainer does; use engines on GPUs, or warm-start only (the sft command)"
        )
