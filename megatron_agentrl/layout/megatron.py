"""Which rows and columns of which checkpoint tensor each megatron-core rank holds.

Covers every parameter and persistent buffer of a `HybridModel` under the names of the Transformer Engine
spec (`mixer.in_proj.layer_norm_weight`), at any TP, PP, VPP, EP and ETP. `parameter_layouts` answers for
one rank; `holders` is the reverse index, one checkpoint tensor at a time in one fixed order. Needs no torch:
the planner asks about rank 3071 of 4096 on a laptop.

Verified against megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from megatron_agentrl.layout import decoder, deepseek_v3, nemotron_h
from megatron_agentrl.layout.boxes import Box, DtypeRule, LayoutError, ParameterLayout
from megatron_agentrl.layout.config import Config, size
from megatron_agentrl.layout.entries import Entry, Source, replicated, vocabulary

ARCHITECTURES: dict[str, ModuleType] = {
    "deepseek_v3": deepseek_v3,
    "nemotron_h": nemotron_h,
    "qwen3_moe": decoder,
    "qwen3": decoder,
    "llama": decoder,
}

#: The padded vocabulary is a multiple of this times the tensor-parallel size.
VOCABULARY_DIVISOR = 64


@dataclass(frozen=True, slots=True)
class Variant:
    """What the build of the megatron-core model decides, not the checkpoint.

    grouped_experts  Transformer Engine's grouped linear (`experts.linear_fc1.weight3`) instead of one module
                     per expert (`experts.local_experts.3.linear_fc1.weight`)
    vocab_divisor    the vocabulary is padded to a multiple of this times TP
    whole_latents    MLA's down projections are held whole (Transformer Engine), not cut into rows (local layers)
    heads            the model has its multi-token-prediction heads (on the last stage, after the decoder)
    """

    grouped_experts: bool = False
    vocab_divisor: int = VOCABULARY_DIVISOR
    whole_latents: bool = False
    heads: bool = False


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands. `chunks` are the [first, stop) global layers of its model chunks, in the order
    of the virtual pipeline stages; None means all layers in one chunk (pp = 1)."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    chunks: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class Grid:
    """A whole topology, in megatron-core's default rank order (tp fastest, then cp, dp, pp; experts: etp, ep,
    expert-dp, pp). `stages` are the [first, stop) layers of all pp * vpp pipeline stages in model order;
    stage s lives on pipeline rank s mod pp as chunk s div pp."""

    world: int
    stages: tuple[tuple[int, int], ...]
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for product, what in (
            (self.tp * self.cp * self.pp, f"tp*cp*pp = {self.tp}*{self.cp}*{self.pp}"),
            (self.etp * self.ep * self.pp, f"etp*ep*pp = {self.etp}*{self.ep}*{self.pp}"),
        ):
            if self.world % product:
                raise LayoutError(f"{what} = {product} does not divide the {self.world} trainer processes")
        if not self.stages or len(self.stages) % self.pp:
            raise LayoutError(f"{len(self.stages)} pipeline stages cannot be dealt to pp = {self.pp} ranks evenly")

    def coordinates(self, rank: int) -> Coordinates:
        per_stage = self.world // self.pp
        pp_rank, inner = divmod(rank, per_stage)
        return Coordinates(
            tp=self.tp,
            tp_rank=inner % self.tp,
            pp=self.pp,
            pp_rank=pp_rank,
            ep=self.ep,
            ep_rank=inner // self.etp % self.ep,
            etp=self.etp,
            etp_rank=inner % self.etp,
            chunks=self.stages[pp_rank :: self.pp],
        )

    def dense_ranks(self, pp_rank: int, tp_rank: int | None) -> range:
        """Global ranks with this pipeline rank and this tensor-parallel rank (None: any)."""
        per_stage = self.world // self.pp
        base = pp_rank * per_stage
        return range(base, base + per_stage) if tp_rank is None else range(base + tp_rank, base + per_stage, self.tp)

    def expert_ranks(self, pp_rank: int, ep_rank: int, etp_rank: int) -> range:
        """Global ranks that hold the experts of `ep_rank`, part `etp_rank`, on this pipeline rank."""
        per_stage = self.world // self.pp
        base = pp_rank * per_stage
        return range(base + ep_rank * self.etp + etp_rank, base + per_stage, self.ep * self.etp)


@dataclass(frozen=True, slots=True)
class Holding:
    """One part of a tensor: each of `ranks` (ascending) has all of `boxes` in parameter `name` of model `chunk`."""

    ranks: Sequence[int]
    chunk: int
    name: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Holders:
    """A checkpoint tensor and who holds it; the holdings together cover it exactly once."""

    tensor: Source
    dtype_rule: DtypeRule
    holdings: tuple[Holding, ...]


def architecture(config: Config) -> ModuleType:
    """The table of `model_type`. Raises LayoutError for a type without one."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise LayoutError(f"model_type {kind!r} has no layout; known are {sorted(ARCHITECTURES)}")
    return ARCHITECTURES[kind]


def layer_pattern(config: Config) -> str:
    """One letter per layer of the hybrid model: M Mamba-2, * attention, + latent attention, E mixture of experts, - MLP."""
    return architecture(config).pattern(config)


def heads_pattern(config: Config) -> tuple[str, int]:
    """(letters of the layers inside one multi-token-prediction head, number of heads); ("", 0) without any."""
    count = config.get("num_nextn_predict_layers") or 0
    table = architecture(config)
    return (table.heads_pattern(config), count) if count and hasattr(table, "heads_pattern") else ("", 0)


def heads_names(config: Config) -> tuple[str, ...]:
    """Regular expressions of the disk names that belong to multi-token-prediction heads, for a table that needs
    the config to say so."""
    table = architecture(config)
    return (table.heads_names(config),) if hasattr(table, "heads_names") else ()


def copies(config: Config) -> dict[str, str]:
    """Tensors that a checkpoint may hold a second time: other disk name -> the name of what it repeats."""
    table = architecture(config)
    return table.copies(config) if hasattr(table, "copies") else {}


def padded_vocabulary(vocab: int, tp: int, divisor: int = VOCABULARY_DIVISOR) -> int:
    """Rows of the embedding over all TP ranks: the next multiple of divisor * tp."""
    step = divisor * tp
    return -(-vocab // step) * step


def split_layers(
    layers: int, stages: int, first: int | None = None, last: int | None = None
) -> tuple[tuple[int, int], ...]:
    """[first, stop) layers of each of `stages` pipeline stages (pp * vpp of them), covering every layer once.

    `first` and `last` fix the outer stages. The others share the rest as evenly as it goes; where it does
    not divide, the earlier of them take one layer more. Raises LayoutError where a stage would stay empty.
    """
    sizes: list[int | None] = [None] * stages
    if first is not None:
        sizes[0] = first
    if last is not None:
        if stages == 1 and first not in (None, last):
            raise LayoutError(f"one stage cannot hold first={first} and last={last} layers")
        sizes[-1] = last
    free = [index for index, size in enumerate(sizes) if size is None]
    rest = layers - sum(size for size in sizes if size is not None)
    for position, index in enumerate(free):
        sizes[index] = rest // len(free) + (position < rest % len(free))
    fixed = [size or 0 for size in sizes]
    if sum(fixed) != layers or min(fixed) < 1:
        raise LayoutError(
            f"{layers} layers cannot be split into {stages} stages of {fixed} layers"
            f" (first={first}, last={last}): every layer once and at least one each"
        )
    starts = [sum(fixed[:index]) for index in range(stages)]
    return tuple((start, start + size) for start, size in zip(starts, fixed, strict=True))


def hf_tensors(config: Config, heads: bool = False) -> dict[str, tuple[int, ...]]:
    """Disk name and shape of every tensor of the checkpoint, in the order in which they are exported; with `heads`
    those of the multi-token-prediction heads too."""
    return {source.name: source.shape for entry in _entries(config, heads) for source in entry.sources}


def fp32_tensors(config: Config, heads: bool = False) -> set[str]:
    """Disk names of the tensors that stay fp32 whatever the run's type (router bias, A_log, D, dt_bias)."""
    return {source.name for entry in _entries(config, heads) if entry.fp32 for source in entry.sources}


def parameter_layouts(config: Config, at: Coordinates, variant: Variant = Variant()) -> list[ParameterLayout]:  # noqa: B008
    """Layouts of every parameter and persistent buffer of the rank at `at`. Raises LayoutError, naming the
    config's key and the parallel size, where the model cannot be cut that way."""
    check_divisibility(config, at)
    found: list[ParameterLayout] = []
    pattern = layer_pattern(config)
    chunks = at.chunks if at.chunks is not None else ((0, len(pattern)),)
    for chunk, (start, stop) in enumerate(chunks):
        is_first = at.pp_rank == 0 and chunk == 0
        is_last = at.pp_rank == at.pp - 1 and chunk == len(chunks) - 1
        if is_first:
            found.append(_layout(_embedding(config, at.tp, variant), at, chunk, "", variant))
        named = [(_decoder(index - start), entry) for index in range(start, stop) for entry in _layer(config, index)]
        heads = _heads(config) if is_last and variant.heads else []
        for prefix, entry in named + heads:
            if entry.expert is None or entry.expert // _experts_per_rank(config, at.ep) == at.ep_rank:
                found.append(_layout(entry, at, chunk, prefix, variant, config))
        if is_last:
            found.append(_layout(_final_norm(config), at, chunk, "", variant))
            if not (is_first and _tied(config)):  # megatron-core then uses the embedding's own parameter
                found.append(_layout(_head(config, at.tp, variant), at, chunk, "", variant))
            if heads and not is_first:  # they read embeddings where they stand: a copy of the first stage's
                found.append(_layout(_embedding(config, at.tp, variant), at, chunk, "", variant))
    return found


def holders(config: Config, grid: Grid, variant: Variant = Variant()) -> Iterator[Holders]:  # noqa: B008
    """Every checkpoint tensor with all of its holders, in the order of `hf_tensors`."""
    check_divisibility(config, grid.coordinates(0))
    last_stage = len(grid.stages) - 1
    ends = _embedding(config, grid.tp, variant), _final_norm(config), _head(config, grid.tp, variant)
    yield from _holders_of(ends[0], grid, 0, "", variant, config)
    for stage, (start, stop) in enumerate(grid.stages):
        for index in range(start, stop):
            for entry in _layer(config, index):
                yield from _holders_of(entry, grid, stage, _decoder(index - start), variant, config)
    for entry in ends[1:]:
        if not entry.shares:
            yield from _holders_of(entry, grid, last_stage, "", variant, config)
    for prefix, entry in _heads(config) if variant.heads else []:
        yield from _holders_of(entry, grid, last_stage, prefix, variant, config)


def check_divisibility(config: Config, at: Coordinates) -> None:
    """Refuse, before any weight is read, a model that megatron-core cannot cut at these sizes."""
    pattern = layer_pattern(config)
    facts: list[tuple[str, int, str, int]] = []
    if "*" in pattern:
        heads = size(config, "num_attention_heads")
        groups = size(config, "num_key_value_heads", "num_attention_heads")
        if heads % groups:
            raise LayoutError(
                f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}; correct config.json"
            )
        facts.append(("num_attention_heads", heads, "TP", at.tp))
        if groups % at.tp and at.tp % groups:
            raise LayoutError(
                f"num_key_value_heads={groups} and TP {at.tp}: neither divides the other; use a TP that divides or is a multiple of {groups}"
            )
    if "+" in pattern:
        facts.append(("num_attention_heads", size(config, "num_attention_heads"), "TP", at.tp))
    if "M" in pattern:
        facts.append(("mamba_num_heads", size(config, "mamba_num_heads"), "TP", at.tp))
        facts.append(("n_groups", size(config, "n_groups", "mamba_n_groups"), "TP", at.tp))
    if "E" in pattern:
        facts.append(("experts", _experts(config), "EP", at.ep))
        facts.append(("moe_intermediate_size", size(config, "moe_intermediate_size"), "expert TP", at.etp))
    for key, value, what, parts in facts:
        if value % parts:
            raise LayoutError(
                f"{key}={value} cannot be divided among {what} {parts}; use a {what} that divides {value}"
            )


def _tied(config: Config) -> bool:
    return bool(config.get("tie_word_embeddings"))


def _experts(config: Config) -> int:
    return size(config, "n_routed_experts", "num_experts", "num_local_experts")


def _experts_per_rank(config: Config, ep: int) -> int:
    return _experts(config) // ep


def _embedding(config: Config, tp: int, variant: Variant) -> Entry:
    source = architecture(config).embedding(config)
    padded = padded_vocabulary(source.shape[0], tp, variant.vocab_divisor)
    return vocabulary("embedding.word_embeddings.weight", source, padded)


def _head(config: Config, tp: int, variant: Variant) -> Entry:
    """The output layer; tied, it is a second copy of the embedding (loaded there, exported once)."""
    table = architecture(config)
    source = table.embedding(config) if _tied(config) else table.head(config)
    padded = padded_vocabulary(source.shape[0], tp, variant.vocab_divisor)
    return vocabulary("output_layer.weight", source, padded, shares=_tied(config))


def _final_norm(config: Config) -> Entry:
    return replicated("decoder.final_norm.weight", architecture(config).final_norm(config))


def _layer(config: Config, index: int) -> list[Entry]:
    return architecture(config).layer(config, index)


def _decoder(local_layer: int) -> str:
    return f"decoder.layers.{local_layer}."


def _heads(config: Config) -> list[tuple[str, Entry]]:
    """(prefix of the parameter's name, entry) of everything in the multi-token-prediction heads."""
    heads = architecture(config).heads(config) if heads_pattern(config)[1] else []
    return [pair for depth, head in enumerate(heads) for pair in head.prefixed(depth)]


def _entries(config: Config, heads: bool = False) -> Iterator[Entry]:
    variant = Variant()
    yield _embedding(config, 1, variant)
    for index in range(len(layer_pattern(config))):
        yield from _layer(config, index)
    yield _final_norm(config)
    if not _tied(config):
        yield _head(config, 1, variant)
    if heads:
        yield from (entry for _, entry in _heads(config))


def _name(entry: Entry, prefix: str, local_expert: int | None, variant: Variant) -> str:
    name = entry.name
    if local_expert is not None and variant.grouped_experts:
        name = f"mlp.experts.{entry.name}{local_expert}"
    elif local_expert is not None:
        name = f"mlp.experts.local_experts.{local_expert}.{entry.name}"
    return prefix + name


def _built(entry: Entry, variant: Variant) -> Entry:
    """The entry as the build cuts it."""
    return replace(entry, split="none") if entry.latent and variant.whole_latents else entry


def _layout(
    entry: Entry, at: Coordinates, chunk: int, prefix: str, variant: Variant, config: Config | None = None
) -> ParameterLayout:
    entry = _built(entry, variant)
    expert = None
    if entry.expert is not None and config is not None:
        expert = entry.expert % _experts_per_rank(config, at.ep)
    size, rank = (at.etp, at.etp_rank) if entry.group == "etp" else (at.tp, at.tp_rank)
    shape, boxes, padding = entry.cut(size, rank)
    rule = DtypeRule.fp32 if entry.fp32 else DtypeRule.compute
    return ParameterLayout(_name(entry, prefix, expert, variant), shape, boxes, padding, rule, chunk=chunk)


def _holders_of(
    entry: Entry, grid: Grid, stage: int, prefix: str, variant: Variant, config: Config
) -> Iterator[Holders]:
    entry = _built(entry, variant)
    chunk, pp_rank = divmod(stage, grid.pp)
    size = grid.etp if entry.group == "etp" else grid.tp
    parts: list[tuple[Sequence[int], ParameterLayout]] = []
    for part in range(size if entry.split != "none" else 1):
        at = replace(grid.coordinates(0), tp_rank=part % grid.tp, etp_rank=part % grid.etp)
        ranks: Sequence[int]
        if entry.expert is not None:
            ep_rank = entry.expert // _experts_per_rank(config, grid.ep)
            ranks = grid.expert_ranks(pp_rank, ep_rank, part)
        else:
            ranks = grid.dense_ranks(pp_rank, None if entry.split == "none" else part)
        parts.append((ranks, _layout(entry, at, chunk, prefix, variant, config)))
    for source in entry.sources:
        holdings = []
        for ranks, layout in parts:
            boxes = tuple(box for box in layout.boxes if box.tensor == source.name)
            if boxes:
                holdings.append(Holding(ranks, chunk, layout.name, boxes))
        yield Holders(source, DtypeRule.fp32 if entry.fp32 else DtypeRule.compute, tuple(holdings))
