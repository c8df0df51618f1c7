"""FP8 source weights: which tensor scales which block of which weight. No torch.

DeepSeek-V3 stores its linear weights as float8 e4m3 codes; beside `NAME.weight` [R, C] lies `NAME.weight_scale_inv`,
float32 [ceil(R / 128), ceil(C / 128)], and a weight is its code times the scale of its block of 128 x 128. Blocks begin
at row 0 and column 0 of the whole tensor, so a rank that reads rows [r0, r1) needs the scales of the blocks that its
rows touch, whether its border lies on a block's border or not. The layouts know the weight under its own name and
shape; scales are a matter of reading, and no parameter has a layout made of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_agentrl.layout.boxes import LayoutError

BLOCK = 128
SUFFIX = "_scale_inv"
#: What safetensors calls the type of the codes.
STORED = "F8_E4M3"


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


def scales_of(shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str]) -> dict[str, str]:
    """FP8 weight -> its scales, of a checkpoint with these tensors.

    Args:
        shapes: name -> shape.
        stored: name -> what safetensors calls its type.

    Raises:
        LayoutError: an FP8 weight without scales, or scales without one, or of another shape or type.
    """
    found = {}
    for name in [name for name, kind in stored.items() if kind == STORED]:
        scale = scale_name(name)
        if scale not in shapes:
            raise LayoutError(f"{name} is {STORED} without {scale}; copy the whole checkpoint")
        expected = scale_shape(shapes[name])
        if shapes[scale] != expected or stored[scale] != "F32":
            raise LayoutError(
                f"{scale} is {stored[scale]} {shapes[scale]}, expected F32 {expected} for a weight of {shapes[name]} "
                f"in blocks of {BLOCK} x {BLOCK}; use weights quantised so"
            )
        found[name] = scale
    for name in shapes:
        if name.endswith(SUFFIX) and name not in found.values():
            weight = name.removesuffix(SUFFIX)
            raise LayoutError(
                f"{name} scales {weight}, which is {stored.get(weight, 'not there')}, expected {STORED}; "
                "copy the whole checkpoint"
            )
    return found
