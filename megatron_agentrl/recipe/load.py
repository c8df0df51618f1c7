"""Recipe files and overrides to a typed Recipe, and back.

Hydra's defaults lists say which files a recipe is built from and in which order; the files' scalars and the
overrides are read by one rule that knows each leaf's type (`recipe.values`); OmegaConf holds the result to the
schema. Whether the values make sense together is `recipe.validate`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from megatron_agentrl.recipe.errors import RecipeError, nearest
from megatron_agentrl.recipe.leaves import MISSING, Leaf, flatten, leaves, sections
from megatron_agentrl.recipe.schema import Recipe
from megatron_agentrl.recipe.values import check_run_name, looks_typed, parse, text

#: Leaves that a run may change when it goes on from a checkpoint. Any other change starts a new run.
RESUMABLE = (
    "train.steps",
    "rollout.start_timeout",
    "rollout.request_timeout",
    "on_failure",
    "run_root",
    "run_name",
    "eval.",
    "checkpoint.",
    "ports.",
    "deadlines.",
    "observe.",
)

#: Leaves that belong to one prompt source. An override of `data.source` drops those of the recipe file.
SOURCE_LEAVES = ("data.prompts", "data.eval", "data.task", "data.task_options", "data.size", "data.eval_size")


def load(overrides: Iterable[str], recipes_dir: str | Path, *, needs_file: bool = True) -> Recipe:
    """The recipe that `["recipe=NAME", "key=value", ...]` asks for.

    `recipe=NAME` is `recipes_dir/NAME.yaml`, `recipe=PATH.yaml` that file. Every value is typed by the schema;
    an unknown key, a repeated key, `+key`, `~key` or a value of another type raises RecipeError. Without
    `needs_file` the overrides alone may do, over the schema's defaults (`run_name` is then `unnamed`).
    """
    recipes_dir = Path(recipes_dir)
    pairs = _split(overrides)
    if "recipe" not in pairs and needs_file:
        raise RecipeError(
            f"recipe=NAME is missing; found in {recipes_dir}/: {', '.join(_names(recipes_dir)) or 'none'}"
        )
    path = _recipe_file(pairs.pop("recipe"), recipes_dir) if "recipe" in pairs else None
    values: dict[str, Any] = {}
    for file, prefix in _files(path, recipes_dir) if path else ():
        values.update(_read(file, prefix))
    if "data.source" in pairs:
        # Another source than the file's: what the file says of its own source goes with it.
        for key in SOURCE_LEAVES:
            values.pop(key, None)
    for key, given in pairs.items():
        values[key] = parse(_leaf(key), given)
    recipe = _build(values)
    if recipe.run_name is None:
        recipe.run_name = path.stem if path else "unnamed"
    check_run_name(recipe.run_name)
    return recipe


def load_resolved(path: str | Path) -> Recipe:
    """The recipe that `save` wrote: every leaf stands in the file, no defaults list, no overrides."""
    return _build(dict(_read(Path(path), "")))


def save(recipe: Recipe, path: str | Path) -> None:
    """Writes every leaf. Readers see the old file or the whole new one."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with partial.open("w", encoding="utf-8") as file:
        yaml.dump(_plain(dataclasses.asdict(recipe)), file, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@dataclass(frozen=True)
class Change:
    """A leaf whose value differs between two recipes."""

    key: str
    old: Any
    new: Any

    @property
    def resumable(self) -> bool:
        """Whether a run may go on from its checkpoint with the new value."""
        return any(self.key == name or (name.endswith(".") and self.key.startswith(name)) for name in RESUMABLE)

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


def changed(old: Recipe, new: Recipe) -> list[Change]:
    """The leaves that differ, in the order of the schema."""
    before, after = flatten(old), flatten(new)
    return [Change(key, before[key], after[key]) for key in before if before[key] != after[key]]


def documentation() -> list[Leaf]:
    """Every leaf with type, default and documentation, in the order of the schema."""
    return list(leaves().values())


# ---- overrides -------------------------------------------------------------------------------------------------


def _split(overrides: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for override in overrides:
        key, equals, given = override.partition("=")
        if key.startswith(("+", "~")):
            bare = key.lstrip("+~")
            way_out = f"; write {bare}=VALUE" if bare in leaves() else f"; {_unknown(bare)}"
            raise RecipeError(f"{override}: a recipe's keys can be set, not added or removed{way_out}")
        if not equals:
            raise RecipeError(f"{override}: expected key=value{'' if key in leaves() else '; ' + _unknown(key)}")
        if key in pairs:
            raise RecipeError(f"{key} is given twice ({pairs[key]} and {given}); give it once")
        if key != "recipe":
            _leaf(key)
        pairs[key] = given
    return pairs


def _leaf(key: str) -> Leaf:
    if key in leaves():
        return leaves()[key]
    raise RecipeError(_unknown(key))


def _unknown(key: str) -> str:
    if key in sections():
        inside = [name for name in leaves() if name.startswith(key + ".")]
        return f"{key} is a section, not a value; set a key of it, e.g. {inside[0]}"
    if key == "recipe":
        return "recipe is not a key of a recipe; it belongs on the command line (recipe=NAME)"
    return f"unknown key {key}{_hint(key)}"


def _hint(key: str) -> str:
    """A question that names the nearest valid key: the same leaf elsewhere first, then the same section, then any."""
    last = key.rpartition(".")[2]
    section = key.rpartition(".")[0]
    same_leaf = [name for name in leaves() if name.rpartition(".")[2] == last]
    same_section = [name for name in leaves() if name.rpartition(".")[0] == section]
    if same_leaf:
        close = nearest(key, same_leaf, most=3) + same_leaf
        return f"; did you mean {' or '.join(dict.fromkeys(close[:2]))}?"
    for candidates in (same_section, list(leaves())):
        if close := nearest(key, candidates):
            return f"; did you mean {close[0]}?"
    by_leaf = {name.rpartition(".")[2]: name for name in leaves()}
    if close := nearest(last, by_leaf):
        return f"; did you mean {by_leaf[close[0]]}?"
    return "; `megatron-agentrl recipe` lists every key"


#: libyaml reads ten times faster than the Python reader; both are accepted.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# ---- files -----------------------------------------------------------------------------------------------------


def _names(recipes_dir: Path) -> list[str]:
    return sorted(file.stem for file in recipes_dir.glob("*.yaml"))


def _recipe_file(name: str, recipes_dir: Path) -> Path:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not _is_file(path):
            raise RecipeError(
                f"recipe={name}: no such file; give an existing .yaml or the name of one in {recipes_dir}/"
            )
        return path
    if not name:
        raise RecipeError(f"recipe=: give a name; found in {recipes_dir}/: {', '.join(_names(recipes_dir)) or 'none'}")
    check_run_name(name, "recipe", f"a name in {recipes_dir}/ or a path that ends in .yaml")
    path = recipes_dir / f"{name}.yaml"
    if not path.is_file():
        known = _names(recipes_dir)
        close = nearest(name, known)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RecipeError(f"recipe={name}: not in {recipes_dir}/; {hint}found there: {', '.join(known) or 'none'}")
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # no permission on the way, a name that is too long
        raise RecipeError(f"recipe={path}: cannot be reached ({error.strerror}); give a readable file") from error


def _files(path: Path, recipes_dir: Path) -> Iterator[tuple[Path, str]]:
    """The files a recipe is built from, later ones win, each with the key prefix its values stand under."""
    root = _compose(path)
    if not any(key.value == "defaults" for key, _ in root.value):
        yield path, ""
        return
    # Imported here: a recipe without a defaults list, and every process that reads a resolved one, starts without it.
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    if path.suffix != ".yaml":
        raise RecipeError(f"{path}: a recipe with a defaults list is found by its name; rename it to {path.stem}.yaml")
    folder, shared = path.resolve().parent, recipes_dir.resolve()
    search = [f"hydra.searchpath=[{shared.as_uri()}]"] if folder != shared and shared.is_dir() else []
    with initialize_config_dir(str(folder), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            defaults = loader.compute_defaults_list(path.stem, search, RunMode.RUN).defaults
        except (HydraException, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise RecipeError(f"{path}: its defaults list cannot be followed: {reason}") from error
    for entry in defaults:
        config, package = entry.config_path, entry.package or ""
        if config is None or package == "hydra" or package.startswith("hydra."):
            continue
        found = [base / f"{config}.yaml" for base in (folder, shared) if (base / f"{config}.yaml").is_file()]
        if not found:
            raise RecipeError(f"{path}: its defaults list names {config}, which is not in {folder}/ or {shared}/")
        yield found[0], package


def _compose(path: Path) -> yaml.MappingNode:
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise RecipeError(f"{path}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not a YAML text file: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    if root is None:
        return yaml.MappingNode("tag:yaml.org,2002:map", [])
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(f"{path}: expected `key: value` lines at the top level")
    return root


def _read(path: Path, prefix: str) -> dict[str, Any]:
    """Key path -> typed value of one file."""
    values: dict[str, Any] = {}
    root = _compose(path)
    if not prefix or prefix in sections():
        _read_section(path, root, prefix, values)
        return values
    raise RecipeError(f"{path}: stands under {_unknown(prefix)}")


def _read_section(path: Path, node: yaml.MappingNode, prefix: str, values: dict[str, Any]) -> None:
    for key_node, value_node in node.value:
        place = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise RecipeError(f"{place}: found a list or mapping as a key, expected a name")
        key = f"{prefix}.{key_node.value}" if prefix else key_node.value
        if key_node.value == "defaults" and not prefix:
            continue
        if isinstance(value_node, yaml.MappingNode) and key in sections():
            _read_section(path, value_node, key, values)
            continue
        if key not in leaves():
            raise RecipeError(f"{place}: {_unknown(key)}")
        if key in values:
            raise RecipeError(f"{place}: {key} is given twice; give it once")
        if not isinstance(value_node, yaml.ScalarNode):
            raise RecipeError(f"{place}: {key}: found a list or mapping, expected one {leaves()[key].type_name}")
        values[key] = _scalar(place, leaves()[key], value_node)


def _scalar(place: str, leaf: Leaf, node: yaml.ScalarNode) -> Any:
    quoted = bool(node.style)  # None or "" for a bare scalar, by reader
    if quoted and leaf.kind is str and node.value:
        try:
            return text(leaf, node.value)  # quotes say that it is text, whatever it looks like
        except RecipeError as error:
            raise RecipeError(f"{place}: {error}") from error
    if leaf.kind is str and looks_typed(node.value) and node.value.lower() not in ("none", "null"):
        raise RecipeError(
            f'{place}: {leaf.key}: {node.value} is not text to YAML, expected a string; quote it: "{node.value}"'
        )
    if node.value == "~" or not node.value:
        raise RecipeError(f"{place}: {leaf.key}: there is no value; " + ("write null" if leaf.optional else "give one"))
    try:
        return parse(leaf, node.value)
    except RecipeError as error:
        raise RecipeError(f"{place}: {error}") from error


# ---- the typed object ------------------------------------------------------------------------------------------


def _build(values: dict[str, Any]) -> Recipe:
    # OmegaConf holds every value to the schema a second time and makes a fresh object.
    from omegaconf import OmegaConf

    config = OmegaConf.structured(Recipe)
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=False)
    missing = [key for key in leaves() if leaves()[key].default == MISSING and key not in values]
    if missing:
        raise RecipeError(f"{missing[0]} has no value; set it in the recipe file or as {missing[0]}=VALUE")
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    return recipe


def shown(value: Any) -> str:
    """A value as it would be typed on the command line."""
    value = _plain(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.value if isinstance(value, Enum) else value


class _Dumper(yaml.SafeDumper):
    """Quotes every string value, so that no reader can take a run name for a number."""


class _Key(str):
    """A mapping key: written bare."""


def _represent_mapping(dumper: yaml.SafeDumper, mapping: dict[str, Any]) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", {_Key(k): v for k, v in mapping.items()}.items())


_Dumper.add_representer(dict, _represent_mapping)
_Dumper.add_representer(_Key, lambda dumper, key: dumper.represent_scalar("tag:yaml.org,2002:str", str(key)))
_Dumper.add_representer(str, lambda dumper, word: dumper.represent_scalar("tag:yaml.org,2002:str", word, style='"'))
