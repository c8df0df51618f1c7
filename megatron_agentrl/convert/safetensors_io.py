"""Safetensors files read and written piece by piece: the memory used is that of the piece.

The safetensors library maps or holds whole files; a conversion must not. The format is an 8-byte little-endian length,
a JSON header with type, shape and byte range of each tensor, and the bytes. Files that are read are checked by the
library first (`trainer.hf_headers.locate`); tests read what is written here with it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron_agentrl.convert.errors import ConvertError

#: Names of the format, by torch's type.
NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TYPES = {name: dtype for dtype, name in NAMES.items()}
#: Bytes of one read or write.
PIECE = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: its bytes begin at `start`."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def header(path: Path) -> dict[str, Stored]:
    """The tensors of a file whose header the safetensors library has accepted."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(length))
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in TYPES:
            raise ConvertError(
                f"{path}: {name} has the type {entry['dtype']}; expected one of {', '.join(TYPES)}: save it in one of these"
            )
        begin = entry["data_offsets"][0]
        found[name] = Stored(path, name, TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + begin)
    return found


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def read_rows(stored: Stored, r0: int, r1: int, into: torch.Tensor) -> None:
    """Rows [r0, r1) of the tensor seen as a matrix, into the contiguous `into` [r1 - r0, columns] of its type."""
    width = prod(stored.shape[1:]) * stored.dtype.itemsize
    view, at = as_bytes(into), stored.start + r0 * width
    with stored.file.open("rb", buffering=0) as file:
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done : done + PIECE]], at + done)
            if count == 0:
                raise ConvertError(
                    f"{stored.file} ends inside {stored.name}; it was cut while it was read: copy it again"
                )
            done += count


class Writer:
    """One file whose tensors' names, types and shapes are known before; filled in any order, by any thread.

    Space on the disk is taken at once, so that a disk that is too small refuses here.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._at: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            count = prod(shape) * dtype.itemsize
            entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + count]}
            self._at[name] = end
            end += count
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path = path
        self._shape = {name: shape for name, (_, shape) in tensors.items()}
        self._start = 8 + len(text)
        self._missing, self._lock = end, threading.Lock()
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.posix_fallocate(self._file, 0, self._start + end)
            _write(self._file, memoryview(len(text).to_bytes(8, "little") + text), 0)
        except OSError as error:
            os.close(self._file)
            raise OSError(error.errno, error.strerror, str(path)) from error

    def write(self, name: str, rows: torch.Tensor, r0: int = 0) -> None:
        """`rows`, contiguous and in the tensor's type, from row r0 on."""
        width = prod(self._shape[name][1:]) * rows.element_size()
        view = as_bytes(rows)
        try:
            _write(self._file, view, self._start + self._at[name] + r0 * width)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        with self._lock:
            self._missing -= len(view)

    def close(self) -> None:
        """Make the file durable. Raises ConvertError unless as many bytes were written as it has room for."""
        try:
            if self._missing:
                raise ConvertError(f"{self.path}: {self._missing} bytes of its tensors were not written")
            os.fsync(self._file)
        finally:
            os.close(self._file)


def _write(file: int, view: memoryview, at: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done : done + PIECE], at + done)


class Shards:
    """Tensors over several files, named as transformers names them; the index is written with the last."""

    def __init__(
        self, folder: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
    ) -> None:
        groups: list[dict[str, tuple[torch.dtype, tuple[int, ...]]]] = [{}]
        held = 0
        for name, (dtype, shape) in tensors.items():
            count = prod(shape) * dtype.itemsize
            if groups[-1] and held + count > shard_bytes:
                groups.append({})
                held = 0
            groups[-1][name] = (dtype, shape)
            held += count
        self.folder = folder
        self.total = sum(prod(shape) * dtype.itemsize for dtype, shape in tensors.values())
        self._writers: list[Writer] = []
        self._of: dict[str, Writer] = {}
        for number, group in enumerate(groups, 1):
            name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._writers.append(Writer(folder / name, group))
            self._of.update(dict.fromkeys(group, self._writers[-1]))

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            for writer in self._writers:
                writer.close()
            index = {
                "metadata": {"total_size": self.total},
                "weight_map": {name: self._of[name].path.name for name in sorted(self._of)},
            }
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, rows: torch.Tensor, r0: int = 0) -> None:
        """See `Writer.write`."""
        self._of[name].write(name, rows, r0)


def files_of(names: Sequence[Stored]) -> set[Path]:
    """The files that hold these tensors."""
    return {stored.file for stored in names}
