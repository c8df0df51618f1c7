"""The tensors of a distributed checkpoint, and which rows of which Hugging Face tensor each is made of. No torch.

A distributed checkpoint holds every parameter whole, under a key that does not depend on the topology, cut into chunks
that do. The keys, global shapes and axes are those of megatron-core's `sharded_state_dict` with the layers of this
project (`trainer.layers`): layers are numbered through the pipeline, the experts of a layer are one tensor with the
expert as first axis, Mamba's fused projection and convolution are one tensor for each of their blocks, a tied head is
not there, and the vocabulary is padded. `layout`'s entries say everything else. Not here: files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from megatron_agentrl.layout.boxes import matrix_shape
from megatron_agentrl.layout.config import Config, size
from megatron_agentrl.layout.entries import Entry, Interval, Source, Split, replicated, vocabulary
from megatron_agentrl.layout.megatron import (
    Grid,
    architecture,
    check_divisibility,
    heads_pattern,
    layer_pattern,
    padded_vocabulary,
)

#: Names of the blocks that are tensors of their own in a checkpoint: parameter -> (key, suffixes).
_NAMED_BLOCKS = {
    "mixer.in_proj.weight": ("mixer.in_proj.weight", ("z", "x", "B", "C", "dt")),
    "mixer.conv1d_weight": ("mixer.conv1d.weight", ("x", "B", "C")),
    "mixer.conv1d_bias": ("mixer.conv1d.bias", ("x", "B", "C")),
}
#: Keys whose rows are padded to the topology that wrote them.
VOCABULARY_KEYS = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of one checkpoint tensor, and where they come from.

    key        of the tensor
    shape      its global shape, the expert axis included
    expert     index on the first axis; None where there is no expert axis
    row        first of these rows in the tensor (of the expert)
    intervals  rows of Hugging Face tensors, in order; an interval of no tensor is padding
    split      what tensor parallelism cuts; `group` says which
    stage      pipeline stage that owns it, of those of the grid
    fp32       stays float32 whatever the run's type
    """

    key: str
    shape: tuple[int, ...]
    expert: int | None
    row: int
    intervals: tuple[Interval, ...]
    split: Split
    group: Literal["tp", "etp"]
    stage: int
    fp32: bool

    @property
    def rows(self) -> int:
        return sum(interval.rows for interval in self.intervals)

    @property
    def cols(self) -> int:
        """Columns of the tensor seen as a matrix, without the expert axis."""
        return prod(self.local_shape[1:])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Global shape without the expert axis."""
        return self.shape if self.expert is None else self.shape[1:]


@dataclass(frozen=True, slots=True)
class Unit:
    """Hugging Face tensors and the parts that are made of exactly them: the smallest piece of work."""

    sources: tuple[Source, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Elements of the sources."""
        return sum(prod(source.shape) for source in self.sources)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangle of a part that one rank writes: rows [r0, r1) of the part and columns [c0, c1)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    r0: int
    r1: int
    c0: int
    c1: int
    rank: int


def units(config: Config, grid: Grid, heads: bool = False) -> Iterator[Unit]:
    """Everything in the checkpoint of a model, in the order of `layout.megatron.hf_tensors`.

    With `heads` its multi-token-prediction heads too. Raises LayoutError where the model cannot be cut so.
    """
    check_divisibility(config, grid.coordinates(0))
    table, last = architecture(config), len(grid.stages) - 1
    experts = _experts(config)
    vocab = size(config, "vocab_size")
    padded = padded_vocabulary(vocab, grid.tp)
    yield from _units(vocabulary(VOCABULARY_KEYS[0], table.embedding(config), padded), "", 0, experts)
    for stage, (start, stop) in enumerate(grid.stages):
        for index in range(start, stop):
            for entry in table.layer(config, index):
                yield from _units(entry, f"decoder.layers.{index}.", stage, experts)
    yield from _units(replicated("decoder.final_norm.weight", table.final_norm(config)), "", last, experts)
    if not config.get("tie_word_embeddings"):
        yield from _units(vocabulary(VOCABULARY_KEYS[1], table.head(config), padded), "", last, experts)
    if heads and heads_pattern(config)[1]:
        for depth, head in enumerate(table.heads(config)):
            for prefix, entry in head.prefixed(depth):
                yield from _units(entry, prefix, last, experts)


def chunks(part: Part, grid: Grid) -> Iterator[Chunk]:
    """How the ranks of `grid` cut a part, and the rank that writes each piece: the first that holds it."""
    pp_rank = part.stage % grid.pp
    count = 1 if part.split == "none" else grid.etp if part.group == "etp" else grid.tp
    lead = () if part.expert is None else (part.expert,)
    trailing = part.local_shape[1:]
    for at in range(count):
        r0, r1, c0, c1 = 0, part.rows, 0, part.cols
        if part.split == "rows":
            r0, r1 = at * part.rows // count, (at + 1) * part.rows // count
        elif part.split == "columns":
            c0, c1 = at * part.cols // count, (at + 1) * part.cols // count
            trailing = (c1 - c0,)
        if part.expert is not None:
            owner = grid.expert_ranks(pp_rank, part.expert // (part.shape[0] // grid.ep), at)[0]
        else:
            owner = grid.dense_ranks(pp_rank, None if part.split == "none" else at)[0]
        further = (c0,) + (0,) * (len(trailing) - 1) if trailing else ()
        offsets = (*lead, part.row + r0, *further)
        yield Chunk(offsets, (*(1 for _ in lead), r1 - r0, *trailing), r0, r1, c0, c1, owner)


def key_shapes(found: Iterable[Unit]) -> dict[str, tuple[int, ...]]:
    """Key -> global shape of every tensor of the checkpoint."""
    return {part.key: part.shape for unit in found for part in unit.parts}


def _experts(config: Config) -> int:
    if "E" not in layer_pattern(config) + heads_pattern(config)[0]:
        return 0
    return size(config, "n_routed_experts", "num_experts", "num_local_experts")


def _units(entry: Entry, prefix: str, stage: int, experts: int) -> Iterator[Unit]:
    """One unit for each set of sources that no part mixes with others."""
    waiting = list(_parts(entry, prefix, stage, experts))
    while waiting:
        names, taken = _tensors(waiting[0]), [waiting[0]]
        rest: list[Part] = []
        for part in waiting[1:]:
            (taken if names & _tensors(part) else rest).append(part)
        yield Unit(tuple(source for source in entry.sources if source.name in names), tuple(taken))
        waiting = rest


def _tensors(part: Part) -> set[str]:
    return {interval.tensor for interval in part.intervals if interval.tensor is not None}


def _parts(entry: Entry, prefix: str, stage: int, experts: int) -> Iterator[Part]:
    trailing = entry.sources[0].shape[1:]
    total = sum(interval.rows for block in entry.blocks for interval in block)
    key, suffixes = _NAMED_BLOCKS.get(entry.name, (entry.name, ()))
    if entry.expert is not None:
        key = f"mlp.experts.experts.{key}"
    row = 0
    for number, block in enumerate(entry.blocks):
        rows = sum(interval.rows for interval in block)
        name, shape, at = key, (total, *trailing), row
        if suffixes:
            name, shape, at = f"{key}.{suffixes[number]}", (rows, *trailing), 0
        if entry.expert is not None:
            shape = (experts, *shape)
        yield Part(prefix + name, shape, entry.expert, at, block, entry.split, entry.group, stage, entry.fp32)
        row += rows


def source_rows(part: Part, r0: int, r1: int) -> Iterator[tuple[Interval, int]]:
    """What fills rows [r0, r1) of a part: (the rows of a Hugging Face tensor, first row of the part that they fill)."""
    at = 0
    for interval in part.intervals:
        low, high = max(r0, at), min(r1, at + interval.rows)
        if low < high:
            start = interval.start + low - at
            yield Interval(interval.tensor, start, start + high - low), low
        at += interval.rows


def matrix(source: Source) -> tuple[int, int]:
    """Rows and columns of a Hugging Face tensor seen as a matrix."""
    return matrix_shape(source.shape)
