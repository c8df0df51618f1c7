"""Which safetensors files a Hugging Face folder consists of: one, or the shards that its index names.

Read here for `check` and by the trainer alike. No tensor and no header is opened; those are `trainer.hf_headers`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class WeightsError(ValueError):
    """A checkpoint folder or a model that does not hold what it should; the message names the tensor or file."""


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor -> file of the folder's index, or None where one file holds everything. Raises WeightsError."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            raise WeightsError(f"{folder} has neither {SINGLE} nor {INDEX}")
        return None
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        named = list(entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no safetensors index: {error!r}") from error
    for name, file in named:
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise WeightsError(f"{path}: {name} points to {file!r}; only plain file names inside the folder are read")
    return entries


def weight_file_problems(folder: Path) -> Iterator[str]:
    """What is wrong with the files of a folder whose weights are to be read."""
    way_out = "put the safetensors there, or set model.init=random"
    try:
        index = read_index(folder)
    except WeightsError as error:
        yield f"model.path: {error}; {way_out}"
        return
    files = set((index or {}).values())
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        yield f"model.path={folder}: {len(missing)} of {len(files)} weight files are missing ({missing[0]}); {way_out}"
