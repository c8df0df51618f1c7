"""`megatron-agentrl inspect`: what one trainer rank holds, as a table or as JSON. Building it is `trainer.inspect`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_agentrl.recipe.errors import RecipeError
from megatron_agentrl.recipe.load import load
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.recipe.topology_rules import LETTERS
from megatron_agentrl.recipe.validate import rank_problems, read_config

if TYPE_CHECKING:  # torch and megatron-core are loaded once the recipe is known to be legal
    from megatron_agentrl.trainer.inspect import Held, Inspection


def run(overrides: Sequence[str], recipes_dir: Path, *, as_json: bool = False) -> int:
    """Print what rank R (`rank=R` among the overrides, else 0) of the topology holds. Raises RecipeError."""
    recipe, rank = recipe_and_rank(overrides, recipes_dir)
    found = list(rank_problems(recipe))
    if not 0 <= rank < recipe.topology.world:
        found.append(f"rank={rank}: expected 0 to {recipe.topology.world - 1} (topology.world - 1)")
    if found:
        raise RecipeError("\n".join(found))
    import torch

    if not torch.cuda.is_available():
        from megatron_agentrl.cpu import megatron as cpu_megatron

        cpu_megatron.install()
    from megatron_agentrl.trainer.inspect import inspect

    inspection = inspect(read_config(recipe.model.path), recipe, rank)
    if as_json:
        print(json.dumps(as_dict(inspection), indent=1))
    else:
        for line in lines(inspection):
            print(line)
    return 0


def recipe_and_rank(overrides: Sequence[str], recipes_dir: Path) -> tuple[Recipe, int]:
    """The recipe of the overrides without `rank=` and with `world=` as `topology.world=`; and the rank."""
    own: dict[str, int] = {}
    others = []
    for override in overrides:
        key, _, text = override.partition("=")
        if key not in ("rank", "world"):
            others.append(override)
        elif key in own:
            raise RecipeError(f"{key} is given twice ({own[key]} and {text}); give it once")
        elif not re.fullmatch(r"\d+", text):
            raise RecipeError(f"{override}: expected a whole number, e.g. {key}=0")
        else:
            own[key] = int(text)
    if "world" in own:
        others.append(f"topology.world={own['world']}")  # given a second time it is refused like any other key
    if not any(override.startswith(("recipe=", "model.path=")) for override in others):
        raise RecipeError("inspect needs recipe=NAME, or model.path=FOLDER with a config.json")
    return load(others, recipes_dir, needs_file=False), own.get("rank", 0)


# ---- the table -------------------------------------------------------------------------------------------------


def lines(found: Inspection) -> Iterator[str]:
    """The report of one rank, line by line."""
    at = found.rank
    yield f"rank {at.rank} of {at.world}, as megatron-core counts it:"
    yield (
        f"  tensor {at.tp} of {at.tp_size}, pipeline {at.pp} of {at.pp_size}, context {at.cp} of {at.cp_size}, "
        f"data {at.dp} of {at.dp_size}"
    )
    yield (
        f"  for experts: expert {at.ep} of {at.ep_size}, expert tensor {at.etp} of {at.etp_size}, "
        f"expert data {at.edp} of {at.edp_size}"
    )
    for chunk, (first, stop) in enumerate(found.chunks):
        stage = chunk * at.pp_size + at.pp
        yield (
            f"  stage {stage} of {at.pp_size * at.vpp_size} (chunk {chunk}): layers {first}-{stop - 1} of "
            f"{len(found.pattern)}, {found.pattern[first:stop]}"
        )
    if experts := [held.expert for held in found.held if held.expert is not None]:
        yield f"  experts {min(experts)}-{max(experts)} of each mixture"
    table = [("parameter", "shape", "type", "MiB", "ranks with the same")]
    for (chunk, layer), group in groupby(found.held, lambda held: (held.chunk, held.layer)):
        alike: dict[tuple[Any, ...], list[Held]] = {}  # the same parameter of several experts shares a line
        for held in group:
            alike.setdefault(_alike(held), []).append(held)
        title = f"chunk {chunk}" if layer is None else f"layer {layer}: {LETTERS.get(found.pattern[layer], '')}"
        table.append((title, "", "", "", ""))
        table += [_row(members) for members in alike.values()]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    yield ""
    for index, row in enumerate(table):
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2])]
        cells += [row[3].rjust(widths[3]), row[4].rjust(widths[4])]
        if index and not row[1]:
            yield ""
        yield "  ".join(cells).rstrip()
    yield ""
    padding = sum(held.padding for held in found.held)
    yield f"{found.elements:,} elements on this rank, {found.nbytes / 2**30:.3f} GiB; {padding:,} of them are padding"
    yield f"{found.checkpoint_elements:,} in the whole model, {found.own:,} of which have this rank as their first holder"


def _alike(held: Held) -> tuple[Any, ...]:
    return (_general(held.name), held.shape) if held.expert is not None else (held.name, held.shape)


def _general(name: str) -> str:
    return re.sub(r"(local_experts\.)\d+|(linear_fc\d\.weight)\d+$", lambda m: (m[1] or m[2]) + "*", name)


def _row(alike: list[Held]) -> tuple[str, str, str, str, str]:
    one = alike[0]
    times = f"{len(alike)} x " if len(alike) > 1 else ""
    name = _general(one.name) if len(alike) > 1 else one.name
    mib = sum(held.nbytes for held in alike) / 2**20
    return (
        "  " + name + (" (copy)" if one.copy else ""),
        times + " x ".join(map(str, one.shape)),
        str(one.dtype).removeprefix("torch."),
        f"{mib:,.3f}",
        f"{len(one.ranks):,}",
    )


def as_dict(found: Inspection) -> dict[str, Any]:
    """The report as plain values: `rank`, `stages`, `parameters`, `totals`."""
    at = found.rank
    return {
        "rank": {name: value for name, value in vars(at).items() if name != "device"},
        "stages": [
            {
                "chunk": chunk,
                "stage": chunk * at.pp_size + at.pp,
                "first_layer": first,
                "stop_layer": stop,
                "pattern": found.pattern[first:stop],
            }
            for chunk, (first, stop) in enumerate(found.chunks)
        ],
        "parameters": [
            {
                "name": held.name,
                "chunk": held.chunk,
                "layer": held.layer,
                "expert": held.expert,
                "shape": list(held.shape),
                "dtype": str(held.dtype).removeprefix("torch."),
                "bytes": held.nbytes,
                "padding": held.padding,
                "holders": len(held.ranks),
                "first_holder": held.ranks[0],
                "copy": held.copy,
                "sources": [
                    {"tensor": box.tensor, "rows": [box.r0, box.r1], "columns": [box.c0, box.c1]}
                    for box in held.sources
                ],
            }
            for held in found.held
        ],
        "totals": {
            "elements": found.elements,
            "bytes": found.nbytes,
            "padding": sum(held.padding for held in found.held),
            "own": found.own,
            "checkpoint": found.checkpoint_elements,
        },
    }
