"""What of a model is no parameter of the trainer, and where a distributed checkpoint finds it again.

A converted checkpoint has it in its own `hf/`: config.json, tokenizer, chat template and the other small files byte for
byte, `carried.safetensors` with the tensors that no parameter holds (prediction heads that are not trained), and
`repeated.json` with the names that the folder stored a second time. A checkpoint of a run has it in the Hugging Face
folder that the run started from, which its recipe names.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_agentrl.convert import jobs
from megatron_agentrl.convert.errors import ConvertError
from megatron_agentrl.convert.hf_source import HfSource
from megatron_agentrl.convert.keys import matrix
from megatron_agentrl.convert.safetensors_io import PIECE, Stored, Writer, header, read_rows
from megatron_agentrl.layout.entries import Source
from megatron_agentrl.layout.megatron import copies
from megatron_agentrl.recipe.weight_files import INDEX, SINGLE
from megatron_agentrl.trainer.hf_folder import copy_side_files
from megatron_agentrl.trainer.weights_io import read_config

CARRIED, REPEATED = "carried.safetensors", "repeated.json"


@dataclass(frozen=True)
class Origin:
    """The small files' folder, its config, tensors beyond the parameters, and names stored twice (name -> original)."""

    folder: Path
    config: dict[str, Any]
    carried: dict[str, Stored]
    repeated: dict[str, str]
    source: HfSource | None = None

    def carry(self, name: str, into: Any, dtype: torch.dtype) -> None:
        """Call `into(name, rows, first row)` with all of a carried tensor, in `dtype`."""
        stored = self.carried[name]
        rows, cols = matrix(Source(name, stored.shape))
        step = max(1, PIECE // (cols * 4))
        for r0 in range(0, rows, step):
            r1 = min(rows, r0 + step)
            if self.source is not None:
                part = self.source.rows(name, r0, r1)
            else:
                part = torch.empty(r1 - r0, cols, dtype=stored.dtype)
                read_rows(stored, r0, r1, part)
            into(name, part.to(dtype), r0)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a carried tensor's values."""
        if self.source is not None and name in self.source.shapes():
            return self.source.dtype(name)
        return self.source.plain_dtype(name) if self.source is not None else self.carried[name].dtype


def keep_origin(hf: HfSource, folder: Path, heads: Collection[str]) -> None:
    """Write the `hf/` of a converted checkpoint; `heads` are tensors that became no parameters."""
    folder.mkdir()
    copy_side_files(hf.folder, folder)
    names = [*sorted(heads), *hf.left()]
    if names:
        types = {name: (hf.dtype(name), hf.stored[name].shape) for name in names}
        writer = Writer(folder / CARRIED, types)
        origin = Origin(hf.folder, hf.config, {name: hf.stored[name] for name in names}, {}, hf)

        def write(name: str) -> None:
            origin.carry(name, writer.write, types[name][0])

        size = {name: hf.stored[name].nbytes for name in names}
        jobs.run(names, write, lambda _: 2 * PIECE, size.__getitem__, 1, "untrained heads", quiet=True)
        writer.close()
    repeated = {name: original for name, original in copies(hf.config).items() if name in hf.stored}
    (folder / REPEATED).write_text(json.dumps(repeated, indent=1) + "\n")


def find_origin(checkpoint: Path, given: Path | None, heads: bool) -> Origin:
    """The origin of a distributed checkpoint: `given`, else its `hf/`, else the folder that its run's recipe names.

    Args:
        heads: the checkpoint has the prediction heads as parameters; then they are not carried.

    Raises:
        ConvertError: there is none, or it cannot be read.
    """
    own = checkpoint / "hf"
    folder = given or (own if own.is_dir() else _recipe_model(checkpoint))
    if folder is None:
        raise ConvertError(
            f"{checkpoint} has no hf/ and lies in no run folder with a recipe.yaml: which model it is is unknown; pass "
            "--hf with the Hugging Face folder that the run started from"
        )
    config = read_config(folder)
    if (folder / REPEATED).is_file():
        carried = header(folder / CARRIED) if (folder / CARRIED).is_file() else {}
        repeated = json.loads((folder / REPEATED).read_text())
        return Origin(folder, config, {} if heads else carried, repeated)
    if not ((folder / INDEX).is_file() or (folder / SINGLE).is_file()):
        return Origin(folder, config, {}, {})  # a model that began with random weights
    source = HfSource(folder)
    untrained = set() if heads else source.head_names()
    names = [*sorted(untrained), *source.left()]
    repeated = {name: original for name, original in copies(config).items() if name in source.stored}
    return Origin(folder, config, {name: source.stored[name] for name in names}, repeated, source)


def _recipe_model(checkpoint: Path) -> Path | None:
    """model.path of the recipe.yaml in the run folder above `checkpoint` (runs/NAME/checkpoints/step_N)."""
    import yaml

    for folder in checkpoint.absolute().parents[:3]:
        path = folder / "recipe.yaml"
        if path.is_file():
            try:
                found = yaml.safe_load(path.read_text())["model"]["path"]
            except (yaml.YAMLError, KeyError, TypeError) as error:
                raise ConvertError(f"{path} names no model.path ({error!r}); pass --hf FOLDER") from error
            if not Path(found).is_dir():
                raise ConvertError(
                    f"{path}: model.path={found} is not a folder seen from {Path.cwd()}; pass --hf FOLDER, or start where "
                    "the run was started"
                )
            return Path(found)
    return None
