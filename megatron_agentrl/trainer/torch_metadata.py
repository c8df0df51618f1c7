"""The `.metadata` of a distributed checkpoint, read without running what stands in it. No megatron-core.

The file is a pickle by torch's format, and a pickle may name any function to call. Here each class that torch or
megatron-core writes has an inert stand-in, which only keeps what it is given; any other name is refused before it is
imported. Chunks are checked: inside their tensor, apart from one another, and together all of it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

METADATA = ".metadata"
#: What megatron-core keeps beside tensors, by the beginning of the key.
BESIDE = ("optimizer.", "rng", "common_state")


class PoisonedMetadata(ValueError):
    """The file names something that no checkpoint needs, or is no metadata."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor and the record that holds it: bytes [start, start + length) of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint: global shape, type, chunks that cover it exactly once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]


class _Inert:
    """Keeps what the pickle gives it: arguments, then state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)
        else:
            self.state = state


class _Index(_Inert):
    """A key of the storage table, equal where torch's own is."""

    fqn: str
    offset: Any = None

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self.fqn, self.offset) == (other.fqn, other.offset)


_TORCH = "torch.distributed.checkpoint."
_KNOWN: dict[tuple[str, str], Any] = {("torch", "Size"): torch.Size, (_TORCH + "metadata", "MetadataIndex"): _Index}
for _module, _names in {
    _TORCH + "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING",
    _TORCH + "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    _TORCH + "filesystem": "_StorageInfo _StoragePrefix",
    "torch.serialization": "_get_layout",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "pathlib": "Path PosixPath",
}.items():
    for _name in _names.split():
        _KNOWN[_module, _name] = type(_name, (_Inert,), {})
for _dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
    _KNOWN["torch", str(_dtype).removeprefix("torch.")] = _dtype


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise PoisonedMetadata(f"it names {module}.{name}, which no checkpoint needs; nothing of it was run")
        return _KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise PoisonedMetadata(f"it holds a persistent id {pid!r}, which no checkpoint needs")


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a distributed checkpoint: key -> what is stored. Objects that are no tensors are left out.

    Raises:
        PoisonedMetadata: the file names anything but the classes of the format, is damaged, points outside of the
            folder, or its chunks do not cover a tensor exactly once.
    """
    path = folder / METADATA
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes())).load()
        tables, places = found.state_dict_metadata, found.storage_data
        entries = [(str(key), entry) for key, entry in tables.items() if hasattr(entry, "chunks")]
        return {key: _tensor(key, entry, places) for key, entry in entries}
    except PoisonedMetadata as error:
        raise PoisonedMetadata(f"{path}: {error}; use a checkpoint from a source that you trust") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise PoisonedMetadata(f"{path} is damaged ({error!r}); use another copy of the checkpoint") from error


def _tensor(key: str, entry: Any, places: dict[Any, Any]) -> StoredTensor:
    shape, dtype = tuple(map(int, entry.size)), entry.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise PoisonedMetadata(f"{key} has the type {dtype!r}")
    found = []
    for chunk in entry.chunks:
        index = _Index()
        index.fqn, index.offset = key, chunk.offsets
        place = places[index]
        file = place.relative_path
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise PoisonedMetadata(f"{key} points to {file!r}; only plain file names inside the folder are read")
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        found.append(StoredChunk(offsets, sizes, file, int(place.offset), int(place.length)))
    _check_cover(key, shape, found)
    return StoredTensor(shape, dtype, tuple(found))


def _check_cover(key: str, shape: tuple[int, ...], found: list[StoredChunk]) -> None:
    """Each chunk inside, no two the same, no two overlapping, and as many elements as the tensor has."""
    for chunk in found:
        inside = all(
            at >= 0 and at + n <= whole for at, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        if not inside:
            raise PoisonedMetadata(f"{key} {shape}: the chunk {chunk.sizes} at {chunk.offsets} lies outside")
    total = sum(prod(chunk.sizes) for chunk in found)
    if total != prod(shape):
        raise PoisonedMetadata(f"{key} {shape}: its chunks hold {total} of {prod(shape)} elements")
    live: list[StoredChunk] = []
    for chunk in sorted(found, key=lambda chunk: chunk.offsets):
        live = [o for o in live if not shape or o.offsets[0] + o.sizes[0] > chunk.offsets[0]]
        for other in live:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(other.offsets, other.sizes, chunk.offsets, chunk.sizes, strict=True)
            ):
                raise PoisonedMetadata(f"{key} {shape}: chunks at {other.offsets} and {chunk.offsets} overlap")
        live.append(chunk)
