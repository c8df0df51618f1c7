"""One rule for turning what a user typed into a value of a leaf's type.

The same rule serves overrides and files. YAML 1.1 alone would read `1e-6` as text, `0123` as 83, `1:30` as 90
and `None` as a truthy word; here the leaf's type decides, and what does not fit is refused.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import Any

from megatron_agentrl.recipe.errors import RecipeError, nearest
from megatron_agentrl.recipe.leaves import Leaf

TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")
_INT = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
_FLOAT = re.compile(r"[+-]?(\d{1,40}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,4})?")
_PLAIN_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


def parse(leaf: Leaf, given: str) -> Any:
    """The value that `given` stands for; RecipeError names the key, what was found and what was expected."""
    given = text(leaf, given)
    if given == "null" and leaf.optional:
        return None
    if given.lower() in ("none", "null"):
        way_out = "write null for no value" if leaf.optional else f"null is not allowed here; give a {leaf.type_name}"
        raise RecipeError(f"{leaf.key}={given}: {way_out}")
    if not given:
        raise RecipeError(f"{leaf.key}=: there is no value after '='; give a {leaf.type_name}")
    if leaf.kind is str:
        return given
    if "," in given:
        raise RecipeError(
            f"{leaf.key}={given}: found {given.count(',') + 1} values, expected one {leaf.type_name}; "
            "start one run for each value"
        )
    if leaf.kind is bool:
        return _bool(leaf, given)
    if leaf.kind is int:
        return _int(leaf, given)
    if leaf.kind is float:
        return _float(leaf, given)
    return _enum(leaf, given)


def text(leaf: Leaf, given: str) -> str:
    """`given` if a recipe may hold it as text; RecipeError otherwise."""
    if "${" in given:
        raise RecipeError(f"{leaf.key}={given}: interpolation is off; write the value itself")
    if any(ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in given):
        raise RecipeError(f"{leaf.key}={given!r}: found a control character or a byte that is not UTF-8; leave it out")
    return given


def looks_typed(text: str) -> bool:
    """True if YAML or a reader could take a bare `text` for something other than a string."""
    typed_by_yaml_1_1 = re.fullmatch(r"[+-]?(0x[\d_a-fA-F]+|0[ob][\d_]+|[\d_:.]*\d[\d_:.]*)", text) is not None
    return (
        typed_by_yaml_1_1
        or _FLOAT.fullmatch(text) is not None
        or text.lower() in (*TRUE, *FALSE, "none", "null", "~", ".nan", ".inf", "-.inf")
    )


def check_run_name(name: str, what: str = "run_name", way_out: str = "e.g. run_name=quickstart-2") -> None:
    """A run name becomes a folder name and stands in commands: a plain word only."""
    if not _PLAIN_WORD.fullmatch(name) or ".." in name:
        raise RecipeError(
            f"{what}={name!r}: expected a plain word of letters, digits, '-', '_' and '.' (no '..', at most 100); "
            f"{way_out}"
        )


def _bool(leaf: Leaf, text: str) -> bool:
    if text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise RecipeError(f"{leaf.key}={text}: expected true or false")


def _int(leaf: Leaf, text: str) -> int:
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and re.search(r"[.eE]", text):
        number = float(text)
        if math.isfinite(number) and number.is_integer() and abs(number) < 2**53:
            return int(number)
    raise RecipeError(f"{leaf.key}={text}: expected a whole number")


def _float(leaf: Leaf, text: str) -> float:
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    raise RecipeError(f"{leaf.key}={text}: expected a finite number, e.g. 0.5 or 1e-6")


def _enum(leaf: Leaf, text: str) -> Enum:
    names = [member.value for member in leaf.kind]  # type: ignore[attr-defined]
    if text in names:
        return leaf.kind(text)
    close = nearest(text, names)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise RecipeError(f"{leaf.key}={text}: expected one of {', '.join(names)}{hint}")
