"""A distributed checkpoint as a Hugging Face folder: all that a server needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert import fp8, jobs
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.keys import Unit, source_rows
from megatron_agentrl.convert.megatron_source import MegatronSource
from megatron_agentrl.convert.origin import CARRIED, REPEATED, Origin
from megatron_agentrl.convert.safetensors_io import PIECE, Shards
from megatron_agentrl.layout.megatron import fp32_tensors
from megatron_agentrl.trainer.hf_folder import copy_side_files

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHARD_BYTES = 5 * 10**9

Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def megatron_to_hf(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    blockwise: bool = False,
    hf: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    workers: int = jobs.WORKERS,
    replace: bool = False,
    quiet: bool = False,
) -> None:
    """Write the Hugging Face folder `target` from the distributed checkpoint `source`.

    Args:
        dtype: type of the weights; None keeps what is stored. What must stay float32 does in any.
        blockwise: the linears that DeepSeek's convention names in FP8 (`convert.fp8`); the others in `dtype`.
        hf: the Hugging Face folder that the weights began as, where the checkpoint does not say.
        shard_bytes: largest file, unless one tensor is larger.

    Raises:
        ConvertError, WeightsError, LayoutError, OSError: `target` is then not there.
    """
    found = MegatronSource(source, hf)
    origin = found.origin
    tensors = plan(found, dtype, blockwise)
    total = sum(kind.itemsize * prod(shape) for kind, shape in tensors.values())
    jobs.check_space(target, total)
    again: dict[str, list[str]] = {}
    for name, original in origin.repeated.items():
        if name in tensors:
            again.setdefault(original, []).append(name)
    with jobs.target(target, replace) as folder, Shards(folder, tensors, shard_bytes) as shards:

        def write(name: str, rows: torch.Tensor, r0: int) -> None:
            kind = tensors[name][0]
            step = max(1, PIECE // max(1, rows.shape[1] * 4))
            for low in range(0, rows.shape[0], step):
                piece = _cast(name, rows[low : low + step], kind)
                for each in (name, *again.get(name, ())):
                    shards.write(each, piece, r0 + low)

        def convert(unit: Unit) -> None:
            quantised = [source.name for source in unit.sources if tensors[source.name][0] is torch.float8_e4m3fn]
            if quantised or found.cut_by_columns(unit):
                for name, whole in found.read(unit).items():
                    matrix = whole.reshape(whole.shape[0], -1)
                    if name in quantised:
                        codes, scales = fp8.quantise(matrix)
                        shards.write(name, codes)
                        shards.write(name + fp8.SUFFIX, scales)
                    else:
                        write(name, matrix, 0)
                return
            for part in unit.parts:
                for row, _, values in found.pieces(part):
                    for interval, at in source_rows(part, row, row + values.shape[0]):
                        if interval.tensor is not None:
                            write(interval.tensor, values[at - row : at - row + interval.rows], interval.start)

        def memory(unit: Unit) -> int:
            whole = 2 * unit.size * found.tensors[unit.parts[0].key].dtype.itemsize
            return found.largest_chunk(unit) + (whole if blockwise or found.cut_by_columns(unit) else 0)

        def nbytes(unit: Unit) -> int:
            return sum(tensors[source.name][0].itemsize * prod(source.shape) for source in unit.sources)

        jobs.run(found.units, convert, memory, nbytes, workers, "to hugging face", quiet)
        for name in origin.carried:
            origin.carry(name, write, tensors[name][0])
        _side_files(origin, folder, new_config(origin.config, tensors, blockwise, dtype is not None))


def plan(found: MegatronSource, dtype: torch.dtype | None, blockwise: bool) -> Tensors:
    """Type and shape of every tensor of the folder, in its order."""
    fp32 = fp32_tensors(found.config, True)
    tensors: Tensors = {}

    def add(name: str, stored: torch.dtype, shape: tuple[int, ...]) -> None:
        if name in fp32:
            tensors[name] = torch.float32, shape
        elif blockwise and fp8.is_quantised(name):
            tensors[name] = torch.float8_e4m3fn, shape
            tensors[name + fp8.SUFFIX] = torch.float32, fp8.scale_shape(shape)
        else:
            tensors[name] = dtype or stored, shape

    for unit in found.units:
        for source in unit.sources:
            add(source.name, found.dtype(source.name), source.shape)
    for name, stored in found.origin.carried.items():
        tensors[name] = (torch.float32 if name in fp32 else dtype or found.origin.dtype(name)), stored.shape
    for name, original in found.origin.repeated.items():
        if original in tensors:
            tensors[name] = tensors[original]
    return tensors


def _cast(name: str, rows: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """`rows` in `kind`, contiguous; rounds to nearest even. Refuses values that float16 does not reach."""
    cast = rows.to(kind).contiguous()
    if kind is torch.float16 and rows.dtype is not kind and not torch.equal(cast.isfinite(), rows.isfinite()):
        raise ConvertError(
            f"{name} has the value {float(rows[rows.isfinite()].abs().max()):.6g}, beyond float16's largest, 65504; use "
            "--dtype bfloat16 or float32"
        )
    return cast


def _side_files(origin: Origin, folder: Path, config: dict[str, Any]) -> None:
    """Tokenizer, chat template and the like byte for byte; config.json too, unless the weights' type changed."""
    copy_side_files(origin.folder, folder)
    for name in (REPEATED, CARRIED):
        (folder / name).unlink(missing_ok=True)
    if config != origin.config:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def new_config(config: Mapping[str, Any], tensors: Tensors, blockwise: bool, cast: bool) -> dict[str, Any]:
    """config.json of these weights: its type (added where there was none and a `cast` was asked for), and whether it is
    quantised; everything else as it is."""
    found = dict(config)
    found.pop("quantization_config", None)
    if blockwise:
        found["quantization_config"] = fp8.quantization_config(tensors)
    fp32 = fp32_tensors(config, True)
    kinds = {
        kind
        for name, (kind, _) in tensors.items()
        if name not in fp32 and kind is not torch.float8_e4m3fn and not name.endswith(fp8.SUFFIX)
    }
    if len(kinds) == 1:
        name = str(kinds.pop()).removeprefix("torch.")
        for key in [key for key in ("dtype", "torch_dtype") if key in config] or (["dtype"] if cast else []):
            found[key] = name
    return found
