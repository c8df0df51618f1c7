"""A Hugging Face folder on disk: safetensors shards read by slice, and written so that they appear whole.

Knows files and indexes, nothing of models or parallel layouts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_agentrl.layout.boxes import matrix_shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Files of a model folder that hold weights or code; an export writes its own weights and carries no code.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".py", ".tmp"}


class WeightsError(ValueError):
    """A checkpoint folder or a model that does not hold what it should; the message names the tensor or file."""


class Checkpoint:
    """The tensors of a folder, read lazily by rows and columns. Use as a context manager.

    The headers of all shards are read at once, so that a missing, cut or doubly-held tensor is an error before
    any weight is used.

    Args:
        folder: with `model.safetensors`, or shards and their index.
        aliases: other spelling -> canonical name; tensors are known under the canonical one.

    Raises:
        WeightsError: naming the file or tensor.
    """

    def __init__(self, folder: Path, aliases: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._at: dict[str, tuple[str, str]] = {}  # canonical name -> (file, name in the file)
        aliases = aliases or {}
        index = self._index()
        holders: dict[str, str] = {}
        for file in sorted(set(index.values())) if index is not None else [SINGLE]:
            for name in self._open(file).keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if name in holders:
                    raise WeightsError(f"{folder}: {name} is held by both {holders[name]} and {file}")
                holders[name] = file
        if index is not None:
            for name, file in index.items():
                if holders.get(name) != file:
                    raise WeightsError(f"{folder}: {INDEX} says that {file} holds {name}, but it does not")
        for name, file in holders.items():
            known = aliases.get(name, name)
            if known in self._at:
                raise WeightsError(f"{folder}: {name} and {self._at[known][1]} are the same tensor under two names")
            self._at[known] = (file, name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def _index(self) -> dict[str, str] | None:
        """Tensor -> file of the index, or None for a single-file folder."""
        path = self.folder / INDEX
        if not path.is_file():
            if not (self.folder / SINGLE).is_file():
                raise WeightsError(f"{self.folder} has neither {SINGLE} nor {INDEX}")
            return None
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            named = list(entries.items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path} is no safetensors index: {error!r}") from error
        for name, file in named:
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise WeightsError(
                    f"{path}: {name} points to {file!r}; only plain file names inside the folder are read"
                )
        return entries

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.folder / file
            if not path.is_file():
                raise WeightsError(f"{path} is missing, though the index names it")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise WeightsError(f"{path} is cut or damaged: {error}") from error
            except OSError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from error
        return self._files[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor."""
        return {name: tuple(self._slice(name).get_shape()) for name in self._at}

    def _slice(self, name: str) -> Any:
        file, stored = self._at[name]
        return self._open(file).get_slice(stored)

    def read(self, name: str, r0: int, r1: int, c0: int, c1: int) -> torch.Tensor:
        """Rows [r0, r1) and columns [c0, c1) of the tensor seen as a matrix; [r1 - r0, c1 - c0]."""
        part = self._slice(name)
        shape = part.get_shape()
        if len(shape) == 2:
            return part[r0:r1, c0:c1]
        rows = part[r0:r1] if shape else self._open(self._at[name][0]).get_tensor(self._at[name][1])
        return rows.reshape(r1 - r0, matrix_shape(shape)[1])[:, c0:c1]

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in its stored type and shape."""
        file, stored = self._at[name]
        return self._open(file).get_tensor(stored)


def write_folder(
    folder: Path,
    source_folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    shard_bytes: int,
    config_changes: Callable[[], Mapping[str, Any]] = dict,
) -> bool:
    """Write a stream of tensors as a Hugging Face folder; on ranks whose stream holds only None, write nothing.

    Shards go to a folder beside the target, which takes the final name in one rename when all is on disk, so
    `folder` is complete wherever it exists. An older folder of that name is replaced. Tokenizer, chat template,
    generation config and the other small files come from `source_folder`; config.json too, with
    what `config_changes` gives once all tensors are written.

    Returns:
        True where something was written.

    Raises:
        WeightsError: a name comes twice, or the stream was empty.
    """
    partial = folder.parent / f".{folder.name}.partial"
    writes = False

    def claiming() -> Iterator[tuple[str, torch.Tensor | None]]:
        nonlocal writes
        for name, tensor in tensors:
            if tensor is not None and not writes:
                writes = True
                shutil.rmtree(partial, ignore_errors=True)  # what an export that was killed left
                partial.mkdir(parents=True)
            yield name, tensor

    try:
        if not _write_shards(partial, claiming(), shard_bytes, folder):
            return False
        copy_side_files(source_folder, partial, config_changes())
        _publish(partial, folder)
    except BaseException:
        if writes:  # the folder of another rank is not this one's to remove
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return True


def _write_shards(
    partial: Path, tensors: Iterable[tuple[str, torch.Tensor | None]], shard_bytes: int, folder: Path
) -> bool:
    """Weights and index into `partial`; False where the stream holds only None."""
    shard: dict[str, torch.Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    total, held, seen = 0, 0, set[str]()

    def flush() -> None:
        path = partial / f"shard-{len(files)}.tmp"
        save_file(shard, path, metadata={"format": "pt"})
        files.append((path, list(shard)))
        shard.clear()

    for name, tensor in tensors:
        if name in seen:
            raise WeightsError(f"{name} came twice; a checkpoint holds each tensor once")
        seen.add(name)
        if tensor is None:
            continue
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > shard_bytes:
            flush()
            held = 0
        shard[name] = tensor.contiguous()
        held, total = held + size, total + size
    if not seen:
        raise WeightsError(f"no tensor to write to {folder}")
    if not shard:
        return False
    flush()
    weight_map = {}
    for number, (path, names) in enumerate(files, 1):
        final = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(partial / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return True


def copy_side_files(source: Path, target: Path, config_changes: Mapping[str, Any] | None = None) -> None:
    """Everything of a model folder but weights, indexes and code; config.json with `config_changes`."""
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and path.suffix not in _NOT_COPIED
            and not path.name.endswith(".index.json")
            and not path.name.startswith(".")
        ):
            shutil.copyfile(path, target / path.name)
    if config_changes:
        config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(config_changes)
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _publish(partial: Path, folder: Path) -> None:
    """Make `partial` durable and give it its name; a folder that had the name goes away afterwards."""
    for path in [*partial.iterdir(), partial]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    older = folder.parent / f".{folder.name}.older"
    shutil.rmtree(older, ignore_errors=True)
    if folder.exists():
        folder.rename(older)
    partial.rename(folder)
    shutil.rmtree(older, ignore_errors=True)
