"""Two checkpoints of either kind, tensor by tensor and element by element, under Hugging Face names.

Where two tensors have one type their bits are compared, else their values. FP8 blocks count as what they multiply out
to, padding of the vocabulary not at all. config.json and tokenizers are not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from megatron_agentrl.convert import jobs
from megatron_agentrl.convert.dist_folder import DistReader, is_dist
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.hf_source import HfSource
from megatron_agentrl.convert.keys import VOCABULARY_KEYS, matrix
from megatron_agentrl.convert.megatron_source import MegatronSource, model_tensors
from megatron_agentrl.convert.safetensors_io import PIECE
from megatron_agentrl.layout.entries import Source
from megatron_agentrl.layout.megatron import copies

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Readable(Protocol):
    """Tensors by name; groups are read together because they lie together."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def groups(self) -> Sequence[tuple[str, ...]]: ...

    def read(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class Difference:
    """The first difference, as a line to print."""

    text: str


class _Hf:
    def __init__(self, source: HfSource) -> None:
        repeated = [name for name in copies(source.config) if name in source.stored]
        self._source = source
        self._shapes = {**source.shapes(), **{name: source.stored[name].shape for name in [*source.left(), *repeated]}}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(name,) for name in self._shapes]

    def read(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        model = self._source.shapes()
        known = {name: self._source.dtype(name) if name in model else self._source.plain_dtype(name) for name in names}
        found = {}
        for name, dtype in known.items():
            out = torch.empty(matrix(Source(name, self._shapes[name])), dtype=dtype)
            self._source.fill(name, 0, out.shape[0], out)
            found[name] = out
        return found


class _Megatron:
    def __init__(self, source: MegatronSource) -> None:
        self._source, origin = source, source.origin
        self._unit = {name: unit for unit in source.units for name in (s.name for s in unit.sources)}
        repeated = {name: of for name, of in origin.repeated.items() if of in self._unit}
        self._shapes = {
            **source.shapes(),
            **{name: stored.shape for name, stored in origin.carried.items()},
            **{name: source.shapes()[of] for name, of in repeated.items()},
        }
        self._repeated = repeated

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def groups(self) -> Sequence[tuple[str, ...]]:
        model = [tuple(source.name for source in unit.sources) for unit in self._source.units]
        return [*model, *((name,) for name in self._source.origin.carried), *((name,) for name in self._repeated)]

    def read(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name in names:
            if name in found:
                continue
            if name in self._source.origin.carried:
                out = torch.empty(matrix(Source(name, self._shapes[name])), dtype=self._source.origin.dtype(name))

                def put(_: str, rows: torch.Tensor, r0: int, into: torch.Tensor = out) -> None:
                    into[r0 : r0 + rows.shape[0]] = rows

                self._source.origin.carry(name, put, out.dtype)
                found[name] = out
                continue
            original = self._repeated.get(name, name)
            whole = self._source.read(self._unit[original])
            found[name] = whole[original]
            found.update({other: tensor for other, tensor in whole.items() if other in names})
        return {name: found[name].reshape(matrix(Source(name, self._shapes[name]))) for name in names}


class _Keys:
    """A distributed checkpoint whose model is not known: its tensors under their own keys, padding and all."""

    def __init__(self, reader: DistReader) -> None:
        self._reader, self._tensors = reader, model_tensors(reader)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tensor.shape for key, tensor in self._tensors.items()}

    def groups(self) -> Sequence[tuple[str, ...]]:
        return [(key,) for key in self._tensors]

    def read(self, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        found = {}
        for key in names:
            tensor = self._tensors[key]
            out = torch.empty(tensor.shape, dtype=tensor.dtype)
            for chunk in tensor.chunks:
                box = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
                out[box] = self._reader.load(key, chunk)
            found[key] = out.reshape(matrix(Source(key, tensor.shape)))
        return found


def compare(
    left: Path, right: Path, hf: Path | None = None, workers: int = jobs.WORKERS, quiet: bool = False
) -> tuple[Difference | None, int]:
    """The first difference in the order of the model's tensors, or None; and how many tensors were compared.

    Args:
        hf: the Hugging Face folder that a distributed checkpoint began as, where it does not say.

    Raises:
        ConvertError, WeightsError, LayoutError, OSError: one of them cannot be used.
    """
    a, b = _open(left, right, hf)
    shapes, others = a.shapes(), b.shapes()
    for name, shape in shapes.items():
        if name not in others:
            return Difference(f"{name}: {shape} in {left}, not in {right}"), 0
        if others[name] != shape:
            hint = "; pass --hf, padding is not compared then" if name in VOCABULARY_KEYS else ""
            return Difference(f"{name}: shape {shape} in {left}, {others[name]} in {right}{hint}"), 0
    for name in others:
        if name not in shapes:
            return Difference(f"{name}: not in {left}, {others[name]} in {right}"), 0

    groups = list(enumerate(b.groups() if isinstance(b, _Megatron) else a.groups()))
    found: dict[int, str] = {}
    lock = threading.Lock()

    def work(item: tuple[int, tuple[str, ...]]) -> None:
        number, names = item
        if any(other < number for other in found):
            return
        ours, theirs = a.read(names), b.read(names)
        for name in names:
            if text := first_difference(ours[name], theirs[name], shapes[name]):
                with lock:
                    found[number] = f"{name}{text.format(left=left, right=right)}"
                return

    def size(item: tuple[int, tuple[str, ...]]) -> int:
        return sum(4 * prod(shapes[name]) for name in item[1])

    jobs.run(groups, work, lambda item: 3 * size(item), size, workers, "verify", quiet)
    return (Difference(found[min(found)]) if found else None), len(shapes)


def first_difference(a_RC: torch.Tensor, b_RC: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Where two matrices of the tensor's `shape` first differ, with index and both values; None where they are equal."""
    if a_RC.dtype == b_RC.dtype:
        bits = _BITS[a_RC.element_size()]
        ours, theirs = a_RC.view(bits), b_RC.view(bits)
    else:
        ours, theirs = a_RC, b_RC
    step = max(1, PIECE // max(1, a_RC.shape[1] * 8))
    for r0 in range(0, a_RC.shape[0], step):
        x, y = ours[r0 : r0 + step], theirs[r0 : r0 + step]
        if a_RC.dtype != b_RC.dtype:
            x, y = x.double(), y.double()
        same = (x == y) if not x.is_floating_point() else (x == y) | (x.isnan() & y.isnan())
        if bool(same.all()):
            continue
        row, col = divmod(int((~same).flatten().to(torch.uint8).argmax()), a_RC.shape[1])
        row += r0
        index, rest = [row] if shape else [], col
        for length in reversed(shape[1:]):
            index.insert(1, rest % length)
            rest //= length
        values = [f"{float(t[row, col]):.9g} ({str(t.dtype).removeprefix('torch.')})" for t in (a_RC, b_RC)]
        return f"{index}: {values[0]} in {{left}}, {values[1]} in {{right}}"
    return None


def _open(left: Path, right: Path, hf: Path | None) -> tuple[Readable, Readable]:
    for folder in (left, right):
        if not folder.is_dir():
            raise ConvertError(f"{folder} is no folder; expected a Hugging Face folder or a distributed checkpoint")
    known = hf or next((folder for folder in (left, right) if not is_dist(folder)), None)
    if known is None and not any((folder / "hf").is_dir() for folder in (left, right)):
        try:
            return _Megatron(MegatronSource(left)), _Megatron(MegatronSource(right))
        except ConvertError:  # the model of one is not known: both are distributed, so keys can be compared
            return _Keys(DistReader(left)), _Keys(DistReader(right))
    return _opened(left, right, known), _opened(right, left, known)


def _opened(folder: Path, other: Path, known: Path | None) -> Readable:
    if not is_dist(folder):
        return _Hf(HfSource(folder))
    if (folder / "hf").is_dir():
        return _Megatron(MegatronSource(folder))
    return _Megatron(MegatronSource(folder, known or other / "hf"))
