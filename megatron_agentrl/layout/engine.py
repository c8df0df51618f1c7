"""Which rows and columns of which checkpoint tensor each vLLM rank holds, under vLLM's parameter names.

The parameters are those that vLLM's weight loaders fill, before any kernel repacks them (`w13_weight`, `w2_weight` and
MLA's absorbed projections are rewritten after loading: write here, then let vLLM process). What an architecture is
made of comes from the same entries as the trainer's layouts; this module says what vLLM does with them: projections
of one input are one parameter, KV heads are copied where TP exceeds them, MLA's down projections are whole on each rank,
experts are stacked. Quantised engines, EPLB, decode context parallelism and prediction heads have no layout here.

Traced from vLLM 0.32.0's own weight loaders on every rank of many topologies (tests/layout/test_engine_trace.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_agentrl.layout.boxes import Box, DtypeRule, LayoutError, Padding, ParameterLayout, matrix_shape
from megatron_agentrl.layout.config import Config, size
from megatron_agentrl.layout.entries import EngineTable, Entry, replicated, vocabulary
from megatron_agentrl.layout.registry import architecture, layer_pattern

#: vLLM pads the vocabulary to a multiple of this, whatever the tensor-parallel size.
VOCABULARY_MULTIPLE = 64
#: Projections on disk -> the one parameter that holds them, in this order.
FUSED = {("q_proj", "k_proj", "v_proj"): "qkv_proj", ("gate_proj", "up_proj"): "gate_up_proj"}
#: MLA's down projections of queries and of keys and values: one parameter where a layer has both.
DOWN_PROJECTIONS = {"q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj"}
#: Routed experts: their part of a disk name; what is cut by rows goes to w13, what is cut by columns to w2.
_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
_SHARED = ".shared_experts."


@dataclass(frozen=True, slots=True)
class EngineTopology:
    """One engine (a data-parallel deployment of vLLM), in vLLM's rank order: tp fastest, then pp, then dp.

    tp, pp, dp        sizes
    expert_parallel   vLLM's --enable-expert-parallel: whole experts are dealt to tp * dp ranks; without it each expert
                      is cut into tp * dp parts
    layers            layers of each pipeline stage (VLLM_PP_LAYER_PARTITION); None is vLLM's own split
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    layers: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def expert_parts(self) -> tuple[int, int]:
        """(expert-parallel size, parts of each expert)."""
        return (self.tp * self.dp, 1) if self.expert_parallel else (1, self.tp * self.dp)

    @property
    def sequence_parallel_experts(self) -> bool:
        """Whether vLLM spreads tokens over TP inside a mixture; shared experts are then whole on each rank.

        True for the all-to-all backends that vLLM's `use_sequence_parallel_moe` lists, its default among them.
        """
        return self.expert_parallel and self.tp > 1 and self.dp > 1


@dataclass(frozen=True, slots=True)
class _At:
    """One rank's coordinates; `expert` is its place among the tp * dp ranks that share the experts of a stage."""

    tp: int
    pp: int
    expert: int


def engine_layouts(config: Config, topology: EngineTopology, rank: int) -> list[ParameterLayout]:
    """Layouts of every parameter of rank `rank` that vLLM loads from the checkpoint.

    Args:
        config: the model's config.json.
        rank: 0 to topology.world - 1.

    Raises:
        LayoutError: vLLM cannot cut the model at these sizes (the key and the size are named), or has no layout here.
    """
    if not 0 <= rank < topology.world:
        raise LayoutError(f"rank {rank} of an engine of {topology.world} ranks; use 0 to {topology.world - 1}")
    check_engine_divisibility(config, topology)
    table = engine_table(config)
    rest, tp_rank = divmod(rank, topology.tp)
    dp_rank, pp_rank = divmod(rest, topology.pp)
    at = _At(tp_rank, pp_rank, dp_rank * topology.tp + tp_rank)
    first, last = pp_rank == 0, pp_rank == topology.pp - 1
    tied = bool(config.get("tie_word_embeddings"))
    start, stop = engine_stages(config, topology)[pp_rank]

    found = []
    if first or table.ends_everywhere or (tied and last):
        found.append(_vocabulary(config, "embedding", topology, at, table))
    for index in range(start, stop):
        found += _layer(config, index, topology, at, table)
    if last or table.ends_everywhere:
        norm = replicated("final_norm", architecture(config).final_norm(config))
        found.append(_parameter(_name(norm, table), [norm], topology, at))
        if not tied:
            found.append(_vocabulary(config, "head", topology, at, table))
    return found


def engine_stages(config: Config, topology: EngineTopology) -> tuple[tuple[int, int], ...]:
    """[first, stop) of vLLM's layers on each pipeline stage. What does not divide goes one layer each to the stages
    before the last, from the back; with as many left over as there are stages but one, the first gets one too."""
    count, pp = len(layer_pattern(config)) // engine_table(config).layer, topology.pp
    if topology.layers is not None:
        sizes = list(topology.layers)
    else:
        sizes = [count // pp] * pp
        for offset in range(count % pp):
            sizes[-2 - offset] += 1
    if len(sizes) != pp or sum(sizes) != count or min(sizes) < 1:
        raise LayoutError(f"{count} layers cannot be split into PP {pp} stages of {sizes} layers")
    starts = [sum(sizes[:index]) for index in range(pp)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def engine_table(config: Config) -> EngineTable:
    """What the table of this model type says about vLLM. Raises LayoutError for a type without it."""
    tables: dict[str, EngineTable] = getattr(architecture(config), "ENGINES", {})
    kind = config["model_type"]
    if kind not in tables:
        raise LayoutError(f"model_type {kind!r} has no engine layout; add it to ENGINES of its table")
    return tables[kind]


def check_engine_divisibility(config: Config, topology: EngineTopology) -> None:
    """Refuse, before any weight is read, a model that vLLM cannot cut at these sizes."""
    pattern, tp = layer_pattern(config), topology.tp
    facts: list[tuple[str, int]] = []
    if "*" in pattern or "+" in pattern:
        facts.append(("num_attention_heads", size(config, "num_attention_heads")))
    if "M" in pattern:
        facts.append(("mamba_num_heads", size(config, "mamba_num_heads")))
        facts.append(("n_groups", size(config, "n_groups", "mamba_n_groups")))
    facts.append(("the padded vocabulary", _padded(size(config, "vocab_size"))))
    for key, value in facts:
        if value % tp:
            raise LayoutError(f"{key}={value} cannot be divided among TP {tp}; use a TP that divides {value}")
    if "*" in pattern:
        groups = size(config, "num_key_value_heads", "num_attention_heads")
        if groups % tp and tp % groups:
            raise LayoutError(
                f"num_key_value_heads={groups} and TP {tp}: neither divides the other; use a TP that divides or is a multiple of {groups}"
            )
    if "E" in pattern and topology.expert_parts[0] > (experts := _experts(config)):
        raise LayoutError(
            f"{experts} experts over tp * dp = {topology.expert_parts[0]} ranks leave ranks without one; use fewer ranks or no expert parallelism"
        )
    if config.get("tie_word_embeddings") and not engine_table(config).ties:
        raise LayoutError(
            f"tie_word_embeddings=true: vLLM's {engine_table(config).model} has a head of its own all the same, which nothing would fill; untie the checkpoint"
        )


def _layer(
    config: Config, index: int, topology: EngineTopology, at: _At, table: EngineTable
) -> Iterator[ParameterLayout]:
    """The parameters of vLLM's layer `index`: entries of the same name are stacked in the table's order."""
    letters = range(index * table.layer, (index + 1) * table.layer)
    entries = [entry for letter in letters for entry in architecture(config).layer(config, letter)]
    names = {part for entry in entries for part in _projections(entry)}
    joined = DOWN_PROJECTIONS if names.issuperset(DOWN_PROJECTIONS) else {}
    stacks: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.expert is None or entry.expert in _local_experts(config, topology, at):
            stacks.setdefault(_name(entry, table, joined), []).append(entry)
    for name, stack in stacks.items():
        yield _parameter(name, stack, topology, at)


def _parameter(name: str, stack: Sequence[Entry], topology: EngineTopology, at: _At) -> ParameterLayout:
    """One parameter from the entries that vLLM keeps in it, one below the other; experts along a dimension of their own."""
    boxes: list[Box] = []
    padding: list[Padding] = []
    row, trailing = 0, tuple[int, ...]()
    for entry in stack:
        shape, found, padded = _cut(entry, topology, at)
        boxes += [replace(box, row=row + box.row) for box in found]
        padding += [replace(pad, row=row + pad.row) for pad in padded]
        row, trailing = row + shape[0], shape[1:]
    entry = stack[0]
    fp32 = entry.fp32 if entry.engine_fp32 is None else entry.engine_fp32
    stacked = entry.expert is not None
    return ParameterLayout(
        name=name,
        shape=(len(stack), row // len(stack), *trailing) if stacked else (row, *trailing),
        boxes=tuple(boxes),
        padding=tuple(padding),
        dtype_rule=DtypeRule.fp32 if fp32 else DtypeRule.compute,
        element_rule=entry.engine_rule,
        row_dims=2 if stacked else 1,
    )


def _cut(
    entry: Entry, topology: EngineTopology, at: _At
) -> tuple[tuple[int, ...], tuple[Box, ...], tuple[Padding, ...]]:
    """Local shape, boxes and padding of the rank's part of one entry."""
    if entry.expert is not None:
        parts = topology.expert_parts[1]
        return entry.cut(parts, at.expert % parts)
    if entry.groups is not None:
        return _cut_heads(entry, entry.groups, topology.tp, at.tp)
    if entry.latent or (topology.sequence_parallel_experts and _SHARED in entry.sources[0].name):
        return replace(entry, split="none").cut(1, 0)
    return entry.cut(topology.tp, at.tp)


def _cut_heads(
    entry: Entry, groups: int, tp: int, rank: int
) -> tuple[tuple[int, ...], tuple[Box, ...], tuple[Padding, ...]]:
    """Fused QKV: the rank's q heads, k heads, v heads. Beyond as many ranks as KV heads, each head lies on several."""
    boxes, row = [], 0
    for source, parts in zip(entry.sources, (tp, min(tp, groups), min(tp, groups)), strict=True):
        total, cols = matrix_shape(source.shape)
        step, part = total // parts, rank * parts // tp
        boxes.append(Box(source.name, part * step, (part + 1) * step, 0, cols, row, 0))
        row += step
    return (row, *entry.sources[0].shape[1:]), tuple(boxes), ()


def _vocabulary(config: Config, end: str, topology: EngineTopology, at: _At, table: EngineTable) -> ParameterLayout:
    """The rank's rows of the embedding or the head, and padding at the end."""
    source = getattr(architecture(config), end)(config)
    entry = vocabulary(end, source, _padded(source.shape[0]))
    return _parameter(_name(entry, table), [entry], topology, at)


def _padded(rows: int) -> int:
    return -(-rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _projections(entry: Entry) -> tuple[str, ...]:
    """The modules that hold the entry's tensors on disk: q_proj, k_proj, v_proj."""
    return tuple(source.name.split(".")[-2] for source in entry.sources)


def _name(entry: Entry, table: EngineTable, joined: dict[str, str] = {}) -> str:  # noqa: B006 (not changed)
    """vLLM's name of the parameter that holds the entry."""
    name, parts = entry.sources[0].name, _projections(entry)
    if entry.expert is not None:
        weight = "w2_weight" if entry.split == "columns" else "w13_weight"
        name, count = _EXPERT.subn(f".experts.routed_experts.{weight}", name)
        if count != 1:
            raise LayoutError(
                f"{entry.sources[0].name}: an expert's tensor is expected to end in .experts.N.NAME.weight"
            )
    elif len(parts) > 1:
        if parts not in FUSED:
            raise LayoutError(f"{name}: vLLM's parameter for {' + '.join(parts)} is not known; add it to FUSED")
        name = name.replace(f".{parts[0]}.", f".{FUSED[parts]}.")
    elif parts[0] in joined:
        name = name.replace(f".{parts[0]}.", f".{joined[parts[0]]}.")
    for old, new in table.renamed:
        name = name.replace(old, new)
    return name


def _experts(config: Config) -> int:
    return size(config, "n_routed_experts", "num_experts", "num_local_experts")


def _local_experts(config: Config, topology: EngineTopology, at: _At) -> range:
    """Experts of the rank, in vLLM's linear placement: as even as it goes, one more on the first ranks."""
    parts, count = topology.expert_parts[0], _experts(config)
    rank = at.expert % parts
    start = rank * (count // parts) + min(rank, count % parts)
    return range(start, start + count // parts + (rank < count % parts))
