"""Names and shapes of a folder's safetensors, from their headers alone, held against what config.json implies.

Imports no torch: `check` asks here, before a process starts or a weight is read, whether the folder holds the model
that its config.json describes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.fp8 import scales_of
from megatron_agentrl.layout.megatron import architecture, heads_names, hf_tensors
from megatron_agentrl.recipe.weight_files import INDEX, SINGLE, WeightsError, read_index

Shape = tuple[int, ...]


class Stored(NamedTuple):
    """Where a tensor lies: file of the folder, name inside it, shape, and what safetensors calls its type."""

    file: str
    name: str
    shape: Shape
    kind: str = ""


def locate(folder: Path, aliases: Mapping[str, str]) -> dict[str, Stored]:
    """Every tensor of the folder under its canonical name.

    The headers of all shards are read, so that a missing, cut or doubly-held tensor is an error here.

    Args:
        folder: with `model.safetensors`, or shards and their index.
        aliases: other spelling -> canonical name.

    Raises:
        WeightsError: naming the file or tensor.
    """
    index = read_index(folder)
    held: dict[str, Stored] = {}
    for file in sorted(set(index.values())) if index is not None else [SINGLE]:
        for name, (shape, kind) in _header(folder / file).items():
            if name in held:
                raise WeightsError(f"{folder}: {name} is held by both {held[name].file} and {file}")
            held[name] = Stored(file, name, shape, kind)
    for name, file in (index or {}).items():
        if name not in held or held[name].file != file:
            raise WeightsError(f"{folder}: {INDEX} says that {file} holds {name}, but it does not")
    found: dict[str, Stored] = {}
    for name, stored in held.items():
        known = aliases.get(name, name)
        if known in found:
            raise WeightsError(f"{folder}: {name} and {found[known].name} are the same tensor under two names")
        found[known] = stored
    return found


def without_scales(folder: Path, found: Mapping[str, Stored]) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """(the tensors of a model, FP8 weight -> its scales), from what `locate` found. Raises WeightsError where the two do
    not belong together."""
    try:
        pairs = scales_of({n: s.shape for n, s in found.items()}, {n: s.kind for n, s in found.items()})
    except LayoutError as error:
        raise WeightsError(f"{folder}: {error}") from error
    scales = set(pairs.values())
    tensors = {name: stored for name, stored in found.items() if name not in scales}
    return tensors, {weight: found[scale] for weight, scale in pairs.items()}


def _header(path: Path) -> dict[str, tuple[Shape, str]]:
    if not path.is_file():
        raise WeightsError(f"{path} is missing, though the index names it")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise WeightsError(f"{path} is cut or damaged: {error}") from error
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error


def differences(config: Mapping[str, Any], shapes: Mapping[str, Shape], heads: bool = False) -> list[str]:
    """What tells a checkpoint with these tensors from the model of `config`: missing, misshapen, unexpected.

    With `heads` its multi-token-prediction heads must be there; without they may be. Raises LayoutError where config.json has no layout.
    """
    expected = hf_tensors(config, heads)
    found = [f"missing {name} {shape}" for name, shape in expected.items() if name not in shapes]
    for name, shape in shapes.items():
        if name in expected and shape != expected[name]:
            found.append(f"{name} has shape {shape}, config.json implies {expected[name]}")
    left = (name for name in shapes if name not in expected)
    return found + [f"unexpected {name} {shapes[name]}" for name in left if not _may_stay(config, name)]


def left_aside(config: Mapping[str, Any], shapes: Mapping[str, Shape], heads: bool = False) -> list[str]:
    """Tensors of the checkpoint that no parameter takes (with `heads`, of a model that has its prediction heads)."""
    expected = hf_tensors(config, heads)
    return [name for name in shapes if name not in expected]


def _may_stay(config: Mapping[str, Any], name: str) -> bool:
    """A tied head that was saved all the same, or what the architecture ignores by name."""
    rules = [*architecture(config).IGNORED, *heads_names(config)]
    tied = name == "lm_head.weight" and bool(config.get("tie_word_embeddings"))
    return tied or any(re.fullmatch(rule, name) for rule in rules)


def some(problems: Sequence[str], limit: int = 10) -> str:
    """The first of many problems, and how many more there are."""
    rest = f"; and {len(problems) - limit} more" if len(problems) > limit else ""
    return "; ".join(problems[:limit]) + rest
