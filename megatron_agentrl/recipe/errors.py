"""What is wrong with what a user gave, said in one line: found, expected, one way out.

`RecipeError` is the only exception that the command line turns into exit code 2. Every room may raise it
for bad input (recipes, prompt files, model folders); never for a fault of the program or of a machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RecipeError(ValueError):
    """Bad input. The message is a line for a person and needs no traceback."""


def nearest(name: str, valid: Iterable[str], most: int = 1) -> list[str]:
    """The valid names closest to `name`, best first; empty when none is near."""
    return difflib.get_close_matches(name, list(valid), n=most, cutoff=0.5)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """`did you mean X?`, or the list of what is valid when nothing is near."""
    names = list(valid)
    close = nearest(name, names)
    if close:
        return f"did you mean {close[0]}?"
    return f"valid: {', '.join(sorted(names))}" if names else "there is none to choose from"
