"""FP8 weights in blocks of 128 x 128, as DeepSeek-V3 stores them and as transformers and vLLM read them.

Beside each quantised weight W [rows, columns] in float8 e4m3 stands `NAME_scale_inv`, float32 [ceil(rows / 128),
ceil(columns / 128)]: what its blocks are multiplied by. A scale is its block's largest magnitude over 448, the largest
e4m3 number (1 for a block of zeros); codes round to nearest even. Blocks begin at row 0 and column 0 of the whole
tensor, so that the codes do not depend on how a model was cut (a block cut by a tensor-parallel border is quantised
from the whole weight). `config.json` says `quantization_config`: quant_method fp8, fmt e4m3, weight_block_size [128,
128], activation_scheme dynamic, and the linears that stay as they are in `modules_to_not_convert`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_agentrl.layout.fp8 import BLOCK, SUFFIX, scale_shape
from megatron_agentrl.trainer import hf_folder

__all__ = ["SUFFIX", "scale_shape"]

LARGEST = 448.0
#: Linears that DeepSeek's convention quantises: attention, MLP, experts. Norms, router, embedding, head, the joining
#: projection of prediction heads and everything of Mamba (whose blocks are not 128-aligned) keep their type.
_QUANTISED = re.compile(
    r".*\.(q|k|v|o|q_a|q_b|kv_a|kv_b|gate|up|down)_proj(_with_mqa)?\.weight|.*\.kv_a_proj_with_mqa\.weight"
)
_LINEAR_KEPT = re.compile(
    r".*\.(in_proj|out_proj|fc1_latent_proj|fc2_latent_proj|eh_proj|gate|lm_head)\.weight|lm_head\.weight"
)


def is_quantised(name: str) -> bool:
    """Whether `--fp8-blockwise` quantises the tensor of this disk name."""
    return _QUANTISED.fullmatch(name) is not None


def quantise(weight_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, C] in e4m3 and scales [ceil(R / 128), ceil(C / 128)] in float32; a strip of 128 rows at a time."""
    rows, columns = weight_RC.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(scale_shape((rows, columns)), dtype=torch.float32)
    for number in range(scales.shape[0]):
        strip = weight_RC[number * BLOCK : (number + 1) * BLOCK].float()
        column_max = torch.nn.functional.pad(strip.abs().amax(0), (0, scales.shape[1] * BLOCK - columns))
        amax = column_max.view(-1, BLOCK).amax(1)
        scale = torch.where(amax > 0, amax / LARGEST, torch.ones_like(amax))
        scales[number] = scale
        codes[number * BLOCK : (number + 1) * BLOCK] = (strip / scale.repeat_interleave(BLOCK)[:columns]).to(
            torch.float8_e4m3fn
        )
    return codes, scales


def dequantise(codes_RC: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, first_row: int = 0) -> torch.Tensor:
    """Codes times their blocks' scales, computed in float32 a strip at a time and rounded once to `dtype`; [R, C].

    Args:
        scales: of the whole weight.
        first_row: row of the whole weight at which `codes_RC` begins.
    """
    out = torch.empty(codes_RC.shape, dtype=dtype)
    at = 0
    while at < codes_RC.shape[0]:
        number = (first_row + at) // BLOCK
        stop = min(codes_RC.shape[0], (number + 1) * BLOCK - first_row)
        strip = scales[number : number + 1].float()
        out[at:stop] = hf_folder.dequantise(codes_RC[at:stop], strip, first_row + at - number * BLOCK)
        at = stop
    return out


def quantization_config(names: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint with these tensors."""
    kept = sorted({name.removesuffix(".weight") for name in names if _LINEAR_KEPT.fullmatch(name)})
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def block_scaled(config: Mapping[str, Any]) -> bool | str:
    """False for plain weights, True for FP8 in blocks of 128 x 128, else what else `quantization_config` says."""
    found = config.get("quantization_config")
    if not found:
        return False
    if found.get("quant_method") == "fp8" and list(found.get("weight_block_size") or ()) == [BLOCK, BLOCK]:
        return True
    return f"quant_method={found.get('quant_method')!r}, weight_block_size={found.get('weight_block_size')!r}"
