"""The refusal of a conversion."""

from __future__ import annotations


class ConvertError(ValueError):
    """A source, target or topology that cannot be converted; says what was found, what was expected and one way out."""
