"""Any rank of any world in this one process: its real megatron-core modules, without memory and without peers.

The rank's process groups are torch's fake ones and its parameters are placeholders (the meta device), so rank 3071
of 4096 of a 550B model is built on a laptop. What is reported is what megatron-core built, matched name by name and
shape by shape with the layout tables: a difference between the two is an error, not a line of the report. Nothing
is computed, communicated or read but config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_agentrl.layout.boxes import Box, DtypeRule, ParameterLayout
from megatron_agentrl.layout.megatron import Grid, architecture, hf_tensors, layer_pattern
from megatron_agentrl.recipe.schema import Recipe, Topology
from megatron_agentrl.trainer import model, topology
from megatron_agentrl.trainer.topology import Rank
from megatron_agentrl.trainer.weights_io import grid_of, placed

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.|linear_fc\d\.weight(\d+)$)")

#: torch's functions that make tensors, by name (they may be wrapped); each takes `device`.
_FACTORIES = frozenset(
    {"empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm"}
)


@dataclass(frozen=True)
class Held:
    """One parameter or persistent buffer of the rank.

    name      as megatron-core has it, inside its model chunk
    chunk     index of the model chunk (virtual pipeline stage on this rank)
    layer     the layer's index in the whole model; None for the embedding, the final norm and the head
    expert    the routed expert's index in the whole model; None for anything else
    shape     local shape
    dtype     type it has in training
    padding   elements that stand for no element of the checkpoint
    ranks     every rank that holds the same elements, in ascending order
    copy      True for a second copy of a tensor that another parameter already stands for (a tied head on a later
              pipeline stage, the embedding that prediction heads read there)
    sources   rows and columns of the checkpoint's tensors that it is made of
    """

    name: str
    chunk: int
    layer: int | None
    expert: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    padding: int
    ranks: Sequence[int]
    copy: bool
    sources: tuple[Box, ...]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Inspection:
    """One rank: its coordinates, the layers of its chunks ([first, stop) in the whole model) and what it holds."""

    rank: Rank
    pattern: str
    chunks: tuple[tuple[int, int], ...]
    held: tuple[Held, ...]
    checkpoint_elements: int

    @property
    def elements(self) -> int:
        return sum(held.elements for held in self.held)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.held)

    @property
    def own(self) -> int:
        """Elements of the checkpoint that are counted at this rank: each at the first of its holders. Over all ranks
        of the world they sum up to `checkpoint_elements`."""
        return sum(h.elements - h.padding for h in self.held if not h.copy and h.ranks[0] == self.rank.rank)


def inspect(hf: dict[str, Any], recipe: Recipe, rank: int) -> Inspection:
    """Build rank `rank` of the recipe's topology for the model of config.json `hf`, and say what it holds.

    No process group may exist; none is left behind. The caller has checked the topology (`recipe.validate`).

    Raises:
        ValueError: the model cannot be built at these sizes, or the rank is outside the world.
        WeightsError: megatron-core's parameters are not the ones that the layout tables know.
    """
    if not 0 <= rank < recipe.topology.world:
        raise ValueError(f"rank={rank}: expected 0 to {recipe.topology.world - 1} (topology.world - 1)")
    with simulated(rank, recipe.topology) as at, _placeholders():
        chunks = model.build(hf, recipe, replace(at, device="meta"))
        grid = grid_of(hf, at)
        spans = grid.coordinates(rank).chunks
        assert spans is not None  # a grid gives every rank its chunks
        built = [dict(chunk.named_parameters()) for chunk in chunks]
        held = tuple(
            _held(hf, grid, at, spans, layout, built[layout.chunk].get(layout.name, tensor))
            for layout, tensor in placed(chunks, hf, at)
        )
    whole = sum(torch.Size(shape).numel() for shape in hf_tensors(hf, heads=recipe.model.mtp.train).values())
    return Inspection(at, layer_pattern(hf), spans, held, whole)


@contextmanager
def simulated(rank: int, sizes: Topology) -> Iterator[Rank]:
    """This process as rank `rank` of a world that is not there: megatron-core's parallel state over fake groups.

    Groups of which the rank is no member are not made: a world of 4,096 has 20,000 of them.
    """
    if dist.is_initialized():
        raise ValueError("this process already has process groups; a rank is simulated in a process of its own")
    create = parallel_state.create_group

    def create_own(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return create(ranks, *args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes.world)
    try:
        parallel_state.create_group = create_own
        yield topology.make_groups(sizes, seed=0, create_gloo_process_groups=False)
    finally:
        parallel_state.create_group = create
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _placeholders(TorchFunctionMode):
    """While a model is built, every new tensor lies on the meta device, also where a device is asked for by name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") in _FACTORIES:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _held(
    hf: dict[str, Any],
    grid: Grid,
    at: Rank,
    spans: Sequence[tuple[int, int]],
    layout: ParameterLayout,
    tensor: torch.Tensor,
) -> Held:
    """What megatron-core built (`tensor`: shape, type, how it is cut) and what it stands for (`layout`)."""
    in_layer, in_expert = _LAYER.match(layout.name), _EXPERT.search(layout.name)
    cut = getattr(tensor, "tensor_model_parallel", False)
    expert = None
    if in_expert:
        expert = at.ep * (_experts(hf) // at.ep_size) + int(in_expert.group(1) or in_expert.group(2))
        ranks: Sequence[int] = grid.expert_ranks(at.pp, at.ep, at.etp)
    else:
        ranks = grid.dense_ranks(at.pp, at.tp if cut else None)
    table = {box.tensor for box in layout.boxes} == {architecture(hf).embedding(hf).name}
    return Held(
        name=layout.name,
        chunk=layout.chunk,
        layer=spans[layout.chunk][0] + int(in_layer.group(1)) if in_layer else None,
        expert=expert,
        shape=tuple(tensor.shape),
        # What stays float32 is made so when the model is wrapped for training (`trainer.optimizer`).
        dtype=torch.float32 if layout.dtype_rule is DtypeRule.fp32 else tensor.dtype,
        padding=sum(pad.rows * pad.cols for pad in layout.padding),
        ranks=ranks,
        copy=table and not (layout.name == "embedding.word_embeddings.weight" and at.pp == 0),
        sources=layout.boxes,
    )


def _experts(hf: dict[str, Any]) -> int:
    return next(hf[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if hf.get(key))
