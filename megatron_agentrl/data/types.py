"""What a prompt source yields."""

from __future__ import annotations

from typing import Any

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """One question. `messages` are OpenAI chat messages; `metadata` holds every other key of the data file."""

    prompt_id: str
    messages: list[dict[str, Any]]
    answer: str | None = None
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


class PromptSets(msgspec.Struct, frozen=True):
    """The prompts of a run. `held_out` may be empty: then there is nothing to evaluate on."""

    train: list[Prompt]
    held_out: list[Prompt]
