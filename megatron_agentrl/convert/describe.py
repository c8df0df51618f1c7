"""What a checkpoint holds, from headers and tables alone: no weight is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from megatron_agentrl.convert.dist_folder import DistReader, is_dist
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.hf_source import HfSource
from megatron_agentrl.convert.megatron_source import model_tensors
from megatron_agentrl.convert.origin import find_origin
from megatron_agentrl.layout.megatron import heads_pattern, layer_pattern
from megatron_agentrl.recipe.weight_files import WeightsError
from megatron_agentrl.trainer.torch_metadata import BESIDE

_LETTERS = {"M": "Mamba-2", "*": "attention", "+": "latent attention", "E": "mixture of experts", "-": "MLP"}
#: (name, shape, type, bytes) of one tensor.
Tensor = tuple[str, tuple[int, ...], str, int]


def describe(folder: Path, hf: Path | None = None) -> tuple[list[tuple[str, str]], list[Tensor]]:
    """Rows (what, value) of the summary, and every tensor.

    Raises:
        ConvertError, WeightsError, LayoutError, OSError: the folder is no checkpoint that can be used.
    """
    if not folder.is_dir():
        raise ConvertError(f"{folder} is no folder; expected a Hugging Face folder or a distributed checkpoint")
    return _distributed(folder, hf) if is_dist(folder) else _hugging_face(folder)


def _hugging_face(folder: Path) -> tuple[list[tuple[str, str]], list[Tensor]]:
    source = HfSource(folder)
    held = {**source.stored, **{f"{name}_scale_inv": stored for name, stored in source.scales.items()}}
    tensors = [(name, stored.shape, _short(stored.dtype), stored.nbytes) for name, stored in held.items()]
    rows = [("kind", "Hugging Face folder"), *_architecture(source.config)]
    rows.append(("prediction heads", _heads(source.config, "stored" if source.heads else "not stored")))
    rows += [*_counts(tensors), ("files", str(len({stored.file for stored in held.values()})))]
    rows.append(("beside the weights", ", ".join(_side(folder)) or "nothing"))
    return rows, tensors


def _distributed(folder: Path, hf: Path | None) -> tuple[list[tuple[str, str]], list[Tensor]]:
    reader = DistReader(folder)
    weights = model_tensors(reader)
    rows = [("kind", "distributed checkpoint (torch_dist), " + _maker(reader.mark))]
    trained = any(key.startswith("mtp.") for key in weights)
    try:
        origin = find_origin(folder, hf, trained)
    except (ConvertError, WeightsError) as error:
        rows.append(("architecture", f"not known: {error}"))
    else:
        rows += _architecture(origin.config)
        state = "parameters" if trained else "carried" if origin.carried else "not stored"
        rows.append(("prediction heads", _heads(origin.config, state)))
        rows.append(("config and tokenizer", str(origin.folder)))
    rows.append(("cut by", _topology(reader.mark)))
    tensors = [
        (key, tensor.shape, _short(tensor.dtype), prod(tensor.shape) * tensor.dtype.itemsize)
        for key, tensor in weights.items()
    ]
    rows += _counts(tensors)
    beside = [key for key in reader.tensors if key.startswith(BESIDE)]
    rows.append(("chunks", str(sum(len(tensor.chunks) for tensor in weights.values()))))
    rows.append(("optimizer state", f"{len(beside)} tensors" if beside else "none"))
    files = list(folder.glob("*.distcp"))
    rows.append(
        ("files", f"{len(files)}, {_bytes(sum(path.stat().st_size for path in files))} with everything in them")
    )
    return rows, tensors


def _maker(mark: Mapping[str, Any]) -> str:
    return "converted" if mark.get("converted") else f"step {mark.get('step')}"


def _topology(mark: Mapping[str, Any]) -> str:
    layout = {key: value for key, value in (mark.get("layout") or {}).items() if key != "world"}
    if mark.get("vpp", 1) > 1:
        layout["vpp"] = mark["vpp"]
    return " ".join([*(f"{key}={value}" for key, value in layout.items()), f"world={mark.get('world')}"])


def _architecture(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    pattern = layer_pattern(config)
    kinds = Counter(pattern)
    yield "architecture", str(config["model_type"])
    yield "layers", f"{len(pattern)}: " + ", ".join(f"{count} {_LETTERS[letter]}" for letter, count in kinds.items())
    if "E" in pattern:
        count = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
        yield "experts", f"{count} a layer, {config.get('num_experts_per_tok')} for each token"
    tied = "tied head" if config.get("tie_word_embeddings") else "head of its own"
    yield "hidden, vocabulary", f"{config['hidden_size']}, {config['vocab_size']} ({tied})"


def _heads(config: Mapping[str, Any], state: str) -> str:
    count = heads_pattern(config)[1]
    return f"{count}, {state}" if count else "none"


def _counts(tensors: list[Tensor]) -> Iterator[tuple[str, str]]:
    elements, sizes = Counter[str](), Counter[str]()
    for _, shape, dtype, count in tensors:
        elements[dtype] += prod(shape)
        sizes[dtype] += count
    yield "tensors", f"{len(tensors):,}"
    yield "parameters", f"{elements.total():,}"
    for dtype, count in elements.most_common():
        yield f"  {dtype}", f"{count:,} ({_bytes(sizes[dtype])})"
    largest = max(tensors, key=lambda tensor: tensor[3])
    yield "size, largest tensor", f"{_bytes(sizes.total())}, {largest[0]} {_bytes(largest[3])}"


def _side(folder: Path) -> list[str]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    return [name for name in names if (folder / name).is_file()]


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(count: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count} B"
        count = count / 1000  # type: ignore[assignment]
    raise AssertionError


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"{what:<{width}}  {value}" for what, value in rows)


def as_json(rows: list[tuple[str, str]], tensors: list[Tensor]) -> str:
    """The same for programs."""
    listed = [{"name": n, "shape": list(shape), "dtype": dtype, "bytes": count} for n, shape, dtype, count in tensors]
    return json.dumps({"summary": {what.strip(): value for what, value in rows}, "tensors": listed}, indent=1)
