"""Everything that is checked before a process starts: the recipe, the data files, the agent, the memory.

`recipe.validate` judges the recipe alone; this adds what other rooms know. No torch, no model, under a second.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from megatron_agentrl.layout.boxes import LayoutError
from megatron_agentrl.layout.megatron import architecture, hf_tensors
from megatron_agentrl.planner import memory
from megatron_agentrl.recipe.errors import RecipeError, did_you_mean
from megatron_agentrl.recipe.frozen_rules import config_differences
from megatron_agentrl.recipe.schema import Init, Recipe, Source
from megatron_agentrl.recipe.validate import gpu_count, problems, read_config


def check(recipe: Recipe, mode: str = "train") -> list[str]:
    """Raises RecipeError, one line for each problem; returns the lines of a short summary."""
    found = list(problems(recipe, mode))
    if found:
        raise RecipeError("\n".join(found))
    config = read_config(recipe.model.path)
    found = [
        *_agent_problems(recipe, mode),
        *_weight_problems(recipe, config, mode),
        *_memory_problems(recipe, config, mode),
    ]
    if found:
        raise RecipeError("\n".join(found))
    # Tens of thousands of small objects that are all kept until the end: looking for cycles among them takes a
    # sixth of the whole check.
    gc.disable()
    try:
        data = _check_data(recipe, mode)
    finally:
        gc.enable()
    return _summary(recipe, config, mode, data)


def _agent_problems(recipe: Recipe, mode: str) -> Iterator[str]:
    """Finds the agent's class without running its module, which may be slow to import; its packages are imported."""
    if mode in ("sft", "export"):
        return
    name = recipe.agent.cls
    module, colon, cls = name.partition(":")
    if not colon or not cls.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        yield f"agent.cls={name}: expected module:Class, e.g. examples.calculator.agent:CalculatorAgent"
        return
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # whatever the package of the module does when it is imported
        yield f"agent.cls={name}: importing the package of {module} fails: {type(error).__name__}: {error}"
        return
    if spec is None:
        yield f"agent.cls={name}: there is no module {module} (looked from {Path.cwd()}); check the name or start there"
        return
    if spec.origin is None or not spec.origin.endswith(".py"):
        return
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = error.lineno if isinstance(error, SyntaxError) else "?"
        yield f"agent.cls={name}: {spec.origin}:{line}: {getattr(error, 'msg', error)}"
        return
    names = _names(tree)
    if cls not in names and "*" not in names:
        yield f"agent.cls={name}: {spec.origin} has no {cls}; {did_you_mean(cls, names)}"


def _names(tree: ast.Module) -> set[str]:
    """What the module defines, imports or assigns, at whatever depth (`try: import …`, `if …`); `*` after a star import."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _weight_problems(recipe: Recipe, config: dict, mode: str) -> Iterator[str]:
    """Whether config.json has a layout, and whether the folder's weights are that model: by their headers alone."""
    heads = recipe.model.mtp.train and mode != "eval"
    weights = recipe.model.init is not Init.random or mode == "eval"
    yield from _folder_problems("model.path", Path(recipe.model.path), config, heads, weights=weights)
    algorithm = recipe.algorithm
    if mode == "train" and algorithm.kl_coef and algorithm.reference_path is not None:
        yield from _folder_problems("algorithm.reference_path", Path(algorithm.reference_path), config, heads)
    if mode == "train" and algorithm.teacher_coef and algorithm.teacher_path is not None:
        teacher = read_config(algorithm.teacher_path)
        # Heads are read where the teacher takes the policy's own place.
        heads = heads and not config_differences(config, teacher)
        yield from _folder_problems("algorithm.teacher_path", Path(algorithm.teacher_path), teacher, heads)


def _folder_problems(key: str, folder: Path, config: dict, heads: bool, *, weights: bool = True) -> Iterator[str]:
    try:
        expected = hf_tensors(config, heads)
    except LayoutError as error:
        yield f"{key}={folder}: {error}"
        return
    if not weights:
        return
    # Imported here: reading headers takes safetensors and numpy.
    from megatron_agentrl.recipe.weight_files import WeightsError
    from megatron_agentrl.trainer.hf_headers import differences, locate, some, without_scales

    try:
        stored, _ = without_scales(folder, locate(folder, dict(architecture(config).ALIASES)))
    except WeightsError as error:
        yield f"{key}={folder}: {error}; save the model there again"
        return
    if found := differences(config, {name: tensor.shape for name, tensor in stored.items()}, heads):
        yield (
            f"{key}={folder}: the weights are not the model of config.json ({len(stored)} tensors, expected "
            f"{len(expected)}): {some(found, 3)}; put the two files of one model there"
        )


def _memory_problems(recipe: Recipe, config: dict, mode: str) -> Iterator[str]:
    try:
        needed = memory.estimate(recipe, config, gpu=gpu_count() > 0, mode=mode)
    except (KeyError, TypeError, ValueError) as error:  # an entry that is missing, null or of another type
        yield f"{recipe.model.path}/config.json: sizes are missing ({error}); save the model's whole config there"
        return
    free, limit = memory.available_bytes()
    if needed.total > free:
        yield (
            f"memory: the run needs about {needed.total / memory.GIB:.1f} GiB ({needed}), found {free / memory.GIB:.1f} "
            f"GiB free ({limit}); choose a smaller model, bf16, or lower {_largest(recipe, needed)}"
        )


def _largest(recipe: Recipe, needed: memory.Memory) -> str:
    """The knob on the side that takes most."""
    if needed.engine * needed.engines > needed.trainer * needed.trainers:
        return "rollout.kv_cache_gib" if needed.engines == 1 else "rollout.replicas"
    return "train.micro_batch_tokens" if recipe.topology.world == 1 else "topology.world"


def _check_data(recipe: Recipe, mode: str) -> list[str]:
    # Imported here: `export` needs no data.
    from megatron_agentrl.data.demonstrations import read_demonstrations
    from megatron_agentrl.data.prompts import load_prompts

    lines = []
    if recipe.warm_start.steps and mode in ("train", "sft"):
        assert recipe.warm_start.data is not None
        demonstrations = read_demonstrations(recipe.warm_start.data)
        lines.append(f"warm start: {len(demonstrations):,} demonstrations, {recipe.warm_start.steps} steps")
    if mode in ("train", "eval"):
        if recipe.data.source is Source.reasoning_gym:
            # Imported here: a run over JSONL needs none of the package. Drawing the questions can take minutes and is the
            # coordinator's.
            from megatron_agentrl.data.reasoning_gym import check_task

            check_task(recipe.data.task or "", recipe.data.task_options)
            lines.append(f"prompts: {recipe.data.size:,} of {recipe.data.task}, {recipe.data.eval_size:,} held out")
        else:
            prompts = load_prompts(recipe)
            lines.append(f"prompts: {len(prompts.train):,} to train on, {len(prompts.held_out):,} held out")
    return lines


def _summary(recipe: Recipe, config: dict, mode: str, data: list[str]) -> list[str]:
    count = memory.count_parameters(config).total
    topology, algorithm, train = recipe.topology, recipe.algorithm, recipe.train
    needed = memory.estimate(recipe, config, gpu=gpu_count() > 0, mode=mode)
    weights = "random weights" if recipe.model.init is Init.random and mode != "eval" else "the folder's weights"
    lines = [f"model: {recipe.model.path}, {config['model_type']}, {count:,} parameters, {weights}"]
    if mode != "eval":
        dense = topology.world // (topology.tp * topology.pp * topology.cp)
        cut = {name: getattr(topology, name) for name in ("tp", "etp", "cp", "pp", "vpp")}
        sizes = [f"dp {dense}", f"ep {topology.ep}", *(f"{name} {n}" for name, n in cut.items() if n and n > 1)]
        lines.append(f"topology: {topology.world} trainer process(es): {', '.join(sizes)}")
    if mode in ("train", "eval"):
        lines.append(
            f"rollout: {recipe.rollout.replicas} engine(s), {recipe.agent.workers} worker(s) of {recipe.agent.cls}"
        )
    if mode == "train":
        lines.append(
            f"batch: {train.batch} prompts x {algorithm.group_size} trajectories = {train.batch * algorithm.group_size}, "
            f"{train.steps} steps, staleness at most {recipe.staleness.eta}"
        )
        if algorithm.kl_coef:
            start = "the weights that reinforcement starts from"
            lines.append(f"reference: {algorithm.reference_path or start}, kl_coef {algorithm.kl_coef}")
        if algorithm.teacher_coef:
            lines.append(f"teacher: {algorithm.teacher_path}, teacher_coef {algorithm.teacher_coef}")
    return [*lines, *data, f"memory: {needed}"]
