"""The Hugging Face tensors that a distributed checkpoint holds, whatever topology wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert.dist_folder import DistReader
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.keys import VOCABULARY_KEYS, Part, Unit, key_shapes, matrix, source_rows, units
from megatron_agentrl.convert.origin import find_origin
from megatron_agentrl.layout.megatron import Grid, layer_pattern
from megatron_agentrl.trainer.hf_headers import some
from megatron_agentrl.trainer.torch_metadata import BESIDE, StoredChunk, StoredTensor

#: Rows of a part and columns that a loaded chunk fills: (first row of the part, values).
Piece = tuple[int, int, torch.Tensor]


class MegatronSource:
    """A complete distributed checkpoint with the model that it is of. Safe to read from several threads.

    The optimizer's state and random states in it are left alone.

    Raises:
        ConvertError, LayoutError, WeightsError: incomplete, damaged, or of another model than its origin says.
    """

    def __init__(self, folder: Path, hf: Path | None = None) -> None:
        self.folder = folder
        self.reader = DistReader(folder)
        self.tensors: dict[str, StoredTensor] = model_tensors(self.reader)
        self.heads = any(key.startswith("mtp.") for key in self.tensors)
        self.origin = find_origin(folder, hf, self.heads)
        self.config: Mapping[str, Any] = self.origin.config
        whole = Grid(1, ((0, len(layer_pattern(self.config))),))
        self.units = list(units(self.config, whole, self.heads))
        self._check()
        self._of = {source.name: unit for unit in self.units for source in unit.sources}

    def _check(self) -> None:
        expected = key_shapes(self.units)
        found = [f"it has no {key} {shape}" for key, shape in expected.items() if key not in self.tensors]
        for key, tensor in self.tensors.items():
            shape = expected.get(key)
            if shape is None:
                found.append(f"the model has no {key} {tensor.shape}")
            elif key in VOCABULARY_KEYS:
                real = self.config["vocab_size"]
                if tensor.shape[0] < real or tensor.shape[0] % 64 or tensor.shape[1:] != shape[1:]:
                    found.append(f"its {key} has shape {tensor.shape}, the model's {shape} before padding for TP")
            elif tensor.shape != shape:
                found.append(f"its {key} has shape {tensor.shape}, the model's {shape}")
        if found:
            raise ConvertError(
                f"{self.folder} is no checkpoint of the model in {self.origin.folder}: {some(found, 4)}; pass --hf with "
                "the Hugging Face folder that it was trained from"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Disk name -> shape of every tensor that is a parameter here."""
        return {source.name: source.shape for unit in self.units for source in unit.sources}

    def dtype(self, name: str) -> torch.dtype:
        """The type that the tensor is stored in."""
        return self.tensors[self._of[name].parts[0].key].dtype

    def pieces(self, part: Part) -> Iterator[Piece]:
        """The stored values of a part, chunk by chunk: (first row of the part, first column, values [rows, columns])."""
        tensor = self.tensors[part.key]
        for chunk in tensor.chunks:
            lead = 0 if part.expert is None else 1
            if part.expert is not None and not chunk.offsets[0] <= part.expert < chunk.offsets[0] + chunk.sizes[0]:
                continue
            first = chunk.offsets[lead]
            low, high = max(first, part.row), min(first + chunk.sizes[lead], part.row + part.rows)
            if low >= high:
                continue
            values = self.reader.load(part.key, chunk)
            if part.expert is not None:
                values = values[part.expert - chunk.offsets[0]]
            values = values.reshape(values.shape[0], -1)[low - first : high - first]
            yield low - part.row, _first_column(chunk, tensor, lead), values

    def largest_chunk(self, unit: Unit) -> int:
        """Bytes of the largest chunk that reading the unit loads."""
        return max(
            prod(chunk.sizes) * self.tensors[part.key].dtype.itemsize
            for part in unit.parts
            for chunk in self.tensors[part.key].chunks
        )

    def cut_by_columns(self, unit: Unit) -> bool:
        """Whether a chunk of the unit holds less than whole rows."""
        for part in unit.parts:
            tensor, lead = self.tensors[part.key], 0 if part.expert is None else 1
            if any(chunk.sizes[lead + 1 :] != tensor.shape[lead + 1 :] for chunk in tensor.chunks):
                return True
        return False

    def read(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Every source of a unit, whole, in the stored type."""
        found = {
            source.name: torch.empty(matrix(source), dtype=self.tensors[unit.parts[0].key].dtype)
            for source in unit.sources
        }
        for part in unit.parts:
            for row, col, values in self.pieces(part):
                for interval, at in source_rows(part, row, row + values.shape[0]):
                    if interval.tensor is not None:
                        rows = values[at - row : at - row + interval.rows]
                        found[interval.tensor][interval.start : interval.stop, col : col + values.shape[1]] = rows
        return {source.name: found[source.name].view(source.shape) for source in unit.sources}


def model_tensors(reader: DistReader) -> dict[str, StoredTensor]:
    """The weights of a checkpoint: neither the optimizer's state nor megatron-core's extra states."""
    return {
        key: tensor
        for key, tensor in reader.tensors.items()
        if not key.startswith(BESIDE) and not key.endswith("_extra_state")
    }


def _first_column(chunk: StoredChunk, tensor: StoredTensor, lead: int) -> int:
    """Where the chunk begins in a row of the tensor seen as a matrix; only tensors of two axes are cut there."""
    trailing = chunk.offsets[lead + 1 :]
    if any(trailing) and len(trailing) > 1:
        raise ConvertError(f"a chunk at {chunk.offsets} of a tensor {tensor.shape} is cut on an inner axis")
    return trailing[0] if trailing else 0
