"""FP8 source weights: which tensor scales which block of which weight. No torch.

DeepSeek-V3 stores its linear weights as float8 e4m3 codes; beside `NAME.weight` [R, C] lies `NAME.weight_scale_inv`,
float32 [ceil(R / 128), ceil(C / 128)], and a weight is its code times the scale of its block of 128 x 128. Blocks begin
at row 0 and column 0 of the whole tensor, so a rank that reads rows [r0, r1) needs the scales of the blocks that its
rows touch, whether its border lies on a block's border or not. The layouts know the weight under its own name and
shape; scales are a matter of reading, and no parameter has a layout made of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_agentrl.layout.boxes import LayoutError

BLOCK = 128
SUFFIX = "_scale_inv"
#: What safetensors calls the type of the codes.
STORED = "F8_E4M3"


def quantised(config: Mapping[str, Any]) -> bool:
    """Whether config.json says that weights are FP8 in blocks of 128 x 128. Raises LayoutError for another
    quantisation."""
    found = config.get("quantization_config")
    if not found:
        return False
    expected = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    wrong = {key: found.get(key) for key, value in expected.items() if found.get(key) != value}
    if found.get("fmt", "e4m3") != "e4m3":
        wrong["fmt"] = found["fmt"]
    if wrong:
        raise LayoutError(
            f"config.json: quantization_config has {wrong}, expected {expected} with fmt 'e4m3'; "
            "use the model's plain or FP8-blockwise weights"
        )
    return True


def scale_name(weight: str) -> str:
    """Disk name of the scales of `weight`."""
    return weight + SUFFIX


def scale_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Blocks of a weight [R, C]."""
    if len(shape) != 2:
        raise LayoutError(f"a weight of shape {tuple(shape)} has no blocks of {BLOCK} x {BLOCK}; only matrices have")
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def blocks(start: int, stop: int) -> tuple[int, int]:
    """[first, stop) blocks that rows (or columns) [start, stop) of a weight touch."""
    return start // BLOCK, -(-stop // BLOCK)


def scale_problems(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str], scaled: bool
) -> tuple[list[str], list[str]]:
    """(names of the scales, what is wrong) of a checkpoint with these tensors.

    Each FP8 weight has its scales, in float32 and in the shape of its blocks, and each scales an FP8 weight.

    Args:
        shapes: name -> shape.
        stored: name -> safetensors type.
        scaled: what `quantised` said of its config.json.
    """
    codes = [name for name, kind in stored.items() if kind == STORED]
    scales = [name for name in shapes if name.endswith(".weight" + SUFFIX)]
    found = []
    if (codes or scales) and not scaled:
        found.append(f"{(codes or scales)[0]} is of an FP8 checkpoint, but config.json has no quantization_config")
    for name in codes:
        if scale_name(name) not in shapes:
            found.append(f"{name} is {STORED} without {scale_name(name)}")
    for name in scales:
        weight = name.removesuffix(SUFFIX)
        if stored.get(weight) != STORED:
            found.append(f"{name} scales {weight}, which is {stored.get(weight, 'missing')}, expected {STORED}")
        elif shapes[name] != scale_shape(shapes[weight]) or stored[name] != "F32":
            found.append(
                f"{name} is {stored[name]} {shapes[name]}, expected F32 {scale_shape(shapes[weight])} "
                f"for a weight of {shapes[weight]}"
            )
    return scales, found
