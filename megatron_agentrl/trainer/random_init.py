"""Random weights as a Hugging Face checkpoint, so that a fresh model and a pretrained one load by the same path.

The scales were measured to learn on small hybrid models: input projections keep the scale of their input
(0.7 / sqrt(width)), output projections shrink with the number of residual branches, and Mamba's time steps
start log-uniform between 1 and 100 milliseconds' worth of decay.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.layout.config import size
from megatron_agentrl.layout.megatron import fp32_tensors, hf_tensors, layer_pattern
from megatron_agentrl.trainer.weights_io import read_config, save_hf

_IN = re.compile(
    r"\.(in_proj|[qkv]_proj|up_proj|gate_proj|fc1_latent_proj|q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|eh_proj)\.weight$"
)
_OUT = re.compile(r"\.(out_proj|o_proj|down_proj|fc2_latent_proj)\.weight$")


def write_random(
    folder_out: Path | str,
    model_folder: Path | str,
    seed: int,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = 5 * 10**9,
    heads: bool = False,
) -> None:
    """Write `folder_out` with the config and tokenizer of `model_folder` and weights drawn from `seed`.

    Each tensor has a generator of its own, made from the seed and the tensor's name: the weights depend on
    neither order nor sharding. With `heads` the multi-token-prediction heads are drawn too.
    Raises WeightsError where config.json is missing, LayoutError where its model has no layout.
    """
    tensors = random_tensors(read_config(model_folder), seed, dtype, heads)
    save_hf(folder_out, model_folder, tensors, shard_bytes)


def random_tensors(
    config: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32, heads: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Disk names and initial values of all tensors, in the checkpoint's order."""
    branches = len(layer_pattern(config))
    out_std = 0.04 / math.sqrt(2 * branches) * math.sqrt(128 / size(config, "hidden_size"))
    keep = fp32_tensors(config, heads)
    for name, shape in hf_tensors(config, heads).items():
        digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        tensor = _initial(name, shape, out_std, generator)
        yield name, tensor if name in keep else tensor.to(dtype)


def _initial(name: str, shape: tuple[int, ...], out_std: float, generator: torch.Generator) -> torch.Tensor:
    """One tensor in float32."""
    if name.endswith("A_log"):
        return torch.arange(1, shape[0] + 1, dtype=torch.float32).log()
    if name.endswith("dt_bias"):
        low, high = math.log(1e-3), math.log(1e-1)
        dt = torch.exp(torch.rand(shape, generator=generator) * (high - low) + low)
        return dt + torch.log(-torch.expm1(-dt))  # softplus of this is dt
    if name.endswith(("conv1d.bias", "e_score_correction_bias")):
        return torch.zeros(shape)
    if name.endswith("conv1d.weight"):
        return torch.rand(shape, generator=generator) - 0.5
    if len(shape) == 1:  # norms, and Mamba's D
        return torch.ones(shape)
    normal = torch.randn(shape, generator=generator)
    if _IN.search(name):
        return normal * (0.7 / math.sqrt(shape[1]))
    if _OUT.search(name):
        return normal * out_std
    return normal * 0.02  # embedding, head, router
