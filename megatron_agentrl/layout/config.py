"""Reading a Hugging Face config.json as a plain dict, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_agentrl.layout.boxes import LayoutError

Config = Mapping[str, Any]


def size(config: Config, *keys: str) -> int:
    """The first of `keys` that config.json holds, as a positive int. Raises LayoutError naming the keys."""
    for key in keys:
        value = config.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"config.json: {key}={value!r}, expected a positive integer")
            return value
    raise LayoutError(f"config.json of a {config.get('model_type')!r} model has no {' or '.join(keys)}")


def refuse(config: Config, **expected: Any) -> None:
    """Raise LayoutError where a switch has another value than the one the tables are written for."""
    for key, value in expected.items():
        found = config.get(key, value)
        if found != value and (found or value):
            raise LayoutError(f"config.json: {key}={found!r} has no layout here; only {key}={value!r} has")
