"""A distributed checkpoint's files: torch's record layout, written and read tensor by tensor without a process group.

A `.distcp` file is a row of records, each one tensor as `torch.save` writes it; `.metadata` says which rectangle of
which tensor lies at which bytes of which file. torch's own writer keeps every tensor of a file until the file is done,
so records are written here by the same public calls, and the table by torch's `FileSystemWriter.finish`. Values are
read by `torch.load(weights_only=True)`, the table by `trainer.torch_metadata`. The mark is the trainer's.
"""

from __future__ import annotations

import io
import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.trainer.complete import MARK, IncompleteCheckpoint, check
from megatron_agentrl.trainer.torch_metadata import METADATA, PoisonedMetadata, StoredChunk, StoredTensor, read_metadata

#: What megatron-core reads first: the format's name and version, and the objects that are no tensors (none).
_FORMAT_FILE, _FORMAT_NAME = "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = "common_state/shard_0_1"


class DistWriter:
    """Records of a checkpoint, appended by several threads; each (rank, thread) has a file of its own."""

    def __init__(self, folder: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.folder, self._tensors = folder, tensors
        self._results: list[WriteResult] = []
        self._chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        self._lock, self._threads = threading.Lock(), dict[int, int]()

    def append(self, rank: int, key: str, offsets: tuple[int, ...], tensor: torch.Tensor) -> None:
        """One chunk: `tensor`, contiguous and of its key's type, at `offsets` of the whole."""
        with self._lock:
            number = self._threads.setdefault(threading.get_ident(), len(self._threads))
        index = MetadataIndex(key, offsets)
        result = self._record(f"__{rank}_{number}.distcp", index, tensor)
        with self._lock:
            self._results.append(result)
            self._chunks[key].append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))

    def _record(self, name: str, index: MetadataIndex, what: torch.Tensor | list[Any]) -> WriteResult:
        path = self.folder / name
        with path.open("ab", buffering=0) as file:
            out, start = _Out(file), file.tell()
            try:
                torch.save(what, cast(IO[bytes], out))
            except (OSError, RuntimeError) as error:  # torch says in its own words that a write failed
                cause = out.failure or error
                raise OSError(
                    f"{path}: writing {index.fqn} failed: {getattr(cause, 'strerror', None) or cause}"
                ) from error
            length = file.tell() - start
        return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, start, length))

    def finish(self) -> None:
        """The table and what megatron-core reads first. Raises ConvertError where chunks are missing."""
        index = MetadataIndex(_COMMON)
        self._results.append(self._record("__0_0.distcp", index, [{}]))
        for key, (_, shape) in self._tensors.items():
            written = sum(prod(chunk.sizes) for chunk in self._chunks[key])
            if written != prod(shape):
                raise ConvertError(f"{key}: {written} of {prod(shape)} elements were written")
        table: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=dtype), torch.Size(shape), sorted(self._chunks[key], key=lambda c: c.offsets)
            )
            for key, (dtype, shape) in self._tensors.items()
        }
        table[_COMMON] = BytesStorageMetadata()
        FileSystemWriter(self.folder).finish(Metadata(table), [self._results])
        (self.folder / _FORMAT_FILE).write_text(json.dumps(_FORMAT_NAME))


class _Out:
    """An unbuffered file that writes all it is given, and remembers why it could not."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view, done = memoryview(data).cast("B"), 0
        try:
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            self.failure = error
            raise
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def is_dist(folder: Path) -> bool:
    """Whether the folder is, or was meant to be, a distributed checkpoint."""
    return (folder / METADATA).is_file() or (folder / MARK).is_file()


class DistReader:
    """A complete distributed checkpoint. Safe to read from several threads.

    Raises:
        ConvertError: no mark, a file missing or of another size, a damaged or poisoned table.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.mark = check(folder)
            self.tensors: dict[str, StoredTensor] = read_metadata(folder)
        except (IncompleteCheckpoint, PoisonedMetadata, OSError) as error:
            raise ConvertError(str(error)) from error
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                if chunk.start < 0 or chunk.start + chunk.length > sizes.get(chunk.file, -1):
                    raise ConvertError(
                        f"{folder}: {key} should lie at bytes {chunk.start} to {chunk.start + chunk.length} of "
                        f"{chunk.file}, which has {sizes.get(chunk.file, 'no')} bytes; copy the checkpoint again"
                    )

    def load(self, key: str, chunk: StoredChunk) -> torch.Tensor:
        """The values of one chunk, in its shape."""
        with (self.folder / chunk.file).open("rb") as file:
            view = _Section(file, chunk.start, chunk.length)
            try:
                tensor = torch.load(cast(IO[bytes], view), map_location="cpu", weights_only=True)
            except Exception as error:  # whatever a damaged archive makes of itself
                raise ConvertError(
                    f"{self.folder / chunk.file}: the record of {key} is damaged, or holds more than a tensor "
                    f"({type(error).__name__}: {str(error).split('. ')[0].splitlines()[0][:200]}); copy the checkpoint again"
                ) from error
        expected = self.tensors[key].dtype
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes or tensor.dtype != expected:
            found = (
                f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            )
            raise ConvertError(
                f"{self.folder / chunk.file}: the record of {key} is {found}, expected {chunk.sizes} {expected}; copy "
                "the checkpoint again"
            )
        return tensor


class _Section(io.RawIOBase):
    """Bytes [start, start + length) of a file as a file of their own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count
