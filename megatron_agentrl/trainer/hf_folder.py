"""A Hugging Face folder on disk: safetensors shards read by slice, and written so that they appear whole.

Knows files and indexes, nothing of models or parallel layouts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_agentrl.layout.boxes import matrix_shape
from megatron_agentrl.layout.fp8 import BLOCK, blocks
from megatron_agentrl.recipe.weight_files import INDEX, SINGLE, WeightsError
from megatron_agentrl.trainer.complete import publish
from megatron_agentrl.trainer.hf_headers import locate, without_scales

#: Where transformers saves a tokenizer's chat templates beyond the first.
CHAT_TEMPLATES = "additional_chat_templates"
#: Files of a model folder that hold weights or code; an export writes its own weights and carries no code.
_NOT_COPIED = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".py", ".tmp"}


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
        self._at, self._scales = without_scales(folder, locate(folder, aliases or {}))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape of every tensor."""
        return {name: stored.shape for name, stored in self._at.items()}

    def read(self, name: str, r0: int, r1: int, c0: int, c1: int) -> torch.Tensor:
        """Rows [r0, r1) and columns [c0, c1) of the tensor seen as a matrix; [r1 - r0, c1 - c0]. FP8 weights come
        multiplied out, in float32."""
        shape = self._at[name].shape
        if not shape:
            return self.tensor(name).reshape(1, 1)[r0:r1, c0:c1]
        part = self._open(self._at[name].file).get_slice(self._at[name].name)
        if name in self._scales:
            (b0, b1), (d0, d1) = blocks(r0, r1), blocks(c0, c1)
            stored = self._scales[name]
            scales = self._open(stored.file).get_slice(stored.name)[b0:b1, d0:d1]
            return dequantise(part[r0:r1, c0:c1], scales, r0 - b0 * BLOCK, c0 - d0 * BLOCK)
        if len(shape) == 2:
            return part[r0:r1, c0:c1]
        return part[r0:r1].reshape(r1 - r0, matrix_shape(shape)[1])[:, c0:c1]

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor in its shape, and in its stored type where that is not FP8."""
        if name in self._scales:
            return self.read(name, 0, self._at[name].shape[0], 0, self._at[name].shape[1])
        return self._open(self._at[name].file).get_tensor(self._at[name].name)


def dequantise(codes_RC: torch.Tensor, scales: torch.Tensor, row: int = 0, column: int = 0) -> torch.Tensor:
    """Codes times the scales of their blocks of 128 x 128, in float32; [R, C].

    Args:
        codes_RC: float8 e4m3.
        scales: float32, of each block that the codes touch.
        row, column: where in the first block the codes begin.
    """
    by_row = scales.repeat_interleave(BLOCK, 0)[row : row + codes_RC.shape[0]]
    return codes_RC.float() * by_row.repeat_interleave(BLOCK, 1)[:, column : column + codes_RC.shape[1]]


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
        publish(partial, folder, aside=".{}.older")
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
    """Everything of a model folder but weights, indexes and code; config.json with `config_changes`.

    Of sub-folders only the tokenizer's further chat templates: the rest may be anything, a run's own folder too.
    """
    for folder in (source, source / CHAT_TEMPLATES):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (
                path.is_file()
                and path.suffix not in _NOT_COPIED
                and not path.name.endswith(".index.json")
                and not path.name.startswith(".")
            ):
                copy = target / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)
    if config_changes:
        config = json.loads((source / "config.json").read_text(encoding="utf-8")) | dict(config_changes)
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
