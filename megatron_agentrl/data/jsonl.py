"""JSON-lines files, plain or gzipped, read in one go with errors that name file and line.

Not a dataset library: one object a line, decoded, nothing more.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.recipe.errors import RecipeError

_decode = msgspec.json.Decoder().decode


def read_objects(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every non-blank line. `.gz` files are unpacked.

    Raises RecipeError for a file that is missing, unreadable or empty and for a line that is not a JSON object.
    """
    path = Path(path)
    empty = True
    for number, line in enumerate(_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        empty = False
        try:
            value = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecipeError(f"{path}:{number}: not JSON ({error}); expected one JSON object a line") from error
        if not isinstance(value, dict):
            raise RecipeError(f"{path}:{number}: found {kind(value)}, expected a JSON object")
        yield number, value
    if empty:
        raise RecipeError(f"{path}: holds no lines; expected one JSON object a line")


def check_messages(value: Any, at: str) -> list[dict[str, Any]]:
    """`value` if it is a non-empty list of chat messages (objects with a text `role`); `at` opens the error."""
    if not isinstance(value, list) or not value:
        raise RecipeError(f"{at}: messages is {kind(value)}, expected a non-empty list of chat messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise RecipeError(f"{at}: messages[{index}] is {kind(message)}, expected an object with role and content")
        if not isinstance(message.get("role"), str):
            raise RecipeError(f"{at}: messages[{index}] has no role; expected system, user, assistant or tool")
        if "content" not in message and "tool_calls" not in message:
            raise RecipeError(f"{at}: messages[{index}] has neither content nor tool_calls; give it one")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise RecipeError(f"{at}: messages[{index}].content is {kind(content)}, expected text")
    return value


def kind(value: Any) -> str:
    """The JSON name of a decoded value's type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return "empty text" if not value else "text"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "an object"


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give an existing JSONL file") from error
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{path}: not a whole gzip file ({error}); write it again or drop the .gz") from error
