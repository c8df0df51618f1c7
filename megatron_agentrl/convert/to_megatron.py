"""A Hugging Face folder as a distributed checkpoint that the trainer loads at any topology."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert import jobs
from megatron_agentrl.convert.dist_folder import DistWriter
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.hf_source import HfSource
from megatron_agentrl.convert.keys import Chunk, Part, Unit, chunks, source_rows, units
from megatron_agentrl.convert.origin import keep_origin
from megatron_agentrl.layout.megatron import Grid, layer_pattern, split_layers
from megatron_agentrl.recipe.schema import Topology
from megatron_agentrl.recipe.topology_rules import topology_problems
from megatron_agentrl.trainer.complete import write_mark


@dataclass(frozen=True)
class Cut:
    """How the files are cut: the topology whose ranks would have written them."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    """None follows tp."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    def grid(self, config: Mapping[str, Any]) -> Grid:
        """The smallest world of this topology. Raises ConvertError by the rules that recipes are checked with."""
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConvertError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
        etp = self.tp if self.etp is None else self.etp
        world = lcm(self.tp, etp * self.ep) * self.pp
        sizes = Topology(**(vars(self) | {"world": world, "etp": etp, "sequence_parallel": self.tp > 1}))
        if found := list(topology_problems(sizes, dict(config))):
            raise ConvertError(_as_flags("; ".join(found)))
        layers, stages = len(layer_pattern(config)), self.pp * self.vpp
        split = split_layers(layers, stages, self.first_stage_layers, self.last_stage_layers)
        return Grid(world, split, tp=self.tp, pp=self.pp, ep=self.ep, etp=etp)


def _as_flags(text: str) -> str:
    """The recipe's keys as this tool's flags."""
    return re.sub(r"topology\.(\w+)", lambda match: "--" + match[1].replace("_", "-"), text)


def hf_to_megatron(
    source: Path,
    target: Path,
    cut: Cut = Cut(),  # noqa: B008
    mtp: bool = False,
    workers: int = jobs.WORKERS,
    replace: bool = False,
    quiet: bool = False,
) -> None:
    """Write `target` from the Hugging Face folder `source`. Stored types are kept; fp32 where it must be.

    Args:
        mtp: the prediction heads become parameters, for a trainer that trains them; else they are kept beside the
            checkpoint and come back with an export.

    Raises:
        ConvertError, WeightsError, LayoutError, OSError: `target` is then not there.
    """
    hf = HfSource(source)
    if mtp and not hf.heads:
        raise ConvertError(
            f"{source} has no weights of multi-token-prediction heads (num_nextn_predict_layers="
            f"{hf.config.get('num_nextn_predict_layers')!r}); leave out --mtp"
        )
    grid = cut.grid(hf.config)
    found = list(units(hf.config, grid, mtp))
    tensors = key_types(hf, found)
    jobs.check_space(target, sum(dtype.itemsize * prod(shape) for dtype, shape in tensors.values()))
    with jobs.target(target, replace) as folder:
        writer = DistWriter(folder, tensors)

        def convert(unit: Unit) -> None:
            for part in unit.parts:
                dtype = tensors[part.key][0]
                whole = _whole(hf, part, dtype) if part.split == "columns" else None
                for chunk in chunks(part, grid):
                    writer.append(chunk.rank, part.key, chunk.offsets, _values(hf, part, chunk, dtype, whole))

        jobs.run(
            found,
            convert,
            memory=lambda unit: _memory(unit, tensors),
            nbytes=lambda unit: sum(part.rows * part.cols * tensors[part.key][0].itemsize for part in unit.parts),
            workers=workers,
            title="to megatron",
            quiet=quiet,
        )
        writer.finish()
        keep_origin(hf, folder / "hf", set() if mtp else hf.head_names())
        layout = {"world": grid.world, "tp": grid.tp, "pp": grid.pp, "cp": 1, "ep": grid.ep, "etp": grid.etp}
        facts = {"world": grid.world, "step": 0, "optimizer_step": 0, "layout": layout, "vpp": cut.vpp}
        write_mark(folder, facts | {"converted": True})


def key_types(hf: HfSource, found: list[Unit]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Key -> type and global shape. Tensors of one key that differ in type get the smallest that holds both exactly."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for unit in found:
        for part in unit.parts:
            dtype = torch.float32 if part.fp32 else hf.dtype(unit.sources[0].name)
            for source in unit.sources[1:]:
                dtype = torch.promote_types(dtype, hf.dtype(source.name))
            if part.key in tensors:
                dtype = torch.promote_types(dtype, tensors[part.key][0])
            tensors[part.key] = dtype, part.shape
    return tensors


def _values(hf: HfSource, part: Part, chunk: Chunk, dtype: torch.dtype, whole: torch.Tensor | None) -> torch.Tensor:
    """The chunk's tensor, in the shape of the checkpoint."""
    if whole is not None:
        return whole[chunk.r0 : chunk.r1, chunk.c0 : chunk.c1].contiguous().view(chunk.sizes)
    out = torch.empty(chunk.r1 - chunk.r0, part.cols, dtype=dtype)
    for interval, row in source_rows(part, chunk.r0, chunk.r1):
        rows = out[row - chunk.r0 : row - chunk.r0 + interval.rows]
        if interval.tensor is None:
            rows.zero_()
        else:
            hf.fill(interval.tensor, interval.start, interval.stop, rows)
    return out.view(chunk.sizes)


def _whole(hf: HfSource, part: Part, dtype: torch.dtype) -> torch.Tensor:
    every = Chunk((), (part.rows, part.cols), 0, part.rows, 0, part.cols, 0)
    return _values(hf, part, every, dtype, None)


def _memory(unit: Unit, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """The largest part once, and once more where columns are cut out of it."""
    return max(
        part.rows * part.cols * tensors[part.key][0].itemsize * (2 if part.split == "columns" else 1)
        for part in unit.parts
    )
