"""Entries: how one megatron-core parameter is put together from Hugging Face tensors, before it is cut.

Every layout of a transformer or Mamba parameter is one mechanism: *blocks* of rows, each a run of row
intervals of checkpoint tensors, are cut into n equal parts each, and a rank takes the same part of every
block. QKV is one block of interleaved query groups; gate/up are two blocks; Mamba's in_proj is five blocks
of one tensor; a padded vocabulary is one block that ends in an interval of no tensor. The per-architecture
tables (`nemotron_h`, `decoder`) are written with the constructors below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_agentrl.layout.boxes import Box, LayoutError, Padding, matrix_shape

Split = Literal["none", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint: disk name and full shape."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """Rows [start, stop) of a checkpoint tensor; `tensor=None` are rows that only pad."""

    tensor: str | None
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """One megatron-core parameter or persistent buffer, whole.

    name      inside its layer (or inside the model, for the ends); experts: inside `mlp.experts.`, see `expert`
    sources   the checkpoint tensors it is made of
    blocks    row intervals; each block is cut on its own
    split     cut rows (column-parallel), columns (row-parallel) or nothing
    group     over which ranks it is cut: `tp`, or `etp` for routed experts
    expert    global expert id, None for anything that every expert-parallel rank holds
    shares    True where `sources` already belong to another entry (tied head): loaded here, exported there
    latent    MLA's down projections: cut as `split` says in a local build, held whole with Transformer Engine
    """

    name: str
    sources: tuple[Source, ...]
    blocks: tuple[tuple[Interval, ...], ...]
    split: Split
    group: Literal["tp", "etp"] = "tp"
    expert: int | None = None
    fp32: bool = False
    shares: bool = False
    latent: bool = False

    def cut(self, size: int, rank: int) -> tuple[tuple[int, ...], tuple[Box, ...], tuple[Padding, ...]]:
        """Local shape, boxes and padding of part `rank` of `size`."""
        trailing = self.sources[0].shape[1:]
        cols = matrix_shape(self.sources[0].shape)[1]
        c0, c1 = 0, cols
        if self.split == "columns":
            c0, c1 = _part(cols, size, rank, self.sources[0].name, "columns")
            trailing = (c1 - c0,)
        boxes: list[Box] = []
        padding: list[Padding] = []
        row = 0
        for block in self.blocks:
            rows = sum(interval.rows for interval in block)
            first, last = (0, rows)
            if self.split == "rows":
                first, last = _part(rows, size, rank, block[0].tensor or self.name, "rows")
            at = 0  # position of the interval inside its block
            for interval in block:
                low, high = max(first, at), min(last, at + interval.rows)
                if low < high and interval.tensor is not None:
                    r0 = interval.start + low - at
                    boxes.append(Box(interval.tensor, r0, r0 + high - low, c0, c1, row, 0))
                elif low < high:
                    padding.append(Padding(row, 0, high - low, c1 - c0))
                row += max(0, high - low)
                at += interval.rows
        return (row, *trailing), tuple(boxes), tuple(padding)


def _part(total: int, size: int, rank: int, tensor: str, what: str) -> tuple[int, int]:
    if total % size:
        raise LayoutError(
            f"{tensor}: {total} {what} cannot be cut into {size} equal parts; use a size that divides {total}"
        )
    step = total // size
    return rank * step, (rank + 1) * step


def _whole(source: Source) -> Interval:
    return Interval(source.name, 0, source.shape[0])


def replicated(name: str, source: Source, *, fp32: bool = False) -> Entry:
    """The same on each rank of the group."""
    return Entry(name, (source,), ((_whole(source),),), "none", fp32=fp32)


def rows(
    name: str,
    *sources: Source,
    blocks: Sequence[int] = (),
    group: Literal["tp", "etp"] = "tp",
    expert: int | None = None,
    fp32: bool = False,
    latent: bool = False,
) -> Entry:
    """Column-parallel: rows are cut. Several sources are one block each (gate, up); `blocks` gives the row
    counts of the blocks of a single source (Mamba's z, x, B, C, dt)."""
    if blocks:
        (source,) = sources
        if sum(blocks) != source.shape[0]:
            raise LayoutError(
                f"{source.name}: blocks {list(blocks)} sum to {sum(blocks)}, the tensor has {source.shape[0]} rows"
            )
        starts = [sum(blocks[:i]) for i in range(len(blocks))]
        cuts = tuple((Interval(source.name, start, start + n),) for start, n in zip(starts, blocks, strict=True))
    else:
        cuts = tuple((_whole(source),) for source in sources)
    return Entry(name, sources, cuts, "rows", group=group, expert=expert, fp32=fp32, latent=latent)


def columns(name: str, source: Source, *, group: Literal["tp", "etp"] = "tp", expert: int | None = None) -> Entry:
    """Row-parallel: columns are cut."""
    return Entry(name, (source,), ((_whole(source),),), "columns", group=group, expert=expert)


def query_groups(name: str, q: Source, k: Source, v: Source, groups: int, head_dim: int) -> Entry:
    """Fused QKV: per query group its q heads, then its k head, then its v head; all groups are one block.

    With more ranks than groups megatron-core cuts the interleaved rows as they stand, so a part may hold
    a fraction of a group: one block, cut evenly, says exactly that.
    """
    per_group = q.shape[0] // groups
    block: list[Interval] = []
    for g in range(groups):
        block.append(Interval(q.name, g * per_group, (g + 1) * per_group))
        block.append(Interval(k.name, g * head_dim, (g + 1) * head_dim))
        block.append(Interval(v.name, g * head_dim, (g + 1) * head_dim))
    return Entry(name, (q, k, v), (tuple(block),), "rows")


def vocabulary(name: str, source: Source, padded: int, *, shares: bool = False) -> Entry:
    """Vocabulary-parallel: rows are cut after padding to `padded` rows; the padding belongs to no tensor."""
    block = [_whole(source)]
    if padded > source.shape[0]:
        block.append(Interval(None, source.shape[0], padded))
    return Entry(name, (source,), (tuple(block),), "rows", shares=shares)
