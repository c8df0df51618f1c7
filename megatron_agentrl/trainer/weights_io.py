"""Hugging Face folders in and out of the trainer's shards, by layout.

`load_hf` reads into a rank just the slices that it holds; `iterate_hf` gives the checkpoint's tensors back one
at a time, in one order on every rank, each whole on global rank 0; `save_hf` writes such a stream to a folder
that appears complete or not at all. What goes where is `layout`'s business; there is no model code here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_agentrl.layout.boxes import Box, DtypeRule, ParameterLayout, check_tiling, matrix_shape
from megatron_agentrl.layout.megatron import (
    Coordinates,
    Grid,
    Holding,
    Variant,
    architecture,
    copies,
    fp32_tensors,
    heads_names,
    hf_tensors,
    holders,
    layer_pattern,
    parameter_layouts,
    split_layers,
)
from megatron_agentrl.recipe.weight_files import INDEX, SINGLE, WeightsError
from megatron_agentrl.trainer.hf_folder import Checkpoint, write_folder
from megatron_agentrl.trainer.hf_headers import differences, left_aside, some

if TYPE_CHECKING:  # it brings megatron-core, which files and layouts do without
    from megatron_agentrl.trainer.topology import Rank

log = logging.getLogger(__name__)


def grid_of(hf_config: Mapping[str, Any], rank: Rank) -> Grid:
    """The whole topology that `rank` belongs to, with the model's layers dealt to its pipeline stages."""
    layers, stage_count = len(layer_pattern(hf_config)), rank.pp_size * rank.vpp_size
    stages = split_layers(layers, stage_count, rank.first_stage_layers, rank.last_stage_layers)
    return Grid(
        world=rank.world,
        stages=stages,
        tp=rank.tp_size,
        cp=rank.cp_size,
        pp=rank.pp_size,
        ep=rank.ep_size,
        etp=rank.etp_size,
    )


def coordinates_of(hf_config: Mapping[str, Any], rank: Rank) -> Coordinates:
    """Where `rank` stands, as the layouts see it. Raises WeightsError where the rank's own coordinates are
    not the ones of megatron-core's default order (then no holder could be found)."""
    at = grid_of(hf_config, rank).coordinates(rank.rank)
    found, expected = (rank.tp, rank.pp, rank.ep, rank.etp), (at.tp_rank, at.pp_rank, at.ep_rank, at.etp_rank)
    if found != expected:
        raise WeightsError(
            f"rank {rank.rank} of {rank.world} has (tp, pp, ep, etp) = {found}, "
            f"megatron-core's default order gives {expected}; build the groups in the order tp-cp-ep-dp-pp"
        )
    return at


def _variant_of(model: Sequence[torch.nn.Module]) -> Variant:
    """How the model was built. What concerns parameters of other stages too is what `trainer.model` noted on the chunk."""
    names = (name for chunk in model for name, _ in unwrap(chunk).named_parameters())
    chunk = unwrap(model[0])
    return Variant(
        grouped_experts=any(re.search(r"\.experts\.linear_fc\d\.weight\d+$", name) for name in names),
        whole_latents=getattr(chunk, "whole_latents", False),
        heads=bool(getattr(getattr(chunk, "config", None), "mtp_num_layers", None)),
    )


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside megatron-core's wrappers (Float16Module, DistributedDataParallel), which hold it as `module`."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def _held(model: Sequence[torch.nn.Module]) -> dict[tuple[int, str], torch.Tensor]:
    """(chunk, name) -> parameter or persistent buffer, in place. Shared storage appears once."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for index, wrapped in enumerate(model):
        chunk = unwrap(wrapped)
        for name, parameter in chunk.named_parameters():
            found[index, name] = parameter.data
        persistent = set(chunk.state_dict(keep_vars=True))
        for name, buffer in chunk.named_buffers():
            if name in persistent and not name.endswith("_extra_state"):
                found[index, name] = buffer
    return found


def _matched(
    model: Sequence[torch.nn.Module], layouts: Sequence[ParameterLayout]
) -> list[tuple[ParameterLayout, torch.Tensor]]:
    """Each layout with the model's tensor. Raises WeightsError listing what has no partner or another shape."""
    held = _held(model)
    expected = {(layout.chunk, layout.name): layout for layout in layouts}
    for layout in layouts:
        check_tiling(layout)  # each element filled exactly once
    problems = [
        f"parameter {name} (chunk {chunk}) has no layout" for chunk, name in held if (chunk, name) not in expected
    ]
    for (chunk, name), layout in expected.items():
        if (chunk, name) not in held:
            problems.append(f"the model has no parameter {name} (chunk {chunk})")
        elif tuple(held[chunk, name].shape) != layout.shape:
            problems.append(f"parameter {name} has shape {tuple(held[chunk, name].shape)}, its layout {layout.shape}")
    if problems:
        raise WeightsError(f"model and layout disagree: {some(problems)}")
    return [(layout, held[key]) for key, layout in expected.items()]


def placed(
    model: Sequence[torch.nn.Module], hf_config: Mapping[str, Any], rank: Rank
) -> list[tuple[ParameterLayout, torch.Tensor]]:
    """Every parameter and persistent buffer of this rank's model chunks, each with its layout.

    Raises:
        WeightsError: the model does not have the parameters that its config and coordinates imply.
    """
    return _matched(model, parameter_layouts(hf_config, coordinates_of(hf_config, rank), _variant_of(model)))


@torch.no_grad()
def load_hf(model: Sequence[torch.nn.Module], hf_config: Mapping[str, Any], folder: Path | str, rank: Rank) -> None:
    """Fill every parameter and persistent buffer of this rank's model chunks from the folder's safetensors.

    Only the rows and columns that the rank holds are read. Padding becomes zero. Everything is checked before
    the first byte is copied, so a failed load leaves the model as it was.

    Args:
        model: this rank's chunks, bare or in megatron-core's wrappers.
        hf_config: the folder's config.json.
        folder: safetensors with or without an index.
        rank: this process's coordinates.

    Raises:
        WeightsError: tensors that are missing, unexpected, held twice or misshapen (both shapes are named), a
            broken or missing file, an index that points outside the folder, or a model that does not have the
            parameters that its config and coordinates imply.
        LayoutError: the model cannot be cut at these parallel sizes.
    """
    variant = _variant_of(model)
    layouts = parameter_layouts(hf_config, coordinates_of(hf_config, rank), variant)
    pairs = _matched(model, layouts)
    table = architecture(hf_config)
    with Checkpoint(Path(folder), dict(table.ALIASES)) as checkpoint:
        _check_checkpoint(checkpoint, hf_config, layouts, variant.heads)
        lowered: list[str] = []
        for layout, parameter in pairs:
            if layout.dtype_rule is DtypeRule.fp32 and parameter.dtype != torch.float32:
                lowered.append(layout.name)
            fill(parameter, layout, checkpoint)
        if lowered:
            log.warning(
                "%d tensors that should stay float32 are rounded by the model, e.g. %s", len(lowered), lowered[0]
            )


def fill(parameter: torch.Tensor, layout: ParameterLayout, checkpoint: Checkpoint) -> None:
    """Write all of `parameter` from the boxes of `layout`; rows and columns of no box become zero."""
    matrix = parameter.view(matrix_shape(layout.shape))
    for box in layout.boxes:
        part = checkpoint.read(box.tensor, box.r0, box.r1, box.c0, box.c1)
        matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(part)
    for pad in layout.padding:
        matrix[pad.row : pad.row + pad.rows, pad.col : pad.col + pad.cols].zero_()


def _check_checkpoint(
    checkpoint: Checkpoint, hf_config: Mapping[str, Any], layouts: Sequence[ParameterLayout], heads: bool
) -> None:
    """The folder holds each expected tensor in its shape and nothing unknown; a tied head agrees with the embedding."""
    shapes = checkpoint.shapes()
    if problems := differences(hf_config, shapes, heads):
        raise WeightsError(
            f"{checkpoint.folder}: the weights are not the model of config.json: {some(problems)}; "
            "put the two files of one model there"
        )
    if left := left_aside(hf_config, shapes, heads):
        log.info("%s: %d tensors without a parameter are left aside, e.g. %s", checkpoint.folder, len(left), left[0])
    if "lm_head.weight" in left:
        _check_tied(checkpoint, layouts)


def _check_tied(checkpoint: Checkpoint, layouts: Sequence[ParameterLayout]) -> None:
    """Of the rows that this rank holds."""
    for layout in layouts:
        for box in layout.boxes if layout.name == "embedding.word_embeddings.weight" else ():
            if not checkpoint.read(box.tensor, box.r0, box.r1, box.c0, box.c1).equal(
                checkpoint.read("lm_head.weight", box.r0, box.r1, box.c0, box.c1)
            ):
                raise WeightsError(
                    f"{checkpoint.folder}: config.json has tie_word_embeddings=true, but lm_head.weight differs from "
                    f"{box.tensor} in rows {box.r0} to {box.r1 - 1}; set tie_word_embeddings to false there"
                )


@torch.no_grad()
def iterate_hf(
    model: Sequence[torch.nn.Module],
    hf_config: Mapping[str, Any],
    rank: Rank,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    heads: bool = True,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """The checkpoint's tensors under their disk names, one at a time, in one fixed order on every rank.

    Every rank has to run the whole iteration. Global rank 0 gets the tensor, whole, on the CPU; the others
    get None. Parts travel point to point from one holder each (rank 0 itself wherever it is one), so no
    rank ever holds more than one whole tensor beside its shards.

    Args:
        model: this rank's chunks, bare or wrapped; read in place.
        dtype: type of the result; tensors whose layout says fp32 stay float32.
        group: process group of all ranks to send through; None is the default group. Use one of its own for
            a thread that runs beside the training step.
        heads: False leaves out the multi-token-prediction heads of a model that trains them, as an engine without
            speculative decoding expects.

    Raises:
        WeightsError: the model does not have the parameters that its config and coordinates imply.
    """
    variant = _variant_of(model)
    _matched(model, parameter_layouts(hf_config, coordinates_of(hf_config, rank), variant))
    held = _held(model)
    variant = replace(variant, heads=variant.heads and heads)
    for found in holders(hf_config, grid_of(hf_config, rank), variant):
        kind = torch.float32 if found.dtype_rule is DtypeRule.fp32 else dtype
        whole = torch.empty(matrix_shape(found.tensor.shape), dtype=kind) if rank.rank == 0 else None
        for holding in found.holdings:
            owner = 0 if 0 in holding.ranks else holding.ranks[0]
            if rank.rank == owner:
                parts = [_part(held[holding.chunk, holding.name], box, kind) for box in holding.boxes]
                if whole is None:
                    dist.send(torch.cat([part.flatten() for part in parts]), dst=0, group=group)
                    continue
            elif whole is not None:
                parts = _receive(holding, owner, kind, held, group)
            if whole is not None:
                for box, part in zip(holding.boxes, parts, strict=True):
                    whole[box.r0 : box.r1, box.c0 : box.c1].copy_(part)
        yield found.tensor.name, None if whole is None else whole.view(found.tensor.shape)


def _part(parameter: torch.Tensor, box: Box, kind: torch.dtype) -> torch.Tensor:
    matrix = parameter.view(matrix_shape(parameter.shape))
    return matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].to(kind)


def _receive(
    holding: Holding, owner: int, kind: torch.dtype, held: Mapping[Any, torch.Tensor], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    device = next(iter(held.values())).device  # NCCL receives into device memory
    wire = torch.empty(sum(box.size for box in holding.boxes), dtype=kind, device=device)
    dist.recv(wire, src=owner, group=group)
    pieces = wire.split([box.size for box in holding.boxes])
    return [piece.view(box.rows, box.cols) for piece, box in zip(pieces, holding.boxes, strict=True)]


def read_config(folder: Path | str) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises WeightsError where there is none, or no JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise WeightsError(f"{path} is missing; model.path must be a Hugging Face folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON ({error}); save the model's config again") from error
    if not isinstance(config, dict):
        raise WeightsError(f"{path}: found a {type(config).__name__}, expected a JSON object")
    return config


def save_hf(
    folder: Path | str,
    source_folder: Path | str,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    shard_bytes: int = 5 * 10**9,
) -> bool:
    """Write a Hugging Face folder from what `iterate_hf` yields. Every rank calls it; the one with tensors writes.

    Safetensors in shards of at most `shard_bytes` (a larger tensor is a shard of its own), their index,
    config.json with the type that was written, and the source folder's tokenizer, chat template and generation
    config. Tensors that the trainer does not hold but the architecture carries over (`mtp.*`) are copied from
    the source folder. The folder appears complete or not at all.

    Returns:
        True on the rank that wrote.

    Raises:
        WeightsError: a tensor came twice, or the config's tensors were not all there.
    """
    source = Path(source_folder)
    config = read_config(source)
    expected = set(hf_tensors(config))
    fp32 = fp32_tensors(config, heads=True)
    doubled = _doubled(source, config)
    kinds: set[torch.dtype] = set()

    def checked() -> Iterator[tuple[str, torch.Tensor | None]]:
        missing, given, writes = set(expected), set[str](), False
        for name, tensor in tensors:
            missing.discard(name)
            given.add(name)
            if tensor is not None:
                writes = True
                tensor = tensor.float() if name in fp32 else tensor
                if name not in fp32:
                    kinds.add(tensor.dtype)
            yield name, tensor
            for copy in doubled.get(name, ()):
                given.add(copy)
                yield copy, None if tensor is None else tensor.clone()
        if missing:
            raise WeightsError(f"{folder}: {len(missing)} tensors were not given, e.g. {min(missing)}")
        if writes:
            yield from _carried(source, config, given)

    def changes() -> dict[str, Any]:
        if len(kinds) != 1:
            return {}
        name = str(next(iter(kinds))).removeprefix("torch.")
        return {key: name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": name}

    return write_folder(Path(folder), source, checked(), shard_bytes, changes)


def _has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def _doubled(source: Path, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensor -> the other names under which the source folder repeats it; an export keeps them equal."""
    found: dict[str, list[str]] = {}
    if copies(config) and _has_weights(source):
        with Checkpoint(source, dict(architecture(config).ALIASES)) as checkpoint:
            for copy in copies(config).keys() & checkpoint.shapes().keys():
                found.setdefault(copies(config)[copy], []).append(copy)
    return found


def _carried(source: Path, config: Mapping[str, Any], given: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the source folder that are no parameter here but belong in an export."""
    table = architecture(config)
    rules = [*table.CARRIED, *heads_names(config)]
    if not rules or not _has_weights(source):
        return
    with Checkpoint(source, dict(table.ALIASES)) as checkpoint:
        for name in checkpoint.shapes():
            if name not in given and any(re.fullmatch(rule, name) for rule in rules):
                yield name, checkpoint.tensor(name)
