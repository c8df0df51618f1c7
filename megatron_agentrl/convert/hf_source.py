"""The tensors of a Hugging Face folder as they are meant: under canonical names, FP8 blocks multiplied out.

Everything that can be wrong with a folder is found when it is opened, from headers alone: a missing, doubled,
misshapen or unknown tensor, a file cut short, an index that points elsewhere, weights that would have to be unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert import fp8
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.keys import Unit, matrix
from megatron_agentrl.convert.safetensors_io import PIECE, header, read_rows
from megatron_agentrl.layout.entries import Source
from megatron_agentrl.layout.megatron import architecture, copies, fp32_tensors, heads_names, heads_pattern, hf_tensors
from megatron_agentrl.recipe.weight_files import INDEX, SINGLE
from megatron_agentrl.trainer.hf_headers import differences, locate, some, without_scales
from megatron_agentrl.trainer.weights_io import read_config

_PICKLED = ("pytorch_model*.bin", "consolidated*.pth", "*.bin", "*.pth", "*.pt", "*.ckpt")
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class HfSource:
    """A folder with config.json and safetensors, checked. Safe to read from several threads.

    Raises:
        ConvertError, WeightsError, LayoutError: naming the tensor or file, both values, and one way out.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _refuse_pickles(folder)
        self.config = read_config(folder)
        table = architecture(self.config)
        aliases = dict(table.ALIASES)
        found = locate(folder, aliases)
        headers = {file: header(folder / file) for file in {place.file for place in found.values()}}
        places, scales = without_scales(folder, found)
        self.stored = {name: headers[place.file][place.name] for name, place in places.items()}
        self.scales = {name: headers[place.file][place.name] for name, place in scales.items()}
        self._check_types()
        self.heads = self._has_heads()
        shapes = {name: stored.shape for name, stored in self.stored.items()}
        if problems := differences(self.config, shapes, self.heads):
            raise ConvertError(
                f"{folder}: the weights are not the model of config.json: {some(problems)}; put the two files of one model "
                "there"
            )
        self._shapes = hf_tensors(self.config, self.heads)
        self._fp32 = fp32_tensors(self.config, self.heads)
        self._check_copies()

    def _check_types(self) -> None:
        """FP8 only in blocks of 128 x 128 with their scales, and no type that is no number of a model."""
        kind = fp8.block_scaled(self.config)
        if isinstance(kind, str):
            raise ConvertError(
                f"{self.folder}: config.json has quantization_config with {kind}; expected none, or fp8 with "
                "weight_block_size [128, 128]: use the model's unquantised checkpoint"
            )
        for name, stored in self.stored.items():
            if not stored.dtype.is_floating_point or stored.dtype is torch.float8_e5m2:
                raise ConvertError(
                    f"{self.folder}: {name} has the type {stored.dtype}, expected a floating type or float8 e4m3 with "
                    "block scales; use the model's unquantised checkpoint"
                )

    def _has_heads(self) -> bool:
        """Whether any tensor of the prediction heads is there (all are then asked for)."""
        if not heads_pattern(self.config)[1]:
            return False
        trunk, every = hf_tensors(self.config), hf_tensors(self.config, True)
        return any(name in self.stored for name in every if name not in trunk)

    def _check_copies(self) -> None:
        """A tensor that repeats another, a tied head or a head's embedding, must be equal to it."""
        doubled = dict(copies(self.config))
        if self.config.get("tie_word_embeddings"):
            doubled["lm_head.weight"] = architecture(self.config).embedding(self.config).name
        for copy, original in doubled.items():
            if copy not in self.stored or original not in self.stored:
                continue
            left, right = self.stored[copy], self.stored[original]
            if left.shape != right.shape:
                raise ConvertError(
                    f"{self.folder}: {copy} has shape {left.shape}, {original}, which it repeats, {right.shape}"
                )
            rows, cols = matrix(Source(copy, left.shape))
            step = max(1, PIECE // (cols * 4))
            for r0 in range(0, rows, step):
                r1 = min(rows, r0 + step)
                if not self.rows(copy, r0, r1).equal(self.rows(original, r0, r1)):
                    raise ConvertError(
                        f"{self.folder}: {copy} differs from {original}, which it repeats by config.json, in rows {r0} "
                        f"to {r1 - 1}; if they are two tensors, set tie_word_embeddings to false in config.json"
                    )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Disk name -> shape of every tensor of the model that is there."""
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        """The type of the tensor's values: what is stored, FP8 multiplied out, fp32 where it must be."""
        if name in self._fp32:
            return torch.float32
        return self.plain_dtype(name)

    def plain_dtype(self, name: str) -> torch.dtype:
        """The type that is stored, or that FP8 is multiplied out to."""
        if name not in self.scales:
            return self.stored[name].dtype
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return _TYPES.get(named, torch.bfloat16) if isinstance(named, str) else torch.bfloat16

    def rows(self, name: str, r0: int, r1: int) -> torch.Tensor:
        """Rows [r0, r1) of the tensor seen as a matrix."""
        stored = self.stored[name]
        out = torch.empty(r1 - r0, prod(stored.shape[1:]), dtype=stored.dtype)
        read_rows(stored, r0, r1, out)
        if name not in self.scales:
            return out
        place = self.scales[name]
        scales = torch.empty(place.shape, dtype=place.dtype)
        read_rows(place, 0, place.shape[0], scales)
        return fp8.dequantise(out, scales, self.plain_dtype(name), r0)

    def fill(self, name: str, r0: int, r1: int, into: torch.Tensor) -> None:
        """Rows [r0, r1) into a contiguous matrix of any type; casts round to nearest even, a piece at a time."""
        stored = self.stored[name]
        if stored.dtype == into.dtype and name not in self.scales:
            read_rows(stored, r0, r1, into)
            return
        step = max(1, PIECE // max(1, into.shape[1] * 4))
        for low in range(r0, r1, step):
            high = min(r1, low + step)
            into[low - r0 : high - r0].copy_(self.rows(name, low, high))

    def read(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Every source of a unit, whole."""
        found = {}
        for source in unit.sources:
            out = torch.empty(matrix(source), dtype=self.dtype(source.name))
            self.fill(source.name, 0, out.shape[0], out)
            found[source.name] = out.view(source.shape)
        return found

    def head_names(self) -> set[str]:
        """The tensors of the prediction heads, where they are there."""
        return set(self._shapes) - set(hf_tensors(self.config))

    def left(self) -> list[str]:
        """Tensors beyond the model that a later export must have again: heads that config.json does not count."""
        known = hf_tensors(self.config, True)
        table: Any = architecture(self.config)
        rules = [*table.CARRIED, *heads_names(self.config)]
        repeated = copies(self.config)
        return [
            name
            for name in self.stored
            if name not in known and name not in repeated and any(re.fullmatch(rule, name) for rule in rules)
        ]


def _refuse_pickles(folder: Path) -> None:
    if not folder.is_dir():
        raise ConvertError(
            f"{folder} is no folder; expected a Hugging Face model folder with config.json and safetensors"
        )
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return
    for pattern in _PICKLED:
        for path in sorted(folder.glob(pattern)):
            raise ConvertError(
                f"{folder} holds its weights in {path.name}, which would have to be unpickled and could run code; expected "
                f"{SINGLE} or {INDEX}: save the model again with transformers' save_pretrained, which writes safetensors"
            )
