"""Demonstrations of the warm start: chats whose assistant turns are trained on.

Only reading and order; which tokens carry loss is decided where the chat is rendered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatron_agentrl.data.jsonl import check_messages, kind, read_objects
from megatron_agentrl.data.stream import Stream
from megatron_agentrl.recipe.errors import RecipeError


class Demonstration(msgspec.Struct, frozen=True):
    """One chat in OpenAI's message form, with the tools it was shown, if any."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def read_demonstrations(path: str | Path) -> list[Demonstration]:
    """Demonstrations of a JSONL file (`.gz` is unpacked), each `{"messages": [...], "tools"?: [...]}`.

    Raises RecipeError, naming file and line, for anything else and for a chat without an assistant turn.
    """
    demonstrations = []
    for number, record in read_objects(path):
        at = f"{path}:{number}"
        if unknown := sorted(set(record) - {"messages", "tools"}):
            raise RecipeError(f"{at}: unknown key {unknown[0]}; a demonstration has messages and, if any, tools")
        messages = check_messages(record.get("messages"), at)
        if not any(message["role"] == "assistant" for message in messages):
            raise RecipeError(f"{at}: no assistant message, so nothing to train on; take the line out")
        tools = record.get("tools")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise RecipeError(f"{at}: tools is {kind(tools)}, expected a list of objects")
        demonstrations.append(Demonstration(messages, tools))
    return demonstrations


def batch_indices(size: int, batch: int, step: int, seed: int) -> list[int]:
    """Indices of the `batch` demonstrations of `step` >= 0: shuffled passes over `size`, cut into batches.

    A pure function, so a run resumed at a step sees what it would have seen. A batch may span two passes.
    """
    stream = Stream(size, seed)
    return [stream.at(position).prompt for position in range(step * batch, (step + 1) * batch)]
