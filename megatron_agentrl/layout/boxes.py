"""Boxes: which rectangle of which logical tensor lies where in a rank's parameter.

Values only: no torch, no file, no process. A *logical tensor* is a tensor of the Hugging Face
checkpoint under its disk name, seen as a matrix: rank 1 is rows x 1, a higher rank is rows x the rest
flattened (a conv1d weight [C, 1, K] is C x K). A *parameter* is what one rank holds, seen the same way.
Both sides of a reshard (trainer and engine) speak in these terms, so a plan is an intersection of boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod


class LayoutError(ValueError):
    """A layout that cannot exist (sizes that do not divide) or that is wrong (overlap, gap, outside)."""


class DtypeRule(str, Enum):
    """`compute` follows the run's type; `fp32` stays fp32 on disk, on the wire and in the engine."""

    compute = "compute"
    fp32 = "fp32"


class ElementRule(str, Enum):
    """What happens to each element on the way from the logical tensor into the parameter."""

    copy = "copy"
    neg_exp = "neg_exp"
    """-exp(x): an engine that keeps Mamba's A where the checkpoint keeps A_log."""


@dataclass(frozen=True, slots=True)
class Box:
    """Rows [r0, r1) and columns [c0, c1) of logical `tensor`, placed at (`row`, `col`) of the local matrix."""

    tensor: str
    r0: int
    r1: int
    c0: int
    c1: int
    row: int
    col: int

    @property
    def rows(self) -> int:
        return self.r1 - self.r0

    @property
    def cols(self) -> int:
        return self.c1 - self.c0

    @property
    def size(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class Padding:
    """A local rectangle that no logical tensor fills: zero, never exported (vocabulary padding)."""

    row: int
    col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """One parameter (or persistent buffer) of one rank.

    name       the parameter's name inside its model chunk
    shape      its local shape
    boxes      where its elements come from; with `padding` they tile it exactly once
    chunk      index of the rank's model chunk (virtual pipeline stage)
    row_dims   leading dimensions that are rows of the local matrix: 2 for stacked experts [E, F, H], E*F x H
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    padding: tuple[Padding, ...] = ()
    dtype_rule: DtypeRule = DtypeRule.compute
    element_rule: ElementRule = ElementRule.copy
    chunk: int = 0
    row_dims: int = 1

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the local matrix that the boxes' `row` and `col` count in."""
        return matrix_shape((prod(self.shape[: self.row_dims]), *self.shape[self.row_dims :]))


@dataclass(frozen=True, slots=True)
class Overlap:
    """What two boxes of the same logical tensor share, and where it lies on either side."""

    tensor: str
    r0: int
    r1: int
    c0: int
    c1: int
    source_row: int
    source_col: int
    target_row: int
    target_col: int

    @property
    def size(self) -> int:
        return (self.r1 - self.r0) * (self.c1 - self.c0)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """`shape` as rows x columns: () -> (1, 1), (n,) -> (n, 1), (n, a, b) -> (n, a*b)."""
    if not shape:
        return 1, 1
    return shape[0], prod(shape[1:])


def intersect(source: Box, target: Box) -> Overlap | None:
    """The logical rectangle that both boxes hold, or None."""
    if source.tensor != target.tensor:
        return None
    r0, r1 = max(source.r0, target.r0), min(source.r1, target.r1)
    c0, c1 = max(source.c0, target.c0), min(source.c1, target.c1)
    if r0 >= r1 or c0 >= c1:
        return None
    return Overlap(
        source.tensor,
        r0,
        r1,
        c0,
        c1,
        source.row + r0 - source.r0,
        source.col + c0 - source.c0,
        target.row + r0 - target.r0,
        target.col + c0 - target.c0,
    )


def check_tiling(layout: ParameterLayout) -> None:
    """Raise LayoutError unless boxes and padding cover the local matrix, each element exactly once."""
    rectangles = [(b.row, b.row + b.rows, b.col, b.col + b.cols, b.tensor) for b in layout.boxes]
    rectangles += [(p.row, p.row + p.rows, p.col, p.col + p.cols, "padding") for p in layout.padding]
    _check_exact_cover(rectangles, layout.matrix, f"parameter {layout.name} {layout.shape}")


def check_cover(tensor: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raise LayoutError unless `boxes` (of distinct holders) cover the logical tensor, each element exactly once."""
    rectangles = [(b.r0, b.r1, b.c0, b.c1, f"row {b.row}") for b in boxes if b.tensor == tensor]
    _check_exact_cover(rectangles, matrix_shape(shape), f"tensor {tensor} {tuple(shape)}")


def _check_exact_cover(rectangles: list[tuple[int, int, int, int, str]], matrix: tuple[int, int], what: str) -> None:
    """Area equal to the whole, everything inside and no two overlapping: then the cover is exact."""
    rows, cols = matrix
    for r0, r1, c0, c1, label in rectangles:
        if not (0 <= r0 < r1 <= rows and 0 <= c0 < c1 <= cols):
            raise LayoutError(f"{what}: [{r0}:{r1}, {c0}:{c1}] ({label}) is empty or outside {rows} x {cols}")
    live: list[tuple[int, int, int, int, str]] = []
    for this in sorted(rectangles):
        live = [other for other in live if other[1] > this[0]]
        for other in live:
            if other[2] < this[3] and this[2] < other[3]:
                raise LayoutError(
                    f"{what}: [{other[0]}:{other[1]}, {other[2]}:{other[3]}] ({other[4]}) and "
                    f"[{this[0]}:{this[1]}, {this[2]}:{this[3]}] ({this[4]}) overlap"
                )
        live.append(this)
    area = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1, _ in rectangles)
    if area != rows * cols:
        raise LayoutError(f"{what}: {area} of {rows * cols} elements are covered")
