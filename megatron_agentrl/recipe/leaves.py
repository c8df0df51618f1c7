"""The schema seen as a flat table: every leaf with its key path, type, default and documentation.

Derived from `recipe.schema` alone, so a new field needs no second entry anywhere.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron_agentrl.recipe import schema

MISSING = "???"


@dataclass(frozen=True)
class Leaf:
    """One value of a recipe. `kind` is str, int, float, bool or an Enum class; `optional` leaves accept null."""

    key: str
    kind: type
    optional: bool
    default: Any
    doc: str

    @property
    def type_name(self) -> str:
        name = "|".join(member.value for member in self.kind) if issubclass(self.kind, Enum) else self.kind.__name__
        return f"{name} or null" if self.optional else name


@functools.cache
def leaves() -> dict[str, Leaf]:
    """Key path -> leaf, in the order of the schema."""
    return {leaf.key: leaf for leaf in _walk(schema.Recipe, "")}


@functools.cache
def sections() -> frozenset[str]:
    """Key paths that hold leaves but are none, e.g. `warm_start.optimizer`."""
    parents: set[str] = set()
    for key in leaves():
        parts = key.split(".")[:-1]
        parents.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return frozenset(parents)


def get(recipe: schema.Recipe, key: str) -> Any:
    """The value at a key path."""
    return functools.reduce(getattr, key.split("."), recipe)


def flatten(recipe: schema.Recipe) -> dict[str, Any]:
    """Key path -> value of every leaf."""
    return {key: get(recipe, key) for key in leaves()}


def _walk(cls: type, prefix: str) -> typing.Iterator[Leaf]:
    hints = typing.get_type_hints(cls)
    docs = _field_docs()[cls.__name__]
    for field in dataclasses.fields(cls):
        kind, optional = _unwrap(hints[field.name])
        key = prefix + field.name
        if dataclasses.is_dataclass(kind):
            yield from _walk(kind, key + ".")
        else:
            yield Leaf(key, kind, optional, field.default, docs.get(field.name, ""))


def _unwrap(hint: Any) -> tuple[type, bool]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        kinds = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(kinds) != 1:
            raise TypeError(f"a recipe field has one type, optionally null; found {hint}")
        return kinds[0], True
    return hint, False


@functools.cache
def _field_docs() -> dict[str, dict[str, str]]:
    """Class name -> field name -> the string that stands below the field."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = docs.setdefault(node.name, {})
        for above, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(above, ast.AnnAssign)
                and isinstance(above.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                fields[above.target.id] = " ".join(below.value.value.split())
    return docs
