"""Whether the recipe's types can be computed: by Transformer Engine's presence, the GPU's generation, the model's sizes.

Torch-free. The numbers are those of Transformer Engine 2.x and megatron-core 0.19.2: each FP8 recipe has a smallest
compute capability and a block that the sides of every product must be multiples of.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_agentrl.recipe.errors import did_you_mean
from megatron_agentrl.recipe.model_kinds import kinds, letters, linears
from megatron_agentrl.recipe.schema import Dtype, Fp8Recipe, GradientDtype, MasterDtype, MomentDtype, Precision, Recipe

INSTALL = "pip install 'megatron-agentrl[gpu]' (transformer-engine)"

#: Linears that can be kept in bf16 under FP8, by the kind of layer they stand in.
BF16_MODULES = ("mamba", "attention", "mlp", "experts", "shared_experts", "latent")


class Fp8Limits(NamedTuple):
    """Compute capabilities [lowest, below) that have the kernels, and the side of a block."""

    lowest: float
    below: float
    block: int


FP8_LIMITS = {
    Fp8Recipe.delayed: Fp8Limits(8.9, 99.0, 16),
    Fp8Recipe.tensorwise: Fp8Limits(8.9, 99.0, 16),
    Fp8Recipe.blockwise: Fp8Limits(9.0, 99.0, 128),
    Fp8Recipe.mxfp8: Fp8Limits(10.0, 12.0, 32),
}

#: Leaves that only some FP8 recipes read.
_ONLY_WITH = {
    "fp8_amax_history": (Fp8Recipe.delayed,),
    "fp8_amax_algorithm": (Fp8Recipe.delayed,),
    "fp8_margin": (Fp8Recipe.delayed,),
    "fp8_weight_gradient": (Fp8Recipe.delayed,),
    "fp8_amax_tp_only": (Fp8Recipe.delayed, Fp8Recipe.tensorwise),
    "fp8_attention": (Fp8Recipe.delayed, Fp8Recipe.tensorwise, Fp8Recipe.mxfp8),
    "fp8_head": (Fp8Recipe.mxfp8,),
    "bf16_first_layers": (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8),
    "bf16_last_layers": (Fp8Recipe.tensorwise, Fp8Recipe.blockwise, Fp8Recipe.mxfp8),
}
_FP8_LEAVES = ("fp8_recipe", "fp8_param_gather", "bf16_modules", "compute_capability", *_ONLY_WITH)
_FP16_LEAVES = ("loss_scale", "loss_scale_min", "loss_scale_window")


def precision_problems(recipe: Recipe, config: dict[str, Any] | None) -> Iterator[str]:
    """One line for each leaf of `precision` that cannot be put in force. `config` is the model's, if it was readable."""
    yield from _fp16_problems(recipe)
    yield from _state_problems(recipe)
    if recipe.precision.fp8 is None:
        for name in _changed(recipe.precision, _FP8_LEAVES):
            yield f"precision.{name}={_shown(recipe.precision, name)}: has no effect without precision.fp8; leave it out"
        return
    yield from _fp8_problems(recipe)
    if config:
        yield from _size_problems(recipe, config)


def transformer_engine_missing() -> str | None:
    """Why Transformer Engine cannot be used here, or None. Looks for its files and imports nothing.

    The package named transformer-engine may be an empty one without the part for torch.
    """
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        return "Transformer Engine is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "pytorch" / "__init__.py").is_file() for folder in folders):
        return "Transformer Engine is installed without its part for torch"
    return None


def compute_capability() -> float | None:
    """The lowest compute capability of this machine's GPUs, from the driver's own tool; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    found = re.findall(r"^\s*(\d+\.\d+)\s*$", asked.stdout, re.MULTILINE)
    return min(map(float, found)) if asked.returncode == 0 and found else None


def names(text: str | None) -> list[str]:
    """The words of a list joined by commas."""
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


def _fp8_problems(recipe: Recipe) -> Iterator[str]:
    precision = recipe.precision
    name = f"precision.fp8_recipe={precision.fp8_recipe.value}"
    if missing := transformer_engine_missing():
        yield f"precision.fp8={precision.fp8.value}: {missing}; {INSTALL}, or set precision.fp8=null"  # type: ignore[union-attr]
    if recipe.model.dtype is not Dtype.bf16:
        yield (
            f"precision.fp8={precision.fp8.value}: needs model.dtype=bf16 for everything that FP8 leaves out, found "  # type: ignore[union-attr]
            f"{recipe.model.dtype.value}; set model.dtype=bf16"
        )
    limits = FP8_LIMITS[precision.fp8_recipe]
    found = precision.compute_capability if precision.compute_capability is not None else compute_capability()
    if found is None:
        yield (
            f"{name}: found no GPU here, expected compute capability {limits.lowest} or later; check it where the "
            "trainers run, or set precision.compute_capability"
        )
    elif not limits.lowest <= found < limits.below:
        fitting = [r.value for r, each in FP8_LIMITS.items() if each.lowest <= found < each.below]
        wanted = f"{limits.lowest} or later" if limits.below > 90 else f"{limits.lowest} to below {limits.below}"
        way_out = f"set precision.fp8_recipe={fitting[-1]}" if fitting else "set precision.fp8=null"
        yield f"{name}: the GPU's compute capability is {found}, expected {wanted}; {way_out}"
    for leaf in _changed(precision, tuple(_ONLY_WITH)):
        if precision.fp8_recipe not in _ONLY_WITH[leaf]:
            fitting = [each.value for each in _ONLY_WITH[leaf]]
            yield (
                f"precision.{leaf}={_shown(precision, leaf)}: has no effect with {name}; leave it out or set "
                f"precision.fp8_recipe={fitting[0]}"
            )
    for word in names(precision.bf16_modules):
        if word not in BF16_MODULES:
            yield f"precision.bf16_modules: {word} is no kind of linear; {did_you_mean(word, BF16_MODULES)}"


def _size_problems(recipe: Recipe, config: dict[str, Any]) -> Iterator[str]:
    precision, topology = recipe.precision, recipe.topology
    kept = set(names(precision.bf16_modules))
    for word in sorted(kept & set(BF16_MODULES) - kinds(config)):
        yield f"precision.bf16_modules={word}: the model has no {word} layers; leave it out"
    per_stage = len(letters(config)) // topology.pp
    for leaf in ("bf16_first_layers", "bf16_last_layers"):
        if (count := getattr(precision, leaf)) > per_stage:
            yield f"precision.{leaf}={count}: a pipeline stage has {per_stage} entries; set {per_stage} or less"
    block = FP8_LIMITS[precision.fp8_recipe].block
    for linear in linears(config, topology):
        if linear.kind not in kept and (linear.rows % block or linear.columns % block):
            joined = ",".join([*names(precision.bf16_modules), linear.kind])
            yield (
                f"precision.fp8_recipe={precision.fp8_recipe.value}: {linear.kind} {linear.name} is {linear.rows} x "
                f"{linear.columns} on a rank, expected multiples of {block}; set precision.bf16_modules={joined}"
            )


def _fp16_problems(recipe: Recipe) -> Iterator[str]:
    precision = recipe.precision
    if recipe.model.dtype is not Dtype.fp16:
        for leaf in _changed(precision, _FP16_LEAVES):
            yield f"precision.{leaf}={getattr(precision, leaf)}: has no effect with model.dtype={recipe.model.dtype.value}; leave it out"
    elif precision.loss_scale < precision.loss_scale_min:
        yield (
            f"precision.loss_scale={precision.loss_scale}: below precision.loss_scale_min = {precision.loss_scale_min}; "
            "raise it"
        )


def _state_problems(recipe: Recipe) -> Iterator[str]:
    """Types of gradients, masters and moments."""
    precision, dtype = recipe.precision, recipe.model.dtype
    phases = [("optimizer", recipe.optimizer)]
    phases += [("warm_start.optimizer", recipe.warm_start.optimizer)] if recipe.warm_start.steps else []
    if dtype is not Dtype.fp32:
        for section, optimizer in phases:
            if optimizer.name == "sgd":
                yield (
                    f"{section}.name=sgd: keeps no fp32 weights beside model.dtype={dtype.value}; set "
                    f"{section}.name=adam or model.dtype=fp32"
                )
    if precision.gradients is GradientDtype.bf16 and dtype is not Dtype.bf16:
        yield f"precision.gradients=bf16: gradients of model.dtype={dtype.value} stay fp32; set model.dtype=bf16 or leave it out"
    changed = _changed(precision, ("masters", "exp_avg", "exp_avg_sq"))
    if not changed:
        return
    first = f"precision.{changed[0]}={_shown(precision, changed[0])}"
    if any(optimizer.name != "adam" for _, optimizer in phases):
        yield f"{first}: only Adam has such state, found optimizer.name=sgd; leave it out"
    if dtype is not Dtype.bf16:
        yield f"{first}: needs model.dtype=bf16, found {dtype.value}; leave it out"
    if missing := transformer_engine_missing():
        yield f"{first}: torch's own Adam keeps fp32 state and {missing}; {INSTALL}, or leave it out"


_DEFAULT = Precision()


def _changed(precision: Precision, leaves: tuple[str, ...]) -> list[str]:
    return [leaf for leaf in leaves if getattr(precision, leaf) != getattr(_DEFAULT, leaf)]


def _shown(precision: Precision, leaf: str) -> str:
    value = getattr(precision, leaf)
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "value", value))


def precision_aware(precision: Precision) -> bool:
    """Whether the optimizer's state has types that only Transformer Engine's Adam keeps."""
    return (
        precision.masters is not MasterDtype.fp32
        or precision.exp_avg is not MomentDtype.fp32
        or precision.exp_avg_sq is not MomentDtype.fp32
    )
