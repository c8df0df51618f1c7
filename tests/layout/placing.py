"""Checkpoints, trainer ranks and engine ranks as numpy arrays, filled from one another by boxes alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from megatron_agentrl.layout.boxes import Box, ElementRule, ParameterLayout, intersect, matrix_shape
from megatron_agentrl.layout.engine import EngineTopology, engine_layouts
from megatron_agentrl.layout.megatron import (
    Grid,
    Variant,
    hf_tensors,
    holders,
    layer_pattern,
    parameter_layouts,
    split_layers,
)

Arrays = dict[tuple[int, str], np.ndarray]


def checkpoint(config, heads: bool = False) -> dict[str, np.ndarray]:
    """Every tensor as a matrix, each element another whole number; A_log has logarithms, of which -exp() is finite."""
    found, at = {}, 0
    for name, shape in hf_tensors(config, heads).items():
        rows, cols = matrix_shape(shape)
        found[name] = np.arange(at, at + rows * cols, dtype=np.float64).reshape(rows, cols)
        if name.endswith("A_log"):
            found[name] = np.log1p(found[name])
        at += rows * cols
    return found


def grid(config, world=1, tp=1, cp=1, pp=1, vpp=1, ep=1, etp=None, first=None, last=None) -> Grid:
    stages = split_layers(len(layer_pattern(config)), pp * vpp, first, last)
    return Grid(world, stages, tp=tp, cp=cp, pp=pp, ep=ep, etp=tp if etp is None else etp)


class Parameter:
    """A parameter of one rank, and how often each of its elements was written."""

    def __init__(self, layout: ParameterLayout) -> None:
        self.layout = layout
        self.values = np.full(layout.matrix, np.nan)
        self.writes = np.zeros(layout.matrix, dtype=np.int16)
        for pad in layout.padding:
            self.write(pad.row, pad.col, np.zeros((pad.rows, pad.cols)))

    def write(self, row: int, col: int, values: np.ndarray) -> None:
        at = slice(row, row + values.shape[0]), slice(col, col + values.shape[1])
        self.values[at] = values
        self.writes[at] += 1

    def read(self, row: int, col: int, rows: int, cols: int) -> np.ndarray:
        return self.values[row : row + rows, col : col + cols]


class Ranks:
    """Every rank of a trainer: (chunk, name) -> parameter."""

    def __init__(self, config, topology: Grid, variant: Variant) -> None:
        self.config, self.grid, self.variant = config, topology, variant
        self.ranks = [
            {
                (layout.chunk, layout.name): Parameter(layout)
                for layout in parameter_layouts(config, topology.coordinates(rank), variant)
            }
            for rank in range(topology.world)
        ]

    def parameters(self) -> Iterable[Parameter]:
        return (parameter for rank in self.ranks for parameter in rank.values())

    def fill(self, tensors: dict[str, np.ndarray]) -> Ranks:
        for parameter in self.parameters():
            for box in parameter.layout.boxes:
                parameter.write(box.row, box.col, tensors[box.tensor][box.r0 : box.r1, box.c0 : box.c1])
        return self

    def export(self, replica: int) -> dict[str, np.ndarray]:
        """The checkpoint, from the first (0) or the last (-1) rank of those that hold each part."""
        found = {}
        for held in holders(self.config, self.grid, self.variant):
            whole = found[held.tensor.name] = np.full(matrix_shape(held.tensor.shape), np.nan)
            for part in held.holdings:
                parameter = self.ranks[part.ranks[replica]][part.chunk, part.name]
                for box in part.boxes:
                    whole[box.r0 : box.r1, box.c0 : box.c1] = parameter.read(box.row, box.col, box.rows, box.cols)
        return found

    def sources(self) -> dict[str, list[tuple[Parameter, Box]]]:
        """Tensor -> one holder of each of its parts, another replica from tensor to tensor."""
        found = defaultdict(list)
        for number, held in enumerate(holders(self.config, self.grid, self.variant)):
            for part in held.holdings:
                rank = part.ranks[number % len(part.ranks)]
                found[held.tensor.name] += [(self.ranks[rank][part.chunk, part.name], box) for box in part.boxes]
        return found


def transfer(sources: dict[str, list[tuple[Parameter, Box]]], targets: Iterable[Parameter]) -> None:
    """Fill every target from the sources: what a box of either side have in common, element rules applied."""
    for target in targets:
        for box in target.layout.boxes:
            for parameter, held in sources[box.tensor]:
                if (shared := intersect(held, box)) is None:
                    continue
                rows, cols = shared.r1 - shared.r0, shared.c1 - shared.c0
                values = parameter.read(shared.source_row, shared.source_col, rows, cols)
                if target.layout.element_rule is ElementRule.neg_exp:
                    values = -np.exp(values)
                target.write(shared.target_row, shared.target_col, values)


def engine(config, topology: EngineTopology) -> list[Parameter]:
    return [Parameter(layout) for rank in range(topology.world) for layout in engine_layouts(config, topology, rank)]
